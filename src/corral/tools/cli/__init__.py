"""The command line `corral`: one file for each command."""

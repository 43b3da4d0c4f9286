"""The command line: `corral train`, `corral events`."""

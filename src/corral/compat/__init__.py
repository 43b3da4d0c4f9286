"""Interfaces of other libraries, so that scripts that are written for them run on Corral."""

"""The command line: `corral train`, `corral events`."""

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

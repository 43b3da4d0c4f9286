"""`python -m corral`: the command `corral`."""

import sys

from corral.core.import_places import import_from_working_directory

if __name__ == "__main__":
    import_from_working_directory()  # first: a file such as random.py here would be imported by what follows

    from corral.tools.cli.main import main

    sys.exit(main())

"""`python -m corral`: the command `corral`."""

import sys

from corral.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

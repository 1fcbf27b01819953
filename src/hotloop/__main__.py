"""`python -m hotloop` is the command `hotloop`."""

import sys

from hotloop.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

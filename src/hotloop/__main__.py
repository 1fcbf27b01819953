"""`python -m hotloop`, and the command `hotloop`: signals are heard before anything else is imported."""

import os
import sys

import hotloop.startup  # noqa: F401 - its clock starts here
from hotloop.engine.interrupt import listen


def main() -> int:
    """Run the command line of this process."""
    # Where a standard stream was closed (`>&-`), the next file that is opened would be it: the records, printed into.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    words = sys.argv[1:]
    listen(json="--json" in (words[: words.index("--")] if "--" in words else words))
    from hotloop.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

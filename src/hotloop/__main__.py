"""`python -m hotloop`, and the command `hotloop`: signals are heard before anything else is imported."""

import sys

from hotloop.engine.interrupt import listen


def main() -> int:
    """Run the command line of this process."""
    listen()
    from hotloop.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

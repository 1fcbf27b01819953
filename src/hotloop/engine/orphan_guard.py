"""A small program beside a launcher: when the launcher is gone, however it went, it ends what the launcher had started.

The launcher writes `+GROUP` for each process group that it starts and `-GROUP` for each that has ended; the end of that
input is the end of the launcher. Folders that are its arguments are the launcher's own, and go with it. It runs by its
path alone and imports nothing of ours.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the launcher's session must not end this first
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

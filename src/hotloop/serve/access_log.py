"""The file of the access log: a line for each request, and no trouble for anybody where it cannot be written."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from hotloop.errors import OptionError
from hotloop.serve.gate import Log


@contextmanager
def open_log(path: Path | None, say: Callable[[str], None]) -> Iterator[Log | None]:
    """Where lines of the access log go; OptionError where the file cannot be opened. `-` is standard error."""
    if path is None:
        yield None
    elif str(path) == "-":
        yield write_lines(path, sys.stderr, say)
    else:
        try:
            # Without a buffer: what a full disk did not take is gone, and does not fail once more at the end.
            raw = path.open("ab", buffering=0)
        except OSError as error:
            raise OptionError(f"--access-log {path}: cannot be written ({error.strerror})") from None
        with TextIOWrapper(raw, encoding="utf-8", write_through=True) as stream:
            yield write_lines(path, stream, say)


def write_lines(path: Path, stream: TextIO, say: Callable[[str], None]) -> Log:
    """Writes each line at once. The first failure is said, and the others not: the disk may be full for long."""
    is_said = is_broken = False

    def write(line: str) -> None:
        nonlocal is_said, is_broken
        try:
            stream.write(f"\n{line}\n" if is_broken else f"{line}\n")  # half of the last line may be there
            stream.flush()
            is_broken = False
        except OSError as error:
            is_broken = True
            if not is_said:
                is_said = True
                with suppress(OSError):
                    say(f"--access-log {path}: lines are lost, it cannot be written ({error.strerror})")

    return write

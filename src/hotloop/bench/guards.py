"""What surrounds a run of benchmarks: requests to end, and a log folder that cannot be written. It runs nothing."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotloop.errors import RunError


@contextmanager
def told_where_writing_fails(log: Path) -> Iterator[None]:
    """A disk that is full, or a folder that cannot be written, becomes one line for the user."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or log}: cannot be used: {error.strerror or error}; go on with --resume"
        ) from error


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A request to end, from a CI system or a closed terminal, is treated as Ctrl-C: no program stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    wanted = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in wanted]
    try:
        yield
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)

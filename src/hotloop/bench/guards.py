"""What surrounds a run of benchmarks: a log folder that cannot be written becomes one line. It runs nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotloop.errors import RunError


@contextmanager
def told_where_writing_fails(log: Path, advice: str = "go on with --resume") -> Iterator[None]:
    """A disk that is full, or a folder that cannot be written, becomes one line for the user."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or log}: cannot be used: {error.strerror or error}; {advice}"
        ) from error

"""Files of predictions: columns of ids and numbers as text, separated by TABs, whole or not there at all.

Numbers have the fewest digits that read back as the same float32, so that a file loses nothing.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hotloop.data.ratings import import_arrow_csv
from hotloop.errors import DataError, OptionError

Append = Callable[..., None]


@contextmanager
def writing(path: Path) -> Iterator[Append]:
    """A function that appends equally long columns; the file gets its name when the block ends well."""
    csv = import_arrow_csv()
    import pyarrow as pa

    plain = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    if path.is_dir():
        raise OptionError(f"--output {path}: is a folder; give a file")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:

            def append(*columns: NDArray[Any]) -> None:
                table = pa.table({str(place): column for place, column in enumerate(columns)})
                csv.write_csv(table, file, plain)

            yield append
        part.replace(path)
    except OSError as error:
        raise DataError(f"--output {path}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):
            part.unlink()

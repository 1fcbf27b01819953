"""The inside of one checkpoint step: orbax's files for the arrays, our manifest beside them.

Everything that calls orbax is here. It knows neither where the folder lies nor when it is complete.
"""

import fcntl
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engine import manifest as manifests
from hotloop.engine.manifest import Damaged, Manifest
from hotloop.engine.snapshot import (
    Forms,
    HostArray,
    HostArrays,
    Leaf,
    array_checksum,
    empty_array,
    named_leaves,
)

ARRAYS = "state"


def write_step(folder: Path, note: Manifest, arrays: HostArrays, forms: Forms) -> None:
    """Fill an empty folder with the arrays and then the manifest, all of it forced to disk."""
    filled = {name: array for name, array in arrays.items() if array.size}
    if filled:
        import orbax.checkpoint as orbax

        with _checkpointer() as checkpointer:
            checkpointer.save(folder / ARRAYS, args=orbax.args.PyTreeSave(filled))
    for path in manifests.files_in(folder).values():
        sync(path)
    leaves = {name: Leaf(*forms[name], array_checksum(array)) for name, array in arrays.items()}
    manifest = replace(note, leaves=leaves, files=manifests.stored_files(folder), time=time.time())
    (folder / manifests.NAME).write_text(manifests.to_text(manifest))
    sync(folder / manifests.NAME)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)


def read_arrays(folder: Path, manifest: Manifest, like: Any) -> HostArrays:
    """Every leaf as it was stored; `Damaged` names the leaf whose bits are not the saved ones."""
    held = _read_leaves(folder, manifest)
    return held | {name: empty_array(leaf) for name, leaf in named_leaves(like).items() if name not in held}


def check_leaves(folder: Path, manifest: Manifest) -> None:
    """`Damaged` where the folder does not hold the leaves that its own manifest names."""
    _read_leaves(folder, manifest)


def _read_leaves(folder: Path, manifest: Manifest) -> HostArrays:
    """The leaves that have elements; there is nothing on disk of the others."""
    filled = {name: leaf for name, leaf in manifest.leaves.items() if 0 not in leaf.shape}
    if manifest.files and not filled:
        raise Damaged(f"{folder} holds arrays, and its manifest names none")
    arrays = _read_filled(folder / ARRAYS, [*filled]) if filled else {}
    for name, leaf in filled.items():
        if not _is_stored(leaf, arrays[name]) or array_checksum(arrays[name]) != leaf.checksum:
            raise Damaged(f"leaf {name} of {folder} does not match its checksum")
    return arrays


def _read_filled(folder: Path, names: list[str]) -> HostArrays:
    import orbax.checkpoint as orbax

    as_numpy = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in names}
    try:
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore(folder, args=orbax.args.PyTreeRestore(restore_args=as_numpy))
        return {name: np.asarray(arrays[name]) for name in names}
    except Exception as error:
        raise Damaged(f"{folder} cannot be read by orbax: {one_line(error)}") from error


def _is_stored(leaf: Leaf, array: HostArray) -> bool:
    """Whether the array has the form of the leaf; a random key or a plain number is stored as another."""
    other = leaf.dtype.startswith(("key<", "python "))
    return other or (str(array.dtype), array.shape) == (leaf.dtype, leaf.shape)


@contextmanager
def _checkpointer() -> Iterator[Any]:
    """Orbax, without the pages of traceback that it logs beside raising an error."""
    import orbax.checkpoint as orbax  # one second, so not at the top; the first save pays it on its thread

    logger = logging.getLogger("absl")
    logger.addFilter(_not_orbax)
    logging.getLogger("asyncio").addFilter(_not_given_up)  # for good: it speaks when the garbage is collected
    before = sys.unraisablehook
    sys.unraisablehook = partial(_unless_too_late, before)
    try:
        # Uncompressed: zstd made fp32 weights 8 % smaller and writing two to three times slower.
        with orbax.Checkpointer(
            orbax.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        ) as writer:
            yield writer
        sys.unraisablehook = before  # after an error it stays: what was under way comes back at any time
    finally:
        logger.removeFilter(_not_orbax)


def _unless_too_late(otherwise: Callable[[Any], object], raised: Any) -> None:
    """Leave out that tensorstore ended a write after orbax had given all of them up for the error of another."""
    if str(raised.exc_value) != "Event loop is closed":
        otherwise(raised)


def _not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _not_given_up(record: logging.LogRecord) -> bool:
    """Leave out that other writes failed, too, which nobody waits for after the error of the first."""
    text = record.getMessage()
    return not ("never retrieved" in text and "orbax" in text)


def one_line(error: BaseException) -> str:
    """The reason in an error, without the pages that orbax and tensorstore add."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))
    return text if len(text) <= 200 else text[:200] + "..."


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder; BlockingIOError if a living process holds it (the lock of a dead one is gone)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)

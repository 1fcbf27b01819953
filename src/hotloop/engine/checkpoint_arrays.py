"""The arrays of one checkpoint step: a state as named host arrays, written and read by orbax, and made a state again.

A state is any pytree of arrays, random keys and plain numbers. Here it becomes a flat mapping from a readable
path (`optimiser/0/mu/dense/w`) to a host array with the same bits, and such arrays become a state again, placed like
an example. Everything that calls orbax is here. It knows neither where the folder lies nor which state it holds.
"""

import logging
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.engine.checkpoint_folder import (
    ARRAYS,
    MANIFEST,
    DamagedStep,
    Manifest,
    StoredLeaf,
    describe_leaf,
    format_manifest,
    list_files,
    list_stored,
    sync,
)
from hotloop.errors import CheckpointError

HostArray = np.ndarray[Any, Any]
HostArrays = dict[str, HostArray]
Form = tuple[str, tuple[int, ...]]
Forms = dict[str, Form]
_VELOCITY, _MEAN_SQUARE = re.compile(r"/velocity/trace/"), re.compile(r"/rmsprop(_outside)?/nu/")
_OF_OPTAX = re.compile(r"^(optimi[sz]er)/(?:inner/)?[a-z_]+/(mu|nu|trace|count)(?=/|$)")
_COUNTS = ("update", "optimizer/updates", "slots/rmsprop_outside/updates")


def checksum_array(array: HostArray) -> str:
    """Checksum of an array's bytes, whatever its type."""
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"


def named_leaves(state: Any) -> dict[str, Any]:
    """Every leaf by its path, such as `params/dense/w`; refuses two leaves whose paths read the same."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "state"
        if name in leaves:
            raise CheckpointError(f"two leaves of the state are both called {name}: rename one of their keys")
        leaves[name] = leaf
    return leaves


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_form(leaf: Any) -> Form:
    """Type and shape of a leaf; a plain number is `python int`, `python float` or `python bool`."""
    if type(leaf) in (bool, int, float):
        return f"python {type(leaf).__name__}", ()
    return str(getattr(leaf, "dtype", type(leaf).__name__)), tuple(getattr(leaf, "shape", ()))


def snapshot(state: Any) -> tuple[HostArrays, Forms]:
    """Host copies of every leaf, by path, and their forms; the state may be donated right afterwards."""
    leaves = named_leaves(state)
    forms = {name: leaf_form(leaf) for name, leaf in leaves.items()}
    stored = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()}
    for leaf in stored.values():
        # All transfers at once; on CPU there is none, and asking for one keeps the buffer from donation.
        if isinstance(leaf, jax.Array) and next(iter(leaf.devices())).platform != "cpu":
            leaf.copy_to_host_async()
    return {name: _host_copy(name, leaf) for name, leaf in stored.items()}, forms


def _host_copy(name: str, leaf: Any) -> HostArray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise CheckpointError(
            f"leaf {name} lies partly on another process: gather the state before saving it"
        )
    # A copy: on CPU np.asarray would be a view, which makes the donation of the buffer fail in silence.
    array = np.array(leaf, order="C")
    if array.dtype.kind in "OSUMm":
        raise CheckpointError(
            f"leaf {name} is a {type(leaf).__name__}: a checkpoint holds arrays and numbers"
        )
    return array


def restore_leaf(stored: HostArray, like: Any) -> Any:
    """The stored array as the same kind of thing as `like`, with its sharding where it has one."""
    if type(like) in (bool, int, float):
        return type(like)(stored.item())
    if isinstance(like, np.ndarray | np.generic):
        return stored
    # A copy: jax on CPU takes aligned host memory as it is, and such a buffer cannot be donated.
    array = jnp.array(stored, copy=True)
    if _is_key(like):
        kinds = ("threefry2x32", "rbg", "unsafe_rbg")
        kind = next(kind for kind in kinds if jax.random.key(0, impl=kind).dtype == like.dtype)
        array = jax.random.wrap_key_data(array, impl=kind)
    return jax.device_put(array, like.sharding) if getattr(like, "committed", True) else array


def empty_array(like: Any) -> HostArray:
    """The stored form of a leaf without elements: there is nothing of it on disk."""
    form = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
    return np.zeros(form.shape, form.dtype)


def find_leaves(stored: Mapping[str, StoredLeaf], like: Any, format: int) -> dict[str, str]:
    """The name in a checkpoint of each leaf of `like`: its own, or the one that format 1 had for it."""
    if format > 1:
        return {name: name for name in named_leaves(like)}
    return {
        name: next((old for old in (name, *_format_1_names(name)) if old in stored), name)
        for name in named_leaves(like)
    }


def _format_1_names(name: str) -> Iterator[str]:
    """How a leaf of an optimiser's state may be called in a checkpoint of format 1."""
    yield _VELOCITY.sub("/velocity/", name)
    yield _MEAN_SQUARE.sub("/mean_square/", name)
    for link in range(3):  # plain chains of optax, whose links had numbers
        yield _OF_OPTAX.sub(rf"\1/{link}/\2", name)
    if name in _COUNTS:
        yield from ("slots/updates", "optimizer/1/count", "optimizer/2/count")


def explain_mismatch(leaves: Mapping[str, StoredLeaf], like: Any) -> str | None:
    """Why a checkpoint with these leaves cannot become a state like `like`; None if it can."""
    wanted = {name: leaf_form(leaf) for name, leaf in named_leaves(like).items()}
    reasons = [
        f"leaf {name} is {describe_leaf(*wanted[name])} here but not in the checkpoint"
        for name in wanted
        if name not in leaves
    ]
    reasons += [
        f"leaf {name} ({leaf}) of the checkpoint is not in this state"
        for name, leaf in leaves.items()
        if name not in wanted
    ]
    reasons += [
        f"leaf {name} is {leaves[name]} in the checkpoint but {describe_leaf(*wanted[name])} here"
        for name in wanted
        if name in leaves and (leaves[name].dtype, leaves[name].shape) != wanted[name]
    ]
    if not reasons:
        return None
    return reasons[0] + (f" (and {len(reasons) - 1} more leaves differ)" if len(reasons) > 1 else "")


def write_step(folder: Path, note: Manifest, arrays: HostArrays, forms: Forms) -> None:
    """Fill an empty folder with the arrays and then the manifest, all of it forced to disk."""
    filled = {name: array for name, array in arrays.items() if array.size}
    if filled:
        import orbax.checkpoint as orbax

        with _checkpointer() as checkpointer:
            checkpointer.save(folder / ARRAYS, args=orbax.args.PyTreeSave(filled))
    for path in list_files(folder).values():
        sync(path)
    leaves = {name: StoredLeaf(*forms[name], checksum_array(array)) for name, array in arrays.items()}
    manifest = replace(note, leaves=leaves, files=list_stored(folder), time=time.time())
    (folder / MANIFEST).write_text(format_manifest(manifest))
    sync(folder / MANIFEST)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)


def read_arrays(folder: Path, manifest: Manifest, like: Any) -> HostArrays:
    """Every leaf of `like` as it was stored; `DamagedStep` names the leaf whose bits are not the saved ones."""
    held, names = _read_leaves(folder, manifest), find_leaves(manifest.leaves, like, manifest.format)
    return {
        name: held[names[name]] if names[name] in held else empty_array(leaf)
        for name, leaf in named_leaves(like).items()
    }


def check_leaves(folder: Path, manifest: Manifest) -> None:
    """`DamagedStep` where the folder does not hold the leaves that its own manifest names."""
    _read_leaves(folder, manifest)


def _read_leaves(folder: Path, manifest: Manifest) -> HostArrays:
    """The leaves that have elements; there is nothing on disk of the others."""
    filled = {name: leaf for name, leaf in manifest.leaves.items() if 0 not in leaf.shape}
    if manifest.files and not filled:
        raise DamagedStep(f"{folder} holds arrays, and its manifest names none")
    arrays = _read_filled(folder / ARRAYS, [*filled]) if filled else {}
    for name, leaf in filled.items():
        array = arrays[name]
        # A random key or a plain number is stored as an array of another form.
        other = leaf.dtype.startswith(("key<", "python "))
        is_stored = other or (str(array.dtype), array.shape) == (leaf.dtype, leaf.shape)
        if not is_stored or checksum_array(array) != leaf.checksum:
            raise DamagedStep(f"leaf {name} of {folder} does not match its checksum")
    return arrays


def _read_filled(folder: Path, names: list[str]) -> HostArrays:
    import orbax.checkpoint as orbax

    as_numpy = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in names}
    try:
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore(folder, args=orbax.args.PyTreeRestore(restore_args=as_numpy))
        return {name: np.asarray(arrays[name]) for name in names}
    except Exception as error:
        raise DamagedStep(f"{folder} cannot be read by orbax: {one_line(error)}") from error


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

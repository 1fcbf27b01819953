"""The folder that holds a run's steps: the manifest and arrays of each, which are whole, which stay, how one gets in.

A manifest holds size and checksum of every file, type, shape and checksum of every leaf, the step, the data position,
the metrics, and a checksum of itself; it is written last and checked first. What is deleted is first renamed, so that a
kill leaves nothing half there, and only what hotloop wrote is ever deleted. Everything that calls orbax is here.
"""

import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotloop.engine import processes
from hotloop.errors import CheckpointError, OptionError
from hotloop.options.files import load_json

MANIFEST, ARRAYS = "manifest.json", "state"
PROGRAM = "hotloop"
FORMAT = 2
READABLE = (1, FORMAT)
"""Format 1 had other names for the state of an optimiser: `checkpoint.find_leaves` knows them."""
STOPPED = "stopped"
"""In a step's position: it was saved only because the run was asked to stop, and goes when the run is past it."""
_BLOCK = 1 << 22
_TEMPORARY = ".hotloop-tmp-"
HostArrays = dict[str, np.ndarray[Any, Any]]
Metrics = Mapping[int, Mapping[str, Any]]


class Keep:
    """A rule that chooses steps; `a | b` keeps what either keeps."""

    n = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise OptionError(f"cannot keep {self.n} checkpoints: keep at least 1")

    def choose(self, metrics: Metrics) -> set[int]:
        """The steps to keep, given the metrics of every complete step."""
        raise NotImplementedError

    def best(self, metrics: Metrics) -> int | None:
        """None if the rule has no metric or no step reports it."""
        return None

    def __or__(self, other: "Keep") -> "Keep":
        return Either(self, other)


@dataclass(frozen=True)
class KeepLast(Keep):
    n: int = 3

    def choose(self, metrics: Metrics) -> set[int]:
        return set(sorted(metrics)[-self.n :])


KeepAll = partial(KeepLast, sys.maxsize)


@dataclass(frozen=True)
class KeepBest(Keep):
    """The `n` steps with the best value of a metric stay, of equals the newest; those without it, or with NaN, do not
    count."""

    metric: str
    mode: Literal["max", "min"] = "max"
    n: int = 1

    def choose(self, metrics: Metrics) -> set[int]:
        return set(self.ranked(metrics)[: self.n])

    def best(self, metrics: Metrics) -> int | None:
        return next(iter(self.ranked(metrics)), None)

    def ranked(self, metrics: Metrics) -> list[int]:
        sign = 1 if self.mode == "max" else -1
        values = {step: m.get(self.metric) for step, m in metrics.items()}
        finite = {s: v for s, v in values.items() if isinstance(v, int | float) and not math.isnan(v)}
        return sorted(finite, key=lambda step: (sign * finite[step], step), reverse=True)


@dataclass(frozen=True)
class Either(Keep):
    first: Keep
    second: Keep

    def choose(self, metrics: Metrics) -> set[int]:
        return self.first.choose(metrics) | self.second.choose(metrics)

    def best(self, metrics: Metrics) -> int | None:
        first = self.first.best(metrics)
        return self.second.best(metrics) if first is None else first


class DamagedStep(CheckpointError):
    """A step folder that is incomplete, altered, or not written by hotloop; an older step may be whole."""


@dataclass(frozen=True)
class StoredFile:
    size: int
    checksum: str


@dataclass(frozen=True)
class StoredLeaf:
    """What a leaf is: its type and shape as the program sees them, and a checksum of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Manifest:
    """Everything about a step except the arrays themselves."""

    step: int
    leaves: Mapping[str, StoredLeaf]
    files: Mapping[str, StoredFile]
    position: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    config: str = ""
    time: float = 0.0
    format: int = FORMAT


def _list_files(folder: Path) -> dict[str, Path]:
    """Every file under a step folder except its manifest, by its relative name."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {name: path for path in files if (name := path.relative_to(folder).as_posix()) != MANIFEST}


def _checksum_file(path: Path) -> str:
    """CRC-32 of a file: finds every flipped byte at 2.3 GB/s, where blake2b reached 0.6 on the same core."""
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def format_manifest(manifest: Manifest) -> str:
    """The manifest as strict JSON, with the checksum of its own contents."""
    body = {"program": PROGRAM, **asdict(manifest)}
    return json.dumps({**body, "checksum": _self_checksum(body)}, indent=1, allow_nan=False) + "\n"


def _self_checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step folder; `DamagedStep` says in one line why there is none that can be trusted."""
    path = folder / MANIFEST
    try:
        body = load_json(path)
    except FileNotFoundError:
        empty = folder.is_dir() and not any(folder.iterdir())
        what = "is empty" if empty else f"has no {MANIFEST}, so it is incomplete or another program wrote it"
        raise DamagedStep(f"{folder} {what}") from None
    except (OSError, ValueError) as error:
        raise DamagedStep(f"{path} cannot be read ({type(error).__name__}): it is damaged") from None
    if not isinstance(body, dict) or body.pop("program", None) != PROGRAM:
        raise DamagedStep(f"{path} was not written by {PROGRAM}, or is damaged")
    found = body.pop("checksum", None)
    if found != _self_checksum({"program": PROGRAM, **body}):
        raise DamagedStep(f"{path} does not match its own checksum: it was altered or damaged")
    if body.get("format") not in READABLE:
        raise DamagedStep(
            f"{path} has format {body.get('format')}, this hotloop reads {FORMAT}: use the version that wrote it"
        )
    try:
        leaves = {
            name: StoredLeaf(**{**leaf, "shape": tuple(leaf["shape"])})
            for name, leaf in body.pop("leaves").items()
        }
        files = {name: StoredFile(**file) for name, file in body.pop("files").items()}
        made = Manifest(leaves=leaves, files=files, **body)
        texts = [made.family, made.config, *(file.checksum for file in files.values())]
        texts += [text for leaf in leaves.values() for text in (leaf.dtype, leaf.checksum)]
        counts = [made.step, *(file.size for file in files.values())]
        counts += [size for leaf in leaves.values() for size in leaf.shape]
        right = all(isinstance(text, str) for text in texts)
        right &= all(type(count) is int and count >= 0 for count in counts)
        if not (right and isinstance(made.position, dict) and isinstance(made.metrics, dict)):
            raise TypeError
        from_exact(made.position)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DamagedStep(f"{path} has a right checksum, and does not say what a manifest says") from None
    return made


def from_exact(value: Any) -> Any:
    """A position as it was saved: NaN and infinity, which JSON has not, stand there as `{"float": "nan"}`."""
    if isinstance(value, list):
        return [from_exact(item) for item in value]
    if not isinstance(value, dict):
        return value
    return float(value["float"]) if set(value) == {"float"} else {k: from_exact(v) for k, v in value.items()}


def find_steps(folder: Path, mark: str = "") -> dict[int, Path]:
    """Everything that is named like a step, whole or not; with a run's mark also what bears it, `00000012-MARK`."""
    form = re.compile(rf"\d+(-{mark})?" if mark else r"\d+")
    try:
        found = [path for path in folder.iterdir() if form.fullmatch(path.name)]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    return {int(path.name.partition("-")[0]): path for path in sorted(found, key=lambda path: len(path.name))}


def read_whole(folder: Path, step: int, *, contents: bool = False) -> Manifest:
    """The manifest of a step whose files are all there in full size, and with `contents` as they were written, byte for
    byte; `DamagedStep` if it is not that step."""
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise DamagedStep(f"{folder} holds step {manifest.step}: it was renamed or copied")
    found = _list_files(folder)
    for name, stored in manifest.files.items():
        if name not in found:
            raise DamagedStep(f"{folder / name} is missing")
        try:
            size = found[name].stat().st_size
            altered = contents and _checksum_file(found[name]) != stored.checksum
        except OSError as error:
            raise DamagedStep(f"{found[name]} cannot be read: {error.strerror}") from None
        if size != stored.size:
            wrong = f"has {size} bytes, {stored.size} were written: it is truncated or altered"
            raise DamagedStep(f"{folder / name} {wrong}")
        if altered:
            wrong = "does not match its checksum: at least one byte changed on disk"
            raise DamagedStep(f"{folder / name} {wrong}")
    return manifest


def metrics_to_keep_by(complete: Mapping[int, Manifest]) -> Metrics:
    """Those of all steps but what only a stop has left."""
    return {step: found.metrics for step, found in complete.items() if STOPPED not in found.position}


@dataclass
class OwnSteps:
    """The steps in a folder that are ours: all of them, unless it is `shared`.

    There family and config in the manifests tell whose a step is. What another run saved is neither found nor ever
    replaced: where it has the number of a step that is to be saved, ours bears the run's mark in its name.
    """

    folder: Path
    family: str = ""
    config: str = ""
    shared: bool = False
    _cleaned: bool = False

    def complete(self) -> dict[int, Manifest]:
        """Our steps that are whole, by a quick look."""
        found = {}
        for step, folder in self.find().items():
            with suppress(DamagedStep):
                found[step] = read_whole(folder, step)
        return found

    def find(self) -> dict[int, Path]:
        """What is named like a step, whole or not, except whatever says that another run made it."""
        found = find_steps(self.folder, self.config if self.shared else "")
        return {step: path for step, path in found.items() if not self._is_anothers(path)}

    def _is_anothers(self, folder: Path) -> bool:
        if not self.shared:
            return False
        try:
            found = read_manifest(folder)
        except DamagedStep:  # its run is unknown: a reader names it, a writer sets it aside
            return False
        return (found.family, found.config) != (self.family, self.config)

    def write(self, note: Manifest, arrays: HostArrays, keep: Keep) -> None:
        """Write a step so that it is whole or not there, then delete those that the rule lets go."""
        temporary = self.folder / f"{_TEMPORARY}{note.step}-{secrets.token_hex(4)}"
        try:
            # What a killed process left half written goes; what a living one holds, or others put there, stays.
            found = () if self._cleaned else [*self.folder.glob(f"{_TEMPORARY}*")]
            for left in filter(Path.is_dir, found):
                names = {path.name.partition(".orbax")[0] for path in left.iterdir()}
                with suppress(BlockingIOError), hold_lock(left):
                    if names <= {ARRAYS, MANIFEST}:
                        shutil.rmtree(left)
            self._cleaned = True
            temporary.mkdir(parents=True)
            with hold_lock(temporary):
                write_step(temporary, note, arrays)
                with hold_lock(self.folder, wait=True):
                    taken = find_steps(self.folder).get(note.step)
                    mark = f"-{self.config}" if taken and self._is_anothers(taken) else ""
                    target = self.folder / f"{note.step:08d}{mark}"
                    if target.exists():
                        remove_step(target)
                    if target.exists():  # a damaged or foreign one is set aside, never deleted
                        target.rename(target.with_name(f"{target.name}.set-aside-{secrets.token_hex(4)}"))
                    temporary.rename(target)
                    sync(self.folder)
            ours = {step: m for step, m in self.complete().items() if m.family == self.family}
            # The newest is what a resume needs, whatever the rule says.
            for step in set(ours) - keep.choose(metrics_to_keep_by(ours)) - {note.step, max(ours)}:
                remove_step(self.find()[step])
        except Exception as error:
            _remove_for_good(temporary)
            raise CheckpointError(
                f"cannot write step {note.step} in {self.folder}: {one_line(error)}; earlier steps are whole"
            ) from error


def _remove_for_good(folder: Path, quiet: float = 0.5, limit: float = 5.0) -> None:
    """Delete a folder whose write has failed, until it stays away: the writes that tensorstore had under way beside the
    failed one end later, in their own time, and make their folder anew."""
    began = gone = time.monotonic()
    while (now := time.monotonic()) - gone < quiet and now - began < limit:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            gone = time.monotonic()
        time.sleep(0.02)


def remove_step(folder: Path) -> None:
    """Delete a step of ours, unless somebody put files of their own into it."""
    with suppress(CheckpointError):
        if set(_list_files(folder)) <= set(read_manifest(folder).files) and not folder.is_symlink():
            doomed = folder.with_name(f"{_TEMPORARY}{folder.name}-{secrets.token_hex(4)}")
            folder.rename(doomed)
            shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """Have a file, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def hold_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder that a living process may hold: then wait, or BlockingIOError. The lock of a dead one is gone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _checksum_array(array: np.ndarray[Any, Any]) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"


def write_step(folder: Path, note: Manifest, arrays: HostArrays) -> None:
    """Fill an empty folder with the arrays and then the manifest, all of it forced to disk."""
    if filled := {name: array for name, array in arrays.items() if array.size}:
        import orbax.checkpoint as orbax

        with _checkpointer() as checkpointer, _without_patterns(folder) as place:
            checkpointer.save(place / ARRAYS, args=orbax.args.PyTreeSave(filled))
    written = _list_files(folder)
    for path in written.values():
        sync(path)
    manifest = replace(
        note,
        leaves={
            name: replace(leaf, checksum=_checksum_array(arrays[name])) for name, leaf in note.leaves.items()
        },
        files={name: StoredFile(path.stat().st_size, _checksum_file(path)) for name, path in written.items()},
        time=time.time(),
    )
    (folder / MANIFEST).write_text(format_manifest(manifest))
    sync(folder / MANIFEST)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)


@contextmanager
def _without_patterns(folder: Path) -> Iterator[Path]:
    """The folder by a path without brackets and backslashes: orbax (as of 0.12) takes brackets for a pattern when it
    looks for what it has just written, finds nothing, and leaves a step that cannot be read."""
    if not set("[]\\") & set(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="hotloop-step-") as place:
        link = Path(place) / "step"
        link.symlink_to(folder.absolute())
        yield link


def read_leaves(folder: Path, manifest: Manifest) -> HostArrays:
    """The leaves that have elements, of which alone there is something on disk; `DamagedStep` names one whose bits are
    not the saved ones."""
    filled = {name: leaf for name, leaf in manifest.leaves.items() if 0 not in leaf.shape}
    if manifest.files and not filled:
        raise DamagedStep(f"{folder} holds arrays, and its manifest names none")
    arrays = {}
    if filled:
        import orbax.checkpoint as orbax

        as_numpy = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in filled}
        try:
            with _checkpointer() as checkpointer, _without_patterns(folder) as place:
                arrays = checkpointer.restore(
                    place / ARRAYS, args=orbax.args.PyTreeRestore(restore_args=as_numpy)
                )
            arrays = {name: np.asarray(arrays[name]) for name in filled}
        except Exception as error:
            raise DamagedStep(f"{folder / ARRAYS} cannot be read by orbax: {one_line(error)}") from error
    for name, leaf in filled.items():
        array = arrays[name]
        # A random key or a plain number is stored as an array of another form.
        other = leaf.dtype.startswith(("key<", "python "))
        is_stored = other or (str(array.dtype), array.shape) == (leaf.dtype, leaf.shape)
        if not is_stored or _checksum_array(array) != leaf.checksum:
            raise DamagedStep(f"leaf {name} of {folder} does not match its checksum")
    return arrays


@contextmanager
def _checkpointer() -> Iterator[Any]:
    """Orbax, without the pages of traceback that it logs beside raising an error."""
    import orbax.checkpoint as orbax  # one second, so not at the top; the first save pays it on its thread

    before = sys.unraisablehook

    def unless_too_late(raised: Any) -> None:
        # tensorstore ends a write after orbax has given all of them up for the error of another
        if str(raised.exc_value) != "Event loop is closed":
            before(raised)

    def not_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(not_orbax)
    logging.getLogger("asyncio").addFilter(_not_given_up)  # for good: it logs when the garbage is collected
    sys.unraisablehook = unless_too_late
    try:
        # Of several processes each works for itself: orbax would wait for the others, which have nothing to write.
        alone = orbax.options.MultiprocessingOptions(primary_host=0, active_processes={0})
        if not processes.is_writer():
            # Its handler of host arrays (as of orbax 0.12) writes nothing in a process that is not called 0.
            from orbax.checkpoint._src.multihost import multihost

            multihost.process_index = lambda: 0
        # Uncompressed: zstd made fp32 weights 8 % smaller and writing two to three times slower.
        handler = orbax.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False, multiprocessing_options=alone
        )
        with orbax.Checkpointer(handler, multiprocessing_options=alone) as writer:
            yield writer
        sys.unraisablehook = before  # after an error it stays: what was under way comes back at any time
    finally:
        logger.removeFilter(not_orbax)


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

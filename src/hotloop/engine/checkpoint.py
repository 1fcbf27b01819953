"""Checkpoints of a run: atomic, written behind its back, checked before they are believed.

`save` copies the state to the host and returns; a thread then lets orbax write it into a temporary folder,
adds the manifest, and renames the folder into place, so that a step is either whole or not there. `restore`
takes the newest step whose every byte is as written. It knows nothing of models, loops or run folders.
"""

import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from hotloop.engine import manifest as manifests
from hotloop.engine.keep import Keep, KeepAll, KeepBest, KeepLast
from hotloop.engine.manifest import Damaged, Manifest
from hotloop.engine.records import exact, from_exact, jsonable
from hotloop.engine.snapshot import Forms, HostArrays, mismatch, named_leaves, restored_leaf, snapshot
from hotloop.engine.step_folder import ARRAYS, locked, one_line, read_arrays, sync, write_step
from hotloop.errors import CheckpointError

__all__ = ["Checkpoints", "Keep", "KeepAll", "KeepBest", "KeepLast", "Restored"]

_TEMPORARY = ".hotloop-tmp-"


@dataclass(frozen=True)
class Restored:
    """A state read back, and one line for each newer step that could not be used."""

    step: int
    state: Any
    position: Mapping[str, Any]
    metrics: Mapping[str, Any]
    skipped: list[str]


class Checkpoints:
    """The checkpoints in one folder; `family` and `config` are recorded, others' steps are refused."""

    def __init__(
        self,
        folder: str | Path,
        keep: Keep = KeepLast(3),  # noqa: B008 - frozen
        *,
        family: str = "",
        config: Mapping[str, Any] | None = None,
    ):
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._blank = Manifest(0, {}, {}, family=family, config=manifests.config_hash(config or {}))
        self._writer = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: futures.Future[None] | None = None
        self._cleaned = False

    def save(
        self, step: int, state: Any, *, position: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Start writing a step and return once the state is copied, so that its buffers may be donated.

        Waits for a save that is still being written, and raises what went wrong with it.
        """
        self.wait()
        arrays, forms = snapshot(state)
        note = replace(self._blank, step=step, position=exact(position), metrics=jsonable(metrics or {}))
        self._pending = self._writer.submit(self._write, note, arrays, forms)

    def wait(self) -> None:
        """Return when the last save is durable; raise if it failed."""
        if self._pending is not None:
            futures.wait([self._pending])
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Finish the last save and end the thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Complete steps, oldest first: manifest intact, files in full size (`restore` reads contents)."""
        return sorted(self._metrics())

    def best(self) -> int | None:
        """The complete step with the best metric, as `KeepBest` ranks it."""
        return self.keep.best(self._metrics())

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """The newest complete step (or the one asked for) with the tree, types and sharding of `like`.

        Damaged steps are skipped with a line each. A whole step that does not fit `like` is an error: the
        model differs from the saved one, and an older step would hide it.
        """
        self.wait()
        folders = self._numbered()
        if step is not None:
            if step not in folders:
                raise CheckpointError(
                    f"no step {step} in {self.folder}; complete steps: {self.steps() or 'none'}"
                )
            folders = {step: folders[step]}
        skipped: list[str] = []
        for number in sorted(folders, reverse=True):
            try:
                return self._read(folders[number], number, like, skipped)
            except Damaged as error:
                skipped.append(f"skipped step {number}: {error}")
        found = "; ".join(skipped) or "nothing there is named like a step"
        raise CheckpointError(f"no complete checkpoint in {self.folder}: {found}")

    def _read(self, folder: Path, number: int, like: Any, skipped: list[str]) -> Restored:
        manifest = self._whole(folder, number)
        manifests.check_contents(folder, manifest)
        if self._blank.family and manifest.family != self._blank.family:
            raise CheckpointError(
                f"{folder} belongs to {manifest.family or 'no family'}, not {self._blank.family}"
            )
        if reason := mismatch(manifest.leaves, like):
            other = " (it was saved with another config)" if manifest.config != self._blank.config else ""
            raise CheckpointError(
                f"{folder} does not fit this model{other}: {reason}; use the config it was saved with"
            )
        arrays = read_arrays(folder, manifest, like)
        leaves = [restored_leaf(arrays[name], leaf) for name, leaf in named_leaves(like).items()]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Restored(manifest.step, state, from_exact(manifest.position), manifest.metrics, skipped)

    def _numbered(self) -> dict[int, Path]:
        try:
            found = [path for path in self.folder.iterdir() if re.fullmatch(r"\d+", path.name)]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror}") from None
        return {int(path.name): path for path in sorted(found, key=lambda path: len(path.name))}

    def _whole(self, folder: Path, number: int) -> Manifest:
        manifest = manifests.read(folder)
        if manifest.step != number:
            raise Damaged(f"{folder} holds step {manifest.step}: it was renamed or copied")
        manifests.check_sizes(folder, manifest)
        return manifest

    def _metrics(self) -> dict[int, Mapping[str, Any]]:
        metrics = {}
        for number, folder in self._numbered().items():
            try:
                metrics[number] = self._whole(folder, number).metrics
            except Damaged:
                continue
        return metrics

    def _write(self, note: Manifest, arrays: HostArrays, forms: Forms) -> None:
        temporary = self._temporary(note.step)
        try:
            self._clean()
            temporary.mkdir(parents=True)
            with locked(temporary):
                write_step(temporary, note, arrays, forms)
                self._put_in_place(temporary, self.folder / f"{note.step:08d}")
            self._forget()
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"cannot write step {note.step} in {self.folder}: {one_line(error)}; earlier steps are whole"
            ) from error

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{_TEMPORARY}{step}-{secrets.token_hex(4)}"

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        if manifests.is_ours_alone(target):
            self._remove(target)
        elif target.exists():  # damaged or foreign: out of the way, never deleted
            target.rename(target.with_name(f"{target.name}.set-aside-{secrets.token_hex(4)}"))
        temporary.rename(target)
        sync(self.folder)

    def _forget(self) -> None:
        metrics = self._metrics()
        kept = self.keep.kept(metrics) | set(sorted(metrics)[-1:])  # the newest is what a resume needs
        for number in set(metrics) - kept:
            folder = self._numbered()[number]
            if manifests.is_ours_alone(folder):
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        doomed = self._temporary(int(folder.name))
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _clean(self) -> None:
        """Once: remove temporary folders of ours that no living process holds."""
        if self._cleaned:
            return
        self._cleaned = True
        for folder in filter(Path.is_dir, self.folder.glob(f"{_TEMPORARY}*")):
            names = {path.name.partition(".orbax")[0] for path in folder.iterdir()}
            with suppress(BlockingIOError), locked(folder):
                if names <= {ARRAYS, manifests.NAME}:
                    shutil.rmtree(folder)

"""Checkpoints of a run: atomic, written behind its back, checked before they are believed.

`save` copies the state to the host and returns; a thread then writes it into a temporary folder that is renamed into
place, so that a step is either whole or not there. A state is any pytree of arrays, random keys and plain numbers; on
disk it is a flat mapping from a readable path (`optimiser/0/mu/dense/w`) to a host array with the same bits. A state
that is spread over devices or stages is saved as one that is not, so that a step is the same on every topology.
"""

import atexit
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.engine import checkpoint_folder as steps
from hotloop.engine import processes
from hotloop.engine.checkpoint_folder import DamagedStep, Keep, KeepAll, KeepLast, Manifest, StoredLeaf
from hotloop.engine.interrupt import hold_stops
from hotloop.engine.run import read_events
from hotloop.engine.stage_rows import divide_like, form_of_whole, undivided
from hotloop.errors import CheckpointError
from hotloop.options import to_jsonable

_VELOCITY, _MEAN_SQUARE = re.compile(r"/velocity/trace/"), re.compile(r"/rmsprop(_outside)?/nu/")
_OF_OPTAX = re.compile(r"^(optimi[sz]er)/(?:inner/)?[a-z_]+/(mu|nu|trace|count)(?=/|$)")
CheckPosition = Callable[[Mapping[str, Any]], object]
_COUNTS = ("update", "optimizer/updates", "slots/rmsprop_outside/updates")


@dataclass(frozen=True)
class Restored:
    """A state read back, and one line for each newer step that could not be used."""

    step: int
    state: Any
    position: Mapping[str, Any]
    metrics: Mapping[str, Any]
    skipped: Sequence[str]

    def warn(self) -> "Restored":
        """The same, with those lines on standard error: for callers that keep no records."""
        print_warnings(self.skipped)
        return self


def print_warnings(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints in one folder; `family` and `config` are recorded, other families' steps are refused.

    In a `shared` folder runs with other configs save as well: their steps are none of ours, and never replaced.
    Of several processes the first writes, and its word counts for which steps there are, so that all must ask alike;
    with `each_process` every one has steps of its own, in `rank<N>`, and goes on with the newest that all have.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: Keep = KeepLast(3),  # noqa: B008 - frozen
        *,
        family: str = "",
        config: Mapping[str, Any] | None = None,
        shared: bool = False,
        each_process: bool = False,
    ):
        self.each_process = each_process and processes.count() > 1
        self.folder = Path(folder).absolute() / (f"rank{processes.index()}" if self.each_process else "")
        self._writes = self.each_process or processes.is_writer()
        self.keep = keep
        text = json.dumps(config or {}, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._blank = Manifest(0, {}, {}, family=family, config=digest)
        self._ours = steps.OwnSteps(self.folder, family, self._blank.config, shared)
        self._writer = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: futures.Future[None] | None = None
        atexit.register(self._complain)

    def save(
        self, step: int, state: Any, *, position: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Start writing a step and return once the state is copied, so that its buffers may be donated. It waits for a
        save that is still being written, and raises what went wrong with it."""
        self.wait()
        arrays, forms = snapshot(state)  # by all processes: a leaf may lie on the devices of several
        if not self._writes:
            return
        # JSON has no NaN and no infinity: `from_exact` brings them back.
        exact = to_jsonable(position, lambda number: {"float": str(number)})
        note = replace(
            self._blank, step=step, leaves=forms, position=exact, metrics=to_jsonable(metrics or {})
        )
        self._pending = self._writer.submit(self._ours.write, note, arrays, self.keep)

    def wait(self) -> None:
        """Return when the last save is durable; raise if it failed."""
        if self._pending is not None:
            futures.wait([self._pending])
            pending, self._pending = self._pending, None
            pending.result()

    def _complain(self) -> None:
        """At the program's end: a save that was never waited for must not fail in silence."""
        try:
            self.wait()
        except CheckpointError as error:
            print(f"warning: {error} (close the checkpoints before the program ends)", file=sys.stderr)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            atexit.unregister(self._complain)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Complete steps, oldest first: manifest intact, files in full size (`restore` reads contents)."""
        return self._common(self._ours.complete())

    def _common(self, found: Iterable[int]) -> list[int]:
        """Of the steps found here those that every process has, or in their place those that process 0 has."""
        here = sorted(found)
        if not self.each_process:
            return list(processes.agreed(here))
        everywhere = set[int].intersection(*map(set, processes.gathered(here)))
        return [step for step in here if step in everywhere]

    def damaged(self) -> list[str]:
        """A line for each step that a quick look finds damaged."""
        found = []
        for step, folder in sorted(self._ours.find().items()):
            try:
                steps.read_whole(folder, step)
            except DamagedStep as error:
                found.append(f"skipped step {step}: {error}")
        return found

    def begun(self) -> bool:
        """Whether there is a step to restore, if only a damaged one, or one that not every process has."""
        here = bool(self._ours.find())
        if not self.each_process:
            return bool(processes.agreed(here))
        anywhere, outside = any(processes.gathered(here)), replace(self._ours, folder=self.folder.parent)
        if not anywhere and (alone := processes.agreed(sorted(outside.find()))):
            raise CheckpointError(
                f"{self.folder.parent}: step {alone[-1]} was saved for all processes, and now each has its own: copy "
                f"it into rank0 to rank{processes.count() - 1} there, or go on without ckpt_all_instances"
            )
        return anywhere

    def remove(self, step: int) -> None:
        """Delete one of these steps, unless somebody put files of their own into it."""
        if self._writes:
            steps.remove_step(self._ours.find()[step])

    def metrics(self, step: int) -> Mapping[str, Any]:
        """What was recorded with a step, by process 0's word."""
        here = dict(self._ours.complete()[step].metrics) if processes.is_writer() else None
        return dict(processes.agreed(here))

    def best(self) -> int | None:
        """The best step by the rule, of those that `steps` names; process 0's word, None where it has none."""
        known = set(self.steps())
        complete = {step: found for step, found in self._ours.complete().items() if step in known}
        best: int | None = processes.agreed(self.keep.best(steps.metrics_to_keep_by(complete)))
        return best

    def restore(
        self,
        like: Any,
        step: int | None = None,
        *,
        in_part: bool = False,
        check: CheckPosition | None = None,
    ) -> Restored:
        """The newest complete step (or the one asked for) with the tree, types and sharding of `like`.

        With `in_part` a step may hold more than `like` has: weights can be read without their optimiser. `check` is
        handed a step's position; one that it cannot make sense of is that of a damaged step. Those are skipped with a
        line each. A whole step that does not fit `like` is an error: an older one would hide that the model differs.
        """
        self.wait()
        if self.each_process:
            return self._find_common(like, step, in_part, check)
        if processes.count() > 1 and not self._writes:  # what process 0 has found whole and fitting
            number, skipped = processes.agreed(None)
            folders = self._ours.find()
            if number not in folders:
                raise CheckpointError(
                    f"step {number}, which process 0 has restored, is not in {self.folder}: "
                    "choose a folder that all machines have"
                )
            return replace(self._read(folders[number], number, like, in_part, check), skipped=skipped)
        found = self._find_newest(like, step, in_part, check)
        processes.agreed([found.step, list(found.skipped)])
        return found

    def _find_common(
        self, like: Any, step: int | None, in_part: bool, check: CheckPosition | None
    ) -> Restored:
        """The newest step that every process has, and finds whole, among its own: all go on from the same one."""
        folders = {number: at for number, at in self._ours.find().items() if step in (None, number)}
        held = processes.gathered(sorted(folders))
        skipped: list[str] = []
        for number in sorted({number for each in held for number in each}, reverse=True):
            lacking = [f"process {index} has none" for index, each in enumerate(held) if number not in each]
            if not lacking:
                restored, damage = None, ""
                try:
                    restored = self._read(folders[number], number, like, in_part, check)
                except DamagedStep as error:
                    damage = str(error)
                found = processes.gathered(damage)
                if restored is not None and not any(found):
                    return replace(restored, skipped=skipped)
                lacking = [f"process {index}: {text}" for index, text in enumerate(found) if text]
            skipped.append(f"skipped step {number}: {'; '.join(lacking)}")
        wanted = "checkpoint" if step is None else f"step {step}"
        reasons = "; ".join(skipped[:3]) or "none of them has any"
        more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        raise CheckpointError(f"{self.folder.parent}: no {wanted} that every process has: {reasons}{more}")

    def _find_newest(
        self, like: Any, step: int | None, in_part: bool, check: CheckPosition | None
    ) -> Restored:
        folders = self._ours.find()
        if step is not None:
            if step not in folders:
                complete = sorted(self._ours.complete()) or "none"
                raise CheckpointError(f"no step {step} in {self.folder}; complete steps: {complete}")
            folders = {step: folders[step]}
        skipped: list[str] = []
        for number in sorted(folders, reverse=True):
            try:
                return replace(self._read(folders[number], number, like, in_part, check), skipped=skipped)
            except DamagedStep as error:
                skipped.append(f"skipped step {number}: {error}")
        reasons = "; ".join(skipped) or "nothing there is named like a step"
        raise CheckpointError(f"no complete checkpoint in {self.folder}: {reasons}")

    def _read(
        self, folder: Path, number: int, like: Any, in_part: bool, check: CheckPosition | None
    ) -> Restored:
        """A step as a state like `like`; DamagedStep where it is not whole."""
        manifest = steps.read_whole(folder, number, contents=True)
        self._check_fits(folder, manifest, like, in_part)
        # orbax reads in an event loop, which answers an exception from elsewhere with a traceback.
        with hold_stops():
            arrays = steps.read_leaves(folder, manifest)
        position = steps.from_exact(manifest.position)
        try:
            if check is not None:
                check(position)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise DamagedStep(f"{folder} does not say where to go on: its position is none") from None
        names = find_leaves(manifest.leaves, like, manifest.format)
        leaves = [restore_leaf(arrays.get(names[name]), leaf) for name, leaf in named_leaves(like).items()]
        structure = jax.tree.structure(undivided(like, form_of_whole))
        state = divide_like(like, jax.tree.unflatten(structure, leaves))
        return Restored(manifest.step, state, position, manifest.metrics, ())

    def check_fits(self, like: Any) -> None:
        """CheckpointError where the newest complete step is not of a state like `like`; no array is read."""
        complete = self._ours.complete()
        if complete:
            newest = max(complete)
            with suppress(DamagedStep):  # `restore` skips it, and says so
                self._check_fits(self._ours.find()[newest], complete[newest], like, in_part=False)

    def _check_fits(self, folder: Path, manifest: Manifest, like: Any, in_part: bool) -> None:
        if self._blank.family and manifest.family != self._blank.family:
            raise CheckpointError(
                f"{folder} belongs to {manifest.family or 'no family'}, not {self._blank.family}"
            )
        names = find_leaves(manifest.leaves, like, manifest.format)
        held = {name: manifest.leaves[old] for name, old in names.items() if old in manifest.leaves}
        if not in_part:
            known = set(names.values())
            held |= {name: leaf for name, leaf in manifest.leaves.items() if name not in known}
        if reason := explain_mismatch(held, like):
            with hold_stops():
                steps.read_leaves(folder, manifest)  # or the manifest is what is wrong
            other = " (it was saved with another config)" if manifest.config != self._blank.config else ""
            raise CheckpointError(
                f"{folder} does not fit this model{other}: {reason}; use the config it was saved with"
            )


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one run in a folder where others may have theirs.

    A run's first record, which no other run has, marks its steps. Those of others, and whatever else lies there, are
    neither gone on from, nor validated, nor replaced, nor removed.
    """

    folder: Path
    run: Path | None
    """The run's own folder; None where nothing is known of it: then every step counts."""
    family: str = ""
    each_process: bool = False
    """Whether each of several processes saves, in `rank<N>`."""

    def open(self) -> Checkpoints:
        """The run's own checkpoints; none as long as nothing is on record."""
        mark = {"first_record": processes.agreed(next(iter(self.records()), None))} if self.run else {}
        ranks = self.each_process and processes.count() > 1
        # What several processes saved, each for itself, one process goes on with, and validates, from the first's.
        inside = "rank0" if not ranks and processes.agreed((self.folder / "rank0").is_dir()) else ""
        return Checkpoints(
            self.folder / inside,
            KeepAll(),
            family=self.family,
            config=mark,
            shared=self.run is not None,
            each_process=ranks,
        )

    def records(self) -> list[dict[str, Any]]:
        return [*read_events(self.run)] if self.run and (self.run / "events.jsonl").exists() else []

    def steps(self) -> list[int]:
        with self.open() as checkpoints:
            return checkpoints.steps()

    def other_steps(self) -> list[int]:
        """Whole steps where the run's own are that are not the run's, by process 0's word."""
        with self.open() as own, Checkpoints(own.folder, KeepAll(), family=self.family) as found:
            return list(processes.agreed(sorted({*found._ours.complete()} - {*own._ours.complete()})))


def named_leaves(state: Any) -> dict[str, Any]:
    """Every leaf by its path, such as `params/dense/w`; refuses two leaves whose paths read the same.

    Rows of stages are the leaves of the undivided tree, of which these have shape and type alone.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(undivided(state, form_of_whole))[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "state"
        if name in leaves:
            raise CheckpointError(f"two leaves of the state are both called {name}: rename one of their keys")
        leaves[name] = leaf
    return leaves


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_form(leaf: Any) -> StoredLeaf:
    """Type and shape of a leaf; a plain number is `python int`, `python float` or `python bool`."""
    if type(leaf) in (bool, int, float):
        return StoredLeaf(f"python {type(leaf).__name__}", (), "")
    return StoredLeaf(str(getattr(leaf, "dtype", type(leaf).__name__)), tuple(getattr(leaf, "shape", ())), "")


def snapshot(state: Any) -> tuple[steps.HostArrays, dict[str, StoredLeaf]]:
    """Host copies of every leaf, by path, and their forms; the state may be donated right afterwards."""
    leaves = named_leaves(undivided(state))
    forms = {name: leaf_form(leaf) for name, leaf in leaves.items()}
    stored = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()}
    for leaf in stored.values():
        # All transfers at once; on CPU there is none, and asking for one keeps the buffer from donation.
        if isinstance(leaf, jax.Array) and next(iter(leaf.devices())).platform != "cpu":
            leaf.copy_to_host_async()
    arrays = {}
    for name, leaf in stored.items():
        arrays[name] = processes.fetch(leaf)
        if arrays[name].dtype.kind in "OSUMm":
            raise CheckpointError(
                f"leaf {name} is a {type(leaf).__name__}: a checkpoint holds arrays and numbers"
            )
    return arrays, forms


def restore_leaf(stored: "np.ndarray[Any, Any] | None", like: Any) -> Any:
    """The stored array (None: it has no elements) as the same kind of thing as `like`, with its sharding."""
    if stored is None:
        form = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
        stored = np.zeros(form.shape, form.dtype)
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
    return processes.place(array, like.sharding) if getattr(like, "committed", True) else array


def find_leaves(stored: Mapping[str, StoredLeaf], like: Any, format: int) -> dict[str, str]:
    """The name in a checkpoint of each leaf of `like`: its own, or the one that format 1 had for it."""
    names = {}
    for name in named_leaves(like):
        known = [name]
        if format == 1:
            known += [_VELOCITY.sub("/velocity/", name), _MEAN_SQUARE.sub("/mean_square/", name)]
            # Plain chains of optax, whose links had numbers.
            known += [_OF_OPTAX.sub(rf"\1/{link}/\2", name) for link in range(3)]
            if name in _COUNTS:
                known += ["slots/updates", "optimizer/1/count", "optimizer/2/count"]
        names[name] = next((old for old in known if old in stored), name)
    return names


def explain_mismatch(leaves: Mapping[str, StoredLeaf], like: Any) -> str | None:
    """Why a checkpoint with these leaves cannot become a state like `like`; None if it can."""
    wanted = {name: leaf_form(leaf) for name, leaf in named_leaves(like).items()}
    absent = [name for name in wanted if name not in leaves]
    reasons = [f"leaf {name} is {wanted[name]} here but not in the checkpoint" for name in absent]
    for name, leaf in leaves.items():
        if name not in wanted:
            reasons.append(f"leaf {name} ({leaf}) of the checkpoint is not in this state")
    for name, leaf in wanted.items():
        if name in leaves and replace(leaves[name], checksum="") != leaf:
            reasons.append(f"leaf {name} is {leaves[name]} in the checkpoint but {leaf} here")
    more = f" (and {len(reasons) - 1} more leaves differ)" if len(reasons) > 1 else ""
    return reasons[0] + more if reasons else None

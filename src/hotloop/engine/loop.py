"""The hot loop: many weight updates in one compiled call, and exact evaluation in another.

A `Program` turns one update into a call of up to K updates that takes and returns the state (donated: the old one is
gone) and brings back every update's metrics. How many updates a call makes never changes what they compute: key and
batch of an update depend on its number alone. An `Evaluation` counts every sample once, for any batch size and on any
number of devices: batches are filled up with samples that are left out of the sums.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.compiler_options import choose_options
from hotloop.engine import feed as feeds
from hotloop.engine import processes
from hotloop.engine.blocks import Form, choose_form, count_operations, split_call
from hotloop.engine.device import platform
from hotloop.engine.feed import Batch, Feed, Gather, gather_rows
from hotloop.engine.interrupt import leave_behind_while
from hotloop.engine.keys import stream
from hotloop.engine.malloc import reserve
from hotloop.engine.progress import compiling
from hotloop.errors import DataError, HotloopError, OptionError
from hotloop.rehearsal import begin_work
from hotloop.traced_platform import name_platform, trace_for

State = Any
Metrics = Mapping[str, Array]
Update = Callable[[Any, Batch, Array], tuple[Any, Metrics]]
Loop = Literal["while", "blocks", "scan"]


class CallMetrics(Mapping[str, "np.ndarray[Any, Any]"]):
    """Every update's metrics of one call: `metrics["loss"]` is an array of [count]. They stay on the device until asked
    for, so that making a call does not wait for it; asking waits."""

    def __init__(self, parts: Sequence[tuple[Mapping[str, Array], int]]):
        self._parts = parts  # of each program: room for its metrics, and how many updates it made

    def __getitem__(self, name: str) -> "np.ndarray[Any, Any]":
        found = [np.asarray(buffers[name])[:count] for buffers, count in self._parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0][0])

    def __len__(self) -> int:
        return len(self._parts[0][0])

    def wait(self) -> None:
        """Return when the call is done."""
        for buffer in self._parts[-1][0].values():
            buffer.block_until_ready()


class Program:
    """Compiled calls of up to `updates_per_call` updates.

    With loop "while" the number of updates is a run-time argument: one compilation serves every call, and a CPU runs it
    just as fast. With "scan" all of the number is built in, which spares an accelerator a round trip to the host in
    every update, and each number of updates in use is compiled once. With "blocks" the number of a block is built in:
    one compilation, and a second one for calls that are no multiple of a block (`engine/blocks.py`). Chosen by platform
    unless given.

    >>> import jax, numpy as np
    >>> from hotloop import Program, Resident
    >>> def update(slope, batch, key):
    ...     error = slope * batch["x"] - batch["y"]
    ...     return slope - (error * batch["x"]).mean(), {"loss": (error**2).mean()}
    >>> x = np.linspace(-1, 1, 32, dtype=np.float32)
    >>> program = Program(update, Resident({"x": x, "y": 3 * x}, batch_size=8), 50, jax.random.key(0))
    >>> slope, metrics = program(jax.numpy.zeros(()), first=0, count=50)
    >>> round(float(slope), 3), metrics["loss"].shape
    (3.0, (50,))
    """

    def __init__(
        self,
        update: Update,
        feed: Feed,
        updates_per_call: int,
        key: Array,
        *,
        loop: Loop | None = None,
    ):
        self.update, self.feed, self.key = update, feed, key
        self.updates_per_call = min(updates_per_call, feed.longest_call)
        self.loop: Loop = loop or ("while" if platform() == "cpu" else loop_of_accelerators())
        self.any_count = self.loop != "scan" and feed.any_count
        """Whether the same one or two programs serve calls of every length."""
        self.form: Form | None = None
        """The first of those programs, once it is chosen."""
        self.lower_seconds = self.compile_seconds = 0.0
        self.native_calls: dict[str, int] = {}
        """Of the call compiled last, how often its program calls each kernel of hotloop-native."""
        self.compiler_options: dict[str, str | bool] = {}
        """What the compiler was given, as `choose_options` has it."""
        self._fit_seconds = 0.0
        """Of tracing that is still to be counted with the first lowering."""
        self.executables: dict[Form, Any] = {}
        self._ahead: dict[Form, Future[_Compiled]] = {}
        """Those that a thread compiles."""

        checked = _check_results(update)

        # Inlined and cached: traced once, and every program takes it from there. It knows nothing of `self`, or the
        # program's data would stay until the collector comes.
        @partial(jax.jit, inline=True)
        def one(state: State, step: Array, arguments: Any, key: Array, first: Array) -> tuple[State, Metrics]:
            return checked(state, feed.batch(arguments, step), stream(key, "update", first + step))

        self._one = one

    @property
    def compiled(self) -> Any:
        """The executable of the most updates: cost_analysis(), memory_analysis(), as_text()."""
        return self.executables[max(self.executables, key=lambda form: form.capacity)]

    def fit(self, state: State, lengths: Mapping[int, int] | None = None) -> None:
        """Choose the programs for calls of these lengths, with how many there are of each (None: for the longest
        call), if that is still to do. Calls of other lengths can be made all the same."""
        if self.form is not None or not self.any_count:
            return
        if self.loop == "while":
            self.form = Form(1, self.updates_per_call)
            return
        cut: Counter[int] = Counter()
        for length, calls in (lengths or {self.updates_per_call: 1}).items():
            cut[min(length, self.updates_per_call)] += calls
        started = time.perf_counter()
        with trace_for(find_target()):
            traced = self._one.trace(state, np.uint32(0), self.feed.like(1), self.key, np.uint32(0))
        self.form = choose_form(cut, count_operations(traced.jaxpr.jaxpr))
        self._fit_seconds = time.perf_counter() - started

    def missing(self, count: int) -> list[Form]:
        """The programs of a call of `count` updates that are still to be compiled, or to be waited for."""
        return [form for form, _ in self._parts(count) if form not in self.executables]

    def compile(self, state: State, count: int | None = None) -> None:
        """Compile the call of `count` updates (updates_per_call if not given), unless that is done already; tracing
        with lowering adds to `lower_seconds`, the compiler to `compile_seconds`."""
        count = self.updates_per_call if count is None else count
        self.fit(state)
        for form in self.missing(count):
            processes.note("compiling")
            with compiling(recorded=True):
                ahead = self._ahead.pop(form, None)
                made = ahead.result() if ahead else _compile_lowered(self._lower(state, form))
            self.executables[form] = made.executable
            self.lower_seconds += made.lower_seconds
            self.compile_seconds += made.compile_seconds
            self.native_calls, self.compiler_options = made.native_calls, made.options
            _reserve_temporaries(made.executable)
            _await_others(state, self.feed.like(count))
            processes.note("training")

    def compile_ahead(self, state: State, count: int) -> None:
        """Let a thread compile what a call of `count` updates still needs. It is traced here and now: what jax is told
        by context managers is this thread's."""
        for form in self.missing(count):
            if form not in self._ahead:
                future = _COMPILER.submit(_compile_lowered, self._lower(state, form))
                leave_behind_while(lambda future=future: not future.done())  # type: ignore[misc]
                self._ahead[form] = future

    def is_ahead(self, count: int) -> bool:
        """Whether a thread has begun to compile, or has compiled, what a call of `count` updates still needs."""
        return any(form in self._ahead for form in self.missing(count))

    def lower(self, state: State) -> Any:
        """The traced call before it is compiled; its `as_text()` is what the compiler gets."""
        self.fit(state)
        return self._lower_form(state, self._parts(self.updates_per_call)[0][0])

    def __call__(
        self, state: State, first: int, count: int, following: int | None = None
    ) -> tuple[State, CallMetrics]:
        """Make updates first .. first + count - 1 and return without waiting for them. The state given is used up.
        `following` says how many updates the next call will take (as many again if not said), so that a feed may
        prepare them meanwhile."""
        if not 1 <= count <= self.updates_per_call:
            raise ValueError(f"a call of {count} updates: this program makes 1 to {self.updates_per_call}")
        self.compile(state, count)
        made = []
        for form, part in self._parts(count):
            arguments = self.feed.arguments(first, part, count if following is None else following)
            turns = np.int32(part // form.block)
            state, buffers = self.executables[form](state, arguments, self.key, np.uint32(first), turns)
            made.append((buffers, part))
            first += part
        return state, CallMetrics(made)

    def _parts(self, count: int) -> list[tuple[Form, int]]:
        """The programs that make a call, in their order, with how many updates each makes."""
        if self.any_count:
            assert self.form is not None
            return split_call(self.form, count)
        return [(Form(1 if self.loop == "while" else count, count), count)]

    def _lower(self, state: State, form: Form) -> "_Lowered":
        started = time.perf_counter()
        call = self._lower_form(state, form)
        seconds = time.perf_counter() - started + self._fit_seconds
        self._fit_seconds = 0.0
        return _Lowered(call, seconds, count_native_calls(call), choose_options(call, platform()))

    def _lower_form(self, state: State, form: Form) -> Any:
        def step(index: Array, carry: Any, arguments: Any, key: Array, first: Array) -> Any:
            state, buffers = carry
            state, metrics = self._one(state, index.astype(jnp.uint32), arguments, key, first)
            return state, {name: buffers[name].at[index].set(metrics[name]) for name in buffers}

        def blocks(state: State, arguments: Any, key: Array, first: Array, turns: Array) -> Any:
            shapes = jax.eval_shape(self._one, state, jnp.uint32(0), arguments, key, first)[1]
            buffers = {
                name: jnp.zeros((form.capacity, *leaf.shape), leaf.dtype) for name, leaf in shapes.items()
            }

            def block(turn: Array, carry: Any) -> Any:
                if form.block == 1:
                    return step(turn, carry, arguments, key, first)
                start = turn * form.block
                return jax.lax.fori_loop(
                    0,
                    form.block,
                    lambda index, carry: step(start + index, carry, arguments, key, first),
                    carry,
                )

            return jax.lax.fori_loop(0, turns, block, (state, buffers))

        def scan(state: State, arguments: Any, key: Array, first: Array, turns: Array) -> Any:
            steps = jnp.arange(form.capacity, dtype=jnp.uint32)

            def one(state: State, step: Array) -> Any:
                return self._one(state, step, arguments, key, first)

            return jax.lax.scan(one, state, steps)

        # A state that is spread over several devices must come back to where its leaves lie.
        places = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), state)
        several = any(place is not None and place.num_devices > 1 for place in jax.tree.leaves(places))
        like = self.feed.like(form.capacity)
        everywhere = everywhere_like(state, like)
        results = places if several else everywhere, everywhere
        is_scan = self.loop != "while" and form.block == form.capacity
        looped = jax.jit(scan if is_scan else blocks, donate_argnums=0, out_shardings=results)
        with trace_for(find_target()):
            return looped.lower(state, like, self.key, np.uint32(0), np.int32(0))


def find_target() -> str | None:
    """The platform to trace for alone: an accelerator's. A CPU's programs keep all paths: their bits are promised, and
    what surrounds an operation decides how the compiler fuses it."""
    if platform() == "cpu":
        return None
    return name_platform(jax.local_devices(backend=platform())[0])


def loop_of_accelerators() -> Loop:
    """Blocks, which compile once for calls of every length and are as fast on a card (docs/results.md);
    HOTLOOP_LOOP=scan asks for loops of built-in length."""
    wanted = os.environ.get("HOTLOOP_LOOP", "blocks")
    if wanted not in ("scan", "blocks"):
        raise OptionError(f"HOTLOOP_LOOP={wanted}: must be scan or blocks")
    return "scan" if wanted == "scan" else "blocks"


_COMPILER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hotloop-compiler")


class _Lowered(NamedTuple):
    """A program as the compiler gets it, with what it is to be given besides."""

    call: Any
    lower_seconds: float
    native_calls: dict[str, int]
    options: dict[str, str | bool]


class _Compiled(NamedTuple):
    executable: Any
    lower_seconds: float
    compile_seconds: float
    native_calls: dict[str, int]
    options: dict[str, str | bool]


def _compile_lowered(given: _Lowered) -> _Compiled:
    started = time.perf_counter()
    executable = given.call.compile(compiler_options=given.options)
    seconds = time.perf_counter() - started
    return _Compiled(executable, given.lower_seconds, seconds, given.native_calls, given.options)


def count_native_calls(lowered: Any) -> dict[str, int]:
    """The kernels of hotloop-native in a program, and how often each is called there."""
    if platform() != "cpu" or "hotloop_native" not in sys.modules:
        return {}  # nothing can call them, and the text of a large program takes a while
    return dict(Counter(re.findall(r"custom_call @(hotloop_\w+)", lowered.as_text())))


def _reserve_temporaries(compiled: Any) -> None:
    """On a CPU, where a call's temporaries are one block of malloc's."""
    if platform() == "cpu" and (sizes := compiled.memory_analysis()) is not None:
        reserve(sizes.temp_size_in_bytes)


def _await_others(*trees: Any) -> None:
    """After a compilation: where the program spans processes, wait until all have it. Those that compile faster would
    give up on the others, gloo after 30 seconds."""
    if processes.spans_processes(trees):
        processes.barrier("compiled")


def everywhere_like(*trees: Any) -> NamedSharding | None:
    """A copy on every device of arrays that span processes, so that each process can read it; None for others."""
    for leaf in jax.tree.leaves(trees) if processes.count() > 1 else ():
        if processes.spans_processes(leaf):
            return NamedSharding(leaf.sharding.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    return None


def _check_results(update: Update) -> Update:
    """The update, refused another kind of state than it took, and metrics that are no flat dict of arrays."""

    def named(tree: State) -> dict[str, Any]:
        leaves = jax.tree.leaves_with_path(tree)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") or "data" for path, _ in leaves]
        return dict(zip(names, jax.tree.leaves(tree), strict=True))

    def checked(old: State, batch: Batch, key: Array) -> tuple[State, Metrics]:
        new, metrics = update(old, batch, key)
        before, after = named(old), named(new)
        if str(jax.tree.structure(old)) != str(jax.tree.structure(new)):
            odd = ", ".join(sorted(set(before) ^ set(after))) or "its containers"
            raise HotloopError(f"an update must return a state like the one it took; it differs in {odd}")
        for name, leaf in before.items():
            was, became = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in (leaf, jnp.asarray(after[name])))
            if was != became:
                raise HotloopError(
                    f"an update must keep the shape and type of the state: {name} was {was}, became {became}"
                )
        if not isinstance(metrics, Mapping) or any(not hasattr(value, "shape") for value in metrics.values()):
            raise HotloopError(
                "an update must return (state, metrics), metrics a flat dict of arrays by name"
            )
        return new, metrics

    return checked


def copy_state(state: State) -> State:
    """A copy of a state that a program may use up: plain numbers become arrays, leaves share nothing. Where leaves lie
    on the devices of several processes, all do."""
    everywhere, leaves = everywhere_like(state), jax.tree.leaves(state)
    if everywhere is None and _lie_together(leaves):
        return _copy_together(state)

    def copy_leaf(leaf: Any) -> Array:
        # Not by `device_put`, which would tie what lies anywhere to its device.
        new: Array = leaf.copy() if isinstance(leaf, Array) else jnp.array(np.asarray(leaf))
        local = everywhere is not None and new.is_fully_addressable
        return processes.place(new, everywhere) if local else new

    return jax.tree.map(copy_leaf, state)


@jax.jit
def _copy_together(state: State) -> State:
    """One program for all leaves: leaf by leaf there would be one for each shape, which a GPU takes long to compile."""
    return jax.tree.map(jnp.copy, state)


def _lie_together(leaves: Sequence[Any]) -> bool:
    """Whether all are arrays of the same one device, tied to it or none of them."""
    if not all(isinstance(leaf, Array) and not isinstance(leaf, Tracer) for leaf in leaves):
        return False
    places = {(*leaf.devices(), leaf.committed) for leaf in leaves}
    return len(places) == 1 and all(leaf.sharding.num_devices == 1 for leaf in leaves)


def place_state(state: State, everywhere: NamedSharding) -> State:
    """A state on every device of a mesh; what lies there already, such as the parts of stages, stays as it is."""

    def put(leaf: Any) -> Any:
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        return leaf if mesh == everywhere.mesh else processes.place(leaf, everywhere)

    return jax.tree.map(put, state)


PerSample = Callable[[Any, Batch], Mapping[str, Array]]
Sums = dict[str, Any]
_COUNTED = ""  # under which a batch's sums have the number of its samples: no name of the caller's


@dataclass(frozen=True)
class Prepared:
    """What to compute for samples in two parts: `prepare(state)`, which all batches share, and `values` of it and one.

    Called like any other; an `Evaluation` prepares once for all its batches.
    """

    prepare: Callable[[Any], Any]
    values: PerSample

    def __call__(self, state: Any, batch: Batch) -> Mapping[str, Array]:
        return self.values(self.prepare(state), batch)


class Evaluation:
    """A data set and what to compute for its samples, compiled once (for states of the same types) and called with
    state after state.

    `fn(state, batch)` returns a dict of arrays whose first axis is the batch: a correct answer as a bool, a squared
    error, or a row for each sample. `evaluation(state)` is the sum of each over all samples, and their number under
    `samples`; booleans and integers are counted exactly, and batch sums of floats are added in float64. Of the booleans
    that `united` names, whether any sample has them: sums of long rows for every batch would fill the memory. `data`,
    `samples` and `gather` are as for `feed.Resident`. With a `sharding` over the batch axis all its devices share each
    batch, of which there may be fewer samples than devices; data and state are copied to all of them.

    >>> import numpy as np
    >>> from hotloop import Evaluation
    >>> data = {"x": np.arange(5, dtype=np.float32)}
    >>> evaluation = Evaluation(lambda state, batch: {"error": abs(batch["x"] - state)}, data, batch_size=2)
    >>> evaluation(1.0)
    {'error': 7.0, 'samples': 5}
    >>> evaluation.means(1.0)
    {'error': 1.4, 'samples': 5}
    """

    def __init__(
        self,
        fn: PerSample,
        data: Any,
        batch_size: int,
        *,
        samples: int | None = None,
        gather: Gather = gather_rows,
        sharding: NamedSharding | None = None,
        united: tuple[str, ...] = (),
    ):
        self.samples = feeds.common_length(data) if samples is None else samples
        if self.samples == 0:
            raise DataError("the data set is empty: there is nothing to evaluate")
        if batch_size < 1:
            raise DataError(f"batch size {batch_size}: must be at least 1")
        # Several devices get the batch that was asked for, which they may have to divide further.
        self.batch_size = feeds.fill_up(sharding, batch_size) if sharding else min(batch_size, self.samples)
        self.lower_seconds = self.compile_seconds = 0.0
        self.compiled: Any = None  # the program of the last state's types
        self._programs: dict[Any, Any] = {}
        self._fn, self._gather, self._sharding, self._united = fn, gather, sharding, united
        self._everywhere = feeds.placement_like(sharding, ())
        self._data = processes.place(data, self._everywhere)

    def over(self, data: Any) -> "Evaluation":
        """The same computation over other data of the same shapes and types: nothing is compiled again."""
        other = copy(self)
        other._data = processes.place(data, self._everywhere)
        return other

    def compile(self, state: Any) -> None:
        """Compile ahead of the first call with a state of these types, if that is still to do."""
        types = tuple(jnp.result_type(leaf) for leaf in jax.tree.leaves(state))
        self.compiled = self._programs.get(types)
        if self.compiled is not None:
            return
        fn = self._fn if isinstance(self._fn, Prepared) else Prepared(lambda state: state, self._fn)
        sums = _masked_sums(fn.values)

        def sums_of_batches(state: Any, data: Any) -> Any:
            state = fn.prepare(state)

            def sum_at(start: Array) -> dict[str, Array]:
                places = start + jnp.arange(self.batch_size)
                batch = self._gather(data, jnp.minimum(places, self.samples - 1))
                return sums(state, feeds.spread_batch(batch, self._sharding), places < self.samples)

            def one(seen: dict[str, Array], start: Array) -> tuple[dict[str, Array], dict[str, Array]]:
                found = sum_at(start)
                return {name: seen[name] | (found.pop(name) > 0) for name in self._united}, found

            starts = jnp.arange(0, self.samples, self.batch_size)
            forms = jax.eval_shape(sum_at, starts[0]) if self._united else {}
            nothing = {name: jnp.zeros(forms[name].shape, bool) for name in self._united}
            seen, found = jax.lax.scan(one, nothing, starts)
            return {**found, **{name: any_of[None].astype(jnp.int32) for name, any_of in seen.items()}}

        begin_work("compiling the evaluation")
        processes.note("compiling")
        started = time.perf_counter()
        with compiling():
            spread = self._spread(state)
            everywhere = self._everywhere or everywhere_like(spread)
            lowered = jax.jit(sums_of_batches, out_shardings=everywhere).lower(spread, self._data)
            self.lower_seconds = time.perf_counter() - started
            self.compiled = lowered.compile(compiler_options=choose_options(lowered, platform()))
        self._programs[types] = self.compiled
        _reserve_temporaries(self.compiled)
        self.compile_seconds = time.perf_counter() - started - self.lower_seconds
        _await_others(spread, self._data)

    def __call__(self, state: Any) -> Sums:
        """Every sum, and the number of samples."""
        self.compile(state)
        processes.note("training")
        return _add_batches(self.compiled(self._spread(state), self._data), self.samples)

    def _spread(self, state: Any) -> Any:
        return state if self._everywhere is None else place_state(state, self._everywhere)

    def means(self, state: Any) -> dict[str, Any]:
        """The mean of each over all samples: figures for `validate`."""
        return means_of(self(state))


def means_of(sums: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of each sum over the samples, and their number under `samples` again."""
    samples = sums["samples"]
    return {name: value / samples for name, value in sums.items() if name != "samples"} | {"samples": samples}


def evaluate_batches(
    fn: PerSample,
    state: Any,
    batches: Iterable[Batch],
    batch_size: int,
    sharding: NamedSharding | None = None,
) -> Sums:
    """Sums over batches from the host, each of `batch_size` samples or fewer; `fn` is compiled once.

    With a `sharding` over the batch axis its devices share each batch, filled up. Of several processes each hands in
    its own share of every batch: of the rows that `processes.own_rows` names in a batch of `feed.fill_up` those that
    there are, which may be none.
    """
    size, everywhere = feeds.fill_up(sharding, batch_size), feeds.placement_like(sharding, ())
    own = len(range(size)[processes.own_rows(sharding, size)])
    most = min(own, batch_size)
    state = state if everywhere is None else place_state(state, everywhere)
    everywhere = everywhere or everywhere_like(state)
    sums: list[Mapping[str, Any]] = []
    for batch in batches:
        count = feeds.common_length(batch)
        if count > most:
            raise DataError(f"a batch of {count} samples: at most {most} were announced")
        given = pad_batch(batch, own), np.arange(own) < count
        if sharding is not None:
            given = processes.place_rows(given, sharding, size)
        with nullcontext() if sums else compiling():
            sums.append(_sum_batch(fn, everywhere, state, *given))
        processes.note("training")
    stacked = {
        name: np.stack([np.asarray(each[name]) for each in sums]) for name in (sums[0] if sums else ())
    }
    samples = int(stacked.pop(_COUNTED, np.zeros(1)).sum())
    if not samples:
        raise DataError("there was no batch to evaluate")
    return _add_batches(stacked, samples)


def _masked_sums(fn: PerSample) -> Callable[[Any, Batch, Array], dict[str, Array]]:
    """The sum of each array of `fn` over its first axis, taken where `real` says so (NaN elsewhere does no harm)."""

    def sums(state: Any, batch: Batch, real: Array) -> dict[str, Array]:
        found = {}
        for name, each in fn(state, batch).items():
            value = jnp.asarray(each)
            if value.shape[:1] != real.shape:
                needed = f"it needs one value for each of {len(real)} samples"
                raise HotloopError(f"evaluation gives {name} of shape {value.shape}: {needed}")
            counted = value.dtype == jnp.bool_ or jnp.issubdtype(value.dtype, jnp.integer)
            wide = jnp.int32 if counted else jnp.promote_types(value.dtype, jnp.float32)
            kept = jnp.where(real.reshape(-1, *(1,) * (value.ndim - 1)), value, 0)
            found[name] = jnp.sum(kept.astype(wide), axis=0)
        return found

    return sums


@partial(processes.JitTogether, static=(0, 1))
def _sum_batch(
    fn: PerSample, everywhere: NamedSharding | None, state: Any, batch: Batch, real: Array
) -> dict[str, Array]:
    sums = {**_masked_sums(fn)(state, batch, real), _COUNTED: real.sum(dtype=jnp.int32)}
    held: dict[str, Array] = feeds.spread_batch(sums, everywhere)  # every process reads them
    return held


def pad_batch(batch: Batch, length: int) -> Batch:
    """A batch from the host with its last sample repeated until it has `length` of them; zeros where it has none."""

    def fill(leaf: Any) -> Any:
        full = len(leaf) == length
        if not len(leaf):
            return np.zeros((length, *leaf.shape[1:]), leaf.dtype)
        return leaf if full else np.asarray(leaf)[np.minimum(np.arange(length), len(leaf) - 1)]

    return jax.tree.map(fill, batch)


def _add_batches(sums: Mapping[str, Any], samples: int) -> Sums:
    """Batch sums [batches, ...] added up on the host, where there are 64 bits to do it in."""
    totals: Sums = {}
    for name, value in sums.items():
        batches = np.asarray(value)
        total = batches.sum(axis=0, dtype=np.int64 if batches.dtype.kind in "iu" else np.float64)
        totals[name] = total.item() if total.ndim == 0 else total
    return {**totals, "samples": samples}

"""What a device does in the ticks of a pipeline's table, and what it passes on to its neighbours after each.

All of it runs inside `shard_map` over replicas and stages. Devices take different branches of a switch, so no branch
holds a collective: what crosses is passed on after it, by all. Values that cross wait in a ring of as many slots as
the table needs, flat and padded, as every device has the same program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.engine.device import STAGE
from hotloop.engine.pipeline_table import BACKWARD, FORWARD, IDLE, Table
from hotloop.engine.stage_rows import Layout
from hotloop.errors import HotloopError

Rows = dict[str, Array]
Take = Callable[[Array], tuple[Any, Array]]
"""Samples and their keys of this device's micro-batch of a number."""
StageLoss = Callable[[Any, Any, Any, Any, Array], tuple[Any, tuple[Any, Any]]]
"""`stage(params, carry, values, samples, keys)` -> values for the next stage, (carry for the next samples, figures).

`params` and `carry` are the stage's own; `values` came from the stage before (None at the first). The last stage gives
the samples' mean loss instead of values, and its figures are the ones that count. What a stage computes must not
depend on its carry: it goes forward with several micro-batches before it goes backward with the first.
"""
StageValues = Callable[[Any, Any, Any, Any], Any]
"""`stage(params, kept, values, samples)` -> values for the next stage; the last one's have a row for each sample."""


def by_stage(branch: Callable[[int], Any], stages: int) -> Any:
    """`branch(stage)` of this device's stage; every stage's must give arrays of the same shapes."""
    return lax.switch(lax.axis_index(STAGE), [partial(branch, stage) for stage in range(stages)])


class Sums(NamedTuple):
    """What adds up over the micro-batches: gradients and carry of this device's stage, and the mean figures."""

    gradients: Rows
    running: Rows
    figures: Any


class Held(NamedTuple):
    """What a device holds between ticks: rings of values from the stage before and gradients from the next; sums."""

    values: Rows
    back: Rows
    sums: Sums


class Step(NamedTuple):
    """What comes of one tick: what is sent, and the sums after it. Values for the next stage and gradients for the one
    before are in the same rows, as no stage sends both."""

    sent: Rows
    sums: Sums


@dataclass(frozen=True)
class Training:
    """The stages of one update on this device, with its micro-batches; `factor` scales the loss."""

    stages: Sequence[StageLoss]
    table: Table
    take: Take
    factor: Array
    params: Layout
    rows: Rows  # this stage's parameters, as it computes with them
    running: Layout

    def run(self, started: Rows) -> Sums:
        """The sums after the last tick, from a carry to start from."""
        crossing, back, figures = self._layouts(started)
        last = len(self.stages) - 1

        def arrived(stage: int, number: Array, held: Held) -> Any:
            return crossing.unravel(stage - 1, _read(held.values, number)) if stage else None

        def idle(number: Array, held: Held) -> Step:
            return Step(crossing.zeros(), held.sums)

        def forward(stage: int, number: Array, held: Held) -> Step:
            values = arrived(stage, number, held)
            out, _ = self._enter(stage, held.sums.running, number)(self._own(stage), values)
            return Step(crossing.ravel(stage, out), held.sums)

        def backward(stage: int, number: Array, held: Held) -> Step:
            values = arrived(stage, number, held)
            enter = self._enter(stage, held.sums.running, number)
            out, pull, (carry, figures) = jax.vjp(enter, self._own(stage), values, has_aux=True)
            if stage == last:
                came = jnp.ones_like(out)
            else:
                came = _cotangent(out, back.unravel(stage, _read(held.back, number)))
            gradients, to_values = pull(came)
            sent = back.ravel(stage - 1, _floats(values, to_values)) if stage else {}
            sums = self._add(stage, held.sums, gradients, carry, figures)
            # A gradient is as long as its value, and not every value has one.
            return Step(_lengthen(sent, crossing.lengths), sums)

        branches: list[Callable[..., Step]] = [
            idle,
            *(partial(forward, stage) for stage in range(last)),
            *(partial(backward, stage) for stage in range(last + 1)),
        ]

        def tick(held: Held, row: Array) -> tuple[Held, None]:
            stage = lax.axis_index(STAGE)
            kind, number = row[stage]
            which = jnp.where(kind == IDLE, 0, jnp.where(kind == FORWARD, 1 + stage, 1 + last + stage))
            done = lax.switch(which, branches, number, held)
            values = _pass_on(held.values, done.sent, row, FORWARD, 1)
            return Held(values, _pass_on(held.back, done.sent, row, BACKWARD, -1), done.sums), None

        rings = _ring(crossing, self.table.slots), _ring(back, self.table.gradient_slots)
        sums = Sums(self.params.zeros(jnp.float32), started, figures)
        held, _ = lax.scan(tick, Held(*rings, sums), jnp.array(self.table.rows, jnp.int32))
        return held.sums

    def _own(self, stage: int) -> Any:
        return self.params.unravel(stage, self.rows)

    def _enter(self, stage: int, running: Rows, number: Array) -> Callable[[Any, Any], Any]:
        """The stage as a function of parameters and values; the last one's loss is scaled."""
        samples, keys = self.take(number)
        carry = self.running.unravel(stage, running)

        def enter(params: Any, values: Any) -> Any:
            out, found = self.stages[stage](params, carry, values, samples, keys)
            is_last = stage == len(self.stages) - 1
            return out.astype(jnp.float32) * self.factor if is_last else out, found

        return enter

    def _add(self, stage: int, sums: Sums, gradients: Any, carry: Any, figures: Any) -> Sums:
        """The sums with one more micro-batch, in float32; figures are the last stage's alone."""
        share = 1 / self.table.micro_batches

        def add(total: Array, more: Array) -> Array:
            return total + share * more.astype(jnp.float32)

        is_last = stage == len(self.stages) - 1
        return Sums(
            jax.tree.map(add, sums.gradients, self.params.ravel(stage, gradients, jnp.float32)),
            self.running.ravel(stage, carry),
            jax.tree.map(add, sums.figures, figures) if is_last else sums.figures,
        )

    def _layouts(self, started: Rows) -> tuple[Layout, Layout, Any]:
        """Where values lie in what crosses from each stage but the last; where their gradients do; empty figures."""
        forms: list[Any] = [None]
        for stage in range(len(self.stages)):

            def enter(started: Rows, values: Any, stage: int = stage) -> Any:
                return self._enter(stage, started, jnp.int32(0))(self._own(stage), values)

            out, (_, figures) = jax.eval_shape(enter, started, forms[-1])
            forms.append(out)
        if getattr(forms[-1], "shape", None) != ():
            raise HotloopError("stages: the last one must return the mean loss, which is one number")
        crossing = forms[1:-1]
        zeros = jax.tree.map(lambda form: jnp.zeros(form.shape, jnp.float32), figures)
        return Layout.of(crossing), Layout.of([_floats(form, form) for form in crossing]), zeros


def run_forward(
    stages: Sequence[StageValues],
    table: Table,
    take: Callable[[Array], Any],
    params: Callable[[int], Any],
    kept: Callable[[int], Any],
) -> Any:
    """What the last stage gives for the micro-batches, one after another, on the devices of every stage.

    `params(stage)` and `kept(stage)` are what a stage has; there is a row for each sample.
    """
    forms: list[Any] = [None]
    for stage, enter in enumerate(stages):
        forms.append(
            jax.eval_shape(
                lambda values, enter=enter, stage=stage: enter(
                    params(stage), kept(stage), values, take(jnp.int32(0))
                ),
                forms[-1],
            )
        )
    crossing, last = Layout.of(forms[1:-1]), len(stages) - 1

    def idle(number: Array, arrived: Rows, found: Any) -> tuple[Rows, Any]:
        return crossing.zeros(), found

    def forward(stage: int, number: Array, arrived: Rows, found: Any) -> tuple[Rows, Any]:
        values = crossing.unravel(stage - 1, arrived) if stage else None
        out = stages[stage](params(stage), kept(stage), values, take(number))
        if stage < last:
            return crossing.ravel(stage, out), found
        put = partial(lax.dynamic_update_index_in_dim, index=number, axis=0)
        return crossing.zeros(), jax.tree.map(put, found, out)

    branches: list[Callable[..., Any]] = [idle, *(partial(forward, stage) for stage in range(last + 1))]

    def tick(held: tuple[Rows, Any], row: Array) -> tuple[tuple[Rows, Any], None]:
        waiting, found = held
        stage = lax.axis_index(STAGE)
        kind, number = row[stage]
        which = jnp.where(kind == IDLE, 0, 1 + stage)
        sent, found = lax.switch(which, branches, number, _read(waiting, number), found)
        return (_pass_on(waiting, sent, row, FORWARD, 1), found), None

    def empty(form: Any) -> Array:
        return jnp.zeros((table.micro_batches, *form.shape), form.dtype)

    start = _ring(crossing, table.slots), jax.tree.map(empty, forms[-1])
    (_, found), _ = lax.scan(tick, start, jnp.array(table.rows, jnp.int32))
    return jax.tree.map(_of_the_one_that_has_it, found)


def _of_the_one_that_has_it(found: Array) -> Array:
    """A result [micro-batches, samples, ...] that is zero on all stages but one, as rows [all samples, ...] on each."""
    numbers = found.astype(jnp.int32) if found.dtype == bool else found
    total: Array = lax.psum(numbers, STAGE).astype(found.dtype)  # type: ignore[no-untyped-call]
    return total.reshape(-1, *found.shape[2:])


def _ring(layout: Layout, slots: int) -> Rows:
    return {kind: jnp.zeros((slots, row.size), row.dtype) for kind, row in layout.zeros().items()}


def _read(ring: Rows, number: Array) -> Rows:
    """What waits for the micro-batch of a number; anything where there is none."""
    return {
        kind: lax.dynamic_index_in_dim(held, number % held.shape[0], keepdims=False)
        for kind, held in ring.items()
    }


def _lengthen(rows: Rows, lengths: Mapping[str, int]) -> Rows:
    """The rows, as long as `lengths` has them by type; zeros where there is none or no more."""
    empty = {kind: jnp.zeros(0, kind) for kind in lengths} | rows
    return {kind: jnp.pad(empty[kind], (0, length - empty[kind].size)) for kind, length in lengths.items()}


def _pass_on(ring: Rows, sent: Rows, row: Array, kind: int, step: int) -> Rows:
    """Send to the stage `step` further; the ring with what came from the one `step` before, if it did a tick of `kind`.

    `row` has what every stage did in this tick, and with which micro-batch: it is the same on all devices, so that all
    of them send or none does. Copies of what nobody sends would be most of a small stage's time on processors.
    """
    if not ring:
        return ring
    stages, stage = row.shape[0], lax.axis_index(STAGE)
    links = [(i, i + step) for i in range(stages) if 0 <= i + step < stages]
    sender = stage - step
    what, number = row[jnp.clip(sender, 0, stages - 1)]
    arrived = (sender >= 0) & (sender < stages) & (what == kind)

    def store(held: Array, new: Array) -> Array:
        slot = number % held.shape[0]
        kept = lax.dynamic_index_in_dim(held, slot, keepdims=False)
        stored: Array = lax.dynamic_update_index_in_dim(held, jnp.where(arrived, new, kept), slot, 0)
        return stored

    def exchange(ring: Rows, sent: Rows) -> Rows:
        cut = {name: sent[name][: held.shape[1]] for name, held in ring.items()}
        came = lax.ppermute(cut, STAGE, links)  # type: ignore[no-untyped-call]
        return {name: store(held, came[name]) for name, held in ring.items()}

    senders = row[:-1] if step > 0 else row[1:]
    new: Rows = lax.cond(jnp.any(senders[:, 0] == kind), exchange, lambda ring, sent: ring, ring, sent)
    return new


def _floats(like: Any, tree: Any) -> list[Any]:
    """The leaves of a tree that are floats in `like`."""
    pairs = zip(jax.tree.leaves(like), jax.tree.leaves(tree), strict=True)
    return [leaf for form, leaf in pairs if jnp.issubdtype(form.dtype, jnp.inexact)]


def _cotangent(out: Any, floats: Sequence[Array]) -> Any:
    """The gradients of `out`, of which those of its floats are given; others have none."""
    leaves, structure = jax.tree.flatten(out)
    given = iter(floats)
    whole = [
        next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else np.zeros(leaf.shape, jax.dtypes.float0)
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, whole)

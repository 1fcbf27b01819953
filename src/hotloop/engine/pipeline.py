"""One weight update, or one evaluation, of a model whose stages lie on devices of their own; it knows no model.

A scan goes over the ticks of a table (`pipeline_table`): each device does what its stage has to do in this tick, then
all pass on what crosses (`pipeline_ticks`). A backward tick computes its stage again from the values that waited, so
that those alone are kept. The scan itself is never differentiated: that would keep every tick's activations. The
optimiser then works on each stage's own tree, whose parameters and slots no other device has (`stage_rows`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from hotloop.engine import stage_rows
from hotloop.engine.device import REPLICA, STAGE
from hotloop.engine.pipeline_table import SCHEDULES, Table, forward_table, make_table
from hotloop.engine.pipeline_ticks import StageLoss, StageValues, Sums, Training, by_stage, run_forward
from hotloop.engine.precision import (
    EVERYWHERE,
    SPLIT,
    AutoScale,
    LossScale,
    Policy,
    Trained,
    average_replicas,
    centre_and_spread,
    optimise,
    start_scale,
    start_state,
    take_part,
    take_part_with_keys,
)
from hotloop.engine.stage_mixing import refuse_mixing
from hotloop.engine.stage_rows import BY_STAGE, Layout, StageRows, TreeForm
from hotloop.errors import HotloopError

__all__ = [
    "SCHEDULES",
    "StageLoss",
    "StageValues",
    "Table",
    "evaluate_in_stages",
    "forward_table",
    "make_table",
    "spread_over_stages",
    "start_in_stages",
    "update_in_stages",
]


def spread_over_stages(
    trained: Trained, keys_by_stage: Sequence[Sequence[str]], policy: Policy, optimiser: Any, mesh: Mesh
) -> Trained:
    """An undivided state on the devices of its stages; `keys_by_stage` are for each the keys of `params` and `kept`
    that are its own.

    HotloopError where a key of the state has no stage or two.
    """
    params, kept = _parts(trained.params, keys_by_stage), _parts(trained.kept, keys_by_stage)
    slots = [jax.eval_shape(partial(start_state, policy, optimiser), part) for part in params]
    return Trained(
        stage_rows.divide(params, trained.params, mesh),
        stage_rows.divide(slots, trained.optimiser, mesh),
        stage_rows.divide(kept, trained.kept, mesh),
        stage_rows.place_everywhere(trained.scale, mesh),
    )


def start_in_stages(
    params: Any,
    kept: Any,
    keys_by_stage: Sequence[Sequence[str]],
    policy: Policy,
    optimiser: Any,
    scale: LossScale,
    mesh: Mesh,
) -> Trained:
    """What `spread_over_stages` makes of `precision.init_trained`, of parameters (and what is kept) on the host.

    No device ever holds more than a stage of it, so that the whole need fit on none.
    """
    params = policy.to_update(params)
    values: dict[str, Any] = {}
    for part in _parts(params, keys_by_stage):
        slots = jax.device_get(start_state(policy, optimiser, part))
        values = dict(zip(TreeForm.of(slots).names, jax.tree.leaves(slots), strict=True)) | values
    whole = TreeForm.of(jax.eval_shape(partial(start_state, policy, optimiser), params))
    if missing := [name for name in whole.names if name not in values]:
        raise HotloopError(f"stages: {missing[0]} belongs to none of them")
    slots = jax.tree.unflatten(whole.structure, [values[name] for name in whole.names])
    fresh = Trained(params, slots, kept, start_scale(scale))
    return spread_over_stages(fresh, keys_by_stage, policy, optimiser, mesh)


def _parts(tree: Any, keys_by_stage: Sequence[Sequence[str]]) -> list[Any]:
    """What each stage has of a tree by its keys; HotloopError where one has two stages."""
    named = [key for keys in keys_by_stage for key in keys]
    if twice := {key for key in named if named.count(key) > 1}:
        raise HotloopError(f"stages: {min(twice)} belongs to several of them, and must belong to one")
    if not jax.tree.leaves(tree):
        return [tree for _ in keys_by_stage]
    if not isinstance(tree, Mapping):
        raise HotloopError("stages: weights, and what a model keeps, must be dicts whose keys have a stage")
    return [{key: tree[key] for key in tree if key in keys} for keys in map(set, keys_by_stage)]


def update_in_stages(
    stages: Sequence[StageLoss],
    old: Trained,
    batch: Any,
    sample_key: Array,
    rounding_key: Array,
    *,
    policy: Policy,
    optimiser: Any,
    scale: LossScale,
    mesh: Mesh,
    accumulation: int,
    schedule: str,
    repeated: bool = False,
    begin: Callable[[Any], Any] = lambda kept: kept,
    finish: Callable[[Any, Any, Any], Any] = lambda kept, centre, spread: centre,
    **extra: Any,
) -> tuple[Trained, dict[str, Array]]:
    """`precision.update_weights` for a state that `spread_over_stages` made: the same step, and the same figures.

    Each replica's share of the batch goes through the stages in `accumulation` micro-batches. `begin` and `finish` are
    given what one stage keeps; `extra` goes to the optimiser of every stage as it is.
    """
    layouts = tuple(part.layout for part in old[:3])
    axis = REPLICA if mesh.shape[REPLICA] > 1 else None
    refuse_mixing(optimiser, layouts[0], layouts[1], extra)

    def on_device(
        batch: Any, rows: Any, judged: Any, sample_key: Array, rounding_key: Array, extra: Any
    ) -> Any:
        local = jax.tree.map(lambda row: row[0], rows)
        take = take_part_with_keys(batch, sample_key, accumulation, axis, repeated=repeated)
        sums, running = _train(
            stages, schedule, accumulation, take, judged.scale, policy, layouts, local, begin
        )
        gradients = average_replicas(sums.gradients, axis)
        gradients = jax.tree.map(lambda row: row * (1 / judged.scale), gradients)
        squares = sum(jnp.sum(jnp.square(row)) for row in gradients.values())
        norm = jnp.sqrt(_over_stages(squares))
        carried = [partial(running.unravel, rows=each) for each in centre_and_spread(sums.running, axis)]

        def step(stage: int) -> Any:
            params, slots, kept = (
                layout.unravel(stage, each) for layout, each in zip(layouts, local, strict=True)
            )
            numbers = _leaf_numbers(layouts[0], layouts[1], stage)
            given = layouts[0].unravel(stage, gradients)
            stepped = optimise(
                policy,
                optimiser,
                given,
                slots,
                params,
                rounding_key,
                numbers=numbers,
                global_norm=norm,
                **extra,
            )
            new = (*stepped, finish(kept, *(carry(stage) for carry in carried)))
            return tuple(layout.ravel(stage, tree) for layout, tree in zip(layouts, new, strict=True))

        new = by_stage(step, len(stages))
        if isinstance(scale, AutoScale):
            usable = _are_finite_in_all_stages(gradients)
            new = jax.tree.map(partial(jnp.where, usable), new, local)
            judged = scale.follow(judged, usable)
        figures = average_replicas(_over_stages(sums.figures), axis)
        return jax.tree.map(lambda row: row[None], new), judged, figures

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(SPLIT, BY_STAGE, *[EVERYWHERE] * 4),
        out_specs=(BY_STAGE, EVERYWHERE, EVERYWHERE),
        check_vma=False,
    )
    rows = tuple(part.rows for part in old[:3])
    new, judged, figures = run(batch, rows, old.scale, sample_key, rounding_key, extra)
    params, slots, kept = map(StageRows, new, layouts)
    return Trained(params, slots, kept, judged), figures


def _over_stages(tree: Any) -> Any:
    return lax.psum(tree, STAGE)  # type: ignore[no-untyped-call]


def _are_finite_in_all_stages(gradients: Mapping[str, Array]) -> Array:
    spoilt = sum(jnp.sum(~jnp.isfinite(row), dtype=jnp.int32) for row in gradients.values())
    return jnp.asarray(_over_stages(spoilt) == 0)


def _train(
    stages: Sequence[StageLoss],
    schedule: str,
    micro_batches: int,
    take: Callable[[Array], tuple[Any, Array]],
    factor: Array,
    policy: Policy,
    layouts: tuple[Layout, ...],
    local: tuple[dict[str, Array], ...],
    begin: Callable[[Any], Any],
) -> tuple[Sums, Layout]:
    """What adds up over this device's micro-batches, and the layout of its carry."""

    def start(stage: int) -> Any:
        return begin(layouts[2].unravel(stage, local[2]))

    running = Layout.of([jax.eval_shape(partial(start, stage)) for stage in range(len(stages))])
    started = by_stage(lambda stage: running.ravel(stage, start(stage)), len(stages))
    training = Training(
        stages=stages,
        table=make_table(schedule, len(stages), micro_batches),
        take=take,
        factor=factor,
        params=layouts[0],
        rows=policy.to_compute(local[0]),
        running=running,
    )
    return training.run(started), running


def _leaf_numbers(params: Layout, slots: Layout, stage: int) -> list[int]:
    """The places of a stage's leaves among all of the undivided parameters and slots: rounding goes by them."""
    assert params.whole is not None and slots.whole is not None
    first = len(params.whole.names)
    return [
        *(params.whole.names.index(name) for name in params.trees[stage].names),
        *(first + slots.whole.names.index(name) for name in slots.trees[stage].names),
    ]


def evaluate_in_stages(
    stages: Sequence[StageValues],
    params: StageRows,
    kept: StageRows,
    batch: Any,
    *,
    mesh: Mesh,
    micro_batches: int,
) -> Any:
    """What the last stage gives for each sample of a batch, in their order; it lies with the replica that had it.

    Parameters are given to the stages as they are kept.
    """

    def on_device(batch: Any, rows: Any, kept_rows: Any) -> Any:
        rows, kept_rows = jax.tree.map(lambda row: row[0], (rows, kept_rows))
        return run_forward(
            stages,
            forward_table(len(stages), micro_batches),
            take_part(batch, micro_batches),
            lambda stage: params.layout.unravel(stage, rows),
            lambda stage: kept.layout.unravel(stage, kept_rows),
        )

    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(SPLIT, BY_STAGE, BY_STAGE), out_specs=SPLIT, check_vma=False
    )
    return run(batch, params.rows, kept.rows)

"""How a model whose stages have devices of their own runs: its state in their rows, its update, and its outputs. Every
number is that of the undivided model, up to rounding."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from hotloop.engine import stage_rows
from hotloop.engine.device import REPLICA
from hotloop.engine.pipeline import StageLoss, StageValues, evaluate_in_stages
from hotloop.engine.precision import FLOAT32, Policy, cast, start_state
from hotloop.engine.stage_mixing import refuse_mixing
from hotloop.engine.stage_rows import Layout, StageRows, TreeForm
from hotloop.errors import HotloopError
from hotloop.families.estimator.stages import Stage, Stages

PARTS_PER_STAGE = 2  # of a batch that is evaluated, so that most stages are at work most of the time


def split_tree(stages: Stages, tree: Mapping[str, Any]) -> list[Any]:
    """Of weights, or of a model's state, what each stage has."""
    return [{name: tree[name] for name in tree if name in own} for own in stages.names]


def check_training(
    stages: Stages, policy: Policy, optimizer: Any, weights: Mapping[str, Any], parts: int
) -> None:
    """HotloopError for what would train to another result in stages, before anything is compiled."""
    if stages.read_state and parts > 1:
        raise HotloopError(
            "ModelSpec: a stage computes with the state that it changes, and stages take several parts of a batch at "
            "once; take gradient_accumulation_count=1, or map the stages to one device"
        )
    slots = [jax.eval_shape(partial(start_state, policy, optimizer), weights)]
    for part in split_tree(stages, weights):
        try:
            slots.append(jax.eval_shape(partial(start_state, policy, optimizer), part))
        except Exception as error:  # whatever a user's optimiser throws
            raise HotloopError(
                f"ModelSpec: optimizer does not take the weights of one stage alone ({', '.join(part)}): where it has "
                "a mask or labels for all of them, give it a function of the weights that makes these"
            ) from error
    params, state = (
        Layout(tuple(map(TreeForm.of, divided)), TreeForm.of(whole))
        for whole, divided in ((weights, split_tree(stages, weights)), (slots[0], slots[1:]))
    )
    refuse_mixing(optimizer, params, state, {})


def spread_parts(stages: Stages, state: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Weights and a model's state on the devices of their stages; what is there as these stages need it stays."""

    def spread(part: Any) -> StageRows:
        if isinstance(part, StageRows) and _belongs(part, stages):
            return part
        tree = stage_rows.undivided(part)
        return stage_rows.divide(split_tree(stages, tree), tree, mesh)

    return {name: spread(part) for name, part in state.items()}


def _belongs(rows: StageRows, stages: Stages) -> bool:
    """Whether each of these stages has its own of the rows."""
    trees = rows.layout.trees
    return len(trees) == len(stages) and all(
        name.split("/")[0] in own
        for tree, own in zip(trees, stages.names, strict=True)
        for name in tree.names
    )


def make_losses(
    stages: Stages, policy: Policy, measure: Callable[[Any, Any], dict[str, Array]]
) -> list[StageLoss]:
    """The stages of an update; `measure(outputs, labels)` gives loss and figures, a value a sample each."""
    last = len(stages) - 1

    def make(number: int, function: Stage) -> StageLoss:
        def stage(params: Any, carry: Any, values: Any, samples: Any, keys: Array) -> Any:
            given = policy.to_compute(samples["features"]) if number == 0 else values
            out, changed = function(params, carry, given, True, keys)
            kept = cast({**carry, **changed}, FLOAT32)
            if number < last:
                return out, (kept, {})
            each = measure(out, samples.get("labels"))
            figures = {name: value.mean(dtype=jnp.float32) for name, value in each.items()}
            return figures["loss"], (kept, figures)

        return stage

    return [make(number, function) for number, function in enumerate(stages.functions)]


def compute_outputs(
    stages: Stages, policy: Policy, weights: StageRows, state: StageRows, features: Any, mesh: Mesh
) -> Any:
    """The outputs of a batch of any length, which is filled up so that each replica's share falls into parts."""
    length = jax.tree.leaves(features)[0].shape[0]
    parts = PARTS_PER_STAGE * len(stages)
    missing = -length % (parts * mesh.shape[REPLICA])
    filled = jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)], "edge"), features
    )

    def make(number: int, function: Stage) -> StageValues:
        def stage(params: Any, kept: Any, values: Any, samples: Any) -> Any:
            given = policy.to_compute(samples) if number == 0 else values
            out, _ = function(policy.to_compute(params), kept, given, False, None)
            return out

        return stage

    functions = [make(number, function) for number, function in enumerate(stages.functions)]
    outputs = evaluate_in_stages(functions, weights, state, filled, mesh=mesh, micro_batches=parts)
    return jax.tree.map(lambda leaf: leaf[:length], outputs)

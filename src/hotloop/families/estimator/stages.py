"""A ModelSpec with `stages`: what it must be, which weights belong to which stage, and on how many devices it runs.

A stage is `stage(weights, values)`, with the options of `apply`; the first takes the features, the last gives the
outputs. Nobody says which weights are whose: the functions are traced, and what a stage uses is its own; a weight that
two devices would need is refused. How stages run is told in `pipelined.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax

from hotloop.engine.pipeline_table import SCHEDULES
from hotloop.errors import HotloopError
from hotloop.families.estimator.config import RESERVED_NAMES, Mode, ModelSpec, describe, is_whole
from hotloop.families.estimator.tracing import describe_form, find_sources, trace

ONLY_WITH_STAGES = (
    *("gradient_accumulation_count", "pipeline_schedule", "device_mapping"),
    *("optimizer_function", "eval_metrics_fn"),
)
# `stage(weights, state, values, train, keys)` -> values, state
Stage = Callable[[Any, Any, Any, bool, Any], tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a spec on their devices: those that share one are one function."""

    functions: tuple[Stage, ...]
    names: tuple[
        tuple[str, ...], ...
    ]  # for each, the entries of the weights and of the model's state that it uses
    schedule: str
    read_state: bool  # whether what they compute depends on the model's state

    def __len__(self) -> int:
        return len(self.functions)


def check_stages(spec: ModelSpec) -> None:
    """HotloopError, in a line that names the field, for stages that cannot work whatever the devices."""
    if spec.stages is None:
        for name in ONLY_WITH_STAGES:
            if getattr(spec, name) is not None:
                raise HotloopError(
                    f"ModelSpec: {name} is for a model in stages; give stages, or leave it out"
                )
        return
    if not isinstance(spec.stages, Sequence) or not spec.stages or not all(map(callable, spec.stages)):
        raise HotloopError(f"ModelSpec: stages must be a list of functions, not {describe(spec.stages)}")
    count, schedule = spec.gradient_accumulation_count, spec.pipeline_schedule
    if count is not None and not (is_whole(count) and count > 0):
        raise HotloopError(
            f"ModelSpec: gradient_accumulation_count must be a whole number from 1, not {describe(count)}"
        )
    if schedule is not None and schedule not in SCHEDULES:
        raise HotloopError(
            f"ModelSpec: pipeline_schedule must be one of {', '.join(SCHEDULES)}, not {describe(schedule)}"
        )
    for name in ("optimizer_function", "eval_metrics_fn"):
        if not callable(function := getattr(spec, name)) and function is not None:
            raise HotloopError(f"ModelSpec: {name} must be a function, not {describe(function)}")
    if spec.optimizer_function is not None and spec.optimizer is not None:
        raise HotloopError("ModelSpec: optimizer and optimizer_function both name an optimiser; give one")
    if spec.device_mapping is not None:
        _check_mapping(spec.device_mapping, len(spec.stages))


def _check_mapping(mapping: Any, stages: int) -> None:
    given = f"ModelSpec: device_mapping={mapping!r}"
    if not isinstance(mapping, Sequence) or isinstance(mapping, str) or not all(map(is_whole, mapping)):
        raise HotloopError(f"{given}: must be a list with the number of a device for each stage")
    if len(mapping) != stages:
        raise HotloopError(f"{given}: has {len(mapping)} entries for {stages} stages")
    if set(mapping) != set(range(max(mapping) + 1)):
        raise HotloopError(f"{given}: must use every device from 0 to {max(mapping)}")
    if len([*groupby(mapping)]) != len(set(mapping)):
        raise HotloopError(f"{given}: stages of one device must follow each other")


def resolve_functions(spec: ModelSpec, mode: Mode, outputs: Any, labels: Any) -> ModelSpec:
    """The spec with loss, optimizer and metrics as its optimizer_function and eval_metrics_fn give them."""
    if spec.optimizer_function is not None and mode is not Mode.PREDICT:
        spec = _with_optimizer(spec, spec.optimizer_function, outputs, labels)
    measure = spec.eval_metrics_fn
    if measure is None or mode is not Mode.EVALUATE:
        return spec
    found = trace("eval_metrics_fn", measure, outputs, labels)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise HotloopError(
            f"ModelSpec: eval_metrics_fn must give a dict of figures by name, not {describe(found)}"
        )
    if odd := sorted((RESERVED_NAMES - {"loss"} | set(spec.metrics)) & set(found)):
        raise HotloopError(
            f"ModelSpec: eval_metrics_fn gives {', '.join(odd)}, which results have already; rename it"
        )
    figures = {name: partial(_pick, measure, name) for name in found}
    loss = figures.pop("loss", spec.loss)
    return replace(spec, loss=loss, metrics={**spec.metrics, **figures})


def _pick(measure: Callable[[Any, Any], Any], name: str, outputs: Any, labels: Any) -> Any:
    return measure(outputs, labels)[name]


def _with_optimizer(
    spec: ModelSpec, function: Callable[[Any, Any], Any], outputs: Any, labels: Any
) -> ModelSpec:
    """What the function gives is an optimizer, or a pair of one and the loss of each sample."""
    made: list[Any] = []

    def run(outputs: Any, labels: Any) -> Any:
        found = function(outputs, labels)
        alone = hasattr(found, "update") or not isinstance(found, tuple) or len(found) != 2
        made[:] = [found] if alone else [found[0], True]
        return None if alone else found[1]

    trace("optimizer_function", run, outputs, labels)
    if not (hasattr(made[0], "init") and hasattr(made[0], "update")):
        raise HotloopError(
            "ModelSpec: optimizer_function must give an optimizer of optax, or (optimizer, loss), not "
            f"{describe(made[0])}"
        )
    if len(made) == 1:
        return replace(spec, optimizer=made[0])
    if spec.loss is not None:
        raise HotloopError("ModelSpec: loss and optimizer_function both give a loss; leave one out")
    return replace(spec, optimizer=made[0], loss=lambda outputs, labels: function(outputs, labels)[1])


def group_stages(spec: ModelSpec) -> list[list[int]]:
    """The numbers of the stages on each device."""
    assert spec.stages is not None
    mapping = spec.device_mapping or range(len(spec.stages))
    numbers = groupby(range(len(spec.stages)), lambda stage: mapping[stage])
    return [[*group] for _, group in numbers]


def count_devices(spec: Any) -> int:
    """Devices that the stages of a replica are to run on; 1 for what is no spec with stages."""
    if not isinstance(spec, ModelSpec) or spec.stages is None:
        return 1
    check_stages(spec)
    return len(group_stages(spec))


def chain(stages: Sequence[Stage]) -> Stage:
    """Stages one after the other, as one; none of several need hand on what it does not change of a state."""
    if len(stages) == 1:
        return stages[0]

    def run(weights: Any, state: Any, values: Any, train: bool, keys: Any) -> tuple[Any, Any]:
        for stage in stages:
            values, changed = stage(weights, state, values, train, keys)
            state = {**state, **changed}
        return values, state

    return run


def count_parts(spec: ModelSpec, accumulation: int) -> int:
    """Parts of a replica's share: the spec's, or those of the run config; HotloopError where they differ."""
    count = spec.gradient_accumulation_count
    if count is None:
        return accumulation
    if accumulation not in (1, count):
        raise HotloopError(
            f"ModelSpec: gradient_accumulation_count={count}, and the RunConfig has accumulation={accumulation}; "
            "give one of them"
        )
    return int(count)


def divide(
    spec: ModelSpec, mode: Mode, init: Callable[[Any], Any], applies: Sequence[Stage], batch: Any
) -> tuple[ModelSpec, Stages]:
    """The spec with all that its functions give, and its stages with the names of what each device's use.

    The functions are traced on forms. Entries of weights that none uses are the first device's; HotloopError where two
    devices would need one. Which devices there are does not matter here.
    """
    weights, state = trace("init", init, jax.eval_shape(lambda: jax.random.key(0)))
    for what, tree in (("weights", weights), ("state", state)):
        if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
            raise HotloopError(
                f"ModelSpec: with stages, init must give the {what} as a dict by name, whose entries belong to "
                f"stages, not a {type(tree).__name__}"
            )
    samples = jax.tree.leaves(batch["features"])[0].shape[0]
    keys = (
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), samples)) if mode is Mode.TRAIN else None
    )
    _check_each(applies, weights, state, batch["features"], keys)
    functions = [chain([applies[number] for number in group]) for group in group_stages(spec)]
    values, owners, reads = batch["features"], dict[str, int](), False
    for number, function in enumerate(functions):
        used, values, read = _trace_stage(function, weights, state, values, keys)
        reads |= read
        for name in used:
            if owners.setdefault(name, number) != number:
                raise HotloopError(
                    f"ModelSpec: stages on two devices use {name!r}: put them on one device by device_mapping, or give "
                    "each stage an entry of its own"
                )
    for name in (*weights, *state):
        owners.setdefault(name, 0)
    names = [tuple(name for name in owners if owners[name] == number) for number in range(len(functions))]
    for leaf in jax.tree.leaves(values):
        if leaf.shape[:1] != (samples,):
            raise HotloopError(
                f"ModelSpec: the last stage gives {describe_form(leaf)} for {samples} samples: it needs a row for each"
            )
    stages = Stages(tuple(functions), tuple(names), spec.pipeline_schedule or SCHEDULES[0], reads)
    return resolve_functions(spec, mode, values, batch.get("labels")), stages


def _check_each(applies: Sequence[Stage], weights: Any, state: Any, values: Any, keys: Any) -> None:
    """HotloopError that names the stage which does not take what the one before gives, or fails otherwise."""
    for number, apply in enumerate(applies):

        def run(weights: Any, state: Any, values: Any, keys: Any, apply: Stage = apply) -> Any:
            out, changed = apply(weights, state, values, keys is not None, keys)
            return out, {**state, **changed}

        values, state = trace(f"stages[{number}]", run, weights, state, values, keys)


def _trace_stage(
    function: Stage, weights: Any, state: Any, values: Any, keys: Any
) -> tuple[list[str], Any, bool]:
    """Names of the weights and states that a stage reads or changes, the form of its values, and whether these depend
    on the state."""
    changed: list[str] = []

    def run(weights: Any, state: Any, values: Any, keys: Any) -> Any:
        out, after = function(weights, dict(state), values, keys is not None, keys)
        changed[:] = [name for name in after if not _same_arrays(after[name], state.get(name))]
        return out, {name: after[name] for name in changed}

    sources, (form, _) = find_sources(run, weights, state, values, keys)
    paths = [path for path, _ in jax.tree.leaves_with_path((weights, state))]
    read = [paths[number] for number in sorted(frozenset().union(*sources)) if number < len(paths)]
    outputs = frozenset().union(*sources[: len(jax.tree.leaves(form))])
    reads_state = any(number < len(paths) and paths[number][0].idx == 1 for number in outputs)
    return [*dict.fromkeys((*(path[1].key for path in read), *changed))], form, reads_state


def _same_arrays(some: Any, others: Any) -> bool:
    leaves = jax.tree.leaves(some), jax.tree.leaves(others)
    return len(leaves[0]) == len(leaves[1]) and all(a is b for a, b in zip(*leaves, strict=True))

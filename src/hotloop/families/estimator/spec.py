"""What a model_fn returns, and what train_and_evaluate takes: descriptions of pure functions, no work.

A `ModelSpec` is a model in the form that a compiler likes: functions of weights and a batch, with one value for each
sample where something is measured, so that any split of the data adds up to the same numbers.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hotloop.errors import HotloopError
from hotloop.families.estimator.run_config import is_whole

TAKEN = frozenset(("loss", "samples", "global_step", "update", "epoch"))
"""Names that results and records use themselves."""


class Mode(StrEnum):
    """What a model is built for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True)
class ModelSpec:
    """A model: `init` and `apply`, or a flax.nnx `module`, and what to do with its outputs.

    `apply(weights, features)` gives the outputs of a batch. It may also take `train` (a bool) and `keys` (a random key
    for each sample, in training only); a `stateful` one is `apply(weights, state, features)` and returns `(outputs,
    state)`, with an init that returns `(weights, state)`.
    """

    init: Callable[[Any], Any] | None = None
    """`init(key)` -> weights, a pytree of float32 arrays."""
    apply: Callable[..., Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    """`loss(outputs, labels)`: a value for each sample, not their mean; none: softmax cross-entropy."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """`metric(outputs, labels)`: a value for each sample; loss, samples and the like are names that are taken."""
    predictions: Callable[[Any], Any] | None = None
    """What a row of `predict` is, from the outputs; none: the outputs."""
    optimizer: Any = None
    """An optax gradient transformation."""
    module: Any = None
    """A flax.nnx module, or a function of nnx.Rngs that makes one (its weights then follow the run's seed)."""
    classes: int | None = None
    """Labels are whole numbers from 0 to this minus 1: checked. Left out, the outputs tell it; a loss of its own may
    then take other labels too, such as -1, where it makes something finite of them."""
    stateful: bool = False


@dataclass(frozen=True)
class TrainSpec:
    """Train on `input_fn` until `max_steps` weight updates have been made in all."""

    input_fn: Any
    max_steps: int
    hooks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class EvalSpec:
    """Evaluate on `input_fn`, or its first `steps` batches, at every checkpoint, `throttle_seconds` apart at least."""

    input_fn: Any
    steps: int | None = None
    name: str | None = None
    throttle_seconds: float = 0


def called(what: str, function: Any, /, **known: Any) -> Any:
    """Call a user's function with those of the `known` arguments that it names."""
    if not callable(function):
        raise HotloopError(f"{what} must be a function, not {kind_of(function)}")
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    strange = [
        p.name
        for p in parameters
        if p.name not in known and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if strange:
        raise HotloopError(f"{what} asks for {', '.join(strange)}: it can be given {', '.join(known)}")
    names = [p.name for p in parameters if p.name in known]
    return function(**(known if takes_any else {name: known[name] for name in names}))


def checked(spec: Any, mode: Mode) -> ModelSpec:
    """The spec that a model_fn returned, if it can serve the mode."""
    if not isinstance(spec, ModelSpec):
        raise HotloopError(f"model_fn must return a ModelSpec, not {kind_of(spec)}")
    _check_fields(spec)
    plain = spec.init is not None and spec.apply is not None
    if plain == (spec.module is not None):
        raise HotloopError("model_fn: a ModelSpec needs init and apply, or a module in their place")
    if mode is Mode.TRAIN and not (hasattr(spec.optimizer, "init") and hasattr(spec.optimizer, "update")):
        raise HotloopError(
            f"model_fn: to train, a ModelSpec needs an optimizer, e.g. optax.sgd(0.01), not {kind_of(spec.optimizer)}"
        )
    if taken := sorted(TAKEN & set(spec.metrics)):
        raise HotloopError(
            f"model_fn: a metric cannot be called {', '.join(taken)}: records and results have figures of that name "
            "already; give it another"
        )
    return spec


def _check_fields(spec: ModelSpec) -> None:
    """That each field is what it is said to be."""
    for name in ("init", "apply", "loss", "predictions"):
        value = getattr(spec, name)
        if value is not None and not callable(value):
            raise HotloopError(f"ModelSpec: {name} must be a function, not {kind_of(value)}")
    metrics = spec.metrics
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and callable(metric) for name, metric in metrics.items()
    ):
        raise HotloopError(f"ModelSpec: metrics must be a dict of functions by name, not {kind_of(metrics)}")
    classes = spec.classes
    if classes is not None and not (is_whole(classes) and classes > 0):
        raise HotloopError(f"ModelSpec: classes must be a whole number from 1, not {kind_of(classes)}")


def kind_of(value: Any) -> str:
    """A value and its type, for an error."""
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:80]

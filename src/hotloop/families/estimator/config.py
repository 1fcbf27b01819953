"""How an estimator runs: where it keeps its things, how a batch is split, how often the host looks in. No jax.

What a model_fn returns, and what train_and_evaluate takes: descriptions of pure functions, no work.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from hotloop.errors import HotloopError, OptionError

POSITIVE = (
    "batch_size", "iterations_per_call", "replicas", "accumulation", "log_steps", "log_seconds", "summary_steps",
    "checkpoint_steps", "checkpoint_seconds", "keep_last",
)  # fmt: skip
BEST_WHEN_LEAST = ("loss", "error", "mae", "mse", "nll", "perplexity")
"""What the names of metrics hold that are best where they are least (rmse holds mse)."""


def is_whole(value: Any) -> bool:
    """An int, of Python or another's."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_path(value: Any) -> bool:
    """Text or a Path; empty text is none."""
    return isinstance(value, str | PathLike) and value != ""


def is_number(value: Any) -> bool:
    """A real number, of Python or another's."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _one_of(*words: str) -> tuple[str, Callable[[Any], bool]]:
    return " or ".join(map(repr, words)), lambda value: isinstance(value, str) and value in words


_WHOLE, _NUMBER = ("a whole number", is_whole), ("a number", is_number)
_PATH = ("a path", is_path)
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model_dir": _PATH, "batch_size": _WHOLE, "iterations_per_call": _WHOLE, "replicas": _WHOLE,
    "accumulation": _WHOLE, "precision": _one_of("32.32", "16.32", "16.16"),
    "half": _one_of("bfloat16", "float16"),
    "stochastic_rounding": ("True or False", lambda value: isinstance(value, bool)),
    "loss_scale": ("a number or 'auto'", lambda value: is_number(value) or value == "auto"),
    "seed": _WHOLE, "log_steps": _WHOLE, "log_seconds": _NUMBER, "summary_steps": _WHOLE,
    "checkpoint_steps": _WHOLE, "checkpoint_seconds": _NUMBER, "keep_last": _WHOLE,
    "keep_best": ("the name of a metric", lambda value: isinstance(value, str)), "report": _PATH,
}  # fmt: skip
"""What each field must be, in words and in fact."""
OPTIONAL = frozenset((
    "model_dir", "log_steps", "log_seconds", "summary_steps", "checkpoint_steps", "checkpoint_seconds", "keep_best",
    "report",
))  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """One run of one model; every field has a default that works."""

    model_dir: str | Path | None = None
    """Folder of checkpoints and records; none: a temporary one, which is named."""
    batch_size: int = 32
    """Samples of a weight update, where input_fn gives arrays; one that gives batches decides itself."""
    iterations_per_call: int = 100
    """Weight updates of one compiled call; the host appears between calls only. It never changes the result."""
    replicas: int = 1
    """Devices that share each batch."""
    accumulation: int = 1
    """Parts that a replica makes of its share of a batch, one after the other: less memory, the same update."""
    precision: Literal["32.32", "16.32", "16.16"] = "32.32"
    """Bits of the computation and of the weights between updates."""
    half: Literal["bfloat16", "float16"] = "bfloat16"
    stochastic_rounding: bool = True
    loss_scale: float | Literal["auto"] = 1.0
    """Factor on the loss, for float16; auto: as large as the gradients bear."""
    seed: int = 1
    log_steps: int | None = 100
    """Weight updates between log records, exactly; none: only by seconds, and at the end."""
    log_seconds: float | None = None
    summary_steps: int | None = None
    """Weight updates between summary records (for TensorBoard), at most one a call; none: no summaries."""
    checkpoint_steps: int | None = None
    """Weight updates between checkpoints, exactly; none: only by seconds, and at the end."""
    checkpoint_seconds: float | None = 600
    keep_last: int = 5
    keep_best: str | None = None
    """A metric of the evaluation whose best checkpoint is kept besides: "accuracy", or "min:NAME" and "max:NAME" to say
    what is best. Without a word, names with loss, error, mae, mse, rmse, nll or perplexity are best where least."""
    report: str | Path | None = None
    """Folder for the compiler's report and a profile; HOTLOOP_REPORT asks for it too."""

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"RunConfig: {name}={value!r} must be greater than 0")
        if self.loss_scale != "auto" and not self.loss_scale > 0:
            raise OptionError(f"RunConfig: loss_scale={self.loss_scale!r} must be greater than 0, or 'auto'")

    def _check_kinds(self) -> None:
        """That each field is what it is said to be."""
        for name, (wanted, fits) in KINDS.items():
            value, optional = getattr(self, name), name in OPTIONAL
            if not fits(value) and not (optional and value is None):
                raise OptionError(
                    f"RunConfig: {name}={value!r} must be {wanted}{' or None' if optional else ''}"
                )

    @property
    def best(self) -> tuple[str, Literal["min", "max"]] | None:
        """The metric of keep_best, and which value of it is best."""
        if self.keep_best is None:
            return None
        way, _, name = self.keep_best.partition(":")
        if way in ("min", "max") and name:
            return name, "min" if way == "min" else "max"
        return self.keep_best, "min" if any(
            word in self.keep_best.lower() for word in BEST_WHEN_LEAST
        ) else "max"

    def as_dict(self) -> dict[str, Any]:
        """Every field by name, as a record keeps it."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


RESERVED_NAMES = frozenset(("loss", "samples", "global_step", "update", "epoch"))
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


def call_with_known(what: str, function: Any, /, **known: Any) -> Any:
    """Call a user's function with those of the `known` arguments that it names."""
    if not callable(function):
        raise HotloopError(f"{what} must be a function, not {describe(function)}")
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


def check_model_spec(spec: Any, mode: Mode) -> ModelSpec:
    """The spec that a model_fn returned, if it can serve the mode."""
    if not isinstance(spec, ModelSpec):
        raise HotloopError(f"model_fn must return a ModelSpec, not {describe(spec)}")
    _check_fields(spec)
    plain = spec.init is not None and spec.apply is not None
    if plain == (spec.module is not None):
        raise HotloopError("model_fn: a ModelSpec needs init and apply, or a module in their place")
    if mode is Mode.TRAIN and not (hasattr(spec.optimizer, "init") and hasattr(spec.optimizer, "update")):
        raise HotloopError(
            f"model_fn: to train, a ModelSpec needs an optimizer, e.g. optax.sgd(0.01), not {describe(spec.optimizer)}"
        )
    if taken := sorted(RESERVED_NAMES & set(spec.metrics)):
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
            raise HotloopError(f"ModelSpec: {name} must be a function, not {describe(value)}")
    metrics = spec.metrics
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and callable(metric) for name, metric in metrics.items()
    ):
        raise HotloopError(f"ModelSpec: metrics must be a dict of functions by name, not {describe(metrics)}")
    classes = spec.classes
    if classes is not None and not (is_whole(classes) and classes > 0):
        raise HotloopError(f"ModelSpec: classes must be a whole number from 1, not {describe(classes)}")


def describe(value: Any) -> str:
    """A value and its type, for an error."""
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:80]

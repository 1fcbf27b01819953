"""What users describe: how an estimator runs (RunConfig), what a model_fn returns (ModelSpec), what train_and_evaluate
takes; with one line for what cannot work. No work is done here, and no jax imported."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from hotloop.engine.optim_keys import check_optimiser, check_schedule
from hotloop.errors import HotloopError, OptionError
from hotloop.options import folder_name


def is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_path(value: Any) -> bool:
    return isinstance(value, str | PathLike) and value != ""


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_value(
    name: str, value: Any, wanted: str, fits: bool, error: type[HotloopError] = OptionError
) -> None:
    if not fits:
        raise error(f"{name}={value!r} must be {wanted}")


def check_kind(name: str, value: Any, wanted: str, fits: bool) -> None:
    if not fits:
        raise OptionError(f"{name} must be {wanted}, not {describe_kind(value)}")


def check_steps(steps: Any, max_steps: Any = None) -> tuple[int | None, int | None]:
    """The same as Python's numbers: whole ones from 1, and one of the two at most."""
    if steps is not None and max_steps is not None:
        raise OptionError(
            f"steps={steps} and max_steps={max_steps}: the first is how many more, the second how many in all; give one"
        )
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        check_whole(name, value)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}: must be at least 1")
    return steps and int(steps), max_steps and int(max_steps)


def check_whole(name: str, value: Any) -> None:
    if value is not None and not is_whole(value):
        raise OptionError(f"{name}={value!r}: must be a whole number")


def find_checkpoint(checkpoint: Any, model_dir: Path) -> tuple[Path, int | None]:
    """The model_dir and the number of updates that a `checkpoint` means; no number is the newest."""
    if checkpoint is None or is_whole(checkpoint):
        return model_dir, None if checkpoint is None else int(checkpoint)
    if is_path(checkpoint):
        path = Path(checkpoint)
        if path.parent.name == "checkpoints" and path.name.isdecimal():
            return path.parent.parent, int(path.name)
        if (path / "checkpoints").is_dir():
            return path, None
    raise OptionError(
        f"checkpoint={checkpoint!r}: must be a whole number, or the path of a model_dir or of a checkpoint in one, "
        "such as 'model/checkpoints/00000100'"
    )


def check_name(name: Any) -> None:
    """The name of an evaluation is a part of its folder's, and leads nowhere else."""
    if name is not None and (not isinstance(name, str) or folder_name(f"eval_{name}")):
        raise OptionError(f"name={name!r}: must be a word that can stand in a folder's name, without /")


def is_best_where_least(name: str) -> bool:
    """Whether less of a metric is better, by its name alone."""
    words = ("loss", "error", "mae", "mse", "nll", "perplexity")  # rmse holds mse
    return any(word in name.lower() for word in words)


def describe(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:80]


def describe_kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


# Names that results and records use themselves.
RESERVED_NAMES = frozenset(("loss", "samples", "global_step", "update", "epoch"))


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in words


KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("a whole number", is_whole, ("batch_size", "iterations_per_call", "replicas", "accumulation")),
    ("a whole number", is_whole, ("seed", "keep_last")),
    ("a whole number or None", _or_none(is_whole), ("log_steps", "summary_steps", "checkpoint_steps")),
    ("a number or None", _or_none(is_number), ("log_seconds", "checkpoint_seconds")),
    ("a number or 'auto'", lambda value: is_number(value) or value == "auto", ("loss_scale",)),
    ("a path or None", _or_none(is_path), ("model_dir", "report")),
    ("'32.32' or '16.32' or '16.16'", _one_of("32.32", "16.32", "16.16"), ("precision",)),
    ("'bfloat16' or 'float16'", _one_of("bfloat16", "float16"), ("half",)),
    ("True or False", lambda value: isinstance(value, bool), ("stochastic_rounding", "tensorboard")),
    ("the name of a metric or None", _or_none(lambda value: isinstance(value, str)), ("keep_best",)),
)
"""What the fields of a RunConfig must be, in words and in fact."""


@dataclass(frozen=True)
class RunConfig:
    """One run of one model; every field has a default that works.

    >>> from hotloop import RunConfig
    >>> RunConfig(batch_size=64, keep_best="accuracy").best
    ('accuracy', 'max')
    """

    model_dir: str | Path | None = None  # of checkpoints and records; none: a temporary one, which is named
    batch_size: int = 32  # where input_fn gives arrays; one that gives batches decides itself
    iterations_per_call: int = 100  # weight updates of one compiled call; it never changes the result
    replicas: int = 1  # devices that share each batch
    accumulation: int = 1  # parts of a replica's share, one after the other: less memory, the same update
    precision: Literal["32.32", "16.32", "16.16"] = (
        "32.32"  # bits of the computation, and of the weights between
    )
    half: Literal["bfloat16", "float16"] = "bfloat16"
    stochastic_rounding: bool = True
    loss_scale: float | Literal["auto"] = 1.0  # for float16; auto: as large as the gradients bear
    seed: int = 1
    log_steps: int | None = 100  # updates between log records, exactly; none: only by seconds, and at the end
    log_seconds: float | None = None
    tensorboard: bool = False
    """Curves of logs, summaries and evaluations in `model_dir/tensorboard`; it needs the extra `tensorboard`."""
    summary_steps: int | None = None
    """Updates between records of the mean of every metric, at most one a call, for TensorBoard: where its extra is
    installed they are curves there as well, `tensorboard` or not."""
    checkpoint_steps: int | None = None  # updates in between, exactly; none: only by seconds, and at the end
    checkpoint_seconds: float | None = 600
    keep_last: int = 5
    keep_best: str | None = None
    """A metric of the evaluation whose best checkpoint is kept besides: "accuracy", or "min:NAME" and "max:NAME" to say
    what is best. Without a word, names with loss, error, mae, mse, rmse, nll or perplexity are best where least."""
    report: str | Path | None = (
        None  # folder for the compiler's report and a profile; HOTLOOP_REPORT asks for it too
    )

    def __post_init__(self) -> None:
        for wanted, fits, names in KINDS:
            for name in names:
                value = getattr(self, name)
                check_value(f"RunConfig: {name}", value, wanted, fits(value))
        for name, value in vars(self).items():
            if (is_number(value) or is_whole(value)) and name != "seed":
                wanted = "greater than 0, or 'auto'" if name == "loss_scale" else "greater than 0"
                check_value(f"RunConfig: {name}", value, wanted, value > 0)

    @property
    def best(self) -> tuple[str, Literal["min", "max"]] | None:
        if self.keep_best is None:
            return None
        way, _, name = self.keep_best.partition(":")
        if way in ("min", "max") and name:
            return name, "min" if way == "min" else "max"
        return self.keep_best, "min" if is_best_where_least(self.keep_best) else "max"

    def check_best(self, metrics: Collection[str]) -> None:
        """Refuse a keep_best that no evaluation with these metrics will give."""
        known = ["loss", *metrics]
        if self.best and self.best[0] not in known:
            raise OptionError(
                f"RunConfig: keep_best={self.keep_best!r} is none of the model's figures: {', '.join(known)}"
            )


class Mode(StrEnum):
    """What a model is built for; it equals its word.

    >>> from hotloop import Mode
    >>> Mode.TRAIN == "train"
    True
    """

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True)
class ModelSpec:
    """A model: `init` and `apply`, `init` and `stages`, or a flax.nnx `module`, and what to do with its outputs.

    `apply(weights, features)` gives the outputs of a batch. It may also take `train` (a bool) and `keys` (a random key
    for each sample, in training only); a `stateful` one is `apply(weights, state, features)` and returns `(outputs,
    state)`, with an init that returns `(weights, state)`.

    >>> import jax.numpy as jnp, optax
    >>> from hotloop import ModelSpec
    >>> def model_fn(features, params):
    ...     return ModelSpec(
    ...         init=lambda key: jnp.zeros((features.shape[1], 2)),
    ...         apply=lambda weights, features: features @ weights,
    ...         metrics={"accuracy": lambda outputs, labels: outputs.argmax(-1) == labels},
    ...         optimizer=optax.adam(params["learning_rate"]),
    ...     )
    """

    init: Callable[[Any], Any] | None = None  # `init(key)` -> weights, a pytree of float32 arrays
    apply: Callable[..., Any] | None = None
    # `loss(outputs, labels)` and metrics: a value for each sample, not their mean; none: softmax cross-entropy.
    loss: Callable[[Any, Any], Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    predictions: Callable[[Any], Any] | None = None  # a row of `predict`, from the outputs; none: the outputs
    optimizer: Any = None
    """The name of an optimiser (sgd, momentum, lars, rmsprop, rmsprop_outside, adam, adamw, muon), or one of optax."""
    learning_rate: Any = None
    """Of an optimiser by name: a number, a function of the updates so far, or a schedule by name with its parameters,
    such as {"name": "cosine", "initial_learning_rate": 0.1, "epochs_to_total_decay": 30, "updates_per_epoch": 500}."""
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)  # of an optimiser by name
    module: Any = None
    """A flax.nnx module, or a function of nnx.Rngs that makes one (its weights then follow the run's seed)."""
    classes: int | None = None
    """Labels are whole numbers from 0 to this minus 1: checked. Left out, the outputs tell it; a loss of its own may
    then take other labels too, such as -1, where it makes something finite of them."""
    stateful: bool = False
    stages: Sequence[Callable[..., Any]] | None = None
    """In place of `apply`, functions as it is, one after the other: the first takes the features, each next one what
    the last gave, and the last gives the outputs. Each runs on a device of its own where there are enough."""
    gradient_accumulation_count: int | None = (
        None  # parts of a replica's share; none: the run config's accumulation
    )
    pipeline_schedule: str | None = None  # Grouped (also without a word), Interleaved or Sequential
    device_mapping: Sequence[int] | None = None  # for each stage the number of its device; none: one each
    optimizer_function: Callable[[Any, Any], Any] | None = None
    """`optimizer_function(outputs, labels)` -> an optimizer of optax, or (optimizer, a loss for each sample)."""
    eval_metrics_fn: Callable[[Any, Any], Any] | None = None
    """`eval_metrics_fn(outputs, labels)` -> figures of an evaluation by name, perhaps loss, a value for each sample."""


@dataclass(frozen=True)
class TrainSpec:
    """Train on `input_fn` until `max_steps` weight updates have been made in all.

    >>> from hotloop import TrainSpec
    >>> TrainSpec(input_fn=lambda: (features, labels), max_steps=1_000).max_steps
    1000
    """

    input_fn: Any
    max_steps: int
    hooks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class EvalSpec:
    """Evaluate on `input_fn`, or its first `steps` batches, at every checkpoint, `throttle_seconds` apart at least.

    `exporters` are words for when the model is also exported, to `export/WORD` in the model_dir: "best" after each
    evaluation that is better than all before it (by `keep_best` of the RunConfig, else by the loss), "latest" after
    each, "final" when the training ends.

    >>> from hotloop import EvalSpec
    >>> EvalSpec(input_fn=lambda: (features, labels), name="held_out").throttle_seconds
    0
    """

    input_fn: Any
    steps: int | None = None
    name: str | None = None
    throttle_seconds: float = 0
    exporters: str | Sequence[str] = ()


def call_with_known(what: str, function: Any, /, **known: Any) -> Any:
    """Call a user's function with those of the `known` arguments that it names."""
    if not callable(function):
        raise HotloopError(f"{what} must be a function, not {describe(function)}")
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [
        p.name
        for p in parameters
        if p.name not in known and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        raise HotloopError(f"{what} asks for {', '.join(unknown)}: it can be given {', '.join(known)}")
    names = [p.name for p in parameters if p.name in known]
    return function(**(known if takes_any else {name: known[name] for name in names}))


def check_model_spec(spec: Any, mode: Mode) -> ModelSpec:
    if not isinstance(spec, ModelSpec):
        raise HotloopError(f"model_fn must return a ModelSpec, not {describe(spec)}")
    for wanted, fits, names in (
        ("a function", _or_none(callable), ("init", "apply", "loss", "predictions")),
        ("a dict of functions by name", _is_metrics, ("metrics",)),
        ("a whole number from 1", _or_none(lambda value: is_whole(value) and value > 0), ("classes",)),
    ):
        for name in names:
            if not fits(value := getattr(spec, name)):
                raise HotloopError(f"ModelSpec: {name} must be {wanted}, not {describe(value)}")
    plain, staged = (spec.init is not None and each is not None for each in (spec.apply, spec.stages))
    if plain + staged + (spec.module is not None) != 1:
        raise HotloopError(
            "model_fn: a ModelSpec needs init and apply, or init and stages, or a module in their place"
        )
    optimizer, rate = spec.optimizer, spec.learning_rate
    if mode is not Mode.TRAIN or spec.optimizer_function is not None:
        pass
    elif isinstance(optimizer, str):
        check_optimiser(optimizer, spec.optimizer_params)
        if isinstance(rate, Mapping):
            check_schedule(**split_schedule(rate))
        elif not (is_number(rate) and rate >= 0) and not callable(rate):
            raise HotloopError(
                f"model_fn: learning_rate of {optimizer} must be a number from 0, a function or a schedule by name, "
                f"not {describe(rate)}"
            )
    elif not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise HotloopError(
            f"model_fn: to train, a ModelSpec needs an optimizer, e.g. optax.sgd(0.01), not {describe(optimizer)}"
        )
    elif rate is not None or spec.optimizer_params:
        raise HotloopError(
            "model_fn: learning_rate and optimizer_params are for an optimizer by name; one of optax has its own"
        )
    if reserved := sorted(RESERVED_NAMES & set(spec.metrics)):
        raise HotloopError(
            f"model_fn: a metric cannot be called {', '.join(reserved)}: records and results have figures of that name "
            "already; give it another"
        )
    return spec


def _is_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(n, str) and callable(f) for n, f in value.items())


def split_schedule(rate: Mapping[str, Any]) -> dict[str, Any]:
    params = {key: value for key, value in rate.items() if key not in ("name", "updates_per_epoch")}
    return {"name": str(rate.get("name")), "params": params}

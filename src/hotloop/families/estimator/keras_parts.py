"""What a Keras model is compiled with, in the engine's forms: losses and metrics with a value for each sample, an
optimiser as optax has them, variables by names that last. It knows nothing of how the model is called."""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.errors import HotloopError, MissingExtra, OptionError, first_line
from hotloop.families.estimator.config import describe


def import_keras() -> Any:
    if find_spec("keras") is None:
        raise MissingExtra("keras", "keras", "from_keras")
    try:
        import keras
    except ImportError as error:
        raise HotloopError(
            f"from_keras: keras cannot be imported ({first_line(error)}): set KERAS_BACKEND=jax"
        ) from None
    if (backend := keras.backend.backend()) != "jax":
        raise OptionError(
            f"from_keras: Keras computes with {backend}: set KERAS_BACKEND=jax before keras is first imported"
        )
    return keras


def name_variables(variables: Sequence[Any]) -> dict[str, Any]:
    """Variables by their paths. Keras numbers layers through the whole process (`dense_7`): here they are numbered
    within the model, so that a checkpoint fits the same model that is made again."""
    numbers: dict[str, dict[str, int]] = {}
    found: dict[str, Any] = {}
    for variable in variables:
        words = []
        for word in variable.path.split("/"):
            base = re.sub(r"_\d+$", "", word)
            number = numbers.setdefault(base, {}).setdefault(word, len(numbers[base]))
            words.append(f"{base}_{number}" if number else base)
        name, twins = "/".join(words), 0
        while name in found:  # two variables of one layer may bear one name
            twins += 1
            name = f"{'/'.join(words)}.{twins}"
        found[name] = variable
    return found


def read_compiled_loss(model: Any) -> Any:
    """What compile was given for `loss`; refused where Keras would make more of it than a mean over samples."""
    keras = import_keras()
    if model.loss is None:
        raise OptionError(
            f"from_keras: {model.name} has no loss: compile it with one, or give from_keras(loss=...)"
        )
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise OptionError(
                f"from_keras: {type(model).__name__} has a {name} of its own, which is not called here: give "
                "from_keras(loss=fn(outputs, labels))"
            )
    if getattr(model._compile_loss, "_user_loss_weights", None) is not None:
        raise OptionError(
            f"from_keras: {model.name} is compiled with loss_weights: give from_keras(loss=fn(outputs, labels)) that "
            "has them"
        )
    return as_keras_loss(model.loss)


def as_keras_loss(given: Any) -> Any:
    """A function of (labels, outputs), as Keras has them, as a loss of Keras, which brings both to one rank."""
    keras = import_keras()
    if isinstance(given, keras.Loss) or not callable(given):
        return given
    return keras.src.losses.losses.LossFunctionWrapper(given, name=getattr(given, "__name__", None))


def read_compiled_metrics(model: Any) -> dict[str, Any]:
    """What compile was given for `metrics` and `weighted_metrics`, by name."""
    compiled = getattr(model, "_compile_metrics", None)
    both = (compiled._user_metrics, compiled._user_weighted_metrics) if compiled is not None else ()
    each = [
        metric
        for given in both
        if given is not None
        for metric in (given if isinstance(given, list | tuple) else [given])
    ]
    if any(isinstance(metric, list | tuple | dict) for metric in each):
        raise OptionError(
            "from_keras: metrics for several outputs: give from_keras(metrics={name: fn(outputs, labels)})"
        )
    names = [
        metric if isinstance(metric, str) else getattr(metric, "name", None) or metric.__name__
        for metric in each
    ]
    metrics = map(as_keras_metric, each)
    return dict(zip(["accuracy" if name == "acc" else name for name in names], metrics, strict=True))


def as_keras_metric(given: Any) -> Any:
    """A function of (labels, outputs), as Keras has them, as a metric of Keras."""
    keras = import_keras()
    if isinstance(given, keras.Metric) or not callable(given):
        return given
    return keras.metrics.MeanMetricWrapper(given, name=getattr(given, "__name__", None))


def is_of_keras(given: Any) -> bool:
    """Whether it is a loss, a metric or a function of Keras, which take labels first, whoever hands them over."""
    keras = import_keras()
    module = str(getattr(given, "__module__", "")).partition(".")[0]
    return isinstance(given, keras.Loss | keras.Metric) or module == "keras"


def has_mask(outputs: Any) -> bool:
    """Whether a layer's mask (of an Embedding with mask_zero, say) has come as far as an output."""
    find = import_keras().src.backend.get_keras_mask
    return any(find(leaf) is not None for leaf in jax.tree.leaves(outputs))


def make_per_sample(given: Any, what: str) -> Any:
    """A loss or metric, of Keras or one's own, as a function of (outputs, labels) with a value for each sample."""
    keras = import_keras()
    if isinstance(given, str):
        try:
            given = (keras.losses if what == "loss" else keras.metrics).get(given)
        except ValueError:
            raise OptionError(f"from_keras: {what} {given!r} is none that Keras has") from None
        if isinstance(given, type):
            given = given()
    if callable(given) and is_of_keras(given):
        given = as_keras_loss(given) if what == "loss" else as_keras_metric(given)
    if isinstance(given, keras.Loss):
        if given.reduction in ("sum", "none", None):
            raise OptionError(
                f"from_keras: {what} with reduction={given.reduction!r}: the mean over the batch is taken, as "
                "'sum_over_batch_size' does"
            )
        if (ignored := getattr(given, "ignore_class", None)) is not None:
            raise OptionError(
                f"from_keras: {what} with ignore_class={ignored}: Keras takes the mean over all other labels, which is "
                "no mean of values of samples: give a function of (outputs, labels)"
            )
        return _mean_of_rest(lambda outputs, labels: given.call(labels, outputs))
    if isinstance(given, keras.Metric):
        if not isinstance(given, keras.metrics.MeanMetricWrapper):
            raise OptionError(
                f"from_keras: {what} ({type(given).__name__}) has no value for each sample: compute it from predictions"
            )
        function, options = given._fn, given._fn_kwargs
        return _mean_of_rest(lambda outputs, labels: function(labels, outputs, **options))
    if not callable(given):
        several = isinstance(given, Mapping | list | tuple)
        form = (
            f"a {type(given).__name__} of several: give one function of all outputs"
            if several
            else describe(given)
        )
        raise OptionError(
            f"from_keras: {what} must be one of Keras or a function of outputs and labels, not {form}"
        )
    return given


def _mean_of_rest(function: Any) -> Any:
    """The mean over all axes but the first, as Keras takes it over all."""

    def each(outputs: Any, labels: Any) -> Array:
        values = jnp.asarray(function(outputs, labels)).astype(jnp.float32)
        return values.mean(axis=tuple(range(1, values.ndim)))

    return each


class KerasOptimizer(NamedTuple):
    """An optimiser of Keras in the form of optax."""

    init: Any
    update: Any


def from_keras_optimizer(model: Any, optimizer: Any) -> KerasOptimizer:
    """Its variables (slots, the count of updates, the learning rate) are the optimiser's state."""
    keras = import_keras()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptionError(
            "from_keras: a LossScaleOptimizer, as mixed_float16 has it, scales a loss that Keras computes: take "
            "mixed_bfloat16, which needs no scale"
        )
    if optimizer.use_ema:
        raise OptionError(
            "from_keras: an optimizer with use_ema=True puts its averages in the place of the weights when a fit ends; "
            "a training here can always go on, so leave use_ema out"
        )
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    start = [np.array(variable.value) for variable in optimizer.variables]
    names = list(name_variables(model.trainable_variables))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        old = [params[name] for name in names]
        new, after = optimizer.stateless_apply(list(state), [gradients[name] for name in names], old)
        return {name: value - before for name, value, before in zip(names, new, old, strict=True)}, after

    return KerasOptimizer(lambda params: [jnp.asarray(value) for value in start], update)

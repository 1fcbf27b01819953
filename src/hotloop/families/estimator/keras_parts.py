"""What a Keras model is compiled with, in the engine's forms: losses and metrics with a value for each sample, an
optimiser as optax has them, variables by names that last. It knows nothing of how the model is called."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

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


def read_compiled_metrics(model: Any) -> dict[str, Any]:
    """What compile was given for `metrics`, by name."""
    compiled = getattr(model, "_compile_metrics", None)
    given = compiled._user_metrics if compiled is not None else None
    if given is None:
        return {}
    each = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(metric, list | tuple | dict) for metric in each):
        raise OptionError(
            "from_keras: metrics for several outputs: give from_keras(metrics={name: fn(outputs, labels)})"
        )
    names = [
        metric if isinstance(metric, str) else getattr(metric, "name", None) or metric.__name__
        for metric in each
    ]
    return dict(zip(["accuracy" if name == "acc" else name for name in names], each, strict=True))


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
        if not isinstance(given, keras.Loss | keras.Metric):
            return _mean_of_rest(lambda outputs, labels, fn=given: fn(labels, outputs))
    if isinstance(given, keras.Loss):
        if given.reduction in ("sum", "none", None):
            raise OptionError(
                f"from_keras: {what} with reduction={given.reduction!r}: the mean over the batch is taken, as "
                "'sum_over_batch_size' does"
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
        raise OptionError(
            f"from_keras: {what} must be one of Keras or a function of outputs and labels, not {describe(given)}"
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
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    start = [np.array(variable.value) for variable in optimizer.variables]
    names = list(name_variables(model.trainable_variables))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        old = [params[name] for name in names]
        new, after = optimizer.stateless_apply(list(state), [gradients[name] for name in names], old)
        return {name: value - before for name, value, before in zip(names, new, old, strict=True)}, after

    return KerasOptimizer(lambda params: [jnp.asarray(value) for value in start], update)

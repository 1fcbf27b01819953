"""A Keras 3 model, on the jax backend, as a model_fn: `from_keras`. Its trainable variables are the weights, all others
(moving averages, frozen layers) its state, and its calls are Keras' stateless ones. Seed generators draw by the keys of
the samples, so that dropout is the same for every split of the batch. What the model was compiled with is taken where
nothing else is given. Keras is imported only when it is asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine.interrupt import was_raised
from hotloop.engine.keys import sample_keys
from hotloop.errors import HotloopError, OptionError, first_line
from hotloop.families.estimator.config import Mode, ModelSpec, RunConfig, describe
from hotloop.families.estimator.keras_parts import (
    from_keras_optimizer,
    has_mask,
    import_keras,
    is_of_keras,
    make_per_sample,
    name_variables,
    read_compiled_loss,
    read_compiled_metrics,
)
from hotloop.families.estimator.sample_draws import join_keys
from hotloop.families.estimator.tracing import describe_form

SPARSE = "sparse_categorical_crossentropy"  # the loss whose labels are classes
WITH_LOSSES = "losses of layers"  # beside the outputs, where the model has any: regularisers and `add_loss`


def from_keras(
    model: Any,
    *,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    learning_rate: Any = None,
    optimizer_params: Mapping[str, Any] | None = None,
    predictions: Callable[[Any], Any] | None = None,
    classes: int | None = None,
) -> "KerasModel":
    """A model_fn of a Keras 3 model that has been built; `Estimator.to_keras` writes trained weights back into it.

    Left out, `loss`, `metrics` and `optimizer` are those that the model was compiled with. They may be Keras' own, or
    what a ModelSpec takes: functions of (outputs, labels), an optimiser by name or of optax. A new model begins with
    the weights that the Keras model has now.

    >>> import keras, numpy as np, tempfile
    >>> from hotloop import Estimator, from_keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    >>> model.compile("sgd", "sparse_categorical_crossentropy")
    >>> features = np.ones((32, 3), np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     estimator = Estimator(from_keras(model), model_dir=folder, quiet=True)
    ...     _ = estimator.train((features, np.ones(32, np.int32)), steps=100)
    ...     trained = estimator.to_keras()
    >>> float(trained.predict(features, verbose=0)[0, 1]) > 0.5
    True
    """
    keras = import_keras()
    if not isinstance(model, keras.Model):
        raise OptionError(f"from_keras: model must be a keras.Model, not {describe(model)}")
    # Keras marks a model of one's own class as built by `build`, even where its layers have no weights yet.
    is_whole = model.built and all(layer.built for layer in model._flatten_layers())
    if is_whole and not model.weights:
        raise OptionError(f"from_keras: {model.name} has no weights: there is nothing to train")
    if not is_whole or not model.weights:
        raise OptionError(
            f"from_keras: {model.name} is not built, so it has no weights yet: give it a keras.Input, or call "
            "model.build(input_shape), or the model with some features"
        )
    given = {"learning_rate": learning_rate, "optimizer_params": dict(optimizer_params or {})}
    loss = loss if loss is not None else read_compiled_loss(model)
    chosen = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    if chosen is None:
        raise OptionError(
            f"from_keras: {model.name} has no optimizer: compile it with one, or give optimizer="
        )
    if optimizer is None and (learning_rate is not None or optimizer_params):
        raise OptionError(
            "from_keras: learning_rate and optimizer_params are for an optimizer by name: give one"
        )
    if isinstance(chosen, keras.optimizers.Optimizer):
        chosen = from_keras_optimizer(model, chosen)
    elif any(variable.constraint is not None for variable in model.trainable_variables):
        raise OptionError(
            "from_keras: weights with a constraint need an optimizer of Keras, which keeps to it; compile with one"
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(f"from_keras: metrics must be a dict of metrics by name, not {describe(metrics)}")
    named = metrics if metrics is not None else read_compiled_metrics(model)
    return KerasModel(model, loss, dict(named), chosen, given, predictions, classes)


class KerasModel:
    """The model_fn that `from_keras` makes."""

    def __init__(
        self,
        model: Any,
        loss: Any,
        metrics: dict[str, Any],
        optimizer: Any,
        given: dict[str, Any],
        predictions: Any,
        classes: int | None,
    ):
        self.keras_model, self._loss, self._metrics, self._optimizer = model, loss, metrics, optimizer
        self._given, self._predictions, self._classes = given, predictions, classes
        self._generators = _find_generators(model)
        seeds = {id(generator.state) for generator in self._generators}
        self._weights = name_variables(model.trainable_variables)
        others = [variable for variable in model.non_trainable_variables if id(variable) not in seeds]
        self._state = name_variables(others)
        self._seeds = [generator.state for generator in self._generators]
        # Copies: Keras' own fit may give the memory away.
        self._start = (_copy_values(self._weights), _copy_values(self._state))
        self.__qualname__ = "from_keras"  # in config.json; Keras counts on in the names of models

    def __call__(self, features: Any, labels: Any, mode: Mode, config: RunConfig) -> ModelSpec:
        if config.precision != "32.32":
            raise OptionError(
                f"from_keras: precision={config.precision!r} is for other models: a Keras model has dtype policies, "
                "such as keras.config.set_dtype_policy('mixed_bfloat16') before it is made"
            )
        if labels is None and mode is not Mode.PREDICT:
            self._refuse_no_labels()
        train = mode is Mode.TRAIN
        is_masked: list[bool] = []

        def call_once(features: Any) -> _Found:
            found = self._call(*self._start, features, train, None)
            is_masked.append(has_mask(found.outputs))
            return found

        try:
            found = jax.eval_shape(call_once, features)
        except HotloopError:
            raise
        except Exception as error:  # whatever layers throw at features of another form
            if was_raised():  # Keras wraps what it meets, a stop, too
                raise
            forms = ", ".join(describe_form(leaf) for leaf in jax.tree.leaves(features))
            raise OptionError(
                f"from_keras: {self.keras_model.name} fails on the features {forms}: {first_line(error)}; several "
                "inputs are a dict by name, or a list beside labels: ([a, b], labels), to predict ([a, b], None)"
            ) from error
        if any(is_masked) and mode is not Mode.PREDICT:
            self._refuse_masks()
        wraps, outputs = bool(found.losses) and mode is not Mode.PREDICT, found.outputs
        loss, classes = self._read_loss(outputs)
        named = {} if mode is Mode.PREDICT else self._metrics  # which have no labels there
        measures = {name: self._read_metric(name, metric, outputs, labels) for name, metric in named.items()}

        def apply(weights: Any, state: Any, features: Any, *, train: bool, keys: Any) -> Any:
            found = self._call(weights, state, features, train, keys)
            if not wraps:
                return found.outputs, found.state
            samples = jax.tree.leaves(features)[0].shape[0]
            each = jnp.broadcast_to(sum(jnp.sum(value) for value in found.losses), (samples,))
            return {"outputs": found.outputs, WITH_LOSSES: each}, found.state

        def unwrapped(function: Any) -> Any:
            return (lambda outputs, *more: function(outputs["outputs"], *more)) if wraps else function

        def whole_loss(outputs: Any, labels: Any) -> Any:
            each, more = jnp.asarray(loss(outputs["outputs"], labels)), outputs[WITH_LOSSES]
            return each + more if each.shape == more.shape else each  # which is refused then

        return ModelSpec(
            init=lambda key: jax.tree.map(jnp.asarray, self._start),
            apply=apply,
            loss=whole_loss if wraps else loss,
            metrics={name: unwrapped(fn) for name, fn in measures.items()},
            predictions=self._predictions and unwrapped(self._predictions),
            optimizer=self._optimizer,
            classes=classes,
            stateful=True,
            **self._given,
        )

    def _call(self, weights: Any, state: Any, features: Any, train: bool, keys: Any) -> "_Found":
        """One stateless call of the Keras model."""
        known = {id(variable): state[name] for name, variable in self._state.items()}
        known |= {id(seed): seed.value for seed in self._seeds}
        others = self.keras_model.non_trainable_variables
        trained = [weights[name] for name in self._weights]
        options = {"training": train} if self.keras_model._call_has_training_arg else {}
        samples = jax.tree.leaves(features)[0].shape[0]
        keys = sample_keys(jax.random.key(0), 0, samples) if keys is None else keys
        with draw_by(self._generators, keys):
            outputs, new, losses = self.keras_model.stateless_call(
                trained, [known[id(each)] for each in others], features, return_losses=True, **options
            )
        values = {id(variable): value for variable, value in zip(others, new, strict=True)}
        after = {
            name: jnp.asarray(values[id(variable)]).astype(state[name].dtype)
            for name, variable in self._state.items()
        }
        return _Found(outputs, after, list(losses))

    def _refuse_masks(self) -> None:
        """Keras weighs by the mask of an output, over the whole batch: that is no mean of values of samples."""
        for name in self._measured_by_keras():
            raise OptionError(
                f"from_keras: the model's outputs have a mask (mask_zero, Masking), by which Keras weighs the "
                f"{name}: give functions of (outputs, labels), loss=... and metrics={{...}}"
            )

    def _refuse_no_labels(self) -> None:
        for name in self._measured_by_keras():
            raise OptionError(
                f"from_keras: input_fn gives no labels, which the {name} of Keras needs: give (features, labels), and "
                "no weights of samples beside them"
            )

    def _measured_by_keras(self) -> list[str]:
        measured = {"loss": self._loss, **{f"metric {name}": each for name, each in self._metrics.items()}}
        return [name for name, each in measured.items() if not callable(each) or is_of_keras(each)]

    def _read_loss(self, outputs: Any) -> tuple[Any, int | None]:
        """`loss(outputs, labels)` with a value for each sample, and the number of classes where the labels are such."""
        loss = self._loss
        function = make_per_sample(loss, "loss")
        name = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
        sparse = name == SPARSE and hasattr(outputs, "shape")
        return function, self._classes or (int(outputs.shape[-1]) if sparse else None)

    def _read_metric(self, name: str, metric: Any, outputs: Any, labels: Any) -> Any:
        if metric in ("accuracy", "acc") and hasattr(outputs, "shape") and hasattr(labels, "shape"):
            columns = outputs.shape[-1]
            whole = labels.shape == outputs.shape and columns > 1
            metric = (
                "binary_accuracy" if columns == 1 else f"{'' if whole else 'sparse_'}categorical_accuracy"
            )
        return make_per_sample(metric, f"metric {name}")

    def write(self, state: Mapping[str, Any]) -> None:
        """The Keras model's variables become those of a state with `weights` and `model`."""
        for variables, values in ((self._weights, state["weights"]), (self._state, state["model"])):
            for name, variable in variables.items():
                variable.assign(np.asarray(values[name]))

    def forms(self) -> dict[str, Any]:
        """Of the parts of a state that `write` takes."""
        weights, state = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, self._start))
        return {"weights": weights, "model": state}


class _Found(NamedTuple):
    outputs: Any
    state: dict[str, Array]
    losses: list[Array]


def _copy_values(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.array(variable.value) for name, variable in variables.items()}


def _find_generators(model: Any) -> list[Any]:
    """The seed generators of the model and of all its layers, each once, in their order."""
    found = [seeds for layer in model._flatten_layers() for seeds in layer._seed_generators]
    return list({id(generator): generator for generator in found}.values())


@contextmanager
def draw_by(generators: Sequence[Any], keys: Array) -> Iterator[None]:
    """While the block runs each generator gives keys that draw by those of the samples, and keeps its own state."""

    def make_next(number: int) -> Any:
        draws = iter(range(2**16))

        def next_key(ordered: bool = True) -> Array:
            place = 2**16 * number + next(draws)
            folded: Array = jax.vmap(jax.random.fold_in, (0, None))(keys, place)
            return join_keys(folded)

        return next_key

    for number, generator in enumerate(generators):
        generator.next = make_next(number)
    try:
        yield
    finally:
        for generator in generators:
            del generator.next

"""A ModelSpec as the functions that the loop needs, checked on the forms of a batch before anything is compiled.

A flax.nnx module becomes the same pair of functions as a plain model: its parameters are the weights, everything else
that it keeps (moving averages) is its state, and its random streams are set anew from the key of each update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine.precision import cast
from hotloop.errors import HotloopError, MissingExtra
from hotloop.families.estimator.config import Mode, ModelSpec, check_model_spec, describe
from hotloop.families.estimator.labels import Classes, find_classes
from hotloop.layers.losses import cross_entropy

Weights = Any
ModelState = Any
WIDE = jnp.dtype("float32")


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """Pure functions of weights, state and batch; `classes` is known where labels can be checked."""

    spec: ModelSpec
    init: Callable[[Array], tuple[Weights, ModelState]]
    outputs: Callable[..., tuple[Any, ModelState]]
    """`(weights, state, features, train, keys)` -> outputs, state."""
    classes: Classes | None = None

    def loss(self, outputs: Any, labels: Any) -> Array:
        """A value a sample, in float32."""
        return jnp.asarray((self.spec.loss or _cross_entropy)(outputs, labels)).astype(jnp.float32)

    def measured(self, outputs: Any, labels: Any) -> dict[str, Array]:
        """Loss and metrics, a value a sample each."""
        metrics = {name: jnp.asarray(fn(outputs, labels)) for name, fn in self.spec.metrics.items()}
        return {"loss": self.loss(outputs, labels), **metrics}

    def predicted(self, outputs: Any) -> Any:
        """Rows, one a sample."""
        return self.spec.predictions(outputs) if self.spec.predictions else outputs


def _cross_entropy(outputs: Array, labels: Array) -> Array:
    """The loss of a model that names none; labels may be a column."""
    return cross_entropy(outputs, labels.reshape(-1))


def build(spec: Any, mode: Mode, batch: Any) -> BuiltModel:
    """The model of a spec for batches of the form `batch`; one line that names the culprit where it cannot work."""
    spec = check_model_spec(spec, mode)
    init, outputs = _of_module(spec.module) if spec.module is not None else _of_functions(spec)
    model = BuiltModel(spec, init, outputs)
    made = _check(model, mode, batch)
    return BuiltModel(spec, init, outputs, None if mode is Mode.PREDICT else _classes(model, made, batch))


def _classes(model: BuiltModel, outputs: Any, batch: Any) -> Classes | None:
    """What the labels may be: as the spec says, or the outputs."""
    if model.spec.classes:
        return Classes(model.spec.classes)
    if model.spec.loss is None:
        return Classes(int(outputs.shape[-1]))
    return find_classes(model.loss, outputs, batch.get("labels"))


def _of_functions(spec: ModelSpec) -> tuple[Callable[..., Any], Callable[..., Any]]:
    assert spec.init is not None and spec.apply is not None
    start, apply = spec.init, spec.apply
    taken = _options(apply)

    def init(key: Array) -> tuple[Weights, ModelState]:
        made = start(key)
        if spec.stateful and not (isinstance(made, tuple) and len(made) == 2):
            raise HotloopError("ModelSpec: stateful needs an init that gives (weights, state)")
        return made if spec.stateful else (made, {})

    def outputs(weights: Weights, state: ModelState, features: Any, train: bool, keys: Any) -> Any:
        options = {name: value for name, value in (("train", train), ("keys", keys)) if name in taken}
        if spec.stateful:
            made = apply(weights, state, features, **options)
            if not (isinstance(made, tuple) and len(made) == 2):
                raise HotloopError("ModelSpec: stateful needs an apply that gives (outputs, state)")
            return made
        return apply(weights, features, **options), state

    return init, outputs


def _options(apply: Any) -> set[str]:
    parameters = signature(apply).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {"train", "keys"}
    return {p.name for p in parameters} & {"train", "keys"}


def _of_module(module: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from flax import nnx
    except ImportError:
        raise MissingExtra("flax", "nnx", "a ModelSpec with a module") from None
    if not isinstance(module, nnx.Module) and not callable(module):
        raise HotloopError(
            f"ModelSpec: module must be a flax.nnx module, or a function that makes one, not {describe(module)}"
        )
    example = module if isinstance(module, nnx.Module) else module(nnx.Rngs(0))
    if not isinstance(example, nnx.Module):
        raise HotloopError(f"model_fn: module must be a flax.nnx module, not {type(example).__name__}")
    split: Any = nnx.split
    graph, _, streams, _ = split(example, nnx.Param, nnx.RngState, ...)

    def init(key: Array) -> tuple[Weights, ModelState]:
        made = module if isinstance(module, nnx.Module) else module(nnx.Rngs(key))
        _, weights, _, rest = split(made, nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(weights), nnx.to_pure_dict(rest)

    def outputs(weights: Weights, state: ModelState, features: Any, train: bool, keys: Any) -> Any:
        key = jax.random.key(0) if keys is None else keys[0]
        merged = nnx.merge(graph, nnx.State(weights), _reseeded(streams, key), nnx.State(state))
        merged.train() if train else merged.eval()
        made = merged(features)
        rest = nnx.to_pure_dict(split(merged, nnx.Param, nnx.RngState, ...)[3])
        return made, jax.tree.map(lambda new, old: new.astype(old.dtype), rest, state)

    return init, outputs


def _reseeded(streams: Any, key: Array) -> Any:
    """Each stream's key from `key`, its count at the start."""
    leaves, tree = jax.tree.flatten(streams)
    fresh = [
        jax.random.fold_in(key, n)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros_like(leaf)
        for n, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, fresh)


def _check(model: BuiltModel, mode: Mode, batch: Any) -> Any:
    """Trace every function on forms alone, and see that each gives what is needed."""
    features, labels = batch["features"], batch.get("labels")
    samples = jax.tree.leaves(features)[0].shape[0]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), samples))
    weights, state = _traced("init", model.init, jax.eval_shape(lambda: jax.random.key(0)))
    if not jax.tree.leaves(weights):
        raise HotloopError("ModelSpec.init gives no arrays: it must return the weights")
    for leaf in jax.tree.leaves(weights):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise HotloopError(
                f"ModelSpec.init gives weights {_form(leaf)}: they must be floating, to have a gradient"
            )
    train = mode is Mode.TRAIN
    apply = partial(_applied, model.outputs, train)
    outputs, _ = _traced("apply", apply, weights, state, features, keys if train else None)
    if mode is Mode.PREDICT:
        _per_sample("predictions", _traced("predictions", model.predicted, outputs), samples)
        return outputs
    if labels is None and model.spec.loss is None:
        raise HotloopError("input_fn gives no labels, and the model has no loss of its own that needs none")
    if model.spec.loss is None and hasattr(labels, "dtype") and jnp.issubdtype(labels.dtype, jnp.inexact):
        raise HotloopError(
            f"labels are {_form(labels)}: the softmax cross-entropy needs whole numbers, the classes; convert them, or "
            "give the ModelSpec a loss of its own"
        )
    for name, fn in {"loss": model.loss, **model.spec.metrics}.items():
        value = _traced(name, fn, outputs, labels)
        if getattr(value, "shape", None) != (samples,):
            raise HotloopError(
                f"ModelSpec: {name} gives {_form(value)} for {samples} samples: it needs one value for each of them, "
                "not their mean"
            )
    return outputs


def _applied(outputs: Any, train: bool, weights: Any, state: Any, features: Any, keys: Any) -> Any:
    return outputs(weights, state, features, train, keys)


def _per_sample(name: str, tree: Any, samples: int) -> None:
    for leaf in jax.tree.leaves(tree):
        if leaf.shape[:1] != (samples,):
            raise HotloopError(
                f"ModelSpec: {name} gives {_form(leaf)} for {samples} samples: it needs a row for each"
            )


def _traced(name: str, fn: Any, *forms: Any) -> Any:
    try:
        return jax.eval_shape(fn, *forms)
    except HotloopError:
        raise
    except Exception as error:  # whatever a user's function throws
        told = ", ".join(_form(leaf) for leaf in jax.tree.leaves(forms)[-3:])
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise HotloopError(f"ModelSpec: {name} failed on (..., {told}): {reason}") from error


def _form(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"{leaf.dtype}{list(leaf.shape)}"


def widen_state(state: ModelState) -> ModelState:
    """A model's state as it is kept: in float32 whatever the weights' type."""
    return cast(state, WIDE)

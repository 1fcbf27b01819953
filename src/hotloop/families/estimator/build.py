"""A ModelSpec as the functions that the loop needs, checked on the forms of a batch before anything is compiled.

A flax.nnx module becomes the same pair of functions as a plain model: its parameters are the weights, everything else
that it keeps (moving averages) is its state, and its random streams are set anew from the key of each update.

Labels that are no class of the model are named, too. A model that says how many classes it has, or has no loss of its
own, takes no other label. One with a loss of its own may mean something by a label that is no class (-1 for "leave it
out", a count): its loss is asked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.errors import DataError, HotloopError, MissingExtra
from hotloop.families.estimator.config import Mode, ModelSpec, check_model_spec, describe
from hotloop.layers.losses import cross_entropy

Init = Callable[[Array], tuple[Any, Any]]
"""`init(key)` -> weights, state of the model."""
Apply = Callable[[Any, Any, Any, bool, Any], tuple[Any, Any]]
"""`apply(weights, state, features, train, keys)` -> outputs, state."""


NO_CLASS = "the model has"
"""What is wrong with a label that is no class, where nothing else can be meant by it: `... classes 0 to 9`."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Labels from 0 to `count` - 1."""

    count: int
    objection: Callable[[int], str] = lambda value: NO_CLASS
    """Why another value cannot be taken, as NO_CLASS; nothing where it can."""

    def check(self, labels: Any, where: str = "") -> None:
        """Refuse labels that the model has no class for; `where` says whose they are."""
        if not is_integer_array(labels):
            return
        values = np.asarray(labels)
        outside = (values < 0) | (values >= self.count)
        for value in np.unique(values[outside]).tolist():
            if reason := self.objection(value):
                sample = int(np.argwhere(values == value)[0][0])
                raise DataError(
                    f"labels: {value} at sample {sample}{where} is out of range: {reason} classes 0 to {self.count - 1}"
                )


def is_integer_array(labels: Any) -> bool:
    """One array of whole numbers, or its form."""
    return hasattr(labels, "dtype") and hasattr(labels, "shape") and np.dtype(labels.dtype).kind in "iu"


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """Pure functions of weights, state and batch; `classes` is known where labels can be checked."""

    spec: ModelSpec
    init: Init
    apply: Apply
    classes: Classes | None = None

    def loss(self, outputs: Any, labels: Any) -> Array:
        """A value a sample, in float32; without a loss of its own, labels of classes may be a column."""
        loss = self.spec.loss or (lambda logits, labels: cross_entropy(logits, labels.reshape(-1)))
        return jnp.asarray(loss(outputs, labels)).astype(jnp.float32)

    def measure(self, outputs: Any, labels: Any) -> dict[str, Array]:
        """Loss and metrics, a value a sample each."""
        metrics = {name: jnp.asarray(fn(outputs, labels)) for name, fn in self.spec.metrics.items()}
        return {"loss": self.loss(outputs, labels), **metrics}

    def predict(self, outputs: Any) -> Any:
        return self.spec.predictions(outputs) if self.spec.predictions else outputs


def build_model(spec: Any, mode: Mode, batch: Any) -> BuiltModel:
    """The model of a spec for batches of the form `batch`; one line that names the culprit where it cannot work."""
    spec = check_model_spec(spec, mode)
    functions = _from_functions(spec) if spec.module is None else _from_module(spec.module)
    model = BuiltModel(spec, *functions)
    outputs = _check(model, mode, batch)
    if mode is Mode.PREDICT:
        return model
    if spec.classes or spec.loss is None:
        return replace(model, classes=Classes(spec.classes or int(outputs.shape[-1])))
    return replace(model, classes=find_classes(model.loss, outputs, batch.get("labels")))


def _from_functions(spec: ModelSpec) -> tuple[Init, Apply]:
    assert spec.init is not None and spec.apply is not None
    user_init, user_apply = spec.init, spec.apply
    parameters = signature(user_apply).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = {"train", "keys"} if takes_any else {p.name for p in parameters} & {"train", "keys"}

    def init(key: Array) -> Any:
        found = user_init(key)
        if spec.stateful and not (isinstance(found, tuple) and len(found) == 2):
            raise HotloopError("ModelSpec: stateful needs an init that gives (weights, state)")
        return found if spec.stateful else (found, {})

    def apply(weights: Any, state: Any, features: Any, train: bool, keys: Any) -> Any:
        options = {name: value for name, value in (("train", train), ("keys", keys)) if name in wanted}
        if not spec.stateful:
            return user_apply(weights, features, **options), state
        found = user_apply(weights, state, features, **options)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise HotloopError("ModelSpec: stateful needs an apply that gives (outputs, state)")
        return found

    return init, apply


def _from_module(module: Any) -> tuple[Init, Apply]:
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
    leaves, tree = jax.tree.flatten(streams)

    def init(key: Array) -> Any:
        found = module if isinstance(module, nnx.Module) else module(nnx.Rngs(key))
        _, weights, _, rest = split(found, nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(weights), nnx.to_pure_dict(rest)

    def apply(weights: Any, state: Any, features: Any, train: bool, keys: Any) -> Any:
        key = jax.random.key(0) if keys is None else keys[0]
        fresh = [
            jax.random.fold_in(key, n)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros_like(leaf)  # a stream's count of draws
            for n, leaf in enumerate(leaves)
        ]
        merged = nnx.merge(graph, nnx.State(weights), jax.tree.unflatten(tree, fresh), nnx.State(state))
        merged.train() if train else merged.eval()
        outputs = merged(features)
        rest = nnx.to_pure_dict(split(merged, nnx.Param, nnx.RngState, ...)[3])
        return outputs, jax.tree.map(lambda new, old: new.astype(old.dtype), rest, state)

    return init, apply


def _check(model: BuiltModel, mode: Mode, batch: Any) -> Any:
    """Trace every function on forms alone, see that each gives what is needed, and return the outputs' form."""
    features, labels = batch["features"], batch.get("labels")
    samples = jax.tree.leaves(features)[0].shape[0]
    train = mode is Mode.TRAIN
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), samples)) if train else None
    weights, state = _trace("init", model.init, jax.eval_shape(lambda: jax.random.key(0)))
    if not jax.tree.leaves(weights):
        raise HotloopError("ModelSpec.init gives no arrays: it must return the weights")
    for leaf in jax.tree.leaves(weights):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise HotloopError(
                f"ModelSpec.init gives weights {_form(leaf)}: they must be floating, to have a gradient"
            )

    def apply(weights: Any, state: Any, features: Any, keys: Any) -> Any:
        return model.apply(weights, state, features, train, keys)

    outputs, _ = _trace("apply", apply, weights, state, features, keys)
    if mode is Mode.PREDICT:
        for leaf in jax.tree.leaves(_trace("predictions", model.predict, outputs)):
            if leaf.shape[:1] != (samples,):
                raise HotloopError(
                    f"ModelSpec: predictions gives {_form(leaf)} for {samples} samples: it needs a row for each"
                )
        return outputs
    if model.spec.loss is None and labels is None:
        raise HotloopError("input_fn gives no labels, and the model has no loss of its own that needs none")
    if model.spec.loss is None and hasattr(labels, "dtype") and jnp.issubdtype(labels.dtype, jnp.inexact):
        raise HotloopError(
            f"labels are {_form(labels)}: the softmax cross-entropy needs whole numbers, the classes; convert them, or "
            "give the ModelSpec a loss of its own"
        )
    for name, fn in {"loss": model.loss, **model.spec.metrics}.items():
        value = _trace(name, fn, outputs, labels)
        if getattr(value, "shape", None) != (samples,):
            raise HotloopError(
                f"ModelSpec: {name} gives {_form(value)} for {samples} samples: it needs one value for each of them, "
                "not their mean"
            )
    return outputs


def _trace(name: str, fn: Any, *forms: Any) -> Any:
    try:
        return jax.eval_shape(fn, *forms)
    except HotloopError:
        raise
    except Exception as error:  # whatever a user's function throws
        last = ", ".join(_form(leaf) for leaf in jax.tree.leaves(forms)[-3:])
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise HotloopError(f"ModelSpec: {name} failed on (..., {last}): {reason}") from error


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"


def find_classes(loss: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Classes | None:
    """The classes of a model with a loss of its own, where outputs [..., K] and labels [...] look like logits of K."""
    if not is_integer_array(labels) or not hasattr(outputs, "shape"):
        return None
    if outputs.shape[:-1] != labels.shape or outputs.shape[-1] < 2 or not labels.size:
        return None
    return Classes(outputs.shape[-1], _objection(loss, outputs, labels))


def _objection(loss: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Callable[[int], str]:
    """Ask the loss what it makes of a label: nothing finite, or the same as of a class, is an objection."""
    drawn = np.random.default_rng(0).normal(size=outputs.shape)
    last, kind = outputs.shape[-1] - 1, jax.dtypes.canonicalize_dtype(labels.dtype)

    @jax.jit
    def with_first(label: Array) -> Array:
        """The loss of a sample one of whose labels is `label`; all others are 0, so that some are always left."""
        given = jnp.zeros(labels.shape, kind).at[(0,) * labels.ndim].set(label)
        return jnp.asarray(loss(jnp.asarray(drawn, outputs.dtype), given))[0]

    def value_of(label: int) -> float:
        return float(with_first(np.asarray(label, kind)))

    @cache
    def objection(value: int) -> str:
        if not np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return NO_CLASS
        found = value_of(value)
        if not np.isfinite(found):
            return f"its loss is then {found}, and the model's outputs have"
        # An index below 0 counts from the end, one that is clipped stops there: silently another class.
        for taken in {value % (last + 1), min(max(value, 0), last)}:
            if found == value_of(taken) != value_of((taken + 1) % (last + 1)):
                return f"the loss takes it for {taken}, and the model's outputs have"
        return ""

    return objection

"""Any model as a family: a ModelSpec becomes a `Job`, checked on the forms of a batch before anything is compiled, with
its `init`, `update` and `evaluate`. Random keys belong to samples by their place in the batch, so that a model draws
the same for every split."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from hotloop.engine import optim, precision, processes, stage_rows
from hotloop.engine.device import STAGE
from hotloop.engine.keys import stream
from hotloop.engine.optim import learning_rate
from hotloop.engine.pipeline import spread_over_stages, start_in_stages, update_in_stages
from hotloop.engine.precision import AutoScale, LossScale, Trained, init_trained, update_weights
from hotloop.errors import DataError, HotloopError, MissingExtra
from hotloop.families.estimator.config import (
    Mode,
    ModelSpec,
    RunConfig,
    check_model_spec,
    describe,
    split_schedule,
)
from hotloop.families.estimator.pipelined import (
    check_training,
    compute_outputs,
    make_losses,
    spread_parts,
)
from hotloop.families.estimator.sample_draws import join_keys
from hotloop.families.estimator.stages import Stages, chain, check_stages, count_parts, divide
from hotloop.families.estimator.tracing import describe_form, trace
from hotloop.layers.losses import cross_entropy

State = dict[str, Any]
NamedBatch = dict[str, Any]
TRAINED = ("weights", "optimizer", "model", "scale")  # the names under which a state has what is Trained
INFERENCE_PARTS = ("weights", "model")  # of a state: what evaluation and prediction need
Init = Callable[[Array], tuple[Any, Any]]  # `init(key)` -> weights, state of the model
# `apply(weights, state, features, train, keys)` -> outputs, state
Apply = Callable[[Any, Any, Any, bool, Any], tuple[Any, Any]]
# What is wrong with a label that is no class, where nothing else can be meant by it: `... classes 0 to 9`.
NO_CLASS = "the model has"


@dataclass(frozen=True, eq=False)
class Classes:
    count: int  # labels are below it
    # Why another value cannot be taken, as NO_CLASS; nothing where it can.
    objection: Callable[[int], str] = lambda value: NO_CLASS

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
    return hasattr(labels, "dtype") and hasattr(labels, "shape") and np.dtype(labels.dtype).kind in "iu"


@dataclass(frozen=True, eq=False)
class Job:
    """All that a program is built from; two are never equal, since what a model's functions compute is not known."""

    spec: ModelSpec
    config: RunConfig
    init: Init
    apply: Apply
    policy: precision.Policy
    scale: LossScale
    optimizer: Any  # an optax transformation
    mesh: Mesh | None = None
    stages: Stages | None = None  # None where every device of the mesh has the whole model
    classes: Classes | None = None  # known where labels can be checked

    @property
    def sharding(self) -> NamedSharding | None:
        """Of a batch over the replicas; None for one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, precision.SPLIT)

    def place(self, state: State) -> State:
        """A state, or its INFERENCE_PARTS, as the devices of this job hold it, be it divided now or not."""
        if self.mesh is not None and self.stages is not None and state.keys() == set(TRAINED):
            trained = Trained(*(state[name] for name in TRAINED))
            spread = spread_over_stages(trained, self.stages.names, self.policy, self.optimizer, self.mesh)
            return dict(zip(TRAINED, spread, strict=True))
        if self.mesh is not None and self.stages is not None:
            return spread_parts(self.stages, state, self.mesh)
        whole: State = stage_rows.undivided(state)
        if self.mesh is None:
            return whole
        placed: State = processes.place(whole, NamedSharding(self.mesh, precision.EVERYWHERE))
        return placed

    def loss(self, outputs: Any, labels: Any) -> Array:
        """A value a sample, in float32; without a loss of its own, labels of classes may be a column."""
        loss = self.spec.loss or (lambda logits, labels: cross_entropy(logits, labels.reshape(-1)))
        return jnp.asarray(loss(outputs, labels)).astype(jnp.float32)

    def measure(self, outputs: Any, labels: Any) -> dict[str, Array]:
        """Loss and metrics, a value a sample each."""
        metrics = {name: jnp.asarray(fn(outputs, labels)) for name, fn in self.spec.metrics.items()}
        return {"loss": self.loss(outputs, labels), **metrics}


def build_job(spec: Any, mode: Mode, batch: Any, config: RunConfig, mesh: Mesh | None = None) -> Job:
    """The job of a spec for batches of the form `batch`; one line that names the culprit where it cannot work.

    With stages it runs in them where the mesh has more than one, else one after the other on each replica's device.
    """
    spec = check_model_spec(spec, mode)
    check_stages(spec)
    init, applies = _from_functions(spec) if spec.module is None else _from_module(spec.module)
    stages = None
    if spec.stages is not None:
        config = replace(config, accumulation=count_parts(spec, config.accumulation))
        spec, stages = divide(spec, mode, init, applies, batch)
    policy = precision.parse(config.precision, config.half, stochastic_rounding=config.stochastic_rounding)
    scale = AutoScale() if isinstance(config.loss_scale, str) else config.loss_scale
    optimizer, rate = spec.optimizer, spec.learning_rate
    if mode is Mode.TRAIN and isinstance(optimizer, str):
        if isinstance(rate, Mapping):
            per_epoch = rate.get("updates_per_epoch", 1)
            rate = learning_rate(**split_schedule(rate), global_batch_size=1, updates_per_epoch=per_epoch)
        optimizer = optim.at_rate(optim.make(optimizer, spec.optimizer_params), rate)
    stages = stages if mesh is not None and mesh.shape[STAGE] > 1 else None
    job = Job(spec, config, init, chain(applies), policy, scale, optimizer, mesh, stages)
    outputs = _check(job, mode, batch)
    if stages is not None and mode is Mode.TRAIN:
        served = jax.eval_shape(partial(init_served, job), jax.eval_shape(lambda: jax.random.key(0)))
        check_training(stages, policy, optimizer, served["weights"], config.accumulation)
    if mode is Mode.PREDICT:
        return job
    if spec.classes or spec.loss is None:
        return replace(job, classes=Classes(spec.classes or int(outputs.shape[-1])))
    return replace(job, classes=find_classes(job.loss, outputs, batch.get("labels")))


def _from_functions(spec: ModelSpec) -> tuple[Init, list[Apply]]:
    assert spec.init is not None
    user_init, functions = spec.init, [spec.apply] if spec.stages is None else spec.stages

    def init(key: Array) -> Any:
        found = user_init(key)
        if spec.stateful and not (isinstance(found, tuple) and len(found) == 2):
            raise HotloopError("ModelSpec: stateful needs an init that gives (weights, state)")
        return found if spec.stateful else (found, {})

    return init, [_with_state(function, spec.stateful) for function in functions]


def _with_state(function: Any, stateful: bool) -> Apply:
    """A user's apply, or a stage, as a function of weights, state, values, train and keys."""
    parameters = signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = {"train", "keys"} if takes_any else {p.name for p in parameters} & {"train", "keys"}

    def apply(weights: Any, state: Any, features: Any, train: bool, keys: Any) -> Any:
        options = {name: value for name, value in (("train", train), ("keys", keys)) if name in wanted}
        if not stateful:
            return function(weights, features, **options), state
        found = function(weights, state, features, **options)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise HotloopError("ModelSpec: stateful needs an apply that gives (outputs, state)")
        return found

    return apply


def _from_module(module: Any) -> tuple[Init, list[Apply]]:
    """The parameters of a flax.nnx module are the weights, all else that it keeps (moving averages) is its state; its
    random streams are set anew from the samples' keys in each update."""
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
        keys = jax.random.key(0)[None] if keys is None else keys
        fresh = [
            join_keys(jax.vmap(jax.random.fold_in, (0, None))(keys, n))
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros_like(leaf)  # a stream's count of draws
            for n, leaf in enumerate(leaves)
        ]
        merged = nnx.merge(graph, nnx.State(weights), jax.tree.unflatten(tree, fresh), nnx.State(state))
        merged.train() if train else merged.eval()
        outputs = merged(features)
        rest = nnx.to_pure_dict(split(merged, nnx.Param, nnx.RngState, ...)[3])
        return outputs, jax.tree.map(lambda new, old: new.astype(old.dtype), rest, state)

    return init, [apply]


def _check(job: Job, mode: Mode, batch: Any) -> Any:
    """Trace every function on forms alone, see that each gives what is needed, and return the outputs' form."""
    features, labels = batch["features"], batch.get("labels")
    samples = jax.tree.leaves(features)[0].shape[0]
    train = mode is Mode.TRAIN
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), samples)) if train else None
    weights, state = trace("init", job.init, jax.eval_shape(lambda: jax.random.key(0)))
    if not jax.tree.leaves(weights):
        raise HotloopError("ModelSpec.init gives no arrays: it must return the weights")
    for leaf in jax.tree.leaves(weights):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise HotloopError(
                f"ModelSpec.init gives weights {describe_form(leaf)}: they must be floating, to have a gradient"
            )

    def apply(weights: Any, state: Any, features: Any, keys: Any) -> Any:
        return job.apply(weights, state, features, train, keys)

    outputs, _ = trace("apply", apply, weights, state, features, keys)
    if mode is Mode.PREDICT:
        rows = job.spec.predictions or (lambda outputs: outputs)
        for leaf in jax.tree.leaves(trace("predictions", rows, outputs)):
            if leaf.shape[:1] != (samples,):
                raise HotloopError(
                    f"ModelSpec: predictions gives {describe_form(leaf)} for {samples} samples: it needs a row for each"
                )
        return outputs
    if job.spec.loss is None and labels is None:
        raise HotloopError("input_fn gives no labels, and the model has no loss of its own that needs none")
    if job.spec.loss is None and hasattr(labels, "dtype") and jnp.issubdtype(labels.dtype, jnp.inexact):
        raise HotloopError(
            f"labels are {describe_form(labels)}: the softmax cross-entropy needs whole numbers, the classes; convert "
            "them, or give the ModelSpec a loss of its own"
        )
    for name, fn in {"loss": job.loss, **job.spec.metrics}.items():
        value = trace(name, fn, outputs, labels)
        if getattr(value, "shape", None) != (samples,):
            raise HotloopError(
                f"ModelSpec: {name} gives {describe_form(value)} for {samples} samples: it needs one value for each of "
                "them, not their mean"
            )
    return outputs


def find_classes(loss: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Classes | None:
    """The classes of a model with a loss of its own, where outputs [..., K] and labels [...] look like logits of K. The
    loss is asked what it makes of a label: nothing finite, or the same as of a class, is an objection."""
    if not is_integer_array(labels) or not hasattr(outputs, "shape"):
        return None
    if outputs.shape[:-1] != labels.shape or outputs.shape[-1] < 2 or not labels.size:
        return None
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

    return Classes(last + 1, objection)


def init(job: Job, key: Array) -> State:
    served = init_served(job, key)
    trained = init_trained(job.policy, job.optimizer, job.scale, served["weights"], served["model"])
    return dict(zip(TRAINED, trained, strict=True))


def make_start(job: Job) -> Callable[[Array], State]:
    """`init`, compiled, as a function that gives the state as the job's devices hold it.

    With stages each one's weights are made alone and brought to the host, so that no device ever holds more than a
    stage of them; what `init` gives for others is left out when it is compiled.
    """
    if job.stages is None or job.mesh is None:
        whole = jax.jit(partial(init, job))
        return lambda key: job.place(whole(key))
    mesh, stages = job.mesh, job.stages

    def pick(key: Array, names: tuple[str, ...]) -> State:
        served = init_served(job, key)
        return {part: {name: tree[name] for name in tree if name in names} for part, tree in served.items()}

    own = jax.jit(pick, static_argnums=1)

    def start(key: Array) -> State:
        parts = [jax.device_get(own(key, names)) for names in stages.names]
        forms = jax.eval_shape(partial(init_served, job), key)
        weights, kept = (
            {name: next(part[of][name] for part in parts if name in part[of]) for name in forms[of]}
            for of in INFERENCE_PARTS
        )
        found = start_in_stages(weights, kept, stages.names, job.policy, job.optimizer, job.scale, mesh)
        return dict(zip(TRAINED, found, strict=True))

    return start


def init_served(job: Job, key: Array) -> State:
    """The INFERENCE_PARTS of a fresh state; the model's own is kept in float32, whatever the weights' type."""
    weights, state = job.init(key)
    return {"weights": job.policy.to_update(weights), "model": precision.cast(state, jnp.dtype("float32"))}


def update(job: Job) -> Callable[[State, NamedBatch, Array], tuple[State, dict[str, Array]]]:
    """One weight update; the model's own state goes from one part of the batch to the next."""

    def loss(weights: Any, state: Any, samples: NamedBatch, keys: Array) -> tuple[Array, Any]:
        features = job.policy.to_compute(samples["features"])
        outputs, kept = job.apply(weights, state, features, True, keys)
        each = job.measure(outputs, samples.get("labels"))
        figures = {name: value.mean(dtype=jnp.float32) for name, value in each.items()}
        return figures["loss"], (precision.cast(kept, jnp.dtype("float32")), figures)

    options: dict[str, Any] = {
        "policy": job.policy,
        "optimiser": job.optimizer,
        "scale": job.scale,
        "mesh": job.mesh,
        "accumulation": job.config.accumulation,
    }
    make: Callable[..., tuple[Trained, dict[str, Array]]] = partial(update_weights, loss, **options)
    if job.stages is not None:
        losses = make_losses(job.stages, job.policy, job.measure)
        make = partial(update_in_stages, losses, schedule=job.stages.schedule, **options)

    def one(state: State, batch: NamedBatch, key: Array) -> tuple[State, dict[str, Array]]:
        old = Trained(*(state[name] for name in TRAINED))
        new, figures = make(old, batch, stream(key, "model", 0), stream(key, "rounding", 0))
        return dict(zip(TRAINED, new, strict=True)), figures

    return one


def evaluate(job: Job) -> Callable[[State, NamedBatch], dict[str, Array]]:
    """Loss and metrics of each sample."""
    return lambda state, batch: job.measure(_apply(job, state, batch["features"]), batch.get("labels"))


def predict(job: Job) -> Callable[[State, Any], Any]:
    """A row for each sample, of features alone."""
    rows = job.spec.predictions or (lambda outputs: outputs)
    return lambda state, features: rows(_apply(job, state, features))


def _apply(job: Job, state: State, features: Any) -> Any:
    if job.stages is not None and job.mesh is not None:
        return compute_outputs(job.stages, job.policy, state["weights"], state["model"], features, job.mesh)
    weights, features = job.policy.to_compute(state["weights"]), job.policy.to_compute(features)
    outputs, _ = job.apply(weights, state["model"], features, False, None)
    return outputs

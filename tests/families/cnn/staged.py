"""Jobs of a small residual network in stages, and the undivided ones that they must equal, for the tests."""

from dataclasses import replace
from functools import cache, cached_property

import jax
import numpy as np
import pytest
from cnn_words import typed

from hotloop.engine.keys import seed_key
from hotloop.engine.precision import init_trained
from hotloop.families.cnn import model
from hotloop.families.cnn.job import resolve
from hotloop.families.cnn.network import INPUT, Network, NetworkBuilder
from hotloop.families.cnn.options import DATASET_SIZES, DatasetSize
from same_numbers import with_moved_weight, with_other_label

KEY = seed_key(7)
QUICK = {"xla_backend_optimization_level": 0}
FLOAT32 = ("--precision", "32.32")


class Residual(Network):
    """Two convolutions beside a shortcut, with norms and a mean: the pieces of a ResNet."""

    epsilon = 1e-5

    @cached_property
    def nodes(self):
        builder = NetworkBuilder(self.shape, self.norm, self.epsilon)
        x = builder.norm_relu("conv1", builder.conv("conv1_conv", INPUT, 4, 3))
        y = builder.norm_relu("a_1", builder.conv("a_1_conv", x, 4, 3))
        y = builder.norm("a_2_bn", builder.conv("a_2_conv", y, 4, 3))
        x = builder.relu("a_out", builder.sum("a_add", x, y))
        builder.logits("fc", builder.mean_pool("pool", x), self.classes)
        return tuple(builder.nodes)


SIZE = DatasetSize(64, 16, (6, 6, 3), 5)


def staged(*words, splits=(), split=(2, 1, 4), rate=0.05, network=None, **changes):
    """A job by its command line, in stages from the layers `splits` on; `split` is (micro, replicas, accumulation)."""
    micro, replicas, accumulation = split
    words = (
        *words, "--micro-batch-size", str(micro), "--gradient-accumulation-count", str(accumulation),
        "--lr-schedule-params", f"{{initial_learning_rate: {rate / (micro * replicas * accumulation)}}}",
    )  # fmt: skip
    config = replace(typed(*words).config, num_replicas=replicas)
    job = resolve(config, DATASET_SIZES["cifar10"], replicas)
    own = network or Residual("residual", SIZE.shape, SIZE.classes, job.network.norm)
    size = DatasetSize(64, 16, own.shape, own.classes)
    return replace(job, size=size, network=own, splits=tuple(splits), **changes)


def drawn(job, zero=()):
    """An undivided state before its first update, with weights that numpy drew; scales of the norms `zero` are 0."""
    draws = np.random.default_rng(0)
    params, statistics = jax.eval_shape(lambda: job.network.init(KEY))

    def weight(path, form):
        layer, name = (part.key for part in path)
        values = draws.normal(size=form.shape)
        width = 1 / np.sqrt(np.prod(form.shape[:-1])) if name == "kernel" else 0.1
        return ((layer not in zero) * ((name == "scale") + width * values)).astype(form.dtype)

    params = jax.tree.map_with_path(weight, params)
    statistics = {
        name: {leaf: np.full(form.shape, leaf == "variance", form.dtype) for leaf, form in layer.items()}
        for name, layer in statistics.items()
    }
    trained = init_trained(job.policy, job.optimiser, job.scale, params, statistics)
    state = {**dict(zip(model.TRAINED, trained, strict=True)), "update": np.int32(0)}
    averages = model.AVERAGED.items() if job.config.ema else ()
    return state | {name: jax.tree.map(np.float32, state[of]) for name, of in averages}


def samples(job, seed=0):
    """A global batch."""
    draws, (shape, classes) = np.random.default_rng(seed), job.size[2:]
    count = job.batch.global_
    pixels = draws.integers(0, 256, (count, *shape)).astype(np.uint8)
    return {"image": pixels, "label": draws.integers(0, classes, count).astype(np.int32)}


@cache
def compiled(job):
    if job.batch.replicas * job.stages > len(jax.devices()):
        pytest.skip(f"{job.batch.replicas * job.stages} devices")
    return jax.jit(model.update(job), compiler_options=QUICK)


def relabelled(job, seed=0):
    """The same, but for one label of the first update's."""
    batch = samples(job, seed)
    return batch if seed else with_other_label(batch, job.size.classes)


def moved(job, state):
    """A state of which one weight of the first layer is another."""
    return with_moved_weight(state, "params", job.network.nodes[0].name, "kernel")


def trained(job, updates=1, state=None, batches=samples, key=KEY):
    """The undivided state after so many updates and the last one's figures, as numpy arrays."""
    state = model.spread(job, state or drawn(job))
    for number in range(updates):
        state, figures = compiled(job)(state, batches(job, number), jax.random.fold_in(key, number))
    return model.gather(state), jax.device_get(figures)

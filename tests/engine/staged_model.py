"""A small model of four layers that can be cut into stages anywhere, for tests of pipelines: whole and cut.

Two values cross after the second layer, one after the others. Every sample's noise is drawn at the first layer, labels
are read at the last; the first and the third keep a running mean of what they see and a count of the parts.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.engine import stage_rows
from hotloop.engine.device import device_mesh
from hotloop.engine.pipeline import spread_over_stages, update_in_stages
from hotloop.engine.precision import init_trained, parse, update_weights

LAYERS = "abcd"
WIDTHS = {"a": (5, 8), "b": (8, 6), "c": (14, 7), "d": (7, 3)}
CUTS = {"whole": "", "one": "b", "two": "c", "three": "bd", "four": "bcd"}
"""By name: the layers that begin a stage, besides the first; two values cross into c."""
SAMPLES = 48
WIDE = parse("32.32")


def draw_params():
    rng = np.random.default_rng(0)
    return {
        name: {
            "kernel": rng.normal(size=shape).astype(np.float32) / 2,
            "bias": np.full(shape[1], 0.1, np.float32),
        }
        for name, shape in WIDTHS.items()
    }


def empty_statistics():
    zeros = {name: np.zeros(WIDTHS[name][1], np.float32) for name in "ac"}
    return {name: {"mean": mean, "parts": np.int32(0)} for name, mean in zeros.items()}


def draw_batch(samples=SAMPLES):
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(samples, 5)).astype(np.float32),
        "label": rng.integers(0, 3, samples).astype(np.int32),
    }


def run_layers(layers, params, carry, values, samples, keys):
    """The values after some layers, and the carry of those of them that have one."""
    carry = dict(carry)
    for name in layers:
        if name == "a":
            x = samples["x"] + 0.1 * jax.vmap(jax.random.uniform)(keys)[:, None]
            values = {"h": x.astype(params["a"]["kernel"].dtype)}
        if name == "c":
            values = {"h": jnp.concatenate([values["h"], values["z"]], 1)}
        out = values["h"] @ params[name]["kernel"] + params[name]["bias"]
        out = out if name == "d" else jnp.tanh(out)
        values = {"h": values["h"], "z": out} if name == "b" else {"h": out}
        if name in carry:
            seen = carry[name]
            mean = seen["mean"] + out.astype(jnp.float32).mean(0)
            carry[name] = {"mean": mean, "parts": seen["parts"] + 1}
    return values, carry


def find_loss(values, samples):
    """The mean loss, and figures."""
    chances = jax.nn.log_softmax(values["h"].astype(jnp.float32))
    picked = jnp.take_along_axis(chances, samples["label"][:, None], 1)
    right = (chances.argmax(1) == samples["label"]).mean(dtype=jnp.float32)
    loss = -picked.mean()
    return loss, {"loss": loss, "accuracy": right}


def loss_of_whole(params, carry, samples, keys):
    values, carry = run_layers(LAYERS, params, carry, None, samples, keys)
    loss, figures = find_loss(values, samples)
    return loss, (carry, figures)


def cut(starts):
    """The layers of each stage."""
    ends = [0, *(LAYERS.index(name) for name in starts), len(LAYERS)]
    return [LAYERS[start:stop] for start, stop in pairwise(ends)]


def stage_of(layers):
    def stage(params, carry, values, samples, keys):
        assert (values is None) == ("a" in layers)
        assert set(params) == set(layers)
        values, carry = run_layers(layers, params, carry, values, samples, keys)
        if "d" not in layers:
            return values, (carry, {})
        loss, figures = find_loss(values, samples)
        return loss, (carry, figures)

    return stage


def begin(kept):
    return jax.tree.map(jnp.zeros_like, kept)


def finish(kept, centre, spread):
    """Moves by the mean over the parts, and by the spread over replicas, so that neither may be lost."""
    return {
        name: {
            "mean": 0.9 * old["mean"] + centre[name]["mean"] / centre[name]["parts"] + spread[name]["mean"],
            "parts": old["parts"] + centre[name]["parts"],
        }
        for name, old in kept.items()
    }


def start(policy, optimiser, scale=1.0):
    params, kept = jax.tree.map(jnp.asarray, (draw_params(), empty_statistics()))
    return init_trained(policy, optimiser, scale, params, kept)


def whole_update(policy, optimiser, scale=1.0, *, replicas=1, accumulation, repeated=False):
    """`update(trained, batch, key, **extra)` on one device, or on replicas."""
    mesh = device_mesh(replicas) if replicas > 1 else None
    settings = {"policy": policy, "optimiser": optimiser, "scale": scale, "begin": begin, "finish": finish}
    settings |= {"accumulation": accumulation, "mesh": mesh, "repeated": repeated}

    def update(trained, batch, key, **extra):
        return update_weights(loss_of_whole, trained, batch, key, key, **settings, **extra)

    return update


def staged_update(
    starts, schedule, policy, optimiser, scale=1.0, *, replicas=1, accumulation, repeated=False
):
    """The same in stages, and what spreads a state over them."""
    layers = cut(starts)
    mesh = device_mesh(replicas, len(layers))
    settings = {"policy": policy, "optimiser": optimiser, "scale": scale, "begin": begin, "finish": finish}
    settings |= {"accumulation": accumulation, "mesh": mesh, "repeated": repeated, "schedule": schedule}
    stages = [stage_of(each) for each in layers]

    def update(trained, batch, key, **extra):
        return update_in_stages(stages, trained, batch, key, key, **settings, **extra)

    return update, partial(
        spread_over_stages, keys_by_stage=layers, policy=policy, optimiser=optimiser, mesh=mesh
    )


def merged(trained):
    """A state in stages as the host arrays of the undivided one."""
    return jax.tree.map(np.asarray, stage_rows.undivided(trained))

"""One weight update of a network: the same for any split of the batch, whatever scales, rounds or recomputes it.

Most of it is shown with a norm and a product on tiny images, which compile in a moment; that the named networks are
made of the same pieces is told by their own tests, and one of them is updated here, too.
"""

from copy import copy
from dataclasses import replace
from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cnn_words import typed
from staged import samples

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.feed import Resident
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.precision import init_trained
from hotloop.families.cnn import images, model
from hotloop.families.cnn.job import resolve
from hotloop.families.cnn.network import INPUT, Network, NetworkBuilder, NormChoice
from hotloop.families.cnn.options import DATASET_SIZES, DatasetSize
from hotloop.families.cnn.sources import synthetic_images
from hotloop.options import Params
from same_numbers import assert_same_but_for, with_moved_weight, with_other_label

KEY, RATE, BATCH = seed_key(7), 0.08, 8
STEPPED = ("--lr-schedule", "stepped", "--lr-schedule-params", f"{{boundaries: [], values: [{RATE}]}}")
FLOAT32 = ("--precision", "32.32", *STEPPED)
DIGITS = ("--dataset", "mnist", *FLOAT32)
FLOAT16 = ("--dataset", "mnist", *STEPPED, "--precision", "16.32", "--half", "float16")
GROUPS = ("--norm-layer", "{name: group_norm, num_groups: 3}")
QUICK = {"xla_backend_optimization_level": 0}


class Flat(Network):
    """A norm of the image, and a dense layer: every kind of parameter, and statistics that can be seen by hand."""

    epsilon = 1e-5

    @cached_property
    def nodes(self):
        builder = NetworkBuilder(self.shape, self.norm, self.epsilon)
        builder.logits("dense", builder.flatten("flatten", builder.norm("bn_0", INPUT)), self.classes)
        return tuple(builder.nodes)


def named(*words, split=(BATCH, 1, 1), repeated=False, pipeline_splits=(), **changes):
    """A job by its command line, whose batch is split as (micro, replicas, accumulation); changes are not checked."""
    config = copy(typed(*words).config)
    micro, replicas, accumulation = split
    sizes = {"micro_batch_size": micro, "num_replicas": replicas, "gradient_accumulation_count": accumulation}
    for name, value in (sizes | changes).items():
        object.__setattr__(config, name, value)
    job = resolve(config, DATASET_SIZES[config.dataset], replicas, repeated=repeated)
    object.__setattr__(config, "pipeline_splits", pipeline_splits)
    return job


def small(*words, **changes):
    """The same with the small network, for images of 4 x 4 with three channels."""
    job, size = named(*words, **changes), DatasetSize(24, 8, (4, 4, 3), 10)
    return replace(job, size=size, network=Flat("flat", size.shape, size.classes, job.network.norm))


def begun(job):
    """A state before its first update, with weights that numpy drew: nothing to compile."""
    draws = np.random.default_rng(0)
    state = jax.eval_shape(lambda: model.init(job, KEY))

    def drawn(path, form):
        name, values = path[-1].key, draws.normal(size=form.shape)
        width = 1 / np.sqrt(np.prod(form.shape[:-1])) if name == "kernel" else 0.1
        return ((name == "scale") + width * values).astype(form.dtype)

    def at_rest(path, form):
        return np.full(form.shape, path[-1].key == "variance", form.dtype)

    return {
        "params": jax.tree.map_with_path(drawn, state["params"]),
        "statistics": jax.tree.map_with_path(at_rest, state["statistics"]),
        "optimiser": jax.tree.map(lambda form: np.zeros(form.shape, form.dtype), state["optimiser"]),
        "scale": init_trained(job.policy, job.optimiser, job.scale, {}).scale,
        "update": np.int32(0),
    }


@cache
def compiled(job):
    count = job.batch.replicas
    if count > len(jax.devices()):
        pytest.skip(f"{count} devices")
    return jax.jit(model.update(job), compiler_options=QUICK)


def updated(job, batch=None, state=None):
    """State and figures after one update, as numpy arrays."""
    batch, state = batch or samples(job), state or begun(job)
    return jax.device_get(compiled(job)(state, batch, KEY))


def pairs(one, other):
    return zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)


def close(one, other, tolerance=1e-6):
    for left, right in pairs(one, other):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def same(one, other):
    for left, right in pairs(one, other):
        assert left.dtype == right.dtype and np.array_equal(left, right)


def all_moved(one, other, least):
    assert min(np.abs(np.asarray(left, float) - right).max() for left, right in pairs(one, other)) > least


class Line:
    """One weight: logits (0, w x) of an image's only pixel, so that dloss/dw = (p(w x) - label) x by hand."""

    nodes, norm = (), NormChoice()

    def init(self, key):
        return {"line": {"kernel": jnp.zeros(())}}, {}

    def apply(self, params, statistics, pixels, *, train):
        logit = params["line"]["kernel"] * pixels.reshape(-1, 1)
        return jnp.concatenate([jnp.zeros_like(logit), logit], 1).astype(jnp.float32), {}


LINEAR = Line()


def one_weight(*words, **changes):
    """A job whose network is that line."""
    return replace(named(*words, **changes), size=DatasetSize(24, 8, (1, 1, 1), 2), network=LINEAR)


LINE = {
    "image": np.arange(0, 252, 21, np.uint8).reshape(12, 1, 1, 1),
    "label": np.array([0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1], np.int32),
}
AT_ZERO = {"params": {"line": {"kernel": np.float32(0)}}}


def by_hand(updates, momentum):
    """The weight after so many updates, in doubles."""
    x, y = LINE["image"].ravel() / 255, LINE["label"]
    w = v = 0.0
    for _ in range(updates):
        v = momentum * v - RATE * np.mean((1 / (1 + np.exp(-w * x)) - y) * x)
        w += v
    return w


@pytest.mark.parametrize("split", [(12, 1, 1), (1, 1, 12), (3, 4, 1), (1, 4, 3), (3, 2, 2)])
def test_a_weight_moves_as_by_hand_for_every_split_of_its_batch(split):
    job = one_weight(*DIGITS, "--optimizer-params", "{momentum: 0.9}", split=split)
    state = begun(job) | AT_ZERO
    for done in range(1, 4):
        state, figures = updated(job, LINE, state)
        assert state["params"]["line"]["kernel"] == pytest.approx(by_hand(done, 0.9), rel=1e-6)
    assert figures["learning_rate"] == np.float32(RATE) and state["update"] == 3


def test_gradients_of_16_bits_do_not_overflow_when_replicas_add_them_up():
    job = one_weight(*FLOAT16, split=(1, 4, 1), auto_loss_scaling=True)
    white = {"image": np.full((4, 1, 1, 1), 255, np.uint8), "label": np.ones(4, np.int32)}
    # Each gradient is -1/2 times this factor, as large as float16 bears; the four together would be infinite.
    start = begun(job) | AT_ZERO
    start["scale"] = start["scale"]._replace(scale=np.float32(2.0**16))
    state, _ = updated(job, white, start)
    assert state["scale"].skipped == 0
    assert state["params"]["line"]["kernel"] == pytest.approx(0.5 * RATE, rel=1e-6)


def check_same_update(whole, parts, moved):
    """Both are updated the same, every weight by more than `moved`; one other label or one moved weight would show."""
    (one, figures), (other, other_figures), start = updated(whole), updated(parts), begun(whole)
    layer = next(name for name, leaves in start["params"].items() if "kernel" in leaves)
    label, _ = updated(parts, with_other_label(samples(parts), parts.size.classes))
    weight, _ = updated(parts, state=with_moved_weight(start, "params", layer, "kernel"))
    assert_same_but_for(other["params"], one["params"], 1e-6, label=label["params"], weight=weight["params"])
    close(other["statistics"], one["statistics"])
    close(other_figures, figures)
    all_moved(start["params"], one["params"], moved)


@pytest.mark.parametrize("split", [(2, 1, 4), (1, 4, 2)])
def test_without_batch_norm_every_split_gives_the_same_update_and_each_sample_its_own_crop(split):
    check_same_update(small(*FLOAT32, *GROUPS), small(*FLOAT32, *GROUPS, split=split), moved=1e-3)


@pytest.mark.slow
def test_a_named_network_is_updated_the_same_over_replicas_and_micro_batches():
    words = (*DIGITS, "--model", "toy_model_bn", "--norm-layer", "{name: group_norm, num_groups: 2}")
    check_same_update(named(*words), named(*words, split=(2, 2, 2)), moved=1e-4)


def test_the_crop_of_a_sample_is_drawn_anew_for_every_update():
    job = small(*FLOAT32, *GROUPS)
    _, figures = updated(job)
    _, others = jax.device_get(compiled(job)(begun(job), samples(job), seed_key(8)))
    assert abs(figures["loss"] - others["loss"]) > 1e-3
    digits = small(*DIGITS, *GROUPS)
    _, figures = updated(digits)
    _, others = jax.device_get(compiled(digits)(begun(digits), samples(digits), seed_key(8)))
    assert figures["loss"] == others["loss"]  # nothing is drawn for digits


@pytest.mark.parametrize(("rule", "split"), [("spread", (2, 2, 2)), ("seed", (2, 1, 4))])
def test_statistics_of_all_micro_batches_make_one_move(rule, split):
    job = small(*DIGITS, "--statistics-rule", rule, split=split)
    batch = samples(job)
    batch["image"] //= np.arange(1, 9, dtype=np.uint8)[:, None, None, None]  # their means are far apart
    state, _ = updated(job, batch)
    x = (batch["image"] / 255).reshape(-1, 3)
    variance = x.var(0, ddof=1)
    if rule == "seed":  # the means of accumulated micro-batches do not count
        variance = x.reshape(4, -1, 3).var(1, ddof=1).mean(0)
        assert (variance < 0.9 * x.var(0)).all()
    close(state["statistics"]["bn_0"], {"mean": 0.03 * x.mean(0), "variance": 0.97 + 0.03 * variance})


def test_loss_scaling_by_a_power_of_two_changes_no_bit():
    plain, scaled = (small(*DIGITS, *words) for words in ((), ("--loss-scaling", "128")))
    assert begun(scaled)["scale"].scale == 128
    (one, figures), (other, scaled_figures) = updated(plain), updated(plain, state=begun(scaled))
    for part in ("params", "optimiser", "statistics"):
        same(one[part], other[part])
    same(figures, scaled_figures)


def test_automatic_scaling_skips_what_is_not_finite_and_keeps_every_bit():
    job = small(*FLOAT16, auto_loss_scaling=True, optimizer_params=Params(momentum=0.9))
    state = begun(job)
    big, fine = (state["scale"]._replace(scale=np.float32(scale)) for scale in (2.0**24, 2.0**8))
    skipped, figures = updated(job, state={**state, "scale": big})
    for part in ("params", "optimiser", "statistics"):
        same(skipped[part], state[part])
    assert (skipped["scale"].scale, skipped["scale"].skipped, skipped["update"]) == (2.0**23, 1, 1)
    assert figures["loss_scaling_factor"] == 2.0**23 and np.isfinite(figures["loss"])
    used, _ = updated(job, state={**state, "scale": fine})
    assert (used["scale"].scale, used["scale"].good, used["scale"].skipped) == (2.0**8, 1, 0)
    for part in ("params", "optimiser", "statistics"):
        all_moved(used[part], state[part], 1e-5)


def test_recomputation_gives_the_same_update():
    plain, again = small(*DIGITS), small(*DIGITS, pipeline_splits=("flatten", "dense"), recomputation=True)
    traced = str(jax.make_jaxpr(model.update(again))(begun(again), samples(again), KEY))
    assert traced.count("remat2[") + traced.count("checkpoint[") >= 3  # a stage each
    check_same_update(plain, again, moved=0)


def test_smoothed_labels_make_the_loss_and_the_step():
    smoothing = 0.2
    job = small(*DIGITS, "--label-smoothing", str(smoothing))
    state, batch = begun(job), samples(job)
    new, figures = updated(job, batch)
    x = batch["image"] / 255
    x = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5)
    norm, dense = (state["params"][name] for name in ("bn_0", "dense"))
    x = x * norm["scale"] + norm["offset"]
    logits = x.reshape(BATCH, -1) @ dense["kernel"].astype(float) + dense["bias"]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wanted = (1 - smoothing) * np.eye(10)[batch["label"]] + smoothing / 10
    assert figures["loss"] == pytest.approx(-(wanted * np.log(p)).sum(1).mean(), rel=1e-5)
    step = (new["params"]["dense"]["bias"] - dense["bias"]) / -RATE
    np.testing.assert_allclose(step, (p - wanted).mean(0), atol=1e-6)
    assert figures["training_accuracy"] == np.float32((p.argmax(1) == batch["label"]).mean())


@pytest.mark.parametrize(
    ("words", "spared"),
    [
        (("--l2-regularization", "0.5", "--exclude-norms-and-biases"), ("scale", "offset", "bias")),
        (("--weight-decay", "0.5"), ()),
    ],
)
def test_decay_shrinks_every_weight_that_is_not_excluded(words, spared):
    job, plain = small(*DIGITS, *words), small(*DIGITS)
    before, with_decay, without = begun(plain)["params"], updated(job)[0], updated(plain)[0]
    for layer, leaves in before.items():
        for name, weights in leaves.items():
            pulled = with_decay["params"][layer][name] - without["params"][layer][name]
            share = 0 if name in spared else 0.5
            np.testing.assert_allclose(pulled, -RATE * share * weights, rtol=1e-5, atol=2e-7)
    same(with_decay["statistics"], without["statistics"])


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("16.16",), "bfloat16"),
        (("16.16", "--half", "float16"), "float16"),
        (("16.32",), "float32"),
        (("32.32",), "float32"),
    ],
)
def test_weights_and_optimiser_have_the_precisions_type_and_statistics_are_float32(words, kept):
    momentum = ("--optimizer-params", "{momentum: 0.9}")
    job = named("--model", "toy_model_bn", *momentum, "--precision", *words, split=(2, 1, 4))
    state = jax.eval_shape(lambda: model.init(job, KEY))
    new, figures = jax.eval_shape(model.update(job), state, samples(job), KEY)
    types = jax.tree.map(lambda leaf: str(leaf.dtype), new)
    assert types == jax.tree.map(lambda leaf: str(leaf.dtype), state)
    assert {*jax.tree.leaves((types["params"], types["optimiser"]))} == {kept}
    assert {*jax.tree.leaves(types["statistics"])} == {"float32"}
    assert {str(leaf.dtype) for leaf in figures.values()} == {"float32"}


def test_made_up_images_give_every_micro_batch_the_same_and_are_not_cropped():
    job = small(*FLOAT32, split=(4, 1, 3), repeated=True)
    batch = {name: values[:4] for name, values in samples(job).items()}
    state, figures = updated(job, batch)
    x = images.standardise(batch["image"]).reshape(-1, 3).astype(float)
    merged = 3 * len(x)
    variance = 0.97 + 0.03 * merged / (merged - 1) * x.var(0)
    close(state["statistics"]["bn_0"], {"mean": 0.03 * x.mean(0), "variance": variance})
    assert 4 * figures["training_accuracy"] == round(4 * figures["training_accuracy"])


@pytest.mark.parametrize("on_device", [False, True])
def test_every_replica_and_part_gets_its_share_of_the_same_made_up_batch(on_device):
    shares = []
    for split in ((30, 1, 8), (30, 4, 2), (30, 2, 4)):
        if split[1] > len(jax.devices()):
            pytest.skip(f"{split[1]} devices")
        job = small(*FLOAT32, split=split)
        source = synthetic_images(DatasetSize(1000, 8, (4, 4, 3), 10), seed=3, on_device=on_device)
        feed = source.feed(job)
        batch = jax.device_get(feed.batch(feed.arguments(0, 1), jnp.int32(0)))
        parts = [values.reshape(split[1], -1, *values.shape[1:]) for values in batch.values()]
        assert len({leaf.shape[1] for leaf in parts}) == 1
        # A repeated micro-batch stands for every part of its replica's share.
        repeats = split[2] if on_device else 1
        shares.append([np.repeat(leaf[:, None], repeats, 1).reshape(8, 30, -1) for leaf in parts])
    same(shares[1], shares[0])
    same(shares[2], shares[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_device", "words", "splits"),
    [
        (False, GROUPS, [(300, 1, 1), (15, 1, 20), (75, 4, 1)]),
        (False, (), [(30, 1, 10), (30, 2, 5)]),
        (True, (), [(75, 1, 4), (75, 2, 2), (75, 4, 1)]),
    ],
    ids=["host", "host, batch norm", "device"],
)
def test_made_up_images_are_the_same_for_every_split_of_a_global_batch(on_device, words, splits):
    """Where norms look at a micro-batch, and on the device, which repeats one, for every split with its size."""
    found = []
    for split in splits:
        if split[1] > len(jax.devices()):
            pytest.skip(f"{split[1]} devices")
        job = small(*FLOAT32, *words, split=split, repeated=on_device)
        source = synthetic_images(DatasetSize(1000, 8, (4, 4, 3), 10), seed=3, on_device=on_device)
        program = Program(model.update(job), source.feed(job), 1, KEY)
        state, metrics = program(copy_state(begun(job)), 0, 1)
        found.append(jax.device_get((state["params"], metrics["loss"])))
    for other in found[1:]:
        close(other, found[0], 1e-5)


def called(program, state, counts, first=0):
    for count in counts:
        state, _ = program(state, first, count)
        first += count
    return state


@pytest.mark.slow
def test_any_number_of_updates_a_call_and_any_resume_give_the_same_bits(tmp_path):
    half = ("--precision", "16.16", *STEPPED, "--optimizer-params", "{momentum: 0.9}")  # rounded by chance
    job = one_weight("--dataset", "mnist", *half, split=(3, 1, 2))
    state, update, feed = begun(job), model.update(job), Resident(LINE, 6, seed=3)
    six, three, one = (Program(update, feed, longest, KEY) for longest in (6, 3, 1))
    whole = jax.device_get(called(six, copy_state(state), [6]))
    same(whole, jax.device_get(called(one, copy_state(state), [1] * 6)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, called(three, copy_state(state), [3]), position={})
        restored = checkpoints.restore(copy_state(state))
    same(whole, jax.device_get(called(three, copy_state(restored.state), [3], first=3)))
    assert whole["update"] == 6 and str(whole["params"]["line"]["kernel"].dtype) == "bfloat16"
    all_moved(whole["params"], state["params"], 1e-3)

"""When an update's chains are a kernel for Hopper cards, and that it can be built. What it computes is in
test_vcd_fused.py, and on a card in test_vcd_hopper_card.py."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from hotloop.errors import OptionError
from hotloop.families.vcd import hopper, model, train
from hotloop.families.vcd.config import VcdModel, VcdTrain
from hotloop.layers import native, paths


class Card:
    def __init__(self, capability=paths.CARD, multiprocessors=132):
        self.compute_capability, self.core_count = capability, multiprocessors


@pytest.fixture
def put_in(monkeypatch):
    """put_in(card, ...) has the machine hold these cards, and a jax that can use them."""
    monkeypatch.delenv(paths.CARD_SWITCH, raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(paths, "CARD_JAX", (0, 0))

    def put_in(*cards):
        monkeypatch.setattr(paths, "_local_cards", lambda: list(cards))
        for module in (model, train):
            monkeypatch.setattr(module, "platform", lambda: "gpu" if cards else "cpu")

    return put_in


def test_auto_takes_it_above_the_batches_of_the_fused_kernel(put_in):
    put_in(Card())
    assert model.choose_sampler(VcdModel(), 512) == "fused"
    for batch in (513, 1024, 3072):
        assert model.choose_sampler(VcdModel(), batch) == "hopper"
    put_in()
    assert model.choose_sampler(VcdModel(), 1024) == "plain"


@pytest.mark.parametrize(
    "cards",
    [[Card("8.0")], [Card("10.0")], [Card(), Card("8.0")], [Card(multiprocessors=6)]],
    ids=["Ampere", "Blackwell", "one of two", "too few multiprocessors"],
)
def test_auto_keeps_the_plain_sampler_on_other_cards(put_in, cards):
    put_in(*cards)
    assert model.choose_sampler(VcdModel(), 1024) == "plain"


@pytest.mark.parametrize(
    "other",
    [
        {"z_dim": 15},
        {"hidden": (190, 200)},
        {"hidden": (200, 207)},
        {"hidden": (200,)},
        {"hidden": (200, 200, 200)},
        {"precision": "16.32"},
        {"sampler": "plain"},
    ],
    ids=str,
)
def test_auto_keeps_the_plain_sampler_for_what_was_not_tried(put_in, other):
    put_in(Card())
    assert model.choose_sampler(VcdModel(**other), 1024) == "plain"


def test_auto_keeps_the_plain_sampler_on_several_devices(put_in):
    put_in(Card(), Card())
    assert model.choose_sampler(VcdModel(), 1024, replicas=2) == "plain"
    assert model.choose_sampler(VcdModel(), 1024, replicas=1) == "hopper"


@pytest.mark.parametrize(
    ("name", "value"),
    [(paths.CARD_SWITCH, "0"), ("XLA_FLAGS", "--xla_some=CONCURRENT")],
    ids=["off", "overlap"],
)
def test_the_environment_switches_it_off(put_in, monkeypatch, name, value):
    put_in(Card())
    monkeypatch.setenv(name, value)
    assert model.choose_sampler(VcdModel(), 1024) == "plain"


def test_an_older_jax_keeps_the_plain_sampler_and_says_what_would_be_faster(put_in, monkeypatch, caplog):
    put_in(Card())
    monkeypatch.setattr(paths, "CARD_JAX", (99, 0))
    native.warn_once.cache_clear()
    assert model.choose_sampler(VcdModel(), 1024) == "plain"
    assert "vcd's sampler would be faster on this card with jax 0.11" in caplog.text


ASKED = VcdTrain(sampler="hopper")


def test_asked_for_it_runs_on_every_batch_that_the_card_has_room_for(put_in):
    put_in(Card())
    for batch in (1, 100, 512, 513, 3072):
        train.check_devices(replace(ASKED, micro_batch_size=batch))
    assert model.choose_sampler(VcdModel(sampler="hopper"), 100) == "hopper"


@pytest.mark.parametrize(
    ("cards", "asked", "said"),
    [
        ([], {}, "a kernel for NVIDIA's Hopper cards, and this is a cpu"),
        ([Card()], {"z_dim": 15}, "made for two hidden layers of 191 to 206 and at most 14 latents"),
        ([Card("8.0")], {}, "it needs an NVIDIA card of compute capability 9.0"),
        # Eight clusters of seven, and eight groups of multiprocessors that may be one short of another cluster.
        (
            [Card(multiprocessors=103)],
            {"micro_batch_size": 512},
            "it needs 104 multiprocessors, and the card has 103",
        ),
    ],
)
def test_asked_for_where_it_cannot_run_it_says_why(put_in, cards, asked, said):
    put_in(*cards)
    with pytest.raises(OptionError) as error:
        train.check_devices(replace(ASKED, **asked))
    assert str(error.value).startswith(f"--sampler hopper: {said}")
    assert str(error.value).endswith("; use --sampler auto")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [(paths.CARD_SWITCH, "0", "HOTLOOP_PERSISTENT"), ("XLA_FLAGS", "/etc/flags", "XLA_FLAGS")],
)
def test_asked_for_and_switched_off_it_says_by_what(put_in, monkeypatch, name, value, said):
    put_in(Card())
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"--sampler hopper: {said}"):
        train.check_devices(ASKED)


def test_asked_for_with_an_older_jax_it_says_so(put_in, monkeypatch):
    put_in(Card())
    monkeypatch.setattr(paths, "CARD_JAX", (99, 0))
    with pytest.raises(OptionError, match=r"--sampler hopper: it needs jax 0\.11\.2 or later, and this is"):
        train.check_devices(ASKED)


def test_asked_for_on_several_devices_it_says_that_it_works_on_one(put_in, monkeypatch):
    put_in(Card(), Card())
    monkeypatch.setattr(train, "mesh_of_replicas", lambda replicas: None)
    with pytest.raises(OptionError, match="--sampler hopper: works on one device, and --replicas is 2"):
        train.check_devices(replace(ASKED, replicas=2))


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX, reason="kernels are built with jax 0.11.2 or later"
)
@pytest.mark.parametrize(
    ("sampler", "batch", "kernels"),
    [("hopper", 100, 1), ("hopper", 512, 1), ("auto", 1024, 8), ("plain", 1024, 0)],
)
def test_an_update_is_one_kernel_or_one_an_iteration(put_in, sampler, batch, kernels):
    """Lowered for a card: all of a block fits into its shared memory, or there would be an error."""
    put_in(Card())
    job = model.make_job(VcdModel(micro_batch_size=batch, sampler=sampler), 20 * batch)
    state = jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))
    images = {
        "image": jax.ShapeDtypeStruct((batch, 784), jnp.uint8),
        "index": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    traced = jax.jit(model.update(job)).trace(state, images, jax.random.key(0))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == kernels


def test_tiles_that_wait_are_counted_against_the_card_and_others_are_not():
    assert [hopper.count_blocks(chains) for chains in (64, 65, 512, 513, 3072)] == [55, 62, 104, 7, 7]

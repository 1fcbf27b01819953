"""The checks before benchmarks/peers/vcd.py times anything: equal programs pass, and a wrong term does not."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hotloop.engine import optim
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd.config import VcdModel
from hotloop.mcmc import hmc

pytest.importorskip("torch")

IMAGES = 24


@pytest.fixture(autouse=True)
def peers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))


RIGHT_OPTIMISER = optim.make


def small_job() -> vcd.Job:
    model = VcdModel(hidden=(12, 9), z_dim=3, hmc_steps=3, leapfrog_steps=3, micro_batch_size=8)
    return vcd.Job(model, IMAGES)


def some_data() -> dict[str, np.ndarray]:
    images = np.random.default_rng(5).random((IMAGES, 784)) < 0.13
    return {"image": images.astype(np.uint8), "index": np.arange(IMAGES, dtype=np.int32)}


def test_an_update_by_torch_and_ours_are_equally_near_to_float64() -> None:
    import vcd_checks

    errors = vcd_checks.against_torch(small_job(), some_data(), "cpu")
    assert errors["ours"] <= vcd_checks.LIMIT
    assert errors["torch"] <= vcd_checks.LIMIT


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (optim, "make", lambda name, params: RIGHT_OPTIMISER(name, {**params, "epsilon": 1.01})),
        (hmc, "adaptation", lambda size, *_: size),
        (vcd, "read_variate", lambda state, index, like: 0 * like),
    ],
    ids=["epsilon", "adaptation", "variate"],
)
def test_a_wrong_term_in_ours_is_refused(module: object, name: str, wrong: object) -> None:
    import vcd_checks

    with mock.patch.object(module, name, wrong), pytest.raises(SystemExit, match="not timed"):
        vcd_checks.against_torch(small_job(), some_data(), "cpu")


def test_chains_of_blackjax_go_where_ours_go() -> None:
    pytest.importorskip("blackjax")
    import vcd_checks

    result = vcd_checks.against_blackjax(small_job(), some_data())
    assert result["decisions_that_differ"] == 0
    assert result["blackjax"] < 1e-5


def test_an_update_with_blackjax_adapts_the_step_size_and_moves_every_network() -> None:
    pytest.importorskip("blackjax")
    import jax
    import vcd_blackjax

    job, data = small_job(), some_data()
    state = vcd.init(job, jax.random.key(0))
    batch = {name: array[:8] for name, array in data.items()}
    with vcd_blackjax.replaced():
        new, metrics = jax.jit(vcd.update(job))(state, batch, jax.random.key(1))
    rate, target = job.model.adaptation_rate, job.model.target_acceptance
    assert 0 < metrics["acceptance"] <= 1
    acceptance = float(metrics["acceptance"])
    expected = np.log(job.model.step_size) + job.model.hmc_steps * rate * (acceptance / target - 1)
    assert np.log(float(new["step_size"])) == pytest.approx(expected, abs=1e-4)
    for name in ("mean", "spread", "decoder"):
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), state["params"][name], new["params"][name])
        assert all(jax.tree.leaves(moved))


def test_each_side_has_its_memory_with_the_images_where_it_is_counted() -> None:
    from contextlib import nullcontext

    import jax
    import vcd as program  # the benchmark's, not the family's

    job, data = small_job(), some_data()
    state = vcd.init(job, jax.random.key(0))
    ours = program.looped(job, data, state, 2, nullcontext()).memory
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))
    assert ours is not None and IMAGES * 784 + weights < ours < 10 * (IMAGES * 784 + weights)
    assert program.plain_torch(job, data, state, "cpu").memory is None


def test_torch_begins_with_the_weights_that_it_was_given() -> None:
    """Updates that are made to count its memory are undone."""
    import jax
    import vcd as program

    job, data = small_job(), some_data()
    state = vcd.init(job, jax.random.key(0))
    side = program.plain_torch(job, data, state, "cpu")
    assert side.step_size() == pytest.approx(job.model.step_size)


def test_step_sizes_are_compared_after_as_many_updates() -> None:
    import vcd

    done = {"ours": 0, "torch": 0}

    def side(name: str, multiple: int, rate: float) -> vcd.Side:
        def advance(count: int) -> None:
            assert count % multiple == 0
            done[name] += count

        return vcd.Side(advance, lambda: rate ** done[name], None, multiple)

    vcd.warmed_up({"ours": side("ours", 200, 0.99), "torch": side("torch", 1, 0.99)})
    assert done == {"ours": 200, "torch": 200}
    with pytest.raises(SystemExit, match="not the same sampler"):
        vcd.warmed_up({"ours": side("ours", 20, 0.99), "torch": side("torch", 1, 0.98)})

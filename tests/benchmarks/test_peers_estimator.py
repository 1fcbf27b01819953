"""What benchmarks/peers/estimator.py does before and after it times: equal programs pass, a wrong term does not."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from hotloop.families.estimator.cifar import network as our_network

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def peers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))
    monkeypatch.delitem(sys.modules, "estimator", raising=False)  # a folder of tests has this name, too


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads spin while they wait, which costs tests that run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_torchs_network_has_our_weights_in_the_same_places() -> None:
    import estimator_checks
    import estimator_torch

    ours, network = estimator_checks.started(), estimator_torch.Network()
    estimator_torch.load(network, ours)
    assert sum(p.numel() for p in network.parameters()) == our_network.KERAS.parameters
    back = estimator_torch.weights_of(network)
    assert jax.tree.structure(back) == jax.tree.structure(ours)
    for some, others in zip(jax.tree.leaves(back), jax.tree.leaves(ours), strict=True):
        np.testing.assert_array_equal(some, others)


def test_torch_takes_every_sample_once_a_pass() -> None:
    import estimator_torch

    labels = np.arange(12)
    images = np.zeros((12, 32, 32, 3), np.uint8)
    trainer = estimator_torch.Trainer(estimator_torch.Network(), images, labels, 4, 0.01, "cpu")
    passes = [np.concatenate([next(trainer.batches)[1].numpy() for _ in range(3)]) for _ in range(2)]
    assert all(sorted(each) == list(labels) for each in passes)
    assert list(passes[0]) != list(passes[1])


def test_one_update_of_ours_is_as_near_to_float64_as_torchs() -> None:
    import estimator_checks

    errors = estimator_checks.check("cpu", ())
    assert set(errors) == {"ours", "by hand", "torch"}
    assert all(error < 1e-5 for error in errors.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scale_pixels", lambda images, dtype: images.astype(dtype) / 256),
        ("with_bias", lambda x, bias: x + 1.01 * bias),
        ("max_pool", lambda x, *rest: RIGHT_POOL(x[:, ::-1], *rest)),
    ],
    ids=["scale", "bias", "pool"],
)
def test_a_wrong_term_in_ours_is_refused(name: str, wrong: object) -> None:
    import estimator_checks

    with mock.patch.object(our_network, name, wrong), pytest.raises(SystemExit, match="not timed"):
        estimator_checks.check("cpu", ())


RIGHT_POOL = our_network.max_pool


def test_a_comparison_reports_every_side_and_a_missed_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import estimator

    file = tmp_path / "rows.json"
    arguments = ["--rounds", "2", "--seconds", "0.001", "--no-keras", "--no-nnx", "--json", str(file)]
    small = estimator.Case("small", 4, {"by hand": 1e-9, "torch": 1e9}, per_call=2, samples=16)
    with (
        mock.patch.dict(estimator.CASES, cpu=(small,)),
        mock.patch.object(estimator.estimator_checks, "check", lambda device, others: {}),
    ):
        assert estimator.main(arguments) == 1
    rows = {row["side"]: row for row in json.loads(file.read_text())["results"]}
    assert set(rows) == {"ours", "by hand", "torch"}
    assert rows["ours"]["ratio"] == 1
    assert {side for side, row in rows.items() if row["missed"]} == {"torch"}
    for row in rows.values():
        assert row["images_per_second"] == pytest.approx(4e3 / row["milliseconds"])
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    # The same update on the same images and weights; torch does not count on a CPU.
    needed = [rows[side]["memory_bytes"] for side in ("ours", "by hand", "torch")]
    assert needed[0] == pytest.approx(needed[1], rel=0.05) and needed[2] is None
    assert needed[0] > 4 * our_network.KERAS.parameters + 16 * 3072
    assert "MISSED" in capsys.readouterr().out


def test_losses_that_differ_are_refused() -> None:
    import estimator

    losses = np.array([2.3, 2.2])
    estimator.same(estimator.CASES["cpu"][0], losses, losses * 1.001)
    with pytest.raises(SystemExit, match=r"by hand are up to 0\.1 apart"):
        estimator.same(estimator.CASES["cpu"][0], losses, losses + 0.1)


def test_unknown_cases_are_refused_by_name() -> None:
    import estimator

    with pytest.raises(SystemExit, match="no cifar-b33; there are cifar-b32"):
        estimator.main(["--cases", "cifar-b33", "--no-keras"])


@pytest.mark.slow
def test_nnx_makes_our_update_and_keeps_its_metrics() -> None:
    pytest.importorskip("flax")
    import estimator_checks
    import estimator_nnx

    assert estimator_checks.check("cpu", ["nnx"])["nnx"] < 1e-5
    images, labels = estimator_checks.drawn(estimator_checks.SAMPLES)
    network = estimator_nnx.Network(estimator_nnx.nnx.Rngs(0), dropout=False)
    estimator_nnx.load(network, estimator_checks.started())
    trainer = estimator_nnx.Trainer(network, images, labels, estimator_checks.SAMPLES, 100.0)
    logits = np.asarray(network(images), np.float64)
    trainer.update(1)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = -np.log(shares[np.arange(len(labels)), labels]).mean()
    assert float(trainer.metrics.compute()["loss"]) == pytest.approx(expected, rel=1e-5)


def test_nnx_drops_values_and_takes_every_sample_once_a_pass() -> None:
    pytest.importorskip("flax")
    import estimator_nnx

    network = estimator_nnx.Network(estimator_nnx.nnx.Rngs(0))
    trainer = estimator_nnx.Trainer(network, np.zeros((13, 32, 32, 3), np.uint8), np.arange(13), 4, 0.01)
    passes = [np.concatenate([next(trainer.rows) for _ in range(3)]) for _ in range(2)]
    assert all(len(set(each)) == 12 for each in passes)
    assert list(passes[0]) != list(passes[1])
    assert not network.after_pool.deterministic
    assert network.after_pool.rate == 0.25 and network.after_dense.rate == 0.5


@pytest.mark.slow
def test_keras_makes_our_update_and_times_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    import estimator
    import estimator_checks

    assert estimator_checks.check("cpu", ["keras"])["keras"] < 1e-5
    small = estimator.Case("small", 4, per_call=2, samples=16)
    side = estimator.keras_side(small, estimator_checks.drawn(16), estimator_checks.started())
    assert 0 < side.run(2) < side.run(64)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("jax.lax.scan(step, state)", "one compiled loop"),
        ("for _ in range(9): step()", "a loop in Python over"),
    ],
)
def test_what_keras_makes_of_an_execution_is_read_from_its_source(
    monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    import estimator_keras

    monkeypatch.setattr(estimator_keras.inspect, "getsource", lambda module: source)
    assert estimator_keras.describe_execution().startswith(said)

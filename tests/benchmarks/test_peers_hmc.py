"""benchmarks/peers/hmc.py: its densities, its checks before anything is timed, and a smoke run against the peers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

DRAWS = np.random.default_rng(0).normal(size=(4, 500, 3))


@pytest.fixture(autouse=True)
def peers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))


def a_run(shift: float = 0.0, factor: float = 1.0) -> Any:
    import hmc_sides

    return hmc_sides.Run(1.0, 2.0, {"x": DRAWS * factor + shift}, 0)


def with_draws(draws: np.ndarray) -> Any:
    return a_run()._replace(samples={"x": draws})


def changed(place: Any, value: float) -> np.ndarray:
    draws = DRAWS.copy()
    draws[place] = value
    return draws


NO_NUMBERS = [
    changed(..., np.nan),
    changed((..., 1), np.nan),
    changed((2, 3, 0), np.inf),
    DRAWS[:, :3],
]
"""Draws of which something cannot be estimated; the last are too few."""


def load() -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    path = Path(__file__).parents[2] / "benchmarks" / "peers" / "hmc.py"
    spec = spec_from_file_location("peers_hmc", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("exact", [{"x": (np.zeros(3), np.ones(3))}, {}])
def test_equal_moments_pass_and_others_do_not(exact: Any) -> None:
    program, right = load(), a_run()
    assert program.disagreement(right, right, exact) < program.STANDARD_ERRORS
    for wrong in (a_run(shift=0.2), a_run(factor=1.2)):
        assert program.disagreement(wrong, right, exact) > program.STANDARD_ERRORS
    for wrong in NO_NUMBERS:
        assert program.disagreement(with_draws(wrong), right, exact) == np.inf


def test_where_the_reference_is_no_number_nothing_agrees_with_it() -> None:
    program = load()
    for wrong in NO_NUMBERS:
        assert program.disagreement(a_run(), with_draws(wrong), {}) == np.inf


def test_what_is_no_number_stays_none_and_misses_the_floor() -> None:
    program = load()
    right, wrong = program.measure(a_run()), program.measure(with_draws(changed((..., 1), np.nan)))
    assert np.isnan(wrong["ess"])  # the least of three, of one of which nothing is known
    for ours, theirs in ([right, wrong, right], [right] * 3), ([right] * 3, [wrong, right, right]):
        row = program.result("gaussian", program.SMOKE, "peer", {"ours": ours, "peer": theirs}, 1.0, 0)
        assert np.isnan(row["ratio"]) and row["missed"]
    row = program.result("gaussian", program.SMOKE, "peer", {"ours": [right], "peer": [right]}, 1.0, 0)
    assert row["ratio"] == 1 and row["missed"]


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_run_whose_moments_are_checked_is_not_timed(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every side's first run is slow here."""
    import hmc_sides

    program = load()
    seeds: dict[str, list[int]] = {"ours": [], "right": [], "wrong": []}

    def side(name: str) -> Any:
        def run(seed: int) -> Any:
            seeds[name].append(seed)
            run = a_run(shift=3.0 if name == "wrong" else 0.0)
            return run._replace(warmup=100.0, sampling=100.0) if len(seeds[name]) == 1 else run

        return hmc_sides.Side(run, 1)

    monkeypatch.setattr(program, "sides", lambda *given: {name: side(name) for name in seeds})
    target = hmc_sides.Target(None, None, {"x": (np.zeros(3), np.ones(3))})
    monkeypatch.setattr(program, "TARGETS", {"gaussian": lambda: target})
    rows = program.compare("gaussian", program.SMOKE, SimpleNamespace(rounds=rounds, skip=[]))
    assert [row["side"] for row in rows] == ["ours", "right"]
    assert {row["rounds"] for row in rows} == {rounds}
    assert {(row["sampling_seconds_high"], row["warmup_seconds_high"]) for row in rows} == {(2.0, 1.0)}
    assert seeds["ours"] == seeds["right"] == list(range(1, rounds + 2)) and seeds["wrong"] == [1]


def test_figures_are_ess_over_seconds_and_ratios_ours_over_theirs() -> None:
    program = load()
    turn = program.measure(a_run())
    assert turn["ess_per_second"] == turn["ess"] / 2 and turn["total_ess_per_second"] == turn["ess"] / 3
    theirs = {**turn, "ess_per_second": turn["ess_per_second"] / 4}
    turns = {"ours": [turn], "peer": [theirs]}
    row = program.result("gaussian", program.SMOKE, "peer", turns, 1.0, 0)
    assert row["ratio"] == 4 and row["total_ratio"] == 1 and not row["missed"]
    assert program.result("gaussian", program.SMOKE, "peer", {**turns, "ours": [theirs]}, 1.0, 0)["missed"]


def test_the_densities_are_the_ones_described() -> None:
    from hmc_targets import TARGETS

    gaussian, schools, logistic = (TARGETS[name]() for name in ("gaussian", "schools", "logistic"))
    hessian = -np.asarray(jax.hessian(gaussian.log_density)(gaussian.start), float)
    values = np.linalg.eigvalsh(hessian)
    assert values[-1] / values[0] == pytest.approx(302, abs=2)
    assert schools.exact["mu"][0] == pytest.approx(4.40, abs=0.01)  # Stan's eight schools: 4.4
    assert logistic.start.shape == (25,) and np.isfinite(logistic.log_density(logistic.start))
    assert float(logistic.log_density(logistic.start)) == pytest.approx(1000 * np.log(0.5), rel=1e-4)


@pytest.mark.slow
def test_a_smoke_run_writes_rows_of_every_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("blackjax")
    program, file = load(), tmp_path / "hmc.json"
    words = ["hmc.py", "--smoke", "--cases", "schools", "--skip", "numpyro", "--json", str(file)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(program, "setup", lambda device: SimpleNamespace(platform="cpu"))
    assert program.main() == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["side"] for row in rows] == ["ours", "blackjax nuts", "blackjax hmc"]
    assert all(row["ess_per_second"] > 0 and row["standard_errors_off"] < 5 for row in rows)
    kept = 4 * rows[0]["chains"] * rows[0]["samples"] * 10  # draws of ten numbers
    assert all(kept < row["memory_bytes"] < 100 * kept for row in rows)

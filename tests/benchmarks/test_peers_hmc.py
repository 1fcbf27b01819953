"""benchmarks/peers/hmc.py: its densities, its checks before anything is timed, and a smoke run against the peers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def peers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))


def a_run(shift: float = 0.0, factor: float = 1.0) -> Any:
    import hmc_sides

    draws = np.random.default_rng(0).normal(size=(4, 500, 3)) * factor + shift
    return hmc_sides.Run(1.0, 2.0, {"x": draws}, 0)


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

"""benchmarks/photographs.py: its figures are those of its times, `before` is the same image, and it runs."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")


@pytest.fixture
def photographs(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    for each in (folder / "peers", folder):
        monkeypatch.syspath_prepend(str(each))
    import photographs

    return photographs


def test_images_a_second_and_cores_come_from_the_median_of_the_processor_time(photographs):
    row = photographs.summarise("x", [2.0, 4.0, 2.5], [8.0, 3.0, 5.0])
    assert (row["cpu_ms_low"], row["cpu_ms"], row["cpu_ms_high"], row["wall_ms"]) == (2.0, 2.5, 4.0, 5.0)
    assert row["images_per_cpu_s"] == pytest.approx(400)
    assert row["cores_for_a_card"] == pytest.approx(7800 / 400)


def test_what_a_turn_spends_is_shared_among_its_images(photographs, monkeypatch):
    clocks = {"perf_counter": 0.0, "process_time": 0.0}
    for name in clocks:
        monkeypatch.setattr(photographs.time, name, lambda name=name: clocks[name])

    def work(number, encoded):
        clocks["perf_counter"] += 0.009
        clocks["process_time"] += 0.003

    (row,) = photographs.take_turns({"way": work}, [b""] * 4, rounds=3)
    assert row["cpu_ms"] == pytest.approx(3) and row["wall_ms"] == pytest.approx(9)


def test_start_is_left_out_and_the_rest_shared_among_images(photographs, monkeypatch):
    def through(reader, kind, epochs):
        return np.array([5.0, 1.0, 7.0, 900.0]) + epochs * 8 * np.array([0.002, 0.0001, 0.004, 30])

    monkeypatch.setattr(photographs, "through_workers", through)
    row = photographs.in_processes([b""] * 8, rounds=2)
    assert row["cpu_ms"] == pytest.approx(2) and row["wall_ms"] == pytest.approx(4)
    assert row["page_faults"] == pytest.approx(30)


@pytest.mark.parametrize("name", ["noise on soft colours", "like photographs, quality 95"])
def test_both_phases_give_the_bytes_of_before_but_for_rounding(photographs, name):
    images = [photographs.SETS[name](seed) for seed in range(6)]
    assert 80e3 < np.mean([len(each) for each in images]) < 120e3
    for found in photographs.differences(images).values():
        assert found["largest"] <= 1 and found["share"] < 0.005


@pytest.mark.slow
def test_the_whole_of_it_runs_and_keeps_its_results(photographs, tmp_path, capsys):
    assert photographs.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    kept = json.loads((tmp_path / "out.json").read_text())
    ways = {(row.get("set"), row["way"]) for row in kept["results"]}
    assert {(name, "training") for name in photographs.SETS} <= ways
    assert (None, "hand-over, processes") in ways
    assert "images/s a core" in capsys.readouterr().out

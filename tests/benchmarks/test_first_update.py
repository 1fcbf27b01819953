"""benchmarks/first_update.py: the parts of a first update add up to it, from records new and old; one real command."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def first_update(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import first_update

    return first_update


def record(event, time, **figures):
    return {"event": event, "update": 0, "epoch": 0.0, "time": time, "elapsed": 0.0, **figures}


COMPILED = record("compile", 110.0, lower_seconds=1.0, compile_seconds=4.0)
LATER = record("compile", 130.0, lower_seconds=0.5, compile_seconds=3.0)
LOGS = [record("log", 114.0 + n, throughput=speed) for n, speed in enumerate((1.0, 30.0, 50.0, 31.0))]
FIRST = record(
    "first_update", 112.0, seconds=11.5, lower_seconds=1.0, compile_seconds=4.0, call_seconds=0.25,
    parts={"options": 0.25, "device": 2.0, "imports": 0.0, "data": 1.0, "weights": 0.5},
)  # fmt: skip


def test_the_parts_of_the_first_update_add_up_to_it(first_update):
    row = first_update.read_records([COMPILED, FIRST, *LOGS, LATER], began=100.0)
    assert row["first_update_seconds"] == 12.0 and row["first_log_seconds"] == 14.0
    assert set(row["parts"]) == set(first_update.PARTS)
    assert sum(row["parts"].values()) == pytest.approx(12.0)
    assert (row["parts"]["start"], row["parts"]["other"]) == (0.5, 2.5)
    assert (row["compilations"], row["all_compile_seconds"]) == (2, 8.5)
    assert row["samples_per_second"] == 31.0  # the first log is left out


def test_records_without_a_first_update_show_the_first_log(first_update, capsys):
    row = first_update.read_records([COMPILED, *LOGS], began=100.0)
    assert row["first_update_seconds"] is None and row["first_log_seconds"] == 14.0
    first_update.show({"case": "c", "source": "s", "cache": "full", "processor_seconds": 3.0, **row})
    assert " - " in capsys.readouterr().out


@pytest.mark.slow
def test_a_command_is_timed_on_an_empty_and_on_a_full_cache(first_update, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "HOTLOOP_NATIVE", "0")
    tiny = (
        "cnn train --model-name toy_model --dataset mnist --synthetic-data device --micro-batch-size 4 --num-epochs 2 "
        "{updates} --no-validation --results-dir {folder} --run-name run"
    )
    monkeypatch.setitem(first_update.CASES, "estimator", tiny)
    file = tmp_path / "found.json"
    assert not first_update.main(
        ["--cases", "estimator", "--device", "cpu", "--updates", "3", "--json", str(file)]
    )
    empty, full = json.loads(file.read_text())["results"]
    assert (empty["cache"], full["cache"]) == ("empty", "full")
    for row in (empty, full):
        assert row["compilations"] == 1 and 0 < row["first_update_seconds"] < row["command_seconds"]
        assert min(row["parts"].values()) > -0.05  # clocks of two kinds
    assert full["parts"]["compile"] < empty["parts"]["compile"]
    assert capsys.readouterr().out.count("\n") == 3

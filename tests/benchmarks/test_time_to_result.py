"""benchmarks/time_to_result.py: what records say of a result and its time, the commands that it runs, one whole run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hotloop.cli.main import find_command
from hotloop.cli.parser import resolve, scan
from hotloop.families.estimator.cifar.program import seconds_to


@pytest.fixture
def program(monkeypatch):
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    monkeypatch.syspath_prepend(str(benchmarks / "peers"))
    import time_to_result

    return time_to_result


def record(event, update=0, elapsed=0.0, **figures):
    return {"event": event, "update": update, "epoch": update / 10, "elapsed": elapsed, **figures}


RECORDS = [
    record("start"),
    record("compile", elapsed=4.0, lower_seconds=1.0, compile_seconds=2.5),
    record(
        "first_update", 1, elapsed=5.0, seconds=7.0
    ),  # the process began two seconds before it took its folder
    record("log", 10, elapsed=6.0, throughput=100.0),
    record("validation", 10, elapsed=6.5, accuracy=0.6, samples=10_000),
    record("compile", 10, elapsed=7.0, lower_seconds=0.0, compile_seconds=0.5),
    record("log", 20, elapsed=8.0, throughput=200.0),
    record("validation", 20, elapsed=8.5, accuracy=0.7, samples=10_000),
    record("log", 30, elapsed=9.0, throughput=400.0),
    record("validation", 30, elapsed=9.5, accuracy=0.69, samples=10_000),
    record("end", 30, elapsed=10.0, status="finished"),
]


def images(program, **more):
    case = program.Case("c", "CIFAR-10", "estimator", "images/s", "validation", "accuracy", tested=10_000)
    return replace(case, **more)


def test_seconds_are_those_that_the_runs_own_records_have(program):
    row = program.read_run(RECORDS, 50, images(program, target=0.65))
    assert (row["value"], row["update"], row["updates"]) == (0.69, 30, 30)
    assert (
        row["training_seconds"] == row["result_seconds"] == pytest.approx(5.0 + 2.5 + 1.25)
    )  # 500 images each
    assert (row["target_seconds"], row["target_epoch"]) == (pytest.approx(7.5), 2.0)
    assert (row["lower_seconds"], row["compile_seconds"]) == (1.0, 3.0)
    assert row["seconds"] == 12.0
    assert row["samples_per_second"] == 200.0
    assert row["curve"] == [[10, 0.6], [20, 0.7], [30, 0.69]]


def test_seconds_to_a_target_are_those_that_the_estimator_prints(program):
    for target in (0.6, 0.65, 0.7, 0.71):
        row = program.read_run(RECORDS, 50, images(program, target=target))
        assert row["target_seconds"] == seconds_to(target, RECORDS, 50)


def test_a_test_of_the_best_weights_has_the_seconds_up_to_their_update(program):
    tested = [
        record("evaluation", 15, split="validation", rmse=0.9, rmse_se=0.2),
        record("evaluation", 15, split="test", rmse=0.95, rmse_se=0.1),
    ]
    case = images(program, event="evaluation", figure="rmse", split="test", error="rmse_se", tested=None)
    row = program.read_run([*RECORDS[:-1], *tested, RECORDS[-1]], 50, case)
    assert (row["value"], row["standard_error"], row["target_seconds"]) == (0.95, 0.1, None)
    assert row["result_seconds"] == pytest.approx(5.0 + 1.25)  # half of the second log's updates
    assert row["training_seconds"] == pytest.approx(8.75)


def test_updates_that_no_log_has_are_refused(program):
    logs = [each for each in RECORDS if each["event"] == "log"]
    with pytest.raises(SystemExit, match="update 31 is in no log: the last is of update 30"):
        program.seconds_of_updates(logs, 50, 31)


def test_a_run_on_a_stand_in_or_on_a_part_of_the_data_is_refused(program):
    warning = record("warning", message="STAND-IN DATA: 20,000 procedural objects, not cifar10")
    with pytest.raises(SystemExit, match=r"STAND-IN DATA.*--data names the folder"):
        program.read_run([RECORDS[0], warning, *RECORDS[1:]], 50, images(program))
    harmless = record("warning", message="choosing the faster kernels")
    program.read_run([RECORDS[0], harmless, *RECORDS[1:]], 50, images(program))
    with pytest.raises(SystemExit, match="10,000 test images, not 20,000: a part of CIFAR-10"):
        program.read_run(RECORDS, 50, images(program, tested=20_000))
    program.read_run(RECORDS, 50, images(program, tested=20_000), in_part=True)


def test_a_stand_in_that_a_run_only_prints_is_refused(program, monkeypatch, tmp_path):
    def run(command, **_):
        folder = Path(command[command.index("--results-dir") + 1]) / "run"
        folder.mkdir()
        (folder / "events.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
        Path(command[command.index("--child") + 1]).write_text("1")
        for name in ("config", "environment"):
            (folder / f"{name}.json").write_text('{"batch_size": 50}')
        said = "warning: STAND-IN DATA: 60,000 + 10,000 procedural digits, not mnist"
        return subprocess.CompletedProcess(command, 0, "", said)

    monkeypatch.setattr(program.subprocess, "run", run)
    monkeypatch.setitem(program.CASES, "mnist", replace(program.CASES["mnist"], figure="accuracy"))
    with pytest.raises(SystemExit, match=r"mnist: STAND-IN DATA.*not mnist; --data names the folder"):
        program.main(["--cases", "mnist"])


def test_a_short_run_says_so_in_its_file_and_a_file_in_no_folder_is_refused_first(
    program, tmp_path, monkeypatch, capsys
):
    row = {"environment": {}, "load_before": 0.0}
    file = tmp_path / "result.json"
    words = ["--cases", "mnist", "mnist", "--smoke", "--data", str(tmp_path), "--save", str(file)]
    monkeypatch.setattr(sys, "argv", [program.__file__, *words])
    program.save([row], program.parsed(words))
    command = json.loads(file.read_text())["command"]
    assert command == "python benchmarks/time_to_result.py --cases mnist mnist --smoke --data DATA"
    with pytest.raises(SystemExit):
        program.main(["--save", str(tmp_path / "nowhere" / "result.json")])
    assert "its folder is not there" in capsys.readouterr().err


def config_of(words):
    command, _, rest = find_command(words.split())
    return resolve(command, scan(rest, command.options)).config


def test_every_case_is_a_command_line_and_its_short_form_is_shorter(program):
    long = {"cnn": "num_epochs", "vcd": "updates", "recommender": "epochs", "estimator": "epochs"}
    for case in program.CASES.values():
        family = case.words.split()[0]
        whole, short = (
            config_of(f"{words} --seed 7 --device cpu {case.place.format('/nowhere')}")
            for words in (case.words, f"{case.words} {case.smoke}")
        )
        assert whole.seed == short.seed == 7
        assert getattr(short, long[family]) < getattr(whole, long[family]), case.name


def test_every_family_that_trains_has_a_case_on_a_cpu_and_the_recommender_on_a_card(program):
    families = {
        device: [program.CASES[name].words.split()[0] for name in names]
        for device, names in program.USUAL.items()
    }
    assert set(families["cpu"]) == {"cnn", "vcd", "recommender", "estimator"}
    assert set(families["gpu"]) == {"recommender"}


def test_samples_of_an_update_are_found_by_each_familys_name(program):
    assert program.batch_of({"batch_size": 512}) == 512
    assert program.batch_of({"micro_batch_size": 128, "global_batch_size": None}) == 128
    assert program.batch_of({"micro_batch_size": 8, "global_batch_size": 64}) == 64


def test_the_first_seed_of_every_case_comes_before_the_second_of_any(program):
    cases = [images(program, name="a", seeds=(1, 2, 3)), images(program, name="b", seeds=(7,))]
    for smoke, wanted in ((False, [("a", 1), ("b", 7), ("a", 2), ("a", 3)]), (True, [("a", 1), ("b", 7)])):
        options = program.parsed(["--smoke"] if smoke else [])
        assert [(case.name, seed) for case, seed in program.turns(cases, options)] == wanted


@pytest.mark.slow
def test_a_real_command_is_run_to_its_end_for_each_seed(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "HOTLOOP_NATIVE", "0")
    words = "recommender train --data procedural --epochs 6 --batch-size 64 --size 128"
    monkeypatch.setitem(
        program.CASES,
        "ratings",
        replace(program.CASES["ratings"], data="drawn ratings", words=words, seeds=(3, 3)),
    )
    file = tmp_path / "2026-01-01_results_cpu.json"
    assert not program.main(["--cases", "ratings", "--save", str(file)])
    document = json.loads(file.read_text())
    first, second = document["results"]
    assert (first["cache"], second["cache"]) == ("empty", "full")
    assert first["command"] == f"hotloop {words} --seed 3"
    assert second["compile_seconds"] < first["compile_seconds"]
    assert second["value"] == first["value"]  # of the same seed
    for row in (first, second):
        assert 0 < row["result_seconds"] <= row["training_seconds"] < row["seconds"]
        assert 0.5 < row["value"] < 2 and row["updates"] > 60
        assert 2**26 < row["memory_bytes"] < 2**34
    assert document["environment"]["platform"] == "cpu" and document["load_before"] >= 0
    assert capsys.readouterr().out.count("\nratings ") == 2

    import speed_whole

    (whole,) = speed_whole.whole_runs(tmp_path)
    assert whole.what == f"drawn ratings by `hotloop {words}`" and whole.result.startswith("RMSE ")


@pytest.mark.slow
def test_a_command_that_fails_ends_the_program_with_what_it_said(program, tmp_path, monkeypatch):
    broken = replace(program.CASES["ratings"], words="recommender train --data procedural --epochs 0")
    monkeypatch.setitem(program.CASES, "ratings", broken)
    with pytest.raises(SystemExit, match=r"--epochs 0 --seed 0: status 2(.|\n)*--epochs"):
        program.main(["--cases", "ratings"])

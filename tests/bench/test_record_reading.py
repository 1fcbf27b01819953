import json
from pathlib import Path

import pytest

from bench_logs import log_folder, record, repeats
from hotloop.bench import compare
from hotloop.bench.record import (
    collect_samples,
    commit_name,
    device_name,
    read_lines,
    read_printed_result,
    read_records,
)
from hotloop.errors import DataError


def test_samples_hold_one_value_a_repeat_of_passed_runs_alone(tmp_path):
    runs = [*repeats("a", [10, 11]), record("a", 99, 2, status="failed"), record("a", float("nan"), 3)]
    found = collect_samples(read_records([log_folder(tmp_path, runs)]))
    assert found["a", "throughput"].values == (10, 11)
    assert found["a", "throughput"].unit == "samples/sec"
    assert [key[1] for key in found] == ["throughput", "latency"]


def test_every_record_knows_its_machine_and_folder(tmp_path):
    (found,) = read_records([log_folder(tmp_path, repeats("a", [1])) / "results.jsonl"])
    assert device_name(found) == "a <fast> device"
    assert commit_name(found) == "0123456+"
    assert found["folder"] == str(tmp_path)


def test_a_folder_without_provenance_is_read_all_the_same(tmp_path):
    log_folder(tmp_path, repeats("a", [1]))
    (tmp_path / "provenance.json").unlink()
    (found,) = read_records([tmp_path])
    assert (device_name(found), commit_name(found)) == ("unknown", "")


def test_a_line_that_a_killed_runner_cut_off_is_left_out(tmp_path):
    log_folder(tmp_path, repeats("a", [1, 2]))
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text()[:-30])
    assert len(read_records([tmp_path])) == 1


def test_damage_elsewhere_is_told_with_its_line(tmp_path):
    log_folder(tmp_path, repeats("a", [1]))
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text() + "garbage\n" + file.read_text())
    with pytest.raises(DataError, match=r"results\.jsonl:2: "):
        read_records([tmp_path])


@pytest.mark.parametrize("text", ["[1]\n", '{"a": 1}\n', "x"])
def test_a_file_of_something_else_is_told(tmp_path, text):
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(DataError, match="no record of a run"):
        read_records([tmp_path])


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_records([tmp_path / "none"])


def test_a_run_repeated_after_a_resume_counts_once(tmp_path):
    runs = [record("a", 1, 0, status="timeout"), record("a", 2, 1), record("a", 3, 0)]
    found = read_records([log_folder(tmp_path, runs)])
    assert [each["metrics"]["throughput"]["value"] for each in found] == [2, 3]


def test_the_json_result_is_the_last_line_of_the_programs_output(tmp_path):
    (found,) = read_records([log_folder(tmp_path, repeats("a", [1]))])
    assert read_printed_result(found) is None
    (tmp_path / "a").mkdir()
    (tmp_path / "a/stdout").write_text("text\n" + json.dumps({"tflops": 2}) + "\n")
    assert read_printed_result(found) == {"tflops": 2}
    (tmp_path / "a/stdout").write_text("text\n")
    assert read_printed_result(found) is None


def test_a_processor_of_other_cores_is_another_device():
    machine = {
        "device": {"kind": "cpu", "name": "P"},
        "cpu": {"usable_cores": 2},
        "hotloop": {"commit": "abcdefgh"},
    }
    assert device_name({"machine": machine}) == "P, 2 cores"
    assert commit_name({"machine": machine}) == "abcdefg"


@pytest.mark.parametrize(
    ("kind", "platforms", "elsewhere"),
    [
        ("cpu", None, False),
        ("gpu", None, True),
        ("gpu", "cpu", False),
        ("cpu", "tpu", True),
        ("gpu", "cuda,cpu", True),
        (None, None, False),
    ],
)
def test_a_record_knows_whether_its_programs_computed_on_an_accelerator(kind, platforms, elsewhere):
    environment = {"JAX_PLATFORMS": platforms} if platforms else {}
    machine = {"device": {"kind": kind}, "environment": environment}
    found = collect_samples([record("a", 1) | {"machine": machine}])
    assert found["a", "throughput"].accelerated == elsewhere


def test_the_pace_beside_a_run_is_that_of_all_its_readings_as_if_they_were_one(tmp_path):
    runs = [record("a", 1, 1, paces=[4.0, 4.0, 1.0]), record("a", 1, 2, paces=[3.0]), record("a", 1, 3)]
    found = collect_samples(read_records([log_folder(tmp_path, runs)]))["a", "throughput"]
    assert (found.paces, found.best_paces) == ((2.0, 3.0), False)
    found = collect_samples(read_records([log_folder(tmp_path, [record("a", 1, 2, pace=4.0)])]))[
        "a", "throughput"
    ]
    assert (found.paces, found.best_paces) == ((4.0,), True)


@pytest.mark.parametrize("read", [read_lines, compare.load_baselines])
def test_a_file_that_never_ends_is_one_line(read):
    with pytest.raises(DataError, match=r"/dev/zero.*more than [\d,]+ bytes"):
        read(Path("/dev/zero"))

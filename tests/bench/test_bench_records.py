"""What a log folder holds decides what runs, what counts and what is told: skips, names, other people's files."""

import json

import pytest
from fake_programs import RATE, Listener, code, run_spec, write_spec

from bench_logs import log_folder, record, repeats
from hotloop.bench import result_files
from hotloop.bench.benchmark import LONGEST_NAME, folder_name, name_variants, select
from hotloop.bench.launch import RunnerOptions
from hotloop.bench.record import Results, collect_samples, read_records
from hotloop.bench.report import gather_sources
from hotloop.bench.runner import run
from hotloop.bench.spec import SpecError, load_benchmarks
from hotloop.errors import DataError, OptionError, RunError

GOOD, BAD = code("print('rate 10')"), code("raise SystemExit(1)")


def test_what_was_skipped_before_runs_when_it_is_wanted_and_then_counts(tmp_path):
    entries = {"train_conv": {"cmd": GOOD, "data": RATE}, "other": GOOD}
    run_spec(tmp_path, entries)
    run_spec(tmp_path, entries, resume=True)
    lines = (tmp_path / "log" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["skipped", "passed"]
    status, records, listener = run_spec(tmp_path, entries, include_convergence=True, resume=True)
    assert (status, records["train_conv", 1]["status"]) == (0, "passed")
    assert {row["variant"]: row["status"] for row in listener.rows} == {
        "train_conv": "PASSED",
        "other": "PASSED",
    }
    shown = json.loads((tmp_path / "log" / "benchmark_results.json").read_text())
    assert [one["status"] for one in shown["train_conv"]] == ["passed"]


def test_the_table_at_the_end_and_what_compares_take_the_same_runs():
    runs = [record("a", value, place) for place, value in enumerate((10, 20, 60), 1)]
    runs[0] |= {
        "status": "failed",
        "exitcode": 0,
        "problems": {"loss": "not found"},
        "reason": "loss: not found",
    }
    del runs[0]["metrics"]["latency"]
    (row,) = result_files.table_rows(runs)
    assert collect_samples(runs)["a", "throughput"].values == (10, 20, 60)
    assert "throughput 20 samples/sec (10 to 60)" in row[-1]
    assert "latency 33.3333 ms" in row[-1]
    assert row[1:3] == ("FAILED", "2/3")


def test_in_the_table_what_ran_wins_over_a_skip():
    (row,) = result_files.table_rows([record("a", 1, 1, status="skipped", reason="why"), record("a", 2, 1)])
    assert row[1:3] == ("PASSED", "1/1")
    (row,) = result_files.table_rows(
        [record("a", 1, 1, status="skipped", reason="why", metrics={}, seconds=None)]
    )
    assert row[1:3] == ("SKIPPED", "-")


def test_a_missing_metric_costs_no_other_metric_of_that_run(tmp_path):
    half = {"status": "failed", "exitcode": 0, "problems": {"loss": "nothing matched"}}
    runs = [*repeats("a", [10, 11]), record("a", 12, 2, **half)]
    runs += [record("a", 99, 3, status="failed", exitcode=1), record("a", 99, 4, status="timeout")]
    runs += [record("a", 99, 5, status="failed", exitcode=0)]
    assert collect_samples(read_records([log_folder(tmp_path, runs)]))["a", "throughput"].values == (
        10,
        11,
        12,
    )


def test_names_are_cut_by_bytes_and_never_within_a_letter():
    (name,) = name_variants("ä" * 400, [{}])
    assert name == "ä" * (LONGEST_NAME // 2)
    assert len(folder_name("a" + "€" * 400).encode()) <= LONGEST_NAME


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "results.jsonl", "Provenance.json", "environments"]
    + [f"benchmark_results.{ending}" for ending in ("csv", "json", "xml")],
)
def test_no_name_takes_the_place_of_the_log_folders_own_files(name):
    assert folder_name(name) == f"{name}_"


def test_ordinary_names_stay_and_none_leaves_the_folder():
    assert folder_name("rnn.v2_n=3,+-x") == "rnn.v2_n=3,+-x"
    assert "/" not in folder_name("../../f") and "\0" not in folder_name("a\0b")


def test_odd_names_run_and_their_logs_stay_inside(tmp_path):
    home = tmp_path / "deep" / "home"
    home.mkdir(parents=True)
    before = {"cmd": GOOD, "data": RATE, "pre_run_commands": [code("pass")]}
    names = ["../../f", "..", "results.jsonl", "benchmark_results.csv", "ß" * 300]
    status, records, _ = run_spec(home, {names[0]: before, **dict.fromkeys(names[1:], GOOD)}, install=True)
    assert (status, len(records)) == (0, 5)
    assert {path.name for path in tmp_path.iterdir()} == {"deep"}
    assert {path.name for path in home.iterdir()} == {"log", "benchmarks.yml"}


@pytest.mark.parametrize("text", ['"a\\0b": {cmd: x}', '"a\\ud800": {cmd: x}', 'a: {cmd: "x \\udc00"}'])
def test_characters_that_no_file_and_no_program_takes_are_refused_with_their_line(tmp_path, text):
    file = tmp_path / "b.yml"
    file.write_text(f"good: {{cmd: x}}\n{text}\n")
    with pytest.raises(SpecError, match=r"b\.yml:2: .*character"):
        load_benchmarks([file])


WRONG = [{"metrics": [1]}, {"metrics": {"x": 1}}, {"metrics": {"x": {"value": "1"}}}, {"variant": ["b"]}]
WRONG += [{"start": 1e300}, {"start": float("nan")}, {"params": [1]}, {"log": {"stdout": 1}}, {"repeat": [1]}]
WRONG += [{"metrics": {"x": {"value": 10**400}}}, {"spec": 1}, {"status": None}, {"benchmark": 1}]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_record_with_a_part_of_another_kind_is_told_with_its_line(tmp_path, wrong, end):
    log_folder(tmp_path, repeats("a", [1]))
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text() + json.dumps(record("b", 1) | wrong) + end)
    with pytest.raises(DataError, match=r"results\.jsonl:2: no record of a run, .*'\w+'"):
        read_records([tmp_path])


CEILINGS = {"matmul_tflops": {"float32": 1.0}, "copy_gbps": 1.0, "device": "d"}


@pytest.mark.parametrize(
    "wrong", [{"device": {}}, {"matmul_tflops": 1}, {"copy_gbps": "x"}, {"copy_gbps": 0}]
)
def test_limits_of_another_shape_are_told_with_their_file(tmp_path, wrong):
    (tmp_path / "a.json").write_text(json.dumps(CEILINGS))
    assert list(gather_sources([tmp_path]).ceilings) == ["d"]
    (tmp_path / "a.json").write_text(json.dumps(CEILINGS | wrong))
    with pytest.raises(DataError, match=r"a\.json: "):
        gather_sources([tmp_path])


def go_on(folder, log, entries):
    folder.mkdir(exist_ok=True)
    selected = select(load_benchmarks([write_spec(folder, entries)]))
    return run(selected, RunnerOptions(log_dir=log, resume=True), Listener())


def test_the_status_is_that_of_what_was_chosen_now(tmp_path):
    log = tmp_path / "log"
    assert go_on(tmp_path / "1", log, {"old": BAD}) == 1
    assert go_on(tmp_path / "2", log, {"new": GOOD}) == 0
    assert go_on(tmp_path / "1", log, {"old": BAD}) == 1


def test_a_name_that_another_file_has_too_is_refused_and_both_are_named(tmp_path):
    go_on(tmp_path / "1", tmp_path / "log", {"a": GOOD})
    with pytest.raises(OptionError, match=r"'a' of .*/1/benchmarks\.yml, not of .*/2/benchmarks\.yml"):
        go_on(tmp_path / "2", tmp_path / "log", {"a": BAD})


def test_a_file_without_benchmarks_and_an_empty_name_are_told_as_what_they_are(tmp_path):
    with pytest.raises(OptionError, match="hold no benchmark"):
        select({})
    with pytest.raises(OptionError, match="--benchmark ''"):
        select(load_benchmarks([write_spec(tmp_path, {"a": GOOD})]), [""])


def test_a_disk_that_is_full_stops_the_run_in_one_line(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "append", lambda self, made: (_ for _ in ()).throw(RunError("disk is full")))
    monkeypatch.setattr(result_files, "write_csv", full)
    with pytest.raises(RunError, match="disk is full"):
        run_spec(tmp_path, {"a": GOOD})
    monkeypatch.undo()
    monkeypatch.setattr(result_files, "write_csv", full)
    with pytest.raises(RunError, match="log: cannot be used: No space left"):
        run_spec(tmp_path, {"a": GOOD}, resume=True)

"""The runner: what one variant does never touches the others, and every way to fail is told apart."""

import csv
import json
import os
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_programs import RATE, Listener, code, is_running, run_spec, wait_until, write_spec

from hotloop.bench.benchmark import select
from hotloop.bench.launch import Launch, RunnerOptions
from hotloop.bench.measure import measure
from hotloop.bench.record import Results
from hotloop.bench.runner import run
from hotloop.bench.spec import load_benchmarks
from hotloop.errors import OptionError, RunError

pytestmark = pytest.mark.usefixtures("signals_heard")

SHORT = {"timeout": 0.7, "grace": 0.2}
GOOD = code("print('rate 10')")


def only(records):
    (record,) = records.values()
    return record


def test_a_program_that_prints_its_number_passes_and_its_record_says_everything(tmp_path):
    entry = {"cmd": code("print('rate {n}')"), "parameters": {"n": [3]}, "data": RATE, "env": {"A": "b"}}
    entry["output"] = [["samples/sec", "throughput"]]
    status, records, listener = run_spec(tmp_path, {"good": entry})
    record = records["good_n_3", 1]
    assert status == 0
    assert record["metrics"]["throughput"] == {
        "value": 3.0,
        "reduction": "mean",
        "unit": "samples/sec",
        "values": [3.0],
    }
    assert (record["status"], record["reason"], record["exitcode"], record["problems"]) == (
        "passed",
        None,
        0,
        {},
    )
    assert (record["params"], record["env"], record["benchmark"]) == ({"n": "3"}, {"A": "b"}, "good")
    assert (tmp_path / "log" / record["log"]["stdout"]).read_text() == "rate 3\n"
    assert len(record["spec"]["sha256"]) == 64
    assert record["provenance"] in json.loads((tmp_path / "log" / "provenance.json").read_text())
    assert record["end"] >= record["start"]
    assert json.loads((tmp_path / "log" / "good_n_3" / "variant_result.json").read_text()) == record
    assert listener.rows[0]["metrics"] == "throughput 3 samples/sec"


FAILURES = {
    "crash": (code("import sys; print('rate 1'); sys.exit('the end')"), "failed", "ended with status 1"),
    "killed": (code("import os; os.kill(os.getpid(), 9)"), "failed", "killed by SIGKILL"),
    "hang": (
        code("import time; print('rate 1', flush=True); time.sleep(60)"),
        "timeout",
        "still running after 0.7",
    ),
    "nan": (code("print('rate nan')"), "failed", "throughput: "),
    "word": (code("print('rate high')"), "failed", "throughput: the regexp"),
    "garbage": (
        code("import os; os.write(1, bytes(range(256)) * 100)"),
        "failed",
        "throughput: nothing matched",
    ),
    "nothing": (code("pass"), "failed", "throughput: nothing matched"),
    "no_program": ("no-such-program --rate 1", "failed", "there is no program 'no-such-program'"),
    "pipe": ("cat x | grep rate", "failed", "needs a shell"),
    "variable": ("echo rate $NO_SUCH_VARIABLE", "failed", "NO_SUCH_VARIABLE"),
    "quote": ("echo 'rate", "failed", "cannot be split"),
}


def test_every_failure_has_its_status_and_reason_and_the_rest_goes_on(tmp_path):
    entries = {name: cmd for name, (cmd, _, _) in FAILURES.items()}
    status, records, listener = run_spec(tmp_path, {**entries, "last": GOOD}, **SHORT)
    assert status == 1
    for name, (_, wanted, reason) in FAILURES.items():
        record = records[name, 1]
        assert record["status"] == wanted, name
        assert reason in record["reason"], name
        assert record["metrics"] == {}, name
    assert records["last", 1]["status"] == "passed"
    assert "    | the end" in listener.said
    assert {row["variant"]: row["status"] for row in listener.rows}["hang"] == "TIMEOUT"


def test_bytes_that_are_no_text_do_not_hide_the_number_beside_them(tmp_path):
    cmd = code("import os; os.write(1, bytes([255, 0, 10]) + b'rate 4' + bytes([10, 254]))")
    assert only(run_spec(tmp_path, {"noisy": cmd})[1])["metrics"]["throughput"]["value"] == 4.0


def test_one_missing_metric_fails_the_run_by_name_and_the_others_are_kept(tmp_path):
    data = {**RATE, "loss": {"regexp": r"loss (\S+)"}}
    status, records, _ = run_spec(tmp_path, {"half": {"cmd": GOOD, "data": data}})
    record = only(records)
    assert status == 1
    assert list(record["problems"]) == ["loss"]
    assert record["reason"].startswith("loss: nothing matched")
    assert record["metrics"]["throughput"]["value"] == 10.0


def test_the_shorter_of_the_two_timeouts_counts(tmp_path):
    slow = {"cmd": code("import time; time.sleep(60)"), "data": RATE, "timeout": 0.3}
    record = only(run_spec(tmp_path, {"slow": slow}, timeout=30, grace=0.2)[1])
    assert record["reason"] == "still running after 0.3 seconds"


def test_repeats_run_in_turn_when_interleaved_and_warm_ups_leave_no_record(tmp_path):
    note = tmp_path / "note"
    entry = {
        "cmd": code(f"print('rate 1'); open('{note}', 'a').write('{{n}}')"),
        "parameters": {"n": "1,2"},
        "data": RATE,
    }
    _, records, _ = run_spec(tmp_path, {"b": entry}, repeats=2, warm_up=1, interleave=True)
    assert note.read_text() == "121212"
    assert list(records) == [("b_n_1", 1), ("b_n_2", 1), ("b_n_1", 2), ("b_n_2", 2)]
    assert (tmp_path / "log" / "b_n_2" / "repeat-2" / "stdout").exists()
    assert (tmp_path / "log" / "b_n_2" / "warm-up-1" / "stdout").exists()


def test_repeats_of_a_variant_follow_each_other_otherwise(tmp_path):
    _, records, _ = run_spec(tmp_path, {"a": GOOD, "b": GOOD}, repeats=2)
    assert list(records) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_fail_fast_stops_at_the_first_failure_and_still_writes_everything(tmp_path):
    status, records, listener = run_spec(
        tmp_path, {"a": GOOD, "bad": code("raise SystemExit(4)"), "b": GOOD}, fail_fast=True
    )
    assert (status, list(records)) == (1, [("a", 1), ("bad", 1)])
    assert "with 1 run to go" in listener.warned[-1]
    assert len(ElementTree.parse(tmp_path / "log" / "benchmark_results.xml").findall(".//testcase")) == 2


def test_a_warm_up_that_fails_is_a_failure(tmp_path):
    status, records, _ = run_spec(
        tmp_path, {"a": code("raise SystemExit(4)")}, warm_up=1, fail_fast=True, repeats=2
    )
    assert (status, records) == (1, {})


def test_convergence_runs_are_skipped_with_the_reason_unless_asked_for(tmp_path):
    entries = {"train_conv": GOOD, "other": GOOD}
    status, records, _ = run_spec(tmp_path, entries)
    assert status == 0
    assert records["train_conv", 1]["status"] == "skipped"
    assert "--include-convergence" in records["train_conv", 1]["reason"]
    (tmp_path / "again").mkdir()
    assert only(run_spec(tmp_path / "again", entries, patterns=["train_conv"])[1])["status"] == "passed"


def test_resume_runs_only_what_has_no_result_and_extends_repeats(tmp_path):
    note = tmp_path / "note"
    entries = {
        "a": code(f"print('rate 1'); open('{note}', 'a').write('a')"),
        "b": code(f"open('{note}', 'a').write('b'); raise SystemExit(1)"),
    }
    assert run_spec(tmp_path, entries)[0] == 1
    status, records, _ = run_spec(tmp_path, entries, repeats=2, resume=True)
    assert status == 1
    assert sorted(records) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert note.read_text() == "abab"


def test_resume_refuses_a_file_that_has_changed_since(tmp_path):
    run_spec(tmp_path, {"a": GOOD})
    with pytest.raises(OptionError, match="has changed since"):
        run_spec(tmp_path, {"a": GOOD + " "}, resume=True)


def test_a_folder_with_results_is_not_mixed_with_new_ones_unasked(tmp_path):
    run_spec(tmp_path, {"a": GOOD})
    with pytest.raises(OptionError, match="--resume"):
        run_spec(tmp_path, {"a": GOOD})


def test_two_runners_never_share_a_folder(tmp_path):
    (tmp_path / "log").mkdir()
    held = Results(tmp_path / "log")
    with pytest.raises(RunError, match="another runner"):
        run_spec(tmp_path, {"a": GOOD}, resume=True)
    held.close()


def test_programs_see_the_log_folder_and_the_interpreter_in_use(tmp_path):
    show = tmp_path / "show.py"
    show.write_text(
        "import os, sys, shutil; print('rate 1'); print(os.environ['HOTLOOP_BENCH_LOG']); "
        "print(sys.executable); print(shutil.which('python3'))"
    )
    run_spec(tmp_path, {"a": f"python {show}"})
    _, log, python, found = (tmp_path / "log" / "a" / "stdout").read_text().splitlines()
    assert log == str(tmp_path / "log" / "a")
    assert python == sys.executable
    assert Path(found).parent == Path(sys.executable).parent


def test_compile_only_adds_the_word_and_wants_no_metrics(tmp_path):
    cmd = code("import sys; sys.exit(sys.argv[-1] != '--compile-only')")
    _, records, _ = run_spec(tmp_path, {"a": cmd}, compile_only=True)
    assert (only(records)["status"], only(records)["metrics"]) == ("passed", {})


def test_what_must_be_installed_is_left_alone_without_the_option_and_said_once(tmp_path):
    entry = {"cmd": GOOD, "data": RATE, "requirements_file": "r.txt", "pre_run_commands": ["make"]}
    status, _, listener = run_spec(tmp_path, {"a": entry}, repeats=2)
    assert status == 0
    assert sorted(listener.warned) == [
        "a: pre_run_commands is left alone; --install sees to it",
        "a: requirements_file is left alone; --install sees to it",
    ]


def test_commands_before_run_once_with_the_option_and_their_failure_is_the_benchmarks(tmp_path):
    before = [code("open('made', 'a').write('x')")]
    entries = {
        "a": {"cmd": code("print('rate', open('made').read().count('x'))"), "data": RATE},
        "b": {"cmd": GOOD, "data": RATE, "pre_run_commands": [code("raise SystemExit('no compiler')")]},
    }
    entries["a"]["pre_run_commands"] = before
    _, records, _ = run_spec(tmp_path, entries, install=True, repeats=2)
    assert records["a", 2]["metrics"]["throughput"]["value"] == 1.0
    assert records["b", 2]["status"] == "failed"
    assert "pre_run_commands" in records["b", 1]["reason"]
    assert "no compiler" in records["b", 1]["reason"]


def test_numbers_from_a_file_of_bounded_size_are_those_at_its_ends(tmp_path):
    cmd = code("for i in range(20000): print('rate', i)")
    entry = {"cmd": cmd, "data": {"throughput": {"regexp": r"rate (\d+)", "reduction_type": "max"}}}
    _, records, listener = run_spec(tmp_path, {"a": entry}, max_log_bytes=5000)
    record = only(records)
    assert record["metrics"]["throughput"]["value"] == 19999
    assert record["left_out_bytes"] > 100_000
    assert f"{record['left_out_bytes']} bytes" in listener.warned[-1]
    assert len(record["metrics"]["throughput"]["values"]) < 1000


def test_a_record_keeps_at_most_a_thousand_values(tmp_path):
    record = only(run_spec(tmp_path, {"a": code("for i in range(5000): print('rate', i)")})[1])
    assert record["metrics"]["throughput"]["value"] == 2499.5
    assert record["metrics"]["throughput"]["values"] == list(range(1000))


def test_the_runner_costs_less_than_50_ms_a_variant(tmp_path, monkeypatch):
    from hotloop.bench.runner import Runner

    times = []
    perform = Runner.perform

    def timed(self, *run):
        begin = time.perf_counter()
        record = perform(self, *run)
        times.append(time.perf_counter() - begin)
        return record

    monkeypatch.setattr(Runner, "perform", timed)
    monkeypatch.setattr("hotloop.bench.measure.read_paces", lambda: [1.0])  # they take a time of their own
    status, _, _ = run_spec(tmp_path, {"a": {"cmd": "echo rate 1", "data": RATE}}, repeats=20)
    assert status == 0
    assert sorted(times)[10] < 0.05


def test_csv_json_and_junit_have_the_old_shape(tmp_path):
    entries = {"a": GOOD, "bad": code("raise SystemExit('<oh> no')"), "late_conv": GOOD}
    run_spec(tmp_path, entries, additional_metrics=True, csv_metrics=("loss", "extra", "throughput"))
    log = tmp_path / "log"
    assert all(cell.startswith('"') for cell in (log / "benchmark_results.csv").read_text().splitlines())
    rows = list(csv.reader((log / "benchmark_results.csv").read_text().splitlines()))
    assert rows[0] == [
        *("benchmark name", "Variant name", "throughput", "latency", "total_compiling_time"),
        *("test_duration", "loss", "result", "cmd", "env", "git_commit_hash", "extra"),
    ]
    by_name = {row[0]: row for row in rows}
    assert by_name["a"][:5] == ["a", "a", "10.0", "", ""]
    old = json.loads((log / "benchmark_results.json").read_text())
    assert old["a"][0]["results"] == {"throughput": {"mean": 10.0}}
    assert old["a"][0]["variant_name"] == "a"
    assert old["bad"][0]["exitcode"] == 1


@pytest.mark.parametrize(("ours", "rate"), [(None, 20.0), ("hotloop cnn train", 5.0)])
def test_copies_multiply_the_throughput_only_where_they_run(tmp_path, ours, rate):
    cmd = "mpirun --np 4 python3 train.py"
    file = write_spec(tmp_path, {"a": {"cmd": cmd, "data": RATE}})
    launch = Launch(("echo", "rate 5"), tmp_path, os.environ, cmd, ours)
    found = measure(select(load_benchmarks([file]))[0], launch, tmp_path, RunnerOptions(tmp_path))
    assert found["metrics"]["throughput"]["value"] == rate


@pytest.mark.slow
def test_requirements_go_to_an_environment_of_their_own(tmp_path):
    import zipfile

    wheel = tmp_path / "tiny_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny_thing.py", "RATE = 12\n")
        file.writestr(
            "tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n"
        )
        file.writestr(
            "tiny_thing-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    (tmp_path / "requirements.txt").write_text(f"--no-index\n{wheel}\n")
    cmd = "python -c \"import hotloop, numpy, tiny_thing; print('rate', tiny_thing.RATE)\""
    entry = {"cmd": cmd, "data": RATE, "requirements_file": "requirements.txt"}
    status, records, _ = run_spec(tmp_path, {"a": entry}, install=True)
    assert (status, only(records)["reason"]) == (0, None)
    with pytest.raises(ImportError):
        import tiny_thing  # noqa: F401


def test_ending_the_runner_politely_is_ctrl_c(tmp_path):
    import signal

    file = write_spec(
        tmp_path, {"a": code("import os, time; print(os.getpid(), flush=True); time.sleep(60)")}
    )
    listener, stdout = Listener(), tmp_path / "log" / "a" / "stdout"
    before = signal.getsignal(signal.SIGTERM)

    def terminate(seconds):
        if stdout.exists() and stdout.read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotloop.bench.measure._sign_of_life", lambda name, seconds: terminate(seconds))
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            run(
                select(load_benchmarks([file])),
                RunnerOptions(tmp_path / "log", progress_trace_period=0.05),
                listener,
            )
    wait_until(lambda: not is_running(int(stdout.read_text())))
    assert signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / "log" / "benchmark_results.json").read_text() == "{}\n"


def test_the_machines_pace_is_read_several_times_beside_every_run(tmp_path):
    _, records, _ = run_spec(tmp_path, {"a": code("print('rate 1')")}, repeats=2)
    for record in records.values():
        assert len(record["paces"]) >= 10
        assert min(record["paces"]) > 0

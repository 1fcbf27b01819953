"""`hotloop bench run` from the command line: what it prints, its statuses, and a runner that is killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hotloop.cli.main import main
from pictures import image_folder

pytestmark = pytest.mark.usefixtures("signals_heard")

FIXTURES = sorted((Path(__file__).parent.parent / "bench" / "fixtures").glob("*.yml"))
RATE = {"throughput": {"regexp": r"rate (\S+)"}}


def code(text):
    return f'python3 -S -c "{text}"'


def spec(folder, **entries):
    file = folder / "benchmarks.yml"
    entries = {
        name: {"cmd": one, "data": RATE} if isinstance(one, str) else one for name, one in entries.items()
    }
    file.write_text(yaml.safe_dump(entries, sort_keys=False))
    return str(file)


def bench(*words):
    """The status of a run, whichever way it ends."""
    try:
        return main(["bench", "run", *map(str, words)])
    except SystemExit as error:
        return error.code


def test_a_run_prints_its_variants_and_the_folder_and_leaves_with_0(tmp_path, capsys):
    file = spec(tmp_path, a={"cmd": code("print('rate {n}')"), "data": RATE, "parameters": {"n": "1,2"}})
    assert bench("--spec", file, "--log-dir", tmp_path / "log") == 0
    out, err = capsys.readouterr()
    assert "a_n_2    PASSED  1/1" in out
    assert out.endswith(f"results and logs: {tmp_path / 'log'}\n")
    assert err == ""


def test_a_failure_is_status_1_and_json_still_has_every_result(tmp_path, capsys):
    file = spec(tmp_path, bad=code("raise SystemExit('oh dear')"), good=code("print('rate 5')"))
    assert bench("--spec", file, "--log-dir", tmp_path / "log", "--json") == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["passed"], result["failed"], result["timeout"], result["skipped"]) == (1, 1, 0, 0)
    assert result["results"][1]["metrics"] == {"throughput": 5.0}
    assert "| oh dear" in err


def test_without_a_folder_one_is_made_where_the_command_was_called(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec(tmp_path, a=code("print('rate 1')"))
    assert bench() == 0
    assert [path.name[:6] for path in tmp_path.glob("log_*")] == ["log_20"]


def test_every_mistake_of_a_file_is_told_with_its_line_and_nothing_runs(tmp_path, capsys):
    (tmp_path / "b.yml").write_text("a:\n  cmd: x\n  dta: {}\nb:\n  cmd: x\n  timeout: soon\n")
    assert bench("--spec", tmp_path / "b.yml", "--validate") == 2
    lines = capsys.readouterr().err.splitlines()
    assert "b.yml:3: " in lines[0]
    assert "b.yml:6: " in lines[1]
    assert "2 mistakes" in lines[2]


def test_options_of_the_older_runner_without_effect_are_named_once(tmp_path, capsys):
    file = spec(tmp_path, a=code("print('rate 1')"))
    words = ["--no-code-sync", "--remove-dirs-after", "--requirements-file", "r.txt", "--stop-on-error"]
    assert bench("--spec", file, "--log-dir", tmp_path / "log", "--gc-monitor", *words) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "without effect" in line]
    assert warned == ["warning: without effect: --requirements-file, --no-code-sync, --remove-dirs-after"]


def test_the_files_of_the_older_runner_load_and_show_what_would_run(capsys, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/data")
    assert len(FIXTURES) >= 3
    assert bench("--spec", *FIXTURES, "--dry-run", "--json") == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    skipped = {one["variant"] for one in variants if one["skip"]}
    assert {one["variant"] for one in variants} - skipped >= {
        "tf1_autoencoder_train_gen_2ipu",
        "tf1_mcmc_vae_synth_pod4",
        "tf2_resnet50_train_real_pod4",
        "tf2_resnet50_train_real_pod16",
        "tf2_resnet50_serving_throughput_batchsize_1",
        "tf2_resnet50_serving_throughput_batchsize_32",
        "tf2_resnet50_serving_latency",
    }
    assert skipped == {"tf2_resnet50_train_real_pod16_conv"}
    assert "--dataset-path /data/imagenet-data" in next(
        one["command"] for one in variants if one["variant"] == "tf2_resnet50_train_real_pod4"
    )


@pytest.mark.slow
def test_the_serving_entries_of_the_older_file_run_and_their_figures_are_read(tmp_path, monkeypatch, capsys):
    classes = {"train": {"a": 1}, "validation": {"a": 2}}
    image_folder(tmp_path / "imagenet-data", classes)
    monkeypatch.setenv("DATASETS_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (old,) = (file for file in FIXTURES if file.name == "cnns.yml")
    # A small network, fewer images, and a port of its own; the rest is the older file's.
    small = f"--port {port} --model-name toy_model --num-images 24 --device cpu"
    file = tmp_path / "cnns.yml"
    file.write_text(old.read_text().replace("--port 8502", small))
    words = ("--spec", file, "--benchmark", "tf2_resnet50_serving*", "--log-dir", tmp_path / "log", "--json")
    assert bench(*words) == 0, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    assert (result["passed"], result["skipped"], result["failed"]) == (3, 0, 0)
    lines = [json.loads(line) for line in (tmp_path / "log" / "results.jsonl").read_text().splitlines()]
    metrics = {line["variant"].removeprefix("tf2_resnet50_serving_"): line["metrics"] for line in lines}
    # 16 clients with 24 images each, in whole batches.
    for name, rows in {"throughput_batchsize_1": 16 * 24, "throughput_batchsize_32": 16 * 32}.items():
        said = (tmp_path / "log" / f"tf2_resnet50_serving_{name}" / "stdout").read_text().splitlines()[-1]
        sent = json.loads(said)
        assert sent["sent"] == sent["answered"] == rows
        assert metrics[name]["throughput"]["value"] == pytest.approx(rows / sent["seconds"], abs=0.01)
    latency = metrics["latency"]["latency"]
    assert len(latency["values"]) == 24  # of which the first 20 do not count
    assert latency["value"] == pytest.approx(sum(latency["values"][20:]) / 4) and latency["value"] > 0


def test_validation_needs_no_variable_but_finds_a_cmd_that_needs_a_shell(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    assert bench("--spec", *FIXTURES, "--validate") == 0
    assert bench("--spec", spec(tmp_path, a="x | y"), "--validate") == 2
    assert re.search(r"\.yml:\d+: a: '\|' in the cmd needs a shell", capsys.readouterr().err)


def verdicts(capsys, *words):
    """What a look at a file says of each of its variants, and the status."""
    status = bench(*words, "--json")
    out, err = capsys.readouterr()
    said = json.loads(out)
    if "error" in said:  # what --validate finds is told as mistakes of the file
        return status, err
    return status, {one["variant"]: (one["skip"], one["problem"]) for one in said["variants"]}


def test_a_dry_run_refuses_a_log_folder_that_the_run_would_refuse(tmp_path, capsys):
    file, taken = spec(tmp_path, one="echo 1"), tmp_path / "taken"
    taken.mkdir()
    (taken / "results.jsonl").touch()
    for folder, said in ((file, "cannot be made: Not a directory"), (taken, "holds results already")):
        for more in ((), ("--dry-run",)):
            assert bench("--spec", file, "--log-dir", folder, *more) == 2
            assert f"--log-dir {folder}: {said}" in capsys.readouterr().err


def test_validate_and_dry_run_agree_on_what_cannot_run(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    monkeypatch.delenv("NOT_SET", raising=False)
    (tmp_path / "mine.py").touch()
    bad = {
        "shell": ("x | y", "'|' in the cmd needs a shell"),
        "variable": ("python3 mine.py $NOT_SET", "the cmd needs the variable NOT_SET"),
        "program": ("no-such-program -x", "no-such-program: no such program"),
        "script": ("python3 not_there.py", "not_there.py: no such script in "),
        "stepz": ("python3 lstm.py --stepz 3", "unknown option --stepz"),
        "module": ("python3 -m hotloop kernel rnn --stepz 3", "unknown option --stepz"),
        "file": ("python3 main.py -c own/none.json", "none.json"),
    }
    good = {"own": "python3 mine.py", "ours": "hotloop kernel rnn", "old": "python3 lstm.py --steps 3"}
    data = {"cmd": "python3 mine.py $DATASETS_DIR/x"}
    folder = {"cmd": "python3 mine.py", "location": "nowhere"}
    commands = {name: cmd for name, (cmd, _) in bad.items()} | good
    file = spec(tmp_path, **commands, data=data, place=folder)
    status, shown = verdicts(capsys, "--spec", file, "--dry-run")
    assert status == 1
    said = {name: why for name, (_, why) in bad.items()} | {"place": "nowhere: no such folder"}
    assert {name for name, (skip, problem) in shown.items() if problem and not skip} == set(said)
    assert shown["data"][0].startswith("needs a data set, and DATASETS_DIR is not set")
    status, err = verdicts(capsys, "--spec", file, "--validate")
    assert status == 2
    named = dict(re.findall(r"\.yml:\d+: (\w+): (.*)", err))
    assert named.keys() == said.keys()
    for name, why in said.items():
        assert why in shown[name][1] and named[name] == shown[name][1], name
    status, shown = verdicts(capsys, "--spec", file, "--validate", "--benchmark", *good, "data")
    assert status == 0 and [name for name, (skip, _) in shown.items() if skip] == ["data"]


def test_what_needs_a_data_set_or_more_devices_is_skipped_with_the_reason_and_counted(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    rate = {"cmd": code("print('rate 1')"), "data": RATE}
    two, three = {**rate, "devices": 2}, {**rate, "devices": 3}
    file = spec(tmp_path, two=two, three=three, data={**rate, "needs_dataset": True})
    assert bench("--spec", file, "--log-dir", tmp_path / "log", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["passed"], result["skipped"]) == (1, 2)
    reasons = {one["variant"]: one["reason"] for one in result["results"]}
    assert reasons["two"] is None
    assert reasons["three"] == "is for 3 devices, and there are 2"
    assert reasons["data"].startswith("needs a data set, and DATASETS_DIR is not set")
    monkeypatch.setenv("DATASETS_DIR", str(tmp_path))
    assert bench("--spec", file, "--log-dir", tmp_path / "again", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed"] == 2


def test_compile_only_goes_to_commands_that_know_it_and_the_others_are_skipped(tmp_path, capsys):
    (tmp_path / "knows.py").write_text("'--compile-only'")
    (tmp_path / "mine.py").touch()
    commands = {
        "cnn": "hotloop cnn train", "old": "python3 train.py", "knows": "python3 knows.py",
        "vcd": "hotloop vcd train", "kernel": "python3 lstm.py", "mine": "python3 mine.py", "other": "true",
        "module": "python3 -m hotloop cnn train", "rnn": "python3 -m hotloop kernel rnn",
        "validate": "hotloop cnn validate --random-weights",
    }  # fmt: skip
    status, shown = verdicts(capsys, "--spec", spec(tmp_path, **commands), "--dry-run", "--compile-only")
    assert status == 0
    assert [name for name, (skip, _) in shown.items() if not skip] == ["cnn", "old", "knows", "module"]
    assert shown["kernel"][0] == "--compile-only: `hotloop kernel lstm` does not know that option"


def test_a_list_has_every_variant_and_why_some_are_skipped(capsys):
    assert bench("--spec", *FIXTURES, "--list") == 0
    out = capsys.readouterr().out
    assert "tf2_resnet50_serving_throughput_batchsize_32" in out
    assert "--include-convergence" in out


def start(folder, *words):
    argv = [sys.executable, "-m", "hotloop", "bench", "run", "--log-dir", str(folder / "log"), *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(argv, cwd=folder, text=True, **streams)


def wait_until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def hanging(tmp_path):
    """A quick benchmark and one that hangs until a file says go; each leaves a note that it was started."""
    quick = code(f"print('rate 1'); open('{tmp_path}/quick', 'a').write('x')")
    (tmp_path / "slow.py").write_text(
        f"import os, time; open('{tmp_path}/slow', 'a').write(str(os.getpid()) + ' ')\n"
        f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.02)\n"
        "print('rate 2')"
    )
    spec(tmp_path, quick=quick, slow="python3 -S slow.py")
    return tmp_path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_killed_runner_loses_only_the_run_in_flight_and_resume_finishes(hanging):
    runner = start(hanging)
    wait_until(lambda: (hanging / "slow").exists() and (hanging / "slow").read_text())
    runner.kill()
    runner.communicate()
    (orphan,) = (hanging / "slow").read_text().split()
    assert is_running(orphan)
    assert len((hanging / "log" / "results.jsonl").read_text().splitlines()) == 1
    with (hanging / "log" / "results.jsonl").open("a") as file:
        file.write('{"benchmark": "sl')  # as if the kill had come while a line was written
    again = start(hanging, "--resume")
    wait_until(lambda: len((hanging / "slow").read_text().split()) == 2)
    wait_until(lambda: not is_running(orphan))
    (hanging / "go").touch()
    err = again.communicate(timeout=30)[1]
    assert again.returncode == 0, err
    records = [json.loads(line) for line in (hanging / "log" / "results.jsonl").read_text().splitlines()]
    assert [(one["variant"], one["status"]) for one in records] == [("quick", "passed"), ("slow", "passed")]
    assert (hanging / "quick").read_text() == "x"
    assert "earlier run" in err
    assert len(json.loads((hanging / "log" / "benchmark_results.json").read_text())) == 2


@pytest.mark.slow
def test_200_megabytes_of_output_are_read_in_little_memory(tmp_path):
    lines = "for i in range(2_000_000): print('rate', i) if i % 1000 == 0 else print('x' * 100)"
    spec(tmp_path, much={"cmd": code(lines), "data": RATE, "env": {"PYTHONUNBUFFERED": ""}})
    # A process of its own in between: what it waits for begins with its memory, not with that of these tests.
    words = [sys.executable, "-m", "hotloop", "bench", "run", "--log-dir", str(tmp_path / "log")]
    between = (
        "import resource, subprocess; "
        f"subprocess.run({words}, check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    kibibytes = subprocess.run([sys.executable, "-c", between], cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "log" / "much" / "stdout").stat().st_size > 200_000_000
    assert int(kibibytes.stdout) < 100_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_ctrl_c_ends_the_program_writes_the_tables_and_says_how_to_go_on(hanging):
    runner = start(hanging)
    wait_until(lambda: (hanging / "slow").exists() and (hanging / "slow").read_text())
    os.kill(runner.pid, signal.SIGINT)
    out, err = runner.communicate(timeout=30)
    assert runner.returncode == 130
    assert not is_running((hanging / "slow").read_text().strip())
    assert f"--resume --log-dir {hanging / 'log'}" in err
    assert "quick    PASSED" in out
    assert list(json.loads((hanging / "log" / "benchmark_results.json").read_text())) == ["quick"]

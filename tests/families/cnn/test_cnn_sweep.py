"""The sweep of trainings: what its trials are told, how they are ranked, what is refused, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from hotloop.cli import main as cli
from hotloop.cli.cnn import TRAIN
from hotloop.cli.parser import resolve, scan
from hotloop.families.cnn import sweep
from hotloop.families.cnn.sweep_options import NAMED
from hotloop.families.cnn.sweep_plan import spell
from hotloop.sweeps import bayes
from hotloop.sweeps.journal import FILE
from hotloop.sweeps.space import Range

pytestmark = pytest.mark.usefixtures("signals_heard")

# Stands in for `hotloop cnn train`: the momentum says what becomes of the trial.
CHILD = """
import json, os, pathlib, signal, sys, time
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
momentum = json.loads(given["--optimizer-params"])["momentum"]
folder = pathlib.Path(given["--results-dir"], given["--run-name"])
if momentum == 0.3 and "--resume" not in given:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    sys.exit("hotloop: error: no luck")
if momentum == 0.4:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    print("warning: waits", file=sys.stderr, flush=True)
    time.sleep(99)
folder.mkdir(exist_ok=True)
def record(event, epoch, **figures):
    return {"event": event, "update": int(10 * epoch), "epoch": epoch, "time": 1e9, "elapsed": 1.0, **figures}
best = 1 - abs(momentum - 0.8)
events = [record("start", 0.0), record("log", 3.0, loss=1.0)]
if momentum == 0.2:
    events.append(record("end", 3.0, status="failed", error="Diverged: loss is nan"))
else:
    events += [record("validation", epoch, validation_accuracy=best - 0.01 * epoch) for epoch in (1.0, 3.0)]
    reached = 1.0 if best > 0.75 else None
    events.append(record("sweep", 3.0, epoch_to_target=reached, optimization_metric=best / 3))
(folder / "events.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in events))
print("warning: the images are made up", file=sys.stderr)
if momentum == 0.2:
    sys.exit("hotloop: error: loss is nan")
print(json.dumps({"run": str(folder)}))
"""
TOY = [
    "--model=toy_model", "--dataset=mnist", "--synthetic-data=host", "--micro-batch-size=16",
    "--weight-updates-per-epoch=3", "--precision=32.32", "--device=cpu",
]  # fmt: skip
MOMENTUM = "--over=optimizer-params.momentum="


@pytest.fixture
def fake(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(sweep, "TRAIN", (sys.executable, str(script)))
    monkeypatch.chdir(tmp_path)


def swept(capsys, *words, status=0):
    """The JSON object of the command, and what stands on standard error."""
    assert cli.main(["cnn", "sweep", "--json", *TOY, "--seed=3", *words]) == status
    said = capsys.readouterr()
    return json.loads(said.out.splitlines()[-1]), said.err


def refused(capsys, *words):
    assert cli.main(["cnn", "sweep", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and not Path("results").exists()
    return lines[0].removeprefix("hotloop: error: ")


def told(run, number):
    """The words of a trial, from the plan that the sweep made of its own."""
    return resolve(TRAIN, scan(run, TRAIN.options)).config


def test_a_trial_that_fails_is_a_row_and_the_best_comes_first(fake, capsys):
    result, said = swept(capsys, f"{MOMENTUM}0.3,0.9,0.2,0.8", "--run-name=mixed")
    rows = result["trials"]
    assert [row["trial"] for row in rows] == [4, 2, 3, 1]
    assert [row["status"] for row in rows] == ["finished", "finished", "diverged", "failed"]
    assert [row["objective"] for row in rows] == [0.99, pytest.approx(0.89), None, None]
    assert rows[3]["reason"] == "exit status 1: hotloop: error: no luck"
    assert (result["best"], result["unfinished"]) == (rows[0], 2)
    assert (result["objective"], result["method"], result["goal"]) == (
        "validation_accuracy",
        "grid",
        "maximise",
    )
    assert said.count("the images are made up") == 1
    table = said.splitlines()[
        said.splitlines().index(next(x for x in said.splitlines() if x.startswith("trial  "))) :
    ]
    assert [line.split()[0] for line in table[1:5]] == ["4", "2", "3", "1"]
    assert [line.split()[-1] for line in table[1:5]] == ["finished", "finished", "diverged", "failed"]
    assert json.loads(Path("results/mixed/sweep.json").read_text()) == result
    for row in rows:
        assert Path(row["run"]) == Path("results/mixed").absolute() / f"trial-{row['trial']:03d}"


def test_objectives_have_their_direction(fake, capsys):
    for objective, order in {"epoch_to_target": [2, 1, 3], "optimization_metric": [2, 1, 3]}.items():
        result, _ = swept(
            capsys, f"{MOMENTUM}0.9,0.8,0.1", f"--objective={objective}", f"--run-name={objective}"
        )
        assert [row["trial"] for row in result["trials"]] == order
        values = [row["objective"] for row in result["trials"]]
        if objective == "epoch_to_target":  # equal ones by accuracy; who never came there is last
            assert values == [1.0, 1.0, None] and result["goal"] == "minimise"
        else:
            assert values == sorted(values, reverse=True)
    result, said = swept(capsys, f"{MOMENTUM}0.1,0.4999", "--objective=epoch_to_target", "--run-name=none")
    assert result["best"] is None and "no trial has epoch_to_target" in said


def test_a_sweep_goes_on_and_tries_again_what_it_is_told_to(fake, capsys):
    words = [f"{MOMENTUM}0.3,0.9,0.8", "--run-name=again"]
    first, _ = swept(capsys, *words, "--trials=2")
    assert first["unfinished"] == 1
    second, said = swept(capsys, *words, "--resume")
    assert "2 of 3 trials have ended before" in said
    assert [row["status"] for row in second["trials"]] == ["finished", "finished", "failed"]
    third, _ = swept(capsys, *words, "--resume", "--retry-failed")
    assert third["unfinished"] == 0  # its run was there, so that it was told to resume
    began = [json.loads(line) for line in Path("results/again", FILE).read_text().splitlines()]
    assert [each["trial"] for each in began if each["event"] == "begin"] == [1, 2, 3, 1]
    error, _ = swept(capsys, *words, "--resume", "--l2-regularization=0.5", status=2)
    assert "is another sweep: words" in error["error"]
    error, _ = swept(capsys, *words, status=2)
    assert "go on with it by --resume" in error["error"]


def test_every_trial_failed_is_an_error_after_the_table(fake, capsys):
    error, said = swept(capsys, f"{MOMENTUM}0.3", status=2)
    assert error["error"].startswith(
        "every trial failed, the first with exit status 1: hotloop: error: no luck"
    )
    assert "failed" in said


def test_ctrl_c_ends_the_children_and_says_how_to_go_on(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    code = (
        "import sys\nfrom hotloop.families.cnn import sweep\nfrom hotloop.cli.main import main\n"
        f"sweep.TRAIN = (sys.executable, {str(script)!r})\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["cnn", "sweep", *TOY, f"{MOMENTUM}0.4,0.8", "--run-name=stopped"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True, process_group=0
    )
    begun = tmp_path / "results" / "stopped" / "trial-001" / "config.json"
    limit = time.monotonic() + 30
    while not begun.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert begun.exists()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "to go on: the same command with --resume --run-name stopped" in said
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(script) not in running.replace(code, "")
    records = [json.loads(line) for line in (begun.parents[1] / FILE).read_text().splitlines()]
    assert [each["event"] for each in records] == ["sweep", "begin"]  # it has not ended


REFUSED = {
    "--over optimzer=sgd,lars": "--over optimzer: no such option; did you mean optimizer?",
    "--over optimizer=sgd,larss": "did you mean lars?",
    "--over micro-batch-size=9..3": "is an empty range",
    "--over micro-batch-size=": "names no value",
    "--over weight-decay=log:0..1": "log: both ends must be above 0",
    "--over weight-decay=-1,2": "--over weight_decay: --weight-decay -1: must be at least 0",
    "--over weight-decay=0.1..0.2 --trials 0": "--trials 0: must be at least 1",
    "--over l2-regularization=1,2 --l2-regularization 3": "is given and tried by --over l2_regularization; keep one",
    '--over optimizer-params.momentum=1,2 --optimizer-params {"momentum":0.5}': "is given and tried by",
    "--over optimizer.momentum=1": "--optimizer has no keys",
    "--over optimizer=1..2": "takes a list of values, not a range",
    "--over seed=1,2 --trials 3": "the lists have only 2 combinations",
    "--over seed=1..3 --method grid": "seed is a range",
    "--over run-name=a,b": "is the sweep's own",
    "--over seed=1,2 --validation False": "--validation False",
    "--over seed=1,2 --checkpoint-output-dir x": "is for one training",
    "--over seed=1,2 --resume": "--resume: say which sweep",
    "--over seed=1,2 --resume --run-name x": "holds no sweep",
    "--over seed=1,2 --retry-failed": "--retry-failed: only with --resume",
    "--over seed=1,2 --ray-address auto": "only with --engine ray",
    "--over optimizer=lars": "trial 1 (optimizer lars): --optimizer-params: ",
    "--over lr-schedule-params.initial_rate=1": "trial 1 (lr_schedule_params.initial_rate 1): --lr-schedule-params: ",
    "--over seed=1,2 --num-replicas 512 --device cpu": "--num-replicas 512: a trial has ",
    "--over num-replicas=1,512 --device cpu": "--num-replicas 512: a trial has ",
    "": "say what to try: one of LARS_random",
    "LARS_rand": "did you mean LARS_random?",
    "LARS_random --lr-schedule-params {power:3}": "is made of what LARS_random tries",
    "LARS_random --label-smoothing 0.1": "is given and tried by LARS_random",
    "LARS_random --over init_lrs=1,2": "did you mean init_lr",
    "LARS_random --num-epochs 3": "epochs_to_total_decay",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_work_is_one_line_before_any_trial(fake, capsys, line):
    assert REFUSED[line] in refused(capsys, *line.split())


def test_bayes_without_optuna_is_an_error_where_it_was_asked_for(fake, capsys, monkeypatch):
    monkeypatch.setattr(bayes, "is_available", lambda: False)
    assert "--method bayes needs optuna: pip install 'hotloop[sweep]'" in refused(
        capsys, "--over=seed=1,2", "--method=bayes"
    )


def planned(capsys, *words):
    """The values of each trial, and the words that it is told, by --plan and the journal's own account."""
    assert cli.main(["cnn", "sweep", "--json", "--plan", "--device=cpu", "--seed=3", *words]) == 0
    said = capsys.readouterr()
    return json.loads(said.out.splitlines()[-1]), said.err


def test_named_sweeps_have_the_old_ranges():
    assert {name: (each.objective, each.method) for name, each in NAMED.items()} == {
        "LARS_random": ("epoch_to_target", "random"),
        "SGD_random": ("epoch_to_target", "random"),
        "MLPerf_LARS": ("optimization_metric", "bayes"),
    }
    assert NAMED["LARS_random"].space["lars_eeta"] == Range(1e-4, 1e-2)
    assert NAMED["SGD_random"].space["init_lr"] == Range(
        pytest.approx(6.1442e-06, rel=1e-4), pytest.approx(0.0183156, rel=1e-4), log=True
    )
    assert NAMED["MLPerf_LARS"].space["num_epochs"] == Range(20, 40, whole=True)
    for each in NAMED.values():
        values = {**each.fixed, **{name: domain.pick(0.5) for name, domain in each.space.items()}}
        words = [spell(name, value) for name, value in each.runner.options(values).items()]
        made = resolve(TRAIN, scan(words, TRAIN.options)).config
        assert (made.num_replicas, made.strict_devices, made.sweep) == (64, False, True)
        assert (
            made.lr_schedule_params["epochs_to_total_decay"] == values["num_epochs"] - values["warmup_epochs"]
        )
        assert made.lr_schedule_params["power"] == 2 and made.lr_schedule == "polynomial"


def test_an_mlperf_trial_is_what_the_old_runner_made_of_its_parameters():
    each = NAMED["MLPerf_LARS"]
    drawn = {"init_lr": 2e-3, "warmup_epochs": 2, "label_smoothing": 0.1, "weight_decay": 5e-5, "num_epochs": 38,
             "grad_accum": 3}  # fmt: skip
    made = each.runner.options({**each.fixed, **drawn})
    batch = 18 * 64 * 3
    assert made == {
        "config": "resnet50_mlperf_pod16_lars",
        "num_epochs": 38,
        "num_replicas": 64,
        "strict_devices": False,
        "target_accuracy": 0.759,
        "sweep": True,
        "label_smoothing": 0.1,
        "l2_regularization": 5e-5,
        "ckpts_per_epoch": "1/4",
        "first_ckpt_epoch": 2,
        "micro_batch_size": 18,
        "global_batch_size": batch,
        "lr_schedule_params": {
            "initial_learning_rate": 2e-3,
            "end_learning_rate_ratio": 0.001 / (2e-3 * batch),
            "epochs_to_total_decay": 36,
            "power": 2,
        },
        "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 2},
        "optimizer_params": {"momentum": 0.9, "weight_decay": 5e-5, "eeta": 0.001, "epsilon": 0},
    }


def test_a_named_sweep_runs_on_the_devices_that_there_are(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bayes, "is_available", lambda: False)
    values = {"model": "toy_model_bn", "dataset": "mnist", "optimizer": "lars", "lr_schedule": "polynomial"}
    (tmp_path / "small.json").write_text(json.dumps({"small": {**values, "micro_batch_size": 18}}))
    words = ["--config-path=small.json", "--config=small", "--synthetic-data=host", "--trials=2"]
    found, said = planned(capsys, "MLPerf_LARS", *words)
    assert "its trials are drawn at random" in said and found["method"] == "random"
    assert f"64 replicas on {jax.device_count()} device" in said
    first = found["trials"]["1"]
    assert 20 <= first["num_epochs"] <= 40 and found["batch"]["global"] == 18 * 64 * first["grad_accum"]


def test_a_trial_is_told_what_was_typed_and_what_it_tries(fake, capsys):
    words = [
        "--config=cifar_resnet8", "--num-epochs=2", "--dataset-path=data",
        "--over=optimizer-params.momentum=0.5", "--over=lr-schedule-params.initial_learning_rate=log:1e-4..1e-2",
        "--trials=1", "--run-name=told",
    ]  # fmt: skip
    commands = []
    run_trials = sweep.run_trials

    def heard(plan, engine, journal, left, context):
        commands.append(sweep.make_trial(plan, 1, plan.choose(1)).command)
        return run_trials(plan, engine, journal, left, context)

    sweep.run_trials = heard
    try:
        assert cli.main(["cnn", "sweep", "--device=cpu", "--seed=7", *words]) == 0
    finally:
        sweep.run_trials = run_trials
    capsys.readouterr()
    rest = [word for word in commands[0][len(sweep.TRAIN) :] if word != "--json"]
    trained = told(rest, 1)
    base = resolve(TRAIN, scan(["--config=cifar_resnet8"], TRAIN.options)).config
    assert trained.optimizer_params == {**base.optimizer_params, "momentum": 0.5}
    rate = trained.lr_schedule_params["initial_learning_rate"]
    assert 1e-4 <= rate <= 1e-2
    assert trained == replace(
        base,
        num_epochs=2,
        seed=7,
        sweep=True,
        dataset_path=Path.cwd() / "data",
        results_dir=Path.cwd() / "results" / "told",
        run_name="trial-001",
        optimizer_params=trained.optimizer_params,
        lr_schedule_params={**base.lr_schedule_params, "initial_learning_rate": rate},
    )


def test_bayes_chooses_by_the_journal_and_goes_on_from_it(fake, capsys):
    pytest.importorskip("optuna")
    words = [f"{MOMENTUM}0.5..1.0", "--method=bayes", "--run-name=guided"]
    first, _ = swept(capsys, *words, "--trials=12")
    whole, _ = swept(capsys, *words, "--trials=16", "--resume")
    assert first["method"] == whole["method"] == "bayes"
    once, _ = swept(capsys, *words[:-1], "--run-name=once", "--trials=16")
    values = [{row["trial"]: row["values"] for row in result["trials"]} for result in (first, whole, once)]
    assert values[1] == values[2] and all(values[1][number] == values[0][number] for number in range(1, 13))
    assert len({each["optimizer_params.momentum"] for each in values[1].values()}) == 16


def test_a_trial_that_had_begun_keeps_its_values(fake, capsys):
    words = [f"{MOMENTUM}0.9,0.8", "--run-name=begun"]
    swept(capsys, *words)
    journal = Path("results/begun", FILE)
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(
        "".join(lines[:-1]).replace(
            '{"optimizer_params.momentum": 0.8}', '{"optimizer_params.momentum": 0.85}'
        )
    )
    result, _ = swept(capsys, *words, "--resume")
    tried = {row["trial"]: row["values"]["optimizer_params.momentum"] for row in result["trials"]}
    assert tried == {1: 0.9, 2: 0.85}


def test_an_altered_journal_is_one_line(fake, capsys):
    words = [f"{MOMENTUM}0.9,0.8", "--run-name=altered"]
    swept(capsys, *words, "--trials=1")
    journal = Path("results/altered", FILE)
    journal.write_text(journal.read_text().replace('"status": "finished"', '"status": "perfect"'))
    error, _ = swept(capsys, *words, "--resume", status=2)
    assert "the row of trial 1 is no sweep's" in error["error"]
    journal.write_text(journal.read_text().replace("optimizer_params.momentum", "momentum"))
    error, _ = swept(capsys, *words, "--resume", status=2)
    assert "another sweep" in error["error"] or "the file was altered" in error["error"]


@pytest.mark.slow
def test_real_trials_train_are_ranked_and_one_that_is_stopped_goes_on(tmp_path):
    command = [sys.executable, "-m", "hotloop", "cnn", "sweep", "--json", *TOY, "--seed=1", "--run-name=real"]
    command += [
        "--over=lr-schedule-params.initial_learning_rate=log:1e-4..1e-2",
        "--trials=2",
        "--num-epochs=2",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    accuracies = [row["validation_accuracy"] for row in found["trials"]]
    assert accuracies == sorted(accuracies, reverse=True) and all(0 < each < 1 for each in accuracies)
    assert all((Path(row["run"]) / "checkpoints").is_dir() for row in found["trials"])
    # A journal that lost its last line, as by a kill: the run is there and finished, and is not trained again.
    journal = tmp_path / "results" / "real" / FILE
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    again = subprocess.run(
        [*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, env=os.environ
    )
    assert again.returncode == 0, again.stderr
    same = json.loads(again.stdout.splitlines()[-1])
    assert [row["validation_accuracy"] for row in same["trials"]] == accuracies

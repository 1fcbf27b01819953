"""`hotloop recommender train` from the command line: old lines, records, resuming, one-line errors, real ratings."""

import json
import os
import re
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from hotloop.cli.command import Common
from hotloop.cli.main import find_command, main
from hotloop.cli.parser import resolve, scan
from hotloop.data.catalogue import known_set
from hotloop.data.local_files import find_set
from hotloop.engine import drive, progress
from hotloop.engine.device import platform, setup
from hotloop.engine.drive import Interrupted
from hotloop.engine.run import current_records, read_events
from hotloop.errors import OptionError
from hotloop.families.recommender import (
    baselines,
    config,
    convert,
    evaluate,
    model,
    rating_sets,
    saved_run,
    train,
    validation,
)
from hotloop.families.recommender.commands_config import ConvertOptions, EvaluateOptions, SplitName
from hotloop.families.recommender.config import BY_NAME, PRESETS, TrainOptions
from hotloop.options import options_of
from listener import Listener
from undisturbed import assert_same_run

pytestmark = pytest.mark.usefixtures("signals_heard")

ROOT = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[2] / "../shared/data"
).resolve()
USERS, ITEMS = 40, 30
FILES = "--training-data-file netflix_data/{0}_train.txt --validation-data-file netflix_data/{0}_valid.txt"


def read(line):
    """The options that a command line means, presets included, sizes filled in."""
    command, _, words = find_command(["recommender", "train", *line.split()])
    return resolve(command, scan(words, (*options_of(command.config), *options_of(Common)))).config.resolve()


def lines(users, items, values):
    return "".join(
        f"{user}\t{item}\t{value}\n" for user, item, value in zip(users, items, values, strict=True)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ratings of 40 users, as 3m_train.txt, 3m_valid.txt and 3m_test.txt; weights as small as can be."""
    setup()  # compiled once, whichever test comes first
    folder = tmp_path_factory.mktemp("ratings")
    generator = np.random.default_rng(0)
    users, items = np.nonzero(generator.random((USERS, ITEMS)) < 0.5)
    values = generator.integers(1, 6, len(users))
    part = generator.choice(3, len(users), p=(0.7, 0.2, 0.1))
    for number, name in enumerate(("train", "valid", "test")):
        own = part == number
        (folder / f"3m_{name}.txt").write_text(lines(users[own] + 7, items[own] + 3, values[own]))
    return folder


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Three widths that nobody would train with."""
    for size in config.LAYERS:
        monkeypatch.setitem(config.LAYERS, size, (size // 16, 6, 5))


SAME = [
    "--batch-size",
    "7",
    "--epochs",
    "8",
    "--base-learning-rate",
    "-8.5",
    "--refeed",
    "none",
    "--seed",
    "3",
]
"""One program for most of these tests: they differ in what happens around it."""


def words(folder, *more):
    files = ("training", "train"), ("validation", "valid"), ("test", "test")
    named = [word for kind, name in files for word in (f"--{kind}-data-file", str(folder / f"3m_{name}.txt"))]
    return ["recommender", "train", *named, *SAME, *more]


def events(folder, kind):
    return [event for event in current_records(read_events(folder)) if event["event"] == kind]


def figures(folder):
    """Every figure that a log or a validation recorded, without times and speeds."""
    left_out = ("time", "elapsed", "throughput")
    return [
        {key: value for key, value in event.items() if key not in left_out}
        for event in current_records(read_events(folder))
        if event["event"] in ("log", "validation")
    ]


def same_run(result, other):
    """The last weights, the best step and every figure are those of another run, bit for bit."""
    one, two = (saved_run.load_run(Path(each["run"])) for each in (result, other))
    for left, right in zip(jax.tree.leaves(one.state), jax.tree.leaves(two.state), strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right))
    assert {**result, "run": ""} == {**other, "run": ""}


@pytest.fixture(scope="module")
def options(folder):
    return TrainOptions(
        batch_size=7, epochs=8, base_learning_rate=-8.5, refeed="none", seed=3, run_name="whole",
        training_data_file=folder / "3m_train.txt", validation_data_file=folder / "3m_valid.txt",
        test_data_file=folder / "3m_test.txt", results_dir=folder / "runs",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(options):
    """The result of a run that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        for size in config.LAYERS:
            patch.setitem(config.LAYERS, size, (size // 16, 6, 5))
        return train.run(options, Listener(), "test")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"size": 128, "batch_size": 64, "validation_batch_size": 128, "epochs": 2}),
        (f"{FILES.format('3m')} --size 128",
         {"size": 128, "batch_size": 64, "validation_batch_size": 64, "epochs": 160}),
        (f"{FILES.format('6m')} --size 256", {"size": 256, "batch_size": 64, "validation_batch_size": 64}),
        (f"{FILES.format('1y')} --size 256 --batch-size 32 --validation-batch-size 32",
         {"size": 256, "batch_size": 32, "validation_batch_size": 32}),
        (f"{FILES.format('full')} --size 512 --batch-size 8 --validation-batch-size 8",
         {"size": 512, "batch_size": 8, "validation_batch_size": 8}),
        (FILES.format("1y"), {"size": 256, "batch_size": 32, "validation_batch_size": 32}),
        (FILES.format("full"), {"size": 512, "batch_size": 8, "validation_batch_size": 8}),
        (f"{FILES.format('own')} --size 512 --micro-batch-size 16 --validation-micro-batch-size 4",
         {"size": 512, "batch_size": 16, "validation_batch_size": 4}),
        (f"{FILES.format('3m').replace('-data-', '_data_')} --micro_batch_size 16 --weight_decay 0 --loss_scaling 1",
         {"batch_size": 16, "validation_batch_size": 16, "weight_decay": 0.0, "loss_scaling": 1.0}),
        ("--base-learning-rate -12.5 --learning-rate-decay 1,0.5 --learning-rate-schedule 0.25",
         {"base_learning_rate": -12.5, "learning_rate_decay": (1.0, 0.5), "learning_rate_schedule": (0.25,)}),
        ("--precision 16.32 --no-prng --no-selu --no-dropout --no-dense-refeeding --gradient-clipping --optimizer SGD",
         {"precision": "16.32", "no_prng": True, "no_selu": True, "no_dense_refeeding": True, "no_dropout": True,
          "gradient_clipping": True, "optimizer": "SGD"}),
        ("--multiprocessing --valid-per-epoch 0.5 --steps-per-log 4 --device-iterations 100 --logdir x --no-validation",
         {"multiprocessing": True, "valid_per_epoch": 0.5, "steps_per_log": 4, "device_iterations": 100,
          "results_dir": Path("x"), "no_validation": True}),
        ("--untied --refeed alternate --aug-steps 3", {"untied": True, "refeed": "alternate", "aug_steps": 3}),
        ("--config ml-100k --epochs 3", {**PRESETS["ml-100k"], "epochs": 3}),
    ],
)  # fmt: skip
def test_the_old_programs_lines_are_understood(line, expected):
    found = read(line)
    assert {name: getattr(found, name) for name in expected} == expected


def test_old_options_without_effect_say_so(folder, tmp_path, capsys):
    line = words(folder, "--select-ipus", "0,1", "--pipeline_num_parallel", "8", "--build-init")
    assert main([*line, "--logdir", str(tmp_path)]) == 0
    assert "warning: --pipeline-num-parallel, --select-ipus: no effect here" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "size", "batch"), [("6m", 256, 64), ("1y", 256, 32), ("full", 512, 8)])
def test_sizes_and_batches_follow_the_files_name(name, size, batch, tmp_path, capsys):
    """Down to the shapes of the weights and the name of the folder."""
    for part in ("train", "valid"):
        (tmp_path / f"{name}_{part}.txt").write_text(lines(range(70), [3] * 70, [4] * 70))
    line = ["recommender", "train", "--training-data-file", str(tmp_path / f"{name}_train.txt"),
            "--validation-data-file", str(tmp_path / f"{name}_valid.txt"), "--logdir", str(tmp_path)]  # fmt: skip
    assert main([*line, "--build-init", "--json"]) == 0
    run = Path(json.loads(capsys.readouterr().out)["run"])
    assert run.name.startswith(f"logs-bs{batch}-rn0-")
    found = saved_run.load_run(run)
    assert (found.job.net.size, found.job.net.batch_size, found.config.epochs) == (size, batch, 160)
    assert found.state["params"]["encoder"][0]["w"].shape == (1, size // 16)
    assert found.job.rates[0] == 2**-16 * batch


def test_a_run_leaves_records_with_every_figure_and_a_result(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SLOW", 0)
    line = words(folder, "--logdir", str(tmp_path))
    assert main([*line, "--run-name", "own", "--json"]) == 0
    out, said = capsys.readouterr()
    result = json.loads(out)
    run = tmp_path / "own"
    assert Path(result["run"]) == run
    assert all(text in said for text in ("Loading training data", f"Users: {USERS}  Items: {ITEMS}"))
    assert "Running validation..." in said and "test RMSE" in said
    names = ("\n", "validating: ", "evaluating (test): ", "ranking (test): ")
    for compiled in (f"{name}compiled in " for name in names):
        assert said.count(compiled) == 1
    logs, validations = events(run, "log"), events(run, "validation")
    assert [log["update"] for log in logs] == list(range(5, 46, 5))  # 40 users / 7, cut off, are a call
    assert logs[0]["epoch"] == pytest.approx(5 * 7 / USERS)
    assert all({"loss", "rmse", "learning_rate", "gradient_norm", "throughput"} <= set(log) for log in logs)
    rates = [log["learning_rate"] / (2**-8.5 * 7) for log in logs]
    assert rates == pytest.approx([1] * 5 + [0.1] * 2 + [0.01] * 2, rel=1e-6)
    assert [event["update"] for event in validations] == [log["update"] for log in logs]
    best = min(validations, key=lambda event: event["validation_rmse"])
    assert result["updates"] == 45
    assert result["best_step"] == best["update"] == saved_run.load_run(run, best=True).step
    assert result["validation"]["rmse"] == best["validation_rmse"]
    assert result["validation"]["ratings"] == best["validation_ratings"] > 90
    tests = {event["split"]: event for event in events(run, "evaluation")}
    assert re.search(
        rf"test RMSE {result['test']['rmse']:.4f} \+- {result['test']['rmse_se']:.4f}, MAE", said
    )
    assert tests["test"]["rmse"] == result["test"]["rmse"] and tests["test"]["update"] == best["update"]
    (end,) = events(run, "end")
    assert (end["status"], end["update"]) == ("finished", 45)
    # So that the end's place is not the evaluation's; other devices round otherwise.
    assert best["update"] < 45 or platform() != "cpu"
    per_epoch = USERS / 7
    assert all(event["epoch"] == event["update"] / per_epoch for event in current_records(read_events(run)))


def test_a_stopped_run_resumes_to_the_same_bits(options, whole, tmp_path):
    stopped = replace(options, results_dir=tmp_path, run_name="stopped")

    def stop(text):
        if text.startswith("update 25,"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="--resume --run-name stopped"):
        train.run(stopped, Listener(stop), "test")
    assert saved_run.load_run(tmp_path / "stopped").step < 45
    result = train.run(replace(stopped, resume=True), Listener(), "test")
    same_run(result, whole)
    assert_same_run(Path(result["run"]), Path(whole["run"]))


@pytest.mark.parametrize("patience", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_to_the_same_bits_and_figures(patience, options, whole, tmp_path):
    """A kill leaves the checkpoints so far and half a record."""
    run = tmp_path / "killed"
    options = replace(options, patience=patience, results_dir=tmp_path, run_name="killed")
    whole = train.run(replace(options, run_name="patient"), Listener(), "test") if patience else whole
    shutil.copytree(whole["run"], run)
    steps = sorted(step for step in (run / "checkpoints").iterdir() if step.name.isdigit())
    assert len(steps) >= 2
    shutil.rmtree(steps[-1])
    records = run / "events.jsonl"
    records.write_bytes(records.read_bytes()[:-20])
    result = train.run(replace(options, resume=True), Listener(), "test")
    same_run(result, whole)
    assert figures(run) == figures(whole["run"])


@pytest.mark.slow
def test_other_pieces_of_a_call_and_other_logs_give_the_same_bits(options, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "TARGET_SECONDS", 0)  # one update at a time
    other = replace(options, results_dir=tmp_path, run_name="other", steps_per_log=3)
    result = train.run(other, Listener(), "test")
    same_run(result, whole)
    assert len(events(result["run"], "log")) == 3


def test_patience_stops_and_the_best_weights_are_tested(options, whole, tmp_path):
    impatient = replace(options, results_dir=tmp_path, run_name="impatient", patience=2)
    result = train.run(impatient, Listener(), "test")
    values = [event["validation_rmse"] for event in events(result["run"], "validation")]
    best = int(np.argmin(values))
    assert len(values) == best + 3 < 9  # two that were no better came after it, and none after these
    assert (result["best_step"], result["updates"]) == (5 * (best + 1), 5 * len(values))
    assert result["validation"]["rmse"] == min(values)
    again = train.run(replace(impatient, resume=True), Listener(), "test")
    assert again == result and len(events(result["run"], "validation")) == len(values)


def test_a_run_from_before_there_were_schedules_by_name_goes_on(options, whole):
    path = Path(whole["run"]) / "config.json"
    had = json.loads(path.read_text())
    new = {"optimizer_params": {}, "lr_schedule": "drops", "lr_schedule_params": {}}
    assert {name: had.pop(name) for name in new} == new
    path.write_text(json.dumps(had))
    assert train.run(replace(options, resume=True), Listener(), "test") == whole


def test_a_rate_by_name_falls_as_it_says_and_one_that_cannot_is_refused_before_a_folder(options, tmp_path):
    cosine = {"lr_schedule": "cosine", "results_dir": tmp_path, "epochs": 2}
    fast = replace(options, **cosine, lr_schedule_params={"epochs_to_total_decay": 0.1})
    with pytest.raises(OptionError, match=r"epochs_to_total_decay 0\.1: less than one update of 40/7"):
        train.run(fast, Listener(), "test")
    assert not list(tmp_path.iterdir())
    falling = replace(options, **cosine, lr_schedule_params={"epochs_to_total_decay": 2})
    result = train.run(falling, Listener(), "test")
    rates = [event["learning_rate"] for event in events(result["run"], "log")]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.1 * 2**-8.5 * 7


def forbidden(*_, **__):
    raise AssertionError("no process was to be started")


def test_the_first_weights_are_saved_and_nothing_is_trained(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(validation, "ProcessValidation", forbidden)
    line = words(
        folder, "--build-init", "--multiprocessing", "--logdir", str(tmp_path), "--run-name", "first"
    )
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": str(tmp_path / "first"), "updates": 0}
    found = saved_run.load_run(tmp_path / "first")
    assert found.step == 0 and int(found.state["update"]) == 0
    assert np.array_equal(np.sort(found.item_ids), np.arange(ITEMS) + 3)
    assert not events(tmp_path / "first", "log")


def test_testing_on_a_checkpoint_gives_its_validation_error(folder, whole, capsys, monkeypatch):
    monkeypatch.setattr(validation, "ProcessValidation", forbidden)
    before = sorted(Path(whole["run"]).rglob("*"))
    line = ["recommender", "train", "--testing-on-checkpoint", whole["run"], "--multiprocessing",
            "--validation-data-file", str(folder / "3m_valid.txt"), "--validation-batch-size", "7",
            "--json"]  # fmt: skip
    assert main(line) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rmse"] == whole["validation"]["rmse"] and result["step"] == whole["best_step"]
    assert sorted(Path(whole["run"]).rglob("*")) == before
    assert main([*line[:5], "--json"]) == 2
    assert "--testing-on-checkpoint: give the ratings" in capsys.readouterr().err


def used(line, run):
    """What a command line that uses a run means, and what it says about the run's own options."""
    command, _, words = find_command(["recommender", *line.replace("RUN", str(run)).split()])
    found = resolve(command, scan(words, (*options_of(command.config), *options_of(Common))))
    return found.config, list(found.replacements)


@pytest.mark.parametrize(
    "line", ["evaluate RUN", "predict RUN", "recommend RUN --all", "baselines --run RUN"]
)
def test_what_uses_a_run_takes_its_options_and_says_what_the_command_line_replaces(line, whole, folder):
    config, said = used(line, whole["run"])
    size = None if line.startswith("recommend") else 7  # lists are made of as many users at once as is fast
    assert (config.batch_size, config.clip, said) == (size, True, [])  # as it validated
    config, said = used(f"{line} --batch-size 9 --no-clip", whole["run"])
    assert (config.batch_size, config.clip) == (9, False)
    replaced = ["option --batch-size: 9 (the run had 7)"] if size else []
    assert sorted(said) == [*replaced, "option --clip: False (the run had True)"]
    if "baselines" in line:
        assert config.training_data_file == folder / "3m_train.txt" and config.seed == 3
        data = rating_sets.load_sets(
            baselines.choose_options(config, saved_run.load_run(Path(whole["run"]))), Listener()
        )
        assert evaluate.choose_part(data, "", "test", "").name == "test ratings of 3m_test.txt"
    else:
        assert getattr(config, "split", None) is None  # a run's --split is another thing


def test_a_run_is_evaluated_from_everywhere_and_using_it_creates_nothing(
    folder, whole, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "results" / "here"
    monkeypatch.chdir(folder)
    files = ["--training-data-file", "3m_train.txt", "--validation-data-file", "3m_valid.txt"]
    first = [
        "recommender",
        "train",
        *files,
        "--logdir",
        str(run.parent),
        "--run-name",
        "here",
        "--build-init",
    ]
    assert main([*first, "--no-clip"]) == 0
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(progress, "SLOW", 0)
    assert rating_sets.load_sets(saved_run.load_run(run).config, Listener()).validation.ratings > 90
    assert main(["recommender", "recommend", str(run), "--users", "7", "--top", "2", "--clip"]) == 0
    said = capsys.readouterr().out
    assert "option --clip: True (the run had False)" in said and "recommending: compiled in " in said
    assert sorted(tmp_path.rglob("*")) == before


def test_without_validation_there_is_none_and_no_other_process(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(validation, "ProcessValidation", forbidden)
    line = words(folder, "--no-validation", "--multiprocessing", "--logdir", str(tmp_path))
    assert main([*line, "--run-name", "blind", "--json"]) == 0
    out, said = capsys.readouterr()
    assert set(json.loads(out)) == {"run", "updates", "best_step"}
    assert "alidation" not in said.split("start:")[1].split("\n", 1)[1]
    assert not events(tmp_path / "blind", "validation")


def test_the_plan_says_what_would_run_and_runs_nothing(folder, tmp_path, capsys):
    line = words(folder, "--plan", "--logdir", str(tmp_path / "runs"), "--json")
    assert main(line) == 0
    out, said = capsys.readouterr()
    plan = json.loads(out)
    assert plan["total_updates"] == 45
    assert plan["updates_per_epoch"] == pytest.approx(USERS / 7)
    assert [e["update"] for e in plan["events"] if e["event"] == "validate"] == list(range(5, 46, 5))
    assert f"layers {ITEMS}, 8, 6, 5 and back" in said and "dropping at update 25, 35" in said
    assert not list(tmp_path.iterdir())


def test_the_plan_of_a_sweep_has_its_rates_and_the_training_of_each(folder, tmp_path, capsys):
    line = words(folder, "--plan", "--logdir", str(tmp_path / "runs"), "--json", "--device", "cpu")
    rates = ["--base-learning-rates", "8..10", "--num-devices", "3"]
    assert main(["recommender", "sweep", *line[2:], *rates]) == 0, capsys.readouterr().err
    out, said = capsys.readouterr()
    plan = json.loads(out)
    assert plan["exponents"] == [-8.0, -9.0, -10.0]
    assert plan["total_updates"] == 45
    assert (
        "3 trials on 1 cpu device, 1 at a time: base learning rates of 2 to the power of -8, -9, -10" in said
    )
    assert f"layers {ITEMS}, 8, 6, 5 and back" in said
    assert not list(tmp_path.iterdir())


def test_a_diverging_run_stops_with_advice_and_keeps_the_best_checkpoint(folder, tmp_path, capsys):
    """Tamed for its first half, then let loose."""
    rate = [
        "--base-learning-rate",
        "-1",
        "--learning-rate-decay",
        "0.002,1e9",
        "--learning-rate-schedule",
        "0.5",
    ]
    line = words(
        folder, "--logdir", str(tmp_path), "--refeed", "none", "--epochs", "10", "--run-name", "late"
    )
    assert main([*line, *rate]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "at update" in said and "lower the learning rate" in said and "--base-learning-rate -3" in said
    assert events(tmp_path / "late", "end")[-1]["status"] == "failed"
    values = {e["update"]: e["validation_rmse"] for e in events(tmp_path / "late", "validation")}
    finite = {step: value for step, value in values.items() if value is not None}
    best = min(finite, key=finite.get)
    assert f"the best is step {best}" in said
    found = saved_run.load_run(tmp_path / "late", best=True)
    assert found.step == best
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.state["params"]))


# What people get wrong, and the line that tells them.

GOOD = "1\t10\t4.0\n1\t11\t3.0\n2\t10\t5.0\n2\t11\t1.0\n"
BAD_FILES = [
    ("1\t10\t4.0\n1\t11\n", GOOD, "train.txt: line 2: 2 columns where the first line has 3"),
    ("1\t10\t4.0\nMartha\t11\t2\n", GOOD, "train.txt: line 2: user 'Martha' is not a whole number"),
    ("1\t10\t4.0\n2\t11\tgood\n", GOOD, "train.txt: line 2: rating 'good' is not a number"),
    ("1\t10\t4.0\n2\t11\t0\n", GOOD, "train.txt: line 2: rating '0' is not above 0"),
    ("1\t10\t-3\n2\t11\t1\n", GOOD, "train.txt: line 1: rating '-3' is not above 0"),
    (GOOD, "1\t10\t4.0\n1\t11\t0.0\n", "valid.txt: line 2: rating '0.0' is not above 0"),
    ("", GOOD, "train.txt: no ratings in this file"),
    ("\n\n", GOOD, "train.txt: no ratings in this file"),
    (GOOD, "", "valid.txt: no ratings in this file"),
    ("1 10 4\n", GOOD, "train.txt: line 1: no TAB, '::' or comma"),
    ("1\t10\t4.0\t5\t6\n", GOOD, "train.txt: line 1: 5 columns"),
    (GOOD, "3\t12\t4.0\n", "valid.txt: none of its ratings has a user and an item of the training data"),
]
BAD_OPTIONS = [
    ("--base-learning-rate 16", "--base-learning-rate 16: the rate would be 2^16 times the batch size; write -16"),
    ("--training-data-file FOLDER/3m_train.txt --split user-time", "--split user-time: 3m_train.txt has no times"),
    ("--training-data-file FOLDER/3m_none.txt --validation-data-file FOLDER/3m_valid.txt", "3m_none.txt"),
    ("--training-data-file FOLDER/3m_train.txt --validation-data-file FOLDER/3m_none.txt", "3m_none.txt"),
    ("--training-data-file FOLDER --validation-data-file FOLDER --size 128 --batch-size 8", "FOLDER"),
    ("ALL --resume --run-name nobody", "nothing to resume"),
    ("ALL --replicas 2", "--replicas 2: a batch of 7 users cannot be shared evenly; take a --batch-size that is"),
    ("ALL --batch-size 64 --replicas 64", "--replicas 64: only "),
    ("ALL --replicas 0", "--replicas 0: "),
    ("ALL --logdir FOLDER/3m_train.txt", "cannot make the run folder"),
    ("ALL --report FOLDER/3m_train.txt", "3m_train.txt"),
    ("--testing-on-checkpoint FOLDER --validation-data-file FOLDER/3m_valid.txt", "not a run's folder"),
]  # fmt: skip
compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compilations.append(name) if "compile" in name else None
)


def refused(line, capsys):
    """The one line that a command line gets, before anything is compiled."""
    compilations.clear()
    assert main(line) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("warning:")]
    assert len(said) == 1 and said[0].startswith("hotloop: error: ")
    assert not compilations
    return said[0]


@pytest.mark.parametrize(("training", "validation", "reason"), BAD_FILES)
def test_bad_files_get_one_line_that_names_file_line_and_reason(
    training, validation, reason, tmp_path, capsys
):
    for name, text in (("train", training), ("valid", validation)):
        (tmp_path / f"3m_{name}.txt").write_text(text)
    line = ["recommender", "train", "--training-data-file", str(tmp_path / "3m_train.txt"),
            "--validation-data-file", str(tmp_path / "3m_valid.txt"), "--logdir", str(tmp_path / "runs")]  # fmt: skip
    assert reason in refused(line, capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("line", "reason"), BAD_OPTIONS)
def test_bad_options_get_one_line(line, reason, folder, tmp_path, capsys):
    line = line.replace("ALL", " ".join(words(folder)[2:])).replace("FOLDER", str(folder))
    line = line if "--logdir" in line else f"{line} --logdir {tmp_path / 'runs'}"
    said = refused(["recommender", "train", *line.split()], capsys)
    assert reason.replace("FOLDER", str(folder)) in said
    assert not (tmp_path / "runs").exists()


def small(training, validation, tmp_path, capsys, *more):
    """A run with these texts: its result, what it said, and its training ratings."""
    for name, text in (("train", training), ("valid", validation)):
        (tmp_path / f"{name}.txt").write_text(text)
    line = ["recommender", "train", "--training-data-file", str(tmp_path / "train.txt"), "--validation-data-file",
            str(tmp_path / "valid.txt"), "--logdir", str(tmp_path), "--size", "128", "--refeed", "none",
            "--no-dropout", "--batch-size", "1", "--epochs", "2"]  # fmt: skip
    assert main([*line, *more, "--json"]) == 0
    out, said = capsys.readouterr()
    result = json.loads(out)
    return result, said, saved_run.load_run(Path(result["run"])).load_training()


def test_ratings_of_strangers_are_counted_and_left_out(tmp_path, capsys):
    text = "1\t10\t4\n9\t10\t4\n2\t99\t1\n2\t11\t2\n"
    result, said, _ = small(GOOD, text, tmp_path, capsys, "--build-init")
    assert "warning: 2 of 4 ratings are left out: their user or item is not in the training data" in said
    listener = Listener()
    data = rating_sets.load_sets(saved_run.load_run(Path(result["run"])).config, listener)
    assert data.validation.values().tolist() == [4, 2] and len(listener.warnings) == 1


def test_half_stars_are_kept(tmp_path, capsys):
    text = "1\t10\t0.5\n1\t11\t3.5\n2\t10\t4.5\n"
    result, _, train = small(text, text, tmp_path, capsys, "--build-init")
    assert train.values().tolist() == [0.5, 3.5, 4.5]
    found = saved_run.load_run(Path(result["run"]))
    assert (found.low, found.high) == (0.5, 4.5)


def test_of_repeated_ratings_the_last_counts(tmp_path, capsys):
    _, said, train = small(GOOD + "1\t10\t2.0\n", GOOD, tmp_path, capsys, "--build-init")
    assert "warning: 1 ratings have the user and item of a later one" in said
    assert train.row(0)[1].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "text",
    [
        "1,10,4.0\n1,11,3.0\n2,10,5.0\n2,11,1.0\n",
        "userId,movieId,rating,timestamp\n1,10,4,7\n1,11,3,8\n2,10,5,9\n2,11,1,9\n",
        "1::10::4::978300760\n1::11::3::978300760\n2::10::5::978300760\n2::11::1::978300760\n",
        "1\t10\t4\t881250949\n1\t11\t3\t881250949\n2\t10\t5\t881250949\n2\t11\t1\t881250949\n",
        GOOD.replace("\n", "\r\n"),
    ],
)
def test_commas_colons_headers_and_a_fourth_column_are_read(text, tmp_path, capsys):
    _, _, train = small(text, GOOD, tmp_path, capsys, "--build-init")
    assert train.values().tolist() == [4, 3, 5, 1] and train.item_ids.tolist() == [10, 11]


def test_one_user_with_one_rating_is_enough_to_train_with(tmp_path, capsys):
    """However large the batch, which then is that user, and says so."""
    text = "5\t10\t4.0\n"
    result, said, train = small(text, text, tmp_path, capsys, "--batch-size", "64")
    assert "warning: --batch-size 64: there are only 1 users to train with" in said
    assert train.users == 1 and result["updates"] > 0
    assert result["validation"]["ratings"] == 1 and np.isfinite(result["validation"]["rmse"])
    assert events(result["run"], "log")[0]["learning_rate"] == 2**-16


def converted(tmp_path, split):
    """The command line that `convert` prints for ratings of this kind, as words."""
    generator = np.random.default_rng(1)
    users, items = np.nonzero(generator.random((25, 12)) < 0.6)
    values, days = generator.integers(1, 6, len(users)), generator.integers(0, 30, len(users))
    if split in ("random", "user-time"):
        source = tmp_path / "u.data"
        rows = zip(users, items, values, days, strict=True)
        source.write_text("".join(f"{u}\t{i}\t{value}\t{day}\n" for u, i, value, day in rows))
    else:
        source = tmp_path / "raw"
        source.mkdir()
        months = {"1y": ("2005-04", "2005-06")}.get(split, ("2005-11", "2005-12"))
        for item in range(12):
            of_item = [(u, v, d) for u, i, v, d in zip(users, items, values, days, strict=True) if i == item]
            dated = [f"{u},{v},{months[int(d >= 20)]}-{1 + d:02d}\n" for u, v, d in of_item]
            (source / f"mv_{item + 1:07d}.txt").write_text("".join([f"{item + 1}:\n", *dated]))
    console = Listener()
    convert.run(ConvertOptions(source, tmp_path / "out", split), console)
    (line,) = [text for text in console.lines if isinstance(text, str) and text.startswith("to train: ")]
    return shlex.split(line.removeprefix("to train: "))


@pytest.mark.parametrize("split", get_args(SplitName))
def test_the_command_that_convert_prints_is_taken_and_sizes_are_said(split, tmp_path, capsys):
    program, *line = converted(tmp_path, split)
    assert program == "hotloop" and f"{tmp_path}/out/{split}_train.txt" in line
    assert main([*line, "--plan"]) == 0
    said = capsys.readouterr().out
    assert ("--size 128 --batch-size 25: for " in said) == (split not in BY_NAME)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["3m", "user-time", "random"])
def test_the_command_that_convert_prints_trains(split, tmp_path, capsys):
    line = converted(tmp_path, split)[1:]
    assert main([*line, "--logdir", str(tmp_path), "--epochs", "1", "--refeed", "none", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["updates"] > 0 and result["validation"]["ratings"] > 5 and result["test"]["ratings"] > 5


@pytest.mark.slow
def test_any_file_of_ratings_trains_alone_split_and_sized_by_what_it_holds(tmp_path, capsys):
    generator = np.random.default_rng(2)
    users, items = np.nonzero(generator.random((USERS, ITEMS)) < 0.5)
    rows = zip(users, items, generator.integers(1, 11, len(users)) / 2, strict=True)
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating\n" + "".join(f"{u},{i},{value}\n" for u, i, value in rows))
    line = ["recommender", "train", "--training-data-file", str(path), "--epochs", "1", "--refeed", "none"]
    assert main([*line, "--logdir", str(tmp_path), "--json"]) == 0
    out, said = capsys.readouterr()
    result = json.loads(out)
    train = saved_run.load_run(Path(result["run"])).load_training()
    parts = [train.ratings, result["validation"]["ratings"], result["test"]["ratings"]]
    told = "ratings.csv: --split random gives {} ratings to train with, {} to validate and {} to test"
    assert told.format(*parts) in said
    assert sum(parts) > 0.95 * len(users) and parts[0] > 0.75 * len(users)
    assert f"--size 128 --batch-size {USERS}: for {parts[0]} training ratings of {USERS} users" in said
    assert "warning" not in said
    tested = evaluate.run(EvaluateOptions(run=Path(result["run"]), k=()), Listener())
    assert (tested["rmse"], tested["data"]) == (
        pytest.approx(result["test"]["rmse"]), "test part of ratings.csv (random split)",
    )  # fmt: skip
    assert tested["rmse_se"] == pytest.approx(result["test"]["rmse_se"], rel=1e-4) and tested["rmse_se"] > 0


def test_help_names_every_option_and_preset(capsys):
    assert main(["recommender", "train", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(option.spelling in said for option in options_of(TrainOptions)) and all(
        name in said for name in PRESETS
    )


@pytest.mark.skipif(
    not (ROOT.is_dir() and find_set(known_set("movielens-100k"), ROOT)), reason=f"no ml-100k in {ROOT}"
)
@pytest.mark.slow
def test_a_short_run_on_real_ratings_is_clearly_better_than_the_mean(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real widths
    monkeypatch.setenv("HOTLOOP_DATA", str(ROOT))
    real = read("--data ml-100k --precision 32.32 --base-learning-rate -11.5 --epochs 8 --run-name real")
    real = replace(real, results_dir=tmp_path)
    data = rating_sets.load_sets(real, Listener())
    truth = data.validation.values()
    mean = np.sqrt(np.mean((truth - data.train.values().mean()) ** 2))
    result = train.run(real, Listener(), "test")
    assert result["validation"]["ratings"] == len(truth) > 4000
    assert result["validation"]["rmse"] < mean - 0.05
    logs = events(result["run"], "log")
    assert logs[-1]["rmse"] < logs[0]["rmse"] - 0.5


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT.is_dir() and find_set(known_set("movielens-100k"), ROOT)), reason=f"no ml-100k in {ROOT}"
)
@pytest.mark.parametrize("split", ["random", "user-time"])
def test_the_preset_beats_user_and_item_biases(split, tmp_path, monkeypatch):
    """On the test part, the epoch chosen on the validation part; the biases' dampings are chosen there, too."""
    monkeypatch.undo()
    monkeypatch.setenv("HOTLOOP_DATA", str(ROOT))
    preset = replace(read(f"--config ml-100k --split {split} --run-name real"), results_dir=tmp_path)
    data = rating_sets.load_sets(preset, Listener())
    fit = baselines.choose_biases(data.train, data.validation, *data.scale)
    result = train.run(preset, Listener(), "test")
    assert result["test"]["rmse"] < baselines.biases_rmse(fit, data.test, *data.scale) - 0.001


@pytest.mark.parametrize("best", [False, True])
def test_another_step_is_not_used_in_silence_where_one_is_damaged(options, whole, best, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(options.results_dir / "whole", run)
    newest = max((run / "checkpoints").glob("[0-9]*"))
    (newest / "state" / "_METADATA").write_text("")
    assert saved_run.load_run(run, best=best).step != int(newest.name)
    assert f"warning: skipped step {int(newest.name)}: " in capsys.readouterr().err


def test_a_run_is_used_on_another_kind_of_device_in_the_types_that_it_was_trained_in(
    options, whole, monkeypatch
):
    run = options.results_dir / "whole"
    trained = saved_run.load_run(run)
    elsewhere = {"32.32": "gpu", "16.16": "cpu"}[trained.config.precision]
    monkeypatch.setattr(model, "platform", lambda: elsewhere)
    assert model.resolve_precision("auto") != trained.config.precision
    assert saved_run.load_run(run).job.policy == trained.job.policy

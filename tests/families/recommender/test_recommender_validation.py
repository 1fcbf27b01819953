"""Validation beside the training: exactly the queued weights, the same figures, never a deadlock, never an orphan."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hotloop.data.rating_matrix import build_matrix
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepLast
from hotloop.engine.device import setup
from hotloop.engine.drive import Diverged, Interrupted
from hotloop.engine.run import Run, current_records, read_events
from hotloop.errors import OptionError, RunError
from hotloop.families.recommender import model, saved_run, train, validation
from hotloop.families.recommender.commands_config import FAMILY
from hotloop.families.recommender.config import TrainOptions, UpdateOptions
from hotloop.families.recommender.validation import Validations
from listener import Listener

pytestmark = pytest.mark.usefixtures("signals_heard")

USERS, ITEMS = 40, 30


class Heard(Listener):
    """Knows which process validates, too."""

    @property
    def child(self):
        (found,) = [re.search(r"in process (\d+)", text) for text in self.lines if "in process" in text]
        return int(found[1])


def write_ratings(folder):
    generator = np.random.default_rng(0)
    users, items = np.nonzero(generator.random((USERS, ITEMS)) < 0.5)
    values = generator.integers(1, 6, len(users))
    training = generator.random(len(users)) < 0.8
    for name, chosen in (("train.txt", training), ("valid.txt", ~training)):
        rows = zip(users[chosen] + 7, items[chosen] + 3, values[chosen], strict=True)
        (folder / name).write_text("".join(f"{user}\t{item}\t{value}.0\n" for user, item, value in rows))


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    setup()  # programs are compiled once for all of these runs, in whichever process
    folder = tmp_path_factory.mktemp("beside")
    write_ratings(folder)
    return TrainOptions(
        size=128, batch_size=8, epochs=6, base_learning_rate=-9.5, refeed="none", no_dropout=True, precision="32.32",
        training_data_file=folder / "train.txt", validation_data_file=folder / "valid.txt", results_dir=folder,
        run_name="whole",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(options):
    """A run that validated between its calls: its result."""
    return train.run(options, Heard(), "test")


def recorded(folder):
    """Every validation that counts, without its times; no update twice."""
    events = [event for event in current_records(read_events(folder)) if event["event"] == "validation"]
    found = {
        event["update"]: {k: v for k, v in event.items() if k not in ("time", "elapsed")} for event in events
    }
    assert len(found) == len(events)
    return found


def same_run(folder, result, other):
    """Weights, validations, and which step is the best one are those of another run, bit for bit."""
    assert recorded(folder) == recorded(other["run"])
    assert {**result, "run": ""} == {**other, "run": ""}
    for best in (False, True):
        one, two = (saved_run.load_run(Path(path), best=best) for path in (folder, other["run"]))
        assert one.step == two.step
        for left, right in zip(jax.tree.leaves(one.state), jax.tree.leaves(two.state), strict=True):
            assert np.array_equal(np.asarray(left), np.asarray(right))


def ended(pid, seconds=20):
    """Whether a process is gone, or waits only for somebody to look at its status."""
    for _ in range(seconds * 20):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def until(condition, seconds=60):
    for _ in range(seconds * 50):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_figures_records_and_best_step_are_those_of_a_run_that_waits(options, whole, monkeypatch):
    monkeypatch.setattr(subprocess.Popen, "kill", pytest.fail)  # it ends by itself
    listener = Heard()
    result = train.run(replace(options, run_name="beside", multiprocessing=True), listener, "test")
    assert len(recorded(result["run"])) == 6
    assert result["best_step"] == 10  # neither the first nor the newest: only its figures can have kept it
    same_run(result["run"], result, whole)
    assert not (Path(result["run"]) / "validating").exists()
    assert ended(listener.child)


def test_an_interrupted_run_resumes_to_the_same_bits_and_figures(options, whole):
    stopped = replace(options, run_name="interrupted", multiprocessing=True)

    def stop(text):
        if "in process" in text:
            assert os.getpgid(listener.child) != os.getpgid(0)  # a terminal's Ctrl-C does not reach it
            os.kill(listener.child, signal.SIGSTOP)  # so that there is something left to answer
        if text.startswith("update 15,"):
            os.kill(listener.child, signal.SIGCONT)
            signal.raise_signal(signal.SIGINT)

    listener = Heard(stop)
    with pytest.raises(Interrupted, match="--resume --run-name interrupted"):
        train.run(stopped, listener, "test")
    assert ended(listener.child)
    folder = options.results_dir / "interrupted"
    # Updates 5 and 10; the validation at 15, where the stop was asked for, did not begin.
    assert len(list((folder / "validating").glob("[0-9]*.npz"))) + len(recorded(folder)) == 2
    result = train.run(replace(stopped, resume=True), Heard(), "test")
    same_run(folder, result, whole)
    assert not (folder / "validating").exists()


def test_a_process_that_is_killed_stops_the_training_saved_and_it_can_go_on_without(options, whole):
    victim = replace(options, run_name="victim", multiprocessing=True)

    def kill(text):
        if "in process" in text:
            os.kill(listener.child, signal.SIGSTOP)
        if text.startswith("update 15,"):
            os.kill(listener.child, signal.SIGKILL)

    listener = Heard(kill)
    with pytest.raises(
        RunError, match=r"--multiprocessing: the validating process was killed by SIGKILL.*--resume"
    ):
        train.run(victim, listener, "test")
    folder = options.results_dir / "victim"
    assert not recorded(folder)
    result = train.run(replace(victim, resume=True, multiprocessing=False), Heard(), "test")
    same_run(folder, result, whole)
    assert not (folder / "validating").exists()


@pytest.mark.slow
def test_it_ends_with_a_parent_that_is_killed_and_what_was_queued_is_validated_on_resuming(options, whole):
    """The other process is stopped first: the training goes on until four wait, and not one step further."""
    folder = options.results_dir / "killed"
    words = ["recommender", "train", "--training-data-file", options.training_data_file, "--validation-data-file",
             options.validation_data_file, "--size", 128, "--batch-size", 8, "--epochs", 6, "--base-learning-rate",
             -9.5, "--logdir", options.results_dir, "--run-name", "killed", "--multiprocessing", "--refeed", "none",
             "--no-dropout", "--precision", "32.32"]  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-m", "hotloop", *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in parent.stdout if "in process" in line)
        child = int(line.split()[-1])
        os.kill(child, signal.SIGSTOP)
        queued = folder / "validating"
        assert until(lambda: len(list(queued.glob("[0-9]*.npz"))) == validation.OUTSTANDING)
        assert until(lambda: any(e["event"] == "log" and e["update"] == 25 for e in read_events(folder)))
        time.sleep(0.3)
        assert parent.poll() is None  # it waits
        assert [path.name for path in sorted(queued.glob("[0-9]*"))] == [
            f"{n:08d}.npz" for n in (5, 10, 15, 20)
        ]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    os.kill(child, signal.SIGCONT)
    assert ended(child)
    result = train.run(replace(options, run_name="killed", resume=True), Heard(), "test")
    same_run(folder, result, whole)


# A process that answers as a test wants it to, instead of the real one: no jax, no waiting.

FAKE = """#!{python}
import json, os, sys, time
from pathlib import Path
sys.argv = sys.argv[2:]
run = Path(sys.argv[1])
{body}
"""
ANSWER = """
for line in sys.stdin:
    job = json.loads(line)
    while not (run / "go").exists(): time.sleep(0.01)
    rmse = float(job["step"]) if (run / "worse").exists() else 1.0
    print(json.dumps({**job, "figures": {"rmse": rmse, "mae": 0.5}}), flush=True)
"""


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """A run, its answers, and how to start a process with a made-up body."""
    ids = np.arange(2)
    truth = build_matrix(ids, ids, np.ones(2), user_ids=ids, item_ids=ids, warn=print)
    console = Heard()
    plan = SimpleNamespace(updates_per_epoch=10)
    script = tmp_path / "python"
    monkeypatch.setattr(validation, "sys", SimpleNamespace(executable=str(script)))
    with Run(tmp_path / "run", {}, command="test", environment={}) as run:

        def start(body):
            script.write_text(FAKE.format(python=sys.executable, body=body))
            script.chmod(0o755)
            return validation.ProcessValidation(run, plan, answers, truth, console)

        answers = Validations()
        yield SimpleNamespace(run=run, answers=answers, start=start, console=console, path=run.path)


def state(step):
    return {"update": np.int32(step), "params": {"w": jnp.full(3, step, jnp.float32)}}


def test_answers_are_recorded_for_the_update_whose_weights_they_are_of(stage):
    (stage.path / "go").touch()
    with stage.start(ANSWER) as other:
        for step in (10, 25, 40):
            assert other(state(step)) == {}
        other.finish()
    events = [event for event in read_events(stage.path) if event["event"] == "validation"]
    assert [(event["update"], event["epoch"]) for event in events] == [(10, 1.0), (25, 2.5), (40, 4.0)]
    assert all(event["validation_mae"] == 0.5 for event in events)
    assert stage.answers.figures[25] == {"validation_rmse": 1.0, "validation_mae": 0.5}
    assert not (stage.path / "validating").exists()
    assert "waiting for" in " ".join(stage.console.lines) or len(stage.answers.figures) == 3


def test_the_training_waits_when_four_are_outstanding_and_none_is_skipped(stage):
    with stage.start(ANSWER) as other:
        for step in range(1, 5):
            other(state(step))
        fifth = threading.Thread(target=other, args=(state(5),))
        fifth.start()
        fifth.join(0.3)
        assert fifth.is_alive() and len(list((stage.path / "validating").glob("[0-9]*"))) == 4
        (stage.path / "go").touch()
        fifth.join(20)
        assert not fifth.is_alive()
        other.finish()
    assert list(stage.answers.figures) == [1, 2, 3, 4, 5]


DEATHS = [
    (
        "print('first', file=sys.stderr); print('last words', file=sys.stderr); sys.exit(3)",
        r"status 3 \(last words\)",
    ),
    ("print('no JSON', flush=True); time.sleep(60)", "could not be recorded"),
    ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ("os.close(1); time.sleep(60)", "killed by SIGKILL"),
]


@pytest.mark.parametrize(("body", "reason"), DEATHS)
def test_a_process_that_fails_is_an_error_in_one_line_and_nobody_waits_for_ever(
    stage, body, reason, monkeypatch
):
    monkeypatch.setattr(validation, "_PATIENCE_SECONDS", 0.2)
    with pytest.raises(RunError, match=reason) as error, stage.start(body) as other:
        for step in range(1, 8):
            other(state(step))
        assert stage.answers.enough()  # the training stops, with everything saved
        other.finish()
    assert "\n" not in str(error.value)
    assert other.process.poll() is not None
    assert validation.find_left_over(stage.path, 100, {})[0] == 1  # what was queued is still there


def test_leaving_waits_for_nothing_but_after_a_divergence_for_the_answers(stage, monkeypatch):
    monkeypatch.setattr(validation, "_PATIENCE_SECONDS", 0.2)
    with pytest.raises(KeyboardInterrupt), stage.start(ANSWER) as other:
        other(state(1))
        raise KeyboardInterrupt
    assert other.process.poll() is not None and stage.answers.waiting == (1,)
    stage.answers.waiting = ()
    (stage.path / "go").touch()
    with pytest.raises(Diverged), stage.start("time.sleep(0.3)\n" + ANSWER) as other:
        other(state(2))
        raise Diverged("loss is nan")
    assert stage.answers.figures[2]["validation_rmse"] == 1.0


@pytest.mark.slow
def test_patience_acts_when_the_answers_come_and_the_best_is_kept(options, tmp_path, monkeypatch):
    script = tmp_path / "python"
    worse = ANSWER.replace('(run / "go").exists()', "True").replace('(run / "worse").exists()', "True")
    script.write_text(FAKE.format(python=sys.executable, body=worse))
    script.chmod(0o755)
    monkeypatch.setattr(validation, "sys", SimpleNamespace(executable=str(script)))
    impatient = replace(
        options, results_dir=tmp_path, run_name="impatient", epochs=400, patience=2, multiprocessing=True,
        base_learning_rate=-16.0,
    )  # fmt: skip
    result = train.run(impatient, Heard(), "test")
    assert result["best_step"] == 5
    last = saved_run.load_run(tmp_path / "impatient").step
    assert 15 <= last < 2000
    assert saved_run.load_run(tmp_path / "impatient", best=True).step == 5
    again = train.run(replace(impatient, resume=True), Heard(), "test")
    assert {**again, "run": ""} == {**result, "run": ""}
    assert saved_run.load_run(tmp_path / "impatient").step == last  # had enough before, has enough now


@pytest.mark.parametrize("body", ["import sys; sys.stdin.read()", None])
def test_the_real_process_ends_with_its_input_or_in_one_line(body, tmp_path):
    words = [sys.executable, "-m", "hotloop.families.recommender.validation", str(tmp_path), "cpu"]
    asked = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, said = (
        asked.communicate("" if body else None, timeout=60)
        if body
        else (asked.stdout.read(), asked.stderr.read())
    )
    asked.wait(60)
    for stream in (asked.stdin, asked.stdout, asked.stderr):
        stream.close()
    assert not out
    assert asked.returncode == (0 if body else 1)
    assert body or re.fullmatch(r".*no config\.json there.*\n", said)


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_come_back_with_the_same_bits_and_without_pickle(kind, tmp_path):
    mode, half = ("32.32", "float16") if kind is np.float32 else ("16.16", np.dtype(kind).name)
    job = model.Job(UpdateOptions(size=128, batch_size=8, precision=mode, half=half), 9)
    shapes = jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))["params"]
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), leaf.dtype), shapes)
    assert jax.tree.leaves(params)[0].dtype == kind
    validation.write_weights(tmp_path / "weights.npz", params)
    found = validation.read_weights(tmp_path / "weights.npz", job)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert left.dtype == right.dtype and left.tobytes() == np.asarray(right).tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["weights.npz"]


@pytest.mark.parametrize(
    ("platform", "devices", "used", "visible", "expected"),
    [
        ("cpu", 4, 1, None, {}),
        ("gpu", 1, 1, None, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        ("gpu", 1, 1, "3", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "3"}),
        ("gpu", 2, 1, None, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "1"}),
        ("gpu", 2, 1, "5, 7", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "7"}),
        ("gpu", 4, 2, None, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "2"}),
        ("gpu", 2, 2, None, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_a_gpu_that_no_replica_uses_is_taken_where_there_is_one(platform, devices, used, visible, expected):
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert validation.process_environment(platform, devices, {"HOME": "/", **given}, used) == {
        "HOME": "/",
        **given,
        **expected,
    }


def test_a_tpu_cannot_be_shared(options, monkeypatch):
    monkeypatch.setattr(train, "platform", lambda: "tpu")
    with pytest.raises(OptionError, match="--multiprocessing: a TPU"):
        train.run(replace(options, run_name="tpu", multiprocessing=True), Heard(), "test")
    assert not (options.results_dir / "tpu").exists()


def test_checkpoints_stay_while_they_wait_and_then_only_the_best(tmp_path):
    answers = Validations()
    like = {"w": jnp.zeros(2)}
    with Checkpoints(tmp_path, answers | KeepLast(1), family=FAMILY) as checkpoints:
        for step in range(1, 6):
            answers.waiting += (step,) if step < 4 else ()
            checkpoints.save(
                step, {"w": jnp.full(2, float(step))}, position={"at": step}, metrics={"loss": step}
            )
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3, 5] and checkpoints.best() is None
        answers.figures = {step: {"validation_rmse": rmse} for step, rmse in ((1, 0.9), (2, 0.7), (3, 0.8))}
        answers.waiting = ()
        assert checkpoints.best() == 2
        answers.mark_best(checkpoints, like)
        assert checkpoints.steps() == [2, 5]
        found = checkpoints.restore(like, 2)
        assert (found.metrics, found.position) == ({"loss": 2, "validation_rmse": 0.7}, {"at": 2})
        assert found.state["w"].tolist() == [2, 2]
    assert Checkpoints(tmp_path, saved_run.BEST["ratings"], family=FAMILY).best() == 2


@pytest.mark.parametrize(
    ("values", "patience", "expected"),
    [
        ([], 1, False),
        ([3.0], 1, False),
        ([3.0, 2.0, 2.5], 2, False),
        ([3.0, 2.0, 2.5, 2.2], 2, True),
        ([2.0, 2.0], 1, True),
        ([3.0, 2.5, 2.4, 2.3], 1, False),
        ([float("nan"), None], 2, True),
        ([2.0, float("nan")], 1, True),
        ([2.0, 3.0, 3.0, 3.0], None, False),
    ],
)
def test_enough_is_so_many_validations_without_a_better_one(values, patience, expected):
    answers = Validations(patience)
    for step, value in reversed(list(enumerate(values))):
        answers.figures[step] = {"validation_rmse": value}
    assert answers.enough() is expected


def test_what_an_interrupted_run_left_is_asked_again_unless_it_is_answered_or_will_come_again(tmp_path):
    (tmp_path / "validating").mkdir()
    for step in (5, 10, 15, 20):
        validation.weights_path(tmp_path, step).touch()
    (tmp_path / "validating" / ".00000025.npz.123.part").touch()
    assert validation.find_left_over(tmp_path, 15, {5: {}}) == [10, 15]
    assert sorted(path.name for path in (tmp_path / "validating").iterdir()) == [
        "00000010.npz",
        "00000015.npz",
    ]
    shutil.rmtree(tmp_path / "validating")
    assert validation.find_left_over(tmp_path, 15, {}) == []

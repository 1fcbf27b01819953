"""Training with the Estimator: the same weights however it is cut, nothing traced twice, hooks, resume, inputs."""

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, data, model_fn, same, small, traces, weights

from hotloop import Arrays, EvalSpec, Hook, ModelSpec, TrainSpec, train_and_evaluate
from hotloop.engine import drive
from hotloop.engine.batch_sources import Streamed
from hotloop.engine.feed import Resident
from hotloop.engine.interrupt import Interrupted, StopRequest
from hotloop.engine.loop import Program
from hotloop.engine.run import read_events
from hotloop.errors import RunError
from hotloop.families.estimator import training
from undisturbed import assert_same_run


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: Any) -> Any:
    """An estimator after 100 updates in one go."""
    return small(tmp_path_factory.mktemp("hundred")).train(data, steps=100)


def test_restarts_and_any_length_of_call_give_the_same_weights(hundred: Any, tmp_path: Path) -> None:
    for _ in range(4):
        small(tmp_path / "restarts").train(data, steps=25)
    one_by_one = small(tmp_path / "one", iterations_per_call=1).train(data, max_steps=100)
    odd = small(tmp_path / "odd", iterations_per_call=37, log_steps=9).train(data, max_steps=100)
    expected = weights(hundred)
    assert small(tmp_path / "restarts").latest_checkpoint() == 100
    for other in (small(tmp_path / "restarts"), one_by_one, odd):
        assert same(weights(other), expected)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_replicas_and_accumulation_change_nothing_but_rounding(hundred: Any, tmp_path: Path) -> None:
    split = small(tmp_path / "split", replicas=2, accumulation=4).train(data, max_steps=100)
    for name, expected in weights(hundred).items():
        np.testing.assert_allclose(weights(split)[name], expected, rtol=0, atol=2e-6)


def test_max_steps_finishes_rather_than_repeats(tmp_path: Path) -> None:
    lines: list[str] = []
    estimator = small(tmp_path).train(data, max_steps=20)
    before = weights(estimator)
    again = small(tmp_path, voice={"say": lines.append})
    again.train(data, max_steps=20)
    assert same(weights(again), before)
    assert lines == [f"nothing to train: {tmp_path} holds 20 updates, 20 were asked for"]
    assert again.train(data, steps=5).latest_checkpoint() == 25


def test_the_first_weights_are_compiled_once(tmp_path: Path) -> None:
    drawn = []

    def init(key: Any) -> Any:
        drawn.append(key)
        return jnp.zeros((5, 2))

    def model(features: Any) -> ModelSpec:
        return ModelSpec(init=init, apply=lambda weights, x: x @ weights, optimizer=optax.sgd(0.1))

    estimator = small(tmp_path, model).train(data, steps=1)
    estimator.evaluate(data)
    list(estimator.predict(lambda: X))
    seen = len(drawn)
    estimator.train(data, steps=1)
    estimator.evaluate(data)
    list(estimator.predict(lambda: X))
    assert len(drawn) == seen


@pytest.mark.parametrize("given", [data, lambda: [(X[:16], Y[:16])] * 200])
def test_a_program_may_be_compiled_while_the_first_weights_are_drawn(
    given: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    plain = small(tmp_path / "plain").train(given, steps=30)
    monkeypatch.setattr(training, "compiles_ahead", lambda mesh: mesh is None)
    estimator = small(tmp_path / "ahead")
    traces[0] = 0
    estimator.train(given, steps=20)
    assert traces[0] <= 3
    estimator.train(given, steps=10)  # goes on, with what is there
    assert same(weights(estimator), weights(plain))
    records = read_events(tmp_path / "ahead")
    assert next(each for each in records if each["event"] == "compile")["ahead"]
    counts = [
        sum(each["event"] == "compile" for each in read_events(tmp_path / name))
        for name in ("plain", "ahead")
    ]
    assert counts[0] == counts[1]
    (first,) = [each for each in records if each["event"] == "first_update"]
    spent = first["lower_seconds"] + first["compile_seconds"] + first["call_seconds"]
    assert sum(first["parts"].values()) + spent < first["seconds"] + 1e-3


def test_weights_that_are_given_are_read_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: Any
) -> None:
    old = small(tmp_path / "old").train(data, steps=10)
    monkeypatch.setattr(training, "compiles_ahead", lambda mesh: mesh is None)
    new = small(tmp_path / "new", voice={"warm_start_from": tmp_path / "old"}).train(data, steps=10)
    assert all("ahead" not in each for each in read_events(tmp_path / "new"))
    assert not same(weights(new), weights(old))


def test_a_second_call_with_input_of_the_same_form_traces_nothing(tmp_path: Path) -> None:
    estimator = small(tmp_path)
    traces[0] = 0
    estimator.train(data, steps=20)
    assert traces[0] <= 3  # the forms, the update, its gradient's forward pass
    estimator.evaluate(data)
    list(estimator.predict(lambda: X))
    seen = traces[0]
    estimator.train(lambda: (X[::-1].copy(), Y[::-1].copy()), steps=20)
    estimator.evaluate(lambda: (X + 1, Y))
    list(estimator.predict(lambda: X + 1))
    assert traces[0] == seen


def test_hooks_see_every_update_of_every_call(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Recorder(Hook):
        def begin(self, run: Any) -> None:
            seen.append(("begin", run.step, run.target))

        def after_call(self, run: Any, first: int, metrics: Any) -> None:
            seen.append((first, run.step, sorted(metrics), len(metrics["loss"])))

        def on_checkpoint(self, run: Any, step: int) -> None:
            seen.append(("checkpoint", step))

        def end(self, run: Any) -> None:
            seen.append(("end", run.step))

    small(tmp_path, checkpoint_steps=15).train(data, steps=25, hooks=[Recorder()])
    names = ["accuracy", "loss"]
    calls = [
        (0, 10, names, 10),
        (10, 15, names, 5),
        ("checkpoint", 15),
        (15, 20, names, 5),
        (20, 25, names, 5),
    ]
    assert seen == [("begin", 0, 25), *calls, ("checkpoint", 25), ("end", 25)]


def test_a_hook_may_end_the_training(tmp_path: Path) -> None:
    class Enough(Hook):
        def after_call(self, run: Any, first: int, metrics: Any) -> None:
            run.stop()

    # the hook hears of the first call when the second is under way
    assert small(tmp_path).train(data, steps=50, hooks=[Enough()]).latest_checkpoint() == 20


def test_events_by_the_clock_follow_whole_calls(tmp_path: Path) -> None:
    small(tmp_path, log_steps=None, log_seconds=1e-9, checkpoint_seconds=1e-9, keep_last=99).train(
        data, steps=25
    )
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [e["update"] for e in events if e["event"] == "log"] == [10, 20, 25]
    assert [e["update"] for e in events if e["event"] == "checkpoint"] == [10, 20, 25]


def test_summaries_are_means_since_the_last_one(tmp_path: Path) -> None:
    losses: list[float] = []

    class Losses(Hook):
        def after_call(self, run: Any, first: int, metrics: Any) -> None:
            losses.extend(metrics["loss"])

    small(tmp_path, summary_steps=15).train(data, steps=50, hooks=[Losses()])
    summaries = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "summary"]
    assert [e["update"] for e in summaries] == [20, 40]
    assert summaries[1]["loss"] == pytest.approx(np.mean(losses[20:40]), rel=1e-6)


def test_train_and_evaluate_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    estimator = small(tmp_path, checkpoint_steps=10, keep_last=1, keep_best="accuracy")
    result = train_and_evaluate(estimator, TrainSpec(data, 40), EvalSpec(data, name="held_out"))
    validations = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "validation"]
    assert [e["update"] for e in validations] == [10, 20, 30, 40]
    assert result["global_step"] == 40 and result["samples"] == 200
    assert result["accuracy"] == validations[-1]["accuracy"] == estimator.evaluate(data)["accuracy"]
    lines = (tmp_path / "eval_held_out" / "results.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert written[-1] == result
    assert [(e["global_step"], e["accuracy"]) for e in written] == [
        (e["update"], e["accuracy"]) for e in validations
    ]
    best = max(validations, key=lambda e: (e["accuracy"], e["update"]))["update"]
    kept = {int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*")}
    assert kept == {best, 40}


def batches() -> Any:
    return ((X[i : i + 16], Y[i : i + 16]) for i in range(0, 192, 16))


def test_an_iterable_ends_the_training_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    one_program = {"iterations_per_call": 1}  # streamed calls of other lengths are compiled anew
    whole = small(tmp_path / "whole", **one_program).train(batches)
    assert whole.latest_checkpoint() == 12
    parts = small(tmp_path / "parts", **one_program).train(batches, steps=7).train(batches)
    assert parts.latest_checkpoint() == 12
    assert same(weights(parts), weights(whole))
    assert parts.train(batches).latest_checkpoint() == 24  # the next pass


def test_a_list_a_loader_and_a_generator_are_the_same_input(tmp_path: Path) -> None:
    class Loader:  # as torch's: re-iterable, batches are lists
        def __iter__(self) -> Any:
            return ([x, y] for x, y in batches())

        def __len__(self) -> int:
            return 12

    whole = weights(small(tmp_path / "generator").train(batches))
    assert same(weights(small(tmp_path / "loader").train(lambda: Loader())), whole)
    named = [{"features": x, "labels": y} for x, y in batches()]
    assert same(weights(small(tmp_path / "list").train(named)), whole)


def test_torch_loaders_are_taken_as_they_are(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.tensor(X[:192]), torch.tensor(Y[:192]))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    estimator = small(tmp_path / "torch").train(lambda: loader)
    assert same(weights(estimator), weights(small(tmp_path / "plain").train(batches)))


def test_a_feed_of_the_engine_is_used_as_it_is(hundred: Any, tmp_path: Path) -> None:
    feed = Resident({"features": X, "labels": Y}, 16, seed=1)
    assert same(weights(small(tmp_path).train(lambda: feed, steps=100)), weights(hundred))


@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_a_feed_that_is_made_anew_traces_nothing(kind: Any, tmp_path: Path) -> None:
    def feed(seed: int) -> Any:
        return kind({"features": X * seed, "labels": Y}, 16, seed=seed)

    estimator = small(tmp_path, iterations_per_call=1).train(feed(1), steps=2)
    seen = traces[0]
    estimator.train(lambda: feed(2), steps=2)
    assert traces[0] == seen
    estimator.train(Resident({"features": X[:100], "labels": Y[:100]}, 16), steps=1)  # of another form
    assert traces[0] > seen


def test_arrays_may_be_augmented_on_the_device(tmp_path: Path) -> None:
    bytes_ = np.round(40 * X).astype(np.int8)

    def widened(batch: Any, key: Any) -> Any:
        return {**batch, "features": batch["features"].astype("float32") / 40}

    small(tmp_path).train(lambda: Arrays(bytes_, Y, transform=widened), steps=60)
    found = small(tmp_path).evaluate(lambda: Arrays(bytes_, Y, transform=widened))
    assert found["accuracy"] > 0.9 and found["samples"] == 200


def test_training_goes_on_with_other_data_and_says_so(tmp_path: Path) -> None:
    small(tmp_path).train(data, steps=10)
    small(tmp_path).train(lambda: (X[:100], Y[:100]), steps=10)
    told = [e["message"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert told == ["goes on with another input: the checkpoint was made with samples 200, this run has 100"]


def test_a_new_model_may_start_from_the_weights_of_another(hundred: Any, tmp_path: Path) -> None:
    warm = small(tmp_path, params={"rate": 1e-30}, voice={"warm_start_from": hundred.model_dir})
    warm.train(data, steps=1)
    for name, expected in weights(hundred).items():
        np.testing.assert_allclose(weights(warm)[name], expected, rtol=1e-6)


@pytest.mark.parametrize("formats", [{"precision": "16.32"}, {"precision": "16.16"}])
def test_half_precision_learns_too(formats: Any, tmp_path: Path) -> None:
    estimator = small(tmp_path, **formats).train(data, steps=100)
    assert estimator.evaluate(data)["accuracy"] > 0.9


def test_float16_overflows_are_skipped_and_the_scale_halved(tmp_path: Path) -> None:
    estimator = small(tmp_path, precision="16.32", half="float16", loss_scale="auto").train(data, steps=100)
    assert estimator.evaluate(data)["accuracy"] > 0.9


def test_the_speed_of_a_training_is_what_its_logs_say(tmp_path: Path) -> None:
    estimator = small(tmp_path, log_steps=20)
    estimator.train(data, max_steps=20)
    estimator.train(data, max_steps=60)
    *_, first, second = (log["throughput"] for log in read_events(tmp_path) if log["event"] == "log")
    seconds = 20 * 16 / first + 20 * 16 / second
    took = estimator.last_run
    assert (took["updates"], took["training_seconds"]) == (40, pytest.approx(seconds))
    assert took["images_per_second"] == pytest.approx(40 * 16 / seconds)


@pytest.mark.slow
def test_modules_of_flax_train_evaluate_and_resume(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any):
            self.first = nnx.Linear(5, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    def model(params: Any) -> ModelSpec:
        return ModelSpec(
            module=lambda rngs: Net(rngs), metrics={"accuracy": small_right}, optimizer=optax.adam(0.01)
        )

    whole = small(tmp_path / "whole", model).train(data, steps=60)
    parts = small(tmp_path / "parts", model).train(data, steps=25)
    parts = small(tmp_path / "parts", model).train(data, max_steps=60)
    assert same(weights(parts), weights(whole))
    found = whole.evaluate(data)
    assert found["accuracy"] > 0.9
    assert whole.evaluate(data) == found  # neither dropout nor the averages move


def small_right(outputs: Any, labels: Any) -> Any:
    return outputs.argmax(-1) == labels


PROGRAM = """
import sys; sys.path.insert(0, {tests!r})
from small import data, small
from hotloop import Hook
import time
class Wait(Hook):
    def after_call(self, run, first, metrics):
        print(run.step, flush=True); time.sleep({pause})
small({folder!r}, checkpoint_steps=10).train(data, max_steps=100, hooks=[Wait()])
"""


def start(folder: Path, pause: float) -> Any:
    text = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), pause=pause)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def test_a_killed_process_loses_no_more_than_the_call_in_flight(hundred: Any, tmp_path: Path) -> None:
    process = start(tmp_path, 0.2)
    assert process.stdout is not None
    reached = [next(process.stdout) for _ in range(4)]  # four calls of ten
    with pytest.raises(RunError, match=f"in use by process {process.pid}"):
        small(tmp_path).train(data, max_steps=100)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    estimator = small(tmp_path)
    assert int(reached[-1]) - 10 <= (estimator.latest_checkpoint() or 0) <= int(reached[-1]) + 10
    estimator.train(data, max_steps=100)
    # Two processes on a GPU may choose other kernels.
    exactness = 0 if jax.default_backend() == "cpu" else 1e-6
    for name, wanted in weights(hundred).items():
        np.testing.assert_allclose(weights(estimator)[name], wanted, rtol=exactness, atol=exactness)


@pytest.mark.parametrize("update", [pytest.param(7, marks=pytest.mark.slow), 30, 40])
def test_a_stop_anywhere_leaves_the_records_and_checkpoints_of_an_undisturbed_training(
    update: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between calls, where a validation is due, and after the last update; summaries are open across calls."""
    monkeypatch.setattr(drive, "TARGET_SECONDS", 0)  # one update at a time

    def train(folder: Path, *hooks: Hook) -> None:
        estimator = small(folder, checkpoint_steps=15, summary_steps=13, log_steps=8)
        train_and_evaluate(estimator, TrainSpec(data, 40, hooks), EvalSpec(data))

    class Asked(StopRequest):
        """A request that is made as soon as that update is on its way."""

        def __call__(self, program: Program, state: Any, first: int, count: int, *following: int) -> Any:
            self.number = signal.SIGINT if first + count >= update else None
            return call(program, state, first, count, *following)

    call, asked = Program.__call__, Asked()
    train(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("hotloop.engine.drive.note_stops", lambda: nullcontext(asked))
        patch.setattr(Program, "__call__", lambda *words: asked(*words))
        train(tmp_path / "run")
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    train(tmp_path / "run")  # and is finished
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_report_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    small(tmp_path / "model", report=tmp_path / "report").train(data, steps=20)
    assert (tmp_path / "report" / "training" / "README.txt").exists()


def test_any_function_with_other_arguments_is_refused_by_name(tmp_path: Path) -> None:
    def strange(features: Any, learning_rate: float) -> Any:
        return model_fn(features, None, "train", {})

    with pytest.raises(
        Exception, match="model_fn asks for learning_rate: it can be given features, labels, mode"
    ):
        small(tmp_path, strange).train(data, steps=1)


def batch_normed(params: Any) -> ModelSpec:
    """Two layers with a batch norm between them; its gradients are small, and their squares smaller."""

    def init(key: Any) -> Any:
        one, two = jax.random.split(key)
        return {
            "first": 30 * jax.random.normal(one, (5, 32)),
            "scale": jnp.ones(32),
            "offset": jnp.zeros(32),
            "last": 0.1 * jax.random.normal(two, (32, 2)),
        }

    def apply(weights: Any, x: Any, *, train: bool, keys: Any) -> Any:
        x = (x @ weights["first"]).astype(jnp.float32)
        x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3) * weights["scale"] + weights["offset"]
        return jax.nn.relu(x).astype(weights["last"].dtype) @ weights["last"]

    return ModelSpec(init=init, apply=apply, optimizer=getattr(optax, params["rule"])(0.003))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adam", "rmsprop", "lamb"])
def test_rules_that_divide_by_squares_train_in_float16_as_in_float32(rule: str, tmp_path: Path) -> None:
    losses = {}
    for precision in ("32.32", "16.16"):
        formats = {"precision": precision, "half": "float16", "iterations_per_call": 300, "batch_size": 100}
        estimator = small(tmp_path / precision, batch_normed, {"rule": rule}, **formats)
        losses[precision] = estimator.train(data, steps=300).evaluate(data)["loss"]
    assert losses["16.16"] == pytest.approx(losses["32.32"], rel=0.1, abs=0.003), losses


def test_another_familys_folder_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    """Without checkpoints, too, and where as many updates are there as were asked for."""
    before = '{"model": "toy_model", "precision": "32.32"}'
    (tmp_path / "config.json").write_text(before)
    estimator = small(tmp_path)
    with pytest.raises(
        RunError, match=r"its config\.json is none of an estimator's run; choose another model_dir$"
    ):
        estimator.train(data, max_steps=2)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == before

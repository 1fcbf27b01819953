"""Estimator: train, evaluate and predict with one model function, for any model.

The verbs are those of tf.estimator; what is built for them, and kept, is in parts.py. Weights live in the checkpoints
of the model_dir.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from hotloop.engine.batch_sources import common_length, path_name
from hotloop.engine.drive import Diverged, newest
from hotloop.engine.evaluate import pad_batch
from hotloop.engine.progress import Show, compiling, hide, show
from hotloop.engine.records import append_line
from hotloop.engine.sinks import console_line
from hotloop.errors import HotloopError
from hotloop.families.estimator import step, training
from hotloop.families.estimator.checks import (
    check_best,
    check_checkpoint,
    check_estimator,
    check_hooks,
    check_name,
    check_specs,
    check_steps,
)
from hotloop.families.estimator.config import EvalSpec, Mode, RunConfig, TrainSpec
from hotloop.families.estimator.hooks import Hook
from hotloop.families.estimator.inputs import Source, check_batch
from hotloop.families.estimator.model import BuiltModel
from hotloop.families.estimator.programs import Programs
from hotloop.families.estimator.training import CheckpointEvaluation, SpeedMeter
from hotloop.options import to_jsonable


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _warn(text: str) -> None:
    if text.startswith("warning:"):
        _to_stderr(text)


class Estimator:
    """A model, its folder, and what can be done with it.

    `say` takes each line for people (none: standard error), `progress` makes a bar from a description and a total
    (none: one on standard error where that is a terminal); `quiet` is neither, but for warnings and the name of a
    temporary model_dir. `warm_start_from` is another model_dir, whose newest weights a new model starts with.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        model_dir: str | Path | None = None,
        warm_start_from: str | Path | None = None,
        say: Callable[[str], None] | None = None,
        progress: Show | None = None,
        quiet: bool = False,
    ):
        check_estimator(
            model_fn, config, params, quiet,
            model_dir=model_dir, warm_start_from=warm_start_from, say=say, progress=progress,
        )  # fmt: skip
        self.config = config or RunConfig()
        self.params = dict(params or {})
        chosen = model_dir or self.config.model_dir
        self.model_dir = Path(chosen or tempfile.mkdtemp(prefix="hotloop-estimator-"))
        self.last_run: dict[str, Any] = {}
        """After `train`: updates, images_per_second, training_seconds, lower_seconds, compile_seconds."""
        self._say = say or (_warn if quiet else _to_stderr)
        self._progress = progress or (hide if quiet else partial(show, say=self._say))
        self.parts = Programs(model_fn, self.config, self.params, self.model_dir, self._say, self._progress)
        self._warm_start_from = Path(warm_start_from) if warm_start_from else None
        if not chosen:
            (say or _to_stderr)(
                f"model_dir: {self.model_dir} (a temporary one: give model_dir to keep the model)"
            )

    def train(
        self,
        input_fn: Any,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> "Estimator":
        """Make `steps` more weight updates, or as many as are missing to `max_steps` in all; saved at the end.

        It goes on from the newest checkpoint of the model_dir. Where the input is an iterable of batches, training
        also ends with it.
        """
        self.train_validated(input_fn, *check_steps(steps, max_steps), hooks, None)
        return self

    def train_validated(
        self,
        input_fn: Any,
        steps: int | None,
        max_steps: int | None,
        hooks: Sequence[Hook],
        validate: CheckpointEvaluation | None,
    ) -> None:
        """`train`, with an evaluation of the state before each checkpoint."""
        hooks = check_hooks(hooks)
        if max_steps is not None and self._has(max_steps):
            return
        source = self.parts.input(input_fn, Mode.TRAIN)
        step.check_split(source.batch_size, self.config)
        trained = self.parts.training(source)
        if validate is None:
            self._check_best(trained.model, source)
        source = source.check_labels(trained.model.classes)
        work = self._work(hooks, validate, source.batch_size)
        training.find_target(source, 0, steps, max_steps)  # refuses what has no end, while nothing is written
        state = self._first_state(work.fresh(trained))
        with work.opened():
            resumed = newest(work.checkpoints, state)
            done = resumed.step if resumed else 0
            target = training.find_target(source, done, steps, max_steps)
            if passed := source.passed_over(done):
                self._say(
                    f"the first {passed} batches of the input are passed over: they were trained on before"
                )
            with source.feed(self.config, trained.mesh, done) as feed:
                program = self.parts.program(source, trained, feed)
                plan = training.make_plan(self.config, source, target, validate is not None)
                try:
                    self.last_run = work.run(program, plan, state, resumed)
                except Diverged as error:
                    if error.update and source.samples:  # a transform may have made a label that is no class
                        check_batch(trained.model.classes, feed, error.update - 1)
                    raise

    def _first_state(self, fresh: step.State) -> step.State:
        """What a new model begins with; weights that do not fit the model are refused while nothing is written."""
        with self.parts.checkpoints() as there:
            if self.model_dir.is_dir() and there.begun():
                there.check_fits(fresh)
                return fresh
        return self.parts.warmed(fresh, self._warm_start_from) if self._warm_start_from else fresh

    def _check_best(self, model: BuiltModel, source: Source) -> None:
        """A model_fn may measure more where it evaluates than where it trains."""
        if self.config.best and self.config.best[0] not in ("loss", *model.spec.metrics):
            check_best(self.config, self.parts.model(Mode.EVALUATE, source).spec.metrics)

    def _has(self, updates: int) -> bool:
        done = self.latest_checkpoint() or 0
        if done == updates and not training.is_closed(self.model_dir):
            return False  # a stop or a kill left something to do after the last update
        if done >= updates:
            self._say(
                f"nothing to train: {self.model_dir} holds {done:,} updates, {updates:,} were asked for"
            )
        return done >= updates

    def evaluate(
        self, input_fn: Any, steps: int | None = None, name: str | None = None, checkpoint: int | None = None
    ) -> dict[str, Any]:
        """The mean loss and metrics over every sample of the input, or over its first `steps` batches.

        By the newest checkpoint, or the one of update `checkpoint`. The result is also a line of `eval/results.jsonl`
        (`eval_NAME` for a `name`).
        """
        result = self.measure(input_fn, steps, name, checkpoint)
        self.announce(result, name)
        return result

    def measure(
        self, input_fn: Any, steps: int | None = None, name: str | None = None, checkpoint: int | None = None
    ) -> dict[str, Any]:
        """`evaluate`, for a caller who has words of its own for the result."""
        steps, _ = check_steps(steps)
        checkpoint = check_checkpoint(checkpoint)
        check_name(name)
        source, model = self.parts.served(input_fn, Mode.EVALUATE)
        at, state = self.parts.restored(model, checkpoint)
        return self.noted({**self.parts.measure(source, model, steps)(state), "global_step": at}, name)

    def noted(self, result: dict[str, Any], name: str | None) -> dict[str, Any]:
        """Keep a result of an evaluation as a line of its file."""
        append_line(self.eval_dir(name) / "results.jsonl", result)
        return result

    def announce(self, result: dict[str, Any], name: str | None) -> None:
        """A line for people about a result of an evaluation."""
        about = {"event": f"evaluation {name}" if name else "evaluation", "update": result["global_step"]}
        figures = {figure: value for figure, value in result.items() if figure != "global_step"}
        self._say(console_line(about | figures))

    def predict(self, input_fn: Any, checkpoint: int | None = None) -> Iterator[Any]:
        """A row for each sample of the input, in order, as it is made: what the model's `predictions` gives for it.

        That is a numpy array or number, or a dict of them where `predictions` gives a dict; without `predictions` it
        is the model's output.
        """
        checkpoint = check_checkpoint(checkpoint)
        source, model = self.parts.served(input_fn, Mode.PREDICT)
        at, state = self.parts.restored(model, checkpoint)
        self._say(f"predictions of update {at:,} of {self.model_dir}")
        return _predicted(self.parts.rows(model), state, source, self._progress)

    def export(self, path: str | Path) -> NoReturn:
        """Not yet: it comes with serving."""
        raise HotloopError(f"export to {path}: exported models come with serving, which is not there yet")

    def latest_checkpoint(self) -> int | None:
        """The number of updates of the newest whole checkpoint; None where there is none."""
        with self.parts.checkpoints() as checkpoints:
            return max(checkpoints.steps(), default=None)

    def eval_dir(self, name: str | None = None) -> Path:
        """Where results of evaluations go."""
        return self.model_dir / (f"eval_{name}" if name else "eval")

    def weights(self, input_fn: Any, checkpoint: int | None = None) -> dict[str, Any]:
        """The weights of the newest checkpoint by name; the input only tells the shapes of the model."""
        checkpoint = check_checkpoint(checkpoint)
        _, model = self.parts.served(input_fn, Mode.PREDICT)
        _, state = self.parts.restored(model, checkpoint)
        return {
            path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state["weights"])
        }

    def _work(
        self, hooks: Sequence[Hook], validate: CheckpointEvaluation | None, batch_size: int
    ) -> training.TrainCall:
        model_fn = self.parts.model_fn
        name = getattr(model_fn, "__qualname__", type(model_fn).__name__)
        params = {each: describe_param(value) for each, value in self.params.items()}
        about = {**self.config.as_dict(), "params": params, "model_fn": name}
        pace = SpeedMeter(batch_size)
        return training.TrainCall(
            self, self.config, self.model_dir, about, self._say, self._progress, hooks, validate, pace
        )


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any]:
    """Train to `max_steps`, evaluating right before each checkpoint is saved and at the end; the last evaluation."""
    check_specs(estimator, Estimator, train_spec, eval_spec)
    _, max_steps = check_steps(None, train_spec.max_steps)
    steps, _ = check_steps(eval_spec.steps)
    source, model = estimator.parts.served(eval_spec.input_fn, Mode.EVALUATE)
    check_best(estimator.config, model.spec.metrics)
    measure = estimator.parts.measure(source, model, steps)
    note = partial(estimator.noted, name=eval_spec.name)
    validate = CheckpointEvaluation(measure, note, eval_spec.throttle_seconds)
    estimator.train_validated(train_spec.input_fn, None, max_steps, train_spec.hooks, validate)
    if validate.last and validate.last["global_step"] == estimator.latest_checkpoint():
        return validate.last
    at, state = estimator.parts.restored(model, None)
    result = note({**measure(state), "global_step": at})
    estimator.announce(result, eval_spec.name)
    return result


def describe_param(param: Any) -> Any:
    """A param as the records keep it: what has no JSON form, by its name or kind."""
    try:
        return to_jsonable(param)
    except TypeError:
        return getattr(param, "__qualname__", f"a {type(param).__name__}")


def _predicted(fn: Callable[[Any, Any], Any], state: Any, source: Source, progress: Show) -> Iterator[Any]:
    """Batch after batch on the device, row after row to the caller; a smaller last batch is filled up."""
    with progress("predicting", source.samples) as bar:
        for seen, batch in enumerate(source.batches()):
            features = batch["features"]
            with nullcontext() if seen else compiling():
                called = fn(state, pad_batch(features, source.batch_size))
            made = jax.tree.map(np.asarray, called)
            count = common_length(features)
            yield from (jax.tree.map(lambda leaf: leaf[row], made) for row in range(count))  # noqa: B023
            bar.advance(count)

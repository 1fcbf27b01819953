"""Estimator: train, evaluate and predict with one model function, for any model.

The verbs are those of tf.estimator; what is built for them, and kept, is in programs.py. Weights live in the
checkpoints of the model_dir.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from hotloop.engine.feed import common_length, path_name
from hotloop.engine.loop import pad_batch
from hotloop.engine.progress import Show, compiling, hide, show
from hotloop.engine.run import append_line
from hotloop.engine.sinks import console_line
from hotloop.errors import HotloopError, OptionError
from hotloop.families.estimator.config import (
    EvalSpec,
    Mode,
    RunConfig,
    TrainSpec,
    check_hooks,
    check_kind,
    check_name,
    check_steps,
    check_value,
    check_whole,
    is_path,
)
from hotloop.families.estimator.hooks import Hook
from hotloop.families.estimator.programs import Programs
from hotloop.families.estimator.training import CheckpointEvaluation, TrainCall, is_closed
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

    >>> import jax.numpy as jnp, numpy as np, optax, tempfile
    >>> from hotloop import Estimator, ModelSpec
    >>> def model_fn():
    ...     return ModelSpec(
    ...         init=lambda key: jnp.zeros((3, 2)),
    ...         apply=lambda weights, features: features @ weights,
    ...         metrics={"accuracy": lambda outputs, labels: outputs.argmax(-1) == labels},
    ...         optimizer=optax.adam(0.1),
    ...     )
    >>> features = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    >>> data = features, (features.sum(1) > 0).astype(np.int32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     estimator = Estimator(model_fn, model_dir=folder, quiet=True)
    ...     estimator.train(data, steps=50).evaluate(data)["accuracy"] > 0.9
    True
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
        fits = config is None or isinstance(config, RunConfig)
        check_kind("Estimator: model_fn", model_fn, "a function", callable(model_fn))
        check_kind("Estimator: config", config, "a RunConfig", fits)
        check_kind("Estimator: params", params, "a dict", params is None or isinstance(params, Mapping))
        for name, path in (("model_dir", model_dir), ("warm_start_from", warm_start_from)):
            check_value(f"Estimator: {name}", path, "a path", path is None or is_path(path))
        for name, function in (("say", say), ("progress", progress)):
            check_value(f"Estimator: {name}", function, "a function", function is None or callable(function))
        check_value("Estimator: quiet", quiet, "True or False", isinstance(quiet, bool))
        if quiet and (say or progress):
            raise OptionError(
                "Estimator: quiet=True leaves nothing for say or progress to show: give one or the other"
            )
        self.config = config or RunConfig()
        self.params = dict(params or {})
        chosen = model_dir or self.config.model_dir
        self.model_dir = Path(chosen or tempfile.mkdtemp(prefix="hotloop-estimator-"))
        self.last_run: dict[str, Any] = {}
        """After `train`: updates, images_per_second, training_seconds, lower_seconds, compile_seconds."""
        self._say = say or (_warn if quiet else _to_stderr)
        self._progress = progress or (hide if quiet else partial(show, say=self._say))
        self.programs = Programs(
            model_fn, self.config, self.params, self.model_dir, self._say, self._progress
        )
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
        self._train(input_fn, *check_steps(steps, max_steps), hooks, None)
        return self

    def _train(
        self, input_fn: Any, steps: Any, max_steps: Any, hooks: Any, evaluation: CheckpointEvaluation | None
    ) -> None:
        hooks = check_hooks(hooks)
        if max_steps is not None:
            done = self.latest_checkpoint() or 0
            # At the target, a stop or a kill may have left something to do after the last update.
            if done > max_steps or (done == max_steps and is_closed(self.model_dir)):
                self._say(
                    f"nothing to train: {self.model_dir} holds {done:,} updates, {max_steps:,} were asked for"
                )
                return
        model_fn = self.programs.model_fn
        about = {
            **asdict(self.config),
            "params": {name: _describe_param(value) for name, value in self.params.items()},
            "model_fn": getattr(model_fn, "__qualname__", type(model_fn).__name__),
        }
        call = TrainCall(self, self.programs, about, self._warm_start_from, hooks, evaluation)
        self.last_run = call.run(input_fn, steps, max_steps)

    def evaluate(
        self, input_fn: Any, steps: int | None = None, name: str | None = None, checkpoint: int | None = None
    ) -> dict[str, Any]:
        """The mean loss and metrics over every sample of the input, or over its first `steps` batches.

        By the newest checkpoint, or the one of update `checkpoint`. The result is also a line of `eval/results.jsonl`
        (`eval_NAME` for a `name`).
        """
        result = self.measure(input_fn, steps, name, checkpoint)
        self._announce(result, name)
        return result

    def measure(
        self, input_fn: Any, steps: int | None = None, name: str | None = None, checkpoint: int | None = None
    ) -> dict[str, Any]:
        """`evaluate`, for a caller who has words of its own for the result."""
        steps, _ = check_steps(steps)
        check_whole("checkpoint", checkpoint)
        check_name(name)
        source, job = self.programs.read_served(input_fn, Mode.EVALUATE)
        at, state = self.programs.restore(job, checkpoint)
        return self._note({**self.programs.measure(source, job, steps)(state), "global_step": at}, name)

    def _note(self, result: dict[str, Any], name: str | None) -> dict[str, Any]:
        append_line(self.model_dir / (f"eval_{name}" if name else "eval") / "results.jsonl", result)
        return result

    def _announce(self, result: dict[str, Any], name: str | None) -> None:
        about = {"event": f"evaluation {name}" if name else "evaluation", "update": result["global_step"]}
        figures = {figure: value for figure, value in result.items() if figure != "global_step"}
        self._say(console_line(about | figures))

    def predict(self, input_fn: Any, checkpoint: int | None = None) -> Iterator[Any]:
        """A row for each sample of the input, in order, as it is made: what the model's `predictions` gives for it.

        That is a numpy array or number, or a dict of them where `predictions` gives a dict; without `predictions` it
        is the model's output.
        """
        check_whole("checkpoint", checkpoint)
        source, job = self.programs.read_served(input_fn, Mode.PREDICT)
        at, state = self.programs.restore(job, checkpoint)
        self._say(f"predictions of update {at:,} of {self.model_dir}")
        predict, size = self.programs.predict(job), source.batch_size

        def rows() -> Iterator[Any]:
            with self._progress("predicting", source.samples) as bar:
                for number, batch in enumerate(source.batches()):
                    count = common_length(batch["features"])
                    with nullcontext() if number else compiling():
                        outputs = predict(state, pad_batch(batch["features"], size))
                    outputs = jax.tree.map(np.asarray, outputs)
                    yield from (jax.tree.map(lambda leaf: leaf[row], outputs) for row in range(count))  # noqa: B023
                    bar.advance(count)

        return rows()

    def export(self, path: str | Path) -> NoReturn:
        """Not yet: it comes with serving."""
        raise HotloopError(f"export to {path}: exported models come with serving, which is not there yet")

    def latest_checkpoint(self) -> int | None:
        """The number of updates of the newest whole checkpoint; None where there is none."""
        with self.programs.checkpoints() as checkpoints:
            return max(checkpoints.steps(), default=None)

    def weights(self, input_fn: Any, checkpoint: int | None = None) -> dict[str, Any]:
        """The weights of the newest checkpoint by name; the input only tells the shapes of the model."""
        check_whole("checkpoint", checkpoint)
        _, job = self.programs.read_served(input_fn, Mode.PREDICT)
        _, state = self.programs.restore(job, checkpoint)
        return {
            path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state["weights"])
        }


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any]:
    """Train to `max_steps`, evaluating right before each checkpoint is saved and at the end; the last evaluation.

    >>> import jax.numpy as jnp, numpy as np, optax, tempfile
    >>> from hotloop import Estimator, EvalSpec, ModelSpec, RunConfig, TrainSpec, train_and_evaluate
    >>> def line():
    ...     return ModelSpec(
    ...         init=lambda key: jnp.zeros(()),
    ...         apply=lambda slope, x: slope * x,
    ...         loss=lambda outputs, y: (outputs - y) ** 2,
    ...         optimizer=optax.sgd(0.1),
    ...     )
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     estimator = Estimator(line, RunConfig(folder, checkpoint_steps=20), quiet=True)
    ...     result = train_and_evaluate(estimator, TrainSpec((x, 3 * x), 40), EvalSpec((x, 3 * x)))
    >>> result["global_step"], result["samples"], result["loss"] < 0.1
    (40, 64, True)
    """
    for name, value, wanted, kind in (
        ("estimator", estimator, "an Estimator", Estimator),
        ("train_spec", train_spec, "a TrainSpec", TrainSpec),
        ("eval_spec", eval_spec, "an EvalSpec", EvalSpec),
    ):
        check_kind(f"train_and_evaluate: {name}", value, wanted, isinstance(value, kind))
    eval_spec.check()
    _, max_steps = check_steps(None, train_spec.max_steps)
    steps, _ = check_steps(eval_spec.steps)
    programs = estimator.programs
    source, job = programs.read_served(eval_spec.input_fn, Mode.EVALUATE)
    estimator.config.check_best(job.model.spec.metrics)
    measure = programs.measure(source, job, steps)
    note = partial(estimator._note, name=eval_spec.name)
    evaluation = CheckpointEvaluation(measure, note, eval_spec.throttle_seconds)
    estimator._train(train_spec.input_fn, None, max_steps, train_spec.hooks, evaluation)
    if evaluation.last and evaluation.last["global_step"] == estimator.latest_checkpoint():
        return evaluation.last
    at, state = programs.restore(job, None)
    result = note({**measure(state), "global_step": at})
    estimator._announce(result, eval_spec.name)
    return result


def _describe_param(param: Any) -> Any:
    """A param as the records keep it: what has no JSON form, by its name or kind."""
    try:
        return to_jsonable(param)
    except TypeError:
        return getattr(param, "__qualname__", f"a {type(param).__name__}")

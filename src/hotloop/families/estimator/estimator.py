"""Estimator: train, evaluate and predict with one model function, for any model, by the verbs of tf.estimator. Weights
live in the checkpoints of the model_dir; what was built is kept: input of the same form traces nothing again."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from hotloop.engine import processes
from hotloop.engine.device import device_mesh, platform, replicas_that_fit
from hotloop.engine.feed import common_length, fill_up, gather_rows, path_name
from hotloop.engine.interrupt import print_to_stderr
from hotloop.engine.loop import Evaluation, evaluate_batches, means_of, pad_batch
from hotloop.engine.model_folder import LARGEST_BATCH, make_ladder, write_model
from hotloop.engine.model_place import check_place
from hotloop.engine.progress import Show, advance_through, compiling, hide, show
from hotloop.engine.run import append_line, compose_record
from hotloop.engine.sinks import TensorBoardSink, check_tensorboard, console_line
from hotloop.engine.stage_rows import TreeForm
from hotloop.errors import CheckpointError, DataError, OptionError
from hotloop.families.estimator import model
from hotloop.families.estimator.between_calls import CheckpointEvaluation
from hotloop.families.estimator.config import (
    EvalSpec,
    Mode,
    RunConfig,
    TrainSpec,
    call_with_known,
    check_kind,
    check_name,
    check_steps,
    check_value,
    find_checkpoint,
    is_number,
    is_path,
    is_whole,
)
from hotloop.families.estimator.export import Exporters, from_estimator, name_of
from hotloop.families.estimator.hooks import Hook
from hotloop.families.estimator.inputs import FromArrays, Source, read_input, take_own_rows
from hotloop.families.estimator.keras_model import KerasModel
from hotloop.families.estimator.model import Job, State, build_job
from hotloop.families.estimator.stages import count_devices
from hotloop.families.estimator.training import open_checkpoints, run_training

T = TypeVar("T")


def _warn(text: str) -> None:
    if text.startswith("warning:"):
        print_to_stderr(text)


def figures_of(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "global_step"}


def _make_temporary() -> str:
    """A folder that process 0 makes and all use."""
    made = tempfile.mkdtemp(prefix="hotloop-estimator-") if processes.is_writer() else ""
    return str(processes.agreed(made))


class Estimator:
    """A model, its folder, and what can be done with it.

    `model_fn` returns a ModelSpec (`from_keras` makes one of a Keras model), `config` says how to run it: among others
    `batch_size`, the samples of a weight update where the input is arrays (32), and `tensorboard`. `model_dir` is where
    checkpoints and records are, a path or text; `warm_start_from` another one, whose newest weights a new model starts
    with.

    Every verb shows a bar on standard error, where that is a terminal, and says lines: how a training stands each
    `log_steps`, the figures of an evaluation, which weights predictions are by. `say` is a function that takes each
    line in place of standard error (`say=print`, `say=logging.info`); `progress` makes the bar, from a description and
    a total; `quiet=True` is neither, but for warnings and the name of a temporary model_dir.

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
        check_kind("Estimator: model_fn", model_fn, "a function", callable(model_fn))
        check_kind("Estimator: config", config, "a RunConfig", isinstance(config, RunConfig | None))
        check_kind("Estimator: params", params, "a dict", isinstance(params, Mapping | None))
        for name, path in (("model_dir", model_dir), ("warm_start_from", warm_start_from)):
            check_value(f"Estimator: {name}", path, "a path", path is None or is_path(path))
        for name, function in (("say", say), ("progress", progress)):
            check_value(f"Estimator: {name}", function, "a function", function is None or callable(function))
        check_value("Estimator: quiet", quiet, "True or False", isinstance(quiet, bool))
        if quiet and (say or progress):
            raise OptionError(
                "Estimator: quiet=True leaves nothing for say or progress to show: give one or the other"
            )
        self._model_fn, self.config = model_fn, config or RunConfig()
        self.params = dict(params or {})
        if self.config.tensorboard:
            check_tensorboard()
        chosen = model_dir or self.config.model_dir
        self.model_dir = Path(chosen or _make_temporary())
        self.last_run: dict[str, Any] = {}
        """After `train`: updates, images_per_second, training_seconds, lower_seconds, compile_seconds."""
        self._say = say or (_warn if quiet else print_to_stderr)
        self._progress = progress or (hide if quiet else partial(show, say=self._say))
        self._kept: dict[Any, Any] = {}
        self._warm_start_from = Path(warm_start_from) if warm_start_from else None
        if not chosen:
            (say or print_to_stderr)(
                f"model_dir: {self.model_dir} (a temporary one: give model_dir to keep the model)"
            )

    def train(
        self,
        input_fn: Any,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> "Estimator":
        """Make `steps` more weight updates, or as many as are missing to `max_steps` in all, from the newest checkpoint
        of the model_dir; saved at the end. Where the input is an iterable of batches, training also ends with it.
        `hooks`, such as EarlyStopping, are told what happens between the compiled calls, and may end it."""
        run_training(self, input_fn, *check_steps(steps, max_steps), hooks)
        return self

    def evaluate(
        self,
        input_fn: Any,
        steps: int | None = None,
        name: str | None = None,
        checkpoint: int | str | Path | None = None,
    ) -> dict[str, Any]:
        """The mean loss and metrics over every sample of the input, or its first `steps` batches, by the newest
        checkpoint or that of update `checkpoint`; also a line of `eval/results.jsonl` (`eval_NAME` for a `name`)."""
        result = self.measure(input_fn, steps, name, checkpoint)
        self._announce(result, name)
        return result

    def measure(
        self,
        input_fn: Any,
        steps: int | None = None,
        name: str | None = None,
        checkpoint: int | str | Path | None = None,
    ) -> dict[str, Any]:
        """`evaluate`, for a caller who has words of its own for the result."""
        steps, _ = check_steps(steps)
        find_checkpoint(checkpoint, self.model_dir)
        check_name(name)
        source, job = self._read_served(input_fn, Mode.EVALUATE)
        at, state = self._restore(job, checkpoint)
        result = self._note({**self._make_measure(source, job, steps)(state), "global_step": at}, name)
        if self.config.tensorboard and processes.is_writer():
            curves = TensorBoardSink(self.model_dir / "tensorboard" / self._results_file(name).parent.name)
            curves.write(compose_record("validation", at, 0.0, 0.0, figures_of(result)))
            curves.close()
        return result

    def _note(self, result: dict[str, Any], name: str | None) -> dict[str, Any]:
        if processes.is_writer():
            append_line(self._results_file(name), result)
        return result

    def _results_file(self, name: str | None = None) -> Path:
        """Where the evaluations of that name are kept, a line each."""
        return self.model_dir / (f"eval_{name}" if name else "eval") / "results.jsonl"

    def _announce(self, result: dict[str, Any], name: str | None) -> None:
        about = {"event": f"evaluation {name}" if name else "evaluation", "update": result["global_step"]}
        self._say(console_line(about | figures_of(result)))

    def predict(self, input_fn: Any, checkpoint: int | str | Path | None = None) -> Iterator[Any]:
        """A row for each sample of the input, in order, as it is made: what the model's `predictions` gives for it, a
        numpy array or number, or a dict of them; without `predictions` the model's output."""
        find_checkpoint(checkpoint, self.model_dir)
        source, job = self._read_served(input_fn, Mode.PREDICT)
        at, state = self._restore(job, checkpoint)
        state = job.place(state)
        self._say(f"predictions of update {at:,} of {self.model_dir}")
        predict = self._keep(("predict", job), lambda: processes.JitTogether(model.predict(job)))
        size = fill_up(job.sharding, source.batch_size)

        def rows() -> Iterator[Any]:
            with self._progress("predicting", source.samples) as bar:
                for number, batch in enumerate(source.batches()):
                    count = common_length(batch["features"])
                    features = pad_batch(batch["features"], size)
                    if job.sharding is not None:
                        features = processes.place(features, job.sharding)
                    with nullcontext() if number else compiling():
                        outputs = predict(state, features)
                    outputs = processes.fetch(outputs) if job.sharding else jax.tree.map(np.asarray, outputs)
                    yield from (jax.tree.map(lambda leaf: leaf[row], outputs) for row in range(count))  # noqa: B023
                    bar.advance(count)

        return rows()

    def export(
        self,
        path: str | Path,
        input_fn: Any,
        *,
        name: str | None = None,
        version: int | None = None,
        checkpoint: int | str | Path | None = None,
        max_batch: int = LARGEST_BATCH,
    ) -> Path:
        """Write the model as a folder that `hotloop serve` answers from without its code, `path/NAME/VERSION`, and
        return it: by the newest checkpoint or that of update `checkpoint`, compared in a fresh process.

        The input tells the form of the features, of which the first few become examples. The name is the model_dir's
        unless it is given, the version the next free number.
        """
        check_value("export: path", path, "a path", is_path(path))
        find_checkpoint(checkpoint, self.model_dir)
        check_value(
            "export: max_batch", max_batch, "a whole number from 1", is_whole(max_batch) and max_batch > 0
        )
        check_value("export: version", version, "a whole number from 1", version is None or is_whole(version))
        check_place(Path(path), name or name_of(self.model_dir), version)
        exportable = from_estimator(self, input_fn, checkpoint)
        folder = ""
        if processes.is_writer():
            ladder = make_ladder(max_batch)
            with self._progress("exporting and comparing", None):
                place, programs = write_model(
                    exportable, Path(path), name=name, version=version, ladder=ladder
                )
            for line in programs.notices:
                self._say(f"warning: {line}")
            folder = str(place)
        folder = processes.agreed(folder)
        self._say(f"exported update {exportable.source['step']:,} of {self.model_dir} to {folder}")
        return Path(folder)

    def latest_checkpoint(self) -> int | None:
        """The number of updates of the newest whole checkpoint; None where there is none."""
        with open_checkpoints(self.model_dir) as checkpoints:
            return max(checkpoints.steps(), default=None)

    def weights(self, input_fn: Any, checkpoint: int | str | Path | None = None) -> dict[str, Any]:
        """The weights of the newest checkpoint by name; the input only tells the shapes of the model."""
        find_checkpoint(checkpoint, self.model_dir)
        _, job = self._read_served(input_fn, Mode.PREDICT)
        _, state = self._restore(job, checkpoint)
        return {
            path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state["weights"])
        }

    def to_keras(self, checkpoint: int | str | Path | None = None) -> Any:
        """The Keras model that `from_keras` was given, with the weights of the newest checkpoint or the one meant."""
        if not isinstance(self._model_fn, KerasModel):
            raise OptionError(
                "to_keras: this Estimator's model is not from Keras: it was not made by from_keras"
            )
        forms = self._model_fn.forms()
        self._model_fn.write(self._read_checkpoint(forms, checkpoint)[1])
        return self._model_fn.keras_model

    # What follows serves the verbs, here and in training.

    def _keep(self, key: Any, make: Callable[[], T]) -> T:
        """What was made for this key, or is made now."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    def _read_input(self, input_fn: Any, mode: Mode) -> Source:
        return read_input(input_fn, self.config, mode=mode, params=self.params, config=self.config)

    def _job(self, mode: Mode, source: Source) -> Job:
        """The model for batches of the source's form, over the replicas' devices."""
        batch = source.example

        def make() -> Job:
            known = {"features": batch["features"], "labels": batch.get("labels"), "mode": mode}
            spec = call_with_known(
                "model_fn", self._model_fn, **known, params=self.params, config=self.config
            )
            return build_job(spec, mode, batch, self.config, self._place(spec, mode))

        return self._keep(("job", mode, str(batch)), make)

    def _place(self, spec: Any, mode: Mode) -> Mesh | None:
        """The devices of the replicas, each with its stages; None where there is one.

        Where devices are too few for the stages, a line says so, and each replica has one. Only a training needs as
        many replicas as were asked for.
        """
        replicas, stages, there = self.config.replicas, count_devices(spec), len(jax.devices(platform()))
        if stages > 1 and replicas * stages > there:
            wish = (
                f"{replicas} replica{'s' * (replicas > 1)} x {stages} devices for {len(spec.stages)} stages"
            )
            on = f"on {there} device{'s' * (there > 1)}"
            line = f"{wish} {on}: {len(spec.stages)} stages merge into one; batches and learning rate stay"
            self._keep(("merged", line), lambda: self._say(line))
            stages = 1
        if mode is not Mode.TRAIN and stages == 1:
            replicas = replicas_that_fit(replicas)
        several = replicas * stages > 1 or processes.count() > 1
        return device_mesh(replicas, stages, platform()) if several else None

    def _read_served(self, input_fn: Any, mode: Mode) -> tuple[Source, Job]:
        source = self._read_input(input_fn, mode)
        job = self._job(mode, source)
        return source.check_labels(job.classes if mode is Mode.EVALUATE else None), job

    def _restore(self, job: Job, checkpoint: Any = None) -> tuple[int, State]:
        """The newest checkpoint, or the one meant: its number, and its INFERENCE_PARTS, undivided; on the host where
        the model is in stages, as it need fit on no device."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        like = self._keep(("served", job), lambda: jax.eval_shape(partial(model.init_served, job), key))
        if job.stages is not None:
            like = TreeForm.of(like).blank()
        return self._read_checkpoint(like, checkpoint)

    def _read_checkpoint(self, like: State, checkpoint: Any) -> tuple[int, State]:
        folder, at = find_checkpoint(checkpoint, self.model_dir)
        with open_checkpoints(folder) as checkpoints:
            if not checkpoints.steps():
                raise CheckpointError(
                    f"no checkpoint in {checkpoints.folder}: train first, or give the model_dir of a trained model"
                )
            found = checkpoints.restore(like, at, in_part=True)
        for line in found.skipped:
            self._say(f"warning: {line}")
        return found.step, found.state

    def _make_measure(self, source: Source, job: Job, steps: int | None) -> Callable[[State], dict[str, Any]]:
        """A function of a state: means over the samples of the source, or of its first `steps` batches."""
        evaluation = self._evaluation(source, job, steps) if isinstance(source, FromArrays) else None
        known = [count for count in (steps, source.length) if count is not None and evaluation is None]

        def measure(state: State) -> dict[str, Any]:
            state = job.place(state)
            with self._progress("evaluating", min(known, default=None)) as bar:
                if evaluation is not None:  # one compiled call: it comes back once
                    return evaluation.means(state)
                batches = advance_through(islice(source.batches(), steps), bar)
                own = map(partial(take_own_rows, job.sharding, source.batch_size), batches)
                sums = evaluate_batches(self._evaluate(job), state, own, source.batch_size, job.sharding)
                return means_of(sums)

        return measure

    def _evaluation(self, source: FromArrays, job: Job, steps: int | None) -> Evaluation:
        """Compiled already if such arrays were evaluated before."""
        samples = source.samples if steps is None else min(source.samples, steps * source.batch_size)
        data = jax.tree.map(lambda leaf: leaf[:samples], source.data)
        key = ("evaluation", job, source.signature, samples)

        def make() -> Evaluation:
            gather = lambda data, at: source.transform_for_evaluation(gather_rows(data, at))  # noqa: E731
            return Evaluation(
                self._evaluate(job), data, source.batch_size, gather=gather, sharding=job.sharding
            )

        # The one kept has the program, if there is one by now.
        evaluation = self._kept[key] = self._keep(key, make).over(data)
        return evaluation

    def _evaluate(self, job: Job) -> Any:
        return self._keep(("evaluate", job), lambda: model.evaluate(job))


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
    every = eval_spec.throttle_seconds
    check_value("EvalSpec: throttle_seconds", every, "a number from 0", is_number(every) and every >= 0)
    check_name(eval_spec.name)
    if isinstance(eval_spec.input_fn, Iterator):
        raise DataError(
            "EvalSpec: input_fn is an iterator, which can be gone through once: give arrays, a list of batches, or "
            "a function that makes the iterator anew for each evaluation"
        )
    _, max_steps = check_steps(None, train_spec.max_steps)
    steps, _ = check_steps(eval_spec.steps)
    source, job = estimator._read_served(eval_spec.input_fn, Mode.EVALUATE)
    estimator.config.check_best(job.spec.metrics)
    measure = estimator._make_measure(source, job, steps)
    exporters = Exporters(estimator, eval_spec)

    def note(result: dict[str, Any]) -> dict[str, Any]:
        noted = estimator._note(result, eval_spec.name)
        exporters.after_evaluation(noted)
        return noted

    evaluation = CheckpointEvaluation(measure, note, every, ["loss", *job.spec.metrics])
    run_training(estimator, train_spec.input_fn, None, max_steps, train_spec.hooks, evaluation)
    if evaluation.last and evaluation.last["global_step"] == estimator.latest_checkpoint():
        exporters.at_end()
        return evaluation.last
    at, state = estimator._restore(job, None)
    result = note({**measure(state), "global_step": at})
    estimator._announce(result, eval_spec.name)
    exporters.at_end()
    return result

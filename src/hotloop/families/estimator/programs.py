"""What an estimator has built and keeps: inputs in form, models, compiled programs, restored weights.

A model is built once for each mode and form of input, and compiled once: asking again for input of the same form
traces nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from hotloop.engine import device as meshes
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.evaluate import Evaluation, evaluate_batches
from hotloop.engine.feed import gather_rows
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program
from hotloop.engine.precision import Policy
from hotloop.engine.progress import Show, advance_through
from hotloop.errors import CheckpointError
from hotloop.families.estimator import inputs, step
from hotloop.families.estimator.config import Mode, RunConfig, call_with_known
from hotloop.families.estimator.inputs import FromArrays, Source
from hotloop.families.estimator.model import BuiltModel, build, widen_state

FAMILY = "estimator"
Measure = Callable[[Any], dict[str, Any]]


@dataclass
class Programs:
    """Made when first asked for."""

    model_fn: Any
    config: RunConfig
    params: dict[str, Any]
    folder: Path
    say: Callable[[str], None]
    progress: Show
    _kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        """The number formats."""
        return step.parse_policy(self.config)

    def remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for this key, or is made now."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def input(self, input_fn: Any, mode: Mode) -> Source:
        """What an input_fn gives, in form."""
        return inputs.read_input(input_fn, self.config, mode=mode, params=self.params, config=self.config)

    def model(self, mode: Mode, source: Source) -> BuiltModel:
        """The model for batches of the source's form."""
        batch = source.example

        def make() -> BuiltModel:
            known = {"features": batch["features"], "labels": batch.get("labels"), "mode": mode}
            spec = call_with_known("model_fn", self.model_fn, **known, params=self.params, config=self.config)
            return build(spec, mode, batch)

        found: BuiltModel = self.remembered(("model", mode, str(batch)), make)
        return found

    def served(self, input_fn: Any, mode: Mode) -> tuple[Source, BuiltModel]:
        """Input and model to evaluate or predict with."""
        source = self.input(input_fn, mode)
        model = self.model(mode, source)
        return source.check_labels(model.classes if mode is Mode.EVALUATE else None), model

    def training(self, source: Source) -> step.Job:
        """The model and its update."""
        model = self.model(Mode.TRAIN, source)
        mesh = meshes.replica_mesh(self.config.replicas) if self.config.replicas > 1 else None
        found: step.Job = self.remembered(("training", model), lambda: step.Job(model, self.config, mesh))
        return found

    def program(self, source: Source, trained: step.Job, feed: Any) -> Program:
        """Compiled calls, for every input of the same form."""
        longest, key = self.config.iterations_per_call, seed_key(self.config.seed)
        program: Program = self.remembered(
            ("program", trained, source.signature), lambda: Program(trained.update, feed, longest, key)
        )
        program.feed = feed
        return program

    def checkpoints(self, folder: Path | None = None) -> Checkpoints:
        """Those of a model_dir, to read."""
        return Checkpoints((folder or self.folder) / "checkpoints", family=FAMILY)

    def restored(self, model: BuiltModel, at: int | None) -> tuple[int, Any]:
        """The newest checkpoint, or that of update `at`: its number, and the weights and state of the model."""

        def served(key: Any) -> dict[str, Any]:
            weights, state = model.init(key)
            return {"weights": self.policy.to_update(weights), "model": widen_state(state)}

        like = self.remembered(
            ("served", model), lambda: jax.eval_shape(served, jax.eval_shape(lambda: jax.random.key(0)))
        )
        with self.checkpoints() as checkpoints:
            if not checkpoints.steps():
                raise CheckpointError(
                    f"no checkpoint in {checkpoints.folder}: train first, or give the model_dir of a trained model"
                )
            found = checkpoints.restore(like, at, in_part=True)
        for line in found.skipped:
            self.say(f"warning: {line}")
        return found.step, found.state

    def warmed(self, state: Any, folder: Path) -> Any:
        """A fresh state with the weights of another model_dir."""
        with self.checkpoints(folder) as checkpoints:
            found = checkpoints.restore({name: state[name] for name in step.INFERENCE_PARTS}, in_part=True)
        self.say(f"weights of update {found.step:,} of {folder}")
        return {**state, **found.state}

    def rows(self, model: BuiltModel) -> Callable[[Any, Any], Any]:
        """The compiled prediction."""
        fn: Callable[[Any, Any], Any] = self.remembered(
            ("rows", model), lambda: step.rows(model, self.policy)
        )
        return fn

    def measure(self, source: Source, model: BuiltModel, steps: int | None) -> Measure:
        """A function of weights and state: means over the samples of the source, or of its first batches."""
        if isinstance(source, FromArrays):
            evaluation = self.evaluation(source, model, steps)

            def over_arrays(state: Any) -> dict[str, Any]:
                with self.progress("evaluating", None):  # one compiled call: it comes back once
                    return _means(evaluation(state))

            return over_arrays
        fn, size, length = self._values(model), source.batch_size, source.length
        total = min((count for count in (steps, length) if count is not None), default=None)

        def over_batches(state: Any) -> dict[str, Any]:
            with self.progress("evaluating", total) as bar:
                batches = advance_through(islice(source.batches(), steps), bar)
                return _means(evaluate_batches(fn, state, batches, size))

        return over_batches

    def evaluation(self, source: FromArrays, model: BuiltModel, steps: int | None) -> Evaluation:
        """The evaluation of arrays, compiled already if such arrays were evaluated before."""
        samples = source.samples if steps is None else min(source.samples, steps * source.batch_size)
        data = jax.tree.map(lambda leaf: leaf[:samples], source.data)
        key = ("evaluation", model, source.signature, samples)

        def make() -> Evaluation:
            gather = lambda data, at: source.seen(gather_rows(data, at))  # noqa: E731
            return Evaluation(self._values(model), data, source.batch_size, gather=gather)

        known: Evaluation = self.remembered(key, make)
        made = self._kept[key] = known.over(data)  # which has the program, if there is one by now
        return made

    def _values(self, model: BuiltModel) -> Any:
        return self.remembered(("values", model), lambda: step.values(model, self.policy))


def _means(sums: Mapping[str, Any]) -> dict[str, Any]:
    samples = sums["samples"]
    return {name: value / samples for name, value in sums.items() if name != "samples"} | {"samples": samples}

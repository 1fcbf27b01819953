"""What an estimator has built and keeps: jobs, compiled programs, evaluations; and the weights of its checkpoints.

A model is built once for each mode and form of input, and compiled once: asking again for input of the same form
traces nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import jax

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.device import replica_mesh
from hotloop.engine.feed import Feed, gather_rows
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Evaluation, Program, evaluate_batches, means_of
from hotloop.engine.progress import Show, advance_through
from hotloop.errors import CheckpointError
from hotloop.families.estimator import model
from hotloop.families.estimator.build import build_model
from hotloop.families.estimator.config import Mode, RunConfig, call_with_known
from hotloop.families.estimator.inputs import FromArrays, Source, read_input
from hotloop.families.estimator.model import Job, State

FAMILY = "estimator"
T = TypeVar("T")
Measure = Callable[[State], dict[str, Any]]


@dataclass
class Programs:
    """Built when first asked for."""

    model_fn: Any
    config: RunConfig
    params: dict[str, Any]
    folder: Path
    say: Callable[[str], None]
    progress: Show
    _kept: dict[Any, Any] = field(default_factory=dict)

    def _keep(self, key: Any, make: Callable[[], T]) -> T:
        """What was made for this key, or is made now."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    def read_input(self, input_fn: Any, mode: Mode) -> Source:
        return read_input(input_fn, self.config, mode=mode, params=self.params, config=self.config)

    def job(self, mode: Mode, source: Source) -> Job:
        """The model for batches of the source's form; to train, over the replicas' devices."""
        batch = source.example

        def make() -> Job:
            known = {"features": batch["features"], "labels": batch.get("labels"), "mode": mode}
            spec = call_with_known("model_fn", self.model_fn, **known, params=self.params, config=self.config)
            built = build_model(spec, mode, batch)
            replicas = self.config.replicas if mode is Mode.TRAIN else 1
            return Job(built, self.config, replica_mesh(replicas) if replicas > 1 else None)

        return self._keep(("job", mode, str(batch)), make)

    def read_served(self, input_fn: Any, mode: Mode) -> tuple[Source, Job]:
        """Input and model to evaluate or predict with."""
        source = self.read_input(input_fn, mode)
        job = self.job(mode, source)
        return source.check_labels(job.model.classes if mode is Mode.EVALUATE else None), job

    def init(self, job: Job) -> Callable[[Any], State]:
        """A fresh state from a key, compiled."""
        return self._keep(("init", job), lambda: jax.jit(partial(model.init, job)))

    def predict(self, job: Job) -> Callable[[State, Any], Any]:
        return self._keep(("predict", job), lambda: jax.jit(model.predict(job)))

    def program(self, source: Source, job: Job, feed: Feed) -> Program:
        """Compiled calls, for every input of the same form."""
        longest, key = self.config.iterations_per_call, seed_key(self.config.seed)
        program = self._keep(
            ("program", job, source.signature), lambda: Program(model.update(job), feed, longest, key)
        )
        program.feed = feed
        return program

    def checkpoints(self, folder: Path | None = None) -> Checkpoints:
        """Those of a model_dir, to read."""
        return Checkpoints((folder or self.folder) / "checkpoints", family=FAMILY)

    def restore(self, job: Job, at: int | None) -> tuple[int, State]:
        """The newest checkpoint, or that of update `at`: its number, and its INFERENCE_PARTS."""
        like = self._keep(
            ("served", job),
            lambda: jax.eval_shape(
                partial(model.init_served, job), jax.eval_shape(lambda: jax.random.key(0))
            ),
        )
        with self.checkpoints() as checkpoints:
            if not checkpoints.steps():
                raise CheckpointError(
                    f"no checkpoint in {checkpoints.folder}: train first, or give the model_dir of a trained model"
                )
            found = checkpoints.restore(like, None if at is None else int(at), in_part=True)
        for line in found.skipped:
            self.say(f"warning: {line}")
        return found.step, found.state

    def measure(self, source: Source, job: Job, steps: int | None) -> Measure:
        """A function of a state: means over the samples of the source, or of its first `steps` batches."""
        evaluation = self.evaluation(source, job, steps) if isinstance(source, FromArrays) else None
        known = [count for count in (steps, source.length) if count is not None and evaluation is None]

        def measure(state: State) -> dict[str, Any]:
            with self.progress("evaluating", min(known, default=None)) as bar:
                if evaluation is not None:  # one compiled call: it comes back once
                    return evaluation.means(state)
                batches = advance_through(islice(source.batches(), steps), bar)
                return means_of(evaluate_batches(self._evaluate(job), state, batches, source.batch_size))

        return measure

    def evaluation(self, source: FromArrays, job: Job, steps: int | None) -> Evaluation:
        """Compiled already if such arrays were evaluated before."""
        samples = source.samples if steps is None else min(source.samples, steps * source.batch_size)
        data = jax.tree.map(lambda leaf: leaf[:samples], source.data)
        key = ("evaluation", job, source.signature, samples)

        def make() -> Evaluation:
            gather = lambda data, at: source.transform_for_evaluation(gather_rows(data, at))  # noqa: E731
            return Evaluation(self._evaluate(job), data, source.batch_size, gather=gather)

        # The one kept has the program, if there is one by now.
        evaluation = self._kept[key] = self._keep(key, make).over(data)
        return evaluation

    def _evaluate(self, job: Job) -> Any:
        return self._keep(("evaluate", job), lambda: model.evaluate(job))

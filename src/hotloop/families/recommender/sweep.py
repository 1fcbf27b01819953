"""`hotloop recommender sweep`: one training for each learning rate, each in a process of its own, and their table.

It knows no device and no model; a trial is the command `hotloop recommender train`.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hotloop import rehearsal
from hotloop.engine.interrupt import Stopped
from hotloop.engine.progress import Console
from hotloop.engine.records import write_json
from hotloop.errors import DataError, RunError
from hotloop.families.recommender import places, trials
from hotloop.families.recommender.config import Train, warn_of_no_effect
from hotloop.families.recommender.sweep_config import Sweep
from hotloop.families.recommender.sweep_result import short, summary, tell
from hotloop.families.recommender.trial_progress import watch
from hotloop.families.recommender.trials import Outcome, Trial
from hotloop.options import options_of

TRAIN = (sys.executable, "-m", "hotloop", "recommender", "train")
NO_EFFECT = {"pipeline_num_parallel": 32, "fp_exceptions": False}


class Caller(Console, Protocol):
    """Who listens, and where it asked to compute."""

    @property
    def device(self) -> str:
        """The value of --device."""

    @property
    def only_accelerator(self) -> bool:
        """The value of --only-accelerator."""


def run(config: Sweep, caller: Caller) -> dict[str, Any]:
    """Run every trial; the result has a row for each, the totals, and the best rate."""
    _check(config, caller)
    engine = _engine(config, caller)  # what it cannot run on is said before a folder is made
    folder = make_folder(config)
    planned = [
        Trial(n, exponent, folder / f"trial-{n:02d}", command(config, exponent, folder, n, caller))
        for n, exponent in enumerate(config.exponents, start=1)
    ]
    began = time.monotonic()
    try:
        with caller.progress("sweep", len(planned)) as bar, watch(planned, bar):
            outcomes, concurrent = engine(planned, _listener(caller, bar, len(planned)))
    except KeyboardInterrupt as stop:
        said = f"interrupted: all trials are stopped, their runs are in {folder}"
        raise Stopped.because_of(stop, said) from None
    result = {
        "folder": str(folder),
        "engine": config.engine,
        "concurrent": concurrent,
        "seconds": time.monotonic() - began,
        "validated": config.validated,
        **summary(outcomes),
    }
    write_json(folder / "sweep.json", result)
    if all(outcome.status == "failed" for outcome in outcomes):
        raise RunError(f"every trial failed, the first with {outcomes[0].reason} ({folder})")
    tell(result, caller)
    return result


def describe(config: Sweep, caller: Caller) -> str:
    """The trials; that each of them is possible is for a training to say."""
    _check(config, caller)
    exponents = ", ".join(f"{exponent:g}" for exponent in config.exponents)
    engine = _engine(config, caller)
    where = engine.describe(len(config.exponents)) if isinstance(engine, LocalEngine) else "trials on Ray"
    return f"{where}: base learning rates of 2 to the power of {exponents}; each is this training:"


def _check(config: Sweep, caller: Caller) -> None:
    warn_of_no_effect(config, NO_EFFECT, caller.warn)
    for name in ("training_data_file", "validation_data_file", "test_data_file"):
        path = getattr(config, name)
        if path is not None and not path.is_file():  # once, not once a trial
            raise DataError(f"--{name.replace('_', '-')} {path}: there is no such file")


def make_folder(config: Sweep) -> Path:
    """RESULTS/NAME, empty; the name says seed and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    folder = (
        config.results_dir / (config.run_name or f"sweep-rn{config.seed}-{stamp}-{os.getpid()}")
    ).absolute()
    try:
        if rehearsal.is_on():
            rehearsal.check_can_make(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        taken = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror}); choose another --results-dir") from None
    if taken:
        raise RunError(f"{folder} is there already: choose another --run-name")
    rehearsal.begin_work(f"making {folder}")
    return folder


def command(config: Sweep, exponent: float, folder: Path, number: int, caller: Caller) -> tuple[str, ...]:
    """The command line of one trial, good in any folder: its rate, and every option that is not at its default."""
    chosen = replace(config.training(exponent), results_dir=folder, run_name=f"trial-{number:02d}")
    words = [f"--device={caller.device}", *(["--only-accelerator"] if caller.only_accelerator else [])]
    for each in options_of(Train):
        value = getattr(chosen, each.name)
        wanted = value != each.default or each.name == "base_learning_rate"
        if wanted and each.name not in NO_EFFECT:
            words.append(f"{each.spelling}={_word(value)}")
    return (*TRAIN, "--json", *words)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_word, value))
    if isinstance(value, Path):
        return str(value.absolute())
    return repr(value) if isinstance(value, float) else str(value)


Engine = Callable[[Sequence[Trial], Callable[[Outcome], None]], tuple[list[Outcome], int]]


def _engine(config: Sweep, caller: Caller) -> Engine:
    """What runs trials, and tells how many at a time."""
    if config.engine == "ray":
        from hotloop.families.recommender.ray_trials import RayEngine

        return RayEngine(config.ray_address, config.concurrent, caller.device, caller.say)
    seen = places.look(caller.device, caller.only_accelerator)
    for warning in seen.warnings:
        caller.warn(warning)
    return LocalEngine(config.concurrent, seen, caller.say)


@dataclass(frozen=True)
class LocalEngine:
    """Processes of this machine."""

    concurrent: int | None
    seen: places.Seen
    say: Callable[[str], None]

    def __call__(
        self, planned: Sequence[Trial], ended: Callable[[Outcome], None]
    ) -> tuple[list[Outcome], int]:
        """Run them."""
        self.say(self.describe(len(planned)))
        concurrent = self.at_a_time(len(planned))
        return trials.run_all(
            planned, places.environments(self.seen, concurrent, os.environ), ended
        ), concurrent

    def at_a_time(self, trials: int) -> int:
        """How many of so many trials run together."""
        return min(self.concurrent or self.seen.count, trials)

    def describe(self, trials: int) -> str:
        """So many trials, and where they run."""
        devices = f"{self.seen.count} {self.seen.platform} device{'s' if self.seen.count > 1 else ''}"
        return f"{trials} trials on {devices}, {self.at_a_time(trials)} at a time"


def _listener(caller: Caller, bar: Any, count: int) -> Callable[[Outcome], None]:
    warned: set[str] = set()

    def ended(outcome: Outcome) -> None:
        bar.advance()
        for warning in outcome.warnings:
            if warning not in warned:  # what one trial warns of, the others do, too
                warned.add(warning)
                caller.warn(warning)
        head = f"trial {outcome.trial.number} of {count}, exponent {outcome.trial.exponent:g}"
        if outcome.status == "finished":
            figures = outcome.figures
            caller.say(f"{head}: loss: {short(figures.loss)}, RMSE: {short(figures.rmse)}")
        else:
            caller.warn(f"{head} {outcome.status}, {outcome.reason}")

    return ended

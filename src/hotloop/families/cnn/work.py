"""One run of `hotloop cnn`: what was asked for, what that means here, its images, its folder; and what is said first.

It is put together before anything is compiled. What is done with it is the business of `train` and `validation`.
"""

import secrets
import time
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from hotloop.engine.device import platform
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.precision import partials_note
from hotloop.engine.progress import Console
from hotloop.engine.records import read_json
from hotloop.families.cnn import model, saved
from hotloop.families.cnn.job import DatasetSize, Settings, resolve
from hotloop.families.cnn.model import Job
from hotloop.families.cnn.options import Train
from hotloop.families.cnn.saved import RunCheckpoints
from hotloop.families.cnn.sources import ImageSource


@dataclass(frozen=True, eq=False)
class Work:
    """One run."""

    config: Train
    settings: Settings
    source: ImageSource
    console: Console
    folder: Path
    others: RunCheckpoints | None = None
    """Checkpoints to validate in place of the run's own."""

    @property
    def job(self) -> Job:
        """The settings as functions."""
        return Job(self.settings, self.source.repeated)

    @property
    def key(self) -> Any:
        """The run's key."""
        return seed_key(self.settings.seed or 0)

    @property
    def keeping(self) -> RunCheckpoints:
        """Where this run saves, and what there is its own."""
        return RunCheckpoints.of(self.config, self.folder)

    def initial(self) -> model.State:
        """The state before the first update."""
        return model.init(self.job, stream(self.key, "init", 0))

    def about(self) -> saved.SavedNetwork:
        """What must be known to use the checkpoints without the options."""
        chosen, plan = self.settings, self.settings.plan
        per_epoch = float(plan.updates_per_epoch) if plan else 1.0
        return saved.SavedNetwork(self.job.network, chosen.dataset, chosen.precision, chosen.half, per_epoch)


def run_folder(config: Train) -> Path:
    """RESULTS/NAME, where the name says model, data and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    return config.results_dir / (config.run_name or f"{config.model_name}-{config.dataset}-{stamp}")


def with_seed(config: Train) -> tuple[Train, bool]:
    """The config with a seed, and whether it was drawn here; a run that goes on keeps the one it drew."""
    if config.seed is not None:
        return config, False
    before = run_folder(config) / "config.json"
    if config.resume and before.exists():
        return replace(config, seed=read_json(before).get("seed")), False
    return replace(config, seed=secrets.randbits(32)), True


def resolve_here(config: Train, samples: DatasetSize, given: Set[str], configured: Set[str]) -> Settings:
    """The settings on the devices that there are."""
    return resolve(config, samples, len(jax.devices(platform())), given, configured)


def announce(
    config: Train, settings: Settings, source: ImageSource, was_drawn: bool, console: Console
) -> None:
    """Everything that must be said before the first update."""
    if config.expect:
        console.say(f"to expect: {config.expect}")
    for line in (*settings.warnings, *settings.notices):
        console.warn(line)
    if was_drawn:
        console.say(f"seed: {config.seed}")
    if source.notice:
        console.warn(source.notice)
    if settings.half_partials:
        console.say(
            partials_note(Job(settings).policy)
            or "half partials: the network's sums are float32 all the same"
        )

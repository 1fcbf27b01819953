"""The options of a run for whoever uses it again: how it evaluated, and its ratings. No jax."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from hotloop.engine.run import read_config
from hotloop.families.recommender.baselines_config import Data

FAMILY = "recommender"
EXTRA = {"users": int, "items": int, "drops": list, "low": float, "high": float}
"""What config.json holds besides options, and of which kind."""


def options_at(run: Path) -> dict[str, Any]:
    """All that config.json holds."""
    return read_config(run, FAMILY, EXTRA)


def values_of(run: Path) -> dict[str, Any]:
    """Clipped and in batches as the run validated; its --split is another thing than an evaluation's."""
    had = options_at(run)
    names = {"clip": "clip", "batch_size": "validation_batch_size"}
    return {name: had[own] for name, own in names.items() if own in had}


def values_for_baselines(run: Path) -> dict[str, Any]:
    """The run's ratings, too."""
    had = options_at(run)
    return {**values_of(run), **{each.name: had[each.name] for each in fields(Data) if each.name in had}}

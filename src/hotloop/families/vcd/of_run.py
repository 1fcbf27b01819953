"""The options of a run for whoever uses it again: which images, how its likelihood is estimated, its HMC. No jax."""

from pathlib import Path
from typing import Any

from hotloop.engine.run import read_config

FAMILY = "vcd"
NEEDED = {"images": int, "method": str, "data": str}
TAKEN = ("data", "seed", "iwae_samples", "burn_in", "kept", "test_batch_size")


def options_at(run: Path) -> dict[str, Any]:
    """All that config.json holds."""
    return read_config(run, FAMILY, NEEDED)


def values_for_evaluation(run: Path) -> dict[str, Any]:
    """As the run evaluated, or would have."""
    had = options_at(run)
    # The run's own `images` is how many it trained with.
    return {**{name: had[name] for name in TAKEN if name in had}, "images": had.get("test_images")}


def values_for_samples(run: Path) -> dict[str, Any]:
    """The run's images, and as many HMC iterations as it trained with, where it did."""
    had = options_at(run)
    return {name: had[name] for name in ("data", "hmc_steps") if had.get(name)}

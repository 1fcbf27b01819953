"""A run used again: which folder a path means, and the options that the run had. No jax.

A run's config.json has them all. A folder of checkpoints elsewhere has its network.json alone, which tells what the
network is; the rest are the defaults then.
"""

from pathlib import Path
from typing import Any

from hotloop.engine.records import read_json
from hotloop.engine.run import read_config
from hotloop.errors import CheckpointError

FAMILY, ABOUT, CONFIG = "cnn", "network.json", "config.json"
NOT_TAKEN = frozenset({
    "training", "validation", "resume", "compile_only", "plan", "expect", "checkpoint_input_dir",
    "checkpoint_output_dir", "clean_dir", "random_weights", "results_dir", "run_name", "report", "mlperf_logging",
    "wandb", "wandb_run_name", "wandb_tags",
})  # fmt: skip
"""What a run had for itself: which phases ran, and where it wrote."""


def run_at(path: Path) -> Path | None:
    """The run's folder that a path is, or whose checkpoints it is; None where no run wrote it."""
    parents = (path, path.parent) if path.name == "checkpoints" else (path,)
    return next((folder for folder in parents if (folder / CONFIG).exists()), None)


def options_at(run: Path) -> dict[str, Any]:
    """Every option of a run."""
    return read_config(run, FAMILY, {"model_name": str, "dataset": str})


def values_of(path: Path) -> dict[str, Any]:
    """The options for whoever validates what lies at a path."""
    run = run_at(path)
    if run is None and not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run's folder or its folder of checkpoints")
    if run is None and not (path / ABOUT).exists():
        raise CheckpointError(
            f"{path}: neither a run's folder ({CONFIG}) nor one of checkpoints ({ABOUT}); give one of these"
        )
    had = _of_checkpoints(path / ABOUT) if run is None else options_at(run)
    taken = {name: value for name, value in had.items() if name not in NOT_TAKEN}
    return {**taken, "checkpoint_input_dir": str(path)}


def _of_checkpoints(file: Path) -> dict[str, Any]:
    found = read_json(file)
    try:
        network = found["network"]
        norm = network["norm"]
        layer = {"name": "batch_norm", "momentum": norm["momentum"]}
        if norm["kind"] == "group":
            sizes = {"num_groups": norm["groups"], "channels_per_group": norm["channels_per_group"]}
            layer = {"name": "group_norm", **{key: size for key, size in sizes.items() if size is not None}}
        return {
            "model_name": network["model"],
            "norm_layer": layer,
            **{name: found[name] for name in ("dataset", "precision", "half")},
        }
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None

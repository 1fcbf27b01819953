"""Option values that were not typed: those of the named configurations, and those of a run that is used again. No jax.

A folder of checkpoints without its run has its network.json alone: the rest are the defaults then.
"""

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from hotloop.engine.run import read_config, read_json
from hotloop.errors import CheckpointError
from hotloop.options.document import parse_document

CONFIGS_FILE = "configs.yml"
FAMILY, NETWORK_FILE, RUN_CONFIG = "cnn", "network.json", "config.json"

NOT_TAKEN = frozenset({
    "training", "validation", "resume", "compile_only", "plan", "expect", "checkpoint_input_dir",
    "checkpoint_output_dir", "clean_dir", "random_weights", "results_dir", "run_name", "report", "mlperf_logging",
    "wandb", "wandb_run_name", "wandb_tags", "init_from", "freeze",
})  # fmt: skip
"""What a run had for itself: which phases ran, what they began with, and where it wrote."""


@cache
def _read_configs() -> Mapping[str, Mapping[str, Any]]:
    text = files("hotloop.families.cnn").joinpath(CONFIGS_FILE).read_text(encoding="utf-8")
    contents: Mapping[str, Mapping[str, Any]] = parse_document(text, CONFIGS_FILE)
    return contents


class NamedConfigs(Mapping[str, Mapping[str, Any]]):
    """The named configurations with the options of one command, train's where they name none; read when the first is
    asked for: a command without --config does not wait for them."""

    def __init__(self, command: str):
        self._command = command

    @cached_property
    def _contents(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            name: {key: value for key, value in values.items() if key != "command"}
            for name, values in _read_configs().items()
            if values.get("command", "train") == self._command
        }

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._contents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)


PRESETS, SPEEDRUN_PRESETS = NamedConfigs("train"), NamedConfigs("speedrun")


def find_run(path: Path) -> Path | None:
    """The run's folder that a path is, or whose checkpoints it is; None where no run wrote it."""
    parents = (path, path.parent) if path.name == "checkpoints" else (path,)
    return next((folder for folder in parents if (folder / RUN_CONFIG).exists()), None)


def read_run_options(run: Path) -> dict[str, Any]:
    return read_config(run, FAMILY, {"model_name": str, "dataset": str})


def values_of_run(path: Path) -> dict[str, Any]:
    """The options for validating what lies at a path."""
    run = find_run(path)
    if run is None and not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run's folder or its folder of checkpoints")
    if run is None and not (path / NETWORK_FILE).exists():
        raise CheckpointError(
            f"{path}: neither a run's folder ({RUN_CONFIG}) nor one of checkpoints ({NETWORK_FILE}); give one of these"
        )
    had = _values_of_checkpoints(path / NETWORK_FILE) if run is None else read_run_options(run)
    taken = {name: value for name, value in had.items() if name not in NOT_TAKEN}
    return {**taken, "checkpoint_input_dir": str(path)}


def _values_of_checkpoints(file: Path) -> dict[str, Any]:
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

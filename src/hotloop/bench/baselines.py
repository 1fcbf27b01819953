"""Baselines: one JSON file with the last accepted values of every variant by device, and thresholds by metric.

The file is made to be kept under version control and read by people. Updating replaces what was measured now on this
device and leaves the rest. It judges nothing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.bench.page import write_text
from hotloop.bench.results import Sample
from hotloop.errors import DataError
from hotloop.options.files import load_json

Samples = Mapping[tuple[str, str], Sample]


@dataclass(frozen=True)
class Baselines:
    """The file's contents: samples by device, and the share by which each metric may differ (globs)."""

    devices: Mapping[str, Samples] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def updated(self, device: str, found: Samples) -> "Baselines":
        """With what was found on a device in the place of what it had."""
        return Baselines({**self.devices, device: {**self.devices.get(device, {}), **found}}, self.thresholds)


def load(path: str | Path) -> Baselines:
    """Read the file, or a DataError that says what is wrong with it."""
    path = Path(path)
    try:
        said = load_json(path)
        devices = {name: _samples(variants) for name, variants in said["devices"].items()}
        thresholds = {metric: _share(share) for metric, share in said.get("thresholds", {}).items()}
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); make it with --update-baseline"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path}: is no file of baselines ({error}); make one with --update-baseline"
        ) from error
    return Baselines(devices, thresholds)


def _share(value: Any) -> float:
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"a threshold of {value}: give a share of 0 or more")
    return float(value)


def save(path: str | Path, baselines: Baselines) -> None:
    """Write the file whole or not at all."""
    path = Path(path)
    devices = {name: _plain(found) for name, found in baselines.devices.items()}
    text = json.dumps({"thresholds": dict(baselines.thresholds), "devices": devices}, indent=1)
    write_text(path, text + "\n")


def _samples(variants: Mapping[str, Any]) -> dict[tuple[str, str], Sample]:
    return {
        (variant, metric): Sample(
            said["benchmark"],
            variant,
            metric,
            said.get("unit", ""),
            said.get("params", {}),
            tuple(float(value) for value in said["values"]),
            paces=tuple(float(pace) for pace in said.get("paces", ())),
        )
        for variant, metrics in variants.items()
        for metric, said in metrics.items()
    }


def _plain(found: Samples) -> dict[str, dict[str, Any]]:
    variants: dict[str, dict[str, Any]] = {}
    for (variant, metric), sample in found.items():
        variants.setdefault(variant, {})[metric] = {
            "benchmark": sample.benchmark,
            "unit": sample.unit,
            "params": dict(sample.params),
            "values": list(sample.values),
            "paces": [] if sample.best_paces else list(sample.paces),
        }
    return variants

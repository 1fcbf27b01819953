"""What two runs must have in common of which one was stopped or killed: records and checkpoints, but for the clock."""

from pathlib import Path
from typing import Any

from hotloop.engine.checkpoint_folder import OwnSteps
from hotloop.engine.run import current_records, read_events

OF_THE_CLOCK = ("second", "time", "elapsed", "throughput", "flops", "mfu", "memory", "process")
"""What is in the name of a figure that no two runs have in common."""
OF_THE_START = ("command", "folder", "resumed")


def _is_compared(name: str) -> bool:
    return name not in OF_THE_START and not any(word in name for word in OF_THE_CLOCK)


def records(run: Path) -> list[dict[str, Any]]:
    """The run's records as they stand, without what another clock, folder or command line changes."""
    return [
        {k: v for k, v in record.items() if _is_compared(k)} for record in current_records(read_events(run))
    ]


def checkpoints(folder: Path) -> dict[int, Any]:
    """Of every step: the checksum of each array, the position, and the metrics that no clock has part in."""
    found = {}
    for step, manifest in OwnSteps(folder).complete().items():
        metrics = {k: v for k, v in manifest.metrics.items() if _is_compared(k)}
        found[step] = (dict(manifest.leaves), manifest.position, metrics)
    return found


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """What is in one and not in the other, for people who read a failure."""
    return [f"- {each}" for each in one if each not in other] + [
        f"+ {each}" for each in other if each not in one
    ]


def assert_same_run(run: Path, whole: Path) -> None:
    """Equal records in the same order, and equal checkpoints."""
    assert records(run) == records(whole), "\n".join(differences(records(whole), records(run)))
    assert checkpoints(run / "checkpoints") == checkpoints(whole / "checkpoints")

"""What one trial came to, read back from its run's folder: rates, errors, and users a second.

Compiling, validating and saving are in no log's time, so they are in no figure here. It knows the records of a
run, not who ran it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.engine.records import read_events, read_json
from hotloop.errors import RunError


@dataclass(frozen=True)
class Figures:
    """Figures of a run, as far as it came; None where nothing was logged."""

    learning_rate: float | None = None
    """The rate that the training began with."""
    last_learning_rate: float | None = None
    updates: int = 0
    users: int = 0
    """Users trained on, each as often as it was seen."""
    seconds: float = 0.0
    """Time of the updates alone."""
    maximum: float | None = None
    """Users a second of the fastest log."""
    loss: float | None = None
    """Mean over the updates of the last log, as is `rmse`."""
    rmse: float | None = None
    error: str | None = None
    """What ended the run, where it did not finish."""

    @property
    def average(self) -> float | None:
        """Users a second over all logs: users by time, not a mean of rates."""
        return self.users / self.seconds if self.seconds else None


def read_figures(folder: str | Path) -> Figures:
    """The figures of the run in a folder; empty ones where none was begun, or others wrote in it."""
    folder = Path(folder)
    try:
        return _figures(read_json(folder / "config.json"), list(read_events(folder)))
    except (RunError, LookupError, TypeError, ArithmeticError):
        return Figures()


def _figures(config: dict[str, Any], events: list[dict[str, Any]]) -> Figures:
    batch = config["batch_size"]
    rate = 2.0 ** config["base_learning_rate"] * batch * config["learning_rate_decay"][0]
    end: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "end"), {})
    logs = [event for event in events if event["event"] == "log"]
    return Figures(learning_rate=rate, error=end.get("error"), **_logged(logs, batch))


def _logged(logs: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    timed = [log for log in logs if log["throughput"]]
    if not timed:
        return {}
    before, seconds = 0, 0.0
    for log in timed:
        seconds += (log["update"] - before) * batch / log["throughput"]
        before = log["update"]
    last = timed[-1]
    return {
        "last_learning_rate": last["learning_rate"],
        "updates": last["update"],
        "users": last["update"] * batch,
        "seconds": seconds,
        "maximum": max(log["throughput"] for log in timed),
        "loss": last["loss"],
        "rmse": last["rmse"],
    }

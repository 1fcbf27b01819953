"""What the run of a trial of `hotloop recommender sweep` came to: rates, losses, users a second, from its records."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotloop.engine.run import read_events, read_json
from hotloop.errors import RunError
from hotloop.sweeps.trial import Figures


@dataclass(frozen=True, kw_only=True)
class TrialFigures(Figures):
    """Figures of a run, as far as it came; None where nothing was logged."""

    learning_rate: float | None = None  # that the training began with, or that its --lr-schedule is made of
    last_learning_rate: float | None = None
    updates: int = 0
    users: int = 0  # trained on, each as often as it was seen
    seconds: float = 0.0  # of the updates alone: compiling, validating and saving are in no log's time
    maximum: float | None = None  # users a second of the fastest log
    loss: float | None = None  # mean over the updates of the last log, as is `rmse`
    rmse: float | None = None

    @property
    def average(self) -> float | None:
        """Users a second over all logs: users by time, not a mean of rates."""
        return self.users / self.seconds if self.seconds else None


def read_figures(folder: str | Path) -> TrialFigures:
    """The figures of the run in a folder; empty ones where none was begun, or others wrote in it."""
    folder = Path(folder)
    try:
        config, events = read_json(folder / "config.json"), list(read_events(folder))
        batch = config["batch_size"]
        factor = config["learning_rate_decay"][0] if config.get("lr_schedule", "drops") == "drops" else 1
        rate = 2.0 ** config["base_learning_rate"] * batch * factor
        end: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "end"), {})
        logs = [event for event in events if event["event"] == "log" and event["throughput"]]
        if not logs:
            return TrialFigures(learning_rate=rate, error=end.get("error"))
        last, updates = logs[-1], [0, *(log["update"] for log in logs)]
        return TrialFigures(
            learning_rate=rate,
            last_learning_rate=last["learning_rate"],
            updates=last["update"],
            users=last["update"] * batch,
            seconds=sum(
                (after - before) * batch / log["throughput"]
                for (before, after), log in zip(pairwise(updates), logs, strict=True)
            ),
            maximum=max(log["throughput"] for log in logs),
            loss=last["loss"],
            rmse=last.get("rmse"),  # ranking has none
            error=end.get("error"),
        )
    except (RunError, LookupError, TypeError, ArithmeticError):
        return TrialFigures()

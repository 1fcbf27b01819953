"""The result of a sweep: a row for each trial, totals, the best rate, and how all of it is told.

The totals are rates that the machine had: trials that ran at the same time are added up, trials that ran one after
the other are not. It knows outcomes, not how trials are run.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hotloop.engine.progress import Console
from hotloop.families.recommender.trials import Outcome

COLUMNS = {
    "trial": "trial",
    "exponent": "exponent",
    "learning rate": "learning_rate",
    "loss": "loss",
    "RMSE": "rmse",
    "validation RMSE": "validation_rmse",
    "users/s": "average_users_per_second",
    "max users/s": "maximum_users_per_second",
    "status": "status",
}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Rows, totals, the best exponent, and how many trials did not finish."""
    rows = [row(outcome) for outcome in outcomes]
    average, maximum = totals(outcomes)
    finished = [each for each in rows if each["status"] == "finished" and each["loss"] is not None]
    best = min(finished, key=_rank, default=None)
    return {
        "trials": rows,
        "average_throughput": average,
        "maximum_throughput": maximum,
        "best": best and best["exponent"],
        "loss": best and best["loss"],
        "unfinished": sum(each["status"] != "finished" for each in rows),
    }


def _rank(trial: Mapping[str, Any]) -> tuple[float, float]:
    """Validation before loss, where there is one."""
    validation = trial["validation_rmse"]
    return (math.inf if validation is None else validation, trial["loss"])


def row(outcome: Outcome) -> dict[str, Any]:
    """One trial as the result has it."""
    figures, answer = outcome.figures, outcome.answer or {}
    return {
        "trial": outcome.trial.number,
        "exponent": outcome.trial.exponent,
        "learning_rate": figures.learning_rate,
        "last_learning_rate": figures.last_learning_rate,
        "loss": figures.loss,
        "rmse": figures.rmse,
        "validation_rmse": answer.get("validation", {}).get("rmse"),
        "test_rmse": answer.get("test", {}).get("rmse"),
        "updates": figures.updates,
        "average_users_per_second": figures.average,
        "maximum_users_per_second": figures.maximum,
        "seconds": outcome.seconds,
        "slot": outcome.slot,
        "status": outcome.status,
        "exit_status": outcome.exit_status,
        "reason": outcome.reason,
        "run": str(outcome.trial.folder),
    }


def totals(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Average and maximum users a second of the sweep: for each slot its own, added up over slots.

    A slot's trials came one after the other, so its average is all its users by all its time, and its maximum that
    of its fastest trial; slots worked at the same time.
    """
    average = maximum = 0.0
    for slot in {outcome.slot for outcome in outcomes}:
        here = [outcome.figures for outcome in outcomes if outcome.slot == slot]
        seconds = sum(figures.seconds for figures in here)
        average += sum(figures.users for figures in here) / seconds if seconds else 0.0
        maximum += max(figures.maximum or 0.0 for figures in here)
    return average, maximum


def tell(result: Mapping[str, Any], console: Console) -> None:
    """The table, the totals, and what to do with them."""
    console.table(
        tuple(COLUMNS), [[_cell(each[name]) for name in COLUMNS.values()] for each in result["trials"]]
    )
    console.say(f"Aggregate average throughput: {result['average_throughput']:.0f} samples/sec")
    # No colon: old patterns take the mean of every "throughput: X samples/sec", and the average alone is meant.
    console.say(f"Aggregate maximum throughput = {result['maximum_throughput']:.0f} samples/sec")
    if result["best"] is not None:
        figure = "validation RMSE" if result["validated"] else "loss"
        console.say(f"lowest {figure}: train with --base-learning-rate {result['best']:g}")
    if result["unfinished"]:
        console.warn(f"{result['unfinished']} of {len(result['trials'])} trials did not finish")


def _cell(value: Any) -> Any:
    if value is None:
        return "-"
    return float(f"{value:.4g}") if isinstance(value, float) else value


def short(value: float | None) -> str:
    """A figure in four decimals, a dash for nothing."""
    return "-" if value is None else f"{value:.4f}"

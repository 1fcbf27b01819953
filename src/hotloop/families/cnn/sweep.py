"""`hotloop cnn sweep`: trainings in processes of their own, a device each, their journal and their table.

It knows no device and no model; a trial is the command `hotloop cnn train`, and what it came to is read from the
records of its run. A trial that fails is a row like any other.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from hotloop import rehearsal
from hotloop.engine.interrupt import Stopped
from hotloop.engine.progress import Console
from hotloop.engine.run import check_makeable, current_records, read_events, write_json
from hotloop.errors import DeviceError, RunError
from hotloop.families.cnn.sweep_options import OBJECTIVES, SweepConfig
from hotloop.families.cnn.sweep_plan import Context, SweepPlan, describe_values, format_cell, trial_name
from hotloop.sweeps.engines import Engine, LocalEngine
from hotloop.sweeps.journal import Journal, check_journal, open_journal
from hotloop.sweeps.places import open_engine
from hotloop.sweeps.trial import Figures, Trial, TrialOutcome, watch_trials

TRAIN = (sys.executable, "-m", "hotloop", "cnn", "train")
STATUSES = ("finished", "diverged", "failed")
Row = dict[str, Any]


@dataclass(frozen=True)
class RunFigures(Figures):
    """What the records of a run say; None where they say nothing."""

    validation_accuracy: float | None = None  # of the best checkpoint
    epoch_to_target: float | None = None
    optimization_metric: float | None = None
    epoch: float | None = None  # how far the training came


def read_figures(folder: Path) -> RunFigures:
    """The figures of the run in a folder; empty ones where none was begun, or others wrote in it."""
    try:
        records = current_records(read_events(folder))
        end: Mapping[str, Any] = next((each for each in reversed(records) if each["event"] == "end"), {})
        # Of averages where there are any, as the best checkpoint is chosen (`counted_accuracy`, which has jax).
        name = "ema_accuracy" if any("ema_accuracy" in each for each in records) else "validation_accuracy"
        found = [each[name] for each in records if each["event"] == "validation"]
        target: Mapping[str, Any] = next((each for each in records if each["event"] == "sweep"), {})
        reached = max((float(each["epoch"]) for each in records if each["event"] == "log"), default=None)
        return RunFigures(
            end.get("error"),
            max(found, default=None),
            target.get("epoch_to_target"),
            target.get("optimization_metric"),
            reached,
        )
    except (RunError, LookupError, TypeError, ValueError):
        return RunFigures()


def run(config: SweepConfig, plan: SweepPlan, context: Context) -> dict[str, Any]:
    """Every trial that has not ended yet; then the table, the best first."""
    check_makeable(plan.folder, "the sweep's folder")
    check_journal(plan.folder, plan.about, resume=config.resume)
    rehearsal.begin_work(f"making {plan.folder}")
    engine = open_engine(config, context)  # what it cannot run on is said before a folder is made
    if isinstance(engine, LocalEngine):
        check_replicas(config, plan, engine.devices.of_a_trial(os.environ))
    began = time.monotonic()
    with open_journal(plan.folder, plan.about, resume=config.resume) as journal:
        check_rows(plan, journal)
        left = [number for number in range(1, plan.count + 1) if not _has_ended(journal, number, config)]
        if config.seed is None:
            context.say(f"seed: {plan.seed}")
        if done := plan.count - len(left):
            context.say(f"{done} of {plan.count} trials have ended before")
        concurrent = run_trials(plan, engine, journal, left, context) if left else 0
        rows = rank_rows(journal.rows.values(), plan.maximise)
    result = {
        "folder": str(plan.folder),
        "named": config.named,
        "objective": plan.objective,
        "goal": "maximise" if plan.maximise else "minimise",
        "method": plan.method,
        "engine": config.engine,
        "concurrent": concurrent,
        "seed": plan.seed,
        "seconds": time.monotonic() - began,
        "trials": rows,
        "best": next((row for row in rows if row["objective"] is not None), None),
        "unfinished": sum(row["status"] != "finished" for row in rows),
    }
    write_json(plan.folder / "sweep.json", result)
    show_result(plan, result, context)
    if all(row["status"] == "failed" for row in rows):
        first = min(rows, key=lambda row: int(row["trial"]))
        raise RunError(f"every trial failed, the first with {first['reason']} ({plan.folder})")
    return result


def check_replicas(config: SweepConfig, plan: SweepPlan, devices: int | None) -> None:
    """DeviceError where a trial is told of more replicas than it has devices, which its training would refuse."""
    told = plan.words.keys() | plan.space.keys()
    if devices is None or plan.named is not None or "num_replicas" not in told or "strict_devices" in told:
        return
    numbers = range(1, plan.count + 1)
    most = max(int(plan.choose(number).get("num_replicas", config.num_replicas)) for number in numbers)
    if most > devices:
        raise DeviceError(
            f"--num-replicas {most}: a trial has {devices} device{'s' * (devices != 1)}; leave it out, or with "
            "--strict-devices False it accumulates in their place"
        )


def check_rows(plan: SweepPlan, journal: Journal) -> None:
    """RunError where the journal holds what no sweep of this kind writes."""
    number = (int, float, NoneType)
    kinds = dict.fromkeys(("objective", *OBJECTIVES, "epoch", "seconds"), number)
    for trial, row in journal.rows.items():
        good = all(name in row and type(row[name]) in kind for name, kind in kinds.items())
        if not good or row.get("trial") != trial or row.get("status") not in STATUSES:
            raise RunError(f"{journal.path}: the row of trial {trial} is no sweep's: the file was altered")
    for trial, values in journal.begun.items():
        if values.keys() != plan.space.keys():
            raise RunError(f"{journal.path}: trial {trial} tries something else: the file was altered")


def _has_ended(journal: Journal, number: int, config: SweepConfig) -> bool:
    row = journal.rows.get(number)
    return row is not None and not (config.retry_failed and row["status"] != "finished")


def run_trials(
    plan: SweepPlan, engine: Engine, journal: Journal, left: Sequence[int], context: Context
) -> int:
    """Run the trials of these numbers; how many ran at a time. `Stopped` says how to go on."""
    shown: list[Trial] = []
    warned: set[str] = set()

    def to_run() -> Iterator[Trial]:
        for number in left:
            values = journal.begun.get(number) or plan.choose(number, journal)
            shown.append(make_trial(plan, number, values))
            journal.begin(number, values)
            yield shown[-1]

    def ended(outcome: TrialOutcome) -> None:
        bar.advance()
        for warning in dict.fromkeys(text for text in outcome.warnings if text not in warned):
            warned.add(warning)  # what one warns of, the others do, too
            context.warn(warning)
        row = make_row(plan, outcome)
        journal.end(outcome.trial.number, row)
        head = f"trial {row['trial']} of {plan.count}, {describe_values(row['values'])}"
        if row["status"] == "finished":
            context.say(f"{head}: {plan.objective} {format_cell(row['objective'])}")
        else:
            context.warn(f"{head} {row['status']}, {row['reason']}")

    try:
        with context.progress("sweep", len(left)) as bar, watch_trials(shown, bar):
            _, concurrent = engine(to_run(), len(left), ended)
    except KeyboardInterrupt as stop:
        text = (
            "interrupted: all trials are stopped, those under way keep their last checkpoint; to go on: "
            f"the same command with --resume --run-name {plan.folder.name}"
        )
        raise Stopped.because_of(stop, text) from None
    return concurrent


def make_trial(plan: SweepPlan, number: int, values: Mapping[str, Any]) -> Trial:
    """A trial; where its run was begun before, it goes on."""
    folder = plan.folder / trial_name(number)
    goes_on = ("--resume",) if (folder / "config.json").exists() else ()
    command = (*TRAIN, "--json", *plan.trial_words(number, values), *goes_on)
    return Trial(number, values, folder, command, read_figures)


def make_row(plan: SweepPlan, outcome: TrialOutcome) -> Row:
    figures = outcome.figures
    finished = outcome.status == "finished"
    return {
        "trial": outcome.trial.number,
        "values": outcome.trial.values,
        "objective": getattr(figures, plan.objective) if finished else None,
        **{name: getattr(figures, name) for name in OBJECTIVES},
        "epoch": figures.epoch,
        "status": outcome.status,
        "reason": outcome.reason,
        "exit_status": outcome.exit_status,
        "seconds": outcome.seconds,
        "slot": outcome.slot,
        "run": str(outcome.trial.folder),
    }


def rank_rows(rows: Iterable[Row], maximise: bool) -> list[Row]:
    """The best first; then those without the figure by their accuracy, and those that failed at the end."""

    def place(row: Row) -> tuple[Any, ...]:
        value, accuracy = row["objective"], row["validation_accuracy"]
        rank = math.inf if value is None else -value if maximise else value
        return STATUSES.index(row["status"]), rank, -(accuracy or 0.0), row["trial"]

    return sorted(rows, key=place)


def describe(plan: SweepPlan) -> list[str]:
    """What is tried and how, for `--plan`."""
    goal = "maximised" if plan.maximise else "minimised"
    meaning = OBJECTIVES[plan.objective].meaning
    lines = [f"{plan.objective} ({meaning}) is {goal}; {plan.method}, seed {plan.seed}"]
    return lines + [f"  {name}: {domain.describe()}" for name, domain in plan.space.items()]


def show_table(plan: SweepPlan, rows: Sequence[Row], console: Console) -> None:
    """A row a trial, in the order of the rows."""
    accuracy = [] if plan.objective == "validation_accuracy" else ["validation_accuracy"]
    figures = ["objective", *accuracy, "epoch", "seconds", "status"]
    columns = ["trial", *plan.space, plan.objective, *figures[1:]]
    cells = [
        [row["trial"], *(row["values"].get(name) for name in plan.space), *(row[name] for name in figures)]
        for row in rows
    ]
    console.table(columns, [[format_cell(value) for value in line] for line in cells])


def show_result(plan: SweepPlan, result: Mapping[str, Any], console: Console) -> None:
    rows, best = result["trials"], result["best"]
    show_table(plan, rows, console)
    if best is None:
        console.say(f"no trial has {plan.objective}: {OBJECTIVES[plan.objective].meaning}")
    else:
        figure = f"{plan.objective} {format_cell(best['objective'])}"
        console.say(
            f"best: trial {best['trial']}, {figure}, with {describe_values(best['values'])}; {best['run']}"
        )
    if result["unfinished"]:
        console.warn(f"{result['unfinished']} of {len(rows)} trials did not finish")

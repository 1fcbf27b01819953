"""`hotloop recommender sweep`: one training for each learning rate, each in a process of its own, and their table.

It knows no device and no model; a trial is the command `hotloop recommender train`. The totals are rates that the
machine had: trials that ran at the same time are added up, trials that ran one after the other are not.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotloop import rehearsal
from hotloop.engine.interrupt import Stopped
from hotloop.engine.progress import Console
from hotloop.engine.run import check_can_make, write_json
from hotloop.errors import DataError, RunError
from hotloop.families.recommender.commands_config import SweepOptions
from hotloop.families.recommender.config import FILES, KS, OLD, TrainOptions, warn_of_no_effect
from hotloop.families.recommender.trials import read_figures
from hotloop.options import Params, options_of, to_jsonable
from hotloop.sweeps.engines import LocalEngine
from hotloop.sweeps.places import SweepConsole, open_engine
from hotloop.sweeps.trial import Trial, TrialOutcome, watch_trials

TRAIN = (sys.executable, "-m", "hotloop", "recommender", "train")
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
NDCG = f"validation NDCG@{KS[0]}"
"""Where an order is learnt, it stands in the place of the errors."""
OF_RANKING = {
    NDCG if value == "validation_rmse" else name: "validation_ndcg" if value == "validation_rmse" else value
    for name, value in COLUMNS.items()
    if value != "rmse"
}


def run(config: SweepOptions, console: SweepConsole) -> dict[str, Any]:
    _check(config, console)
    engine = open_engine(config, console)  # what it cannot run on is said before a folder is made
    folder = make_folder(config)
    trials = [
        Trial(
            n,
            {"exponent": exponent},
            folder / f"trial-{n:02d}",
            trial_command(config, exponent, folder, n, console),
            read_figures,
        )
        for n, exponent in enumerate(config.exponents, start=1)
    ]
    warned: set[str] = set()

    def ended(outcome: TrialOutcome) -> None:
        bar.advance()
        for warning in [text for text in outcome.warnings if text not in warned]:
            warned.add(warning)  # what one warns of, the others do, too
            console.warn(warning)
        head = f"trial {outcome.trial.number} of {len(trials)}, exponent {outcome.trial.values['exponent']:g}"
        if outcome.status == "finished":
            values = (outcome.figures.loss, outcome.figures.rmse)
            loss, rmse = ("-" if value is None else f"{value:.4f}" for value in values)
            console.say(
                f"{head}: loss: {loss}" + (f", RMSE: {rmse}" if config.objective == "ratings" else "")
            )
        else:
            console.warn(f"{head} {outcome.status}, {outcome.reason}")

    began = time.monotonic()
    try:
        with console.progress("sweep", len(trials)) as bar, watch_trials(trials, bar):
            outcomes, concurrent = engine(trials, len(trials), ended)
    except KeyboardInterrupt as stop:
        said = f"interrupted: all trials are stopped, their runs are in {folder}"
        raise Stopped.because_of(stop, said) from None
    result = {
        "folder": str(folder),
        "engine": config.engine,
        "concurrent": concurrent,
        "seconds": time.monotonic() - began,
        "validated": config.is_validated,
        "objective": config.objective,
        **summarise(outcomes),
    }
    write_json(folder / "sweep.json", result)
    if all(outcome.status == "failed" for outcome in outcomes):
        raise RunError(f"every trial failed, the first with {outcomes[0].reason} ({folder})")
    show_result(result, console)
    return result


def describe(config: SweepOptions, console: SweepConsole) -> str:
    """The trials; that each of them is possible is for a training to say."""
    _check(config, console)
    exponents = ", ".join(f"{exponent:g}" for exponent in config.exponents)
    engine = open_engine(config, console)
    where = engine.describe(len(config.exponents)) if isinstance(engine, LocalEngine) else "trials on Ray"
    return f"{where}: base learning rates of 2 to the power of {exponents}; each is this training:"


def _check(config: SweepOptions, console: SweepConsole) -> None:
    warn_of_no_effect(config, console.warn)
    for name in FILES:
        path = getattr(config, name)
        if path is not None and not path.is_file():  # once, not once a trial
            raise DataError(f"--{name.replace('_', '-')} {path}: there is no such file")


def make_folder(config: SweepOptions) -> Path:
    """RESULTS/NAME, empty; the name says seed and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    name = config.run_name or f"sweep-rn{config.seed}-{stamp}-{os.getpid()}"
    folder = (config.results_dir / name).absolute()
    try:
        if rehearsal.is_on():
            check_can_make(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        taken = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror}); choose another --results-dir") from None
    if taken:
        raise RunError(f"{folder} is there already: choose another --run-name")
    rehearsal.begin_work(f"making {folder}")
    return folder


def trial_command(
    config: SweepOptions, exponent: float, folder: Path, number: int, console: SweepConsole
) -> tuple[str, ...]:
    """Good in any folder: the trial's rate, and every option that is not at its default."""
    chosen = replace(config.training(exponent), results_dir=folder, run_name=f"trial-{number:02d}")
    words = [f"--device={console.device}", *(["--only-accelerator"] if console.only_accelerator else [])]
    for each in options_of(TrainOptions):
        value = getattr(chosen, each.name)
        wanted = value != each.default or each.name == "base_learning_rate"
        if wanted and each.group != OLD:  # one warning of the sweep is enough
            words.append(f"{each.spelling}={_word(value)}")
    return (*TRAIN, "--json", *words)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_word, value))
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Params):
        return json.dumps(to_jsonable(value))
    return repr(value) if isinstance(value, float) else str(value)  # every digit of a float


def summarise(outcomes: Sequence[TrialOutcome]) -> dict[str, Any]:
    rows = [
        {
            "trial": outcome.trial.number,
            "exponent": outcome.trial.values["exponent"],
            "learning_rate": outcome.figures.learning_rate,
            "last_learning_rate": outcome.figures.last_learning_rate,
            "loss": outcome.figures.loss,
            "rmse": outcome.figures.rmse,
            "validation_rmse": (outcome.answer or {}).get("validation", {}).get("rmse"),
            "validation_ndcg": (outcome.answer or {}).get("validation", {}).get(f"ndcg@{KS[0]}"),
            "test_rmse": (outcome.answer or {}).get("test", {}).get("rmse"),
            "updates": outcome.figures.updates,
            "average_users_per_second": outcome.figures.average,
            "maximum_users_per_second": outcome.figures.maximum,
            "seconds": outcome.seconds,
            "slot": outcome.slot,
            "status": outcome.status,
            "exit_status": outcome.exit_status,
            "reason": outcome.reason,
            "run": str(outcome.trial.folder),
        }
        for outcome in outcomes
    ]
    average, maximum = add_throughputs(outcomes)
    finished = [each for each in rows if each["status"] == "finished" and each["loss"] is not None]

    def rank(row: Mapping[str, Any]) -> tuple[float, float]:  # validation before loss, where there is one
        if row["validation_rmse"] is None and row["validation_ndcg"] is not None:
            return -row["validation_ndcg"], row["loss"]
        return math.inf if row["validation_rmse"] is None else row["validation_rmse"], row["loss"]

    best = min(finished, key=rank, default=None)
    return {
        "trials": rows,
        "average_throughput": average,
        "maximum_throughput": maximum,
        "best": best and best["exponent"],
        "loss": best and best["loss"],
        "unfinished": sum(each["status"] != "finished" for each in rows),
    }


def add_throughputs(outcomes: Sequence[TrialOutcome]) -> tuple[float, float]:
    """Average and maximum users a second of the sweep: for each slot its own, added up over slots."""
    # A slot's trials came one after the other: its average is all its users by all its time. Slots worked side by side.
    average = maximum = 0.0
    for slot in {outcome.slot for outcome in outcomes}:
        here = [outcome.figures for outcome in outcomes if outcome.slot == slot]
        seconds = sum(figures.seconds for figures in here)
        average += sum(figures.users for figures in here) / seconds if seconds else 0.0
        maximum += max(figures.maximum or 0.0 for figures in here)
    return average, maximum


def show_result(result: Mapping[str, Any], console: Console) -> None:
    def cell(value: Any) -> Any:
        if value is None:
            return "-"
        return float(f"{value:.4g}") if isinstance(value, float) else value

    is_ranking = result["objective"] == "ranking"
    columns = OF_RANKING if is_ranking else COLUMNS
    rows = [[cell(each[name]) for name in columns.values()] for each in result["trials"]]
    console.table(tuple(columns), rows)
    console.say(f"Aggregate average throughput: {result['average_throughput']:.0f} samples/sec")
    # No colon: old patterns take the mean of every "throughput: X samples/sec", and the average alone is meant.
    console.say(f"Aggregate maximum throughput = {result['maximum_throughput']:.0f} samples/sec")
    if result["best"] is not None:
        figure = "lowest validation RMSE" if result["validated"] else "lowest loss"
        figure = f"highest {NDCG}" if is_ranking and result["validated"] else figure
        console.say(f"{figure}: train with --base-learning-rate {result['best']:g}")
    if result["unfinished"]:
        console.warn(f"{result['unfinished']} of {len(result['trials'])} trials did not finish")

"""`hotloop recommender ...`: options live in the family's configs; jax waits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotloop import rehearsal
from hotloop.cli.command import Command, Context
from hotloop.families.recommender import commands_config
from hotloop.families.recommender.commands_config import (
    BaselineOptions,
    ConvertOptions,
    EvaluateOptions,
    PredictOptions,
    RecommendOptions,
)
from hotloop.families.recommender.config import PRESETS, TrainOptions
from hotloop.families.recommender.sweep_config import PRESETS as SWEEPS
from hotloop.families.recommender.sweep_config import SweepOptions

FAMILY = "hotloop.families.recommender"
EPILOG = """Examples:
  hotloop recommender train                                   random ratings of the old program's shape
  hotloop recommender train --config ml-100k                  MovieLens-100K, best epoch by validation, then the test
  hotloop recommender train --training-data-file data/3m_train.txt --validation-data-file data/3m_valid.txt

docs/recommender.md tells what is computed and what became of the old programs' options."""


def run_train(config: TrainOptions, context: Context) -> Mapping[str, Any]:
    """Train, or with --plan say what would be done."""
    from hotloop.families.recommender import train

    if config.plan:
        from hotloop.cli.plan import show_plan

        setup = train.prepare(config, context)
        context.say(train.describe(setup))
        return show_plan(setup.plan, context)
    return train.run(config, context, " ".join(["hotloop", *context.argv]))


def run_sweep(config: SweepOptions, context: Context) -> Mapping[str, Any]:
    """Trials in processes of their own; no device is opened here, for the children need it."""
    from hotloop.cli.recommender_plot import write_plot
    from hotloop.families.recommender.sweep import run

    if config.plan:
        return plan_sweep(config, context)
    if rehearsal.is_on():
        plan_trial(config, context)
    result = run(config, context)
    plot = write_plot(result)
    context.say(f"plot: {plot}")
    return {**result, "plot": str(plot)}


def plan_sweep(config: SweepOptions, context: Context) -> Mapping[str, Any]:
    """What the trials would do; the device may be opened here, since there will be no children."""
    from hotloop.families.recommender.sweep import describe

    context.say(describe(config, context))
    return {**plan_trial(config, context), "exponents": list(config.exponents)}


def plan_trial(config: SweepOptions, context: Context) -> Mapping[str, Any]:
    """The first trial's plan, and with it all that a trial would refuse."""
    context.open_device()
    return run_train(replace(config.training(config.exponents[0]), plan=True), context)


COMMAND = Command(
    "recommender",
    "Train and use the deep autoencoder for ratings.",
    children=(
        Command(
            "train",
            "Train, validate, then test the best weights.",
            TrainOptions,
            run_train,
            on_device=True,
            presets=PRESETS,
            epilog=EPILOG,
        ),
        Command(
            "evaluate",
            "RMSE, MAE, NDCG and Recall of a run.",
            EvaluateOptions,
            f"{FAMILY}.evaluate:run",
            on_device=True,
            run_values=commands_config.evaluation_defaults,
        ),
        Command(
            "predict",
            "Predictions for a file or split, with the original ids.",
            PredictOptions,
            f"{FAMILY}.predict:run_predict",
            on_device=True,
            run_values=commands_config.evaluation_defaults,
        ),
        Command(
            "recommend",
            "The best items that users have not rated.",
            RecommendOptions,
            f"{FAMILY}.predict:run_recommend",
            on_device=True,
            run_values=commands_config.evaluation_defaults,
        ),
        Command(
            "baselines",
            "Mean, biases, popularity and EASE on the same split, in one table.",
            BaselineOptions,
            f"{FAMILY}.baselines:run",
            on_device=True,
            run_values=commands_config.baseline_defaults,
        ),
        Command(
            "sweep",
            "A scan over learning rates, one process a trial.",
            SweepOptions,
            run_sweep,
            presets=SWEEPS,
        ),
        Command(
            "convert",
            "Raw Netflix or MovieLens ratings to text files, split.",
            ConvertOptions,
            f"{FAMILY}.convert:run",
        ),
    ),
)

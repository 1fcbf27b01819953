"""`hotloop recommender ...`: options live in the family's configs; jax waits."""

from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path

from hotloop import rehearsal
from hotloop.cli.command import Command, Context, Result, computing_command
from hotloop.families.recommender import commands_config as configs
from hotloop.families.recommender.config import PRESETS, TrainOptions

FIGURES = {"loss": "final loss", "rmse": "final RMSE", "validation_rmse": "validation RMSE"}
EPILOG = """Examples:
  hotloop recommender train                                   random ratings of the old program's shape
  hotloop recommender train --config ml-100k                  MovieLens-100K, best epoch by validation, then the test
  hotloop recommender train --config ml-100k-ranking          the same network learns which items users like
  hotloop recommender train --training-data-file data/3m_train.txt --validation-data-file data/3m_valid.txt

docs/recommender.md tells what is computed and what became of the old programs' options."""


def run_train(config: TrainOptions, context: Context) -> Result:
    """Train, or with --plan say what would be done."""
    from hotloop.families.recommender import train

    if config.plan:
        setup = train.prepare(config, context)
        context.say(train.describe(setup))
        return context.show_plan(setup.plan)
    return train.run(config, context, " ".join(["hotloop", *context.argv]))


def run_sweep(config: configs.SweepOptions, context: Context) -> Result:
    """Trials in processes of their own, which need the device: it is opened here for a plan alone."""
    from hotloop.families.recommender import sweep

    if config.plan or rehearsal.is_on():
        if config.plan:
            context.say(sweep.describe(config, context))
        context.open_device()
        # The first trial's plan, and with it all that a trial would refuse.
        planned = run_train(replace(config.training(config.exponents[0]), plan=True), context)
        if config.plan:
            return {**planned, "exponents": list(config.exponents)}
    result = sweep.run(config, context)
    plot = write_plot(result)
    context.say(f"plot: {plot}")
    return {**result, "plot": str(plot)}


def write_plot(result: Result) -> Path:
    """Draw each figure of the trials that finished against the exponent, as one SVG file in the sweep's folder."""
    from hotloop.bench.axes import Axis
    from hotloop.bench.charts import Chart
    from hotloop.bench.page import write_text

    finished = [trial for trial in result["trials"] if trial["status"] == "finished"]
    finished.sort(key=lambda trial: float(trial["exponent"]))
    exponents = Axis("exponent: the rate is 2^exponent times the batch")
    chart = Chart("Learning-rate sweep", exponents, Axis("error"))
    for colour, (name, label) in enumerate(FIGURES.items()):
        points = [(trial["exponent"], trial[name]) for trial in finished if trial[name] is not None]
        if points:
            chart.add("dotted line", points, label, colour)
    # An `<svg>` of a page as a file of its own: with its namespace and the page's styles.
    style = files("hotloop.bench").joinpath("page.css").read_text("utf-8")
    head, rest = chart.render().split(">", 1)
    path = Path(result["folder"]) / "sweep.svg"
    write_text(path, f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}\n')
    return path


of_run = partial(computing_command, run_values=configs.evaluation_defaults)
COMMAND = Command(
    children=(
        computing_command(
            "train",
            "Train, validate, then test the best weights.",
            TrainOptions,
            run_train,
            presets=PRESETS,
            epilog=EPILOG,
        ),
        of_run(
            "evaluate",
            "RMSE, MAE, NDCG, Recall and coverage of a run.",
            configs.EvaluateOptions,
            "recommender.evaluate:run",
        ),
        of_run(
            "predict",
            "Predictions for a file or split, with the original ids.",
            configs.PredictOptions,
            "recommender.evaluate:run_predict",
        ),
        computing_command(
            "recommend",
            "The best items that users have not rated.",
            configs.RecommendOptions,
            "recommender.recommend:run",
            run_values=configs.recommend_defaults,
        ),
        computing_command(
            "baselines",
            "Mean, biases, popularity and EASE on the same split, in one table.",
            configs.BaselineOptions,
            "recommender.baselines:run",
            run_values=configs.baseline_defaults,
        ),
        Command(
            "sweep",
            "A scan over learning rates, one process a trial.",
            configs.SweepOptions,
            run_sweep,
            presets=configs.SWEEP_PRESETS,
        ),
        Command(
            "convert",
            "Raw Netflix or MovieLens ratings to text files, split.",
            configs.ConvertOptions,
            "recommender.convert:run",
        ),
    ),
)

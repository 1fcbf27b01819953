"""`hotloop recommender ...`: options live in the family's configs; jax waits."""

from collections.abc import Mapping
from typing import Any

from hotloop.cli.command import Command, Context
from hotloop.families.recommender.config import PRESETS, Train
from hotloop.families.recommender.convert_config import ConvertConfig

EPILOG = """Examples:
  hotloop recommender train                                   random ratings of the old program's shape
  hotloop recommender train --config ml-100k                  MovieLens-100K, best epoch by validation, then the test
  hotloop recommender train --training-data-file data/3m_train.txt --validation-data-file data/3m_valid.txt

docs/recommender.md tells what is computed and what became of the old programs' options."""


def run_train(config: Train, context: Context) -> Mapping[str, Any]:
    """Train, or with --plan say what would be done."""
    context.open_device()
    from hotloop.families.recommender import sets, train

    if config.plan:
        from hotloop.cli.plan import show

        resolved = config.resolved()
        data = sets.load(resolved, context)
        context.say(train.describe(resolved, data))
        return show(train.planned(resolved, data)[1], context)
    return train.run(config, context, " ".join(["hotloop", *context.argv]))


def run_convert(config: ConvertConfig, context: Context) -> Mapping[str, Any]:
    """Raw ratings to text files."""
    from hotloop.families.recommender.convert import run

    return run(config, context)


COMMAND = Command(
    "recommender",
    "Train and use the deep autoencoder for ratings.",
    children=(
        Command(
            "train",
            "Train, validate, then test the best weights.",
            Train,
            run_train,
            presets=PRESETS,
            epilog=EPILOG,
        ),
        Command(
            "convert", "Raw Netflix or MovieLens ratings to text files, split.", ConvertConfig, run_convert
        ),
    ),
)

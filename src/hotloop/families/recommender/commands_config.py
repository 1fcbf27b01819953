"""The options of `hotloop recommender evaluate`, and those that every measuring command shares. It imports no jax.

The options of `hotloop recommender predict` and `recommend`. It imports no jax.
The options of `hotloop recommender baselines`: the data options of `train`, and what to measure. No jax.
The options of a run for whoever uses it again: how it evaluated, and its ratings. No jax.
The options of `hotloop recommender convert`. It imports neither jax nor numpy.
"""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from hotloop.engine.run import read_config
from hotloop.errors import OptionError
from hotloop.families.recommender.config import DATA, RUN, TrainOptions
from hotloop.options import argument, between, finite, non_negative, option, positive, validate

MEASURES = "What is measured"


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """How scores become ratings, and how many users at once."""

    clip: bool = option(True, "Clip predictions to the range of the training ratings.", group=MEASURES)
    round: bool = option(False, "Round predictions to whole ratings.", group=MEASURES)
    batch_size: int | None = option(
        None,
        "Users at once; left out, as the run validated. It changes the mean-of-batches RMSE and nothing else.",
        check=positive,
        group=RUN,
    )


@dataclass(frozen=True, kw_only=True)
class RankingOptions(PredictionOptions):
    """What is ranked, and how deep."""

    k: tuple[int, ...] = option(
        (10, 100), "Lengths of recommendation lists for NDCG and recall.", check=positive, group=MEASURES
    )
    relevant: float = option(
        4.0, "Rating from which an item is relevant to its user.", check=finite, group=MEASURES
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Which weights of which run."""

    run: Path = argument("Folder of a run, as `hotloop recommender train` named it.", metavar="RUN")
    step: int | None = option(
        None, "Checkpoint after so many updates; left out, see --best.", check=non_negative, group=RUN
    )
    best: bool = option(
        True, "Without --step: the checkpoint that validated best; --no-best takes the newest.", group=RUN
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, kw_only=True)
class TruthOptions(CheckpointOptions):
    """The ratings that predictions are compared with."""

    split: Literal["validation", "test"] | None = option(
        None, "Ratings of the run's own data; left out, test where there is one, else validation.", group=DATA
    )
    data_file: Path | None = option(
        None, "Ratings of a file instead: user TAB item TAB rating.", metavar="FILE", group=DATA
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split and self.data_file:
            raise OptionError(
                f"--split {self.split} with --data-file {self.data_file}: choose one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TruthOptions, RankingOptions):
    """All of `hotloop recommender evaluate`."""


OUTPUT = "Output"
RATINGS_HELP = "What users have rated, instead of the training ratings; they need not be in those."


@dataclass(frozen=True, kw_only=True)
class PredictOptions(TruthOptions, PredictionOptions):
    """Which ratings to predict, and where to."""

    output: Path | None = option(
        None,
        "File of user TAB item TAB prediction TAB truth; left out, `predictions` in the run's folder.",
        metavar="FILE",
        group=OUTPUT,
    )
    ratings_file: Path | None = option(None, RATINGS_HELP, metavar="FILE", group=DATA)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratings_file and not self.data_file:
            raise OptionError(
                f"--ratings-file {self.ratings_file}: name the ratings to predict with --data-file"
            )


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(CheckpointOptions, PredictionOptions):
    """Whom to recommend how much."""

    users: tuple[int, ...] = option((), "Ids of users, as the ratings have them.", metavar="ID", group=DATA)
    all: bool = option(False, "Every user.", group=DATA)
    ratings_file: Path | None = option(None, RATINGS_HELP, metavar="FILE", group=DATA)
    top: int = option(10, "Items for each user.", check=positive, group=OUTPUT)
    output: Path | None = option(
        None,
        "File of user TAB item TAB prediction; left out, a table is shown.",
        metavar="FILE",
        group=OUTPUT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.users) == self.all:
            raise OptionError("recommend: give --users ID ... or --all" + (", not both" if self.all else ""))


AS_TRAINED: dict[str, Any] = {
    each.name: field(default=each.default, metadata=each.metadata) for each in fields(TrainOptions)
}
"""Every option of `train`, with the default, help and check that it has there."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The ratings, named as for training."""

    training_data_file: Path | None = AS_TRAINED["training_data_file"]
    validation_data_file: Path | None = AS_TRAINED["validation_data_file"]
    test_data_file: Path | None = AS_TRAINED["test_data_file"]
    data: Literal["random", "procedural", "ml-100k"] = AS_TRAINED["data"]
    split: Literal["random", "user-time"] = AS_TRAINED["split"]
    fractions: tuple[float, ...] = AS_TRAINED["fractions"]
    seed: int = AS_TRAINED["seed"]

    def training(self) -> TrainOptions:
        """These data as options of a training, whose checks they must pass."""
        only_test = self.test_data_file is not None and self.validation_data_file is None
        return TrainOptions(**self.values(), no_validation=only_test)

    def values(self) -> dict[str, Any]:
        """Names and values of the data options alone."""
        return {each.name: getattr(self, each.name) for each in fields(DataOptions)}


@dataclass(frozen=True, kw_only=True)
class BaselineOptions(RankingOptions, DataOptions):
    """All of `hotloop recommender baselines`."""

    run: Path | None = option(
        None,
        "A trained run for the last row; without data options, its data are taken.",
        metavar="RUN",
        group=RUN,
    )
    step: int | None = option(
        None, "Checkpoint of --run; left out, the one that validated best.", check=non_negative, group=RUN
    )
    part: Literal["validation", "test"] | None = option(
        None, "Part to measure on; left out, test where there is one, else validation.", group=MEASURES
    )
    ease: Literal["auto", "yes", "no"] = option(
        "auto", "EASE, whose cost grows with the cube of the items: auto leaves it out where that is too much.",
        group=MEASURES,
    )  # fmt: skip

    def __post_init__(self) -> None:
        validate(self)
        if self.step is not None and self.run is None:
            raise OptionError(f"--step {self.step}: needs --run")
        self.training()

    @property
    def names_data(self) -> bool:
        """Whether any data option was given."""
        return self.values() != DataOptions().values()


FAMILY = "recommender"
EXTRA = {"users": int, "items": int, "drops": list, "low": float, "high": float}
"""What config.json holds besides options, and of which kind."""


def read_run_options(run: Path) -> dict[str, Any]:
    """All that config.json holds."""
    return read_config(run, FAMILY, EXTRA)


def evaluation_defaults(run: Path) -> dict[str, Any]:
    """Clipped and in batches as the run validated; its --split is another thing than an evaluation's."""
    had = read_run_options(run)
    names = {"clip": "clip", "batch_size": "validation_batch_size"}
    return {name: had[own] for name, own in names.items() if own in had}


def baseline_defaults(run: Path) -> dict[str, Any]:
    """The run's ratings, too."""
    had = read_run_options(run)
    return {
        **evaluation_defaults(run),
        **{each.name: had[each.name] for each in fields(DataOptions) if each.name in had},
    }


SplitName = Literal["3m", "6m", "1y", "full", "user-time", "random"]


@dataclass(frozen=True)
class ConvertOptions:
    """What to read, how to divide it, and where to write the three files."""

    source: Path = argument(
        "A folder of the Netflix Prize (mv_*.txt or combined_data_*.txt), or MovieLens: u.data, ratings.dat, "
        "ratings.csv or the folder of one."
    )
    out: Path = argument("Folder for SPLIT_train.txt, SPLIT_valid.txt and SPLIT_test.txt.")
    split: SplitName = option(
        MISSING,
        "3m, 6m, 1y, full: the Netflix Prize by its dates; user-time: the last 30 % of each user's time are for "
        "validation or test; random: each rating by --fractions.",
    )
    fractions: tuple[float, ...] = option(
        (0.8, 0.1, 0.1), "Shares of train, valid and test; for --split random.", check=between(0, 1)
    )
    seed: int = option(0, "Seed of what is left to chance.", check=non_negative)
    overwrite: bool = option(False, "Replace the files of an earlier conversion.")

    def __post_init__(self) -> None:
        validate(self)
        good = len(self.fractions) == 3 and abs(sum(self.fractions) - 1) < 1e-9 and self.fractions[0] > 0
        if not good:
            said = " ".join(f"{each:g}" for each in self.fractions)
            raise OptionError(
                f"--fractions {said}: needs three shares, for train, valid and test, that add up to 1; the first "
                "above 0"
            )

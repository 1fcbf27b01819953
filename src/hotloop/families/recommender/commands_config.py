"""The options of the commands that use a run (evaluate, predict, recommend, baselines), of convert and of sweep.

Values that the command line leaves out are those of the run, where it has them. It imports neither jax nor numpy.
"""

import math
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from hotloop.errors import OptionError
from hotloop.families.recommender.config import (
    KS,
    PRESETS,
    DataOptions,
    TrainOptions,
    TrialOptions,
    UpdateOptions,
    data_option,
    old_option,
    run_option,
)
from hotloop.options import Options, argument, between, finite, folder_name, non_negative, option, positive
from hotloop.sweeps.options import (
    check_place_options,
    concurrent_option,
    engine_option,
    ray_address_option,
    sweep_option,
)

FAMILY = "recommender"
EXTRA = {"users": int, "items": int, "drops": list, "low": float, "high": float}
"""What config.json holds besides options, and of which kind."""
measure_option, output_option = partial(option, group="What is measured"), partial(option, group="Output")
RATINGS_HELP = "What users have rated, instead of the training ratings; they need not be in those."
SplitName = Literal["3m", "6m", "1y", "full", "user-time", "random"]


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    clip: bool = measure_option(True, "Clip predictions to the range of the training ratings.")
    round: bool = measure_option(False, "Round predictions to whole ratings.")
    batch_size: int | None = run_option(
        None,
        "Users at once; left out, as the run validated. It changes the mean-of-batches RMSE and nothing else.",
        check=positive,
    )


@dataclass(frozen=True, kw_only=True)
class RankingOptions(PredictionOptions):
    k: tuple[int, ...] = measure_option(
        KS, "Lengths of recommendation lists for NDCG and recall; coverage is of the first.", check=positive
    )
    relevant: float = measure_option(
        4.0, "Rating from which an item is relevant to its user; left out, that of the run.", check=finite
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    run: Path = argument("Folder of a run, as `hotloop recommender train` named it.", metavar="RUN")
    step: int | None = run_option(
        None, "Checkpoint after so many updates; left out, see --best.", check=non_negative
    )
    best: bool = run_option(
        True, "Without --step: the checkpoint that validated best; --no-best takes the newest."
    )
    replicas: int | None = run_option(
        None,
        "Devices that share the users; left out, as many as the run was trained on, if there are so many.",
        check=positive,
        aliases=("--num-replicas",),
    )


@dataclass(frozen=True, kw_only=True)
class TruthOptions(CheckpointOptions):
    split: Literal["validation", "test"] | None = data_option(
        None, "Ratings of the run's own data; left out, test where there is one, else validation."
    )
    data_file: Path | None = data_option(
        None, "Ratings of a file instead: user TAB item TAB rating.", metavar="FILE"
    )

    def check(self) -> None:
        if self.split and self.data_file:
            raise OptionError(
                f"--split {self.split} with --data-file {self.data_file}: choose one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TruthOptions, RankingOptions):
    """All of `hotloop recommender evaluate`."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(TruthOptions, PredictionOptions):
    output: Path | None = output_option(
        None,
        "File of user TAB item TAB prediction TAB truth; left out, `predictions` in the run's folder.",
        metavar="FILE",
    )
    ratings_file: Path | None = data_option(None, RATINGS_HELP, metavar="FILE")

    def check(self) -> None:
        super().check()
        if self.ratings_file and not self.data_file:
            raise OptionError(
                f"--ratings-file {self.ratings_file}: name the ratings to predict with --data-file"
            )


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(CheckpointOptions, PredictionOptions):
    users: tuple[int, ...] = data_option((), "Ids of users, as the ratings have them.", metavar="ID")
    all: bool = data_option(False, "Every user.", aliases=("--all-users",))
    ratings_file: Path | None = data_option(None, RATINGS_HELP, metavar="FILE")
    top: int = output_option(10, "Items for each user.", check=positive)
    output: Path | None = output_option(
        None,
        "File of user TAB item TAB prediction (and TAB title), written as lists come; left out, a table is shown.",
        metavar="FILE",
    )
    titles: Path | None = output_option(
        None,
        "Titles of items to show: MovieLens' u.item, movies.dat or movies.csv, or lines of id and title.",
        metavar="FILE",
    )
    batch_size: int | None = run_option(
        None, "Users at once; left out, 256 on a CPU, else 4096. It changes no list.", check=positive
    )

    def check(self) -> None:
        if bool(self.users) == self.all:
            raise OptionError("recommend: give --users ID ... or --all" + (", not both" if self.all else ""))


@dataclass(frozen=True, kw_only=True)
class BaselineOptions(Options, RankingOptions, DataOptions):
    run: Path | None = run_option(
        None, "A trained run for the last row; without data options, its data are taken.", metavar="RUN"
    )
    step: int | None = run_option(
        None, "Checkpoint of --run; left out, the one that validated best.", check=non_negative
    )
    part: Literal["validation", "test"] | None = measure_option(
        None, "Part to measure on; left out, test where there is one, else validation."
    )
    ease: Literal["auto", "yes", "no"] = measure_option(
        "auto", "EASE, whose cost grows with the cube of the items: auto leaves it out where that is too much."
    )  # fmt: skip

    def check(self) -> None:
        if self.step is not None and self.run is None:
            raise OptionError(f"--step {self.step}: needs --run")
        self.training()

    def training(self) -> TrainOptions:
        only_test = self.test_data_file is not None and self.validation_data_file is None
        data = {each.name: getattr(self, each.name) for each in fields(DataOptions)}
        return TrainOptions(**data, no_validation=only_test)

    @property
    def names_data(self) -> bool:
        return any(getattr(self, each.name) != each.default for each in fields(DataOptions))


def read_run_options(run: Path) -> dict[str, Any]:
    """The options in a run's config.json, without those of ratings that a run of --objective ranking has: earlier
    versions took them, where they changed nothing."""
    from hotloop.engine.run import read_config  # a bad option has to answer at once

    had = read_config(run, FAMILY, EXTRA)
    if had.get("objective") == "ranking":
        had = {name: value for name, value in had.items() if name not in ("aug_steps", "clip")}
    return had


def evaluation_defaults(run: Path) -> dict[str, Any]:
    """Clipped and in batches as the run validated; its --split is another thing than an evaluation's."""
    had = read_run_options(run)
    names = {"clip": "clip", "batch_size": "validation_batch_size", "relevant": "relevant"}
    return {name: had[own] for name, own in names.items() if own in had}


def recommend_defaults(run: Path) -> dict[str, Any]:
    return {name: value for name, value in evaluation_defaults(run).items() if name == "clip"}


def baseline_defaults(run: Path) -> dict[str, Any]:
    had = read_run_options(run)
    data = {each.name: had[each.name] for each in fields(DataOptions) if each.name in had}
    return {**evaluation_defaults(run), **data}


@dataclass(frozen=True)
class ConvertOptions(Options):
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

    def check(self) -> None:
        good = len(self.fractions) == 3 and abs(sum(self.fractions) - 1) < 1e-9 and self.fractions[0] > 0
        if not good:
            said = " ".join(f"{each:g}" for each in self.fractions)
            raise OptionError(
                f"--fractions {said}: needs three shares, for train, valid and test, that add up to 1; the first "
                "above 0"
            )


USUAL_RATES = tuple(f"{12.5 + 0.5 * n:g}" for n in range(16))


def parse_exponents(texts: tuple[str, ...], count: int) -> tuple[float, ...]:
    """Exponents of two, below zero, from positive ones: a list, or A..B in `count` points, both ends included.

    ValueError with the reason.
    """

    def positive_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"'{text}' is not a number; write 16,16.5,17 or 16..20") from None
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a finite number")
        if math.copysign(1, value) < 0:
            raise ValueError(
                f"{text} would be a rate of 2^{-value:g} times the batch size: exponents are negated here, "
                f"so write {-value:g}"
            )
        return value

    if not any(".." in text for text in texts):
        values = [positive_number(text) for text in texts]
    elif len(texts) != 1:
        raise ValueError("must be one range A..B or a list of numbers, not both")
    else:
        ends = texts[0].split("..", 1)
        if any(end.startswith(".") for end in ends):  # is 16...20 up to 20, or to .20?
            raise ValueError("must be two numbers with two dots between them, such as 16..20")
        first, last = map(positive_number, ends)
        between = [first + (last - first) * n / (count - 1) for n in range(1, count - 1)]
        values = [first, *between, last][:count]
    if not values:
        raise ValueError("must name at least one rate, such as 16,16.5 or 16..20")
    return tuple(0.0 - value for value in values)


@dataclass(frozen=True)
class SweepOptions(TrialOptions):
    # No option of a sweep: the rates are, and --base-learning-rate is understood as short for them, as it was.
    base_learning_rate: ClassVar[float] = UpdateOptions.base_learning_rate  # type: ignore[misc]

    base_learning_rates: tuple[str, ...] = sweep_option(
        USUAL_RATES,
        "Rates to try: a list, 16,16.5,17, or a range cut into --num-devices points, 16..20; "
        "16 is a rate of 2^-16 times the batch size.",
    )
    num_devices: int = sweep_option(
        16,
        "Trials, one for each rate. Where there are fewer devices they are used in turn.",
        check=positive,
        aliases=("--num-ipus",),
    )
    concurrent: int | None = concurrent_option()
    engine: Literal["local", "ray"] = engine_option()
    ray_address: str | None = ray_address_option()
    no_validation: bool = run_option(
        False, "Do not validate; random data and a training file alone are never validated."
    )
    steps_per_log: int = run_option(40, "Calls between logs.", check=positive)
    results_dir: Path = run_option(
        Path("results"), "Folder in which the sweep gets its own.", aliases=("--logdir",)
    )
    run_name: str | None = run_option(
        None, "Name of the sweep's folder; else made of seed and time.", check=folder_name
    )
    fp_exceptions: bool = old_option(False, "No effect: a trial whose loss is not finite always stops.")

    def check(self) -> None:
        check_place_options(self)
        if self.lr_schedule == "stepped":
            raise OptionError(
                "--lr-schedule stepped: has its own rates, so that all trials would be the same"
            )
        given = ",".join(self.base_learning_rates)
        try:
            found = len(self.exponents)
        except ValueError as error:
            raise OptionError(f"--base-learning-rates {given}: {error}") from None
        if found != self.num_devices:
            raise OptionError(
                f"--base-learning-rates {given}: {found} rates for {self.num_devices} trials; "
                f"write --num-devices {found}, or a range A..B"
            )
        self.training(self.exponents[0])

    @property
    def exponents(self) -> tuple[float, ...]:
        return parse_exponents(self.base_learning_rates, self.num_devices)

    @property
    def is_validated(self) -> bool:
        """Whether the trials are validated: the old program never did."""
        if self.training_data_file is not None:
            return self.validation_data_file is not None and not self.no_validation
        return self.data != "random" and not self.no_validation

    def training(self, exponent: float) -> TrainOptions:
        shared = {each.name: getattr(self, each.name) for each in fields(TrialOptions)}
        shared |= {"base_learning_rate": exponent, "no_validation": not self.is_validated}
        return TrainOptions(**shared)


SWEEP_PRESETS = {
    name: {key: value for key, value in values.items() if key != "base_learning_rate"}
    for name, values in PRESETS.items()
}

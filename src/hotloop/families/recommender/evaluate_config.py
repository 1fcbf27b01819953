"""The options of `hotloop recommender evaluate`, and those that every measuring command shares. It imports no jax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.errors import OptionError
from hotloop.families.recommender.config import DATA, RUN
from hotloop.options import argument, finite, non_negative, option, positive, validate

MEASURES = "What is measured"


@dataclass(frozen=True, kw_only=True)
class Values:
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
class Ranked(Values):
    """What is ranked, and how deep."""

    k: tuple[int, ...] = option(
        (10, 100), "Lengths of recommendation lists for NDCG and recall.", check=positive, group=MEASURES
    )
    relevant: float = option(
        4.0, "Rating from which an item is relevant to its user.", check=finite, group=MEASURES
    )


@dataclass(frozen=True, kw_only=True)
class Weights:
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
class Truth(Weights):
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
class Evaluate(Truth, Ranked):
    """All of `hotloop recommender evaluate`."""

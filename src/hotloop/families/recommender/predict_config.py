"""The options of `hotloop recommender predict` and `recommend`. It imports no jax."""

from dataclasses import dataclass
from pathlib import Path

from hotloop.errors import OptionError
from hotloop.families.recommender.config import DATA
from hotloop.families.recommender.evaluate_config import Truth, Values, Weights
from hotloop.options import option, positive

OUTPUT = "Output"
RATINGS_HELP = "What users have rated, instead of the training ratings; they need not be in those."


@dataclass(frozen=True, kw_only=True)
class Predict(Truth, Values):
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
class Recommend(Weights, Values):
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

"""The options of `hotloop recommender convert`. It imports neither jax nor numpy."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from hotloop.errors import OptionError
from hotloop.options import argument, between, non_negative, option, validate

SplitName = Literal["3m", "6m", "1y", "full", "user-time", "random"]

RANGES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "full": (("1999-12-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "3m": (("2005-09-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "6m": (("2005-06-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "1y": (("2004-06-01", "2005-05-31"), ("2005-06-01", "2005-06-30")),
}
"""First and last day, both included, of the training and the test ratings of the Netflix Prize's splits."""

WHOLE_NETFLIX = 100_480_507
PUBLISHED = {
    "full": (98_074_901, 477_412, 17_768, 2_250_481),
    "3m": (13_675_402, 311_315, 17_736, 2_082_559),
    "6m": (29_179_009, 390_795, 17_757, 2_175_535),
    "1y": (41_451_832, 345_855, 16_907, 3_888_684),
}
"""Training ratings, users and items, and ratings for validation and test together (DeepRecommender's README)."""


@dataclass(frozen=True)
class ConvertConfig:
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

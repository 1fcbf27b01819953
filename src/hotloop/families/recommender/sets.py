"""The ratings of a run: from files, drawn, or MovieLens, as matrices that share rows and columns.

Users and items are numbered by the training part; what the other parts have beyond it is left out and counted. It
knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotloop.data import load_ratings
from hotloop.data.matrix import RatingMatrix, build
from hotloop.data.random_ratings import random_sets
from hotloop.data.rating_text import Triples, read_triples
from hotloop.data.ratings import Ratings
from hotloop.data.tastes import tastes
from hotloop.engine.progress import Console
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender.config import Train
from hotloop.families.recommender.splits import TEST, TRAIN, VALID, random_split, user_time_split


@dataclass(frozen=True, eq=False)
class Sets:
    """Training ratings, and those of the same users to validate and to test with; None where there are none."""

    name: str
    train: RatingMatrix
    validation: RatingMatrix | None
    test: RatingMatrix | None
    notice: str = ""
    files: tuple[str, ...] = ("", "")
    """Names of the files that the validation and the test ratings are from, where they are from files."""

    def describe(self, part: str) -> str:
        """Which ratings the `validation` or `test` part is."""
        file = self.files[("validation", "test").index(part)]
        return f"{part} ratings of {file}" if file else f"{part} part of {self.name}"

    @property
    def scale(self) -> tuple[float, float]:
        """The smallest and largest training rating."""
        values = self.train.values() if self.train.levels is None else self.train.levels
        return float(values.min()), float(values.max())


def load(config: Train, console: Console) -> Sets:
    """The sets that the options name."""
    with console.progress("reading ratings"):
        return _load(config, console)


def _load(config: Train, console: Console) -> Sets:
    if config.training_data_file is not None:
        console.say("Loading training data")
        if config.splits_file:
            return _split(
                config, config.training_data_file.name, read_triples(config.training_data_file), console
            )
        others = (config.validation_data_file, config.test_data_file)
        parts = [
            None if path is None else read_triples(path) for path in (config.training_data_file, *others)
        ]
        joined = _joined(config.training_data_file.name, parts, console)
        return replace(joined, files=tuple("" if path is None else path.name for path in others))
    if config.data == "random":
        console.say("Generating random training data")
        console.say("Generating random evaluation data")
        return _joined("random", [*random_sets(seed=config.seed), None], console)
    if config.data == "procedural":
        console.say("data: ratings drawn here from hidden tastes, as asked")
        return _split(config, config.data, _triples(tastes(seed=config.seed)), console)
    found = load_ratings(say=console.say, progress=console.progress)
    return replace(_split(config, config.data, _triples(found.ratings), console), notice=found.notice)


def _split(config: Train, name: str, triples: Triples, console: Console) -> Sets:
    if config.split == "user-time" and triples.times is None:
        raise OptionError(f"--split user-time: {name} has no times; --split random needs none")
    split = (
        random_split(triples, config.fractions, config.seed)
        if config.split == "random"
        else user_time_split(triples, config.seed)
    )
    parts = [split.part(which) for which in (TRAIN, VALID, TEST)]
    if not len(parts[0]):
        raise DataError(f"{name}: no rating falls into the training part of --split {config.split}")
    counts = "{:,} ratings to train with, {:,} to validate and {:,} to test".format(*map(len, parts))
    console.say(f"{name}: --split {config.split} gives {counts}")
    return _joined(f"{name} ({config.split} split)", parts, console)


def _triples(ratings: Ratings) -> Triples:
    return Triples(ratings.users, ratings.items, ratings.values, ratings.times)


def _joined(name: str, parts: Sequence[Triples | None], console: Console) -> Sets:
    first = parts[0]
    assert first is not None
    train = build(first.users, first.items, first.ratings, warn=console.warn)
    others = [
        None
        if part is None or not len(part)
        else build(
            part.users,
            part.items,
            part.ratings,
            user_ids=train.user_ids,
            item_ids=train.item_ids,
            warn=console.warn,
        )
        for part in parts[1:]
    ]
    console.say(f"Users: {train.users:,}  Items: {train.n_items:,}  Ratings: {train.ratings:,}")
    return Sets(name, train, others[0], others[1])


def truth(path: Path, train: RatingMatrix, console: Console) -> RatingMatrix:
    """The ratings of a file as a matrix with the rows and columns of the training ratings."""
    ids = {"user_ids": train.user_ids, "item_ids": train.item_ids}
    with console.progress("reading ratings"):
        found = read_triples(path)
        return build(found.users, found.items, found.ratings, **ids, warn=console.warn)

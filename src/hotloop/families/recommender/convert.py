"""`hotloop recommender convert`: rating data as published, to three text files of `user TAB item TAB rating`.

Users and items keep the ids that the source has (the program that this one follows numbered them anew). Lines are
in the order of users, and each user's in the order of time, whatever order the source had. How a split divides is in
`rating_sets`; training is not known here.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.data.ratings import Ratings, read_rating_text, write_tables
from hotloop.engine.progress import Console
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import netflix, rating_sets
from hotloop.families.recommender.commands_config import ConvertOptions
from hotloop.families.recommender.rating_sets import TEST, TRAIN, VALID, RatingSplit, find_distinct

PARTS = {"train": TRAIN, "valid": VALID, "test": TEST}
_MOVIELENS = ("u.data", "ratings.dat", "ratings.csv")


def run(config: ConvertOptions, console: Console) -> Mapping[str, Any]:
    """Read, divide, write, and say how many ratings, users and items each part has."""
    if config.out.exists() and not config.out.is_dir():
        raise OptionError(f"OUT {config.out}: is a file; give a folder")
    targets = {part: config.out / f"{config.split}_{part}.txt" for part in PARTS}
    for path in targets.values():
        if not config.overwrite and path.exists() and path.stat().st_size:
            raise OptionError(f"OUT {config.out}: {path.name} is there; another folder, or --overwrite")
    table, is_netflix = _read(config.source, console)
    console.say(f"{len(table):,} ratings in {config.source}")
    split = _divide(config, table, is_netflix)
    counts = count_parts(split)
    if not counts["train"]["ratings"]:
        raise DataError(f"{config.source}: no rating falls into the training part of --split {config.split}")
    _write(split, list(targets.values()), console)
    _show(counts, console)
    if is_netflix and len(table) == netflix.ALL_RATINGS:
        _compare(config.split, counts, console)
    words = ["hotloop", "recommender", "train"]
    for part, option in {"train": "training", "valid": "validation", "test": "test"}.items():
        if counts[part]["ratings"]:
            words += [f"--{option}-data-file", str(targets[part])]
    words += [] if counts["valid"]["ratings"] else ["--no-validation"]
    console.say(f"to train: {shlex.join(words)}")
    return {
        "source": str(config.source),
        "ratings": len(table),
        "split": config.split,
        "seed": config.seed,
        "files": {part: str(path) for part, path in targets.items()},
        "counts": counts,
    }


def count_parts(split: RatingSplit) -> dict[str, dict[str, int]]:
    """Ratings, users and items of each part, and what was left out.

    "without_lines" are users of the part whose every rating was of an item that train does not have.
    """
    counts = {name: _count_part(split, which) for name, which in PARTS.items()}
    counts["valid+test"] = _count_part(split, VALID, TEST)
    counts["left_out"] = {
        "not_in_split": int(np.count_nonzero(split.parts == rating_sets.OUTSIDE)),
        "user_not_in_train": int(np.count_nonzero(split.parts == rating_sets.STRANGER)),
        "item_not_in_train": int(np.count_nonzero(split.unseen)),
    }
    return counts


def _count_part(split: RatingSplit, *which: int) -> dict[str, int]:
    chosen = split.find(*which)
    users = len(find_distinct(split.table.users[chosen]))
    given = len(find_distinct(split.table.users[split.find_all(*which)])) if split.unseen.any() else users
    return {
        "ratings": int(np.count_nonzero(chosen)),
        "users": users,
        "items": len(find_distinct(split.table.items[chosen])),
        "without_lines": given - users,
    }


def _read(source: Path, console: Console) -> tuple[Ratings, bool]:
    """The ratings, and whether they are the Netflix Prize's (whose times are days)."""
    if not source.exists():
        raise DataError(f"SOURCE {source}: does not exist")
    if source.is_file() and not netflix.is_netflix_file(source):
        with console.progress("reading ratings"):
            return read_rating_text(source), False
    files = netflix.find_files(source) if source.is_dir() else [source]
    if files:
        return netflix.read(files, console), True
    for name in _MOVIELENS:
        if (source / name).is_file():
            with console.progress("reading ratings"):
                return read_rating_text(source / name), False
    known = ", ".join((*netflix.PATTERNS, *_MOVIELENS))
    raise DataError(f"SOURCE {source}: none of {known} in this folder")


def _divide(config: ConvertOptions, table: Ratings, is_netflix: bool) -> RatingSplit:
    if config.split == "random":
        return rating_sets.split_randomly(table, config.fractions, config.seed)
    if table.times is None:
        raise OptionError(f"--split {config.split}: {config.source} has no times; --split random needs none")
    if config.split == "user-time":
        return rating_sets.split_by_user_time(table, config.seed)
    if not is_netflix:
        raise OptionError(
            f"--split {config.split}: is for the days of the Netflix Prize; for {config.source} take user-time or "
            "random"
        )
    train, test = (tuple(map(netflix.day, days)) for days in netflix.RANGES[config.split])
    return rating_sets.split_by_date(table, (train[0], train[1]), (test[0], test[1]), config.seed)


def _write(split: RatingSplit, paths: list[Path], console: Console) -> None:
    """All parts in one pass over the table; the files get their names when all of them are whole."""
    chosen = split.find(*PARTS.values())
    with (
        console.progress("writing", int(np.count_nonzero(chosen))) as bar,
        write_tables(paths, str(paths[0].parent)) as appends,
    ):
        for order in rating_sets.order_blocks(split.table, chosen):
            for append, which in zip(appends, PARTS.values(), strict=True):
                append(*_columns(split.table.take(order[split.parts[order] == which])))
            bar.advance(len(order))


def _columns(table: Ratings) -> tuple[Any, ...]:
    """User, item, and the rating written like 3.0."""
    import pyarrow as pa

    levels, codes = np.unique(table.values, return_inverse=True)
    texts = pa.array([str(level) for level in levels], pa.string())
    return table.users.astype(np.int64), table.items.astype(np.int64), texts.take(pa.array(codes))


def _show(counts: Mapping[str, Mapping[str, int]], console: Console) -> None:
    rows = [
        [part, *(f"{count:,}" for count in figures.values())]
        for part, figures in counts.items()
        if part != "left_out"
    ]
    console.table(["part", "ratings", "users", "items", "users without lines"], rows)
    left = counts["left_out"]
    console.say(
        f"left out: {left['not_in_split']:,} ratings outside the split, {left['user_not_in_train']:,} of users and "
        f"{left['item_not_in_train']:,} of items that have no training rating"
    )


def _compare(split: str, counts: Mapping[str, Mapping[str, int]], console: Console) -> None:
    """Say whether a split of the whole Netflix Prize has the published size."""
    if split not in netflix.PUBLISHED:
        return
    ours = (*list(counts["train"].values())[:3], counts["valid+test"]["ratings"])
    if ours == netflix.PUBLISHED[split]:
        console.say("these are the published numbers of ratings, training users and training items")
    else:
        console.warn(
            f"train ratings, users, items and test ratings are {ours}, published {netflix.PUBLISHED[split]}"
        )

"""`hotloop recommender convert`: rating data as published, to three text files of `user TAB item TAB rating`.

Users and items keep the ids that the source has (the program that this one follows numbered them anew). Lines are
in the order of users, and each user's in the order of time, whatever order the source had.
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
    if config.out.exists() and not config.out.is_dir():
        raise OptionError(f"OUT {config.out}: is a file; give a folder")
    targets = {part: config.out / f"{config.split}_{part}.txt" for part in PARTS}
    for path in targets.values():
        if not config.overwrite and path.exists() and path.stat().st_size:
            raise OptionError(f"OUT {config.out}: {path.name} is there; another folder, or --overwrite")
    table, is_netflix = _read(config.source, console)
    console.say(f"{len(table):,} ratings in {config.source}")
    split = _divide(config, table, is_netflix)
    counts = _count_parts(split)
    if not counts["train"]["ratings"]:
        raise DataError(f"{config.source}: no rating falls into the training part of --split {config.split}")
    _write(split, list(targets.values()), console)
    rows = [[part, *(f"{n:,}" for n in own.values())] for part, own in counts.items() if part != "left_out"]
    console.table(["part", "ratings", "users", "items", "users without lines"], rows)
    left = counts["left_out"]
    console.say(
        f"left out: {left['not_in_split']:,} ratings outside the split, {left['user_not_in_train']:,} of users and "
        f"{left['item_not_in_train']:,} of items that have no training rating"
    )
    if is_netflix and len(table) == netflix.ALL_RATINGS and config.split in netflix.PUBLISHED:
        compare_with_published(config.split, counts, console)
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


def _read(source: Path, console: Console) -> tuple[Ratings, bool]:
    """The ratings, and whether they are the Netflix Prize's (whose times are days)."""
    if not source.exists():
        raise DataError(f"SOURCE {source}: does not exist")
    if source.is_dir():
        if files := netflix.find_files(source):
            return netflix.read(files, console), True
        text = next((source / name for name in _MOVIELENS if (source / name).is_file()), None)
        if text is None:
            known = ", ".join((*netflix.PATTERNS, *_MOVIELENS))
            raise DataError(f"SOURCE {source}: none of {known} in this folder")
    elif netflix.is_netflix_file(source):
        return netflix.read([source], console), True
    else:
        text = source
    with console.progress("reading ratings"):
        return read_rating_text(text), False


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
    train, test = ((netflix.day(first), netflix.day(last)) for first, last in netflix.RANGES[config.split])
    return rating_sets.split_by_date(table, train, test, config.seed)


def _count_parts(split: RatingSplit) -> dict[str, dict[str, int]]:
    """Ratings, users and items of each part, and what was left out."""
    counts = {}
    for name, which in {
        **{name: (part,) for name, part in PARTS.items()},
        "valid+test": (VALID, TEST),
    }.items():
        given = np.isin(split.parts, which)
        chosen = given & ~split.unseen
        users = len(find_distinct(split.table.users[chosen]))
        counts[name] = {
            "ratings": int(np.count_nonzero(chosen)),
            "users": users,
            "items": len(find_distinct(split.table.items[chosen])),
            # Users of the part whose every rating was of an item that train does not have.
            "without_lines": len(find_distinct(split.table.users[given])) - users
            if split.unseen.any()
            else 0,
        }
    counts["left_out"] = {
        "not_in_split": int(np.count_nonzero(split.parts == rating_sets.OUTSIDE)),
        "user_not_in_train": int(np.count_nonzero(split.parts == rating_sets.STRANGER)),
        "item_not_in_train": int(np.count_nonzero(split.unseen)),
    }
    return counts


def _write(split: RatingSplit, paths: list[Path], console: Console) -> None:
    """All parts in one pass over the table; the files get their names when all of them are whole."""
    import pyarrow as pa

    chosen = np.isin(split.parts, list(PARTS.values())) & ~split.unseen
    with (
        console.progress("writing", int(np.count_nonzero(chosen))) as bar,
        write_tables(paths, str(paths[0].parent)) as appends,
    ):
        for order in rating_sets.order_blocks(split.table, chosen):
            for append, which in zip(appends, PARTS.values(), strict=True):
                part = split.table.take(order[split.parts[order] == which])
                levels, codes = np.unique(part.values, return_inverse=True)
                texts = pa.array(
                    [str(level) for level in levels], pa.string()
                )  # a rating is written like 3.0
                append(part.users.astype(np.int64), part.items.astype(np.int64), texts.take(pa.array(codes)))
            bar.advance(len(order))


def compare_with_published(split: str, counts: Mapping[str, Mapping[str, int]], console: Console) -> None:
    ours = (*list(counts["train"].values())[:3], counts["valid+test"]["ratings"])
    if ours == netflix.PUBLISHED[split]:
        console.say("these are the published numbers of ratings, training users and training items")
    else:
        console.warn(
            f"train ratings, users, items and test ratings are {ours}, published {netflix.PUBLISHED[split]}"
        )

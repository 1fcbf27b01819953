"""`hotloop recommender convert`: rating data as published, to three text files of `user TAB item TAB rating`.

Users and items keep the ids that the source has (the program that this one follows numbered them anew). Lines are
in the order of users, and each user's in the order of time, whatever order the source had. How a split divides is in
`splits`; training is not known here.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.data.ratings import Triples, import_arrow_csv, read_triples
from hotloop.engine.progress import Console
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import netflix
from hotloop.families.recommender.commands_config import ConvertOptions
from hotloop.families.recommender.rating_sets import (
    OUTSIDE,
    STRANGER,
    TEST,
    TRAIN,
    VALID,
    RatingSplit,
    find_distinct,
    order_blocks,
    split_by_date,
    split_by_user_time,
    split_randomly,
)

PARTS = {"train": TRAIN, "valid": VALID, "test": TEST}
_MOVIELENS = ("u.data", "ratings.dat", "ratings.csv")


def run(config: ConvertOptions, context: Console) -> Mapping[str, Any]:
    """Read, divide, write, and say how many ratings, users and items each part has."""
    targets = _targets(config)
    triples, is_netflix = _read(config.source, context)
    context.say(f"{len(triples):,} ratings in {config.source}")
    split = _divide(config, triples, is_netflix)
    counts = count_parts(split)
    if not counts["train"]["ratings"]:
        raise DataError(f"{config.source}: no rating falls into the training part of --split {config.split}")
    _write(split, targets, context)
    _show(counts, context)
    if is_netflix and len(triples) == WHOLE_NETFLIX:
        _compare(config.split, counts, context)
    context.say(f"to train: {_how_to_train(targets, counts)}")
    files = {part: str(path) for part, path in targets.items()}
    return {
        "source": str(config.source),
        "ratings": len(triples),
        "split": config.split,
        "seed": config.seed,
        "files": files,
        "counts": counts,
    }


def count_parts(split: RatingSplit) -> dict[str, dict[str, int]]:
    """Ratings, users and items of each part, and what was left out.

    "without_lines" are users of the part whose every rating was of an item that train does not have.
    """
    counts = {name: _count_part(split, which) for name, which in PARTS.items()}
    counts["valid+test"] = _count_part(split, VALID, TEST)
    counts["left_out"] = {
        "not_in_split": int(np.count_nonzero(split.parts == OUTSIDE)),
        "user_not_in_train": int(np.count_nonzero(split.parts == STRANGER)),
        "item_not_in_train": int(np.count_nonzero(split.unseen)),
    }
    return counts


def _count_part(split: RatingSplit, *which: int) -> dict[str, int]:
    chosen = split.chosen(*which)
    users = len(find_distinct(split.triples.users[chosen]))
    given = len(find_distinct(split.triples.users[split.given(*which)])) if split.unseen.any() else users
    return {
        "ratings": int(np.count_nonzero(chosen)),
        "users": users,
        "items": len(find_distinct(split.triples.items[chosen])),
        "without_lines": given - users,
    }


def _targets(config: ConvertOptions) -> dict[str, Path]:
    """The files to write; OptionError where they must not be replaced."""
    if config.out.exists() and not config.out.is_dir():
        raise OptionError(f"OUT {config.out}: is a file; give a folder")
    targets = {part: config.out / f"{config.split}_{part}.txt" for part in PARTS}
    for path in targets.values():
        if not config.overwrite and path.exists() and path.stat().st_size:
            raise OptionError(f"OUT {config.out}: {path.name} is there; another folder, or --overwrite")
    return targets


def _read(source: Path, console: Console) -> tuple[Triples, bool]:
    """The ratings, and whether they are the Netflix Prize's (whose times are days)."""
    if not source.exists():
        raise DataError(f"SOURCE {source}: does not exist")
    if source.is_file() and not netflix.begins_like_one(source):
        with console.progress("reading ratings"):
            return read_triples(source), False
    files = netflix.find(source) if source.is_dir() else [source]
    if files:
        return netflix.read(files, console), True
    for name in _MOVIELENS:
        if (source / name).is_file():
            with console.progress("reading ratings"):
                return read_triples(source / name), False
    known = ", ".join((*netflix.PATTERNS, *_MOVIELENS))
    raise DataError(f"SOURCE {source}: none of {known} in this folder")


def _divide(config: ConvertOptions, triples: Triples, is_netflix: bool) -> RatingSplit:
    if config.split == "random":
        return split_randomly(triples, config.fractions, config.seed)
    if triples.times is None:
        raise OptionError(f"--split {config.split}: {config.source} has no times; --split random needs none")
    if config.split == "user-time":
        return split_by_user_time(triples, config.seed)
    if not is_netflix:
        raise OptionError(
            f"--split {config.split}: is for the days of the Netflix Prize; for {config.source} take user-time or "
            "random"
        )
    train, test = (tuple(map(netflix.day, days)) for days in RANGES[config.split])
    return split_by_date(triples, (train[0], train[1]), (test[0], test[1]), config.seed)


def _write(split: RatingSplit, targets: Mapping[str, Path], console: Console) -> None:
    """All parts in one pass over the table; the files get their names when all of them are whole."""
    kept = split.chosen(*PARTS.values())
    with (
        console.progress("writing", int(np.count_nonzero(kept))) as bar,
        _open_tables(list(targets.values())) as append,
    ):
        for order in order_blocks(split.triples, kept):
            for path, which in zip(targets.values(), PARTS.values(), strict=True):
                append[path](_lines(split.triples.take(order[split.parts[order] == which])))
            bar.advance(len(order))


@contextmanager
def _open_tables(paths: list[Path]) -> Iterator[dict[Path, Any]]:
    """For each path a function that appends a table of text to it."""
    csv = import_arrow_csv()
    import pyarrow as pa

    schema = pa.schema({"user": pa.int64(), "item": pa.int64(), "rating": pa.string()})
    plain = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in paths}
    try:
        for part in parts.values():
            part.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            writers = {
                path: stack.enter_context(csv.CSVWriter(str(part), schema, write_options=plain))
                for path, part in parts.items()
            }
            yield {path: writer.write_table for path, writer in writers.items()}
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        raise DataError(f"{paths[0].parent}: cannot be written ({error.strerror or error})") from error
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()


def _lines(triples: Triples) -> Any:
    """A table of the three columns, ratings written like 3.0."""
    import pyarrow as pa

    levels, codes = np.unique(triples.ratings, return_inverse=True)
    texts = pa.array([str(level) for level in levels], pa.string())
    users, items = triples.users.astype(np.int64), triples.items.astype(np.int64)
    return pa.table({"user": users, "item": items, "rating": texts.take(pa.array(codes))})


def _how_to_train(targets: Mapping[str, Path], counts: Mapping[str, Mapping[str, int]]) -> str:
    """The command that trains with what was written; empty parts are left out."""
    words = ["hotloop", "recommender", "train"]
    for part, option in {"train": "training", "valid": "validation", "test": "test"}.items():
        if counts[part]["ratings"]:
            words += [f"--{option}-data-file", str(targets[part])]
    return shlex.join([*words, *([] if counts["valid"]["ratings"] else ["--no-validation"])])


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
    if split not in PUBLISHED:
        return
    ours = (*list(counts["train"].values())[:3], counts["valid+test"]["ratings"])
    if ours == PUBLISHED[split]:
        console.say("these are the published numbers of ratings, training users and training items")
    else:
        console.warn(f"train ratings, users, items and test ratings are {ours}, published {PUBLISHED[split]}")


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

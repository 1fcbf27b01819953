"""`hotloop recommender convert`: rating data as published, to three text files of `user TAB item TAB rating`.

Ids are the source's. Lines are in the order of users, and each user's in that of time, whatever order the source had.
"""

import mmap
import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.data.rating_matrix import number_ids
from hotloop.data.ratings import GrowingRatings, Ratings, import_arrow_csv, read_rating_text, write_tables
from hotloop.engine.progress import Console
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import rating_sets
from hotloop.families.recommender.commands_config import ConvertOptions
from hotloop.families.recommender.rating_sets import TEST, TRAIN, VALID, RatingSplit

PARTS = {"train": TRAIN, "valid": VALID, "test": TEST}
_MOVIELENS = ("u.data", "ratings.dat", "ratings.csv")
PATTERNS = ("mv_*.txt", "combined_data_*.txt")
_LINE = re.compile(rb"([0-9]+),([0-9]+(?:\.[0-9]*)?),([0-9]{4}-[0-9]{2}-[0-9]{2})")
_HEADER = re.compile(rb"([0-9]{1,9}):")
# First and last day, both included, of the training and the test ratings of the Netflix Prize's splits.
RANGES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "full": (("1999-12-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "3m": (("2005-09-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "6m": (("2005-06-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "1y": (("2004-06-01", "2005-05-31"), ("2005-06-01", "2005-06-30")),
}
ALL_RATINGS = 100_480_507
# Training ratings, users and items, and ratings for validation and test together (DeepRecommender's README).
PUBLISHED = {
    "full": (98_074_901, 477_412, 17_768, 2_250_481),
    "3m": (13_675_402, 311_315, 17_736, 2_082_559),
    "6m": (29_179_009, 390_795, 17_757, 2_175_535),
    "1y": (41_451_832, 345_855, 16_907, 3_888_684),
}


def run(config: ConvertOptions, console: Console) -> Mapping[str, Any]:
    if config.out.exists() and not config.out.is_dir():
        raise OptionError(f"OUT {config.out}: is a file; give a folder")
    targets = {part: config.out / f"{config.split}_{part}.txt" for part in PARTS}
    for path in targets.values():
        if not config.overwrite and path.exists() and path.stat().st_size:
            raise OptionError(f"OUT {config.out}: {path.name} is there; another folder, or --overwrite")
    table, is_netflix = read_source(config.source, console)
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
    if is_netflix and len(table) == ALL_RATINGS and config.split in PUBLISHED:
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


def read_source(source: str | Path, console: Console) -> tuple[Ratings, bool]:
    """The ratings, and whether they are the Netflix Prize's (whose times are days)."""
    source = Path(source)
    if not source.exists():
        raise DataError(f"SOURCE {source}: does not exist")
    text, files = source, [source]
    if source.is_dir():
        found = (sorted(place.glob(each)) for place in (source, source / "training_set") for each in PATTERNS)
        files = next(filter(None, found), [])
        texts = [source / name for name in _MOVIELENS if (source / name).is_file()]
        if not files and not texts:
            known = ", ".join((*PATTERNS, *_MOVIELENS))
            raise DataError(f"SOURCE {source}: none of {known} in this folder")
        text = texts[0] if not files else text
    else:
        with source.open("rb") as file:
            files = files if _HEADER.fullmatch(file.readline(64).strip()) else []
    if files:
        return read_netflix(files, console), True
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
    train, test = np.array(RANGES[config.split], "datetime64[D]").astype(int).tolist()
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
        users = len(number_ids(split.table.users[chosen])[1])
        counts[name] = {
            "ratings": int(np.count_nonzero(chosen)),
            "users": users,
            "items": len(number_ids(split.table.items[chosen])[1]),
            # Users of the part whose every rating was of an item that train does not have.
            "without_lines": len(number_ids(split.table.users[given])[1]) - users
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
                texts = pa.array([str(level) for level in levels], pa.string())
                append(part.users.astype(np.int64), part.items.astype(np.int64), texts.take(pa.array(codes)))
            bar.advance(len(order))


def compare_with_published(split: str, counts: Mapping[str, Mapping[str, int]], console: Console) -> None:
    ours = (*list(counts["train"].values())[:3], counts["valid+test"]["ratings"])
    if ours == PUBLISHED[split]:
        console.say("these are the published numbers of ratings, training users and training items")
    else:
        console.warn(f"train ratings, users, items and test ratings are {ours}, published {PUBLISHED[split]}")


def read_netflix(files: list[Path], console: Console) -> Ratings:
    """All ratings of the files; `times` are days. DataError with the first bad line."""
    csv = import_arrow_csv()
    import pyarrow as pa

    names = {"user": pa.int32(), "rating": pa.float32(), "day": pa.date32()}
    settings = (
        csv.ReadOptions(column_names=list(names), use_threads=False),
        csv.ParseOptions(quote_char=False, double_quote=False),
        csv.ConvertOptions(column_types=names, null_values=[]),
    )
    found = GrowingRatings(np.int32, np.int32, np.float32, np.int32)
    with console.progress("reading ratings", sum(path.stat().st_size for path in files)) as bar:
        for path in files:
            if not path.stat().st_size:
                raise DataError(f"{path}: no ratings in this file")
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for item, begin, end in _sections(path, data):
                    body = data[begin:end]
                    bar.advance(end - begin)
                    if not body.strip():
                        continue
                    try:
                        table = csv.read_csv(pa.BufferReader(body), *settings)
                    except pa.ArrowInvalid as error:
                        raise _bad_line(path, data, begin, body, str(error)) from None
                    users, ratings = table["user"].to_numpy(), table["rating"].to_numpy()
                    if not (ratings.min(initial=1) > 0 and ratings.max(initial=1) < np.inf):
                        raise _bad_line(path, data, begin, body, "a rating that is not above 0")
                    days = table["day"].cast(pa.int32()).to_numpy()
                    found.append([users, np.full(len(users), item, np.int32), ratings, days])
    result = found.finish()
    if not len(result):
        raise DataError(f"{files[0].parent}: no ratings in {len(files)} files")
    return result


def _sections(path: Path, data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """Movie, first byte and end of each section's lines of ratings."""
    colon = data.find(b":")
    if data.rfind(b"\n", 0, max(colon, 0)) >= 0 or colon < 0:
        raise DataError(f"{path}: line 1: expected 'MovieID:', as in the Netflix Prize's files")
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", colon) + 1 or len(data)
        header = _HEADER.fullmatch(data[begin:end].strip())
        if header is None:
            line = data[:begin].count(b"\n") + 1
            raise DataError(f"{path}: line {line}: {_quote(data[begin:end])} is not a 'MovieID:'")
        colon = data.find(b":", end)
        following = data.rfind(b"\n", end - 1, colon) + 1 if colon >= 0 else len(data)
        yield int(header[1]), end, following
        begin = following


def _bad_line(path: Path, data: mmap.mmap, begin: int, body: bytes, said: str) -> DataError:
    first = data[:begin].count(b"\n") + 1
    for number, line in enumerate(body.splitlines(), first):
        if line and (reason := _line_fault(line)):
            return DataError(f"{path}: line {number}: {reason}")
    return DataError(f"{path}: cannot be read after line {first} ({' '.join(said.split())})")


def _line_fault(line: bytes) -> str:
    fields = _LINE.fullmatch(line.strip())
    if fields is None:
        return f"{_quote(line)} is not 'CustomerID,Rating,YYYY-MM-DD'"
    if len(fields[1]) > 10 or int(fields[1]) >= 2**31:
        return f"customer {fields[1][:60].decode()} is too large"
    try:
        date.fromisoformat(fields[3].decode())
    except ValueError as error:
        return f"{fields[3].decode()} is not a day ({error})"
    return "" if float(fields[2]) > 0 else f"rating {fields[2].decode()} is not above 0"


def _quote(text: bytes) -> str:
    return repr(text.strip()[:60].decode("utf-8", "replace"))

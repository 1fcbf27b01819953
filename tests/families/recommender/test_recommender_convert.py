import os
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from hotloop.cli.command import Context
from hotloop.data.ratings import Ratings, read_rating_text
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import convert
from hotloop.families.recommender.commands_config import ConvertOptions
from hotloop.families.recommender.rating_sets import (
    OUTSIDE,
    TEST,
    TRAIN,
    VALID,
    draw_numbers,
    split_by_user_time,
    split_randomly,
)
from hotloop.options import build

ROOT = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[3] / "../shared/data"
).resolve()
needs_movielens = pytest.mark.skipif(not (ROOT / "ml-100k/u.data").is_file(), reason=f"no ml-100k in {ROOT}")

RAW = {
    1: ["10,5,2005-09-01", "11,3,2005-08-31", "12,4,2005-11-30", "13,2,2005-12-31"],
    2: ["10,4,2005-12-01", "12,1,2005-12-31", "11,5,2005-12-15", "14,3,2005-10-10"],
    3: ["10,2,2005-12-05", "14,5,2005-12-06"],
    4: ["10,1,2005-10-01", "14,4,2006-01-01", "15,3,2005-12-20", "12,5,2005-12-10"],
}
"""In 3m, 13, 15 and 11 have no training rating, movie 3 has none, and two ratings lie outside."""


def write_movies(folder, movies, end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for movie, lines in movies.items():
        path = folder / f"mv_{movie:07d}.txt"
        path.write_bytes("".join(line + end for line in (f"{movie}:", *lines)).encode())
    return folder


def write_combined(folder, files, end="\n"):
    """Each file is a list of (movie, lines)."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, sections in enumerate(files, 1):
        lines = [line for movie, own in sections for line in (f"{movie}:", *own)]
        (folder / f"combined_data_{number}.txt").write_bytes("".join(line + end for line in lines).encode())
    return folder


def converted(source, out, split, **options):
    return convert.run(ConvertOptions(source, out, split, **options), Context())


def contents(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def pairs(path):
    if not path.stat().st_size:
        return set()
    table = read_rating_text(path)
    return set(zip(table.users.tolist(), table.items.tolist(), strict=True))


def shuffled_movies(count=60, customers=40, seed=0):
    """Ratings of random days around the borders of 3m."""
    rng = np.random.default_rng(seed)
    days = np.arange("2005-08-25", "2006-01-05", dtype="datetime64[D]")
    return {
        movie: [
            f"{customer},{rng.integers(1, 6)},{rng.choice(days)}"
            for customer in rng.choice(
                np.arange(100, 100 + customers), rng.integers(1, customers), replace=False
            )
        ]
        for movie in range(1, count + 1)
    }


def test_netflix_counts_are_those_computed_by_hand(tmp_path, capsys):
    result = converted(write_movies(tmp_path / "raw", RAW), tmp_path / "out", "3m")
    counts = result["counts"]
    assert result["ratings"] == 14
    assert counts["train"] == {"ratings": 4, "users": 3, "items": 3, "without_lines": 0}
    assert counts["valid+test"] == {"ratings": 3, "users": 2, "items": 2, "without_lines": 1}
    assert counts["valid"]["ratings"] + counts["test"]["ratings"] == 3
    assert counts["left_out"] == {"not_in_split": 2, "user_not_in_train": 3, "item_not_in_train": 2}
    assert (tmp_path / "out/3m_train.txt").read_text() == "10\t1\t5.0\n10\t4\t1.0\n12\t1\t4.0\n14\t2\t3.0\n"
    later = (tmp_path / "out/3m_valid.txt").read_text() + (tmp_path / "out/3m_test.txt").read_text()
    assert sorted(later.splitlines()) == ["10\t2\t4.0", "12\t2\t1.0", "12\t4\t5.0"]
    assert "part        ratings  users  items  users without lines\ntrain             4      3" in (
        capsys.readouterr().out
    )


def test_full_trains_on_what_3m_does_not_reach(tmp_path):
    counts = converted(write_movies(tmp_path / "raw", RAW), tmp_path / "out", "full")["counts"]
    assert [counts["train"][name] for name in ("ratings", "users", "items")] == [5, 4, 3]
    assert [counts["valid+test"][name] for name in ("ratings", "users", "items")] == [4, 3, 2]
    assert counts["left_out"] == {"not_in_split": 1, "user_not_in_train": 2, "item_not_in_train": 2}


BORDERS = {
    "full": ("1999-11-30 1999-12-01 2005-11-30 2005-12-01 2005-12-31 2006-01-01", "2004-03-03"),
    "3m": ("2005-08-31 2005-09-01 2005-11-30 2005-12-01 2005-12-31 2006-01-01", "2005-10-10"),
    "6m": ("2005-05-31 2005-06-01 2005-11-30 2005-12-01 2005-12-31 2006-01-01", "2005-07-07"),
    "1y": ("2004-05-31 2004-06-01 2005-05-31 2005-06-01 2005-06-30 2005-07-01", "2005-01-01"),
}


@pytest.fixture(params=["Pacific/Kiritimati", "America/Los_Angeles"])
def local_time(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("split", BORDERS)
def test_the_first_and_last_days_belong_to_their_ranges_in_every_time_zone(tmp_path, local_time, split):
    days, inside = BORDERS[split]
    movies = {movie: [f"1,3,{day}", f"2,3,{inside}"] for movie, day in enumerate(days.split())}
    converted(write_movies(tmp_path / "raw", movies), tmp_path / "out", split)
    train, valid, test = (pairs(tmp_path / f"out/{split}_{part}.txt") for part in convert.PARTS)
    assert {item for user, item in train if user == 1} == {1, 2}
    assert valid | test == {(1, 3), (1, 4)}


def test_order_of_files_sections_and_lines_line_ends_and_form_change_nothing(tmp_path):
    movies = shuffled_movies()
    expected = write_movies(tmp_path / "raw", movies)
    converted(expected, tmp_path / "plain", "3m", seed=5)
    rng = np.random.default_rng(1)
    mixed = [(int(movie), rng.permutation(movies[movie]).tolist()) for movie in rng.permutation(list(movies))]
    combined = write_combined(tmp_path / "kaggle", [mixed[:7], mixed[7:41], mixed[41:]], "\r\n")
    converted(combined, tmp_path / "mixed", "3m", seed=5)
    converted(
        write_movies(tmp_path / "crlf/training_set", movies, "\r\n").parent,
        tmp_path / "crlf_out",
        "3m",
        seed=5,
    )
    plain = contents(tmp_path / "plain")
    assert all(len(text) > 1000 for text in plain.values())
    assert contents(tmp_path / "mixed") == contents(tmp_path / "crlf_out") == plain


def test_lines_are_grouped_by_user_and_each_users_follow_the_time(tmp_path):
    movies = shuffled_movies()
    days = {(int(line.split(",")[0]), movie): line[-10:] for movie, lines in movies.items() for line in lines}
    converted(write_movies(tmp_path / "raw", movies), tmp_path / "out", "3m")
    train = read_rating_text(tmp_path / "out/3m_train.txt")
    keys = [
        (user, days[user, item], item)
        for user, item in zip(train.users.tolist(), train.items.tolist(), strict=True)
    ]
    assert keys == sorted(keys)
    assert len({day for _, day, _ in keys}) > 50


def test_another_seed_deals_the_same_ratings_to_other_halves(tmp_path):
    source = write_movies(tmp_path / "raw", shuffled_movies())
    halves = []
    for seed in (0, 1):
        converted(source, tmp_path / f"{seed}", "3m", seed=seed)
        halves.append([pairs(tmp_path / f"{seed}/3m_{part}.txt") for part in ("valid", "test")])
    (valid, test), (other_valid, other_test) = halves
    assert valid | test == other_valid | other_test
    assert not valid & test
    assert valid != other_valid
    total = len(valid | test)
    assert abs(len(valid) - total / 2) < 4 * np.sqrt(total) / 2


def test_a_single_file_of_sections_is_read_and_empty_sections_are_passed_over(tmp_path):
    combined = write_combined(tmp_path / "raw", [[(1, []), (2, ["5,3,2005-09-09"]), (3, []), (4, [])]])
    table = convert.read_netflix(sorted(combined.iterdir()), Context())
    assert (table.users.tolist(), table.items.tolist(), table.values.tolist()) == ([5], [2], [3.0])
    assert table.times.tolist() == [(date(2005, 9, 9) - date(1970, 1, 1)).days]
    assert (
        converted(combined / "combined_data_1.txt", tmp_path / "out", "3m")["counts"]["train"]["ratings"] == 1
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no ratings in this file"),
        ("5,3,2005-09-09\n", "line 1: expected 'MovieID:'"),
        ("5,3,2005-09-09\n1:\n", "line 1: expected 'MovieID:'"),
        ("x:\n5,3,2005-09-09\n", "line 1: 'x:' is not a 'MovieID:'"),
        ("1:\n5,3,2005-09-09\n2:\n5,3,2005-02-29\n", "line 4: 2005-02-29 is not a day"),
        (
            "1:\r\n5,3,2005-09-09\r\n\r\n5,three,2005-09-09\r\n",
            "line 4: '5,three,2005-09-09' is not 'CustomerID,",
        ),
        ("1:\n5,3,2005-09-09\n5,3\n", "line 3: '5,3' is not 'CustomerID,Rating,YYYY-MM-DD'"),
        ("1:\n5,0,2005-09-09\n", "line 2: rating 0 is not above 0"),
        ("1:\n5,-2,2005-09-09\n", "line 2: '5,-2,2005-09-09' is not 'CustomerID,Rating,YYYY-MM-DD'"),
        ("1:\n3000000000,2,2005-09-09\n", "line 2: customer 3000000000 is too large"),
        ("1:\n5,2,2005-09-09\n5,2,2005-09-09 12:30\n", "line 3: '5,2,2005-09-09 12:30' is not a 'MovieID:'"),
    ],
)
def test_a_bad_raw_line_is_named_with_its_number_and_reason(tmp_path, text, reason):
    path = tmp_path / "mv_0000001.txt"
    path.write_bytes(text.encode())
    with pytest.raises(DataError) as error:
        converted(tmp_path, tmp_path / "out", "3m")
    assert str(error.value).startswith(f"{path}: {reason}")
    assert not (tmp_path / "out").exists()


def timed(rows):
    users, items, times = map(np.array, zip(*rows, strict=True))
    return Ratings(users, items, np.ones(len(users), np.float32), times)


def test_user_time_trains_on_the_first_seven_tenths_of_each_user():
    ten = [(1, item, 100 - item) for item in range(10)]  # the latest item is 0
    tied = [(4, item, 7) for item in (9, 2, 5)]  # one moment: by item
    rows = [*ten, (2, 3, 1), (3, 9, 50), (3, 8, 40), *tied]
    order = np.random.default_rng(0).permutation(len(rows))
    split = split_by_user_time(timed([rows[place] for place in order]), seed=0)
    part = {(rows[place][0], rows[place][1]): int(split.parts[at]) for at, place in enumerate(order)}
    assert {item for user, item in part if user == 1 and part[user, item] == TRAIN} == {3, 4, 5, 6, 7, 8, 9}
    assert part[2, 3] == OUTSIDE
    assert part[3, 8] == TRAIN
    assert part[3, 9] != TRAIN
    assert [part[4, item] for item in (2, 5)] == [TRAIN, TRAIN]
    assert part[4, 9] in (VALID, TEST)
    assert len({part[1, item] for item in (0, 1, 2)}) == 1
    removed = {(rows[place][0], rows[place][1]) for at, place in enumerate(order) if split.unseen[at]}
    assert removed == {(1, 0), (1, 1)}  # item 2 stays: user 4 trains on it


def test_user_time_deals_whole_users_by_a_fair_coin():
    users = np.repeat(np.arange(2000), 4)
    split = split_by_user_time(
        Ratings(users, np.tile(np.arange(4), 2000), np.ones(8000, np.float32), np.tile(np.arange(4), 2000))
    )
    later = split.parts.reshape(2000, 4)[:, 2:]
    assert (later[:, 0] == later[:, 1]).all()
    assert abs((later[:, 0] == VALID).sum() - 1000) < 4 * np.sqrt(2000) / 2


def test_random_split_has_its_fractions_and_ignores_the_order():
    rng = np.random.default_rng(0)
    cells = rng.permutation(200 * 100)
    table = Ratings(cells // 100, cells % 100, np.ones(len(cells), np.float32))
    split = split_randomly(table, (0.7, 0.1, 0.2), seed=2)
    shares = np.bincount(split.parts, minlength=3) / len(cells)
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.015)  # more than four standard deviations
    by_cell = np.empty_like(split.parts)
    by_cell[cells] = split.parts
    again = split_randomly(
        Ratings(np.arange(20_000) // 100, np.arange(20_000) % 100, table.values), (0.7, 0.1, 0.2), seed=2
    )
    np.testing.assert_array_equal(again.parts, by_cell)
    whole = split_randomly(table, (0.8, 0.0, 0.2), seed=2)
    np.testing.assert_array_equal(whole.parts == TEST, split.parts == TEST)
    assert (split_randomly(table, (0.7, 0.1, 0.2), seed=3).parts != split.parts).mean() > 0.3
    assert (split_randomly(table, (1, 0, 0)).parts == TRAIN).all()


def test_draws_are_uniform_and_depend_on_every_id():
    grid = np.arange(40_000)
    draws = draw_numbers(0, grid // 200, grid % 200)
    counts = np.bincount(draws >> 28, minlength=16)
    assert ((counts - 2500) ** 2 / 2500).sum() < 44  # chi squared of 15 degrees, one in ten thousand
    assert len(np.unique(draws)) > 39_950
    assert (draw_numbers(0, grid % 200, grid // 200) == draws).mean() < 0.01


def test_half_stars_and_own_ids_survive_the_conversion(tmp_path):
    rows = [
        (900_000_000_000 + user, 70_000 + item, 0.5 * (1 + (user + item) % 10))
        for user in range(9)
        for item in range(20)
    ]
    source = tmp_path / "ratings.csv"
    lines = [f"{user},{item},{rating},{place}" for place, (user, item, rating) in enumerate(rows)]
    source.write_text("\r\n".join(("userId,movieId,rating,timestamp", *lines)))
    result = converted(tmp_path, tmp_path / "out", "random", fractions=(0.5, 0.25, 0.25))
    assert sum(result["counts"][part]["ratings"] for part in convert.PARTS) == len(rows)
    parts = [read_rating_text(Path(path)) for path in result["files"].values()]
    got = {
        cell
        for part in parts
        for cell in zip(part.users.tolist(), part.items.tolist(), part.values.tolist(), strict=True)
    }
    assert got == set(rows)
    assert "\t0.5\n" in (tmp_path / "out/random_train.txt").read_text()


@needs_movielens
def test_real_movielens_divides_without_loss(tmp_path):
    counts = converted(ROOT / "ml-100k", tmp_path, "random")["counts"]
    kept = sum(counts[part]["ratings"] for part in convert.PARTS)
    assert kept + sum(counts["left_out"].values()) == 100_000
    assert counts["train"]["users"] == 943
    assert counts["train"]["ratings"] == pytest.approx(80_000, abs=4 * 127)
    by_time = converted(ROOT / "ml-100k/u.data", tmp_path, "user-time")["counts"]
    sizes = np.bincount(read_rating_text(ROOT / "ml-100k/u.data").users)
    assert by_time["train"]["ratings"] == (7 * sizes // 10).sum()
    assert by_time["valid"]["users"] + by_time["test"]["users"] == 943


def test_files_of_an_earlier_conversion_are_replaced_only_when_asked(tmp_path):
    source = write_movies(tmp_path / "raw", RAW)
    converted(source, tmp_path / "out", "3m")
    before = contents(tmp_path / "out")
    with pytest.raises(OptionError, match=r"3m_train\.txt is there; another folder, or --overwrite"):
        converted(source, tmp_path / "out", "3m", seed=1)
    converted(source, tmp_path / "out", "6m")
    with (tmp_path / "out/3m_train.txt").open("rb") as reader:
        converted(write_movies(tmp_path / "less", {1: RAW[1]}), tmp_path / "out", "3m", overwrite=True)
        assert reader.read() == before["3m_train.txt"]  # whoever reads the old file has all of it
    assert len((tmp_path / "out/3m_train.txt").read_text().splitlines()) == 2


def test_a_conversion_that_breaks_off_leaves_what_was_there(tmp_path, monkeypatch):
    source = write_movies(tmp_path / "raw", RAW)
    converted(source, tmp_path / "out", "3m")
    before = contents(tmp_path / "out")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.rating_sets, "order_blocks", full_disk)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        converted(source, tmp_path / "out", "3m", overwrite=True)
    assert contents(tmp_path / "out") == before


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    plain = tmp_path / "plain.txt"
    plain.write_text("1\t2\t3.0\n1\t3\t3.0\n")
    with_times = tmp_path / "u.data"
    with_times.write_text("1\t2\t3\t100\n1\t3\t3\t200\n")
    out = tmp_path / "out"
    for source, split, reason in (
        (tmp_path / "absent", "3m", "SOURCE .*absent: does not exist"),
        (tmp_path / "empty", "3m", r"SOURCE .*: none of mv_\*.txt, .*u.data"),
        (plain, "user-time", "--split user-time: .* has no times; --split random needs none"),
        (plain, "3m", "--split 3m: .* has no times"),
        (with_times, "full", "--split full: is for the days of the Netflix Prize; .* user-time or random"),
        (write_movies(tmp_path / "raw", RAW), "1y", "no rating falls into the training part of --split 1y"),
    ):
        with pytest.raises((DataError, OptionError), match=reason):
            converted(source, out, split)
    with pytest.raises(OptionError, match="is a file; give a folder"):
        converted(plain, plain, "random")
    assert not out.exists()


def test_shares_may_be_written_with_commas():
    options = {"source": "a", "out": "b", "split": "random", "fractions": "0.9,0.05,0.05"}
    assert build(ConvertOptions, options).fractions == (0.9, 0.05, 0.05)


def test_published_sizes_are_recognised(capsys):
    train = {"ratings": 13_675_402, "users": 311_315, "items": 17_736, "without_lines": 0}
    counts = {"train": train, "valid+test": {"ratings": 2_082_559}}
    convert.compare_with_published("3m", counts, Context())
    assert "these are the published numbers" in capsys.readouterr().out
    convert.compare_with_published("3m", {**counts, "train": {**train, "users": 1}}, Context())
    assert "published (13675402, 311315, 17736, 2082559)" in capsys.readouterr().err

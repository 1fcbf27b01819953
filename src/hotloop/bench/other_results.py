"""Results of any other shape: a JSON document that says when, where or of what it is, shown by the form of its parts.

Rows become a table (standing on its side where it has more figures than rows), repeated numbers a strip each, rows over
epochs or updates a curve. It knows no program by name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hotloop.bench.axes import LARGEST, Axis, Point, format_number
from hotloop.bench.charts import COLOURS, line_chart
from hotloop.bench.page import CaptionedChart, Cell, Page, format_cell
from hotloop.bench.peers import describe_commit, describe_device
from hotloop.bench.record import LARGEST_FILE, NEEDED, group_by, is_number
from hotloop.bench.strips import Strip, Strips
from hotloop.options.files import parse_json, read_bounded

SIGNS = ("date", "commit", "environment", "machine", "source")
"""A document that has one of them is a result, not any JSON."""
ABOUT = (*SIGNS, "device", "command", "note")
OVER = ("epoch", "update", "step")
"""What a curve may run over; the first that there is."""
SEEDS = ("seed", "seeds", "samples", "round")  # numbers that are no measurement
MOST_COLUMNS, FEW_ROWS, MOST_CHARTS = 10, 8, 6
LONGEST_NAME = 40
FULL_ENOUGH = 0.7  # of a table's cells
START, HIDES = (
    0.1,
    4,
)  # the first part of a curve is left out where the whole is so many times as high as the rest
Rows = list[Mapping[str, Any]]


class OtherResult(NamedTuple):
    name: str
    date: str
    device: str
    commit: str
    document: Mapping[str, Any]


def read_other(document: Mapping[str, Any], name: str) -> OtherResult | None:
    """What a document holds; None where it is no result."""
    measured = [value for key, value in document.items() if key not in ABOUT]
    if not any(sign in document for sign in SIGNS) or not any(map(_has_number, measured)):
        return None
    device = str(document.get("machine") or document.get("device") or describe_device(document))
    date = str(document.get("date") or (name[:10] if name[:4].isdigit() else ""))
    title = name.removeprefix(date).strip("_").replace("_", " ")
    return OtherResult(title or name, date, device, describe_commit(document), document)


def read_lines_of_results(file: Path) -> OtherResult | None:
    """A file with a result on each line; None where it has none, or records of `hotloop bench run`."""
    try:
        lines = read_bounded(file, LARGEST_FILE).decode(errors="replace").splitlines()
        rows = [parse_json(line) for line in lines if line.strip()]
    except (OSError, ValueError):
        return None
    if not rows or not all(isinstance(row, Mapping) and _has_number(row) for row in rows):
        return None
    if any(name in row for row in rows for name in NEEDED):
        return None
    return read_other({"date": file.stem[:10], "results": rows}, file.stem)


def _has_number(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_number, value.values()))
    return any(map(_has_number, value)) if isinstance(value, list) else is_number(value)


def add_other(page: Page, result: OtherResult) -> None:
    document = result.document
    page.section(f"{result.name}{f', {result.date}' if result.date else ''}")
    said = [result.device, result.commit and f"commit {result.commit}"]
    page.text(" · ".join(filter(None, said)))
    for name in ("source", "note"):
        if isinstance(document.get(name), str):
            page.text(document[name])
    if document.get("command"):
        command = document["command"]
        page.code(command if isinstance(command, str) else " ".join(map(str, command)))
    facts = {name: value for name, value in document.items() if name not in ABOUT and _is_cell(value)}
    if facts:
        page.text(" · ".join(f"{_words(name)} {format_cell(value)}" for name, value in facts.items()))
    for name, value in document.items():
        if name not in ABOUT and name not in facts:
            _add_part(page, _words(name), value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or is_number(value)


def _cell(value: Any) -> Cell:
    return str(value) if isinstance(value, bool) else value


def _can_draw(value: Any) -> bool:
    return is_number(value) and abs(value) < LARGEST


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_can_draw, value))


def _is_curve(value: Any) -> bool:
    """Pairs of numbers, of which the first ones grow."""
    is_pairs = (
        isinstance(value, list)
        and len(value) > 1
        and all(_is_numbers(one) and len(one) == 2 for one in value)
    )
    return is_pairs and all(one[0] < after[0] for one, after in pairwise(value))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _leaves(value: Any, fits: Callable[[Any], bool], name: str = "") -> Iterator[tuple[str, Any]]:
    """The lists below a mapping by their paths; a leaf that does not fit is a None."""
    if fits(value):
        yield name, value
    elif isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _leaves(one, fits, f"{name} · {key}" if name else str(key))
    else:
        yield name, None


def _all_leaves(value: Any, fits: Callable[[Any], bool]) -> dict[str, Any] | None:
    """All lists below a mapping by their paths, without what all paths begin with; None where one does not fit."""
    while isinstance(value, Mapping) and len(value) == 1:
        value = next(iter(value.values()))
    found = dict(_leaves(value, fits))
    return None if any(one is None for one in found.values()) else found


def _add_part(page: Page, name: str, value: Any) -> None:
    """Show a part by its form, and what is inside its rows after it."""
    if not _has_number(value) or name.rpartition(" ")[2] in SEEDS:
        return
    if (numbers := _all_leaves(value, _is_numbers)) is not None:
        page.heading(name)
        page.charts(
            [(_strips(name, {path or name: each for path, each in numbers.items()}), "A dot a value.")]
        )
    elif isinstance(value, Mapping) and (curves := _all_leaves(value, _is_curve)) is not None:
        page.heading(name)
        page.charts(
            [_draw_curve(path or name, points) for path, points in list(curves.items())[:MOST_CHARTS]]
        )
    elif isinstance(value, Mapping) and (series := _all_leaves(value, _is_rows)) is not None:
        if charts := _draw_series(series):
            page.heading(name)
            page.charts(charts)
    elif _is_rows(value) or (
        isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values())
    ):
        is_named = isinstance(value, Mapping)
        rows = dict(value) if is_named else dict(zip(_name_rows(value), value, strict=True))
        alike = list(group_by(rows, lambda one: frozenset(rows[one])).values())
        if len(alike) > 1 and _is_sparse(rows.values()):
            for names in alike:  # rows of several kinds
                some = {one: rows[one] for one in names}
                of = f"{name}: {_words(names[0])}" if is_named else name
                _add_part(
                    page, of, some[names[0]] if len(some) == 1 else some if is_named else list(some.values())
                )
            return
        page.heading(name)
        _add_rows(page, rows, is_named)
        for inner in dict.fromkeys(key for row in rows.values() for key in row):
            inside = {one: row[inner] for one, row in rows.items() if _holds_lists(row.get(inner))}
            if inside:
                _add_part(page, f"{name}: {_words(inner)}", inside)
    elif isinstance(value, Mapping):
        page.heading(name)
        facts = dict(_flat(value))
        if facts:
            page.table(("figure", "value"), list(facts.items()), name)
        for key, one in value.items():
            if _holds_lists(one):
                _add_part(page, f"{name}: {_words(str(key))}", one)


def _name_rows(rows: Rows) -> list[str]:
    """Names out of what rows begin with, before what is measured, if it tells them apart; else their numbers."""
    first, names = rows[0], [""] * len(rows)
    for key in takewhile(lambda key: _is_setting(first[key]), first):
        values = [row.get(key) for row in rows]
        if len(set(map(str, values))) > 1 and all(map(_is_setting, values)):
            said = [value if isinstance(value, str) else f"{_words(key)} {value}" for value in values]
            names = [f"{name}, {one}".removeprefix(", ") for name, one in zip(names, said, strict=True)]
            if len(set(names)) == len(rows) and max(map(len, names)) <= LONGEST_NAME:
                return names
    return [f"{number}" for number in range(1, len(rows) + 1)]


def _is_setting(value: Any) -> bool:
    return isinstance(value, str | int)


def _is_sparse(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a table of these rows would be empty in large part."""
    flat = [dict(_flat(row)) for row in rows]
    columns = {name for row in flat for name in row}
    return sum(map(len, flat)) < FULL_ENOUGH * len(flat) * len(columns)


def _holds_lists(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_lists, value.values()))
    return isinstance(value, list) and len(value) > 1


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Cell]]:
    """The figures of a row by their paths; of a list of numbers the median."""
    for key, value in row.items():
        name = f"{before}{_words(str(key))}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name} ")
        elif _is_cell(value):
            yield name, _cell(value)
        elif _is_numbers(value) and key not in SEEDS:
            yield f"{name}, median", median(value)


def _add_rows(page: Page, rows: Mapping[str, Mapping[str, Any]], is_named: bool) -> None:
    """Rows as a table, on its side where it has many figures and few rows."""
    flat = {name: dict(_flat(row)) for name, row in rows.items()}
    columns = list(dict.fromkeys(column for row in flat.values() for column in row))
    if len(columns) > MOST_COLUMNS and len(rows) <= FEW_ROWS:
        page.table(["figure", *rows], [[each, *(row.get(each) for row in flat.values())] for each in columns])
    elif columns:
        heads = ["name", *columns] if is_named else columns
        first = [[name] if is_named else [] for name in flat]
        cells = [[row.get(each) for each in columns] for row in flat.values()]
        page.table(heads, [[*name, *row] for name, row in zip(first, cells, strict=True)])


def _draw_curve(name: str, points: Sequence[Sequence[float]]) -> CaptionedChart:
    chart = line_chart(
        name, Axis("the first number of a pair"), Axis("the second"), {"": [(x, y) for x, y in points]}
    )
    return chart, "As its file has it."


def _draw_series(series: Mapping[str, Rows]) -> list[CaptionedChart]:
    """Rows of several runs: curves over epochs or updates, or how far single runs lie apart."""
    first = next(iter(series.values()))
    over = next((key for key in OVER if all(_can_draw(row.get(key)) for row in first)), None)
    figures = [key for key in first[0] if key not in (*OVER, *SEEDS) and _can_draw(first[0][key])]
    charts: list[CaptionedChart] = []
    for figure in figures[:MOST_CHARTS]:
        if over is not None and len(first) > 2:
            lines = {
                name: [
                    (row[over], row[figure])
                    for row in rows
                    if _can_draw(row.get(over)) and _can_draw(row.get(figure))
                ]
                for name, rows in list(series.items())[:COLOURS]
            }
            shown, left_out = _without_start(lines)
            chart = line_chart(_words(figure), Axis(over), Axis(_words(figure)), shown)
            some = f", the first {COLOURS} of {len(series)}" if len(series) > COLOURS else ""
            charts.append((chart, f"Over the {over}s{left_out}{some}."))
        else:
            known = {
                name: [row[figure] for row in rows if _can_draw(row.get(figure))]
                for name, rows in series.items()
            }
            charts.append((_strips(_words(figure), known), "A dot a run; the box is the middle half."))
    return charts


def _without_start(lines: Mapping[str, Sequence[Point]]) -> tuple[dict[str, Sequence[Point]], str]:
    """Curves without a beginning that would hide the rest, and words that say so."""

    def height(points: Iterable[Point]) -> float:
        values = [y for _, y in points]
        return max(values) - min(values) if values else 0.0

    begin = START * max(x for points in lines.values() for x, _ in points)
    rest = {name: [point for point in points if point[0] >= begin] for name, points in lines.items()}
    whole, later = (height(point for points in some.values() for point in points) for some in (lines, rest))
    if later and whole > HIDES * later:
        return dict(rest), f" from {format_number(begin)} on: what was before would hide the rest"
    return dict(lines), ""


def _strips(title: str, numbers: Mapping[str, Sequence[float]]) -> Strips:
    rows = []
    for name, values in numbers.items():
        if values:
            low, middle, high = map(float, np.quantile(values, [0.25, 0.5, 0.75]))
            rows.append(Strip(name, low, middle, high, values))
    spread = [value for row in rows for value in row.values]
    wide = bool(spread) and min(spread) > 0 and max(spread) > 50 * min(spread)
    return Strips(title, Axis(title, log=wide), rows)

"""Comparisons with other programs, read from the files that the peer benchmarks leave, as rows of one shape.

The files of different families name things differently (`ours_us`, a `side` a row, nested timings); here they become
one table and one chart of ratios. It runs no peer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.bench.record_shape import number, positive
from hotloop.bench.svg_axes import Axis
from hotloop.bench.svg_strips import Strip, Strips

Cell = str | float | None
COLUMNS = (
    "family",
    "case",
    "peer",
    "hotloop",
    "the peer",
    "unit",
    "times as fast",
    "lowest–highest",
    "floor",
    "device",
    "date",
)


@dataclass(frozen=True)
class PeerRow:
    """One case against one peer: `ratio` times as fast, with the lowest and highest of its rounds."""

    family: str
    case: str
    peer: str
    ours: float | None
    theirs: float | None
    unit: str
    ratio: float
    low: float
    high: float
    floor: float | None
    device: str
    date: str


def is_peers(document: Any) -> bool:
    """Whether a JSON document is a comparison with peers."""
    results = document.get("results") if isinstance(document, Mapping) else None
    return isinstance(results, list) and any(isinstance(row, Mapping) and _ratio(row) for row in results)


def peer_rows(document: Mapping[str, Any], name: str) -> list[PeerRow]:
    """The rows of one document; `name` is its file's, without the ending."""
    results = [row for row in document["results"] if isinstance(row, Mapping)]
    said = document.get("environment")
    where = said if isinstance(said, Mapping) else {}
    date = str(document.get("date") or name[:10])
    return [
        _row(row, _own(row, results), _family(document, row, name), _device(where), date)
        for row in results
        if _ratio(row) and row.get("side") != "ours"
    ]


def _ratio(row: Mapping[str, Any]) -> bool:
    return positive(row.get("ratio"))


def number_or_none(value: Any) -> float | None:
    """A number of a document; what is none counts as left out."""
    return float(value) if number(value) else None


def _milliseconds(side: Any) -> Any:
    return side.get("milliseconds") if isinstance(side, Mapping) else None


def _own(row: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Our side of a row, where each side has a row of its own."""
    return next((each for each in results if each.get("side") == "ours" and _case(each) == _case(row)), {})


def _row(row: Mapping[str, Any], own: Mapping[str, Any], family: str, device: str, date: str) -> PeerRow:
    peer = _peer(row)
    if "ours_us" in row:
        ours, theirs, unit = row["ours_us"], row.get(f"{peer}_us"), "µs"
    elif isinstance(row.get("ours"), Mapping):
        ours, theirs, unit = _milliseconds(row["ours"]), _milliseconds(row.get(peer)), "ms"
    else:
        ours, theirs, unit = own.get("milliseconds"), row.get("milliseconds"), "ms"
    ratio = float(row["ratio"])
    ends = [row[key] if positive(row.get(key)) else ratio for key in ("ratio_low", "ratio_high")]
    low, high = map(float, ends)
    ours, theirs, floor = map(number_or_none, (ours, theirs, row.get("floor")))
    return PeerRow(family, _case(row), peer, ours, theirs, unit, ratio, low, high, floor, device, date)


def _peer(row: Mapping[str, Any]) -> str:
    if said := row.get("side") or row.get("peer"):
        return str(said)
    timed = [key.removesuffix("_us") for key in row if key.endswith("_us")]
    nested = [key for key, value in row.items() if isinstance(value, Mapping)]
    return next((key for key in (*timed, *nested) if key != "ours"), "peer")


def _case(row: Mapping[str, Any]) -> str:
    parts = [str(row[key]) for key in ("case", "shape") if row.get(key)]
    parts += [f"{key.replace('_', ' ')} {row[key]}" for key in ("size", "batch_size") if row.get(key)]
    kinds = re.findall(r"dtype\('(\w+)'\)", str(row.get("precision", ""))) or [str(row.get("dtype") or "")]
    return ", ".join([*parts, *(kind for kind in kinds[:1] if kind)])


def _family(document: Mapping[str, Any], row: Mapping[str, Any], name: str) -> str:
    said = row.get("family") or document.get("family")
    words = [word for word in name.split("_") if not re.fullmatch(r"[\d-]+", word)]
    return str(said or (words[0] if words else name))


def _device(where: Mapping[str, Any]) -> str:
    if where.get("platform") == "cpu":
        return f"{where.get('cpu', 'CPU')}, {where.get('cores', '?')} cores"
    kinds = where.get("device_kinds")
    return str(kinds[0]) if isinstance(kinds, list) and kinds else "unknown"


def cells(row: PeerRow) -> tuple[Cell, ...]:
    """A row under COLUMNS."""
    interval = f"{row.low:.3g}–{row.high:.3g}"
    numbers = (row.ours, row.theirs, row.unit, row.ratio, interval, row.floor)
    return (row.family, row.case, row.peer, *numbers, row.device, row.date)


def chart(rows: Sequence[PeerRow], title: str) -> Strips:
    """The ratios of one family on one device; a line at 1, where both take the same time."""
    peers = list(dict.fromkeys(row.peer for row in rows))
    strips = [
        Strip(f"{row.case} · {row.peer}", row.low, row.ratio, row.high, colour=peers.index(row.peer) % 6)
        for row in rows
    ]
    return Strips(title, Axis("times as fast as the peer", log=True), strips, at=1.0)

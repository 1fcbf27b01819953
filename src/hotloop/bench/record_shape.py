"""What a line of `results.jsonl` must look like, so that nothing behind it meets a value of another kind.

A part that is missing or None is fine for those who compare and report; a runner that goes on with a folder needs
all of them. It knows shapes alone, and says in a few words which part is wrong.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from hotloop.options.files import parse_json

LAST_MOMENT = 253402300800.0  # the year 10000, in which calendars of Python end


def parsed(line: str | bytes, whole: bool = False) -> dict[str, Any]:
    """The record on a line; a ValueError says what is wrong. A `whole` one has all that the runner writes."""
    record = parse_json(line)
    _expect(isinstance(record, dict), "no record of a run")
    for name in ("benchmark", "variant", "status", *(WHOLE if whole else ())):
        _expect(record.get(name) is not None, f"no record of a run, it has no '{name}'")
    for name in RUN if whole else ():
        _expect(name in record, f"no record of a run, it has no '{name}'")
    for name, fits in SHAPES.items():
        value = record.get(name)
        _expect(value is None or fits(value), f"no record of a run, its '{name}' is {str(value)[:40]!r}")
    if whole:
        _expect_whole(record)
    return dict(record)


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _expect_whole(record: Mapping[str, Any]) -> None:
    spec = record["spec"]
    _expect(
        _text(spec.get("file")) and _text(spec.get("sha256")), "no record of a run, its 'spec' is not whole"
    )
    for name, one in record["metrics"].items():
        _expect(
            {"value", "unit", "reduction"} <= one.keys(), f"no record of a run, metric '{name}' is not whole"
        )


def number(value: Any) -> bool:
    """Whether it is a number that a float can hold; NaN is one."""
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and isinstance(float(value), float)
        )
    except OverflowError:
        return False


def positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return number(value) and 0 < value < math.inf


def _moment(value: Any) -> bool:
    return number(value) and 0 <= value < LAST_MOMENT


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(number, value))


def _params(value: Any) -> bool:
    return isinstance(value, dict) and all(_text(each) or number(each) for each in value.values())


def _metric(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and (value.get("value") is None or number(value["value"]))
        and isinstance(value.get("unit") or "", str)
        and isinstance(value.get("values") or [], list)
    )


def _metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_metric, value.values()))


SHAPES: Mapping[str, Callable[[Any], bool]] = {
    "benchmark": _text,
    "variant": _text,
    "status": _text,
    "reason": _text,
    "command": _text,
    "repeat": _whole_number,
    "exitcode": _whole_number,
    "params": _params,
    "env": _texts,
    "log": _texts,
    "metrics": _metrics,
    "problems": _mapping,
    "monitor": _mapping,
    "spec": _mapping,
    "start": _moment,
    "end": _moment,
    "seconds": number,
    "pace": number,
    "paces": _numbers,
    "turns": _texts,
}
WHOLE = ("repeat", "params", "env", "log", "metrics", "problems", "spec")
RUN = ("reason", "command", "exitcode", "start", "end", "seconds")

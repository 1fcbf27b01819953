"""The `parameters` of a benchmark, in each form that files have, as rows of values.

A mapping of names gives every combination; its values may be comma strings or lists. A list gives the rows
themselves: names first and then values, or a mapping a row. It does not know what the values fill in.
"""

import math

from hotloop.bench.spec_yaml import Items, Pairs, Report, Text, Value
from hotloop.bench.variants import MOST_VARIANTS, every, listed

Row = dict[str, str]


def rows(value: Value | None, report: Report) -> list[Row]:
    """The parameter values of each variant, at least one row; problems are reported."""
    if value is None:
        return [{}]
    if isinstance(value, Pairs):
        return _combinations(value, report)
    if isinstance(value, Items) and value.items:
        found = _mappings(value, report) if isinstance(value.items[0], Pairs) else _table(value, report)
        return found or [{}]
    report(value.line, "parameters must be a mapping of names to values, or a list of rows")
    return [{}]


def _combinations(value: Pairs, report: Report) -> list[Row]:
    choices = {name: _choices(pair.value) for name, pair in value.pairs.items()}
    for name, options in choices.items():
        if not options:
            line = value.pairs[name].line
            report(line, f"parameters.{name} must be values such as '1, 32' or [1, 32], none of them empty")
            return [{}]
    if math.prod(len(options) for options in choices.values()) > MOST_VARIANTS:
        report(
            value.line, f"parameters have more than {MOST_VARIANTS} combinations; list the rows that matter"
        )
        return [{}]
    return every(choices)


def _choices(value: Value) -> list[str]:
    """The values of one name; unquoted {3, 4} is to YAML a mapping of 3 and 4 to nothing."""
    if isinstance(value, Text):
        texts = listed(value.text)
    elif isinstance(value, Pairs):
        empty = all(isinstance(pair.value, Text) and pair.value.is_null for pair in value.pairs.values())
        texts = list(value.pairs) if empty else []
    else:
        texts = [item.text if isinstance(item, Text) else "" for item in value.items]
    return texts if all(texts) else []


def _table(value: Items, report: Report) -> list[Row]:
    """Names in the first row, values in the others."""
    cells = [_cells(item) for item in value.items]
    names = cells[0]
    if not all(names) or len(set(names)) != len(names) or len(cells) < 2:
        report(
            value.items[0].line, "parameters need a first row of different names, and rows of values after it"
        )
        return []
    for item, row in zip(value.items, cells, strict=True):
        if len(row) != len(names):
            report(item.line, f"this row of parameters has {len(row)} values for {len(names)} names")
    return [dict(zip(names, row, strict=False)) for row in cells[1:]]


def _cells(value: Value) -> list[str]:
    if isinstance(value, Items):
        return [item.text if isinstance(item, Text) else "" for item in value.items]
    return listed(value.text) if isinstance(value, Text) else []


def _mappings(value: Items, report: Report) -> list[Row]:
    """One mapping a variant, all with the same names."""
    found: list[Row] = []
    for item in value.items:
        pairs = item.pairs if isinstance(item, Pairs) else {}
        row = {name: pair.value.text for name, pair in pairs.items() if isinstance(pair.value, Text)}
        if not row or len(row) != len(pairs) or (found and set(row) != set(found[0])):
            report(item.line, "each row of parameters must be a mapping of the same names to single values")
        found.append(row)
    return found

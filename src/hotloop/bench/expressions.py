"""Arithmetic in benchmark files: numbers, names, + - * / // % ** ( ) and a few functions, nothing else. A parser of its
own over floats: no text can run code, build a huge integer or nest without end.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping

LONGEST, DEEPEST = 1000, 40
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"|(?P<name>[^\W\d]\w*)|\{(?P<braced>[^{}]+)\}|(?P<sign>\*\*|//|[-+*/%(),]))"
)


class ExpressionError(ValueError):
    """A text that is no expression, or one without a finite value; the message says why."""


def _round(value: float, digits: float = 0) -> float:
    if digits != int(digits) or abs(digits) > 30:
        raise ExpressionError(f"round takes a whole number of digits from -30 to 30, not {digits:g}")
    return float(round(value, int(digits)))


FUNCTIONS: dict[str, tuple[Callable[..., float], range]] = {
    "min": (min, range(2, 101)),
    "max": (max, range(2, 101)),
    "abs": (abs, range(1, 2)),
    "sqrt": (math.sqrt, range(1, 2)),
    "log": (math.log, range(1, 3)),
    "exp": (math.exp, range(1, 2)),
    "round": (_round, range(1, 3)),
}
"""Each function and how many arguments it takes."""
BINARY: dict[str, tuple[int, Callable[[float, float], float]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
    "//": (2, operator.floordiv),
    "%": (2, operator.mod),
    "**": (4, math.pow),
}
"""How tightly each operator binds; a sign before a value binds with 3, as in Python: -2**-2 is -0.25."""


def evaluate_expression(text: str, names: Mapping[str, float]) -> float:
    """The finite value of the expression; `{name}` is the same as `name` and may hold any characters."""
    try:
        value = _parse(text, names, lambda function, *arguments: function(*arguments))
    except ZeroDivisionError:
        raise ExpressionError(f"'{text}' divides by zero") from None
    except OverflowError:
        raise ExpressionError(f"'{text}' is too large for a number") from None
    except ExpressionError:
        raise
    except ValueError:  # math.sqrt(-1), math.log(0), (-8) ** 0.5
        raise ExpressionError(f"'{text}' has no real value") from None
    if not math.isfinite(value):
        raise ExpressionError(f"'{text}' is {value}")
    return value


def check_expression(text: str, names: Iterable[str]) -> None:
    """Whether the text is an expression of these names; a wrong value (1/0) is found when it is evaluated."""
    _parse(text, dict.fromkeys(names, 1.0), lambda function, *arguments: 1.0)


def _parse(text: str, names: Mapping[str, float], compute: Callable[..., float]) -> float:
    """Climbs by how tightly operators bind; `compute` takes a function and its arguments."""
    if len(text) > LONGEST:
        raise ExpressionError(f"the expression has {len(text)} characters; {LONGEST} are allowed")
    tokens, place, end = [], 0, len(text.rstrip())  # kind and text of each
    while place < end:
        found = TOKEN.match(text, place)
        if not found:
            wrong = text[place:].strip()[0]
            raise ExpressionError(f"'{text}' has {wrong!r} where a number, name or sign belongs")
        tokens.append((str(found.lastgroup), found[str(found.lastgroup)].strip()))
        place = found.end()
    tokens = [("end", "the end"), *reversed(tokens)]  # so that the next is the last

    def took(*signs: str) -> str | None:
        return tokens.pop()[1] if tokens[-1][0] == "sign" and tokens[-1][1] in signs else None

    def close() -> None:
        if not took(")"):
            raise ExpressionError(f"')' is missing before '{tokens[-1][1]}'")

    def value(least: int = 1, depth: int = 1) -> float:
        """The value up to the first operator that binds less tightly than `least`."""
        if depth > DEEPEST:
            raise ExpressionError(f"the expression is nested more than {DEEPEST} deep")
        sign = took("+", "-")
        left = value(3, depth + 1) if sign else atom(depth)
        left = -left if sign == "-" else left
        while (binding := BINARY.get(tokens[-1][1], (0,))[0]) >= least and (sign := took(*BINARY)):
            # A power's right side begins with the next power, the right side of others ends before their equals.
            right = value(binding, depth + 1) if sign == "**" else value(binding + 1, depth)
            left = compute(BINARY[sign][1], left, right)
        return left

    def atom(depth: int) -> float:
        kind, said = tokens.pop()
        if kind == "number":
            return float(said)
        if kind == "name" and took("("):
            if said not in FUNCTIONS:
                raise ExpressionError(f"there is no function '{said}'; known: {', '.join(FUNCTIONS)}")
            arguments = [value(depth=depth + 1)]
            while took(","):
                arguments.append(value(depth=depth + 1))
            close()
            function, counts = FUNCTIONS[said]
            if len(arguments) not in counts:
                known = f"{counts[0]} to {counts[-1]}"
                raise ExpressionError(f"{said} takes {known} values, not {len(arguments)}")
            return compute(function, *arguments)
        if kind in ("name", "braced"):
            if said not in names:
                known = ", ".join(sorted(names)) or "nothing"
                raise ExpressionError(f"there is no '{said}'; known: {known}")
            return float(names[said])
        if (kind, said) == ("sign", "("):
            inside = value(depth=depth + 1)
            close()
            return inside
        raise ExpressionError(f"unexpected {said!r}" if kind != "end" else "the expression breaks off")

    result = value()
    if tokens[-1][0] != "end":
        raise ExpressionError(f"unexpected '{tokens[-1][1]}'")
    return result

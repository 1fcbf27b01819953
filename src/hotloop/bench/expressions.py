"""Arithmetic in benchmark files: numbers, names, + - * / // % ** ( ) and a few functions, nothing else. A parser of its
own over floats: no text can run code, build a huge integer or nest without end.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

LONGEST, DEEPEST = 1000, 40
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"|(?P<name>[^\W\d]\w*)|\{(?P<braced>[^{}]+)\}|(?P<sign>\*\*|//|[-+*/%(),]))"
)


class ExpressionError(ValueError):
    """A text that is no expression, or one without a finite value; the message says why."""


class Token(NamedTuple):
    """A piece of the text; `kind` is number, name, sign or end."""

    kind: str
    text: str


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
        value = _Parser(text, names).whole()
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


def check_expression(text: str, names: Mapping[str, object]) -> None:
    """Whether the text is an expression of these names; a wrong value (1/0) is found when it is evaluated."""
    _Parser(text, dict.fromkeys(names, 1.0), dry=True).whole()


def _tokens(text: str) -> list[Token]:
    if len(text) > LONGEST:
        raise ExpressionError(f"the expression has {len(text)} characters; {LONGEST} are allowed")
    tokens, place, end = [], 0, len(text.rstrip())
    while place < end:
        found = TOKEN.match(text, place)
        if not found:
            raise ExpressionError(
                f"'{text}' has {text[place:].strip()[0]!r} where a number, name or sign belongs"
            )
        tokens.append(Token(str(found.lastgroup), found[str(found.lastgroup)].strip()))
        place = found.end()
    return [*tokens, Token("end", "the end")]


class _Parser:
    """Climbs by how tightly operators bind; `dry`: the grammar and the names are checked and nothing is computed."""

    def __init__(self, text: str, names: Mapping[str, float], dry: bool = False):
        self.tokens, self.names, self.dry, self.place = _tokens(text), names, dry, 0

    def whole(self) -> float:
        value = self.value()
        if self.now.kind != "end":
            raise ExpressionError(f"unexpected '{self.now.text}'")
        return value

    @property
    def now(self) -> Token:
        return self.tokens[self.place]

    def take(self) -> Token:
        self.place += 1
        return self.tokens[self.place - 1]

    def took(self, *signs: str) -> str | None:
        return self.take().text if self.now.kind == "sign" and self.now.text in signs else None

    def value(self, least: int = 1, depth: int = 1) -> float:
        """The value up to the first operator that binds less tightly than `least`."""
        if depth > DEEPEST:
            raise ExpressionError(f"the expression is nested more than {DEEPEST} deep")
        sign = self.took("+", "-")
        value = self.value(3, depth + 1) if sign else self.atom(depth)
        value = -value if sign == "-" else value
        while (binding := BINARY.get(self.now.text, (0,))[0]) >= least and (sign := self.took(*BINARY)):
            # A power's right side begins with the next power, the right side of others ends before their equals.
            right = self.value(binding, depth + 1) if sign == "**" else self.value(binding + 1, depth)
            value = self.compute(BINARY[sign][1], value, right)
        return value

    def atom(self, depth: int) -> float:
        token = self.take()
        if token.kind == "number":
            return float(token.text)
        if token.kind == "name" and self.now == Token("sign", "("):
            return self.call(token.text, depth)
        if token.kind in ("name", "braced"):
            if token.text not in self.names:
                known = ", ".join(sorted(self.names)) or "nothing"
                raise ExpressionError(f"there is no '{token.text}'; known: {known}")
            return float(self.names[token.text])
        if token == Token("sign", "("):
            value = self.value(depth=depth + 1)
            self.close()
            return value
        raise ExpressionError(
            f"unexpected {token.text!r}" if token.kind != "end" else "the expression breaks off"
        )

    def call(self, name: str, depth: int) -> float:
        if name not in FUNCTIONS:
            raise ExpressionError(f"there is no function '{name}'; known: {', '.join(FUNCTIONS)}")
        self.take()
        arguments = [self.value(depth=depth + 1)]
        while self.took(","):
            arguments.append(self.value(depth=depth + 1))
        self.close()
        function, counts = FUNCTIONS[name]
        if len(arguments) not in counts:
            raise ExpressionError(f"{name} takes {counts[0]} to {counts[-1]} values, not {len(arguments)}")
        return self.compute(function, *arguments)

    def close(self) -> None:
        if not self.took(")"):
            raise ExpressionError(f"')' is missing before '{self.now.text}'")

    def compute(self, function: Callable[..., float], *arguments: float) -> float:
        return 1.0 if self.dry else function(*arguments)

"""What a sweep tries: `NAME=1,2,3` or `NAME=log:1e-4..1e-1` as text, and the draws of each trial.

A draw is a function of the sweep's seed, the number of the trial and the name alone, so that a sweep which goes on, is
made longer or tries one more thing gives every other value again. It knows no option of any family.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

from hotloop.errors import OptionError
from hotloop.options import Kind, Params, freeze
from hotloop.options.document import parse_document

NAME = re.compile(r"(?:--)?([A-Za-z][\w-]*(?:\.\w+)?)\s*=(.*)", re.DOTALL)
SCALE = re.compile(r"(log|int)\s*:(.*)", re.DOTALL)
NUMBERS = (int, float, Fraction)


@dataclass(frozen=True)
class Choices:
    values: tuple[Any, ...]

    def pick(self, share: float) -> Any:
        return self.values[int(share * len(self.values))]

    def describe(self) -> str:
        return ", ".join(map(str, self.values))


@dataclass(frozen=True)
class Range:
    """Both ends included; `log`: each factor is as likely as any other."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def pick(self, share: float) -> float | int:
        """The number that lies so far along the range, `share` from 0 to below 1."""
        high = self.high + 1 if self.whole else self.high  # each whole number has a piece of the same length
        if self.log:
            found = math.exp(math.log(self.low) + share * (math.log(high) - math.log(self.low)))
        else:
            found = self.low + share * (high - self.low)
        found = min(max(found, self.low), self.high)  # rounding may lead beyond an end
        return math.floor(found) if self.whole else found

    def describe(self) -> str:
        kinds = [word for word, holds in (("log", self.log), ("whole numbers", self.whole)) if holds]
        return f"{self.low:g}..{self.high:g}" + (f" ({', '.join(kinds)})" if kinds else "")


Domain = Choices | Range
Space = Mapping[str, Domain]


def split_over(words: Sequence[str]) -> dict[str, str]:
    """The text for each name of `--over`, whose words the command line has cut at every comma; an OptionError else."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if match := NAME.fullmatch(word):
            name = match[1].replace("-", "_")
            if name in found:
                raise OptionError(f"--over {name}: is there twice; keep one")
            found[name] = match[2].strip()
        elif name:
            found[name] += f",{word}"
        else:
            raise OptionError(f"--over {word}: write NAME=1,2,3 or NAME=log:1e-4..1e-1")
    return found


def parse_domain(text: str, kind: Kind | None) -> Domain:
    """What a text such as `log:1e-4..1e-1` means for an option of this kind (None: of any); ValueError = reason."""
    ranged = kind is None or (kind.element in NUMBERS and not kind.many and not kind.choices)
    scale = SCALE.fullmatch(text) if ranged else None
    body = (scale[2] if scale else text).strip()
    ends = [_number(end) for end in body.split("..", 1)] if ".." in body else []
    if scale and not ends:
        raise ValueError(f"{scale[1]}: goes with a range, such as {scale[1]}:1..10")
    if ends and ranged:
        low, high = ends
        if low is None or high is None:
            raise ValueError("must be two numbers with two dots between them, such as 0.1..0.9")
        is_whole = kind.element is int if kind else scale is not None and scale[1] == "int"
        return _range(low, high, log=scale is not None and scale[1] == "log", whole=is_whole)
    if ends and None not in ends:
        raise ValueError("takes a list of values, not a range")
    values = tuple(parse_document(f"[{body}]", "the list"))
    if not values:
        raise ValueError("names no value")
    # An option reads its own text: only it knows that 16.10 is no number. What is inside a mapping is read here.
    is_text = kind is not None and kind.element is not Params
    return Choices(values if is_text else tuple(map(freeze, values)))


def _range(low: float, high: float, *, log: bool, whole: bool) -> Range:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("both ends must be finite")
    if low >= high:
        raise ValueError("is an empty range: the first end must be below the second")
    if log and low <= 0:
        raise ValueError("log: both ends must be above 0")
    if whole and not (low.is_integer() and high.is_integer()):
        raise ValueError("both ends must be whole numbers")
    return Range(int(low), int(high), log, True) if whole else Range(low, high, log)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def count_combinations(space: Space) -> int | None:
    """How many trials there can be; None where a range is among them."""
    lists = [domain for domain in space.values() if isinstance(domain, Choices)]
    return math.prod(len(each.values) for each in lists) if len(lists) == len(space) else None


def grid_values(space: Space, number: int) -> dict[str, Any]:
    """The values of a trial, from 1, where every combination of lists has its turn; the last name varies fastest."""
    lists = [domain.values for domain in space.values() if isinstance(domain, Choices)]
    return dict(zip(space, list(product(*lists))[number - 1], strict=True))


def draw_values(space: Space, seed: int, number: int) -> dict[str, Any]:
    """The values of a trial, each drawn by itself."""
    # A text seeds by its digest, the same on every machine; `random()` is the one draw that Python keeps as it is.
    return {name: domain.pick(Random(f"{seed}/{number}/{name}").random()) for name, domain in space.items()}

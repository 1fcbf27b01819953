"""Checks of single values: each takes a value and answers None, or the reason why it cannot work.

They are given to `option(check=...)`, which puts the option's name and value before the reason. A check of a
list option sees each element; None (an option left out) is never checked.
"""

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], str | None]


def at_least(least: float) -> Check:
    """The value is `least` or more."""

    def check(value: Any) -> str | None:
        return None if value >= least else f"must be at least {least}"

    return check


def between(least: float, most: float) -> Check:
    """The value lies between the two, ends included."""

    def check(value: Any) -> str | None:
        return None if least <= value <= most else f"must be between {least} and {most}"

    return check


def positive(value: Any) -> str | None:
    """A whole number from 1, or any finite number above 0."""
    if isinstance(value, int):
        return None if value >= 1 else "must be at least 1"
    return None if value > 0 and math.isfinite(value) else "must be greater than 0 and finite"


def non_negative(value: Any) -> str | None:
    """Zero or more, and finite."""
    return None if value >= 0 and math.isfinite(value) else "must be at least 0 and finite"


def finite(value: Any) -> str | None:
    """Neither infinite nor not-a-number."""
    return None if math.isfinite(value) else "must be a finite number"


def folder_name(value: Any) -> str | None:
    """The name of one folder in another: nothing that could lead elsewhere."""
    if not value.strip() or value in (".", "..") or any(sign in value for sign in "/\\"):
        return "must be the name of one folder, without / (another place is --results-dir)"
    return None if len(value.encode(errors="replace")) <= 200 else "must have at most 200 bytes"

"""Typed reading of one mapping in a benchmark file: texts, numbers, flags and lists, with the line of what is wrong.

A value that does not fit is reported and replaced by the default, so that reading goes on to the next problem.
"""

from collections.abc import Iterable
from typing import TypeVar

from hotloop.bench.spec_yaml import Items, Pair, Pairs, Report, Text, Value
from hotloop.options import did_you_mean

FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
T = TypeVar("T")


class Fields:
    """The keys of one mapping; `place` is how the file's author would call it, such as `data.loss`."""

    def __init__(self, pairs: Pairs, place: str, report: Report):
        self.pairs, self.place, self.report = pairs.pairs, place, report

    def __contains__(self, key: str) -> bool:
        pair = self.pairs.get(key)
        return pair is not None and not (isinstance(pair.value, Text) and pair.value.is_null)

    def line(self, key: str) -> int:
        """The line that a key stands in."""
        return self.pairs[key].line

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Report each key that means nothing here, with the nearest that does."""
        names, where = list(known), f" in {self.place}" if self.place else ""
        for key, pair in self.pairs.items():
            if key not in names:
                self.report(pair.line, f"unknown key '{key}'{where}{did_you_mean(key, names)}")

    def text(self, key: str, default: T) -> str | T:
        """A scalar as it was written."""
        if key not in self:
            return default
        value = self.pairs[key].value
        return value.text if isinstance(value, Text) else self.wrong(key, "must be a text", default)

    def flag(self, key: str, default: T) -> bool | T:
        """true or false."""
        word = self.text(key, "").lower()
        if not word or word in FLAGS:
            return FLAGS[word] if word else default
        return self.wrong(key, f"must be true or false, not '{word}'", default)

    def whole(self, key: str, default: T, least: int) -> int | T:
        """A whole number."""
        text = self.text(key, "")
        if not text:
            return default
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least:
            return int(text)
        return self.wrong(key, f"must be a whole number from {least}, not '{text}'", default)

    def seconds(self, key: str, default: T) -> float | T:
        """A number above 0."""
        text = self.text(key, "")
        try:
            if not text or 0 < float(text) < float("inf"):
                return float(text) if text else default
        except ValueError:
            pass
        return self.wrong(key, f"must be a number of seconds above 0, not '{text}'", default)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of scalars; a single one is a list of one."""
        if key not in self:
            return ()
        value = self.pairs[key].value
        items = value.items if isinstance(value, Items) else (value,)
        if all(isinstance(item, Text) for item in items):
            return tuple(item.text for item in items if isinstance(item, Text))
        return self.wrong(key, "must be a list of texts", ())

    def value(self, key: str) -> Value | None:
        """Whatever the key has."""
        return self.pairs[key].value if key in self else None

    def parts(self, key: str) -> dict[str, "Fields"]:
        """The mappings in a mapping: `data` and `derived`; an empty place is an empty mapping."""
        parts = {}
        for name, pair in self.mapping(key).items():
            value = pair.value
            if isinstance(value, Text) and value.is_null:
                value = Pairs({}, value.line)
            if isinstance(value, Pairs):
                parts[name] = Fields(value, f"{key}.{name}", self.report)
            else:
                self.report(pair.line, f"{key}.{name} must be a mapping")
        return parts

    def mapping(self, key: str) -> dict[str, Pair]:
        """The pairs of a mapping."""
        value = self.value(key)
        if value is None or isinstance(value, Pairs):
            return dict(value.pairs) if value else {}
        return self.wrong(key, "must be a mapping", {})

    def wrong(self, key: str, why: str, default: T) -> T:
        """Report the key and go on with the default."""
        self.report(self.line(key), f"{self.place + '.' if self.place else ''}{key} {why}")
        return default

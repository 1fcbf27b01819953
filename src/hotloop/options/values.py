"""From an annotation to its values: what `int`, `Fraction`, `tuple[int, ...]`, `T | None`, `Params` ... accept; and
`to_jsonable`, the way back.

A value may be text (a command line, a file) or already of its type (a preset, Python). A value that does not
fit is a ValueError with the reason alone; whoever asked knows the option's name.
"""

import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from hotloop.errors import OptionError, did_you_mean
from hotloop.options.files import expand_path

TRUE = frozenset({"true", "t", "1", "yes", "y", "on"})
FALSE = frozenset({"false", "f", "0", "no", "n", "off"})
HUGE_EXPONENT = re.compile(r"[eE][-+]?[\d_]{4}")  # 1e99999 as an exact fraction would fill the memory
LARGEST = 2**63 - 1
MOST_DIGITS = 1000  # Python's own limit is 4,300, and a setting of its environment
INTEGER = re.compile(r"[-+]?[0-9]+")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
WORDS = {
    "": None,
    "~": None,
    "null": None,
    "none": None,
    "true": True,
    "false": False,
    ".inf": float("inf"),
    "-.inf": float("-inf"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    ".nan": float("nan"),
    "nan": float("nan"),
}


class Unquoted(str):
    """A scalar that was written without quotes: its type is still open."""

    __slots__ = ()


def infer_value(text: Unquoted) -> Any:
    """The value of an unquoted scalar where no option says what it is: None, bool, int, float or text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        if len(text) > MOST_DIGITS:
            raise ValueError(f"a number of {len(text):,} digits is too large")
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else str(text)


class Params(Mapping[str, Any]):
    """A frozen dict: mappings inside it become Params and lists tuples, so that it hashes."""

    __slots__ = ("_items",)

    def __init__(self, *mapping: Mapping[str, Any], **more: Any):
        self._items: dict[str, Any] = {
            str(key): freeze(value) for key, value in dict(*mapping, **more).items()
        }

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Params({self._items!r})"


def freeze(value: Any) -> Any:
    if isinstance(value, Unquoted):
        return infer_value(value)
    if isinstance(value, Mapping):
        return value if isinstance(value, Params) else Params(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def to_jsonable(value: Any, odd: Callable[[float], Any] = lambda _: None) -> Any:
    """The value as strict JSON: arrays become lists, fractions text, NaN and infinity `odd` of it (null)."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else odd(value)
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item, odd) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item, odd) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name), odd) for field in fields(value)}
    if hasattr(value, "tolist"):  # numpy's and jax's arrays and scalars, without importing either
        return to_jsonable(value.tolist(), odd)
    if isinstance(value, Fraction | Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


@dataclass(frozen=True)
class Kind:
    """What a field holds: one `element` or `many` of them, `optional` if it may be None."""

    element: type
    many: bool = False
    optional: bool = False
    choices: tuple[Any, ...] = ()


def kind_of(annotation: Any) -> Kind:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        rest = [argument for argument in arguments if argument is not type(None)]
        if len(rest) == 1 and len(arguments) == 2:
            inner = kind_of(rest[0])
            return Kind(inner.element, inner.many, True, inner.choices)
    elif origin is Literal:
        return Kind(type(arguments[0]), choices=arguments)
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = kind_of(arguments[0])
        return Kind(inner.element, True, choices=inner.choices)
    elif annotation in READERS:
        return Kind(annotation)
    raise TypeError(f"an option cannot be a {annotation}")


def read_value(kind: Kind, value: Any) -> Any:
    """The value as the field's type, or a ValueError that says why it is none."""
    if is_none(kind, value):
        return None
    if value is None:
        raise ValueError("a value is needed")
    if kind.many:
        if isinstance(value, str):
            value = split_list(value)
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_read_one(kind, item) for item in items)
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError("takes one value")
        value = value[0]
    return _read_one(kind, value)


def is_none(kind: Kind, value: Any) -> bool:
    """Whether the value means None, and the field may hold that."""
    return kind.optional and (value is None or str(value).lower() in ("none", "null", "~"))


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_one(kind: Kind, value: Any) -> Any:
    result = READERS[kind.element](value)
    if not kind.choices or result in kind.choices:
        return result
    same = [choice for choice in kind.choices if str(choice).lower() == str(result).lower()]
    if len(same) == 1:
        return same[0]
    allowed = [str(choice) for choice in kind.choices]
    hint = did_you_mean(str(result), allowed)
    raise ValueError(f"must be one of {', '.join(allowed)}{'' if hint.startswith('; known') else hint}")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in TRUE | FALSE:
        raise ValueError("must be true or false (also yes/no, on/off, 1/0)")
    return word in TRUE


def _integer(value: Any) -> int:
    reason = "must be a whole number"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(reason)
    try:
        number = int(value)
    except ValueError:
        raise ValueError(reason) from None
    if abs(number) > LARGEST:
        raise ValueError(f"is too large: whole numbers go up to {LARGEST}")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a number") from None
    except OverflowError:
        raise ValueError("is too large") from None


def _fraction(value: Any) -> Fraction:
    reason = "must be a number or a fraction such as 1/2"
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction | str):
        raise ValueError(reason)
    try:
        # A float is read as it is written: 0.1 means 1/10, not the nearest binary fraction.
        numerator, *denominator = str(value).split("/")
        if len(denominator) > 1 or HUGE_EXPONENT.search(str(value)):
            raise ValueError(reason)
        number = Fraction(numerator.strip()) / Fraction(denominator[0].strip() if denominator else 1)
        float(number)
    except ZeroDivisionError:
        raise ValueError("divides by zero") from None
    except OverflowError:
        raise ValueError("is too large") from None
    except ValueError:
        raise ValueError(reason) from None
    return number


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Path):
        raise ValueError("must be text")
    if "\0" in str(value):
        raise ValueError("has a zero character")
    return str(value)


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("must be a path")
    return expand_path(value)


def _params(value: Any) -> Params:
    reason = """must be a mapping such as '{"momentum": 0.9}'"""
    if isinstance(value, str):
        try:
            from hotloop.options.document import parse_document  # which few command lines need

            value = parse_document(value, "text")
        except OptionError as error:
            raise ValueError(f"{reason} ({error})") from None
    if not isinstance(value, Mapping):
        raise ValueError(reason)
    return Params(value)


READERS: dict[type, Callable[[Any], Any]] = {
    bool: _boolean,
    int: _integer,
    float: _number,
    Fraction: _fraction,
    str: _text,
    Path: _path,
    Params: _params,
}

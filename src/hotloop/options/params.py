"""Params: a frozen, hashable mapping that can be a field of a config; and `to_jsonable`, the way back.

Neither knows where values come from.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from hotloop.options.document import Unquoted, infer_value


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

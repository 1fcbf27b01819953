"""Options: the fields of frozen config dataclasses, declared once, read from text, files and Python alike.

A config says `batch_size: int = option(32, "Samples per update.", check=positive)` and nothing else; `options_of` reads
the declarations back, and `Option.accept` takes a value, text or already of its type, from anywhere. One that does not
fit is an OptionError of one line: option, value, reason. No command is known here, neither jax nor numpy imported.
"""

import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hotloop.errors import OptionError, did_you_mean

Check = Callable[[Any], str | None]
"""Takes a value (each element of a list), None never; answers None, or the reason why it cannot work."""
Config = TypeVar("Config")
METADATA_KEY = "hotloop"
LONGEST_SHOWN = 200  # characters of a value in a message
TRUE = frozenset({"true", "t", "1", "yes", "y", "on"})
FALSE = frozenset({"false", "f", "0", "no", "n", "off"})
HUGE_EXPONENT = re.compile(r"[eE][-+]?[\d_]{4}")  # 1e99999 as an exact fraction would fill the memory
LARGEST = 2**63 - 1
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, on every file system that people have
MOST_DIGITS = 1000  # Python's own limit is 4,300, and a setting of its environment
INTEGER = re.compile(r"[-+]?[0-9]+")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
WORDS = {
    **dict.fromkeys(("", "~", "null", "none")),
    "true": True,
    "false": False,
    ".nan": math.nan,
    "nan": math.nan,
    **dict.fromkeys((".inf", "infinity"), math.inf),
    **dict.fromkeys(("-.inf", "-infinity"), -math.inf),
}


class Unquoted(str):
    """A scalar that was written without quotes: its type is still open."""

    __slots__ = ()


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
    """The hashable form of a value; unquoted text, for which no option has a type, becomes what it looks like."""
    if isinstance(value, Unquoted):
        if value.lower() in WORDS:
            return WORDS[value.lower()]
        if INTEGER.fullmatch(value) and len(value) > MOST_DIGITS:
            raise ValueError(f"a number of {len(value):,} digits is too large")
        whole = INTEGER.fullmatch(value)
        return int(value) if whole else float(value) if NUMBER.fullmatch(value) else str(value)
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

    def is_none(self, value: Any) -> bool:
        return self.optional and (value is None or str(value).lower() in ("none", "null", "~"))


def kind_of(annotation: Any) -> Kind:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        rest = [argument for argument in arguments if argument is not type(None)]
        if len(rest) == 1 and len(arguments) == 2:
            return replace(kind_of(rest[0]), optional=True)
    elif origin is Literal:
        return Kind(type(arguments[0]), choices=arguments)
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return replace(kind_of(arguments[0]), many=True)
    elif annotation in READABLE:
        return Kind(annotation)
    raise TypeError(f"an option cannot be a {annotation}")


def read_value(kind: Kind, value: Any) -> Any:
    """The value as the field's type, or a ValueError that says why it is none."""
    if kind.is_none(value):
        return None
    if value is None:
        raise ValueError("a value is needed")
    if kind.many and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    items = value if isinstance(value, list | tuple) else [value]
    if not kind.many and len(items) != 1:
        raise ValueError("takes one value")
    results = []
    for item in items:
        result = _read_one(kind.element, item)
        if kind.choices and result not in kind.choices:
            same = [choice for choice in kind.choices if str(choice).lower() == str(result).lower()]
            if len(same) != 1:
                allowed = [str(choice) for choice in kind.choices]
                hint = did_you_mean(str(result), allowed)
                known = "" if hint.startswith("; known") else hint
                raise ValueError(f"must be one of {', '.join(allowed)}{known}")
            result = same[0]
        results.append(result)
    return tuple(results) if kind.many else results[0]


def _read_one(element: type, value: Any) -> Any:
    types_read, reason = READABLE[element]
    if not isinstance(value, types_read) or (isinstance(value, bool) and element is not bool):
        raise ValueError(reason)
    text = str(value)
    if element is bool:
        if text.lower() not in TRUE | FALSE:
            raise ValueError(reason)
        return text.lower() in TRUE
    if element is str:
        if "\0" in text:
            raise ValueError("has a zero character")
        return text
    if element is Path:
        if not text:
            raise ValueError(reason)
        return expand_path(value)
    if element is Params:
        if isinstance(value, str):
            from hotloop.options.document import parse_document  # which few command lines need

            try:
                value = parse_document(value, "text")
            except OptionError as error:
                raise ValueError(f"{reason} ({error})") from None
        if not isinstance(value, Mapping):
            raise ValueError(reason)
        return Params(value)
    try:
        if element is Fraction:
            # A float is read as it is written: 0.1 means 1/10, not the nearest binary fraction.
            numerator, slash, denominator = text.partition("/")
            if "/" in denominator or HUGE_EXPONENT.search(text):
                raise ValueError
            number = Fraction(numerator.strip()) / Fraction(denominator.strip() if slash else 1)
            float(number)
        else:
            number = element(value)
    except ZeroDivisionError:
        raise ValueError("divides by zero") from None
    except OverflowError:
        raise ValueError("is too large") from None
    except ValueError:
        raise ValueError(reason) from None
    if element is int and abs(number) > LARGEST:
        raise ValueError(f"is too large: whole numbers go up to {LARGEST}")
    return number


READABLE: dict[type, tuple[Any, str]] = {
    bool: (object, "must be true or false (also yes/no, on/off, 1/0)"),
    int: (int | str, "must be a whole number"),
    float: (int | float | str, "must be a number"),
    Fraction: (int | float | Fraction | str, "must be a number or a fraction such as 1/2"),
    str: (str | int | float | Path, "must be text"),
    Path: (str | Path, "must be a path"),
    Params: (str | Mapping, """must be a mapping such as '{"momentum": 0.9}'"""),
}
"""Of each type of an option: what it is read from, and the reason why anything else is refused."""


def expand_path(path: str | Path) -> Path:
    """The path with `~` and `~user` written out; a ValueError where no file can be called so.

    Such a path would fail wherever it is used first, far from the option that named it.
    """
    if "\0" in str(path):
        raise ValueError("has a zero character, which no file name can have")
    try:
        found = Path(path).expanduser()
        encoded = os.fsencode(found)
    except RuntimeError:
        raise ValueError("there is no such user; write the folder out") from None
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which no file name can have") from None
    if len(encoded) > LONGEST_PATH or any(len(name) > LONGEST_NAME for name in encoded.split(b"/")):
        raise ValueError(f"is too long: names have at most {LONGEST_NAME} bytes, paths {LONGEST_PATH}")
    return found


def at_least(least: float) -> Check:
    return lambda value: None if value >= least else f"must be at least {least}"


def between(least: float, most: float) -> Check:
    return lambda value: None if least <= value <= most else f"must be between {least} and {most}"


def positive(value: Any) -> str | None:
    """A whole number from 1, or any finite number above 0."""
    if isinstance(value, int):
        return None if value >= 1 else "must be at least 1"
    return None if value > 0 and math.isfinite(value) else "must be greater than 0 and finite"


def non_negative(value: Any) -> str | None:
    return None if value >= 0 and math.isfinite(value) else "must be at least 0 and finite"


def finite(value: Any) -> str | None:
    return None if math.isfinite(value) else "must be a finite number"


def folder_name(value: Any) -> str | None:
    """The name of one folder in another: nothing that could lead elsewhere."""
    if not value.strip() or value in (".", "..") or any(sign in value for sign in "/\\"):
        return "must be the name of one folder, without / (another place is --results-dir)"
    return None if len(value.encode(errors="replace")) <= 200 else "must have at most 200 bytes"


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    aliases: tuple[str, ...] = (),
    metavar: str | None = None,
    group: str | None = None,
    parse: Callable[[str], Any] | None = None,
    check: Check | None = None,
    hidden: bool = False,
    positional: bool = False,
    repeatable: bool = False,
) -> Any:
    """A field that is also `--its-name`. `parse` reads text in a way of its own (ValueError = reason).

    A `repeatable` one of many values takes those of every time it is there, not of the last alone.
    """
    texts = {"help": help, "choices": choices, "aliases": aliases, "metavar": metavar, "group": group}
    rules = {"parse": parse, "check": check, "hidden": hidden, "positional": positional}
    return field(default=default, metadata={METADATA_KEY: texts | rules | {"repeatable": repeatable}})


def argument(help: str, *, default: Any = MISSING, **rules: Any) -> Any:
    """A field given by its place: needed where it has no default; a `tuple[T, ...]` takes the rest.

    The rules are `choices`, `metavar`, `parse` and `check` of `option`.
    """
    return option(default, help, positional=True, **rules)


def table_option(name: str, annotation: Any, default: Any, help: str, **rules: Any) -> "Option":
    """An option of an `option_table`, which is no field of its own."""
    return Option(name, kind_of(annotation), default, help, **rules)


def option_table(*options: "Option") -> Any:
    """One field for the values of many options, by name: those at their defaults are left out, none are compared."""
    return field(default=Params(), compare=False, metadata={METADATA_KEY: {"table": options}})


@dataclass(frozen=True)
class Option:
    """One declared field: its name, type and texts, as command line, help and files need them."""

    name: str
    kind: Kind
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    group: str | None = None
    parse: Callable[[str], Any] | None = None
    check: Check | None = None
    hidden: bool = False
    positional: bool = False
    repeatable: bool = False

    @property
    def spelling(self) -> str:
        """How people write it: `--batch-size`, or NAME for a positional."""
        return (self.metavar or self.name.upper()) if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def accept(self, value: Any, origin: str = "") -> Any:
        """The value as the field holds it, or an OptionError in one line that begins with `origin`."""
        try:
            own = self.parse is not None and isinstance(value, str) and not self.kind.is_none(value)
            result = self.parse(value) if self.parse and own else read_value(self.kind, value)
            for item in result if self.kind.many and result is not None else (result,):
                if self.check and item is not None and (reason := self.check(item)):
                    raise ValueError(reason)
        except ValueError as error:
            raise OptionError(f"{origin}{self.spelling} {show_value(value)}: {error}") from error
        return result


def show_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        text = " ".join(map(show_value, value))
    else:
        text = str(to_jsonable(value) if isinstance(value, Mapping) else value) or "''"
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def options_of(config: type[Any]) -> tuple[Option, ...]:
    """The declared options of a config dataclass, in order; fields without a declaration are not options."""
    hints = get_type_hints(config)
    found: list[Option] = []
    for each in fields(config):
        said = dict(each.metadata.get(METADATA_KEY, {}))
        if "table" in said:
            found += said["table"]
        elif said:
            kind = kind_of(hints[each.name])
            kind = replace(kind, choices=said.pop("choices") or kind.choices)
            found.append(Option(each.name, kind, each.default, **said))
    return tuple(found)


def _tables(config: type[Any]) -> list[tuple[str, tuple[Option, ...]]]:
    declared = ((each.name, each.metadata.get(METADATA_KEY, {})) for each in fields(config))
    return [(name, said["table"]) for name, said in declared if "table" in said]


def build(config: type[Config], values: Mapping[str, Any]) -> Config:
    """The config with these values (text or typed); every other field has its default."""
    return construct(config, _accept_all(options_of(config), values))


def _accept_all(options: tuple[Option, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {each.name: each for each in options}
    if unknown := [name for name in values if name not in known]:
        raise OptionError(f"{show_value(unknown[0])}: no such option{did_you_mean(unknown[0], known)}")
    return {name: known[name].accept(value) for name, value in values.items()}


def construct(config: type[Config], accepted: Mapping[str, Any]) -> Config:
    """The config with these values, each accepted before; OptionError where a needed one is missing."""
    for each in options_of(config):
        if each.required and each.name not in accepted:
            raise OptionError(f"{each.spelling} is needed: {each.help}")
    values = dict(accepted)
    for name, table in _tables(config):
        values[name] = Params({each.name: values.pop(each.name) for each in table if each.name in values})
    return config(**values)


class Options:
    """The base of config dataclasses that programs make too: each takes its values in as the command line would.

    A path may be text there, a list may stand for a tuple and a dict for Params.
    """

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            if hasattr(self, each.name):
                object.__setattr__(self, each.name, each.accept(getattr(self, each.name)))
        for name, table in _tables(type(self)):
            defaults = {each.name: each.default for each in table}
            accepted = _accept_all(table, getattr(self, name)).items()
            kept = {key: value for key, value in accepted if value != defaults[key]}
            object.__setattr__(self, name, Params(kept))
        self.check()

    def check(self) -> None:
        """Refuse, by an OptionError, values that do not go together; each is of its type by now."""


def values_of(config: Any) -> dict[str, Any]:
    tabled = {key: value for name, _ in _tables(type(config)) for key, value in getattr(config, name).items()}
    return {
        each.name: tabled.get(each.name, getattr(config, each.name, each.default))
        for each in options_of(type(config))
    }

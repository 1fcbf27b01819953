"""`option` and `argument` declare fields of a config dataclass; `options_of` reads the declarations back.

Values from anywhere (command line, file, preset, Python) go through `Option.accept`: the same types, choices
and checks, the same one-line message. It knows nothing of how a command line is cut into words.

A check takes a value and answers None, or the reason why it cannot work; the option's name and value are put before
it. A check of a list option sees each element; None (an option left out) is never checked.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar, get_type_hints

from hotloop.errors import OptionError, did_you_mean
from hotloop.options.values import Kind, Params, is_none, kind_of, read_value, to_jsonable

Check = Callable[[Any], str | None]
Config = TypeVar("Config")
METADATA_KEY = "hotloop"
LONGEST_SHOWN = 200  # characters of a value in a message


def at_least(least: float) -> Check:
    def check(value: Any) -> str | None:
        return None if value >= least else f"must be at least {least}"

    return check


def between(least: float, most: float) -> Check:
    def check(value: Any) -> str | None:
        return None if least <= value <= most else f"must be between {least} and {most}"

    return check


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
    choices: tuple[Any, ...] | None = None,
    aliases: tuple[str, ...] = (),
    metavar: str | None = None,
    group: str | None = None,
    parse: Callable[[str], Any] | None = None,
    check: Check | None = None,
    hidden: bool = False,
    positional: bool = False,
) -> Any:
    """A field that is also `--its-name`. `parse` reads text in a way of its own (ValueError = reason)."""
    texts = {"help": help, "aliases": aliases, "metavar": metavar, "group": group}
    rules = {"choices": choices or (), "parse": parse, "check": check}
    kinds = {"hidden": hidden, "positional": positional}
    return field(default=default, metadata={METADATA_KEY: texts | rules | kinds})


def argument(help: str, *, default: Any = MISSING, **rules: Any) -> Any:
    """A field given by its place: needed where it has no default; a `tuple[T, ...]` takes the rest.

    The rules are `choices`, `metavar`, `parse` and `check` of `option`.
    """
    return option(default, help, positional=True, **rules)


def table_option(
    name: str,
    annotation: Any,
    default: Any,
    help: str,
    *,
    group: str | None = None,
    check: Check | None = None,
) -> "Option":
    """An option of an `option_table`, which is no field of its own."""
    return Option(name, kind_of(annotation), default, help, group=group, check=check)


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
            own = self.parse is not None and isinstance(value, str) and not is_none(self.kind, value)
            result = self.parse(value) if self.parse and own else read_value(self.kind, value)
            for item in result if self.kind.many and result is not None else (result,):
                if self.check and item is not None and (reason := self.check(item)):
                    raise ValueError(reason)
        except ValueError as error:
            raise OptionError(f"{origin}{self.spelling} {show_value(value)}: {error}") from error
        return result


def show_value(value: Any) -> str:
    """A value as it would be typed, on one line."""
    if isinstance(value, list | tuple):
        text = " ".join(map(show_value, value))
    else:
        text = str(to_jsonable(value) if isinstance(value, Mapping) else value) or "''"
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def options_of(config: type[Any]) -> tuple[Option, ...]:
    """The declared options of a config dataclass, in order; fields without a declaration are not options."""
    hints = get_type_hints(config)
    found = []
    for each in fields(config):
        if METADATA_KEY not in each.metadata:
            continue
        said = dict(each.metadata[METADATA_KEY])
        if "table" in said:
            found += said["table"]
            continue
        kind = kind_of(hints[each.name])
        kind = replace(kind, choices=tuple(said.pop("choices") or kind.choices))
        found.append(Option(name=each.name, kind=kind, default=each.default, **said))
    return tuple(found)


def build(config: type[Config], values: Mapping[str, Any]) -> Config:
    """The config with these values (text or typed); every other field has its default."""
    return construct(config, _accept_all(options_of(config), values))


def construct(config: type[Config], accepted: Mapping[str, Any]) -> Config:
    """The config with these values, each accepted before; OptionError where a needed one is missing."""
    for each in options_of(config):
        if each.required and each.name not in accepted:
            raise OptionError(f"{each.spelling} is needed: {each.help}")
    values = dict(accepted)
    for name, table in _tables(config):
        values[name] = Params({each.name: values.pop(each.name) for each in table if each.name in values})
    return config(**values)


def validate(config: Any) -> None:
    """Take in a config made in Python as the command line would, checks and types; for use in `__post_init__`.

    A path may be text there, a list may stand for a tuple and a dict for Params.
    """
    for each in options_of(type(config)):
        if hasattr(config, each.name):
            object.__setattr__(config, each.name, each.accept(getattr(config, each.name)))
    for name, table in _tables(type(config)):
        defaults = {each.name: each.default for each in table}
        accepted = _accept_all(table, getattr(config, name)).items()
        kept = {key: value for key, value in accepted if value != defaults[key]}
        object.__setattr__(config, name, Params(kept))


def values_of(config: Any) -> dict[str, Any]:
    """Every option's value by its name, those of tables included."""
    tabled = {key: value for name, _ in _tables(type(config)) for key, value in getattr(config, name).items()}
    return {
        each.name: tabled.get(each.name, getattr(config, each.name, each.default))
        for each in options_of(type(config))
    }


def _tables(config: type[Any]) -> list[tuple[str, tuple[Option, ...]]]:
    """Name and options of each field that is a table."""
    declared = ((each.name, each.metadata.get(METADATA_KEY, {})) for each in fields(config))
    return [(name, said["table"]) for name, said in declared if "table" in said]


def _accept_all(options: tuple[Option, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {each.name: each for each in options}
    if foreign := [name for name in values if name not in known]:
        raise OptionError(f"{show_value(foreign[0])}: no such option{did_you_mean(foreign[0], known)}")
    return {name: known[name].accept(value) for name, value in values.items()}

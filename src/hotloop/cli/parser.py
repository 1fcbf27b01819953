"""From the words of a command line to a config: command line, then preset or file, then default.

Prefixes, aliases, `--opt=value`, `--flag False`, `--no-flag`, several values after one option, negative numbers: old
programs' lines were typed so, and argparse has no public way to take all of these together (a boolean with a value
swallows the next positional, `-1e-5` is taken for an option). So the words are cut here; argparse lays out the help.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.cli.command import Command, Common, print_json, spell_options
from hotloop.errors import CheckpointError, HotloopError, OptionError, did_you_mean, join_with_or
from hotloop.options import (
    FALSE,
    TRUE,
    Option,
    construct,
    expand_path,
    options_of,
    show_value,
    to_jsonable,
    values_of,
)
from hotloop.options.document import LONGEST, Key, parse_document

SETTABLE = ("device", "only_accelerator")  # the common options that a preset or file may hold
Spellings = dict[str, tuple[Option, bool]]
"""Every way to write an option; True where it turns a flag off."""


def spellings_of(options: Iterable[Option]) -> Spellings:
    known: Spellings = {}
    for option in options:
        for word in (f"--{option.name.replace('_', '-')}", *option.aliases):
            if word in known:
                raise TypeError(f"two options are called {word}")
            known[word] = option, False
    for word, (option, _) in list(known.items()):
        if option.kind.element is bool and word.startswith("--"):
            known.setdefault(f"--no-{word[2:]}", (option, True))
    return known


def find_option(typed: str, known: Spellings) -> tuple[Option, bool]:
    """What a word such as `--batch_s` means, or an OptionError that names the nearest ones."""
    word = typed.replace("_", "-")
    if word in known:
        return known[word]
    offered = {name: each for name, each in known.items() if not each[1] or word.startswith("--no-")}
    starts = [name for name in offered if word.startswith("--") and name.startswith(word)]
    if len({offered[name] for name in starts}) == 1:
        return offered[starts[0]]
    if starts:
        raise OptionError(f"{typed} could be {join_with_or(starts)}; write more of it")
    visible = [name for name, (option, _) in offered.items() if not option.hidden]
    raise OptionError(f"unknown option {typed}{did_you_mean(word, visible)}")


def is_option(word: str) -> bool:
    """Whether a word opens an option: a hyphen that is not a negative number's."""
    if word.startswith("--"):
        return True
    return word.startswith("-") and word[1:2].isalpha() and word[1:].lower() not in ("inf", "infinity", "nan")


def count_own_words(words: Sequence[str], options: Sequence[Option]) -> int:
    """How many words are options of a command before another command begins, which they are to be kept apart from."""
    known = spellings_of(option for option in options if not option.positional)
    first = 0
    while first < len(words) and words[first].startswith("-") and words[first] != "--":
        spelling, equals, _ = words[first].partition("=")
        try:
            option, negated = find_option(spelling, known)
        except OptionError:  # of which the line is told when it is cut
            option, negated = None, True
        first += 1
        if option is not None and not (negated or equals) and first < len(words):
            is_flag = option.kind.element is bool
            first += words[first].lower() in TRUE | FALSE if is_flag else words[first] != "--"
    return first


def scan(argv: Sequence[str], options: Sequence[Option]) -> dict[str, Any]:
    """The texts given for each option, by field name; a list where several are taken."""
    known = spellings_of(option for option in options if not option.positional)
    positionals = [option for option in options if option.positional]
    words, rest = list(argv), []
    given: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word == "--":
            rest += words
            break
        if not is_option(word):
            rest.append(word)
            continue
        spelling, equals, text = word.partition("=")
        option, negated = find_option(spelling, known)
        if negated and equals:
            raise OptionError(f"{word}: {spelling} takes no value")
        follows = bool(words) and not is_option(words[0])
        if negated:
            given[option.name] = "false"
        elif equals and not option.repeatable:
            given[option.name] = text
        elif option.kind.many:
            taken = [text] if equals else []
            while words and not equals and not is_option(words[0]):
                taken.append(words.pop(0))
            parts = [part.strip() for each in taken for part in each.split(",") if part.strip()]
            given[option.name] = (given.get(option.name, []) if option.repeatable else []) + parts
        elif option.kind.element is bool:
            # Beside positionals, only a word that can be nothing else is the flag's value.
            is_value = follows and (not positionals or words[0].lower() in TRUE | FALSE)
            given[option.name] = words.pop(0) if is_value else "true"
        elif follows:
            given[option.name] = words.pop(0)
        else:
            raise OptionError(f"{option.spelling}: a value is needed: {option.help}")
    # Words without an option go to the positionals in order; one that takes many takes all that are left.
    for option in positionals:
        if rest and option.kind.many:
            given[option.name], rest = rest, []
        elif rest:
            given[option.name] = rest.pop(0)
    if rest:
        raise OptionError(f"unexpected argument '{rest[0]}'; options begin with --")
    return given


def find_elsewhere(command: Command, words: Sequence[str]) -> tuple[Command, str, list[str]] | None:
    """The command that runs the preset that these words name, its path, and the same in its own words; None where it is
    this command, or the preset is a part of a file."""
    other = command.elsewhere
    if other is None or not any(word.partition("=")[0] == "--config" for word in words):
        return None
    given = scan(words, command.options)
    preset = given.get("config")
    if preset not in other.command.presets or "config_path" in given:
        return None
    names = {**other.options, **{option.name: option.name for option in options_of(Common)}}
    for option in command.options:
        if option.name in given and option.name not in names:
            raise OptionError(
                f"{option.spelling}: --config {preset} has no use for it; `{other.path} --help` has what it takes"
            )
    spelled = {names[name].replace("_", "-"): text for name, text in given.items()}
    return other.command, other.path, [f"--{name}={text}" for name, text in spelled.items()]


@dataclass(frozen=True)
class Resolved:
    """The configs to run with, and for each value that a file may hold where it came from."""

    config: Any
    common: Common
    sources: Mapping[str, str]
    notices: Sequence[str] = ()
    replacements: Sequence[str] = ()
    """A line for each option of the command line that has another value than the run that is used."""
    configured: frozenset[str] = frozenset()  # the options that a preset or file has a value for


@dataclass(frozen=True)
class ConfigLayer:
    """Raw values from a preset or file: by field name, with the words that begin an error about each."""

    source: str = ""
    values: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    notices: Sequence[str] = ()


def resolve(command: Command, given: Mapping[str, Any]) -> Resolved:
    """The configs from the texts of a command line, the preset or file it names, and the defaults."""
    common_options = {option.name: option for option in options_of(Common)}
    early = {key: common_options[key].accept(given[key]) for key in ("config", "config_path") if key in given}
    name, path = early.get("config"), early.get("config_path")
    old = given.get(command.config_option)
    if old is not None and (name or path):
        word = f"--{command.config_option.replace('_', '-')}"
        raise OptionError(f"{word} {old}: names a configuration, and so does --config; keep one")
    of_run = _run_layer(command, given, is_configured=bool(name or path))
    layer = of_run or (_old_layer(command, old) if old else _layer(command, name, path))
    sources: dict[str, str] = {}
    accepted: dict[str, Any] = {}
    replacements: list[str] = []
    for option in command.options:
        source = "default"
        if option.name in layer.values:
            raw, origin = layer.values[option.name]
            accepted[option.name], source = option.accept(raw, origin), layer.source
        if option.name in given:
            value = option.accept(given[option.name])
            if of_run and accepted.get(option.name, value) != value:
                both = (value, accepted[option.name])
                new, had = (show_value("none" if each is None else to_jsonable(each)) for each in both)
                replacements.append(f"option {option.spelling}: {new} (the run had {had})")
            accepted[option.name], source = value, "command line"
        if option.name in SETTABLE or option.name not in common_options:
            sources[option.name] = source
    common = construct(Common, {key: accepted.pop(key) for key in common_options if key in accepted})
    try:
        config = construct(command.config, accepted)
    except HotloopError as error:
        error.args = (spell_options(str(error), command.option_names),)
        raise
    configured = frozenset(() if of_run else layer.values)
    return Resolved(config, common, sources, layer.notices, replacements, configured)


def _layer(command: Command, name: str | None, path: Path | None) -> ConfigLayer:
    """The preset of this name, the file, or the part of the file that has the name; nothing where neither is named."""
    if path is None:
        if name is None:
            return ConfigLayer()
        if name not in command.presets:
            known = "; give a file with --config-path"
            if command.presets:
                names = command.preset_names
                known = did_you_mean(name, names) or f"; there are {', '.join(names)}"
            raise OptionError(f"--config {name}: '{command.name}' has no such preset{known}")
        return _named(f"preset {name}", command.presets[name], command)
    document = read_file(path)
    sections = [key for key, value in document.items() if isinstance(value, Mapping)]
    if name is None:
        keys = _settable_spellings(command)
        if sections and len(sections) == len(document) and not any(_is_key(key, keys) for key in sections):
            named = f": {', '.join(sections)}" if len(sections) <= 12 else ""
            raise OptionError(f"{path} holds named configurations; choose one with --config{named}")
    elif name not in document:
        raise OptionError(f"--config {name}: {path} has no such configuration{did_you_mean(name, sections)}")
    elif name not in sections:
        raise OptionError(
            f"--config {name}: in {path} this is a value, not a configuration; leave --config out"
        )
    return _named(f"file {path}", document if name is None else document[name], command)


def _is_key(key: str, known: Spellings) -> bool:
    try:
        find_option(f"--{key}", known)
    except OptionError:
        return False
    return True


def _run_layer(command: Command, given: Mapping[str, Any], *, is_configured: bool) -> ConfigLayer | None:
    """The values of the run that the command line names, if it names one."""
    run = given.get("run", None if is_configured else given.get(command.run_option))
    if command.run_values is None or run is None:
        return None
    if is_configured:
        raise OptionError(f"RUN {run}: its options are used, and --config names others; keep one")
    known = {option.name: option for option in options_of(command.config)}
    try:
        found = command.run_values(known["run"].accept(run))
    except CheckpointError:
        if "run" in given:
            raise
        return None  # whatever else the option names, the command itself will see
    # What this command has no option for is not its business.
    values = {name: (value, f"run {run}: ") for name, value in found.items() if name in known}
    return ConfigLayer(f"run {run}", values)


def _old_layer(command: Command, name: str) -> ConfigLayer:
    """A preset by its name or by the name of its old file, or a file, perhaps of the old shape."""
    if name in command.presets:
        return _layer(command, name, None)
    option = f"--{command.config_option.replace('_', '-')}"
    try:
        path = expand_path(name)
    except ValueError as error:
        raise OptionError(f"{option} {show_value(name)}: {error}") from None
    if path.exists():
        found = read_file(path, option)
        values, notices = command.translate(found, str(path)) if command.translate else (found, ())
        return _named(f"file {path}", values, command, notices)
    preset = path.name.removesuffix(".json").removesuffix("_config")
    if preset in command.presets:
        notice = f"{name} is not there: the preset {preset} is what it held"
        return _named(f"preset {preset}", command.presets[preset], command, [notice])
    raise OptionError(f"{option} {name}: no such file or preset{did_you_mean(name, command.presets)}")


def _settable_spellings(command: Command) -> Spellings:
    common = [option for option in options_of(Common) if option.name in SETTABLE]
    return spellings_of([*options_of(command.config), *common])


def _named(
    source: str, values: Mapping[str, Any], command: Command, notices: Sequence[str] = ()
) -> ConfigLayer:
    """The values under their field names; two spellings of one option are one too many."""
    known = _settable_spellings(command)
    origin = source.removeprefix("file ")
    found: dict[str, tuple[Any, str]] = {}
    for key, value in values.items():
        here = f"{origin}, line {key.line}" if isinstance(key, Key) else origin
        try:
            option, negated = find_option(f"--{key}", known)
        except OptionError as error:
            said = str(error).replace("unknown option --", "unknown key ").replace("--", "")
            raise OptionError(f"{here}: {said}") from None
        if negated:
            raise OptionError(f"{here}: unknown key {key}; write '{option.name}: false'")
        if option.name in found:
            raise OptionError(f"{here}: '{key}' sets {option.spelling} a second time; keep one")
        found[option.name] = (value, f"{here}: ")
    return ConfigLayer(source, found, notices)


def read_file(path: Path, option: str = "--config-path") -> Mapping[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)  # more would be refused, and a device never ends
    except OSError as error:
        raise OptionError(f"{option} {path}: {(error.strerror or 'unreadable').lower()}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{option} {path}: not a text file (UTF-8)") from error
    document = parse_document(text, str(path))
    if document is not None and not isinstance(document, Mapping):
        raise OptionError(f"{path}: must hold keys and values, such as 'batch_size: 32'")
    return document or {}


def print_config(resolved: Resolved, path: str) -> None:
    """Every value and where it came from: YAML that can be used as a config file, or one JSON object."""
    every = {**values_of(resolved.common), **values_of(resolved.config)}
    values = {name: every[name] for name in resolved.sources}
    if resolved.common.json:
        print_json({"command": path, "config": values, "sources": resolved.sources})
        return
    print(f"# {path}")
    for name, source in resolved.sources.items():
        # YAML that reads back as the same: infinity too, which JSON does not have.
        value = json.dumps(
            values[name], default=lambda each: dict(each) if isinstance(each, Mapping) else str(each)
        )
        print(f"{name}: {value}  # {source}")

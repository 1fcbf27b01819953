"""A command line of an older script, as a shell would take it, turned into the hotloop command that replaces it.

Words before the script (variables, `poprun`, `python3 -u`, folders) are understood. What the new command accepts is
its own matter: an option that is unknown here goes through as it is. It starts nothing.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from hotloop.bench.compat_scripts import RUNNER, SCRIPTS, SERVING, WRAPPERS, Script
from hotloop.errors import OptionError
from hotloop.options import did_you_mean
from hotloop.options.values import FALSE

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
OPTION = re.compile(r"--?[A-Za-z]")
WITH_VALUE = ("-X", "-W")  # of the interpreter


class CompatError(OptionError):
    """A command that has no hotloop command in its place."""


@dataclass(frozen=True)
class Translation:
    """The hotloop command, its words being what iteration gives; what should be known of it; its variables."""

    command: list[str]
    notices: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    """Patterns for lines that the command prints no more -> the fields of its records."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.command)

    def __str__(self) -> str:
        set_before = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*set_before, shlex.join(self.command)])


@dataclass(frozen=True)
class Group:
    """An option as it was typed, under its name with hyphens, and the words after it."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]


def translate(argv: Sequence[str]) -> Translation:
    """The hotloop command for an older script's; a CompatError where there is none."""
    words = list(argv)
    environment = take_variables(words)
    wrapper, own = take_wrapper(words)
    script, name = take_script(words)
    notices = [f"{wrapper}: several processes are not there yet; this runs as one process"] if wrapper else []
    command, groups = script.command, list(grouped(words))
    if script is SCRIPTS["train.py"]:
        command, groups = cnn_command(groups)
        if replicas := [group for group in grouped(own) if group.name == "--num-replicas"]:
            notices[0] += f", and {' '.join(replicas[-1].words)} goes to {name}, so that its batch stays"
            groups += [replicas[-1], group_of(["--strict-devices", "False"])]
    rewritten, dropped = rewrite(script, groups)
    if dropped:
        notices.append(f"options of {name} that no longer exist are left out: {', '.join(dropped)}")
    return Translation(["hotloop", *command, *rewritten], notices, environment, script.figures)


def take_variables(words: list[str]) -> dict[str, str]:
    """Take `NAME=value` words off the front."""
    found = {}
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        found[match[1]] = match[2]
        words.pop(0)
    return found


def take_wrapper(words: list[str]) -> tuple[str, list[str]]:
    """Take a launcher of several processes and its own words off the front; an empty name where there is none."""
    wrapper = PurePath(words[0]).name if words else ""
    if wrapper not in WRAPPERS:
        return "", []
    start = next((at for at, word in enumerate(words) if is_program(word)), len(words))
    own, words[:] = words[1:start], words[start:]
    return wrapper, own


def is_program(word: str) -> bool:
    """Whether a word is python or a script."""
    name = PurePath(word).name
    return bool(PYTHON.fullmatch(name)) or name.endswith(".py")


def take_script(words: list[str]) -> tuple[Script, str]:
    """Take the interpreter and the script off the front: what replaces it, and its name."""
    if words and PYTHON.fullmatch(PurePath(words[0]).name):
        del words[: script_place(words)]
    if not words:
        raise CompatError(f"no script: give the old command, such as {example()}")
    if words[0] == "-m":
        return take_module(words)
    name = PurePath(words.pop(0)).name
    if name in SERVING:
        raise CompatError(
            f"{name}: serving is not there yet; `hotloop cnn predict` gives the classes of image files"
        )
    if name not in SCRIPTS:
        raise CompatError(f"{name}: not one of the older scripts{did_you_mean(name, [*SCRIPTS, *SERVING])}")
    return SCRIPTS[name], name


def script_place(words: Sequence[str]) -> int:
    """Where the script, or -m, stands in a Python command: after the interpreter, its options and their values."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 2 if words[at] in WITH_VALUE else 1
    return at


def take_module(words: list[str]) -> tuple[Script, str]:
    """The same for `-m examples_utils benchmark`."""
    module = " ".join(words[1:3])
    if module != "examples_utils benchmark":
        raise CompatError(f"-m {module}: of modules only `-m examples_utils benchmark` has a command here")
    del words[:3]
    return RUNNER, module


def example() -> str:
    """A command that works, for messages."""
    return "`hotloop compat python3 lstm.py --train`"


def grouped(words: Sequence[str]) -> Iterator[Group]:
    """The words option by option; those before the first option have no name."""
    current: list[str] = []
    for word in words:
        if OPTION.match(word) and current:
            yield group_of(current)
            current = []
        current.append(word)
    if current:
        yield group_of(current)


def group_of(words: Sequence[str]) -> Group:
    """One option and its values, `--name=value` included."""
    if not OPTION.match(words[0]):
        return Group("", tuple(words), tuple(words))
    name, equals, value = words[0].partition("=")
    values = (value, *words[1:]) if equals else tuple(words[1:])
    return Group(name.replace("_", "-"), values, tuple(words))


def cnn_command(groups: Sequence[Group]) -> tuple[tuple[str, ...], list[Group]]:
    """`cnn train`, or `cnn validate` where the last word on training was no and checkpoints are named.

    The old program removed the checkpoints that it had validated, unless it was told not to: those in a folder that
    was named for both. Without training and checkpoints it validated random weights; so does `cnn train` then.
    """
    asked = [group for group in groups if group.name in ("--training", "--no-training")]
    trains = not asked or not says_no(asked[-1])
    if not any(is_short_for(group.name, "--checkpoint-input-dir", "--checkpoint-i") for group in groups):
        return ("cnn", "train"), list(groups)
    if not trains:
        return ("cnn", "validate"), [group for group in groups if group not in asked]
    has_its_word = any(
        is_short_for(group.name, "--clean-dir", "--cl") or group.name == "--config-path" for group in groups
    )
    return ("cnn", "train"), [*groups, *([] if has_its_word else [group_of(["--clean-dir", "True"])])]


def is_short_for(typed: str, option: str, shortest: str) -> bool:
    """Whether what was typed is the option, or enough of it."""
    return option.startswith(typed) and typed.startswith(shortest)


def says_no(group: Group) -> bool:
    """Whether a flag is turned off."""
    return group.name.startswith("--no-") or bool(group.values and group.values[0].lower() in FALSE)


def rewrite(script: Script, groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """The words for the new command, and the options that were left out."""
    words: list[str] = []
    dropped: list[str] = []
    for group in groups:
        if group.name in script.dropped:
            dropped.append(group.name)
        elif group.name in script.rewrites:
            words += script.rewrites[group.name](group.values)
        else:
            words += group.words
    return words, list(dict.fromkeys(dropped))

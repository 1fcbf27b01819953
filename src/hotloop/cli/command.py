"""What a command is, and what it is handed: its options by a config dataclass, and a `Context` to speak with.

A command module declares one `COMMAND`; options, help, config files, presets and errors come by themselves. It must not
import jax at its top, since `--help` has to answer at once. The rooms below know no command line: their messages name
arguments (`replicas=8`), which are spelled as options here (`--replicas 8`).
"""

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from hotloop.engine.interrupt import leave_at_once
from hotloop.engine.progress import Console
from hotloop.options import Option, option, options_of, to_jsonable

if TYPE_CHECKING:
    import jax

    from hotloop.engine.plan import Plan

Result = Mapping[str, Any]
"""What a command found, which --json prints."""
_common = partial(option, group="Common options")
OTHER_NAMES = {
    "accumulation": ("gradient_accumulation_count",),
    "automatic": ("auto_loss_scaling",),
    "data_dir": ("dataset_path", "data"),
    "epochs": ("num_epochs",),
    "global_size": ("global_batch_size",),
    "l2": ("l2_regularization",),
    "micro": ("micro_batch_size",),
    "replicas": ("num_replicas",),
    "scale": ("loss_scaling",),
    "static": ("loss_scaling",),
}
"""Options that give an argument of another name its value."""
PHRASES = {
    "learning_rate: name=": "--lr-schedule ",
    "learning_rate: params:": "--lr-schedule-params:",
    "learning_rate: warmup:": "--lr-warmup-params:",
    "optimizer: name=": "--optimizer ",
    "optimizer: params:": "--optimizer-params:",
}
"""Arguments that are called alike in two functions."""
OF_LAUNCH = frozenset({"num_instances"})
"""Options of `hotloop launch` that a process of any command may speak of."""
NUMBER = re.compile(r"-?[\d,]+(\.\d+)?(e[-+]\d+)?( %)?|-|nan|-?inf")
"""What stands to the right in its column: a number, perhaps with separators or per cent, or a dash in its place."""


@dataclass(frozen=True)
class Common:
    device: Literal["auto", "cpu", "gpu", "tpu"] = _common(
        "auto", "Where to compute; auto takes an accelerator before the CPU."
    )
    only_accelerator: bool = _common(
        False, "Stop with an error where only a CPU is found.", aliases=("--only-ipu",)
    )
    native: bool = _common(
        True, "On a CPU, take kernels of hotloop-native where they are faster; --no-native: never."
    )
    config: str | None = _common(
        None, "A preset, or with --config-path a named part of that file.", metavar="NAME"
    )
    config_path: Path | None = _common(
        None, "A YAML or JSON file of option values; the command line wins over it.", metavar="FILE"
    )
    print_config: bool = _common(False, "Print every value and where it came from, then stop.")
    json: bool = _common(
        False, "Print the result as one JSON object on the last line; texts go to standard error."
    )
    debug: bool = _common(False, "Show the traceback of an error; use it when you report a defect.")


@dataclass(frozen=True)
class Context(Common, Console):
    """Handed to every command: how it was called, and how it may speak."""

    argv: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()  # names of the options that stand on the command line itself
    options: frozenset[str] = frozenset()
    """Names of all options of the command, which a warning may speak of as arguments."""
    configured: frozenset[str] = frozenset()
    """Names of the options that a preset or file has a value for, be it the default's."""

    def say(self, text: str) -> None:
        _print(text, sys.stderr if self.json else sys.stdout)

    def warn(self, text: str) -> None:
        """A line that people should not miss, on standard error."""
        _print(f"{colour('warning:', '33')} {spell_options(text, self.options)}", sys.stderr)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows under their column names; columns of numbers are aligned to the right."""
        cells = [[str(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        numeric = [bool(rows) and all(NUMBER.fullmatch(row[i]) for row in cells) for i in range(len(columns))]
        for row in (columns, *cells):
            fitted = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            ]
            self.say("  ".join(fitted).rstrip())

    def show_plan(self, plan: "Plan") -> dict[str, Any]:
        """Say what would run, with its warnings, and hand it back as JSON has it."""
        self.say(plan.describe())
        for warning in plan.warnings:
            self.warn(warning)
        return plan.as_dict()

    def hand_on(self, words: Sequence[str]) -> list[str]:
        """The words of another command with the options that stand before it but are meant for it, unless it has its
        own."""
        own = {word.partition("=")[0] for word in words}
        flags = {"--json": self.json, "--debug": self.debug, "--only-accelerator": self.only_accelerator}
        flags["--no-native"] = not self.native
        added = ["--device", self.device] if self.device != "auto" and "--device" not in own else []
        return [*words, *added, *(flag for flag, is_set in flags.items() if is_set and flag not in own)]

    def open_device(self, check: Callable[[], None] = lambda: None) -> "jax.Device":
        """The device that the options ask for, ready for work, for a command that is not `on_device`; `check` is called
        before one is opened."""
        with leave_at_once():
            from hotloop.engine.device import setup

            return setup(self.device, only_accelerator=self.only_accelerator, warn=self.warn, check=check)


@dataclass(frozen=True)
class NoOptions: ...


@dataclass(frozen=True)
class Command:
    """One command; a group has children and may itself run when none of them is named."""

    name: str = ""  # which a command of `hotloop` itself has from the table of commands, with its summary
    summary: str = ""
    config: type[Any] = NoOptions
    run: Callable[[Any, Context], Result | None] | str | None = None
    """What it does; `module:function` of `hotloop.families` is imported when it runs."""
    children: tuple["Command", ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epilog: str = ""
    first_group: str = ""
    """The group of options that its help begins with, where its config's own come after many of another's."""
    aliases: tuple[str, ...] = ()
    config_option: str = ""
    """An option of its own that names a preset or a file, where the old program had one."""
    translate: Callable[[Mapping[str, Any], str], tuple[Mapping[str, Any], Sequence[str]]] | None = None
    """(a file's contents, its name) -> option values and notices, for files in the old program's shape."""
    run_values: Callable[[Path], Mapping[str, Any]] | None = None
    """(the folder that its argument `run` names) -> that run's option values, below the command line's."""
    run_option: str = ""
    """An option that may name a run as well, where `run` is left out and no configuration is named."""
    on_device: bool = False
    """Whether the device that the options ask for is opened before it runs."""
    check: str = ""
    """`module:function` of `hotloop.families`, called with the config and the names of the options on the command line
    before that device is opened: it refuses what no device could do."""
    xla_flags: Mapping[str, str] = field(default_factory=dict)
    """Options that XLA is given as a flag, which must be there before the device is opened."""
    elsewhere: "Elsewhere | None" = None
    verbatim: bool = False
    """From the first word that is no option on, everything is an argument, even what looks like an option."""

    @cached_property
    def options(self) -> tuple[Option, ...]:
        return (*options_of(self.config), *options_of(Common))

    @property
    def option_names(self) -> frozenset[str]:
        return frozenset(option.name for option in self.options if not option.positional)

    @property
    def preset_names(self) -> tuple[str, ...]:
        """Every name that --config takes, also those that another command runs."""
        return (*self.presets, *(self.elsewhere.command.presets if self.elsewhere else ()))


@dataclass(frozen=True)
class Elsewhere:
    """Presets that may be given to one command, and that another runs: its own ones."""

    command: Command
    path: str
    options: Mapping[str, str]
    """What may be given with them -> what it is called there; common options may be, too."""


computing_command = partial(Command, on_device=True)


def spell_options(text: str, options: Collection[str]) -> str:
    """The text, with each `name=value` whose name is (or stands for) one of these options as `--name value`."""

    def spelled(found: re.Match[str]) -> str:
        argument, flag = found.groups()
        names = (argument, *OTHER_NAMES.get(argument, ()))
        name = next((n for n in names if n in options or n in OF_LAUNCH), None)
        if name is None:
            return found[0]
        return f"--{name.replace('_', '-')}" + ("" if flag else " ")

    for phrase, words in PHRASES.items():
        text = text.replace(phrase, words)
    return re.sub(r"(?<![\w.-])([a-z][a-z0-9_]*)=(True\b)?", spelled, text)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # Its reader has gone, or its disk is full: what is printed from now on goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        from hotloop.engine.run import OPEN

        if not OPEN:
            raise  # the command ends by it; a run lives on without a console
        gone = isinstance(error, BrokenPipeError)
        why = "nobody reads" if gone else f"{error.strerror}: nothing keeps"
        for run in tuple(OPEN):
            run.event("warning", message=f"{why} what this run prints any more; its records go on")


def has_colours(stream: TextIO) -> bool:
    """Whether the stream is a terminal that shows colours, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if has_colours(sys.stderr) else text


def print_json(result: Result) -> None:
    print(json.dumps(to_jsonable(result), allow_nan=False), flush=True)


def print_error(text: str) -> None:
    """One line on standard error, if that is open: the exit status says the rest."""
    try:
        print(f"hotloop: {colour('error:', '31')} {' '.join(text.split())}", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the interpreter flushes it at exit

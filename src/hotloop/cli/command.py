"""What a command is: a name, a config dataclass whose fields are its options, and a function to run.

A command module declares one `COMMAND`; options, help, config files, presets and errors come by themselves.
It must not import jax at its top, since `--help` has to answer at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from hotloop.cli.console import Context
from hotloop.engine.interrupt import leave_at_once
from hotloop.options import option, options_of

__all__ = ["Command", "Common", "Context", "NoOptions", "on_device"]

COMMON = "Common options"


@dataclass(frozen=True)
class NoOptions: ...


@dataclass(frozen=True)
class Common:
    device: Literal["auto", "cpu", "gpu", "tpu"] = option(
        "auto", "Where to compute; auto takes an accelerator before the CPU.", group=COMMON
    )
    only_accelerator: bool = option(
        False, "Stop with an error where only a CPU is found.", aliases=("--only-ipu",), group=COMMON
    )
    config: str | None = option(
        None, "A preset, or with --config-path a named part of that file.", metavar="NAME", group=COMMON
    )
    config_path: Path | None = option(
        None,
        "A YAML or JSON file of option values; the command line wins over it.",
        metavar="FILE",
        group=COMMON,
    )
    print_config: bool = option(False, "Print every value and where it came from, then stop.", group=COMMON)
    json: bool = option(
        False,
        "Print the result as one JSON object on the last line; texts go to standard error.",
        group=COMMON,
    )
    debug: bool = option(
        False, "Show the traceback of an error; use it when you report a defect.", group=COMMON
    )


@dataclass(frozen=True)
class Command:
    """One command; a group has children and may itself run when none of them is named."""

    name: str
    summary: str
    config: type[Any] = NoOptions
    run: Callable[[Any, Context], Mapping[str, Any] | None] | None = None
    children: tuple["Command", ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epilog: str = ""
    aliases: tuple[str, ...] = ()
    config_option: str = ""
    """An option of its own that names a preset or a file, where the old program had one."""
    translate: Callable[[Mapping[str, Any], str], tuple[Mapping[str, Any], Sequence[str]]] | None = None
    """(a file's contents, its name) -> option values and notices, for files in the old program's shape."""
    run_values: Callable[[Path], Mapping[str, Any]] | None = None
    """(the folder that its argument `run` names) -> that run's option values, below the command line's."""
    run_option: str = ""
    """An option that may name a run as well, where `run` is left out and no configuration is named."""
    verbatim: bool = False
    """From the first word that is no option on, everything is an argument, even what looks like an option."""

    @property
    def option_names(self) -> frozenset[str]:
        """The names of its options, those of every command included."""
        options = (*options_of(self.config), *options_of(Common))
        return frozenset(option.name for option in options if not option.positional)


def on_device(module: str, function: str = "run") -> Callable[[Any, Context], Mapping[str, Any]]:
    """What a computing command runs: the device is opened, then the module's function; it is imported only now."""

    def run(config: Any, context: Context) -> Mapping[str, Any]:
        context.open_device()
        with leave_at_once():
            command = import_module(module)
        result: Mapping[str, Any] = getattr(command, function)(config, context)
        return result

    return run

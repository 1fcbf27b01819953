"""Which of the chosen variants can run here and with these options: why others are skipped, or would fail at once."""

import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import OptionError
from hotloop.options import options_of

if TYPE_CHECKING:
    from hotloop.bench.launch import Launch, Settings
    from hotloop.bench.run_options import Options
    from hotloop.bench.select import Selected

COMPILE_ONLY = re.compile(rb"compile[-_]only")


def fitting(selected: Sequence["Selected"], settings: "Settings") -> list["Selected"]:
    """The same variants; those that lack something say so in `skip`."""
    return [replace(one, skip=one.skip or _lacks(one, settings)) for one in selected]


def _lacks(one: "Selected", settings: "Settings") -> str | None:
    from hotloop.bench.launch import LaunchError, environment, prepare
    from hotloop.bench.needs import missing

    env = environment(one.variant.env or one.benchmark.env, Path(), settings)
    if why := missing(one.benchmark, env):
        return why
    if not settings.compile_only:
        return None
    try:
        launch = prepare(one.benchmark, one.variant, Path(), replace(settings, compile_only=False))
    except LaunchError:
        return None  # it fails with that reason
    known = knows_compile_only(launch)
    return None if known else f"--compile-only: `{_name(launch)}` does not know that option"


def refusal(one: "Selected", launch: "Launch", options: "Options") -> str | None:
    """Why the command would fail before it does anything, as far as can be seen from here; None if it would not."""
    if not launch.folder.is_dir():
        return f"{launch.folder}: no such folder to run in"
    if one.benchmark.pre_run and options.install:
        return None  # those commands may make what is not there yet
    name = launch.argv[0]
    if shutil.which(str(launch.folder / name) if "/" in name else name, path=launch.env["PATH"]) is None:
        return f"{name}: no such program"
    words = hotloop_words(launch)
    if words is None:
        script = launch.argv[1] if launch.argv[1:] and launch.argv[1].endswith(".py") else None
        absent = script is not None and not (launch.folder / script).is_file()
        return f"{script}: no such script in {launch.folder}" if absent else None
    try:
        _check_options(words, launch.folder)
    except OptionError as error:
        return str(error)
    return None


def _check_options(words: Sequence[str], folder: Path) -> None:
    """Read a command's options as it would itself, in the folder where it would: that is where its files are."""
    from hotloop.cli.command import Common
    from hotloop.cli.configs import resolve
    from hotloop.cli.main import find_command
    from hotloop.cli.parser import scan

    command, _, rest = find_command(list(words))
    with chdir(folder):
        resolve(command, scan(rest, (*options_of(command.config), *options_of(Common))))


def hotloop_words(launch: "Launch") -> list[str] | None:
    """The words after `hotloop` or `python -m hotloop` where the command is one of ours."""
    from hotloop.bench.launch import PYTHON

    words = shlex.split(launch.hotloop_command or launch.command)
    if words[1:3] == ["-m", "hotloop"] and PYTHON.fullmatch(Path(words[0]).name):
        return words[3:]
    return words[1:] if words[:1] == ["hotloop"] else None


def _name(launch: "Launch") -> str:
    words = hotloop_words(launch)
    return " ".join(shlex.split(launch.command)[:2] if words is None else ["hotloop", *words[:2]])


def knows_compile_only(launch: "Launch") -> bool:
    """Whether the command has the option; of a script, whether its text speaks of it."""
    words = hotloop_words(launch)
    if words is None:
        return any(_speaks_of_it(launch.folder / word) for word in launch.argv if word.endswith(".py"))
    from hotloop.cli.main import find_command

    try:
        command, _, _ = find_command(words)
    except OptionError:
        return False
    if command.run_values is not None:
        return False  # it works on what a run made, and has the option from the run's command
    return any(option.name == "compile_only" for option in options_of(command.config))


def _speaks_of_it(script: Path) -> bool:
    try:
        return bool(COMPILE_ONLY.search(script.read_bytes()))
    except OSError:
        return False

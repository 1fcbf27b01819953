"""From a variant's cmd to what is started: words, program, environment. Nothing is started here.

There is no shell. A command of an older script becomes the hotloop command that replaces it, unless the script in
that place is somebody's own.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.bench.model import Benchmark, Variant
from hotloop.bench.process import MARK
from hotloop.bench.variants import expand_environment, unset_variables
from hotloop.errors import HotloopError

if TYPE_CHECKING:
    from hotloop.bench.compat import Translation

QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.")
SHELL = re.compile(r"(?<!\S)(?:\|\|?|&&?|[0-9&]?>>?\S*|<\S*)(?!\S)|;(?!\S)|`|\$\(")
GLUED = re.compile(r"\|\|?|&&?|>>?|<<?|;")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
IPU = re.compile(rb"(?<![A-Za-z])(?:ipu|IPU)s?(?![a-z])|\bpop(?:torch|nn|ops|lar)")
"""In a script for an IPU, but not in `manipulate`."""
PYTHON = re.compile(r"python(3(\.\d+)?)?")


class LaunchError(HotloopError):
    """A cmd that cannot be started as it is written; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What the options of a run change in every command."""

    compile_only: bool = False
    allow_wandb: bool = False
    profile: bool = False
    python: str = sys.executable
    """The interpreter that `python` and `hotloop` stand for."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Variables for every program."""


@dataclass(frozen=True)
class Launch:
    """A command ready to be started."""

    argv: tuple[str, ...]
    folder: Path
    env: Mapping[str, str]
    command: str
    """The command as the file has it, with everything filled in."""
    hotloop_command: str | None = None
    """What stands for the command of an older script."""
    notices: tuple[str, ...] = ()
    """What is to know of the command."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """Patterns for the older script's lines -> the fields of the records that have their figures."""


def prepare(benchmark: Benchmark, variant: Variant, log: Path, settings: Settings) -> Launch:
    """The variant's command; a LaunchError where it cannot work."""
    folder = variant.folder or benchmark.folder
    env = environment(variant.env or benchmark.env, log, settings)
    words = split(variant.cmd, env)
    while len(words) > 1 and (found := ASSIGNMENT.fullmatch(words[0])):
        env[found[1]] = found[2]
        words = words[1:]
    if not (settings.allow_wandb or benchmark.allow_wandb):
        words = without_wandb(words)
    if settings.compile_only:
        words = [*words, "--compile-only"]
    ours, notices = translated(words, folder), tuple(glued_operators(variant.cmd))
    if ours is None:
        argv = tuple(program(words, settings.python))
        return Launch(argv, folder, env, shlex.join(words), notices=notices)
    command = [*ours.command, *(() if "--json" in ours.command else ("--json",))]  # numbers without patterns
    env |= ours.environment
    argv = tuple(program(command, settings.python))
    notices += tuple(ours.notices)
    return Launch(argv, folder, env, shlex.join(words), shlex.join(command), notices, ours.figures)


def environment(own: Mapping[str, str], log: Path, settings: Settings) -> dict[str, str]:
    """The runner's environment, what every program gets, and the entry's own, which wins."""
    env = {**os.environ, **settings.extra, MARK: str(log)}
    bin_folder = str(Path(settings.python).parent)
    env["PATH"] = os.pathsep.join(filter(None, (bin_folder, env.get("PATH"))))
    if settings.profile:
        env["HOTLOOP_REPORT"] = str(log / "report")
    for name, text in own.items():
        env[name] = expand_environment(text, env)
    return env


def split(cmd: str, env: Mapping[str, str]) -> list[str]:
    """The words of a command with variables filled in; what needs a shell is refused."""
    bare = QUOTED.sub("_", cmd)
    if found := SHELL.search(bare):
        raise LaunchError(
            f"'{found[0].strip()}' in the cmd needs a shell, and there is none; put it in a script, or name "
            "steps before it under pre_run_commands"
        )
    if missing := unset_variables(cmd, env):
        raise LaunchError(f"the cmd needs the variable {', '.join(missing)}: set it, or give it under env")
    try:
        words = shlex.split(expand_environment(cmd, env))
    except ValueError as error:
        raise LaunchError(f"the cmd cannot be split into words: {str(error).lower()}") from error
    if not words:
        raise LaunchError("the cmd is empty")
    return words


def glued_operators(cmd: str) -> list[str]:
    """A notice of the operators inside of words, where a shell would see them and we do not."""
    bare = QUOTED.sub("_", cmd)
    words = {word: GLUED.findall(word) for word in bare.split() if GLUED.search(word)}
    return [
        f"'{' '.join(signs)}' in '{word}' is taken as a part of the word: there is no shell here (quotes say the same)"
        for word, signs in words.items()
    ]


def without_wandb(words: Sequence[str]) -> list[str]:
    """The words less every wandb option and its value: results must not leave the machine unasked."""
    kept, in_option = [], False
    for word in words:
        if word.startswith("-") and "wandb" in word.lower():
            in_option = "=" not in word
        elif in_option and not word.startswith("-"):
            in_option = False
        else:
            kept.append(word)
            in_option = False
    return kept


def translated(words: Sequence[str], folder: Path) -> "Translation | None":
    """The hotloop command for an older script's, or None where the command is to run as it is."""
    place = next((at for at, word in enumerate(words) if PYTHON.fullmatch(Path(word).name)), None)
    if place is None:
        return None
    from hotloop.bench.compat import CompatError, script_place, translate

    place += script_place(words[place:])
    if place < len(words) and _is_own(folder / words[place]):
        return None
    try:
        return translate(words)
    except CompatError:
        return None


def _is_own(script: Path) -> bool:
    """Whether the script is there and is not one for an IPU, whatever its name."""
    try:
        with script.open("rb") as file:
            return not IPU.search(file.read(1 << 16))
    except (OSError, ValueError):
        return False


def program(words: Sequence[str], python: str) -> list[str]:
    """The words to start: `hotloop` and `python` are the ones of the interpreter in use."""
    name, *rest = words
    if name == "hotloop":
        return [python, "-m", "hotloop", *rest]
    return [python if PYTHON.fullmatch(name) else name, *rest]

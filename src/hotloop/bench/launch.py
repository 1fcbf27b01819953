"""From a variant's cmd to what is started, without a shell: words, program, environment, and what has to be there
before. A command of an older script becomes the hotloop command that replaces it, unless that script is somebody's
own.
"""

import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hotloop.bench.benchmark import Benchmark, Selected, folder_name
from hotloop.bench.compat import ASSIGNMENT, Translation, script_place, translate
from hotloop.bench.option_groups import CompatError
from hotloop.bench.process import GRACE, KEEP_BYTES, MARK, last_lines, run_program
from hotloop.bench.provenance import list_gpus
from hotloop.bench.record import hash_file
from hotloop.errors import HotloopError

QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.")
SHELL = re.compile(r"(?<!\S)(?:\|\|?|&&?|[0-9&]?>>?\S*|<\S*)(?!\S)|;(?!\S)|`|\$\(")
GLUED = re.compile(r"\|\|?|&&?|>>?|<<?|;")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
IPU = re.compile(rb"(?<![A-Za-z])(?:ipu|IPU)s?(?![a-z])|\bpop(?:torch|nn|ops|lar)")  # not in `manipulate`
PYTHON = re.compile(r"python(3(\.\d+)?)?")
VIRTUAL = re.compile(r"--xla_force_host_platform_device_count=(\d{1,6})")
SETUP_TIMEOUT = 1800.0


class LaunchError(HotloopError):
    """A cmd that cannot be started as it is written; the message says why."""


@dataclass(frozen=True)
class RunnerOptions:
    log_dir: Path
    repeats: int = 1
    warm_up: int = 0
    interleave: bool = False
    resume: bool = False
    fail_fast: bool = False
    install: bool = False
    monitor: bool = False
    timeout: float | None = None
    grace: float = GRACE
    max_log_bytes: int = KEEP_BYTES
    progress_trace_period: float = 1.0  # seconds between signs of life on a terminal
    additional_metrics: bool = False
    csv_metrics: tuple[str, ...] = ()
    compile_only: bool = False
    allow_wandb: bool = False
    profile: bool = False
    python: str = sys.executable  # what `python` and `hotloop` stand for
    variables: Mapping[str, str] = field(default_factory=dict)  # of every program, over those of this process


@dataclass(frozen=True)
class Launch:
    argv: tuple[str, ...]
    folder: Path
    env: Mapping[str, str]
    command: str  # as the file has it, with everything filled in
    hotloop_command: str | None = None  # what stands for the command of an older script
    notices: tuple[str, ...] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    """Patterns for the older script's lines -> the fields of the records that have their figures."""


def prepare(one: Selected, log: Path, options: RunnerOptions) -> Launch:
    """The variant's command; a LaunchError where it cannot work."""
    env = build_environment(one.variant.env, log, options)
    words = split_command(one.variant.cmd, env)
    while len(words) > 1 and (found := ASSIGNMENT.fullmatch(words[0])):
        env[found[1]] = found[2]
        words = words[1:]
    if not (options.allow_wandb or one.benchmark.allow_wandb):  # results must not leave the machine unasked
        kept, is_value = [], False
        for word in words:
            is_option = word.startswith("-") and "wandb" in word.lower()
            if not is_option and not (is_value and not word.startswith("-")):
                kept.append(word)
            is_value = is_option and "=" not in word
        words = kept
    if options.compile_only:
        words = [*words, "--compile-only"]
    folder = one.variant.folder
    notices = []
    for word in dict.fromkeys(QUOTED.sub("_", one.variant.cmd).split()):
        if signs := " ".join(GLUED.findall(word)):
            taken = f"'{signs}' in '{word}' is taken as a part of the word"
            notices.append(f"{taken}: there is no shell here (quotes say the same)")
    ours = translate_script(words, folder)
    if ours is None:
        argv = resolve_program(words, options.python)
        return Launch(argv, folder, env, shlex.join(words), notices=tuple(notices))
    command = [*ours.command, *(() if "--json" in ours.command else ("--json",))]  # numbers without patterns
    argv, env = resolve_program(command, options.python), {**env, **ours.environment}
    shown, notices = shlex.join(command), [*notices, *ours.notices]
    return Launch(argv, folder, env, shlex.join(words), shown, tuple(notices), ours.figures)


def expand_environment(text: str, environment: Mapping[str, str]) -> str:
    """The text with $NAME and ${NAME} replaced; a variable that is not set stays as written."""
    return VARIABLE.sub(lambda found: environment.get(found[1] or found[2], found[0]), text)


def build_environment(own: Mapping[str, str], log: Path, options: RunnerOptions) -> dict[str, str]:
    """The runner's environment, what every program gets, and the entry's own, which wins."""
    env = {**os.environ, **options.variables, MARK: str(log)}
    bin_folder = str(Path(options.python).parent)
    env["PATH"] = os.pathsep.join(filter(None, (bin_folder, env.get("PATH"))))
    if options.profile:
        env["HOTLOOP_REPORT"] = str(log / "report")
    for name, text in own.items():
        env[name] = expand_environment(text, env)
    return env


def split_command(cmd: str, env: Mapping[str, str]) -> list[str]:
    """The words of a command with variables filled in; what needs a shell is refused."""
    if found := SHELL.search(QUOTED.sub("_", cmd)):
        raise LaunchError(
            f"'{found[0].strip()}' in the cmd needs a shell, and there is none; put it in a script, or name "
            "steps before it under pre_run_commands"
        )
    names = dict.fromkeys(found[1] or found[2] for found in VARIABLE.finditer(cmd))
    if missing := [name for name in names if name not in env]:
        raise LaunchError(f"the cmd needs the variable {', '.join(missing)}: set it, or give it under env")
    try:
        words = shlex.split(expand_environment(cmd, env))
    except ValueError as error:
        raise LaunchError(f"the cmd cannot be split into words: {str(error).lower()}") from error
    if not words:
        raise LaunchError("the cmd is empty")
    return words


def translate_script(words: Sequence[str], folder: Path) -> Translation | None:
    """The hotloop command for an older script's, or None where the command is to run as it is."""
    place = next((at for at, word in enumerate(words) if PYTHON.fullmatch(Path(word).name)), None)
    if place is None:
        return None
    place += script_place(words[place:])
    with (
        suppress(OSError, ValueError, IndexError),  # there is no such script
        (folder / words[place]).open("rb") as file,
    ):
        if not IPU.search(file.read(1 << 16)):
            return None  # somebody's own, whatever its name
    try:
        found = translate(words)
    except CompatError:
        return None
    # Several commands one after the other are compat's to run.
    return replace(found, command=["hotloop", "compat", *words], before=()) if found.before else found


def resolve_program(words: Sequence[str], python: str) -> tuple[str, ...]:
    """The words to start: `hotloop` and `python` are the ones of the interpreter in use."""
    name, *rest = words
    if name == "hotloop":
        return (python, "-m", "hotloop", *rest)
    return (python if PYTHON.fullmatch(name) else name, *rest)


def find_missing(benchmark: Benchmark, env: Mapping[str, str]) -> str | None:
    """Why the benchmark cannot run in this environment, or None; nothing is started and no jax imported."""
    if benchmark.needs_dataset and not env.get("DATASETS_DIR"):
        return "needs a data set, and DATASETS_DIR is not set: set it to the folder that data sets are in"
    platforms, visible = env.get("JAX_PLATFORMS", ""), env.get("CUDA_VISIBLE_DEVICES")
    if not benchmark.devices:
        return None
    there = len(list_gpus() if visible is None else [name for name in visible.split(",") if name.strip()])
    if platforms == "cpu" or not there:
        if platforms not in ("", "cpu"):
            return None  # a TPU, say: only jax could tell how many there are
        virtual = VIRTUAL.findall(env.get("XLA_FLAGS", ""))
        there = int(virtual[-1]) if virtual else 1
    here = "there is 1" if there == 1 else f"there are {there}"
    return f"is for {benchmark.devices} devices, and {here}" if there < benchmark.devices else None


def prepare_python(benchmark: Benchmark, log: Path) -> str:
    """The interpreter with the benchmark's packages, in an environment beside the logs that is filled on first use.

    Equal requirements share one. It sees the packages of the environment in use, which is never changed.
    """
    file = benchmark.requirements_file
    if file is None:
        return sys.executable
    if not file.is_file():
        raise LaunchError(f"requirements_file {file}: no such file")
    home = log / "environments" / hash_file(file)[:12]
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        _run_setup_step([sys.executable, "-m", "venv", "--clear", str(home)], log, home)
        # Its own packages come first, those of the environment in use after them.
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        _run_setup_step([str(python), "-c", code], log, home)
        site = Path(last_lines(home.with_suffix(".stdout"), 1)[0])
        ours = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
        lines = [f"import site; site.addsitedir({json.dumps(path)})\n" for path in ours]
        (site / "_packages_of_the_runner.pth").write_text("".join(lines), encoding="utf-8")
        install = ["-m", "pip", "install", "--no-input", "-r", str(file)]
        _run_setup_step([str(python), *install], file.parent, home)
        done.touch()
    return str(python)


def _run_setup_step(argv: Sequence[str], folder: Path, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    logs = home.with_suffix(".stdout"), home.with_suffix(".stderr")
    result = run_program(argv, folder, os.environ, SETUP_TIMEOUT, *logs)
    if result.exitcode or result.timed_out:
        said = result.reason or " ".join(last_lines(logs[1], 1))
        raise LaunchError(f"'{' '.join(argv[1:4])} ...' failed: {said or 'see ' + str(logs[1])}")


def run_pre_commands(benchmark: Benchmark, log: Path, options: RunnerOptions) -> None:
    folder = log / f"{folder_name(benchmark.name)}.before"
    folder.mkdir(parents=True, exist_ok=True)
    env = build_environment(benchmark.env, folder, options)
    for number, cmd in enumerate(benchmark.pre_run, 1):
        argv = resolve_program(split_command(cmd, env), options.python)
        logs = folder / f"{number}.stdout", folder / f"{number}.stderr"
        result = run_program(argv, benchmark.folder, env, benchmark.timeout or SETUP_TIMEOUT, *logs)
        if result.exitcode or result.timed_out:
            said = result.reason or " ".join(last_lines(logs[1], 1)) or f"status {result.exitcode}"
            raise LaunchError(f"pre_run_commands: '{cmd}' failed: {said}")

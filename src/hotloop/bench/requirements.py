"""What a benchmark needs before it runs: packages, in a virtual environment of its own beside the logs, and commands.

The environment that the runner itself lives in is never changed; the private one sees its packages.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hotloop.bench.capture import last_lines
from hotloop.bench.launch import LaunchError, Settings, environment, program, split
from hotloop.bench.model import Benchmark
from hotloop.bench.process import run_one
from hotloop.bench.record import digest
from hotloop.bench.variants import folder_name

PATIENCE = 1800.0


def python_for(benchmark: Benchmark, log: Path) -> str:
    """The interpreter with the benchmark's packages: made and filled on first use, shared by equal requirements."""
    file = benchmark.requirements_file
    if file is None:
        return sys.executable
    if not file.is_file():
        raise LaunchError(f"requirements_file {file}: no such file")
    home = log / "environments" / digest(file)[:12]
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        _step([sys.executable, "-m", "venv", "--clear", str(home)], log, home)
        _share(python, log, home)
        _step([str(python), "-m", "pip", "install", "--no-input", "-r", str(file)], file.parent, home)
        done.touch()
    return str(python)


def _share(python: Path, log: Path, home: Path) -> None:
    """Let the private environment see the packages of the one in use, after its own."""
    ours = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    _step([str(python), "-c", code], log, home)
    site = Path(last_lines(home.with_suffix(".stdout"), 1)[0])
    lines = [f"import site; site.addsitedir({json.dumps(path)})\n" for path in ours]
    (site / "_packages_of_the_runner.pth").write_text("".join(lines), encoding="utf-8")


def _step(argv: Sequence[str], folder: Path, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    logs = home.with_suffix(".stdout"), home.with_suffix(".stderr")
    outcome = run_one(argv, folder, os.environ, PATIENCE, *logs)
    if outcome.exitcode or outcome.timed_out:
        said = outcome.reason or " ".join(last_lines(logs[1], 1))
        raise LaunchError(f"'{' '.join(argv[1:4])} ...' failed: {said or 'see ' + str(logs[1])}")


def run_before(benchmark: Benchmark, log: Path, settings: Settings) -> None:
    """The commands that a benchmark wants run before it, one after the other."""
    folder = log / f"{folder_name(benchmark.name)}.before"
    folder.mkdir(parents=True, exist_ok=True)
    env = environment(benchmark.env, folder, settings)
    for number, cmd in enumerate(benchmark.pre_run, 1):
        argv = program(split(cmd, env), settings.python)
        logs = folder / f"{number}.stdout", folder / f"{number}.stderr"
        outcome = run_one(argv, benchmark.folder, env, benchmark.timeout or PATIENCE, *logs)
        if outcome.exitcode or outcome.timed_out:
            said = outcome.reason or " ".join(last_lines(logs[1], 1)) or f"status {outcome.exitcode}"
            raise LaunchError(f"pre_run_commands: '{cmd}' failed: {said}")

"""Two programs in turns: pair after pair, the first of each drawn by lot, so that what the machine does meets both.

Each side has a log folder of its own, as `hotloop bench run` leaves it; the records name the session and the variant
on the other side, by which `verdict.py` knows the pairs. Two commits of a repository run in work trees in a temporary
folder, gone when the comparison is over. What is compared is decided here, how it is judged is not.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hotloop.bench.benchmark import Selected, VariantRun
from hotloop.bench.launch import RunnerOptions
from hotloop.bench.record import Results
from hotloop.bench.results import SIDES
from hotloop.bench.runner import BenchConsole, Runner, explain_write_errors, make_folder
from hotloop.errors import OptionError, RunError

HOOKLESS = (
    "-c",
    f"core.hooksPath={os.devnull}",
)  # what a repository does after a checkout is not wanted here
Pair = tuple[Selected, Selected]


def match_pairs(a: Sequence[Selected], b: Sequence[Selected]) -> list[Pair]:
    """Which variants run against each other: those of one name, or of the same parameters of one benchmark each."""
    for side, ones in zip(SIDES, (a, b), strict=True):
        if all(one.skip for one in ones):
            raise OptionError(f"--ab: no variant of {side} can run: {ones[0].variant.name} {ones[0].skip}")
    a, b = ([one for one in side if one.skip is None] for side in (a, b))
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    one_each = all(len({one.benchmark.name for one in side}) == 1 for side in (a, b))
    ours, theirs = ({_key(one, one_each): one for one in side} for side in (a, b))
    for side, mine, other in (("A", ours, theirs), ("B", theirs, ours)):
        if alone := [name for name in mine if name not in other]:
            raise OptionError(f"--ab: only {side} has {', '.join(alone)}; name one of each side as FILE:NAME")
    return [(one, theirs[key]) for key, one in ours.items()]


def _key(one: Selected, by_parameters: bool) -> str:
    if not by_parameters:
        return one.variant.name
    return ", ".join(f"{name}={value}" for name, value in sorted(one.variant.params.items()))


def run_in_turns(
    pairs: Sequence[Pair], sides: Sequence[RunnerOptions], seed: int, console: BenchConsole
) -> dict[str, str]:
    """Run all pairs; `sides` are the options of A and of B, whose log folders are new ones in one folder.

    A variant that fails is left alone from then on and is in the result, with its reason.
    """
    log = sides[0].log_dir.parent
    for side in sides:
        make_folder(side.log_dir)
    failed: dict[str, str] = {}
    with explain_write_errors(log, "take another --log-dir"), ExitStack() as stack:
        runners = [
            Runner(
                [pair[side] for pair in pairs],
                options,
                PrefixedConsole(console, SIDES[side]),
                stack.enter_context(closing(Results(options.log_dir))),
                turns,
            )
            for side, (options, turns) in enumerate(zip(sides, _turns(pairs), strict=True))
        ]
        try:
            _run_pairs(pairs, runners, random.Random(seed), failed)
        finally:
            for runner in runners:
                with suppress(OSError):  # what stopped the run is what must be told
                    runner.write_tables()
    return failed


def _turns(pairs: Sequence[Pair]) -> list[dict[str, dict[str, str]]]:
    """For each side, what the records of its variants say of the session."""
    name = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}"  # sorts among the times of other records
    return [
        {pair[side].variant.name: {"id": name, "with": pair[1 - side].variant.name} for pair in pairs}
        for side in (0, 1)
    ]


def _run_pairs(
    pairs: Sequence[Pair], runners: Sequence[Runner], lots: random.Random, failed: dict[str, str]
) -> None:
    repeats, warm_up = runners[0].options.repeats, runners[0].options.warm_up
    total, number = len(pairs) * (repeats + warm_up), 0
    for pair in pairs:
        name = pair[0].variant.name
        for repeat in range(1 - warm_up, repeats + 1):
            number += 1
            # A coin for each pair, and not ABBA: it is the lot that makes the test of pairs exact.
            for side in (0, 1) if lots.random() < 0.5 else (1, 0):
                record = runners[side].perform(VariantRun(pair[side], repeat))
                runners[side].show(record, f"[{number}/{total}]")
                if record["status"] != "passed":
                    failed[name] = f"{SIDES[side]} failed: {record['reason']}"
            if name in failed:
                number += repeats - repeat
                break


class PrefixedConsole:
    """A console that says which side it speaks of."""

    def __init__(self, console: BenchConsole, side: str):
        self.console, self.side = console, side

    def say(self, text: str) -> None:
        self.console.say(f"{self.side} {text}")

    def warn(self, text: str) -> None:
        self.console.warn(f"{self.side}: {text}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.console.table(columns, rows)


def side_options(options: RunnerOptions, side: str, variables: Mapping[str, str]) -> RunnerOptions:
    """The options for one side: its own folder, and variables of its own."""
    return replace(options, log_dir=options.log_dir / side, variables={**options.variables, **variables})


@contextmanager
def work_trees(commits: Sequence[str], file: Path) -> Iterator[list[Path]]:
    """The given file as it is now, in a work tree of each commit."""
    file = file.resolve()
    top = _find_repository(file)
    names = [_resolve_commit(top, commit) for commit in commits]
    with TemporaryDirectory(prefix="hotloop-ab-") as folder:
        trees = [Path(folder) / str(place) for place in range(len(names))]
        try:
            for tree, name in zip(trees, names, strict=True):
                _git(top, *HOOKLESS, "worktree", "add", "--detach", "--quiet", str(tree), name)
            yield [_copy(file, tree / file.relative_to(top)) for tree in trees]
        finally:
            for tree in trees:
                shutil.rmtree(tree, ignore_errors=True)
            _git(top, "worktree", "prune")


def python_path(file: Path) -> str:
    """Where Python finds the packages of the work tree that a file is in, before any other."""
    top = _find_repository(file)
    kept = os.environ.get("PYTHONPATH")
    return os.pathsep.join(
        [*(str(each) for each in (top / "src", top) if each.is_dir()), *([kept] if kept else [])]
    )


def _copy(file: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)
    return place


def _find_repository(file: Path) -> Path:
    try:
        return Path(_git(file.parent, "rev-parse", "--show-toplevel"))
    except RunError as error:
        raise OptionError(
            f"--spec {file}: is in no git repository, so there are no commits to compare"
        ) from error


def _resolve_commit(top: Path, name: str) -> str:
    try:
        return _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except RunError as error:
        raise OptionError(f"--ab {name}: is no commit of {top}; give a hash, branch or tag") from error


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RunError(
            f"git: cannot be started ({error.strerror}); it is needed to compare commits"
        ) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason given"]
        raise RunError(f"git {words[0]}: {said[-1]}") from error
    return done.stdout.strip()

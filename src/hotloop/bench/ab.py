"""Two programs in turns, pair after pair, the first of each drawn by lot, so that what the machine does meets both; and
two commits of a repository in work trees, gone afterwards. Records name the session and the variant on the other side.
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

from hotloop.bench.benchmark import Selected
from hotloop.bench.launch import RunnerOptions
from hotloop.bench.record import SIDES, Results
from hotloop.bench.runner import BenchConsole, Runner, explain_write_errors
from hotloop.errors import OptionError, RunError

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

    def key(one: Selected) -> str:
        if not one_each:
            return one.variant.name
        return ", ".join(f"{name}={value}" for name, value in sorted(one.variant.params.items()))

    ours, theirs = ({key(one): one for one in side} for side in (a, b))
    for side, mine, other in (("A", ours, theirs), ("B", theirs, ours)):
        if alone := [name for name in mine if name not in other]:
            raise OptionError(f"--ab: only {side} has {', '.join(alone)}; name one of each side as FILE:NAME")
    return [(one, theirs[name]) for name, one in ours.items()]


def run_in_turns(
    pairs: Sequence[Pair],
    options: RunnerOptions,
    variables: Sequence[Mapping[str, str]],
    seed: int,
    console: BenchConsole,
) -> dict[str, str]:
    """Run all pairs, the sides in folders A and B of the log folder, each with variables of its own; by variant why
    one failed, which is left alone from then on.
    """
    session = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}"  # sorts among the times of other records
    failed: dict[str, str] = {}
    runners: list[Runner] = []
    with explain_write_errors(options.log_dir, "take another --log-dir"), ExitStack() as stack:
        for side, name in enumerate(SIDES):
            both = {**options.variables, **variables[side]}
            own = replace(options, log_dir=options.log_dir / name, variables=both)
            results = stack.enter_context(closing(Results(own.log_dir)))
            selected, others = ([pair[place] for pair in pairs] for place in (side, 1 - side))
            turns = {
                one.variant.name: {"id": session, "with": other.variant.name}
                for one, other in zip(selected, others, strict=True)
            }
            runners.append(Runner(selected, own, console, results, turns, side=name))
        lots = random.Random(seed)
        total, number = len(pairs) * (options.repeats + options.warm_up), 0
        try:
            for pair in pairs:
                name = pair[0].variant.name
                for repeat in range(1 - options.warm_up, options.repeats + 1):
                    number += 1
                    # A coin for each pair, and not ABBA: it is the lot that makes the test of pairs exact.
                    for side in (0, 1) if lots.random() < 0.5 else (1, 0):
                        record = runners[side].perform(pair[side], repeat, f"[{number}/{total}]")
                        if record["status"] != "passed":
                            failed[name] = f"{SIDES[side]} failed: {record['reason']}"
                    if name in failed:
                        number += options.repeats - repeat
                        break
        finally:
            for runner in runners:
                with suppress(OSError):  # what stopped the run is what must be reported
                    runner.write_tables()
    return failed


@contextmanager
def work_trees(commits: Sequence[str], file: Path) -> Iterator[dict[Path, dict[str, str]]]:
    """The given file as it is now in a work tree of each commit, and how Python finds that tree's packages first."""
    file = file.resolve()
    try:
        top = Path(_git(file.parent, "rev-parse", "--show-toplevel"))
    except RunError as error:
        nowhere = "is in no git repository, so there are no commits to compare"
        raise OptionError(f"--spec {file}: {nowhere}") from error
    names, copies = [], {}
    for commit in commits:
        try:
            words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
            names.append(_git(top, *words))
        except RunError as error:
            raise OptionError(f"--ab {commit}: is no commit of {top}; give a hash, branch or tag") from error
    with TemporaryDirectory(prefix="hotloop-ab-") as folder:
        trees = [Path(folder) / str(place) for place in range(len(names))]
        try:
            for tree, name in zip(trees, names, strict=True):
                add = ("worktree", "add", "--detach", "--quiet", str(tree), name)
                _git(top, "-c", f"core.hooksPath={os.devnull}", *add)  # a checkout is to run no hooks
                copy = tree / file.relative_to(top)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
                folders = [str(each) for each in (tree / "src", tree) if each.is_dir()]
                paths = filter(None, [*folders, os.environ.get("PYTHONPATH")])
                copies[copy] = {"PYTHONPATH": os.pathsep.join(paths)}
            yield copies
        finally:
            for tree in trees:
                shutil.rmtree(tree, ignore_errors=True)
            _git(top, "worktree", "prune")


def _git(folder: Path, *words: str) -> str:
    argv, none, pipe = ["git", "-C", str(folder), *words], subprocess.DEVNULL, subprocess.PIPE
    try:
        said = subprocess.check_output(argv, stdin=none, stderr=pipe, text=True, errors="replace")
    except OSError as error:
        why = f"cannot be started ({error.strerror})"
        raise RunError(f"git: {why}; it is needed to compare commits") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no reason given"]
        raise RunError(f"git {words[0]}: {lines[-1]}") from error
    return said.strip()

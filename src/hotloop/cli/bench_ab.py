"""The part of `hotloop bench compare --ab` that runs: from two benchmark files or two commits to two log folders."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.cli.bench_fit import fitting
from hotloop.cli.bench_run import PLATFORMS, load
from hotloop.cli.command import Context
from hotloop.errors import OptionError

if TYPE_CHECKING:
    from hotloop.bench.ab import Pair
    from hotloop.bench.run_options import Options
    from hotloop.bench.select import Selected
    from hotloop.cli.bench_compare import Compare


ALONE = ("spec", "benchmark", "repeats", "warm_up", "seed", "log_dir", "timeout")
"""Options that mean nothing without --ab."""


def check(config: "Compare", context: Context) -> None:
    """Refuse what cannot be meant beside --ab, or without it."""
    if not config.ab:
        if given := [name for name in ALONE if name in context.given]:
            raise OptionError(f"--{given[0].replace('_', '-')} is for --ab A B, which runs programs")
        return
    if config.results or config.baseline:
        other = "--baseline" if config.baseline else f"RESULTS {config.results[0]}"
        raise OptionError(f"--ab runs what it compares; leave out {other}")
    if len(config.ab) != 2:
        wanted = "two commits" if config.spec else "two benchmark files, FILE or FILE:NAME"
        raise OptionError(f"--ab: {wanted} are needed, A and B, not {len(config.ab)}")


def measure(config: "Compare", context: Context) -> tuple[Path, Mapping[str, str]]:
    """Run both in turns; the folder of the results, and by variant why one failed."""
    from hotloop.bench.ab import Session, check_folder, match, run_in_turns, side_options
    from hotloop.bench.results import SIDES
    from hotloop.engine.interrupt import raise_stops

    options = options_of(config, context)
    check_folder(options.log_dir)
    with raise_stops(), ExitStack() as stack:
        files, extras = commits(config, stack) if config.spec else (config.ab, ({}, {}))
        pairs = match(*(fitting(chosen(file, config.benchmark), options.settings) for file in files))
        check_metrics(pairs, config)
        sides = [side_options(options, side, extra) for side, extra in zip(SIDES, extras, strict=True)]
        for side, name in zip(SIDES, config.ab, strict=True):
            context.say(f"{side}: {name}")
        context.say(f"{options.repeats} pairs of {len(pairs)} variants, results in {options.log_dir}")
        failed = run_in_turns(Session(pairs, (sides[0], sides[1]), config.seed), context)
    for variant, reason in failed.items():
        context.warn(f"{variant}: {reason}")
    return options.log_dir, failed


def check_metrics(pairs: "Sequence[Pair]", config: "Compare") -> None:
    """OptionError where --metric would leave nothing to compare, before anything runs."""
    from hotloop.bench.compare import Rules

    entries = [one.benchmark for pair in pairs for one in pair]
    measured = {metric.name for entry in entries for metric in entry.metrics}
    known = sorted(measured | {metric.name for entry in entries for metric in entry.derived})
    if config.metric and not any(map(Rules(config.metric).wants, known)):
        names = ", ".join(known) or "none"
        raise OptionError(f"--metric {' '.join(config.metric)}: matches nothing; known: {names}")


def commits(config: "Compare", stack: ExitStack) -> tuple[Sequence[str], Sequence[Mapping[str, str]]]:
    """The benchmark file in a work tree of each commit, and the variables that make programs use that tree."""
    from hotloop.bench.commits import python_path, work_trees

    assert config.spec is not None
    load([config.spec])  # its mistakes are told under the name that the user knows
    files = stack.enter_context(work_trees(config.ab, config.spec))
    return [str(file) for file in files], [{"PYTHONPATH": python_path(file)} for file in files]


def chosen(text: str, names: Sequence[str]) -> "list[Selected]":
    """The variants of FILE, or those that are named in FILE:NAME or by --benchmark."""
    from hotloop.bench.select import select

    file, colon, name = text.rpartition(":")
    if not colon or Path(text).exists():
        return select(load([Path(text)]), names)
    return select(load([Path(file)]), (name,))


def options_of(config: "Compare", context: Context) -> "Options":
    """How each program is run."""
    from hotloop.bench.launch import Settings
    from hotloop.bench.measure import Limits
    from hotloop.bench.run_options import Options

    extra = {"JAX_PLATFORMS": PLATFORMS[context.device]} if context.device in PLATFORMS else {}
    return Options(
        log_dir=(config.log_dir or Path(f"ab_{datetime.now():%Y-%m-%d_%H-%M-%S}")).absolute(),
        repeats=config.repeats,
        warm_up=config.warm_up,
        limits=Limits(config.timeout),
        settings=Settings(extra=extra),
    )

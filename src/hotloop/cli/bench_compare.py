"""`hotloop bench compare`: what became faster or slower between two sets of results, since a baseline, or in turns.

With --ab it runs first: from two benchmark files or two commits to two log folders.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotloop.cli.bench_run import finish, load_specs, mark_skipped, refuse_empty, runner_options
from hotloop.cli.command import Command, Context, Result
from hotloop.errors import DataError, OptionError, RunError
from hotloop.options import argument, non_negative, option, positive

if TYPE_CHECKING:
    from hotloop.bench.record import Record

EPILOG = """A and B are log folders of `hotloop bench run` with --repeats 5 or more: 5 tell 5 % apart under 1 % of
noise, 10 tell 10 % apart under 3 % of it. FAST and SLOW: the 98 % interval of the ratio does not hold 1, and the ratio
is beyond the threshold; SAME: the whole interval is within it; AMBIGUOUS: anything else, fewer than three repeats, and
what the machine's own pace may explain. Where both programs are at hand, --ab runs them in turns, which a machine that
changes its speed disturbs least: `--ab old.yml new.yml`, `--ab f.yml:one f.yml:other`, or two commits of this
repository, `--ab main HEAD --spec f.yml`. The status is 1 on a word of --fail-on, and when a program of --ab fails."""
_turns = partial(option, group="In turns")


@dataclass(frozen=True)
class BenchCompare:
    results: tuple[Path, ...] = argument(
        "Log folders: A and B; with --baseline the new results alone.", default=(), metavar="RESULTS"
    )
    baseline: Path | None = option(None, "A file of baselines that takes A's place.", metavar="FILE")
    update_baseline: bool = option(
        False, "Write the results into --baseline instead of comparing; do it for a change you accept."
    )
    threshold: float | None = option(
        None,
        "Share by which medians may differ and still be the SAME: 0.02, or what the baseline file says of a metric.",
        check=positive,
    )
    metric: tuple[str, ...] = option((), "Only these metrics; globs such as *latency* are fine.")
    lower_is_better: tuple[str, ...] = option((), "Metrics of which less is better, where names mislead.")
    higher_is_better: tuple[str, ...] = option((), "Metrics of which more is better, where names mislead.")
    fail_on: tuple[Literal["slow", "ambiguous", "missing"], ...] = option(
        (), "Leave with status 1 on any of these verdicts; slow makes it a regression test."
    )
    markdown: bool = option(False, "Print the table as Markdown.")
    ab: tuple[str, ...] = _turns(
        (),
        "Run two programs in turns and compare them: A and B are benchmark files, FILE or FILE:NAME for one of its "
        "benchmarks or variants; with --spec they are commits.",
        metavar="A B",
    )
    spec: Path | None = _turns(
        None,
        "The benchmark file that both commits run, as it is now; each runs in a work tree of its own that is removed "
        "afterwards.",
        metavar="FILE",
    )
    benchmark: tuple[str, ...] = _turns(
        (), "Names or globs of benchmarks or variants; all of them by default.", metavar="NAME"
    )
    repeats: int = _turns(10, "Pairs of runs that count, of each variant.", check=positive)
    warm_up: int = _turns(1, "Pairs before them that do not count.", check=non_negative)
    seed: int = _turns(0, "Of the lots that say which of a pair runs first.")
    log_dir: Path | None = _turns(
        None, "Folder for results and logs, A and B in it; ab_<time> by default.", metavar="DIR"
    )
    timeout: float | None = _turns(
        None, "Seconds for each run; a shorter one of the entry wins.", check=positive
    )


def run(config: BenchCompare, context: Context) -> Result:
    """Status 1 where that was asked for."""
    refuse_empty(config, context)
    check_options(config, context)
    if config.update_baseline:
        return update_baseline(config, context)
    if not config.ab:
        return show_comparison(config, context)
    log, failed = run_ab(config, context)
    return show_comparison(
        replace(config, ab=(), results=(log / "A", log / "B")), context, {"log": log, "broken": failed}
    )


def show_comparison(config: BenchCompare, context: Context, ran: Mapping[str, Any] = {}) -> Result:
    """The verdicts on two sets of results; `ran` is what is known of programs that ran for it."""
    from hotloop.bench.compare import COLUMNS, compare_samples, comparison_cells, format_markdown

    rows = compare_samples(*load_sides(config, context))
    broken = [f"{variant}: {reason}" for variant, reason in ran.get("broken", {}).items()]
    if not rows and broken:
        raise RunError(f"--ab: nothing to compare: {'; '.join(broken)}; logs are in {ran['log']}")
    if not rows:
        raise DataError(f"{config.results[-1]}: nothing to compare; does --metric name one of its metrics?")
    if config.markdown:
        context.say(format_markdown(rows))
    else:
        context.table(COLUMNS, [comparison_cells(row) for row in rows])
    counts = {word: sum(row.word == word for row in rows) for word in dict.fromkeys(row.word for row in rows)}
    hint = "; more repeats narrow the intervals" if "AMBIGUOUS" in counts else ""
    context.say("\n" + ", ".join(f"{count} {word}" for word, count in counts.items()) + hint)
    failed = [row for row in rows if row.word.lower() in config.fail_on]
    result = {"rows": [asdict(row) for row in rows], "counts": counts, "failed": len(failed), **ran}
    return finish(result, context, failed=bool(failed or broken))


def check_options(config: BenchCompare, context: Context) -> None:
    """Refuse what cannot be meant beside --ab, or without it, and a number of results that does not fit."""
    if config.ab:
        if config.results or config.baseline:
            other = "--baseline" if config.baseline else f"RESULTS {config.results[0]}"
            raise OptionError(f"--ab runs what it compares; leave out {other}")
        if len(config.ab) != 2:
            needed = "two commits" if config.spec else "two benchmark files, FILE or FILE:NAME"
            raise OptionError(f"--ab: {needed} are needed, A and B, not {len(config.ab)}")
        return
    of_ab = ("spec", "benchmark", "repeats", "warm_up", "seed", "log_dir", "timeout")
    if given := [name for name in of_ab if name in context.given]:
        raise OptionError(f"--{given[0].replace('_', '-')} is for --ab A B, which runs programs")
    wanted = 1 if config.baseline else 2
    if config.update_baseline and config.baseline is None:
        raise OptionError("--update-baseline needs --baseline FILE, the file to write")
    if len(config.results) != wanted:
        needed = "with --baseline one folder of results is" if wanted == 1 else "two folders, A and B, are"
        raise OptionError(f"RESULTS: {needed} needed, not {len(config.results)}")


def load_sides(config: BenchCompare, context: Context) -> tuple[Any, Any, Any]:
    """A's samples, B's samples and the rules."""
    from hotloop.bench import record
    from hotloop.bench.compare import CompareRules, load_baselines

    new = record.read_records(config.results[-1:])
    after = record.collect_samples(new)
    thresholds: Mapping[str, float] = {}
    if config.baseline is None:
        old = record.read_records(config.results[:1])
        before = record.collect_samples(old)
        if record.ran_in_turns(old, new):
            after = record.samples_of_partners(new)
        else:  # what else differs between the two sides may be the reason
            machines = [
                " and ".join(sorted({record.device_name(each) for each in side})) for side in (old, new)
            ]
            if machines[0] != machines[1]:
                context.warn(f"A was measured on {machines[0]}, B on {machines[1]}")
            specs = [
                {each["benchmark"]: (each.get("spec") or {}).get("sha256") for each in side}
                for side in (old, new)
            ]
            if changed := [name for name, mark in specs[0].items() if specs[1].get(name, mark) != mark]:
                context.warn(f"the specification changed between A and B: {', '.join(changed)}")
    else:
        known, name = load_baselines(config.baseline), one_device(new, config.results[-1])
        if name not in known.devices:
            raise DataError(
                f"{config.baseline}: has no baseline of {name}, only of {', '.join(known.devices) or 'nothing'}; "
                "add one with --update-baseline"
            )
        thresholds = known.thresholds
        ran = {each["variant"] for each in new}
        before = {key: sample for key, sample in known.devices[name].items() if key[0] in ran}
    rules = CompareRules(
        config.metric, config.lower_is_better, config.higher_is_better, config.threshold, thresholds
    )
    return before, after, rules


def one_device(records: "Sequence[Record]", path: Path) -> str:
    from hotloop.bench.record import device_name

    names = sorted({device_name(record) for record in records})
    if len(names) != 1:
        raise DataError(f"{path}: a baseline is for one device, these results are of {len(names)}: {names}")
    return names[0]


def update_baseline(config: BenchCompare, context: Context) -> Result:
    from hotloop.bench.compare import FEWEST, BaselineFile, CompareRules, load_baselines, save_baselines
    from hotloop.bench.record import collect_samples, read_records

    assert config.baseline is not None
    records = read_records(config.results)
    name = one_device(records, config.results[0])
    rules = CompareRules(config.metric)
    found = {key: sample for key, sample in collect_samples(records).items() if rules.wants(key[1])}
    if not found:
        raise DataError(f"{config.results[0]}: holds no metric of a run that ended well; nothing was written")
    if few := sorted({key[0] for key, sample in found.items() if len(sample.values) < FEWEST}):
        context.warn(f"fewer than {FEWEST} repeats, too few to compare with: {', '.join(few)}")
    before = load_baselines(config.baseline) if config.baseline.exists() else BaselineFile()
    devices = {**before.devices, name: {**before.devices.get(name, {}), **found}}
    save_baselines(config.baseline, replace(before, devices=devices))
    context.say(f"{config.baseline}: {len(found)} values of {name} written")
    return {"baseline": str(config.baseline), "device": name, "written": len(found)}


def run_ab(config: BenchCompare, context: Context) -> tuple[Path, Mapping[str, str]]:
    """Run both in turns; the folder of the results, and by variant why one failed."""
    from hotloop.bench.ab import match_pairs, run_in_turns, work_trees
    from hotloop.bench.benchmark import count_of, select
    from hotloop.bench.compare import CompareRules
    from hotloop.bench.record import RECORDS, SIDES
    from hotloop.bench.runner import check_folder

    options = runner_options(config, context, "ab")
    check_folder(options.log_dir, (*SIDES, RECORDS), "take another folder")
    with ExitStack() as stack:
        files: Sequence[str] = config.ab
        variables: Sequence[Mapping[str, str]] = ({}, {})
        if config.spec is not None:
            load_specs([config.spec])  # its mistakes are reported under the name that the user knows
            trees = stack.enter_context(work_trees(config.ab, config.spec))
            files, variables = list(map(str, trees)), list(trees.values())
        selected = []
        for text in files:  # FILE or FILE:NAME
            file, colon, name = text.rpartition(":")
            is_file = not colon or Path(text).exists()
            names = config.benchmark if is_file else (name,)
            selected.append(select(load_specs([Path(text if is_file else file)]), names))
        pairs = match_pairs(*(mark_skipped(side, options) for side in selected))
        entries = [one.benchmark for pair in pairs for one in pair]
        measured = {metric.name for entry in entries for metric in entry.metrics}
        known = sorted(measured | {metric.name for entry in entries for metric in entry.derived})
        if config.metric and not any(map(CompareRules(config.metric).wants, known)):
            metrics = ", ".join(known) or "none"
            raise OptionError(f"--metric {' '.join(config.metric)}: matches nothing; known: {metrics}")
        for side, name in zip(SIDES, config.ab, strict=True):
            context.say(f"{side}: {name}")
        counts = f"{count_of(options.repeats, 'pair')} of {count_of(len(pairs), 'variant')}"
        context.say(f"{counts}, results in {options.log_dir}")
        failed = run_in_turns(pairs, options, variables, config.seed, context)
    for variant, reason in failed.items():
        context.warn(f"{variant}: {reason}")
    return options.log_dir, failed


COMMAND = Command(
    "compare",
    "Say what is FAST, SLOW, the SAME or AMBIGUOUS between two sets of results.",
    BenchCompare,
    run,
    epilog=EPILOG,
)

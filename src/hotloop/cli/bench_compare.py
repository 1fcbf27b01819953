"""`hotloop bench compare`: what became faster or slower between two sets of results, since a baseline, or in turns."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotloop.cli import bench_ab
from hotloop.cli.bench_run import refuse_empty
from hotloop.cli.command import Command, Context
from hotloop.cli.console import print_json
from hotloop.errors import DataError, OptionError, RunError
from hotloop.options import argument, non_negative, option, positive

if TYPE_CHECKING:
    from hotloop.bench.compare import Row
    from hotloop.bench.results import Record

EPILOG = """A and B are log folders of `hotloop bench run` with --repeats 5 or more: 5 tell 5 % apart under 1 % of
noise, 10 tell 10 % apart under 3 % of it. FAST and SLOW: the 98 % interval of the ratio does not hold 1, and the ratio
is beyond the threshold; SAME: the whole interval is within it; AMBIGUOUS: anything else, fewer than three repeats, and
what the machine's own pace may explain. Where both programs are at hand, --ab runs them in turns, which a machine that
changes its speed disturbs least: `--ab old.yml new.yml`, `--ab f.yml:one f.yml:other`, or two commits of this
repository, `--ab main HEAD --spec f.yml`. The status is 1 on a word of --fail-on, and when a program of --ab fails."""
TURNS = "In turns"


@dataclass(frozen=True)
class Compare:
    """Options of `hotloop bench compare`."""

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
    ab: tuple[str, ...] = option(
        (),
        "Run two programs in turns and compare them: A and B are benchmark files, FILE or FILE:NAME for one of its "
        "benchmarks or variants; with --spec they are commits.",
        metavar="A B",
        group=TURNS,
    )
    spec: Path | None = option(
        None,
        "The benchmark file that both commits run, as it is now; each runs in a work tree of its own that is removed "
        "afterwards.",
        metavar="FILE",
        group=TURNS,
    )
    benchmark: tuple[str, ...] = option(
        (), "Names or globs of benchmarks or variants; all of them by default.", metavar="NAME", group=TURNS
    )
    repeats: int = option(10, "Pairs of runs that count, of each variant.", check=positive, group=TURNS)
    warm_up: int = option(1, "Pairs before them that do not count.", check=non_negative, group=TURNS)
    seed: int = option(0, "Of the lots that say which of a pair runs first.", group=TURNS)
    log_dir: Path | None = option(
        None, "Folder for results and logs, A and B in it; ab_<time> by default.", metavar="DIR", group=TURNS
    )
    timeout: float | None = option(
        None, "Seconds for each run; a shorter one of the entry wins.", check=positive, group=TURNS
    )


def run(config: Compare, context: Context) -> Mapping[str, Any]:
    """Compare, tell, and leave with status 1 where that was asked for."""
    refuse_empty(config, context)
    check(config, context)
    if config.update_baseline:
        return update(config, context)
    if not config.ab:
        return tell(config, context)
    log, failed = bench_ab.measure(config, context)
    return tell(
        replace(config, ab=(), results=(log / "A", log / "B")), context, {"log": log, "broken": failed}
    )


def tell(config: Compare, context: Context, ran: Mapping[str, Any] = {}) -> Mapping[str, Any]:
    """The verdicts on two sets of results; `ran` is what is known of programs that ran for it."""
    from hotloop.bench.compare import COLUMNS, cells, compare, markdown

    rows = compare(*sides(config, context))
    broken = [f"{variant}: {reason}" for variant, reason in ran.get("broken", {}).items()]
    if not rows and broken:
        raise RunError(f"--ab: nothing to compare: {'; '.join(broken)}; logs are in {ran['log']}")
    if not rows:
        raise DataError(f"{config.results[-1]}: nothing to compare; does --metric name one of its metrics?")
    if config.markdown:
        context.say(markdown(rows))
    else:
        context.table(COLUMNS, [cells(row) for row in rows])
    counts = {word: sum(row.word == word for row in rows) for word in dict.fromkeys(row.word for row in rows)}
    hint = "; more repeats narrow the intervals" if "AMBIGUOUS" in counts else ""
    context.say("\n" + ", ".join(f"{count} {word}" for word, count in counts.items()) + hint)
    failed = [row for row in rows if row.word.lower() in config.fail_on]
    result = {"rows": [plain_row(row) for row in rows], "counts": counts, "failed": len(failed), **ran}
    if failed or broken:
        if context.json:
            print_json(result)
        raise SystemExit(1)
    return result


def check(config: Compare, context: Context) -> None:
    """Refuse a number of results that the other options do not fit."""
    bench_ab.check(config, context)
    if config.ab:
        return
    wanted = 1 if config.baseline else 2
    if config.update_baseline and config.baseline is None:
        raise OptionError("--update-baseline needs --baseline FILE, the file to write")
    if len(config.results) != wanted:
        given = "with --baseline one folder of results is" if config.baseline else "two folders, A and B, are"
        raise OptionError(f"RESULTS: {given} needed, not {len(config.results)}")


def sides(config: Compare, context: Context) -> tuple[Any, Any, Any]:
    """A's samples, B's samples and the rules."""
    from hotloop.bench.baselines import load
    from hotloop.bench.compare import Rules, beside
    from hotloop.bench.results import in_turns, partners, read, samples

    new = read(config.results[-1:])
    after = samples(new)
    thresholds: Mapping[str, float] = {}
    if config.baseline is None:
        old = read(config.results[:1])
        before = samples(old)
        if in_turns(old, new):
            after = beside(after, partners(new))
        else:
            warn_of_differences(old, new, context)
    else:
        known, name = load(config.baseline), one_device(new, config.results[-1])
        if name not in known.devices:
            raise DataError(
                f"{config.baseline}: has no baseline of {name}, only of {', '.join(known.devices) or 'nothing'}; "
                "add one with --update-baseline"
            )
        before, thresholds = dict(known.devices[name]), known.thresholds
        ran = {record["variant"] for record in new}
        before = {key: sample for key, sample in before.items() if key[0] in ran}
    rules = Rules(
        config.metric, config.lower_is_better, config.higher_is_better, config.threshold, thresholds
    )
    return before, after, rules


def one_device(records: "Sequence[Record]", path: Path) -> str:
    """The one device that results come from."""
    from hotloop.bench.results import device

    names = sorted({device(record) for record in records})
    if len(names) != 1:
        raise DataError(f"{path}: a baseline is for one device, these results are of {len(names)}: {names}")
    return names[0]


def warn_of_differences(old: "Sequence[Record]", new: "Sequence[Record]", context: Context) -> None:
    """Say what else differs between the two sides, since it may be the reason."""
    from hotloop.bench.results import device

    machines = [{device(record) for record in side} for side in (old, new)]
    if machines[0] != machines[1]:
        names = (" and ".join(sorted(each)) for each in machines)
        context.warn(f"A was measured on {next(names)}, B on {next(names)}")
    specs = [
        {record["benchmark"]: (record.get("spec") or {}).get("sha256") for record in s} for s in (old, new)
    ]
    changed = [name for name, mark in specs[0].items() if specs[1].get(name, mark) != mark]
    if changed:
        context.warn(f"the specification changed between A and B: {', '.join(changed)}")


def update(config: Compare, context: Context) -> Mapping[str, Any]:
    """Take the results as the new baseline of their device."""
    from hotloop.bench.baselines import Baselines, load, save
    from hotloop.bench.compare import Rules
    from hotloop.bench.results import read, samples
    from hotloop.bench.verdict import FEWEST

    assert config.baseline is not None
    records = read(config.results)
    name = one_device(records, config.results[0])
    rules = Rules(config.metric)
    found = {key: sample for key, sample in samples(records).items() if rules.wants(key[1])}
    if not found:
        raise DataError(f"{config.results[0]}: holds no metric of a run that ended well; nothing was written")
    few = sorted({key[0] for key, sample in found.items() if len(sample.values) < FEWEST})
    if few:
        context.warn(f"fewer than {FEWEST} repeats, too few to compare with: {', '.join(few)}")
    before = load(config.baseline) if config.baseline.exists() else Baselines()
    save(config.baseline, before.updated(name, found))
    context.say(f"{config.baseline}: {len(found)} values of {name} written")
    return {"baseline": str(config.baseline), "device": name, "written": len(found)}


def plain_row(row: "Row") -> dict[str, Any]:
    """A row for `--json`."""
    return {**asdict(row), "word": row.word, "reason": row.reason}


COMMAND = Command(
    "compare",
    "Say what is FAST, SLOW, the SAME or AMBIGUOUS between two sets of results.",
    Compare,
    run,
    epilog=EPILOG,
)

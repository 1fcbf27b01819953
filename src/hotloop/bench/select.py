"""Which variants run, in which order, and why others do not. It starts nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from hotloop.bench.model import Benchmark, Variant
from hotloop.errors import OptionError
from hotloop.options import did_you_mean

CONVERGENCE = "trains to convergence; name it, or give --include-convergence"


@dataclass(frozen=True)
class Selected:
    """One variant that was asked for; `skip` says why it is left out all the same."""

    benchmark: Benchmark
    variant: Variant
    skip: str | None = None


def select(
    benchmarks: Mapping[str, Benchmark],
    patterns: Sequence[str] = (),
    tags: Sequence[str] = (),
    include_convergence: bool = False,
) -> list[Selected]:
    """The variants that names or globs (of benchmarks or variants) and tags ask for, in the order of the patterns."""
    chosen: dict[str, Selected] = {}
    if not any(one.variants for one in benchmarks.values()):
        raise OptionError("--spec: the files hold no benchmark; give one whose entries have a cmd")
    if "" in patterns:
        raise OptionError("--benchmark '': an empty name; leave the option out to run everything")
    for pattern in patterns or ("*",):
        for one in _matching(benchmarks, pattern):
            if not tags or set(tags) & set(one.benchmark.tags):
                named = pattern in (one.benchmark.name, one.variant.name)
                before = chosen.get(one.variant.name)
                if before is None or (named and before.skip == CONVERGENCE):
                    chosen[one.variant.name] = _judged(one, named or include_convergence)
    if not chosen:
        raise OptionError(_no_tag(benchmarks, tags))
    return list(chosen.values())


def _matching(benchmarks: Mapping[str, Benchmark], pattern: str) -> list[Selected]:
    """Variants of the benchmarks whose names match, else those whose own names match."""
    everything = [Selected(one, variant) for one in benchmarks.values() for variant in one.variants]
    found = [one for one in everything if fnmatchcase(one.benchmark.name, pattern)]
    found = found or [one for one in everything if fnmatchcase(one.variant.name, pattern)]
    if not found:
        raise OptionError(f"--benchmark {pattern}: matches nothing{did_you_mean(pattern, benchmarks)}")
    return found


def _judged(one: Selected, wanted: bool) -> Selected:
    if one.benchmark.skip:
        return replace(one, skip=one.benchmark.skip)
    return one if wanted or one.benchmark.kind != "convergence" else replace(one, skip=CONVERGENCE)


def _no_tag(benchmarks: Mapping[str, Benchmark], tags: Sequence[str]) -> str:
    known = {tag for one in benchmarks.values() for tag in one.tags}
    return f"--tag {' '.join(tags)}: no benchmark has it{did_you_mean(tags[0], known)}"


@dataclass(frozen=True)
class Job:
    """One run of one variant; repeats count from 1, and those before are warm-up."""

    selected: Selected
    repeat: int

    @property
    def key(self) -> tuple[str, int]:
        """What tells this run from every other one of the same log folder."""
        return self.selected.variant.name, self.repeat

    @property
    def folder(self) -> str:
        """The name of its log folder."""
        name = self.selected.variant.name
        if self.repeat == 1:
            return name
        return f"{name}/repeat-{self.repeat}" if self.repeat > 1 else f"{name}/warm-up-{1 - self.repeat}"


def jobs(selected: Sequence[Selected], repeats: int, warm_up: int, interleave: bool) -> Iterator[Job]:
    """All runs in order: a variant's runs together, or round after round over all variants."""
    rounds = range(1 - warm_up, repeats + 1)
    running = [one for one in selected if one.skip is None]
    if interleave:
        yield from (Job(one, repeat) for repeat in rounds for one in running)
    else:
        yield from (Job(one, repeat) for one in running for repeat in rounds)

"""How often the words of `hotloop bench compare` are right: simulated programs, noise and machines, judged by its code.

Run `python benchmarks/verdicts.py` (a few minutes; `--tries 500` for a glance). Each line is a kind of comparison and
the share of tries that got each word, with its standard error. What is measured are times: a ratio of 1.05 is 5 %
slower.
"""

import argparse
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from hotloop.bench.compare import judge
from hotloop.bench.measure import READINGS
from hotloop.bench.record import MetricSample

RUN_SECONDS = 3.0
FACTOR, RAMP_SECONDS, WAVE_SECONDS, STEP_SECONDS = math.log(2), 180.0, 240.0, 40.0
WORDS = ("FAST", "SLOW", "SAME", "AMBIGUOUS")


@dataclass(frozen=True)
class Case:
    """One kind of comparison; every number is a share, and noise is of the logarithm of a run's time."""

    repeats: int
    ratio: float = 1.0
    noise: float = 0.01
    kind: str = "normal"
    turns: bool = False
    machine: str = "still"
    """What the machine does while programs run in turns: still, ramp, wave or steps, each by up to a factor of 2."""
    pace: float | None = 0.01
    """Noise of each reading of the machine's pace; None for results without."""
    readings: int = 2 * READINGS
    """Readings of the pace beside a run."""
    off: float = 1.0
    """The machine's pace at B over that at A."""
    gain: float = 1.0
    """The power of the pace by which the program's speed changes; 0 for one that computes elsewhere."""
    accelerated: bool = False
    busy: float = 0.0
    """How much the machine's pace, and the program's speed with it, changes from run to run."""


def draw_noise(case, generator, shape):
    """Noise of a run: normal; Student's t of 3 degrees times `noise`, which deviates by 1.7 times that; or normal with
    a delay in one run of twenty (lognormal: half of them above 10 %, one in forty above 70 %)."""
    if case.kind == "t3":
        return case.noise * generator.standard_t(3, shape)
    noise = case.noise * generator.standard_normal(shape)
    if case.kind == "spikes":
        noise += (generator.random(shape) < 0.05) * generator.lognormal(math.log(0.1), 1.0, shape)
    return noise


def draw_machine(kind, generator, count):
    """The logarithm of how long the machine takes, at each of `count` runs that follow each other."""
    times = RUN_SECONDS * np.arange(count)
    if kind == "ramp":
        return generator.choice([-1, 1]) * FACTOR * times / RAMP_SECONDS
    if kind == "wave":
        return FACTOR / 2 * np.sin(2 * np.pi * (times / WAVE_SECONDS + generator.random()))
    if kind == "steps":  # other work that comes and goes
        changes = generator.random(count) < 1 - math.exp(-RUN_SECONDS / STEP_SECONDS)
        levels = generator.uniform(0, FACTOR, count)
        return levels[np.maximum.accumulate(np.where(changes, np.arange(count), 0))]
    return np.zeros(count)


def draw_apart(case, generator):
    """Two samples that were measured one after the other."""
    sides = []
    for speed, machine in ((1.0, 1.0), (1 / case.ratio, case.off)):
        paces = math.log(machine) + case.busy * generator.standard_normal(case.repeats)
        times = draw_noise(case, generator, case.repeats) - math.log(speed) - case.gain * paces
        readings = ()
        if case.pace is not None:
            found = paces[:, None] + case.pace * generator.standard_normal((case.repeats, case.readings))
            readings = tuple(1 / np.exp(-found).mean(1))
        sides.append(sample(np.exp(times), paces=readings, accelerated=case.accelerated))
    return sides


def draw_turns(case, generator):
    """Two samples of programs that ran in turns."""
    count = case.repeats
    runs = draw_noise(case, generator, 2 * count) + draw_machine(case.machine, generator, 2 * count)
    first = generator.integers(0, 2, count)  # whether B is the first of a pair
    places = 2 * np.arange(count)
    a, b = places + first, places + 1 - first
    rounds = tuple(range(count))
    times = RUN_SECONDS * np.arange(2 * count)
    return [
        sample(factor * np.exp(runs[at]), turns="t", rounds=rounds, starts=tuple(times[at]))
        for at, factor in ((a, 1.0), (b, case.ratio))
    ]


def sample(times, **more):
    return MetricSample("b", "v", "seconds", "s", {}, tuple(times), **more)


def count(case, tries, seed=0):
    """How often each word comes up."""
    generator = np.random.default_rng(seed)
    draw = draw_turns if case.turns else draw_apart
    return Counter(judge(*draw(case, generator), "lower").word for _ in range(tries))


def alarms(case, tries, seed=0):
    """The share of FAST and SLOW."""
    found = count(case, tries, seed)
    return (found["FAST"] + found["SLOW"]) / tries


def itself(turns):
    """A program against itself: FAST and SLOW are false alarms."""
    machines = ("still", "ramp", "wave", "steps") if turns else ("still",)
    cases = {}
    for repeats in (5, 10):
        for kind, noise in (("normal", 0.01), ("normal", 0.08), ("t3", 0.03), ("spikes", 0.03)):
            for machine in machines:
                for pace in (None,) if turns else (0.01, 0.03):
                    case = Case(repeats, 1.0, noise, kind, turns=turns, machine=machine, pace=pace)
                    cases[f"itself, {words(case)}"] = case
    return cases


def slower(turns):
    """What must be found."""
    machines = ("still", "ramp", "wave") if turns else ("still",)
    cases = {}
    for ratio, noise, kind, repeats in (
        (1.05, 0.01, "normal", 5),
        (1.05, 0.01, "t3", 5),
        (1.05, 0.01, "normal", 10),
        (1.05, 0.01, "t3", 10),
        (1.1, 0.03, "t3", 10),
        (1.1, 0.03, "spikes", 10),
    ):
        for machine in machines:
            for pace in (None,) if turns else (None, 0.01, 0.03):
                case = Case(repeats, ratio, noise, kind, turns=turns, machine=machine, pace=pace)
                cases[f"{ratio - 1:.0%} slower, {words(case)}"] = case
    return cases


def words(case):
    parts = [f"{case.noise:.0%} {case.kind}", f"{case.repeats} repeats"]
    parts += [f"machine: {case.machine}"] if case.turns else []
    parts += [f"pace noise {case.pace:.0%}"] if case.pace is not None else []
    return ", ".join(parts)


ODD_MACHINES = {
    "itself, machine at 0.97": Case(5, off=0.97),
    "itself, machine at 0.98, pace noise 3 %": Case(5, off=0.98, pace=0.03),
    "itself, machine at 0.97, pace noise 3 %": Case(5, off=0.97, pace=0.03),
    "itself, machine at 0.95, pace noise 3 %": Case(5, off=0.95, pace=0.03),
    "itself, machine at 0.9": Case(5, off=0.9),
    "itself, machine at 0.9, pace noise 3 %": Case(5, off=0.9, pace=0.03),
    "itself, machine at 0.7": Case(5, off=0.7),
    "itself, machine at 0.8, moves with its power of 1.5": Case(5, off=0.8, gain=1.5),
    "itself, machine at 0.8, moves with its power of 2": Case(5, off=0.8, gain=2.0),
    "itself, machine changes by 20 % from run to run": Case(5, busy=0.2),
    "2 times slower, machine changes by 20 % from run to run": Case(5, 2.0, busy=0.2),
    "2 times slower, machine at 0.8": Case(5, 2.0, off=0.8),
    "2 times slower, machine at 0.5": Case(5, 2.0, off=0.5),
    "10 % slower, machine at 1.1": Case(5, 1.1, off=1.1),
    "10 % slower, machine at 1.1, pace noise 3 %": Case(5, 1.1, off=1.1, pace=0.03),
    "10 % slower, on an accelerator, machine at 0.9": Case(5, 1.1, off=0.9, gain=0.0, accelerated=True),
    "10 % slower, on an accelerator, machine at 1.1": Case(5, 1.1, off=1.1, gain=0.0, accelerated=True),
}
ODD_MACHINES |= {
    f"5 % slower, in turns, {repeats} repeats, other work comes and goes": Case(
        repeats, 1.05, turns=True, machine="steps", pace=None
    )
    for repeats in (5, 10, 20)
}
PARTS = {
    "Runs apart": {**itself(False), **slower(False)},
    "The machine is off": ODD_MACHINES,
    "In turns": {**itself(True), **slower(True)},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=10_000)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    tries = options.tries
    for part in options.part:
        cases = PARTS[part]
        print(f"\n{part}\n\n| comparison | {' | '.join(WORDS)} |\n|---|{'---:|' * len(WORDS)}")
        for name, case in cases.items():
            found = count(case, tries)
            shares = (found[word] / tries for word in WORDS)
            cells = (f"{100 * p:.1f} ± {100 * math.sqrt(p * (1 - p) / tries):.1f}" for p in shares)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""What the comparisons with other programs share: how long a turn lasts, and what is said of the rounds.

Both sides run in turn, so that a busy moment of the machine meets both; a round's ratio is their time over ours, so
more is better for us. It must not know what is compared.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hotloop.bench.peers import QUIET, measure_load
from hotloop.engine.device import describe_environment


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def enough(run: Callable[[int], None], target: float) -> int:
    """Iterations that take about `target` seconds."""
    count = 1
    while (took := seconds(partial(run, count))) < target / 4 and count < 2**20:
        count *= 4
    return max(1, round(count * target / took))


def take_turns(
    sides: Mapping[str, tuple[Callable[[int], None], int]], rounds: int, target: float
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Name -> (run so many iterations, their least number) to iterations of a turn, and seconds of one, by round.

    A turn takes about `target` seconds, in whole multiples of the least number; every side has run before.
    """
    lengths = {
        name: least * max(1, round(target / seconds(partial(run, least))))
        for name, (run, least) in sides.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (run, _) in sides.items():
            times[name].append(seconds(partial(run, lengths[name])) / lengths[name])
    return lengths, times


FEWEST_ROUNDS = 3


def rounds_within(limit: float, a_round: float, rounds: int) -> int:
    """As many rounds as asked for, or as fit in `limit` seconds where one takes `a_round`, but three at least."""
    return min(rounds, max(FEWEST_ROUNDS, int(limit / a_round)))


def count_native_calls(program: str) -> int:
    """Calls of the native package in the text of a compiled program; what a loop repeats is counted once."""
    return program.count('custom_call_target="hotloop_')


def native_version() -> str | None:
    """Of hotloop-native where it is installed."""
    try:
        return version("hotloop-native")
    except PackageNotFoundError:
        return None


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median and range of theirs over ours, round by round."""
    values = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(values), "ratio_low": min(values), "ratio_high": max(values)}


def load_before() -> float:
    """Cores that other work keeps busy, and a line where there are any."""
    cores = measure_load()
    if cores > QUIET:
        print(f"other work on this machine ({cores:.1f} cores): a smoke test, not a measurement")
    return cores


def strictly(device: str, exact: bool) -> None:
    """Whether torch computes float32 in float32 on a GPU, or in TF32 as we do by default."""
    import torch

    if device == "cuda":
        torch.set_float32_matmul_precision("highest" if exact else "high")
        torch.backends.cudnn.allow_tf32 = not exact


def save(path: Path, peers: dict[str, str], results: list[dict[str, object]]) -> None:
    """The results as JSON, with the date, this machine, the native package and the peers' versions."""
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "environment": describe_environment(),
        "hotloop_native": native_version(),
        **peers,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")

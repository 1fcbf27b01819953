"""What the comparisons with other programs share: how long a turn lasts, what is said of the rounds, and memory.

Both sides run in turn, so that a busy moment of the machine meets both; a round's ratio is their time over ours, so
more is better for us. Memory is what the timed program needs: of ours, and of any other that jax compiles, as the
compiler counts it; of torch the most that it holds on a GPU meanwhile, and nothing on a CPU, where it does not count.
It must not know what is compared.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command_line import describe_command

from hotloop.bench.peers import QUIET, measure_load
from hotloop.engine.device import describe_environment
from hotloop.machine import search_file


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


def program_bytes(*compiled: Any) -> int:
    """Bytes that a compiled program needs, or the neediest of several that run one after the other: arguments,
    temporaries and outputs, those in an argument's place once. What a native call takes for itself is not in it."""

    def of_one(program: Any) -> int:
        need = program.memory_analysis()
        return int(
            need.argument_size_in_bytes
            + need.output_size_in_bytes
            - need.alias_size_in_bytes
            + need.temp_size_in_bytes
        )

    return max(map(of_one, compiled))


def torch_bytes(device: str) -> int | None:
    """What torch holds on the GPU now; None on a CPU, where it does not count."""
    if device != "cuda":
        return None
    import torch

    return int(torch.cuda.memory_allocated())


def torch_peak(run: Callable[[], object], before: int | None) -> int | None:
    """The most that torch holds on the GPU while `run` runs, its libraries' workspaces included, less the `torch_bytes`
    of before; None on a CPU.

    A CUDA graph has its memory from the moment it is captured, and its replays take none: there `run` captures.
    """
    if before is None:
        return None
    import torch

    torch.cuda.reset_peak_memory_stats()
    run()
    return int(torch.cuda.max_memory_allocated()) - before


def mebibytes(count: int | None) -> str:
    """For a table; empty where they were not counted."""
    return "" if count is None else f"{count / 2**20:,.1f}"


def native_version() -> str | None:
    """Of hotloop-native where it is installed."""
    try:
        return version("hotloop-native")
    except PackageNotFoundError:
        return None


def cpu_family() -> int | None:
    """The processor's, which tells generations of one name apart: of AMD's EPYC 25 is Zen 3 or 4, 26 is Zen 5."""
    found = search_file(r"(?m)^cpu family\s*:\s*(\d+)$", "/proc/cpuinfo")
    return int(found) if found else None


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


def save(
    path: Path,
    peers: Mapping[str, object],
    results: Sequence[Mapping[str, object]],
    environment: Mapping[str, Any] | None = None,
) -> None:
    """The results as JSON, with the date, the command, this machine, the native package and the peers' versions;
    `environment` is given by programs that leave the device to others."""
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "command": describe_command(),
        "environment": environment or describe_environment(),
        "cpu_family": cpu_family(),
        "hotloop_native": native_version(),
        **peers,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")

"""What a training's device time goes to: python benchmarks/kernel_times.py [--case NAME] [--json FILE] [--hlo FILE].

The case's compiled calls (`peers/cnn.py`'s, without its torch) are timed, then one is traced by jax's profiler. Every
kernel of the trace is looked up in the compiled program: what it came from (`op_name`), and the bytes of its operands
and results, each counted once. The table sums them by kind: convolutions forward, of inputs and of kernels, statistics,
normalising and so on, with the bytes a second that this makes. XLA's command buffers are off, or kernels had no names.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from command_line import describe_command

from hotloop.engine.device import describe_environment, setup

SIZES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
}
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
POOL = ("scatter", "reduce_window", "loop_maximum_select")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")


def count_bytes(text: str) -> int:
    """Of all arrays whose types stand in a text."""
    total = 0
    for name, sizes in SHAPE.findall(text):
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        total += SIZES.get(name, 0) * count
    return total


def read_program(text: str) -> dict[str, dict[str, Any]]:
    """Instruction -> its operation, where it came from, the bytes of its operands and results."""
    found: dict[str, dict[str, Any]] = {}
    results: dict[str, int] = {}
    for line in text.splitlines():
        if not (match := INSTRUCTION.match(line)):
            continue
        name, rest = match.groups()
        called = re.search(r"(\)|\}|\]|\s)([a-z][\w-]*)\(", rest)
        head = rest[: called.end()] if called else rest
        results[name] = count_bytes(head)
        inside = rest[called.end() :].split(")")[0] if called else ""
        operands = re.findall(r"%?([\w.-]+)", inside)
        source = re.search(r'op_name="([^"]*)"', rest)
        target = re.search(r'custom_call_target="([^"]*)"', rest)
        found[name] = {
            "operation": called.group(2) if called else "",
            "op_name": source.group(1) if source else "",
            "target": target.group(1) if target else "",
            "shape": head[:200],
            "operands": operands,
        }
    for row in found.values():
        row["bytes"] = count_bytes(row["shape"]) + sum(results.get(name, 0) for name in row.pop("operands"))
    return found


def trace(call: Any) -> Iterator[tuple[str, str, float]]:
    """Kernel, instruction and nanoseconds of every kernel of a call."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        [file] = Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    with warnings.catch_warnings():  # of jaxlib's own types
                        warnings.simplefilter("ignore", DeprecationWarning)
                        stats = dict(event.stats)
                    yield event.name, str(stats.get("hlo_op", "")), event.duration_ns


def kind_of(row: Mapping[str, Any]) -> str:
    """What a kernel is for, by the names of its instruction and of what it came from."""
    instruction, source = row["instruction"], row.get("op_name", "")
    is_back = "transpose(jvp" in source
    if instruction.startswith("cudnn-conv-bw-filter"):
        return "convolutions, of kernels"
    if instruction.startswith("cudnn-conv"):
        return "convolutions, of inputs" if is_back or "bw-input" in instruction else "convolutions, forward"
    if any(word in f"{instruction} {source}" for word in POOL):
        return "max pool"
    if instruction.startswith("input_") or "reduce" in instruction:
        return f"sums of norms, {'back' if is_back else 'forward'}"
    if not instruction.startswith("loop_"):
        return "other"
    return f"element by element, {'back' if is_back else 'forward'}"


def sum_by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Kind -> milliseconds, gigabytes and kernels of an update, the longest first."""
    sums: dict[str, dict[str, float]] = {}
    for row in rows:
        entry = sums.setdefault(kind_of(row), {"milliseconds": 0.0, "gigabytes": 0.0, "kernels": 0.0})
        entry["milliseconds"] += row["us"] / 1e3
        entry["gigabytes"] += row.get("bytes", 0) * row["calls"] / 1e9
        entry["kernels"] += row["calls"]
    return dict(sorted(sums.items(), key=lambda item: -item[1]["milliseconds"]))


def main() -> int:
    options = arguments()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    sys.path.append(str(Path(__file__).parent / "peers"))
    import cnn_checks  # with torch, which the rest of this file does without
    from cnn import CASES, our_updates

    setup("gpu")
    [case] = [each for each in CASES["gpu"] if each.name == options.case]
    run, program = our_updates(case, cnn_checks.started(case))
    run(case.per_call)
    run(case.per_call)
    times = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        run(case.per_call)
        times.append((time.perf_counter() - began) / case.per_call)
    need = program.compiled.memory_analysis()
    text = program.compiled.as_text()
    if options.hlo:
        with gzip.open(options.hlo, "wt") as file:
            file.write(text)
    print(
        f"{1e3 * statistics.median(times):.2f} ms an update, {case.batch / statistics.median(times):,.0f} images/s"
    )
    known = read_program(text)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for kernel, instruction, nanoseconds in trace(lambda: run(case.per_call)):
        entry = sums[kernel, instruction]
        entry[0] += 1
        entry[1] += nanoseconds
    rows = [
        {
            "kernel": kernel[:120],
            "instruction": instruction,
            "calls": calls / case.per_call,
            "us": nanoseconds / 1e3 / case.per_call,
            **known.get(instruction, {}),
        }
        for (kernel, instruction), (calls, nanoseconds) in sums.items()
    ]
    rows.sort(key=lambda row: -row["us"])
    for row in rows[:40]:
        print(
            f"{row['us']:9.1f} {row['kernel'][:60]:60} {row['instruction'][:40]:40} {row.get('op_name', '')[-60:]}"
        )
    kinds = sum_by_kind(rows)
    for kind, entry in kinds.items():
        speed = entry["gigabytes"] / entry["milliseconds"]
        print(f"{kind:28} {entry['milliseconds']:7.2f} ms {entry['gigabytes']:7.2f} GB {speed:5.2f} TB/s")
    print(f"{sum(row['us'] for row in rows) / 1e3:.2f} ms of kernels an update")
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "command": describe_command(),
        "case": case.name,
        "milliseconds": [1e3 * each for each in times],
        "memory_bytes": need.temp_size_in_bytes + need.argument_size_in_bytes,
        "compile_seconds": program.lower_seconds + program.compile_seconds,
        "environment": describe_environment(),
    }
    if options.json:
        options.json.write_text(json.dumps({**about, "kinds": kinds, "kernels": rows}, default=str) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="resnet50-b512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all kernels as JSON")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the compiled program, gzipped")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Seconds from a command to its first update, and what they go to: python benchmarks/first_update.py [--json FILE].

Each case is a real command in a fresh process, on an empty cache and then on the cache that it left (HOTLOOP_CACHE, in
a folder of its own). The parts are the run's own `first_update` record: `start` is Python itself, `options` the command
line, `device` the import of jax and the opening of the device, then imports, data, initial weights, tracing with
lowering, waiting for the compiler (which may have begun before the weights), the first call, and what is in none of
them. `n` are the compilations of the whole run, with their seconds, and `at speed` is the median of its logs but the
first. `--sources A B` compares checkouts in turns; one whose records lack the first update shows its first log, with
the same updates before it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command_line import describe_command

HERE = Path(__file__).parents[1]
PARTS = ("start", "options", "device", "imports", "data", "weights", "lower", "compile", "call", "other")
CASES = {
    "cifar_resnet8": "cnn train --config cifar_resnet8 --num-epochs 4 --no-validation --seed 1 {images} {updates} "
    "--results-dir {folder} --run-name run",
    "estimator": "estimator --generated-data --epochs {epochs} --train-only --log-interval 0.2 "
    "--model-dir {folder}/run",
    "resnet50": "cnn train --model-name resnet50 --dataset imagenet --synthetic-data device --micro-batch-size 512 "
    "--precision 16.32 --num-epochs 4 --weight-updates-per-epoch 32 --no-validation --ckpts-per-epoch 0 --seed 1 "
    "--results-dir {folder} --run-name run",
}


def measure(case: str, source: Path, cache: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of a case: a row without the names of what was run."""
    with tempfile.TemporaryDirectory(prefix="hotloop-first-") as folder:
        epochs = "0.32" if options.updates is None else f"{4 * options.updates * 32}/50000"
        words = CASES[case].format(
            folder=folder,
            epochs=epochs,
            images=f"--dataset-path {options.data}" if options.data else "--synthetic-data device",
            updates=f"--weight-updates-per-epoch {options.updates}" if options.updates else "",
        )
        command = [sys.executable, "-m", "hotloop", *words.split(), "--device", options.device]
        environment = {**os.environ, "HOTLOOP_CACHE": str(cache), "PYTHONPATH": str(source / "src")}
        before, began = os.times(), time.time()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds, after = time.time() - began, os.times()
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
        run = Path(folder) / "run"
        records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        used = (after.children_user + after.children_system) - (before.children_user + before.children_system)
        environment = json.loads((run / "environment.json").read_text())
        return {
            **read_records(records, began),
            "command_seconds": seconds,
            "processor_seconds": used,
            "environment": environment,
        }


def read_records(records: Sequence[Mapping[str, Any]], began: float) -> dict[str, Any]:
    """What the records of a run say of its beginning, for a command that began at that time of the clock."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["event"], []).append(record)
    compiled, logs = kinds.get("compile", []), kinds.get("log", [])
    speeds = [log["throughput"] for log in logs[1:]]
    row: dict[str, Any] = {
        "first_update_seconds": None,
        "first_log_seconds": logs[0]["time"] - began if logs else None,
        "compilations": len(compiled),
        "all_compile_seconds": sum(
            record["lower_seconds"] + record["compile_seconds"] for record in compiled
        ),
        "samples_per_second": statistics.median(speeds) if speeds else None,
    }
    if "first_update" in kinds:
        first = kinds["first_update"][0]
        total = first["time"] - began
        parts = {**dict.fromkeys(PARTS, 0.0), **first["parts"], "start": total - first["seconds"]}
        parts |= {name: first[f"{name}_seconds"] for name in ("lower", "compile", "call")}
        parts["other"] = total - sum(parts.values())
        row |= {"first_update_seconds": total, "parts": parts}
    return row


def show(row: Mapping[str, Any]) -> None:
    def text(value: float | None) -> str:
        return f"{'-' if value is None else f'{value:.1f}':>8}"

    parts = row.get("parts") or dict.fromkeys(PARTS)
    speed = row["samples_per_second"]
    print(
        f"{row['case']:14} {row['source'][-12:]:12} {row['cache']:6}{text(row['first_update_seconds'])}"
        f"{text(row['first_log_seconds'])} |{''.join(text(parts[name]) for name in PARTS)} |"
        f"{row['compilations']:4}{text(row['all_compile_seconds'])}{text(row['processor_seconds'])} "
        f"{'-' if speed is None else f'{speed:,.0f}':>9}",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    columns = "".join(f"{name:>8}" for name in PARTS)
    print(
        f"{'case':14} {'source':12} {'cache':6}{'first':>8}{'log':>8} |{columns} |"
        f"{'n':>4}{'seconds':>8}{'cpu s':>8} {'at speed':>9}"
    )
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for case in options.cases:
            for source in options.sources:
                with tempfile.TemporaryDirectory(prefix="hotloop-cache-") as cache:
                    for state in ("empty", "full"):
                        found = measure(case, source, Path(cache), options)
                        rows.append(
                            {"case": case, "source": str(source), "cache": state, "round": number, **found}
                        )
                        show(rows[-1])
    if options.json:
        environment = rows[0]["environment"]
        kept = [{name: value for name, value in row.items() if name != "environment"} for row in rows]
        about = {"date": time.strftime("%Y-%m-%d"), "command": describe_command(), "environment": environment}
        about["updates"] = options.updates
        options.json.write_text(json.dumps({**about, "results": kept}, indent=1) + "\n", "utf-8")
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in CASES if name != "resnet50"]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=usual, help=f"(default: {usual})")
    parser.add_argument("--sources", nargs="+", type=Path, default=[HERE], metavar="CHECKOUT")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--data", type=Path, help="CIFAR-10's folder, for cifar_resnet8; else one made-up batch"
    )
    parser.add_argument("--updates", type=int, help="weight updates between logs, for slow machines")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

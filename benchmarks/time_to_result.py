"""Whole trainings to a result, by our own commands: python benchmarks/time_to_result.py [--device gpu] [--save FILE].

Each case is a command as people type it, run to its end for a few seeds, each in a process of its own. All figures are
the run's own: seconds of its updates are those that its logs timed (compiled calls alone), `lower` and `compile` are
what the compiler kept it waiting for, `seconds` are from the start of the process to its last record, with loading,
validation and the test; the result is its last validation or test, with the standard error where the run gives one, and
where a case has a target the seconds of updates to the first validation that reached it. The first seed finds no
compiled program, the others what was kept (where the seed splits the data, too, theirs are other programs). Memory is
the most that was in use: of a CPU's whole process, of an accelerator's allocator. A run that had a stand-in for its
data, or a part of them, ends the program.

A peer's time to the same result is not measured: one that computes the same update (peers/*.py compare them) needs as
many, and takes its own time for each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

STAND_IN = "STAND-IN"  # how a run's warning begins that has no real data


@dataclass(frozen=True)
class Case:
    """A training, and the record that tells what it is worth."""

    name: str
    data: str
    words: str
    unit: str
    event: str
    figure: str
    split: str | None = None
    error: str | None = None  # the figure's own standard error
    target: float | None = None
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    tested: int | None = None  # images of the whole test part
    smoke: str = ""  # what makes it short

    @property
    def place(self) -> str:
        """Where the run goes."""
        return (
            "--model-dir {0}/run"
            if self.words.startswith("estimator")
            else "--results-dir {0} --run-name run"
        )


LIKELIHOOD = "--no-save-checkpoints --log-every 10000 --iwae-samples 500 --burn-in 100 --kept 100"
MOVIELENS = ("MovieLens-100K", "users/s", "evaluation")
BINARISED = ("binarised MNIST", "images/s", "evaluation")


def recommender(name: str, words: str, figure: str, error: str | None = None) -> Case:
    data, unit, event = MOVIELENS
    return Case(
        name, data, f"recommender train {words}", unit, event, figure, "test", error, smoke="--epochs 3"
    )


def vcd(name: str, words: str) -> Case:
    data, unit, event = BINARISED
    smoke = "--updates 200 --log-every 100 --iwae-samples 50 --burn-in 10 --kept 10 --test-images 50"
    return Case(
        name, data, f"vcd train {words} {LIKELIHOOD}", unit, event, "log_likelihood", "test", "standard_error",
        seeds=(0,), smoke=smoke,
    )  # fmt: skip


CASES = {
    case.name: case
    for case in (
        Case(
            "mnist", "MNIST", "cnn train --config mnist_resnet8 --ckpts-per-epoch 1", "images/s", "validation",
            "validation_accuracy", target=0.99, seeds=(1, 2, 3), tested=10_000,
            smoke="--num-epochs 2 --weight-updates-per-epoch 10",
        ),
        Case(
            "cifar", "CIFAR-10", "estimator --recipe fast --epochs 10 --evaluate-every 1 --summary-interval none",
            "images/s", "validation", "accuracy", target=0.65, seeds=(1, 2, 3), tested=10_000,
            smoke="--epochs 1/25 --evaluate-every 1/50 --batches-per-step 2",
        ),
        recommender("ratings", "--config ml-100k", "rmse"),
        recommender("ranking", "--config ml-100k-ranking", "ndcg@10", "ndcg@10_se"),
        vcd("vcd", "--updates 30000"),
        vcd("vcd-kl", "--method kl --updates 100000"),
        Case(
            "netflix", "random ratings of Netflix's shape",
            "recommender train --data random --size 512 --batch-size 64 --epochs 2", "users/s", "evaluation", "rmse",
            "validation", seeds=(0, 1), smoke="--epochs 1",
        ),
    )
}  # fmt: skip
USUAL = {
    "cpu": ("mnist", "cifar", "ratings", "ranking", "vcd", "vcd-kl"),
    "gpu": ("ratings", "ranking", "netflix"),
}


def measure(case: Case, seed: int, cache: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run, to its end; and the `environment` that it recorded."""
    from common import load_before

    typed = f"{case.words} {case.smoke}" if options.smoke else case.words
    row = {"case": case.name, "data": case.data, "command": f"hotloop {typed} --seed {seed}", "seed": seed}
    row |= {"cache": "full" if any(cache.iterdir()) else "empty", "load_before": load_before()}
    environment = {**os.environ, "HOTLOOP_CACHE": str(cache)}
    if options.data:
        environment["HOTLOOP_DATA"] = str(options.data)
    with tempfile.TemporaryDirectory(prefix="hotloop-result-") as folder:
        told, run = Path(folder) / "memory.json", Path(folder) / "run"
        words = f"{typed} --seed {seed} --device {options.device} {case.place.format(folder)}".split()
        command = [sys.executable, __file__, "--child", str(told), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{row['command']}: status {done.returncode}\n{done.stderr[-2000:]}")
        refuse_stand_in(case, done.stderr.splitlines())
        records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        config = json.loads((run / "config.json").read_text())
        row |= read_run(records, batch_of(config), case, in_part=options.smoke)
        row["memory_bytes"] = json.loads(told.read_text())
        row["environment"] = json.loads((run / "environment.json").read_text())
    return row


def batch_of(config: Mapping[str, Any]) -> int:
    """Samples of an update, as the families call them."""
    names = ("batch_size", "global_batch_size", "micro_batch_size")
    return int(next(config[name] for name in names if config.get(name)))


def refuse_stand_in(case: Case, said: Sequence[str]) -> None:
    """SystemExit where one of these lines says so: not every family has that among its records, but all print it."""
    for line in said:
        if (words := line.removeprefix("warning: ")).startswith(STAND_IN):
            raise SystemExit(f"{case.name}: {words}; --data names the folder of the real ones")


def read_run(
    records: Sequence[Mapping[str, Any]], batch: int, case: Case, *, in_part: bool = False
) -> dict[str, Any]:
    """What the records of a run say of its result and its time; `in_part`: not all of a set need be there."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["event"], []).append(record)
    refuse_stand_in(case, [warning["message"] for warning in kinds.get("warning", [])])
    found = [
        each
        for each in kinds.get(case.event, [])
        if case.figure in each and case.split in (None, each.get("split"))
    ]
    result, logs, first = found[-1], kinds["log"], kinds["first_update"][0]
    if case.tested and result["samples"] != case.tested and not in_part:
        raise SystemExit(
            f"{case.name}: {result['samples']:,} test images, not {case.tested:,}: a part of {case.data}"
        )
    good = [each for each in found if case.target is not None and each[case.figure] >= case.target]
    return {
        "figure": case.figure,
        "target": case.target,
        "value": result[case.figure],
        "standard_error": result[case.error] if case.error else None,
        "update": result["update"],
        "epoch": result["epoch"],
        "updates": logs[-1]["update"],
        "training_seconds": seconds_of_updates(logs, batch, logs[-1]["update"]),
        "result_seconds": seconds_of_updates(logs, batch, result["update"]),
        "target_seconds": seconds_of_updates(logs, batch, good[0]["update"]) if good else None,
        "target_epoch": good[0]["epoch"] if good else None,
        **{
            name: sum(each[name] for each in kinds["compile"])
            for name in ("lower_seconds", "compile_seconds")
        },
        "seconds": kinds["end"][0]["elapsed"] + first["seconds"] - first["elapsed"],
        "samples_per_second": statistics.median(log["throughput"] for log in logs),
        "unit": case.unit,
        "curve": [[each["update"], each[case.figure]] for each in found],
    }


def seconds_of_updates(logs: Sequence[Mapping[str, Any]], batch: int, until: int) -> float:
    """Of so many updates from the first on, as the logs timed them."""
    seconds, done = 0.0, 0
    for log in logs:
        count = min(log["update"], until) - done
        seconds, done = seconds + count * batch / log["throughput"], done + count
        if done == until:
            return seconds
    raise SystemExit(f"update {until} is in no log: the last is of update {done}")


def run_child(file: Path, words: Sequence[str]) -> int:
    """`hotloop` with these words in this process, and then the most memory that was in use, into the file."""
    sys.argv = ["hotloop", *words]
    from hotloop.__main__ import main as run

    status = run()
    from hotloop.families.cnn.speed import peak_memory

    file.write_text(json.dumps(peak_memory()))
    return status


def turns(cases: Sequence[Case], options: argparse.Namespace) -> Iterator[tuple[Case, int]]:
    """The first seed of each case, then the second of each: whatever ends early has something of all."""
    for number in range(1 if options.smoke else max(len(case.seeds) for case in cases)):
        yield from ((case, case.seeds[number]) for case in cases if number < len(case.seeds))


def save(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    import common

    kept = [{name: value for name, value in row.items() if name != "environment"} for row in rows]
    load = max(row["load_before"] for row in rows)
    common.save(options.save, {"load_before": load}, kept, rows[0]["environment"])


def show(row: Mapping[str, Any]) -> None:
    error = "" if row["standard_error"] is None else f" +- {row['standard_error']:.4g}"
    result = f"{row['value']:.5g}{error}"
    target = "" if row["target_seconds"] is None else f"{row['target_seconds']:.1f}"
    print(
        f"{row['case']:8} {row['seed']:4} {row['cache']:5} {result:>18} {row['updates']:8,} "
        f"{row['training_seconds']:9.1f} {target:>9} {row['lower_seconds'] + row['compile_seconds']:8.1f} "
        f"{row['seconds']:8.1f} {row['samples_per_second']:12,.0f} {row['memory_bytes'] / 2**20:9,.0f}",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--child"]:
        return run_child(Path(arguments[1]), arguments[2:])
    options = parsed(arguments)
    print(
        f"{'case':8} {'seed':>4} {'cache':5} {'result':>18} {'updates':>8} {'their s':>9} {'to target':>9} "
        f"{'compile':>8} {'in all s':>8} {'samples/s':>12} {'MiB':>9}"
    )
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with ExitStack() as stack:
        cases = [CASES[name] for name in options.cases]
        caches = {
            case.name: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotloop-cache-")))
            for case in cases
        }
        for case, seed in turns(cases, options):
            if options.limit is not None and time.monotonic() - began > options.limit:
                print(
                    f"{options.limit:g} s are over: {case.name} with seed {seed} and what follows is left out"
                )
                break
            rows.append(measure(case, seed, caches[case.name], options))
            show(rows[-1])
            if options.save:  # after every run: what ends at a limit keeps what it had
                save(rows, options)
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, help=f"(default: {USUAL})")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with the sets' own, as HOTLOOP_DATA is"
    )
    parser.add_argument("--limit", type=float, metavar="S", help="begin no run after so many seconds")
    parser.add_argument(
        "--smoke", action="store_true", help="one short run of each: that it works, no figures"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    if options.save and not options.save.absolute().parent.is_dir():
        parser.error(f"--save {options.save}: its folder is not there")  # not after the first run
    options.cases = list(dict.fromkeys(options.cases or USUAL[options.device]))
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

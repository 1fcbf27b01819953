"""Is this checkout as fast as another one? Both run the same commands in turns, each run a process of its own.

    git worktree add --detach OTHER COMMIT
    python benchmarks/before_after.py OTHER --device cpu      # OTHER is the version before, this checkout the one after
    python benchmarks/before_after.py OTHER --device gpu --rounds 5 --json OUT.json

Compiling is in none of the figures. Both versions of a command must begin with the same loss (to 1e-3), else it is
not the same work. A run's figure is the median of its calls or logs; the ratio is after / before, its range that of the
rounds. The status is 1 when a ratio is below 0.98.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import describe_command

HERE = Path(__file__).resolve().parents[1]
FLOOR = 0.98
SAME_LOSS = 1e-3  # of the first log: in 16 bits on a GPU two runs of one version part before the last
CNN = "cnn train --synthetic-data device --weight-updates-per-epoch {updates} --num-epochs 1 --seed 1 --no-validation"
COMMANDS = {
    "cpu": {
        "kernel lstm --train": "kernel lstm --train --batch-size 16 --timesteps 25 --hidden-size 128",
        "kernel lstm": "kernel lstm --batch-size 16 --timesteps 25 --hidden-size 128",
        "vcd train": "vcd train --data digits --updates 3000 --no-testing",
        "cnn resnet8 b64": CNN.format(updates=60) + " --config cifar_resnet8 --micro-batch-size 64",
    },
    "gpu": {
        "kernel lstm --train": "kernel lstm --train --batch-size 64 --timesteps 25 --hidden-size 512",
        "kernel lstm": "kernel lstm --batch-size 64 --timesteps 25 --hidden-size 512",
        "kernel rnn --train": "kernel rnn --train --batches-per-step 3000",
        "vcd train": "vcd train --data digits --updates 60000 --no-testing",
        "cnn resnet50 b256": CNN.format(updates=300)
        + " --config imagenet_modern --micro-batch-size 256 --global-batch-size 256",
        "cnn resnet8 b64": CNN.format(updates=8000) + " --config cifar_resnet8 --micro-batch-size 64",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--device", choices=COMMANDS, default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", help="words in the names of the commands to run")
    parser.add_argument("--json", type=Path, help="a file for every run's figures")
    options = parser.parse_args()
    if not (options.before / "src" / "hotloop").is_dir():
        parser.error(f"{options.before} has no src/hotloop: name the folder of a checkout")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    commands = {
        name: words
        for name, words in COMMANDS[options.device].items()
        if not options.cases or any(each in name for each in options.cases)
    }
    if not commands:
        parser.error(
            f"no command of {', '.join(COMMANDS[options.device])} has any of these words in its name"
        )
    slow, results = [], {}
    print(f"{'command':22} {'before':>12} {'after':>12}   after / before (range of {options.rounds} rounds)")
    for name, words in commands.items():
        rounds = []
        for number in range(options.rounds):
            sides = [options.before, HERE] if number % 2 == 0 else [HERE, options.before]
            found = {side: run(side, words, options.device) for side in sides}
            old, new = found[options.before], found[HERE]
            if abs(old["loss"] - new["loss"]) > SAME_LOSS * abs(old["loss"]):
                sys.exit(
                    f"{name}: the loss was {old['loss']} before and is {new['loss']} now: not the same work"
                )
            rounds.append((old["speed"], new["speed"]))
        ratios = [after / before for before, after in rounds]
        before, after = (statistics.median(each) for each in zip(*rounds, strict=True))
        ratio = statistics.median(ratios)
        print(
            f"{name:22} {before:12,.0f} {after:12,.0f}   {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
        results[name] = {"command": words, "before": [r[0] for r in rounds], "after": [r[1] for r in rounds]}
        if ratio < FLOOR:
            slow.append(name)
    if options.json:
        record = {"command": describe_command(), "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if slow:
        sys.exit(f"more than 2 % slower: {', '.join(slow)}")


def run(checkout: Path, words: str, device: str) -> dict[str, float]:
    """Items or images a second, and the loss of the first log."""
    paths = [str(checkout.resolve() / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, "-m", "hotloop", *words.split(), "--device", device, "--json"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{checkout}: hotloop {words}\n{done.stderr}")
        if words.startswith("kernel"):
            result = json.loads(done.stdout.splitlines()[-1])
            return {"speed": result["items_per_second"], "loss": result.get("loss_first", 0.0)}
        (events,) = Path(folder).glob("**/events.jsonl")
        logs = [each for each in map(json.loads, events.read_text().splitlines()) if each["event"] == "log"]
        return {"speed": statistics.median(each["throughput"] for each in logs), "loss": logs[0]["loss"]}


if __name__ == "__main__":
    main()

"""ResNet-50 served, as its clients see it: python benchmarks/serving_load.py [--device cpu] [--json FILE].

For each number format `hotloop export` writes the network with random weights, `hotloop serve` answers from it, and
several processes of `hotloop request` ask for images of 16 a request on the same cores. In turns with them the program
itself is called with 64 images, in a process of its own (peers/serving_raw.py). A rate is what the server counted over
a window in which all clients were sending, which their own seconds must bear out, with no request that failed; a window
lasts until there are so many batches that one more or less is little of it. A share is that rate over the program's in
the same round. The server has compared its answers for every batch size before it is
ready. What is prepared for the formats is prepared side by side; what is timed is timed one after the other.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from serving_raw import Raw

MODEL = "--config resnet50_infer_bs32 --synthetic-data host"
LADDER = "16,32,64"  # what requests of 16 images can be joined to
FORMATS = {"16": "16.16", "32": "32.32"}
PROCESSES, THREADS, ROWS, ALONE_ROWS = 4, 4, 16, 64
SETTLING = 0.4  # seconds of sending before a window begins
ALIKE = 0.2  # by which two seconds may differ where all clients have begun
FOREVER = 10**9  # images: the clients are stopped
BATCHES = 200  # of a window: one more or less, where a window begins and ends, is then 0.5 % of its rate
POLL = 0.1  # seconds between looks at the count
LONGEST = 30.0  # seconds of a window whose server is too slow for so many


@dataclass
class Clients:
    """Processes of `hotloop request`, which pause between the rounds."""

    processes: "list[subprocess.Popen[str]]"

    def signal(self, number: int) -> None:
        for process in self.processes:
            os.killpg(process.pid, number)

    def end(self) -> list[dict[str, Any]]:
        """What each says of its load, on being stopped."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGINT)
        said = [process.communicate(timeout=60)[0] for process in self.processes]
        return [json.loads(text.splitlines()[-1]) for text in said]


@dataclass(frozen=True)
class Ready:
    """A server that answers, and its program in a process by itself."""

    bits: str
    name: str
    commands: list[str]
    url: str
    raw: Raw
    environment: Mapping[str, Any]
    seconds: float

    def stats(self) -> tuple[float, dict[str, int]]:
        """When, and what the server has counted since it started."""
        with urllib.request.urlopen(f"{self.url}/v2/models/{self.name}/stats", timeout=10) as answer:
            (found,) = json.load(answer)["model_stats"]
        return time.perf_counter(), found


def start(words: str, stderr: int | None = None) -> "subprocess.Popen[str]":
    """`hotloop` in a group of its own; its standard error is ours unless it goes elsewhere."""
    command = [sys.executable, "-m", "hotloop", *words.split()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)


def kill(process: "subprocess.Popen[str]") -> None:
    """With all that it started; nothing where it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def prepare(bits: str, place: Path, stack: ExitStack, options: argparse.Namespace) -> Ready:
    """Exported, served and loaded once more by itself; what runs ends with `stack`."""
    began = time.perf_counter()
    export = f"export {MODEL} --precision {FORMATS[bits]} --ladder {LADDER}"
    models, device = place / bits, f"--device {options.device}"
    exported = start(f"{export} {device} -o {models} --json")
    stack.callback(kill, exported)
    said, _ = exported.communicate()
    if exported.returncode:
        raise SystemExit(f"hotloop {export}: status {exported.returncode}")
    folder = Path(json.loads(said.splitlines()[-1])["folder"])
    environment = json.loads((folder / "model.json").read_text())["environment"]
    server = start(f"serve {models} --port 0 --grpc-port none {device}")
    stack.callback(kill, server)
    assert server.stdout is not None
    ready = next((line for line in server.stdout if line.startswith("ready: ")), None)
    if ready is None:
        raise SystemExit("hotloop serve ended before it was ready")
    raw = Raw(folder, options.device)
    stack.callback(raw.end)
    raw.rate(ALONE_ROWS)
    commands = [f"hotloop {export} -o models", "hotloop serve models"]
    seconds = time.perf_counter() - began
    print(f"{bits} bits: exported, served and called by itself after {seconds:.1f} s", flush=True)
    return Ready(bits, folder.parent.name, commands, ready.split()[1], raw, environment, seconds)


def measure(ready: Ready, options: argparse.Namespace) -> dict[str, Any]:
    """The rounds of one format."""
    words = f"request {ready.url} --batch-size {ROWS} --num-threads {THREADS} --num-images {FOREVER}"
    with ExitStack() as stack:
        clients = Clients([start(f"{words} --json", subprocess.PIPE) for _ in range(PROCESSES)])
        for process in clients.processes:
            stack.callback(kill, process)
        await_all(ready, clients)
        began = time.perf_counter()
        rounds = [
            one_round(ready, clients, options.seconds) | {"alone": ready.raw.rate(ALONE_ROWS)}
            for _ in range(options.rounds)
        ]
        lasted = time.perf_counter() - began
        told = clients.end()
    check_clients(told, lasted)
    command = words.replace(ready.url, "URL").replace(str(FOREVER), "N")
    return row_of(ready, rounds, told, [*ready.commands, f"{PROCESSES} x hotloop {command}"])


def await_all(ready: Ready, clients: Clients) -> None:
    """Until all clients have begun and the server answers as much in a second as in the one before."""
    for process in clients.processes:
        await_line(process, f", {THREADS} clients, ")
    rate, until = 0.0, time.monotonic() + 60
    begun = (
        ready.stats()[1]["inference_count"] + 2 * PROCESSES * THREADS * ROWS
    )  # each connection has warmed up by then
    while time.monotonic() < until:
        if ready.stats()[1]["inference_count"] < begun:
            time.sleep(0.1)
            continue
        before, rate = rate, window(ready, 1.0)["rate"]
        if before and abs(rate / before - 1) < ALIKE:
            return
    raise SystemExit("the clients have not come to a steady rate within a minute")


def await_line(process: "subprocess.Popen[str]", words: str) -> None:
    """Until the process says so on its standard error, of which the rest is for its end."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return
    raise SystemExit(f"a client ended before it began: {''.join(said)[-2000:]}")


def one_round(ready: Ready, clients: Clients, seconds: float) -> dict[str, float]:
    """One window with the clients at work; they pause after it."""
    clients.signal(signal.SIGCONT)
    time.sleep(SETTLING)
    found = window(ready, seconds, BATCHES)
    clients.signal(signal.SIGSTOP)
    return found


def window(ready: Ready, seconds: float, fewest: int = 0) -> dict[str, float]:
    """Rows a second, batches and their rows, by the server's count, in `seconds` or until it has run `fewest` batches:
    it counts a batch when all of it is done, so that a window is off by one batch at most."""
    began, before = ready.stats()
    time.sleep(seconds)
    ended, after = ready.stats()
    while after["execution_count"] - before["execution_count"] < fewest and ended - began < LONGEST:
        time.sleep(POLL)
        ended, after = ready.stats()
    rows, batches, padded = (
        after[name] - before[name] for name in ("inference_count", "execution_count", "padded_rows")
    )
    return {
        "rate": rows / (ended - began),
        "batches": batches,
        "rows_a_batch": rows / max(1, batches),
        "padded_rows": padded,
    }


def check_clients(told: list[dict[str, Any]], lasted: float) -> None:
    """The program ends where a request failed, or a client was not sending all the time."""
    for each in told:
        if "failures" not in each:  # it ended with an error before it had any figures
            raise SystemExit(f"a client had no answer: {each.get('error', each)}")
        if each["failures"]:
            raise SystemExit(f"{each['failures']} requests failed: {each['reasons']}")
        if each["seconds"] < lasted:
            raise SystemExit(f"a client sent for {each['seconds']:.1f} s, and the rounds took {lasted:.1f}")


def row_of(
    ready: Ready, rounds: list[dict[str, float]], told: list[dict[str, Any]], commands: list[str]
) -> dict[str, Any]:
    return {
        "model": ready.name,
        "bits": int(ready.bits),
        "processes": PROCESSES,
        "clients": PROCESSES * THREADS,
        "rows": ROWS,
        "alone_rows": ALONE_ROWS,
        "served": middle([each["rate"] for each in rounds]),
        "alone": middle([each["alone"] for each in rounds]),
        "share": middle([each["rate"] / each["alone"] for each in rounds]),
        "p50_ms": middle([each["latency_ms"]["total"]["p50"] for each in told]),
        "rounds": rounds,
        "ready_seconds": ready.seconds,
        "commands": commands,
    }


def middle(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def show(row: Mapping[str, Any]) -> None:
    said = [
        f"{row[name]['median']:{form}} ({row[name]['low']:{form}} to {row[name]['high']:{form}})"
        for name, form in (("served", ",.0f"), ("alone", ",.0f"), ("share", ".2f"), ("p50_ms", ".1f"))
    ]
    batch = statistics.median(each["rows_a_batch"] for each in row["rounds"])
    print(
        f"{row['model']}, {row['bits']} bits: {said[0]} images/s served, {said[1]} by the program itself, share "
        f"{said[2]}; p50 {said[3]} ms, {batch:.0f} images a batch",
        flush=True,
    )


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    from common import load_before, save

    load, began = load_before(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    # A limit's SIGTERM, too, ends what was started; the pool's threads end when what they wait for has.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotloop-serving-")))
        futures = [pool.submit(prepare, bits, place, stack, options) for bits in options.formats]
        for ready in [future.result() for future in futures]:
            rows.append(measure(ready, options))
            show(rows[-1])
            if options.json:  # after every format: what ends at a limit keeps what it had
                save(options.json, {"load_before": f"{load:.2f}"}, rows, ready.environment)
    print(f"{time.perf_counter() - began:.0f} s")


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="bits")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.2, help="of a window at least")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or not 0 < options.seconds < float("inf"):
        parser.error("--rounds and --seconds must be more than 0")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder is not there")  # not after everything
    return options


if __name__ == "__main__":
    main(sys.argv[1:])

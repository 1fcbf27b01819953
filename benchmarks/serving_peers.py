"""Serving against other servers: python benchmarks/serving_peers.py [--rounds 5] [--seconds 1] [--json FILE].

`hotloop serve`, LitServe around the very same exported program, LitServe around torch with the same weights, and
FastAPI around torch as people write it: each a process of its own on this machine, all asked by one and the same client
(peers/serving_client.py) on the same cores, in turns; a server whose turn it is not is stopped (SIGSTOP), so that its
waiting costs nobody anything. Ours is sent the Open Inference Protocol in its binary form, the others raw bytes. Before
anything is timed every server must give the same answers, or the program stops.

Also: our throughput as a share of the raw program, run in a process by itself, at the number of rows that a batch of
the server had; bytes against JSON for photographs; and how long `hotloop serve` takes until it is ready.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peers.serving_client import Outcome, Target, ask, load
from peers.serving_raw import Raw
from peers.serving_servers import WEIGHTS, write_weights

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))  # for what the other benchmarks import, too
MODEL, SIDE = "cifar_resnet8", 32
CLIENTS = (1, 8, 64)
LIMIT = 1e-4  # by which answers may differ between servers
IMAGES = 8  # different ones, sent in turn
START_LIMIT = 90.0  # seconds
PACKAGES = ("litserve", "fastapi", "torch", "uvicorn", "jax")


@dataclass
class Side:
    """A server: its process, what it is sent, and what was measured, by number of clients and round."""

    name: str
    process: "subprocess.Popen[str]"
    target: Target
    rounds: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        self.go_on()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def measure(self, clients: int, seconds: float) -> Outcome:
        """One turn; the program ends where a request failed."""
        load(self.target, clients, min(0.3, seconds))
        outcome = load(self.target, clients, seconds)
        if outcome.failures:
            raise SystemExit(f"{self.name}: {outcome.failures} of {len(outcome.seconds)} requests failed")
        p50, p99 = (1000 * float(np.percentile(outcome.seconds, q)) for q in (50, 99))
        self.rounds.setdefault(clients, []).append({"rate": outcome.rate, "p50": p50, "p99": p99})
        return outcome


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def start(words: Sequence[str], **environment: str) -> "subprocess.Popen[str]":
    """A process in a group of its own; its standard error is ours."""
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def hotloop(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hotloop", *words], check=True, stdout=subprocess.DEVNULL)


def export(model: str, dataset: str, largest: int, place: Path) -> Path:
    """The folder of a network with random weights: neither speed nor agreement asks for good ones."""
    folder = place / model / "1"
    if folder.exists():
        return folder
    named = ("--model-name", model, "--dataset", dataset, "--synthetic-data", "host", "--precision", "32.32")
    hotloop("export", *named, "--micro-batch-size", str(largest), "-o", str(place))
    return folder


def serve_ours(folder: Path, images: np.ndarray, *, binary: bool = True) -> tuple[Side, float, str]:
    """Our server, seconds from the start of its process until it was ready, and what it said of the load."""
    began = time.perf_counter()
    process = start(["-m", "hotloop", "serve", str(folder.parents[1]), "--port", "0"])
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        if line.startswith("loaded "):
            said = line.strip()
        if line.startswith("ready: "):
            break
    else:
        raise SystemExit("hotloop serve ended before it was ready")
    took, port = time.perf_counter() - began, int(line.split()[1].rpartition(":")[2])
    bodies, headers = encode_v2(images, binary)
    target = Target("127.0.0.1", port, f"/v2/models/{folder.parent.name}/infer", headers, bodies)
    return Side("hotloop serve", process, target), took, said


def encode_v2(images: np.ndarray, binary: bool) -> tuple[list[bytes], dict[str, str]]:
    """A body for each image, and their headers."""
    one: dict[str, Any] = {"name": "image", "datatype": "UINT8", "shape": [1, *images.shape[1:]]}
    if not binary:
        bodies = [
            json.dumps({"inputs": [{**one, "data": image.ravel().tolist()}]}).encode() for image in images
        ]
        return bodies, {"Content-Type": "application/json"}
    one["parameters"] = {"binary_data_size": images[0].nbytes}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(text)),
    }
    return [text + image.tobytes() for image in images], headers


def serve_peer(name: str, kind: str, folder: Path, images: np.ndarray, **environment: str) -> Side:
    """One of peers/serving_servers.py, answering."""
    port = free_port()
    process = start([str(HERE / "peers" / "serving_servers.py"), kind, str(folder), str(port)], **environment)
    target = Target(
        "127.0.0.1",
        port,
        "/predict",
        {"Content-Type": "application/octet-stream"},
        [image.tobytes() for image in images],
    )
    side = Side(name, process, target)
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return side
        except OSError:
            time.sleep(0.2)
    side.end()
    raise SystemExit(f"{name}: has not started within {START_LIMIT:g} s")


def outputs_of(body: bytes, classes: int = 10, top: int = 5) -> list[np.ndarray]:
    """Shares, classes and scores: the last bytes of a body, whatever stands before them."""
    parts = np.frombuffer(body[-4 * (classes + 2 * top) :], np.float32)
    shares, numbers, scores = np.split(parts, [classes, classes + top])
    return [shares, numbers.view(np.int32), scores]


def compare(sides: Sequence[Side]) -> None:
    """The program ends where one side's answers are not the first one's."""
    answers = []
    for side in sides:
        side.go_on()
        answers.append([outputs_of(body) for body in ask(side.target)])
        side.pause()
    for side, found in zip(sides, answers, strict=True):
        for mine, theirs in zip(answers[0], found, strict=True):
            apart = max(float(np.abs(a - b).max()) for a, b in ((mine[0], theirs[0]), (mine[2], theirs[2])))
            if not apart <= LIMIT:
                raise SystemExit(f"{side.name}: shares differ by {apart:g}: not the same model, not timed")
    print(f"all answers agree within {LIMIT:g}")


def read_stats(side: Side) -> dict[str, Any]:
    url = f"http://{side.target.host}:{side.target.port}{side.target.path.removesuffix('infer')}stats"
    with urllib.request.urlopen(url, timeout=10) as answer:
        (found,) = json.load(answer)["model_stats"]
    return found


def take_turns(sides: Sequence[Side], raw: Raw, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Every side with every number of clients, round by round; and our shares of the raw program, with most clients."""
    shares = []
    for number in range(rounds):
        for side in sides:
            side.go_on()
            for clients in CLIENTS:
                before = read_stats(side) if side is sides[0] else {}
                outcome = side.measure(clients, seconds)
                if side is sides[0] and clients == CLIENTS[-1]:
                    after = read_stats(side)
            side.pause()
            if side is sides[0]:
                shares.append(share_of_raw(raw, before, after, outcome.rate))
        print(f"round {number + 1} of {rounds}", flush=True)
    return shares


def share_of_raw(
    raw: Raw, before: Mapping[str, Any], after: Mapping[str, Any], rate: float
) -> dict[str, float]:
    """Our throughput over that of the raw program at the rows that batches had, and at the largest batch size."""
    batches = after["execution_count"] - before["execution_count"]
    rows = after["inference_count"] - before["inference_count"]
    padded = after["padded_rows"] - before["padded_rows"]
    mean = rows / batches
    at_mean, at_most = raw.rate(round(mean)), raw.rate(64)
    return {
        "rows_a_batch": mean,
        "padding": padded / (rows + padded),
        "raw_rows_a_second": at_mean,
        "share": rate / at_mean,
        "share_of_64": rate / at_most,
    }


def middle(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median, and lowest to highest."""
    found = middle(values)
    return f"{found['median']:{form}} ({found['low']:{form}} to {found['high']:{form}})"


def tabulate(sides: Sequence[Side]) -> list[str]:
    """Rows of markdown: requests a second and milliseconds, and ours over theirs in the same round."""
    lines = [
        "| server | clients | requests/s | p50, ms | p99, ms | ours over it |",
        "|---|---|---|---|---|---|",
    ]
    for clients in CLIENTS:
        for side in sides:
            own = side.rounds[clients]
            ratios = [a["rate"] / b["rate"] for a, b in zip(sides[0].rounds[clients], own, strict=True)]
            lines.append(
                f"| {side.name} | {clients} | {spread([each['rate'] for each in own])} "
                f"| {spread([each['p50'] for each in own], '.2f')} | {spread([each['p99'] for each in own], '.2f')} "
                f"| {'' if side is sides[0] else spread(ratios, '.2f')} |"
            )
    return lines


def measure_forms(place: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Photographs of 224 x 224 as bytes and as JSON, in turns, by a model that takes next to no time itself."""
    folder = export("toy_model", "imagenet", 8, place / "photographs")
    images = np.random.default_rng(1).integers(0, 256, (2, 224, 224, 3), np.uint8)
    side, *_ = serve_ours(folder, images)
    rates: dict[str, list[float]] = {"binary": [], "json": []}
    try:
        for _ in range(rounds):
            for form, found in rates.items():
                bodies, headers = encode_v2(images, form == "binary")
                target = Target(side.target.host, side.target.port, side.target.path, headers, bodies)
                found.append(load(target, 4, seconds).rate)
    finally:
        side.end()
    ratios = [a / b for a, b in zip(rates["binary"], rates["json"], strict=True)]
    print(f"224 x 224 x 3: binary {spread(rates['binary'])}/s, JSON {spread(rates['json'], '.1f')}/s")
    print(f"binary over JSON: {spread(ratios, '.1f')}")
    return {**rates, "ratio": middle(ratios)}


def measure_start(folder: Path, images: np.ndarray, rounds: int) -> dict[str, Any]:
    """Seconds from the start of the process to `ready`, with a warm cache, and what the server said of the compiler."""
    found = []
    for _ in range(rounds):
        side, took, said = serve_ours(folder, images)
        side.end()
        found.append(took)
        if "none of them by the compiler" not in said:
            raise SystemExit(f"the cache was warm, and yet: {said}")
    print(f"ready after {spread(found, '.2f')} s; {said}")
    return {"seconds": found, **middle(found)}


def measure_peers(
    folder: Path, place: Path, images: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """All servers in turns; prints the table, and gives its figures."""
    if not (place / WEIGHTS).exists():
        write_weights(folder, place)
    wait = {"SERVING_WAIT": options.wait}
    with ExitStack() as stack:
        sides: list[Side] = []

        def add(side: Side) -> None:
            stack.callback(side.end)
            side.pause()
            sides.append(side)

        add(serve_ours(folder, images)[0])
        add(serve_peer("LitServe, same program", "litserve", folder, images, **wait))
        add(serve_peer("LitServe, same program, no batches", "litserve", folder, images, SERVING_ROWS="1"))
        add(serve_peer("LitServe, torch", "litserve-torch", place, images, **wait))
        add(serve_peer("FastAPI, torch, no batches", "fastapi-torch", place, images))
        raw = Raw(folder)
        stack.callback(raw.end)
        raw.rate(1)  # it is ready then
        compare(sides)
        shares = take_turns(sides, raw, options.rounds, options.seconds)
    print("\n".join(tabulate(sides)))
    for name, form in (("share", ".2f"), ("share_of_64", ".2f"), ("rows_a_batch", ".1f"), ("padding", ".2f")):
        print(f"{name}: {spread([each[name] for each in shares], form)}")
    return {"sides": {side.name: side.rounds for side in sides}, "raw": shares}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--wait", default="0.01", help="LitServe's batch_timeout, in seconds")
    parser.add_argument("--parts", default="peers,forms,start", help="what to measure")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--place", type=Path, help="folder for the exported models, which the next run finds")
    options = parser.parse_args()
    with ExitStack() as stack:
        place = options.place or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = export(MODEL, "cifar10", 64, place / "models")
        images = np.random.default_rng(0).integers(0, 256, (IMAGES, SIDE, SIDE, 3), np.uint8)
        results = {}
        for part in options.parts.split(","):
            if part == "peers":
                results[part] = measure_peers(folder, place, images, options)
            elif part == "forms":
                results[part] = measure_forms(place, options.rounds, options.seconds)
            else:
                results[part] = measure_start(folder, images, options.rounds)
    if options.json:
        from common import save

        save(options.json, {name: version(name) for name in PACKAGES}, results)


if __name__ == "__main__":
    main()

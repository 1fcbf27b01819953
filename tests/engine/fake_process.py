"""A process of a launch without jax: it does what its words say for its number, such as `1=note:training,kill`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

NUMBER = os.environ["HOTLOOP_PROCESS"]
NOTES = Path(os.environ["HOTLOOP_NOTES"])


def note(phase: str, update: str = "0", *resume: str) -> None:
    part = NOTES / f"{NUMBER}.part"
    part.write_text(
        json.dumps({"phase": phase, "update": int(update), "resume": resume, "time": time.time()})
    )
    part.replace(NOTES / f"{NUMBER}.json")


def keep_noting(phase: str, seconds: str) -> None:
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        note(phase, str(int(1000 * time.monotonic())))
        time.sleep(0.1)


def start_worker() -> None:
    """A process of its own that waits for ever, in the same group."""
    worker = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    print(f"worker {worker.pid}", flush=True)


def end_when_told(status: str, after: str = "0") -> None:
    """Save for a while when a signal comes, then leave as hotloop does."""

    def leave(number: int, frame: object) -> None:
        note("saving")
        time.sleep(float(after))
        print(f"saved {signal.Signals(number).name}", flush=True)
        if int(status) < 0:
            os.kill(os.getpid(), -int(status))
        os._exit(int(status) if int(status) else 128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def wait_for(number: str, phase: str) -> None:
    """Until the note of another process says so."""
    while True:
        try:
            if json.loads((NOTES / f"{number}.json").read_text())["phase"] == phase:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.02)


def resumed_or(act: str, value: str = "") -> None:
    """Something that a process does only as long as it is not resumed."""
    if "--resume" not in sys.argv:
        ACTS[act](*value.split())


def listen() -> None:
    """Take the port that process 0 was given, or fail as it does."""
    with socket.socket() as probe:
        try:
            probe.bind(("", int(os.environ["HOTLOOP_COORDINATOR"].rpartition(":")[2])))
        except OSError:
            print("hotloop: error: its port is in use", flush=True)
            os._exit(2)


ACTS = {
    "listen": listen,
    "note": note,
    "keep_noting": keep_noting,
    "say": lambda *words: print(*words, flush=True),
    "error": lambda *words: print("hotloop: error:", *words, flush=True),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "kill": lambda number="9": os.kill(os.getpid(), int(number)),
    "exit": lambda status: os._exit(int(status)),
    "worker": start_worker,
    "told": end_when_told,
    "deaf": ignore_signals,
    "wait_for": wait_for,
    "first": resumed_or,
    "stdin": lambda: print(repr(sys.stdin.read()), flush=True),
    "environment": lambda name: print(os.environ.get(name), flush=True),
    "flood": lambda count: print("\n".join(f"line {n}" for n in range(int(count))), flush=True),
}

if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    for act in given.get(NUMBER, given.get("all", "")).split(","):
        name, *values = act.split(":")
        if name:
            ACTS[name](*values)

"""An exported program called by itself, without a server: what any server of it can reach at most.

`Raw` starts this file as a process of its own, `python benchmarks/peers/serving_raw.py FOLDER`, which reads numbers of
rows from its standard input and writes the seconds of a call: the median of calls that follow each other for a third of
a second, with their inputs on the way to the device and their outputs on the way back.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 0.35


class Raw:
    """The process; between two questions it waits for its input, and takes no time."""

    def __init__(self, folder: Path, device: str = "auto"):
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def rate(self, rows: int) -> float:
        """Rows a second in calls of so many, one after the other; the first of a number compiles, and is not timed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{rows}\n")
        self.process.stdin.flush()
        return rows / float(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def answer_questions(folder: Path, device: str) -> None:
    """Number of rows on standard input -> seconds of a call."""
    from hotloop.engine.device import setup
    from hotloop.serve.artefact import Artefact
    from hotloop.serve.load import make_batches

    setup(device)
    artefact = Artefact.open(folder)
    call = artefact.load()
    for line in sys.stdin:
        batch, *_ = make_batches(artefact.signature, int(line))
        call(batch)
        times: list[float] = []
        while sum(times) < SECONDS:
            began = time.perf_counter()
            call(batch)
            times.append(time.perf_counter() - began)
        print(statistics.median(times), flush=True)


if __name__ == "__main__":
    answer_questions(Path(sys.argv[1]), sys.argv[2])

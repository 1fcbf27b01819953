"""A program of the tests: serve a model, load it anew many times, and say what each time left in memory.

    python reloading.py FOLDER TIMES SIZE

It does what `hotloop serve` does with memory: threads share two places of it, and Python's collector leaves alone what
was there before. FOLDER is a version, SIZE the numbers in its largest weight.
"""

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

from hotloop.engine.interrupt import StopRequest
from hotloop.serve import server
from hotloop.serve.models import share_memory
from hotloop.serve.watch import Watcher


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(version: Path, times: int, size: int) -> None:
    share_memory()
    import jax

    memory, alive, said, stop = [], [], [], StopRequest()

    def count_large() -> int:
        return sum(each.size == size for each in jax.live_arrays())

    async def reload_many_times(self: Watcher, seconds: float) -> None:
        for number in range(times):
            os.utime(version / "model.json", ns=(number, number))
            await self.look()
            await asyncio.sleep(0.03)  # the old one's end
            memory.append(resident())
            alive.append(count_large())
        stop.number = 15
        await asyncio.sleep(60)

    Watcher.watch = reload_many_times
    folder = version.parent.parent
    server.serve(server.Service([folder], watch=1.0), server.bind("127.0.0.1", 0), stop, said.append)
    loaded = sum(line.startswith("loaded large") for line in said)
    print(json.dumps({"memory": memory, "alive": alive, "loaded": loaded, "left": count_large()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

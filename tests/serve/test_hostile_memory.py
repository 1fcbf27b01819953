"""A server's memory after ten thousand hostile requests of every kind."""

import asyncio
import resource
import time
from collections import Counter
from pathlib import Path

import pytest
from hostile_traffic import check_statuses, kinds, send_one
from served_process import ServedProcess
from small_models import small_image, write_uncompared

from hotloop.serve import app

CLIENTS = 16
MODEL = "shade"
LIGHT = 300_000  # bytes of a request that is read at once


@pytest.fixture
def served(tmp_path):
    write_uncompared(tmp_path / "models", small_image())
    with ServedProcess(tmp_path / "models") as found:
        yield found


def resident(process):
    """Bytes of memory that a process holds, after the while in which it gives some back."""
    time.sleep(app.TIDY + 1)
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def flood(port, requests, count):
    """So many hostile requests as fast as they are answered; how many got which status, by kind."""
    numbers, statuses, is_over = iter(range(count)), {}, asyncio.Event()
    is_over.set()  # nobody dawdles: that would take as long as they like

    async def send():
        for number in numbers:
            kind, request = requests[number % len(requests)]
            status = await send_one(port, kind, request, is_over)
            statuses.setdefault(kind, Counter())[status] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(send())
    return statuses


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read a process's memory from")
def test_memory_is_what_it_was_after_ten_thousand_hostile_requests(served):
    every = kinds(MODEL)
    light = [each for each in every.items() if len(each[1]) < LIGHT and not each[0].startswith("large")]
    asyncio.run(flood(served.port, light, 3_000))
    asyncio.run(flood(served.port, list(every.items()), 2 * len(every)))
    before = resident(served.process)
    asyncio.run(flood(served.port, list(every.items()), 2 * len(every)))
    statuses = asyncio.run(flood(served.port, light, 10_000))
    check_statuses(statuses)
    after = resident(served.process)
    assert abs(after - before) <= 0.05 * before, (before, after)

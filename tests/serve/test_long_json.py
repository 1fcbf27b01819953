"""Long JSON: what is read and written elsewhere is the same, holds nobody up, and cannot take every place."""

import asyncio
import json
import os
import signal
import time

import fake_models
import httpx2
import numpy as np
import pytest

from hotloop.serve.app import Application, Limits
from hotloop.serve.long_json import LongJson
from hotloop.serve.refusal import QueueFull, Unready

ROWS = 4000
LONGER = b"[" + b"1," * 10_000 + b"1]"
X = np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3)


@pytest.fixture(scope="module")
def reader():
    found = LongJson(1 << 20, 2)
    yield found
    found.close()


def test_a_long_request_and_its_long_answer_are_those_of_short_ones_and_no_loop_waits(monkeypatch):
    async def ask():
        models, _ = fake_models.make_models()
        app = Application(models, models.figures, Limits())
        calls = []

        async def count(function, argument, call=app.long_json._call):
            calls.append(function.func.__name__)
            return await call(function, argument)

        monkeypatch.setattr(app.long_json, "_call", count)
        transport = httpx2.ASGITransport(app.build())
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            inputs = [{"name": "x", "datatype": "FP32", "shape": [ROWS, 3], "data": X.tolist()}]
            answer = await client.post("/v2/models/rows/infer", json={"inputs": inputs})
            np.testing.assert_array_equal(
                answer.json()["outputs"][0]["data"], (4 * X).ravel(), err_msg=answer.text[:200]
            )
            answer = await client.post("/v1/models/rows:predict", json={"instances": X.tolist()})
            np.testing.assert_array_equal(answer.json()["predictions"], 4 * X)
            wrong = await client.post("/v1/models/rows:predict", json={"instances": X[:, :2].tolist()})
            assert wrong.status_code == 400 and "x: " in wrong.json()["error"]
            few = await client.post("/v1/models/rows:predict", json={"instances": X[:2].tolist()})
            np.testing.assert_array_equal(few.json()["predictions"], 4 * X[:2])
        app.long_json.close()
        names = ["read_request", "write_whole_answer", "read_predict", "write_whole_answer", "read_predict"]
        assert calls == names

    asyncio.run(ask())


def test_the_loop_goes_on_meanwhile_and_more_than_may_wait_are_refused(reader):
    async def ask():
        first = asyncio.create_task(reader.read(_count, json.dumps(list(range(100_000))).encode()))
        second = asyncio.create_task(reader.read(_count, b"[1]"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 requests of long JSON wait already") as refused:
            await reader.read(_count, LONGER)
        assert refused.value.headers == {"Retry-After": "1", "Connection": "close"} and reader.is_full
        gaps, before = [], time.perf_counter()
        while not first.done():
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - before)
            before += gaps[-1]
        assert (await first, await second) == (100_000, 1) and len(gaps) > 10
        with pytest.raises(QueueFull):  # by bytes
            await asyncio.gather(reader.read(_count, b"[1]"), reader.read(_count, b" " * (1 << 20)))
        assert await reader.read(_count, b"[1, 2, 3]") == 3

    asyncio.run(ask())


def test_a_process_that_has_ended_is_said_and_the_next_one_reads(reader):
    async def ask():
        assert await reader.read(_count, b"[1]") == 1
        (process,) = reader._pool._processes
        os.kill(process, signal.SIGTERM)  # which it does not hear: that is for the server
        assert await reader.read(_count, b"[1]") == 1
        os.kill(process, signal.SIGKILL)
        with pytest.raises(Unready, match="has ended; try again"):
            for _ in range(100):
                await reader.read(_count, b"[1]")
                await asyncio.sleep(0.01)
        assert await reader.read(_count, b"[1, 2]") == 2
        # The server's end does not wait for what it works at.
        working = asyncio.create_task(reader.read(_sleep, b"60"))
        await asyncio.sleep(0.05)
        reader.close()
        with pytest.raises(Unready, match="has ended"):
            await asyncio.wait_for(working, 10)

    asyncio.run(ask())


def _sleep(body):
    time.sleep(float(body))


def _count(body):
    return len(json.loads(body))

"""How a server ends: what hangs, who waits in the backlog, who does not read, and many who send until the end."""

import http.client
import json
import random
import signal
import socket
import threading
import time
from collections import Counter

import pytest
from served_process import ServedProcess
from small_models import small, write_uncompared

from hotloop.engine.interrupt import StopRequest
from hotloop.serve import server

ROW = json.dumps({"instances": [[1, 2, 3, 4]]}).encode()
PREDICT = "/v1/models/small:predict"
CLIENTS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("ends") / "models"
    write_uncompared(found, small(), ladder=(1, 2))
    return found


def serve_until_ready(folder, then=lambda: None, **more):
    """A server in this process that is asked to end as soon as it is ready and `then` has returned; what it said."""
    stop, said = StopRequest(), []

    def say(text):
        said.append(text)
        if text.startswith("ready"):
            then()
            stop.number = signal.SIGTERM

    listening = more.pop("listening", None) or server.bind("127.0.0.1", 0)
    server.serve(server.Service([folder], **more), listening, stop, say)
    return said


def test_connections_that_wait_when_the_door_closes_are_served(folder, monkeypatch):
    listening, waiting, close_door = server.bind("127.0.0.1", 0), [], server.Life._close_door

    async def close_after_a_few_have_come(self, uvicorn_server):
        for _ in range(3):  # the loop has had no time to accept them
            raw = socket.create_connection(listening.getsockname(), timeout=5)
            raw.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            waiting.append(raw)
        await close_door(self, uvicorn_server)

    monkeypatch.setattr(server.Life, "_close_door", close_after_a_few_have_come)
    assert serve_until_ready(folder, listening=listening)[-1] == "ended: every request was answered"
    for raw in waiting:
        with raw:
            assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_who_does_not_read_an_answer_keeps_no_server_and_is_not_lost(folder):
    listening = server.bind("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the system takes as little as it can
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)

        def ask():
            raw.connect(listening.getsockname())
            raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")

        began = time.monotonic()
        said = serve_until_ready(folder, ask, listening=listening, grace=0.3)
        assert said[-1] == "ended: every request was answered"
        assert time.monotonic() - began < 10
        raw.settimeout(5)
        received = b""
        try:
            while piece := raw.recv(100_000):
                received += piece
        except ConnectionResetError:
            pass
        assert received.startswith(b"HTTP/1.1 200 ")
        assert len(received) < 8_000, "it has got all of it, and shows nothing"


HANGING = """
import sys, time
from hotloop.engine import exported_program
call = exported_program.LoadedProgram.__call__
def hang(self, inputs):
    if (inputs["x"] == 9.0).all():
        time.sleep(600)
    return call(self, inputs)
exported_program.LoadedProgram.__call__ = hang
from hotloop.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_device_call_that_hangs_keeps_no_server(folder):
    served = ServedProcess(folder, "--grace", "1", program=("-c", HANGING, "serve"))
    with served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        connection.request("POST", PREDICT, json.dumps({"instances": [[9, 9, 9, 9]]}))
        time.sleep(0.5)
        began = time.monotonic()
        status, errors = served.stop()
        assert time.monotonic() - began < 8
        assert status == 2
        assert errors == "hotloop: error: --grace 1: 1 request was not answered in that time\n"
        answer = connection.getresponse()
        assert answer.status == 503 and "the server is ending" in json.load(answer)["error"]
        connection.close()


def send_until_refused(port, seed, statuses, failures):
    """One client: new connections, a few requests over each, until there is none to be had."""
    generator = random.Random(seed)
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.connect()
        except ConnectionRefusedError:
            return
        except OSError as error:
            failures.append(f"while connecting: {error!r}")
            return
        try:
            for _ in range(generator.randint(1, 5)):
                connection.request("POST", PREDICT, ROW)
                answer = connection.getresponse()
                answer.read()
                statuses[answer.status] += 1
                if answer.will_close:
                    break
        except (http.client.HTTPException, OSError) as error:
            failures.append(repr(error))
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("drain_delay", [0, 1])
def test_sigterm_under_the_load_of_many_loses_no_accepted_request(folder, drain_delay):
    with ServedProcess(folder, "--drain-delay", drain_delay, "--max-delay-ms", 5) as served:
        statuses, failures = Counter(), []
        threads = [
            threading.Thread(target=send_until_refused, args=(served.port, seed, statuses, failures))
            for seed in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        time.sleep(1)
        before, began = statuses.total(), time.monotonic()
        ended = served.stop()
        took = time.monotonic() - began
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert ended == (0, "") and drain_delay <= took < 15
    assert failures == [] and set(statuses) == {200}
    assert before > 100 and statuses.total() > before + 50 * drain_delay

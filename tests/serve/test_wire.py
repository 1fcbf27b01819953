"""Heads of requests over a real connection: too long, too slow, no HTTP; and those that are none of it."""

import asyncio
import json
import resource
import socket
from contextlib import suppress
from functools import partial

import pytest
from uvicorn.server import ServerState

from hotloop.serve import wire

MEGABYTES = 40  # more than a system's buffers take of an answer that nobody reads


class App:
    """Answers `ok`, at once or, at /wait, when `is_over`; at /long with many bytes."""

    def __init__(self):
        self.is_over = asyncio.Event()

    async def __call__(self, scope, receive, send):
        while scope["path"] != "/unread" and (await receive()).get("more_body"):
            pass
        if scope["path"] == "/wait":
            await self.is_over.wait()
        body = b"x" * (MEGABYTES << 20) if scope["path"] == "/long" else b"ok"
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


def serve(act, most=100):
    """What `act(connect, app)` gives; `connect()` opens a connection to the protocol on the loop that a server has."""
    app = App()
    config = wire.configure(app, wire.ConnectionLimit(most))

    async def main():
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),
            "127.0.0.1",
            0,
        )
        writers = []

        async def connect():
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writers.append(writer)
            return reader, writer

        try:
            return await act(connect, app)
        finally:
            for writer in writers:
                writer.close()
            server.close()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(main())


async def read_all(reader):
    """What comes until the server closes, which is said at the end, or for half a second."""
    found = b""
    try:
        async with asyncio.timeout(0.5):
            while data := await reader.read(1 << 16):
                found += data
            found += b"<closed>"
    except (TimeoutError, ConnectionError):
        pass
    return found


def ask(*pieces, pause=0.0):
    """All that comes back until the server closes, or for half a second after the last piece."""

    async def act(connect, app):
        reader, writer = await connect()
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause)
        return await read_all(reader)

    return serve(act)


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def error_of(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2].removesuffix(b"<closed>"))["error"]


def test_requests_one_after_the_other_are_answered():
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 700000\r\n\r\n"
    answer = ask(*([head, b"x" * 700_000] * 3), pause=0.05)
    assert answer.count(b"200 OK") == 3 and b"<closed>" not in answer


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET / HTTP/1.1\r\nX-Long: "], ids=["an endless address", "an endless header"]
)
def test_a_head_over_the_limit_is_refused(start, monkeypatch):
    monkeypatch.setattr(wire, "HEAD_BYTES", 4000)
    answer = ask(start, *[b"a" * 1000] * 5, pause=0.01)
    assert answer.startswith(b"HTTP/1.1 431 ") and answer.endswith(b"<closed>")
    assert "over the limit of 4,000 bytes" in error_of(answer)


def test_a_head_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.05)
    answer = ask(b"GET / HTTP/1.1\r\nHost: x\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ") and "have not come within 0.05 s" in error_of(answer)
    assert ask() == b"<closed>"


def test_the_second_head_of_a_connection_is_looked_at_too(monkeypatch):
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.05)
    answer = ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTT", pause=0.02)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in answer


def test_what_is_no_http_gets_a_sentence_like_anything_else_and_nothing_is_logged(caplog):
    answer = ask(b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and error_of(answer) == "the request is not HTTP"
    upgrade = get("/")[:-2] + b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert ask(upgrade).startswith(b"HTTP/1.1 200 ")
    assert caplog.records == []


@pytest.mark.parametrize("rest", [b"x", b"\r\n"], ids=["a body that nobody wanted", "white space"])
def test_what_comes_after_an_answer_does_not_keep_a_connection_for_ever(rest, monkeypatch):
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.1)
    body = b"Content-Length: 9\r\n\r\n" if rest == b"x" else b"\r\n"
    answer = ask(get("/unread")[:-2] + body, rest, pause=0.02)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"ok<closed>")


def test_the_connection_that_was_idle_longest_makes_room_for_a_new_one():
    async def act(connect, app):
        async def ask(connection):
            connection[1].write(get("/"))
            return await asyncio.wait_for(connection[0].readuntil(b"ok"), 1)

        first, second, third = [await connect() for _ in range(3)]
        for each in (second, third, first):
            await ask(each)
        fourth = await connect()
        await ask(fourth)
        assert await second[0].read() == b""
        return [await ask(each) for each in (first, third, fourth)]

    assert all(each.startswith(b"HTTP/1.1 200 ") for each in serve(act, most=3))


def test_where_all_are_busy_a_new_connection_is_refused():
    async def act(connect, app):
        busy = [await connect(), await connect()]
        busy[0][1].write(get("/wait"))
        busy[1][1].write(b"POST / HTTP/1.1\r\n")  # its head comes
        await asyncio.sleep(0.02)
        refused = await read_all((await connect())[0])
        app.is_over.set()
        answer = await asyncio.wait_for(busy[0][0].readuntil(b"ok"), 1)
        reader, writer = await connect()  # the first is idle now
        writer.write(get("/"))
        return refused, answer, await asyncio.wait_for(reader.readuntil(b"ok"), 1)

    refused, *answers = serve(act, most=2)
    assert refused.startswith(b"HTTP/1.1 503 ") and refused.endswith(b"<closed>")
    assert b"retry-after: 1" in refused and error_of(refused).startswith("2 connections are open")
    assert all(each.startswith(b"HTTP/1.1 200 ") for each in answers)


@pytest.mark.parametrize("files, most", [(1000, 800), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)])
def test_connections_leave_some_of_the_files_that_a_process_may_open(files, most, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    assert wire.ConnectionLimit.of_system().most == most


@pytest.mark.parametrize("connection", [b"", b"Connection: close\r\n"], ids=["kept", "closed after it"])
def test_a_client_that_does_not_read_its_answer_is_dropped(connection, monkeypatch):
    monkeypatch.setattr(wire, "ANSWER_SECONDS", 0.05)

    async def act(connect, app):
        reader, writer = await connect()
        writer.write(get("/long")[:-2] + connection + b"\r\n")
        writer.transport.pause_reading()
        await asyncio.sleep(0.2)
        writer.transport.resume_reading()
        with suppress(ConnectionError):
            return len(await reader.read())
        return 0

    assert serve(act) < MEGABYTES << 20


class Unread:
    """A transport of which a client reads when it is told to, and a loop whose timers are called by hand."""

    def __init__(self, **about):
        self.size, self.is_aborted, self.timers, self.about = 1000, False, [], about

    def get_extra_info(self, name):
        return self.about.get(name)

    def get_write_buffer_size(self):
        return self.size

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True

    def call_later(self, delay, function, *arguments):
        self.timers.append((delay, partial(function, *arguments)))
        return asyncio.TimerHandle(0, function, arguments, self)

    def _timer_handle_cancelled(self, handle):
        self.timers.clear()

    def get_debug(self):
        return False


def make_protocol(fake):
    config = wire.configure(App(), wire.ConnectionLimit(1))
    protocol = config.http(config=config, server_state=ServerState(), app_state={}, _loop=fake)
    protocol.connection_made(fake)
    return protocol


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_a_client_over_tls_is_dropped_by_the_system():
    with socket.socket() as link:
        make_protocol(Unread(sslcontext=object(), socket=link))
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * wire.ANSWER_SECONDS


def test_a_client_that_reads_slowly_is_waited_for_as_long_as_it_reads():
    fake = Unread()
    protocol = make_protocol(fake)
    protocol._stop_timer()  # that of the head
    protocol.pause_writing()
    for unread in (900, 100, 99):
        fake.size = unread
        ((delay, look),) = fake.timers
        fake.timers = []
        look()
        assert delay == wire.ANSWER_SECONDS and not fake.is_aborted
    protocol.resume_writing()
    assert fake.timers == []
    protocol.pause_writing()
    fake.timers[0][1]()
    assert fake.is_aborted

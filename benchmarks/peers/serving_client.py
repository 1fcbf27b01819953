"""One load client for every server that is compared: closed loop, one thread, as little work of its own as can be.

Requests are bytes that were put together before; answers are read by httptools, and each must have status 200 and as
many bytes as the first one. Client and server share the cores, so what is spent here is lost to both.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httptools
import uvloop

OK = 200


@dataclass(frozen=True)
class Target:
    """Where a server listens, and the bodies that it is sent in turn."""

    host: str
    port: int
    path: str
    headers: Mapping[str, str]
    bodies: Sequence[bytes]

    def requests(self) -> list[bytes]:
        """Whole requests as they go over the wire."""
        shared = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        return [
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{shared}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
            for body in self.bodies
        ]


@dataclass
class Outcome:
    """Seconds of each answer, of the whole, and how many answers were none."""

    seconds: list[float] = field(default_factory=list)
    wall: float = 0.0
    failures: int = 0

    @property
    def rate(self) -> float:
        """Requests answered a second."""
        return len(self.seconds) / self.wall


class Connection(asyncio.Protocol):
    """Sends the next request when the answer to the last one has come, until the time is over."""

    def __init__(self, requests: Sequence[bytes], first: int, until: float, outcome: Outcome):
        """`first` is the request to begin with, `until` a time of `perf_counter` after which none is sent."""
        self._requests, self._next, self._until, self._outcome = requests, first, until, outcome
        self._parser = httptools.HttpResponseParser(self)
        self._sent = 0.0
        self._size = 0
        self._wanted: int | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._size = 0
        self._sent = time.perf_counter()
        self._transport.write(self._requests[self._next % len(self._requests)])
        self._next += 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._size += len(body)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self._wanted = self._wanted or self._size
        if self._parser.get_status_code() == OK and self._size == self._wanted:
            self._outcome.seconds.append(now - self._sent)
        else:
            self._outcome.failures += 1
        if now < self._until:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server has closed a connection"))


async def _load(target: Target, clients: int, seconds: float) -> Outcome:
    loop, outcome, requests = asyncio.get_running_loop(), Outcome(), target.requests()
    started = time.perf_counter()
    connections = []
    for number in range(clients):
        _, connection = await loop.create_connection(
            lambda number=number: Connection(requests, number, started + seconds, outcome),
            target.host,
            target.port,
        )
        connections.append(connection.done)
    await asyncio.gather(*connections)
    outcome.wall = time.perf_counter() - started
    return outcome


def load(target: Target, clients: int, seconds: float) -> Outcome:
    """Send for so many seconds over so many connections at once; the last answers are waited for, and counted."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_load(target, clients, seconds))


async def _ask(target: Target) -> list[bytes]:
    answers = []
    for request in target.requests():
        reader, writer = await asyncio.open_connection(target.host, target.port)
        writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        whole = await reader.read()
        head, _, body = whole.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{target.path}: {head.decode()} {body[:300].decode(errors='replace')}")
        answers.append(body)
        writer.close()
    return answers


def ask(target: Target) -> list[bytes]:
    """The body of the answer to each request, one after the other; it ends the program where one is refused."""
    return asyncio.run(_ask(target))

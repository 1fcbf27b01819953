"""HTTP's connections, within limits: uvicorn's own protocol takes any number of them, reads addresses and headers of
any length for any time, and waits for ever for clients to read their answers.

What is no HTTP, too long or too slow gets `{"error": sentence}`, as everything else does, and the connection is closed.
"""

import asyncio
import json
import resource
import socket
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hotloop.serve.refusal import TooSlow, Unready

HEAD_BYTES = 1 << 19
"""Of an address and its headers. More than a system hands over at once: the end of a body may be among them."""
HEAD_SECONDS = 60.0  # in which they must have come
ANSWER_SECONDS = 60.0  # in which a client must have read some more of its answer
MOST_CONNECTIONS = 4096


class ConnectionLimit:
    """How many connections a server may have, and which of them nobody would miss."""

    def __init__(self, most: int):
        self.most = most
        self.idle: dict[LimitedProtocol, None] = {}
        """Those without a request, the one that has been so longest first."""

    @classmethod
    def of_system(cls) -> "ConnectionLimit":
        """Four fifths of the files that this process may have open: models, gRPC and the log need some, too."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return cls(MOST_CONNECTIONS)
        return cls(max(1, min(MOST_CONNECTIONS, 4 * files // 5)))

    def make_room(self) -> bool:
        """Close the connection that has been idle longest; False where there is none."""
        for longest in self.idle:
            del self.idle[longest]
            longest.leave()
            return True
        return False


def configure(app: ASGIApp, limit: ConnectionLimit, **more: Any) -> uvicorn.Config:
    """uvicorn with this protocol and without what else it offers. `more` are options of its own."""
    return uvicorn.Config(
        app,
        http=cast(Any, partial(LimitedProtocol, limit)),
        ws="none",
        lifespan="off",
        log_config=None,  # Python's own: errors to standard error, nothing else
        log_level="error",  # not each request that is no HTTP, or asks for another protocol
        access_log=False,
        server_header=False,
        **more,
    )


class JoinedWrites:
    """A transport that sends what is written in one turn of the event loop at once: an answer's head with its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes: int | None = 0  # None while a body comes
    _is_in_head = False
    _timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None

    def __init__(self, limit: ConnectionLimit, **settings: Any):
        """`settings` are what uvicorn gives each connection."""
        super().__init__(**settings)
        self._limit = limit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, JoinedWrites(transport, self.loop)))
        if len(self.connections) > self._limit.most and not self._limit.make_room():
            sentence = f"{self._limit.most:,} connections are open, and all of them busy; try again later"
            self._refuse(Unready.status, sentence, {"retry-after": "1"})
            return
        self._limit.idle[self] = None
        self._start_timer()
        if self.scheme == "https" and hasattr(socket, "TCP_USER_TIMEOUT"):
            # What is encrypted is unread where no protocol sees it. Linux itself drops who does not take it.
            link = transport.get_extra_info("socket")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * ANSWER_SECONDS))

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.idle.pop(self, None)
        self._stop_timer()
        self._stop_answer_timer()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Close the connection when what is written has been read, or does not get less."""
        self.transport.close()
        self._watch_answer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        # Most heads come at once, and a timer for each would cost more than reading it. After an answer come only the
        # rest of a body that nobody wanted, or white space.
        if self._is_in_head or (self.cycle is not None and self.cycle.response_complete):
            self._start_timer()
        if self._head_bytes is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(431, f"the address and headers are over the limit of {HEAD_BYTES:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._limit.idle.pop(self, None)
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._head_bytes, self._is_in_head = None, False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_answer()
        elif self.cycle.response_complete and not self._is_in_head:  # else another one has come behind it
            self._limit.idle[self] = None

    def timeout_keep_alive_handler(self) -> None:
        self.leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_answer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_answer_timer()

    def _watch_answer(self) -> None:
        """Drop the client where as much as now is unread after a while: it would hold its answer for ever."""
        unread = self.transport.get_write_buffer_size()
        if unread and self._answer_timer is None:
            self._answer_timer = self.loop.call_later(ANSWER_SECONDS, self._look_at_answer, unread)

    def _look_at_answer(self, unread: int) -> None:
        self._answer_timer = None
        if self.transport.get_write_buffer_size() >= unread:
            self.transport.abort()
        else:
            self._watch_answer()

    def _stop_answer_timer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not HTTP")

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # an earlier request of this connection is not answered yet
        elif self._is_in_head:
            self._refuse(TooSlow.status, f"the headers have not come within {HEAD_SECONDS:g} s")
        else:
            self.leave()

    def _refuse(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps({"error": sentence})
        head: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
            **(headers or {}),
        }
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            *(f"{name}: {value}" for name, value in head.items()),
        ]
        self.transport.write("\r\n".join([*lines, "", body]).encode())
        self.leave()

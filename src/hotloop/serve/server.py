"""A server's life: it listens, loads, is ready, is asked to end, answers who is in, and ends.

The event loop runs in a thread of its own, so that the main thread hears signals. Not ready comes first, then a while
for balancers to notice, then no new connection, and then the accepted ones get their answers.
"""

import asyncio
import ctypes
import gc
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from hotloop.engine.interrupt import StopRequest, leave_threads_behind
from hotloop.errors import HotloopError, OptionError
from hotloop.serve.access_log import open_log
from hotloop.serve.address import Address, join_port
from hotloop.serve.app import Application, Limits
from hotloop.serve.figures import Figures
from hotloop.serve.gate import Log
from hotloop.serve.models import Models
from hotloop.serve.watch import Watcher
from hotloop.serve.wire import ConnectionLimit, configure

LINGER = 0.2  # seconds for requests that are on their way over connections that are open
LOOK = 0.02  # seconds between two looks at what is still to be answered
BACKLOG = 2048
SO_ATTACH_FILTER, BPF_RETURN = 26, 6  # Linux's numbers, which Python does not name
OTHERWISE = {"--grpc-port": ", 0 for a free one, or none for no gRPC"}
SWITCH = 0.0005  # seconds that a device thread waits for Python while the event loop is busy; left alone they are 0.005
KEEP_ALIVE = 75  # seconds that an idle connection stays open: longer than most clients keep one


@dataclass(frozen=True)
class Service:
    """What to serve, and how to end; times are seconds."""

    folders: Sequence[Path]
    limits: Limits = field(default_factory=Limits)
    delay: float = 0.0
    queue: int = 256
    watch: float | None = None  # None: folders are looked at once
    grace: float = 30.0
    drain_delay: float = 0.0
    access_log: Path | None = None  # `-` is standard error
    certificate: Path | None = None
    key: Path | None = None
    grpc_port: int | None = None  # None: no gRPC
    titles: Mapping[int, str] = field(default_factory=dict)  # of items, for the page


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that listens there; OptionError where it cannot, which names the option that the port is from."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise OptionError(f"--host {host}: no address of this machine ({error.strerror})") from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise OptionError(
            f"{option} {port}: cannot listen on {host} ({error.strerror}); choose another{OTHERWISE.get(option, '')}"
        ) from None
    return listening


def hold_new_connections(listening: socket.socket) -> None:
    """From now on the system makes no new connection, where it is Linux: clients try again after a second.

    Between the last `accept` and the close another thread may have Python for a while, and a connection that is made
    then would be reset.
    """
    if sys.platform == "linux":
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(drop_all))
        with suppress(OSError):  # a system that has no filters
            listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def serve(service: Service, listening: socket.socket, stop: StopRequest, say: Callable[[str], None]) -> None:
    """Serve until `stop` has a number and everybody has been answered; HotloopError where that could not be.

    The socket is closed in any case. A device call that does not end is left behind, and the process with it.
    """
    before = sys.getswitchinterval()
    with closing(listening), open_log(service.access_log, say) as log:
        life = Life(service, listening, say, log)
        try:
            sys.setswitchinterval(SWITCH)
            # A full collection would look through all of jax's modules, a tenth of a second for everybody who waits.
            # What versions are made of comes later, and is collected as ever.
            gc.freeze()
            thread = threading.Thread(target=life.run, name="hotloop-server")
            thread.start()
            while thread.is_alive():
                thread.join(LOOK)
                if stop.number is not None:
                    life.ask_to_end()
            if not life.end_threads():
                leave_threads_behind()
        finally:
            gc.unfreeze()
            sys.setswitchinterval(before)
    if life.error is not None:
        raise life.error


class Life:
    """One server from its start to its end."""

    def __init__(
        self, service: Service, listening: socket.socket, say: Callable[[str], None], log: Log | None
    ):
        self._service, self._listening, self._say = service, listening, say
        self._figures = Figures()
        self._models = Models(self._figures, delay=service.delay, queue=service.queue, say=say)
        self._application = Application(self._models, self._figures, service.limits, service.titles)
        self._config = configure(
            self._application.build(log),
            ConnectionLimit.of_system(),
            proxy_headers=log is not None,  # which alone asks who has sent a request to a proxy in front
            timeout_keep_alive=KEEP_ALIVE,
            ssl_certfile=service.certificate,
            ssl_keyfile=service.key,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._was_asked = False
        self._deadline: float | None = None
        self._grpc: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """In the server's thread."""
        try:
            with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
                runner.run(self._live())
        except BaseException as error:
            self.error = error
        finally:
            self._application.long_json.close()

    def ask_to_end(self) -> None:
        """From any thread, any number of times."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._service.drain_delay + self._service.grace
        self._was_asked = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._asked.set)

    def end_threads(self) -> bool:
        """After `run`: whether every device call has ended, in what is left of the grace."""
        now = time.monotonic()
        until = now + self._service.grace if self._deadline is None else self._deadline
        return self._models.end_threads(max(until - now, LINGER))

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._was_asked:
            return
        host, port = self._listening.getsockname()[:2]
        self._grpc = await self._start_grpc(host)
        server = uvicorn.Server(self._config)
        serving = asyncio.create_task(server.serve(sockets=[self._listening]))
        address = Address("https" if self._service.certificate else "http", host, port)
        self._say(f"listening on {address}")
        started = time.perf_counter()
        watcher = Watcher(self._models, self._service.folders, self._say)
        asked = asyncio.create_task(self._asked.wait())
        working = asyncio.create_task(watcher.load_all())
        try:
            await asyncio.wait({asked, working, serving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is None:
                self._say(f"ready: {address} ({time.perf_counter() - started:.1f} s)")
                if self._service.watch is not None:
                    working = asyncio.create_task(watcher.watch(self._service.watch))
                    await asyncio.wait({asked, working, serving}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.wait({asked, serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed = working.exception() if working.done() and not working.cancelled() else None
            working.cancel()
            asked.cancel()
            was_ready = self._models.is_ready  # else no balancer has anything to notice
            await self._end(server, serving, delay=self._service.drain_delay if was_ready else 0.0)
        if failed is not None:
            raise failed
        self._say("ended: every request was answered")

    async def _start_grpc(self, host: str) -> Any:
        """The server of the other port; None where there is none. OptionError where it cannot listen."""
        if self._service.grpc_port is None:
            return None
        from hotloop.serve import grpc_service

        credentials = None
        if self._service.certificate and self._service.key:
            credentials = grpc_service.read_credentials(self._service.certificate, self._service.key)
        server, port = await grpc_service.start(self._application, host, self._service.grpc_port, credentials)
        self._say(f"listening for gRPC on {join_port(host, port)}")
        return server

    async def _end(self, server: uvicorn.Server, serving: "asyncio.Task[None]", delay: float) -> None:
        """Not ready, a while, no new connection, the last answers; HotloopError where `grace` was too short."""
        self._models.is_ending = True
        await asyncio.sleep(delay)
        while not server.started and not serving.done():
            await asyncio.sleep(LOOK)
        if server.started:
            await self._close_door(server)
        # A little longer than the grace, so that its calls are still there when those that are late are counted.
        until = self._service.grace + 2 * LINGER
        ending_grpc = None if self._grpc is None else asyncio.create_task(self._grpc.stop(until))
        left, lost = await self._wait_for_answers(server.server_state)
        # Answers may wait for clients who are slow to read them. A part of a second is as good, whatever uvicorn says.
        self._config.timeout_graceful_shutdown = left  # type: ignore[assignment]
        logger = logging.getLogger("uvicorn.error")
        before = logger.level
        logger.setLevel(logging.CRITICAL + 1)  # who is cut off is said below, in one line
        server.should_exit = True
        await serving
        await _cut_off(server.server_state)
        logger.setLevel(before)
        if ending_grpc is not None:
            await ending_grpc
        if lost:
            who = "1 request was" if lost == 1 else f"{lost} requests were"
            raise HotloopError(f"--grace {self._service.grace:g}: {who} not answered in that time")
        await self._models.end()

    async def _close_door(self, server: uvicorn.Server) -> None:
        """Take no new connection, after those that the system has made for us already."""
        loop, waiting = asyncio.get_running_loop(), []
        hold_new_connections(self._listening)
        with suppress(OSError):  # BlockingIOError: there are no more
            while True:
                waiting.append(self._listening.accept()[0])
        for each in server.servers:
            each.close()
        protocol: Any = self._config.http_protocol_class
        state, lifespan = server.server_state, server.lifespan.state
        serve = partial(protocol, config=self._config, server_state=state, app_state=lifespan)
        connecting = [
            loop.create_task(loop.connect_accepted_socket(serve, each, ssl=self._config.ssl))
            for each in waiting
        ]
        if connecting:
            await asyncio.wait(connecting, timeout=LINGER)  # of TLS, which a client may begin and not end

    async def _wait_for_answers(self, state: uvicorn.server.ServerState) -> tuple[float, int]:
        """The seconds that are left of the grace, and how many requests have no answer; 0 is the rule."""
        time = asyncio.get_running_loop().time
        began = time()
        deadline = began + self._service.grace

        def is_busy() -> bool:
            return bool(state.tasks) or self._models.held > 0

        while (is_busy() or time() < began + LINGER) and time() < deadline - LINGER:
            await asyncio.sleep(LOOK)
        self._application.reading.stop()
        deadline = max(deadline, time() + LINGER)
        while is_busy() and time() < deadline:
            await asyncio.sleep(LOOK)
        # Those of gRPC are no tasks of uvicorn's.
        return max(0.0, deadline - time()), max(len(state.tasks), self._models.held)


async def _cut_off(state: uvicorn.server.ServerState) -> None:
    """Close the connections of clients who do not read their answers: uvloop would wait for them for ever."""
    until = time.monotonic() + LINGER
    while state.connections and time.monotonic() < until:  # what was written just now is on its way
        await asyncio.sleep(LOOK)
    for each in list(state.connections):
        each.transport.abort()

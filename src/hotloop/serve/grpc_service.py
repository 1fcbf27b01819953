"""The Open Inference Protocol over gRPC (extra `grpc`), in the same event loop and by the same batchers as HTTP.

Stubs are the published ones (`open-inference-grpc`); `grpc_messages` knows what is in a message. A refusal is a status
of gRPC with the same sentence.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from open_inference.grpc import protocol, service

from hotloop.errors import OptionError
from hotloop.serve import v2
from hotloop.serve.address import join_port
from hotloop.serve.app import LARGE, Application, describe_timing
from hotloop.serve.gate import BODY_SECONDS, describe_access, is_allowed
from hotloop.serve.grpc_messages import check_fields, read_request, write_answer
from hotloop.serve.models import LoadedVersion
from hotloop.serve.refusal import (
    BadRequest,
    ClientGone,
    QueueFull,
    Refusal,
    TooSlow,
    Unauthorised,
    Unready,
)

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""Of a refusal's status in HTTP."""
OK, INTERNAL = 200, 500
STATES = health_pb2.HealthCheckResponse
SERVICE = "inference.GRPCInferenceService"
OPEN = {
    f"/{SERVICE}/ServerLive",
    f"/{SERVICE}/ServerReady",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
}
"""Calls that need no token."""
MODEL_INFER = f"/{SERVICE}/ModelInfer"
MOST_CALLS, MOST_WATCHERS = 1024, 64  # at once, of all clients
WATCH_SECONDS = 0.2  # between two looks at the health of which a client wants to know
IDLE_SECONDS = 300  # after which a connection without calls is closed


class Guard(grpc.aio.ServerInterceptor):
    """What every call passes before its message is read: the token, the number of calls, and the time of a body.

    Calls of one message are handled as streams of one, since only then is it up to us when the message is read.
    """

    def __init__(self, application: Application):
        self._app = application
        self._calls = 0

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        async def call(messages: Any, context: Any) -> Any:
            started = time.perf_counter()
            self._calls += 1
            try:
                message = await self._read(details.method, messages, context)
                request = await self._parse(handler, details.method, message)
            except Refusal as refusal:
                count(self._app, context, details.method, ("", None), refusal.status, started)
                await refuse(refusal, context)
            else:
                answer = await handler.unary_unary(request, context)
                is_long = answer.ByteSize() > LARGE
                return await self._app.call(answer.SerializeToString, elsewhere=is_long)
            finally:
                self._calls -= 1

        return grpc.stream_unary_rpc_method_handler(call)

    async def _read(self, method: str, messages: Any, context: Any) -> bytes:
        if method not in OPEN:
            check_token(self._app, context)
        if self._calls > MOST_CALLS:
            raise QueueFull(f"more than {MOST_CALLS:,} calls are under way; try again later", 1)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for message in messages:
                    return bytes(message)
        except TimeoutError:
            raise TooSlow(f"the message has not come within {BODY_SECONDS:g} s") from None
        raise BadRequest("the call has no message")

    async def _parse(self, handler: Any, method: str, message: bytes) -> Any:
        if method == MODEL_INFER:
            check_fields(message)
        try:
            is_long = len(message) > LARGE
            return await self._app.call(handler.request_deserializer, message, elsewhere=is_long)
        except DecodeError:
            raise BadRequest("the message is none of this call") from None


async def refuse(refusal: Refusal, context: Any) -> NoReturn:
    """End the call with the refusal's code and sentence."""
    again = refusal.headers.get("Retry-After")
    metadata = (("retry-after", again),) if again else ()
    await context.abort(CODES.get(refusal.status, grpc.StatusCode.UNKNOWN), str(refusal), metadata)
    raise AssertionError("abort raises")


def check_token(application: Application, context: Any) -> None:
    """Unauthorised where a token is needed and the call has it not."""
    token = application.limits.token
    if token is None:
        return
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    if not is_allowed(given if isinstance(given, bytes) else given.encode(), token):
        raise Unauthorised("a token is needed: authorization: Bearer TOKEN")


def count(
    application: Application,
    context: Any,
    method: str,
    key: tuple[str, int | None],
    status: int,
    started: float,
) -> None:
    """A call that has been answered, for the figures and the access log."""
    seconds = time.perf_counter() - started
    application.figures.count_request(*key, status, seconds)
    if application.log is not None:
        asked = {"client": context.peer(), "method": "gRPC", "path": method}
        application.log(describe_access(asked, key, status, seconds))


class InferenceService(service.GRPCInferenceServiceServicer):
    """The six calls of the protocol, by those who may."""

    def __init__(self, application: Application):
        self._app = application

    async def _find(self, context: Any, name: str, version: str) -> LoadedVersion:
        try:
            return self._app.models.find(name, version or None)
        except Refusal as refusal:
            await refuse(refusal, context)

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return protocol.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return protocol.ServerReadyResponse(ready=self._app.models.is_ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """Whether it answers; NOT_FOUND where it is neither there nor being loaded."""
        try:
            self._app.models.find(request.name, request.version or None)
        except Unready:
            return protocol.ModelReadyResponse(ready=False)
        except Refusal as refusal:
            await refuse(refusal, context)
        return protocol.ModelReadyResponse(ready=not self._app.models.is_ending)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        about = v2.describe_server()
        return protocol.ServerMetadataResponse(name=about["name"], version=about["version"])

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        found = (await self._find(context, request.name, request.version)).artefact
        versions = self._app.models.versions(found.name)
        about = v2.describe_model(found.name, versions, found.signature, {})
        return protocol.ModelMetadataResponse(**about)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        started, status = time.perf_counter(), INTERNAL
        key: tuple[str, int | None] = ("", None)
        try:
            version = self._app.models.find(request.model_name, request.model_version or None)
            key = version.key
            answer = await self._infer(request, version, context)
            status = OK
            return answer
        except Refusal as refusal:
            status = refusal.status
            await refuse(refusal, context)
        except asyncio.CancelledError:
            status = ClientGone.status
            raise
        finally:
            count(self._app, context, MODEL_INFER, key, status, started)

    async def _infer(self, request: Any, version: LoadedVersion, context: Any) -> Any:
        """The answer by the version's batcher; a call that the client cancels gives up its rows."""
        with self._app.bodies.lend() as hold, version.batcher.enter() as ticket:
            size = request.ByteSize()
            hold(size)
            started = time.perf_counter()
            is_long = size > LARGE
            asked = await self._app.call(read_request, request, version, elsewhere=is_long)
            rows = await self._app.decode(asked.arrays, asked.encoded, version, is_long=is_long)
            decode = time.perf_counter() - started
            self._app.figures.count_decode(*version.key, decode)
            answer = await ticket.answer(rows)
            context.set_trailing_metadata((("server-timing", describe_timing(answer, decode)),))
            return write_answer(asked, version, answer.outputs)


class HealthService(health_pb2_grpc.HealthServicer):
    """gRPC's own health service: of the server, or of a model by its name, for which the token is needed."""

    def __init__(self, application: Application):
        self._app, self._models = application, application.models
        self._watchers = 0

    async def Check(self, request: Any, context: Any) -> Any:
        try:
            state = self._find_state(request.service, context)
        except Refusal as refusal:
            await refuse(refusal, context)
        if state == STATES.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such model")
        return STATES(status=state)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The state now and whenever it has changed, until the server ends."""
        self._watchers += 1
        try:
            if self._watchers > MOST_WATCHERS:
                raise QueueFull(f"more than {MOST_WATCHERS} clients watch already; use Check", 1)
            before = None
            while True:
                is_last = self._models.is_ending  # looked at first: it may change while an answer is sent
                state = self._find_state(request.service, context)
                if state != before:
                    yield STATES(status=state)
                if is_last:
                    return
                before = state
                await asyncio.sleep(WATCH_SECONDS)
        except Refusal as refusal:
            await refuse(refusal, context)
        finally:
            self._watchers -= 1

    def _find_state(self, name: str, context: Any) -> int:
        """A value of STATES; Unauthorised where a model's name is asked for without the token."""
        if name in ("", SERVICE):
            is_ready = self._models.is_ready
        else:
            check_token(self._app, context)
            if name not in self._models.names():
                return int(STATES.SERVICE_UNKNOWN)
            is_ready = not self._models.is_ending
        return int(STATES.SERVING if is_ready else STATES.NOT_SERVING)


def read_credentials(certificate: Path, key: Path) -> Any:
    """What a server needs for TLS."""
    return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])


async def start(application: Application, host: str, port: int, credentials: Any = None) -> tuple[Any, int]:
    """A server that answers, and its port; OptionError where it cannot listen there."""
    options: Sequence[tuple[str, Any]] = (
        ("grpc.max_receive_message_length", application.limits.max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
        ("grpc.max_connection_idle_ms", 1000 * IDLE_SECONDS),
    )
    server = grpc.aio.server(
        interceptors=[Guard(application)],
        options=options,
        maximum_concurrent_rpcs=2 * MOST_CALLS,  # the guard refuses sooner, and says so in a sentence
    )
    service.add_GRPCInferenceServiceServicer_to_server(InferenceService(application), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(application), server)
    where = join_port(host, port)
    try:
        if credentials is None:
            taken = server.add_insecure_port(where)
        else:
            taken = server.add_secure_port(where, credentials)
    except RuntimeError:
        taken = 0
    if not taken:
        raise OptionError(f"--grpc-port {port}: cannot listen on {host}; choose another, or none for no gRPC")
    await server.start()
    return server, taken

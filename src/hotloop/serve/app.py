"""The HTTP application: addresses to models, by the Open Inference Protocol and TensorFlow Serving's REST API.

It knows Starlette, and leaves bytes to `v2` and `tf_rest`, batches to the batcher, and who may come in to `gate`. What
takes long (large bodies, images) is read on a pool of threads; the loop itself never computes.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hotloop.engine.exportable import Arrays
from hotloop.machine import usable_cores
from hotloop.serve import tf_rest, v2
from hotloop.serve.artefact import Artefact
from hotloop.serve.batcher import Answer, Ticket
from hotloop.serve.figures import Figures
from hotloop.serve.gate import (
    BODIES,
    INFERENCE,
    MODEL,
    BodyBytes,
    Gate,
    Log,
    Reading,
    describe_refusal,
    read_body,
    said_length,
)
from hotloop.serve.images import CONTENT_TYPES, decode_rows
from hotloop.serve.long_json import LONG, LongJson
from hotloop.serve.models import LoadedVersion, Models, return_free_memory
from hotloop.serve.openapi import describe_api
from hotloop.serve.page_files import serve_page_file
from hotloop.serve.refusal import BadRequest, ClientGone, NotFound, QueueFull, Refusal, Unready, Unsupported
from hotloop.serve.tensors import shorten

LARGE = 1 << 16  # bytes of a body from which it is read by another thread
LONG_WAITING = (
    16_000_000  # bytes of long JSON that may wait: to receive more, and hand it on, costs everybody
)
TIDY = 10.0  # seconds
PATIENCE = 0.1  # seconds of waiting after which a client that has gone is looked for
INFER = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
T = TypeVar("T")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Limits:
    max_bytes: int = 64_000_000
    token: bytes | None = None


Asked = v2.InferRequest | tf_rest.PredictRequest
"""What a body asks for, images still encoded, and in which form it wants its answer."""
Written = tuple[bytes, Mapping[str, str]]
"""A body and its headers."""


@dataclass(frozen=True)
class V2Form:
    """How a request of the Open Inference Protocol is read, by functions that another process can call, too."""

    header: str | None
    kind: str  # of the content, in small letters

    def count_json(self, size: int) -> int:
        """How many bytes of a body of this size are JSON."""
        return 0 if self.kind.startswith("image/") else v2.json_length(self.header, size)

    def reader(self, artefact: Artefact) -> Callable[[bytes], Asked]:
        takes_images = artefact.kind == "image"
        if not self.kind.startswith("image/"):
            signature = artefact.signature
            return partial(
                v2.read_request, header=self.header, signature=signature, takes_images=takes_images
            )
        if not takes_images or self.kind not in CONTENT_TYPES:
            raise Unsupported(f"{shorten(self.kind)} is not taken by the model {artefact.name}")
        return lambda body: v2.InferRequest({}, {artefact.signature.inputs[0].name: (body,)})

    def writer(self, asked: Any, version: LoadedVersion) -> Callable[[Arrays], Written]:
        return partial(v2.write_whole_answer, asked, *version.key, version.artefact.signature)


class TensorFlowForm:
    """The same for TensorFlow Serving's REST API."""

    def count_json(self, size: int) -> int:
        return size

    def reader(self, artefact: Artefact) -> Callable[[bytes], Asked]:
        return partial(
            tf_rest.read_predict, signature=artefact.signature, takes_images=artefact.kind == "image"
        )

    def writer(self, asked: Any, version: LoadedVersion) -> Callable[[Arrays], Written]:
        return partial(tf_rest.write_whole_answer, asked, version.artefact.signature)


class Application:
    """The routes, and what they share."""

    def __init__(
        self, models: Models, figures: Figures, limits: Limits, titles: Mapping[int, str] | None = None
    ):
        """`titles`: of items, by their ids, for the page of a recommender."""
        self.models, self.figures, self.limits = models, figures, limits
        self._titles = json.dumps(titles or {}).encode()  # once: there may be many
        self.bodies, self.reading = BodyBytes(BODIES * limits.max_bytes), Reading()
        self.bodies.on_large = self._tidy_later
        self._tidying: asyncio.TimerHandle | None = None
        self.log: Log | None = None
        """Takes the lines of the access log, of HTTP and gRPC; None: there is none."""
        self.pool = ThreadPoolExecutor(usable_cores(), thread_name_prefix="hotloop-read")
        # Images have threads of their own, one fewer than there are cores: they may take long, and bodies, the loop and
        # the device do not wait for them. They are not niced: one of them that has Python's lock would keep it longer.
        self.image_pool = ThreadPoolExecutor(max(1, usable_cores() - 1), thread_name_prefix="hotloop-decode")
        self.long_json = LongJson(min(limits.max_bytes, LONG_WAITING), max(1, models.queue // 2))

    def _tidy_later(self) -> None:
        """Give back to the system, in a while and once for all of them, what large bodies have had."""

        def tidy() -> None:
            self._tidying = None
            self.pool.submit(return_free_memory)

        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(TIDY, tidy)

    def build(self, log: Log | None = None) -> ASGIApp:
        """The application behind its gate; `log` takes the lines of the access log."""
        handlers: Any = {
            Refusal: _answer_refusal,
            HTTPException: _answer_http,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_defect,
        }
        self.log = log
        inner = Starlette(routes=self._routes(), exception_handlers=handlers)
        inner.router.redirect_slashes = False  # nobody sends a body twice
        return Gate(self._answer_directly(inner), self.models, self.figures, token=self.limits.token, log=log)

    def _answer_directly(self, router: ASGIApp) -> ASGIApp:
        """What asks a model does not go through the router and its layers, which take as long as all the rest."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            is_asked = scope["type"] == "http" and scope["method"] == "POST"
            if not is_asked or (match := INFER.fullmatch(scope["path"])) is None:
                await router(scope, receive, send)
                return
            scope["path_params"] = {name: found for name, found in match.groupdict().items() if found}
            request = Request(scope, receive)
            try:
                response = await self.infer(request)
            except Refusal as error:
                response = await _answer_refusal(request, error)
            except ClientDisconnect as error:
                response = await _answer_nobody(request, error)
            except Exception as error:
                await (await _answer_defect(request, error))(scope, receive, send)
                raise  # for the log
            await response(scope, receive, send)

        return answer

    def _routes(self) -> list[Route]:
        one, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        pages = [
            Route("/", self.page),
            Route("/page/titles.json", self.titles),
            Route("/page/{file}", self.page_file),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/v2", self.about_server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/stats", self.all_stats),
            Route("/v2/repository/index", self.index, methods=["POST"]),
        ]
        for address in (one, version):
            pages += [
                Route(address, self.about_model),
                Route(f"{address}/ready", self.model_ready),
                Route(f"{address}/stats", self.stats),
                # For what is no POST, which gets 405; a POST is answered before it comes here.
                Route(f"{address}/infer", self.infer, methods=["POST"]),
            ]
        tf = "/v1/models/{path:path}"
        return [*pages, Route(tf, self.tf_about), Route(tf, self.tf_predict, methods=["POST"])]

    async def page(self, request: Request) -> Response:
        return serve_page_file("index.html")

    async def page_file(self, request: Request) -> Response:
        """A style or script of the page."""
        return serve_page_file(request.path_params["file"])

    async def titles(self, request: Request) -> Response:
        return Response(self._titles, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(self.figures.as_text(), headers={"Content-Type": PROMETHEUS})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(describe_api(self.models))

    async def about_server(self, request: Request) -> Response:
        return JSONResponse(v2.describe_server())

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        # The body has been published with either key.
        is_ready = self.models.is_ready
        return _answer_health({"live": is_ready, "ready": is_ready}, "the server is loading, or ending")

    async def index(self, request: Request) -> Response:
        found = [
            {"name": name, "version": str(version), "state": state.word, "reason": state.reason}
            for (name, version), state in self.models.states().items()
        ]
        return JSONResponse(found)

    async def all_stats(self, request: Request) -> Response:
        return JSONResponse({"model_stats": [each.as_stats() for each in self.figures.all()]})

    async def stats(self, request: Request) -> Response:
        found = self._find(request)
        wanted = found.key[1] if "version" in request.path_params else None
        return JSONResponse({
            "model_stats": [
                each.as_stats()
                for each in self.figures.all()
                if each.name == found.key[0] and wanted in (None, each.version)
            ]
        })  # fmt: skip

    async def about_model(self, request: Request) -> Response:
        found = self._find(request).artefact
        about = v2.describe_model(
            found.name, self.models.versions(found.name), found.signature, found.parameters()
        )
        return JSONResponse(about)

    async def model_ready(self, request: Request) -> Response:
        """By its status alone: a model that is not there is not ready."""
        try:
            name, version = self._find(request).key
        except Unready:
            name, version = request.path_params["name"], 0
        is_ready = bool(version) and not self.models.is_ending
        return _answer_health({"name": name, "ready": is_ready}, "the model is loading, or the server ending")

    def _find(self, request: Request) -> LoadedVersion:
        return self._find_named(request, request.path_params["name"], request.path_params.get("version"))

    def _find_named(self, request: Request, name: str, version: str | None) -> LoadedVersion:
        found = self.models.find(name, version)
        request.scope[MODEL] = found.key
        return found

    async def infer(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        name, number = request.path_params["name"], request.path_params.get("version")
        return await self._answer(request, name, number, V2Form(request.headers.get(v2.HEADER), kind))

    async def tf_about(self, request: Request) -> Response:
        path = tf_rest.read_path(request.path_params["path"])
        if path.verb is not None:
            raise HTTPException(405, f":{shorten(path.verb)} is for POST", {"Allow": "POST"})
        if path.metadata:
            found = self._find_named(request, path.model, path.version)
            return JSONResponse(tf_rest.describe_signature(*found.key, found.artefact.signature))
        states = {
            number: state
            for (name, number), state in self.models.states().items()
            if name == path.model and path.version in (None, str(number))
        }
        if not states:
            self._find_named(request, path.model, path.version)  # which says what there is
        request.scope[MODEL] = (path.model, None if path.version is None else int(path.version))
        return JSONResponse(tf_rest.describe_status(states))

    async def tf_predict(self, request: Request) -> Response:
        path = tf_rest.read_path(request.path_params["path"])
        if path.verb is None:
            raise HTTPException(405, "POST is for :predict", {"Allow": "GET"})
        if path.verb != "predict":
            raise BadRequest(f":{shorten(path.verb)} is not offered; use :predict")

        return await self._answer(request, path.model, path.version, TensorFlowForm())

    async def _answer(
        self, request: Request, name: str, number: str | None, form: "V2Form | TensorFlowForm"
    ) -> Response:
        """Read the body, hand its rows to the version's batcher, and write what comes back."""
        request.scope[INFERENCE] = True
        self._check_place(self._find_named(request, name, number))
        if self.long_json.is_full and (said := said_length(request)) > LONG:
            self.long_json.check_room(form.count_json(said))
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Unsupported("a compressed body is not taken; send it as it is")
        with self.bodies.lend() as hold:
            body = await read_body(request, self.limits.max_bytes, hold, self.reading)
            # Another version may have taken over while the body came.
            version = self._find_named(request, name, number)
            with version.batcher.enter() as ticket:
                started = time.perf_counter()
                asked, rows = await self._read(form, body, version)
                decode = time.perf_counter() - started
                self.figures.count_decode(*version.key, decode)
                answer = await _wait_for_answer(ticket, rows, request)
                text, headers = await self._write(form, asked, answer, version)
        return Response(text, headers={**headers, "Server-Timing": describe_timing(answer, decode)})

    async def _read(
        self, form: "V2Form | TensorFlowForm", body: bytes, version: LoadedVersion
    ) -> tuple[Asked, Arrays]:
        """What a body asks for, and its rows."""
        is_long = len(body) > LARGE
        read = form.reader(version.artefact)
        if form.count_json(len(body)) > LONG:
            asked = await self.long_json.read(read, body)
        else:
            asked = await self.call(read, body, elsewhere=is_long)
        return asked, await self.decode(asked.arrays, asked.encoded, version, is_long=is_long)

    async def decode(
        self,
        arrays: Mapping[str, NDArray[Any]],
        encoded: Mapping[str, tuple[bytes, ...]],
        version: LoadedVersion,
        *,
        is_long: bool,
    ) -> Arrays:
        """All inputs of a request. Images are always decoded elsewhere: a small one may have many pixels."""
        arguments = (arrays, encoded, version.artefact, self.limits.max_bytes)
        if encoded:
            return await asyncio.get_running_loop().run_in_executor(self.image_pool, decode_rows, *arguments)
        return await self.call(decode_rows, *arguments, elsewhere=is_long)

    async def _write(
        self, form: "V2Form | TensorFlowForm", asked: Asked, answer: Answer, version: LoadedVersion
    ) -> tuple[bytes, Mapping[str, str]]:
        """The body and headers of an answer."""
        size = sum(each.nbytes for each in answer.outputs.values())
        if asked.is_answered_in_json and size > LONG:
            write = form.writer(replace(asked, arrays={}, encoded={}), version)
            return await self.long_json.write(write, answer.outputs)
        return await self.call(form.writer(asked, version), answer.outputs, elsewhere=size > LARGE)

    async def call(self, function: Callable[..., T], *arguments: Any, elsewhere: bool) -> T:
        """What a function gives, which is called by the pool where it takes long."""
        if not elsewhere:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)

    def _check_place(self, version: LoadedVersion) -> None:
        """QueueFull before the body is read: nobody sends it for nothing."""
        if version.batcher.is_full:
            raise QueueFull("too many requests wait already; try again later", version.batcher.retry_after())


def describe_timing(answer: Answer, decode: float) -> str:
    """Milliseconds of a request's phases, as the header `Server-Timing` has them; `decode` is seconds."""
    spent = {"queue": answer.queue_seconds, "compute": answer.compute_seconds, "decode": decode}
    return ", ".join(f"{phase};dur={1000 * seconds:.3f}" for phase, seconds in spent.items())


async def _wait_for_answer(ticket: Ticket, rows: Arrays, request: Request) -> Answer:
    """The answer; ClientGone where the client has left before it came, whose rows then go into no batch."""
    loop = asyncio.get_running_loop()
    watching: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ticket.give_up()

    # Most answers come sooner than that, and a task for each request would cost more than it is worth.
    timer = loop.call_later(PATIENCE, lambda: watching.append(loop.create_task(watch())))
    try:
        return await ticket.answer(rows)
    except asyncio.CancelledError:
        if watching and watching[0].done():
            raise ClientGone("the client has gone") from None
        raise
    finally:
        timer.cancel()
        for task in watching:
            task.cancel()


def _answer_health(about: dict[str, Any], otherwise: str) -> Response:
    """200, or 400 with the sentence `otherwise`: an error has one in every case."""
    return JSONResponse(about) if about["ready"] else JSONResponse({**about, "error": otherwise}, 400)


async def _answer_refusal(request: Request, error: Refusal) -> Response:
    return describe_refusal(error)


async def _answer_http(request: Request, error: HTTPException) -> Response:
    """What the router refuses: no such address, or not with this method."""
    if error.status_code == NotFound.status:
        return JSONResponse({"error": "there is nothing at this address; see /openapi.json"}, NotFound.status)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


async def _answer_nobody(request: Request, error: ClientDisconnect) -> Response:
    """The client has gone while it sent its body."""
    return Response(status_code=ClientGone.status)


async def _answer_defect(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server has a defect; its log has the traceback"}, 500)

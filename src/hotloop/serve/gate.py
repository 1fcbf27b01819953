"""What every HTTP request passes: the token, the limit on its body, the access log, and the counting of answers.

Nothing of a token is ever written anywhere.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotloop.errors import OptionError
from hotloop.serve.figures import Figures
from hotloop.serve.models import Models
from hotloop.serve.refusal import QueueFull, Refusal, TooLarge, TooSlow, Unauthorised, Unready

HEALTH = "/v2/health/"
BODIES = 16  # times the largest body, that all of them may have together
LARGE_BODY = 1 << 20  # bytes
BODY_SECONDS = 60.0  # in which a body must have come
INTERNAL = 500
MODEL = "hotloop.model"
"""Key of a request's scope: (model, version or None), once it is known to be there."""
INFERENCE = "hotloop.inference"
"""Key of a request's scope: it is counted, since it asks a model, known or not, for an answer, or lacks the token."""
Log = Callable[[str], None]


def read_token(path: Path) -> bytes:
    """The token in a file, without the white space around it; OptionError where others may read it, or it is empty."""
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise OptionError(f"--token-file {path}: cannot be read ({error.strerror})") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(f"--token-file {path}: others may read it; chmod 600 {path}")
    if not token or not token.isascii() or len(token.split()) != 1:
        raise OptionError(f"--token-file {path}: must hold one word of ASCII characters")
    return token


def is_allowed(header: bytes | None, token: bytes) -> bool:
    """Whether an Authorization header has the token, as Bearer or as a password of Basic; in constant time."""
    kind, _, rest = (header or b"").partition(b" ")
    given = rest.strip()
    if kind.lower() == b"basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            given = b""
    elif kind.lower() != b"bearer":
        given = b""
    # Digests have one length, so that not even the token's length takes another time.
    return hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(token).digest())


class BodyBytes:
    """Bytes of bodies that are under way, until they are answered: many large ones must not fill the memory."""

    def __init__(self, most: int):
        self._most = most
        self.held = 0
        self.on_large: Callable[[], None] = lambda: None
        """Is called when a large one has been let go of."""

    def add(self, size: int) -> None:
        """QueueFull where there would be too many."""
        if self.held + size > self._most:
            raise QueueFull(f"more than {self._most:,} bytes of requests are under way; try again later", 1)
        self.held += size

    @contextmanager
    def lend(self) -> Iterator[Callable[[int], None]]:
        """A function that adds bytes, which are given back at the end."""
        own = 0

        def add(size: int) -> None:
            nonlocal own
            self.add(size)
            own += size

        try:
            yield add
        finally:
            self.held -= own
            if own > LARGE_BODY:
                self.on_large()


class Reading:
    """Bodies that are on their way, each with a timer."""

    def __init__(self) -> None:
        self.timers: set[asyncio.Timeout] = set()
        self.is_over = False

    def stop(self) -> None:
        """The server ends: what has not come by now is not waited for."""
        self.is_over = True
        for timer in self.timers:
            timer.reschedule(asyncio.get_running_loop().time())


def said_length(request: Request) -> int:
    """Bytes of the body, as its header has them; 0 where that is missing, or no number."""
    said = request.headers.get("content-length", "")
    return int(said[:20]) if said.isascii() and said.isdigit() else 0


async def read_body(request: Request, limit: int, hold: Callable[[int], None], reading: Reading) -> bytes:
    """The whole body; TooLarge as soon as it is over `limit` bytes, said or sent, TooSlow when it takes too long,
    Unready when the server stops reading.

    `hold` is told of the bytes as they come, and may refuse.
    """
    sentence = f"the body is over the limit of {limit:,} bytes"
    if said_length(request) > limit:
        raise TooLarge(sentence)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(0.0 if reading.is_over else BODY_SECONDS) as timer:
            reading.timers.add(timer)
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise TooLarge(sentence)
                hold(len(piece))
                pieces.append(piece)
    except TimeoutError:
        if reading.is_over:
            raise Unready("the body has not come in time: the server is ending") from None
        raise TooSlow(f"the body has not come within {BODY_SECONDS:g} s") from None
    finally:
        reading.timers.discard(timer)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Gate:
    """The application behind its door."""

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        figures: Figures,
        *,
        token: bytes | None = None,
        log: Log | None = None,
    ):
        """`log` is given a line of JSON for each request; None: no access log."""
        self._app, self._models, self._figures = app, models, figures
        self._token, self._log = token, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, is_begun = time.perf_counter(), INTERNAL, False

        async def send_on(message: Message) -> None:
            nonlocal status, is_begun
            if message["type"] == "http.response.start":
                status, is_begun = message["status"], True
                if self._models.is_ending:
                    # Clients that keep connections learn in time that this one goes.
                    message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        try:
            if self._token is not None and not scope["path"].startswith(HEALTH):
                header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
                if not is_allowed(header, self._token):
                    scope[INFERENCE] = True  # counted, whatever it asked for
                    answer = describe_refusal(Unauthorised("a token is needed: Authorization: Bearer TOKEN"))
                    await answer(scope, receive, send_on)
                    return
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:  # the grace is over; uvicorn itself would call it a defect
            if is_begun or not self._models.is_ending:
                raise
            answer = describe_refusal(Unready("there is no answer in time: the server is ending"))
            await answer(scope, receive, send_on)
        finally:
            self._count(scope, status, time.perf_counter() - started)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        model, version = scope.get(MODEL, ("", None))
        if INFERENCE in scope:
            self._figures.count_request(model, version, status, seconds)
        if self._log is not None:
            client = scope.get("client")
            asked = {
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"],
            }
            self._log(describe_access(asked, (model, version), status, seconds))


def describe_access(
    asked: Mapping[str, Any], key: tuple[str, int | None], status: int, seconds: float
) -> str:
    """A line of the access log; `asked` are client, method and path, `status` is HTTP's, over gRPC as well."""
    model, version = key
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        **asked,
        "path": asked["path"][:300],
        "model": model or None,
        "version": version,
        "status": status,
        "seconds": round(seconds, 6),
    }
    return json.dumps(line)


def describe_refusal(refusal: Refusal) -> Response:
    """The refusal's status and headers, and `{"error": sentence}`."""
    return JSONResponse({"error": str(refusal)}, refusal.status, refusal.headers)

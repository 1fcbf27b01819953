"""What a server answers when it cannot give what was asked: one sentence, a status, and what the client may do.

Protocols and batcher raise these; only `gate` turns them into HTTP. No HTTP library is known here.
"""

from collections.abc import Mapping

from hotloop.errors import HotloopError

CLOSE = {"Connection": "close"}


class Refusal(HotloopError):
    """A request that gets no answer; `status` is HTTP's."""

    status = 400
    headers: Mapping[str, str] = {}


class BadRequest(Refusal):
    """Something in the request is wrong, and will be so the next time."""


class Unauthorised(Refusal):
    status = 401
    # Basic: a browser asks for the token as a password, so that the page works behind one, too.
    headers: Mapping[str, str] = {"WWW-Authenticate": 'Bearer realm="hotloop", Basic realm="hotloop"'}


class NotFound(Refusal):
    status = 404


class TooSlow(Refusal):
    status = 408
    headers = CLOSE


class TooLarge(Refusal):
    """The body is over the limit; the connection is closed, so that the rest of it is not read."""

    status = 413
    headers = CLOSE


class Unsupported(Refusal):
    status = 415


class QueueFull(Refusal):
    """As many requests wait as may; `retry_after` whole seconds are a guess at when fewer do.

    `is_last`: the connection is closed, so that the rest of a long body is not read.
    """

    status = 429

    def __init__(self, text: str, retry_after: int, *, is_last: bool = False):
        super().__init__(text)
        self.headers = {"Retry-After": str(retry_after), **(CLOSE if is_last else {})}


class ClientGone(Refusal):
    """The client has closed the connection; nobody reads this."""

    status = 499


class DeviceFailure(Refusal):
    """The device call itself raised; the next one may work."""

    status = 500


class Unready(Refusal):
    """The model is loading, or the server is ending."""

    status = 503
    headers: Mapping[str, str] = {"Retry-After": "1"}

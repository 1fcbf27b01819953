"""A client of a server's models over one connection: v2 in bytes or JSON, or TensorFlow Serving's REST API.

By Python's own `http.client`, so that measuring a server needs nothing installed. It works with any server that speaks
these protocols; what only ours says (`Server-Timing`) is left out where it is missing.
"""

import http.client
import json
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from hotloop.engine.exportable import DATATYPES, Arrays, Signature
from hotloop.engine.model_folder import parse_signature
from hotloop.errors import HotloopError, OptionError
from hotloop.serve import tf_rest, v2
from hotloop.serve.address import Address
from hotloop.serve.refusal import Refusal

Protocol = Literal["v2", "v2-json", "tf", "grpc"]
TIMING = re.compile(r"(\w+);dur=([0-9]+(?:\.[0-9]+)?)")


class ServerError(HotloopError):
    """A server that cannot be reached, or that has refused; `status` is HTTP's, 0 where there was no answer.

    `is_silent`: nobody listens there, or no answer came in the whole timeout.
    """

    def __init__(
        self, text: str, status: int = 0, retry_after: float | None = None, *, is_silent: bool = False
    ):
        super().__init__(text)
        self.status, self.retry_after, self.is_silent = status, retry_after, is_silent


@dataclass(frozen=True)
class RemoteModel:
    """A model as the server describes it; `version` None is the newest, whichever that is."""

    name: str
    version: str | None
    signature: Signature


@dataclass(frozen=True)
class Reply:
    """An answer; seconds of the whole, and of the server's phases, by name, where it tells them."""

    outputs: Arrays
    seconds: float
    phases: Mapping[str, float]


class AnyClient(ABC):
    """One connection, for one thread, over whichever protocol."""

    _connection: Any

    def __init__(
        self,
        address: Address,
        *,
        token: str | None = None,
        timeout: float = 10.0,
        ca_file: Path | None = None,
    ):
        """`timeout` seconds are waited for an answer; `ca_file` None: the certificates are trusted that the protocol's
        library trusts."""
        self._address, self._timeout = address, timeout
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._open(ca_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @abstractmethod
    def _open(self, ca_file: Path | None) -> None:
        """Make `_connection`, which can be closed."""

    @abstractmethod
    def describe(self, name: str | None = None, version: str | None = None) -> RemoteModel:
        """A model's signature; ServerError where there is none, OptionError where it needs a name."""

    @abstractmethod
    def infer(self, model: RemoteModel, inputs: Arrays, protocol: Protocol, /) -> Reply:
        """The model's outputs for these rows; ServerError where there are none."""


class Client(AnyClient):
    """By HTTP; the connection is opened again where the server has closed it."""

    _connection: http.client.HTTPConnection

    def _open(self, ca_file: Path | None) -> None:
        place, timeout = (self._address.host, self._address.port), self._timeout
        self._connection = (
            http.client.HTTPSConnection(*place, timeout=timeout, context=trust_context(ca_file))
            if self._address.scheme == "https"
            else http.client.HTTPConnection(*place, timeout=timeout)
        )

    def describe(self, name: str | None = None, version: str | None = None) -> RemoteModel:
        """A model's signature; name None is the only one there is. ServerError where there is none."""
        if name is None:
            found = self._get_json("/v2/repository/index", "POST")
            try:
                here = [each for each in found if each.get("state", "READY") == "READY"]
                names = sorted({str(each["name"]) for each in here})
            except (AttributeError, KeyError, TypeError):
                raise OptionError(f"--name is needed: {self._address} does not say what it has") from None
            if len(names) != 1:
                raise OptionError(f"--name is needed: {self._address} has {', '.join(names) or 'no model'}")
            name = names[0]
        about = self._get_json(_path("v2", name, version))
        try:
            signature = parse_signature(about)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self._address}: its metadata of {name} cannot be read ({error!r})") from None
        check_signature(signature, f"{self._address}: {name}")
        return RemoteModel(name, version, signature)

    def is_ready(self) -> bool:
        with suppress(ServerError):
            return self._send("GET", "/v2/health/ready", b"", {})[0] == 200
        return False

    def _get_json(self, path: str, method: str = "GET") -> Any:
        status, _, body = self._send(method, path, b"", {})
        if status != 200:
            raise self._refused(status, {}, body)
        try:
            return json.loads(body)
        except ValueError:
            raise ServerError(f"{self._address}{path}: the answer is no JSON", status) from None

    def infer(self, model: RemoteModel, inputs: Arrays, protocol: Protocol = "v2") -> Reply:
        headers: Mapping[str, str]
        if protocol == "tf":
            path = f"{_path('v1', model.name, model.version)}:predict"
            body, headers = tf_rest.write_instances(inputs), {"Content-Type": "application/json"}
        else:
            path = f"{_path('v2', model.name, model.version)}/infer"
            pieces, headers = v2.write_request(inputs, model.signature, binary=protocol == "v2")
            body = b"".join(pieces)
        started = time.perf_counter()
        status, found, answer = self._send("POST", path, body, headers)
        seconds = time.perf_counter() - started
        if status != 200:
            raise self._refused(status, found, answer)
        try:
            if protocol == "tf":
                outputs = tf_rest.read_predictions(answer, model.signature)
            else:
                outputs = v2.read_answer(answer, found.get(v2.HEADER.lower()), model.signature)
        except Refusal as error:
            raise ServerError(f"{self._address}: its answer cannot be read ({error})", status) from None
        return Reply(outputs, seconds, read_timing(found.get("server-timing", "")))

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers in small letters, and body; ServerError where none came."""
        try:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it may have refused the body before its end
                self._connection.request(method, path, body, {**headers, **self._headers})
            answer = self._connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        except TimeoutError:
            self._connection.close()
            text = f"{self._address}: no answer within {self._timeout:g} s"
            raise ServerError(text, is_silent=True) from None
        except ssl.SSLCertVerificationError as error:
            self._connection.close()
            raise ServerError(
                f"{self._address}: its certificate is not trusted ({error.verify_message}); give --ca-file"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            nobody = isinstance(error, ConnectionRefusedError)
            raise ServerError(f"{self._address}: no answer ({said})", is_silent=nobody) from None

    def _refused(self, status: int, headers: Mapping[str, str], body: bytes) -> ServerError:
        try:
            sentence = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            sentence = body[:200].decode(errors="replace")
        again = headers.get("retry-after", "")
        return ServerError(
            f"{self._address}: {status}: {sentence}", status, float(again) if again.isdigit() else None
        )


@lru_cache
def trust_context(ca_file: Path | None) -> ssl.SSLContext:
    """For all connections alike: reading the system's certificates takes tens of milliseconds. OptionError where the
    file has none."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # of which ssl's own is one
        raise OptionError(f"--ca-file {ca_file}: cannot be used ({error.strerror or error})") from None


def read_timing(text: str) -> dict[str, float]:
    """Seconds by phase from a header `Server-Timing`."""
    return {name: float(ms) / 1000 for name, ms in TIMING.findall(text)}


def check_signature(signature: Signature, whose: str) -> None:
    """ServerError where tensors are none that this client can send or read."""
    for tensor in (*signature.inputs, *signature.outputs):
        if tensor.datatype not in DATATYPES:
            raise ServerError(
                f"{whose}: {tensor.name} is {tensor.datatype}; known are {', '.join(DATATYPES)}"
            )
        if not tensor.shape or min(tensor.row, default=0) < 0:
            raise ServerError(
                f"{whose}: {tensor.name} has shape {list(tensor.shape)}, without rows of one size"
            )


def _path(root: str, name: str, version: str | None) -> str:
    where = f"/{root}/models/{quote(name, safe='')}"
    return where if version is None else f"{where}/versions/{quote(version, safe='')}"

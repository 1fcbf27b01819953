"""The Open Inference Protocol v2 over HTTP: bodies and headers to a request, outputs to a body and headers.

A body is JSON, and after it the bytes of those tensors that say `binary_data_size`, in their order, little-endian and
row-major; `Inference-Header-Content-Length` is the length of the JSON. With the value 0 the body is the one input, raw.
Pure functions: no HTTP library, no model.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.exportable import Arrays, Signature, Tensor
from hotloop.serve.refusal import BadRequest
from hotloop.serve.tensors import (
    array_from_bytes,
    array_from_json,
    check_shape,
    describe,
    find_tensor,
    read_json,
    shorten,
)
from hotloop.version import VERSION

HEADER = "Inference-Header-Content-Length"
_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
EXTENSIONS = ("binary_tensor_data", "statistics")
BINARY_ONLY = ("FP16", "BF16")
SHORT = 1024  # bytes of JSON that are kept with what they say
MOST_OBJECTS = 1000
"""Of the JSON of a request. Reading a million of them would hold up everybody: Python reads JSON in one go."""


@dataclass(frozen=True)
class InferRequest:
    """What a body asks for: arrays by name, images still encoded by name, and which outputs in which form."""

    arrays: Mapping[str, NDArray[Any]]
    encoded: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    outputs: tuple[tuple[str, bool], ...] = ()  # name, whether as bytes
    id: str | None = None

    @property
    def is_answered_in_json(self) -> bool:
        """Whether any output is; those of an image as the body are."""
        return not self.outputs or not all(is_binary for _, is_binary in self.outputs)


def read_request(
    body: bytes, header: str | None, signature: Signature, *, takes_images: bool = False
) -> InferRequest:
    """The request in a body whose `Inference-Header-Content-Length` is `header` (None: there was none).

    `takes_images`: the first input may also be BYTES, each element an encoded image.
    """
    length = json_length(header, len(body))
    if length == 0:
        return _read_raw(memoryview(body), signature)
    if (objects := body.count(b"{", 0, length)) > MOST_OBJECTS:
        raise BadRequest(
            f"{objects:,} objects in the JSON, and a request has a few: at most {MOST_OBJECTS:,}"
        )
    document = _read_short(body[:length]) if length < SHORT else read_json(memoryview(body)[:length])
    identity = document.get("id")
    if identity is not None and not isinstance(identity, str):
        raise BadRequest("id must be a string")
    arrays: dict[str, NDArray[Any]] = {}
    encoded: dict[str, tuple[bytes, ...]] = {}
    rest = memoryview(body)[length:]
    for each in _list_of(document, "inputs", len(signature.inputs), needed=True):
        tensor = find_tensor(each.get("name"), signature.inputs, "input")
        if tensor.name in arrays or tensor.name in encoded:
            raise BadRequest(f"the input {tensor.name} is there twice")
        data, rest = _own_bytes(tensor.name, each, rest)
        if each.get("datatype") == "BYTES" and takes_images and tensor is signature.inputs[0]:
            encoded[tensor.name] = _read_images(tensor.name, each, data)
        else:
            arrays[tensor.name] = _read_tensor(tensor, each, data)
    if len(rest):
        raise BadRequest(f"{len(rest):,} bytes after the JSON belong to no input")
    return InferRequest(arrays, encoded, _read_outputs(document, signature), identity)


@lru_cache(maxsize=256)
def _read_short(text: bytes) -> Mapping[str, Any]:
    """`read_json` of the few bytes before binary tensors, which are the same again and again; not to be changed."""
    return read_json(text)


def json_length(header: str | None, size: int) -> int:
    """How many of a body's bytes are JSON, by its header; BadRequest where it lies."""
    if header is None:
        if not size:
            raise BadRequest("the body is empty")
        return size
    # int() takes signs, spaces, underscores and other scripts' digits.
    if not (header.isascii() and header.isdigit() and len(header) < 20):
        raise BadRequest(f"{HEADER}: must be a whole number, not {shorten(header)}")
    if int(header) > size:
        raise BadRequest(f"{HEADER}: {int(header):,}, and the body has {size:,} bytes")
    return int(header)


def _read_raw(body: memoryview, signature: Signature) -> InferRequest:
    """The whole body as the rows of the only input."""
    if len(signature.inputs) != 1:
        raise BadRequest(f"{HEADER}: 0 is for models of one input, and this one has {len(signature.inputs)}")
    (tensor,) = signature.inputs
    row = int(np.prod(tensor.row, dtype=np.int64)) * tensor.dtype.itemsize
    if not len(body) or len(body) % row:
        raise BadRequest(f"{tensor.name}: {len(body):,} bytes are not whole rows of {row:,}")
    arrays = {tensor.name: array_from_bytes(tensor, (len(body) // row, *tensor.row), body)}
    return InferRequest(arrays, outputs=tuple((each.name, True) for each in signature.outputs))


def _list_of(document: Mapping[str, Any], key: str, most: int, *, needed: bool) -> list[dict[str, Any]]:
    """The objects under a key, at most as many as the model has."""
    found = document.get(key)
    if found is None and not needed:
        return []
    if not isinstance(found, list) or not (found or not needed):
        raise BadRequest(
            f"{key} must be a list of {key}" + ("" if found is None else f", not {describe(found)}")
        )
    if len(found) > most:
        raise BadRequest(f"{len(found):,} {key}, and the model has {most}")
    if not all(isinstance(each, dict) for each in found):
        raise BadRequest(f"{key} must be a list of objects")
    return found


def _parameters(owner: Mapping[str, Any], of: str) -> Mapping[str, Any]:
    found = owner.get("parameters", {})
    if not isinstance(found, dict):
        raise BadRequest(f"{of}: parameters must be an object, not {describe(found)}")
    return found


def _own_bytes(name: str, each: Mapping[str, Any], rest: memoryview) -> tuple[memoryview | None, memoryview]:
    """The bytes after the JSON that are this tensor's (None: its data is in the JSON), and those after them."""
    size = _parameters(each, name).get("binary_data_size")
    if size is None:
        return None, rest
    if type(size) is not int or size < 0:
        raise BadRequest(f"{name}: binary_data_size must be a whole number from 0")
    if size > len(rest):
        raise BadRequest(f"{name}: binary_data_size {shorten(size)}, and {len(rest):,} bytes are left")
    if "data" in each:
        raise BadRequest(f"{name}: has both data and binary_data_size")
    return rest[:size], rest[size:]


def _read_tensor(tensor: Tensor, each: Mapping[str, Any], data: memoryview | None) -> NDArray[Any]:
    if each.get("datatype") != tensor.datatype:
        given = shorten(each.get("datatype"))
        raise BadRequest(f"{tensor.name}: datatype must be {tensor.datatype}, not {given}")
    shape = check_shape(tensor.name, each.get("shape"), tensor)
    if data is not None:
        return array_from_bytes(tensor, shape, data)
    if tensor.datatype in BINARY_ONLY:
        raise BadRequest(f"{tensor.name}: {tensor.datatype} goes as binary data only")
    found = array_from_json(tensor, each.get("data"))
    if found.shape not in (shape, (int(np.prod(shape, dtype=object)),)):
        raise BadRequest(f"{tensor.name}: data of shape {list(found.shape)}, and shape says {list(shape)}")
    return found.reshape(shape)


def _read_images(name: str, each: Mapping[str, Any], data: memoryview | None) -> tuple[bytes, ...]:
    """The elements of a BYTES tensor, [n] or [n, 1]: each a length of 4 bytes and so many bytes."""
    if data is None:
        raise BadRequest(f"{name}: encoded images go as binary data only")
    shape = each.get("shape")
    if (
        not isinstance(shape, list)
        or not all(type(axis) is int for axis in shape)
        or shape[1:] not in ([], [1])
    ):
        raise BadRequest(f"{name}: encoded images have shape [n] or [n, 1]")
    elements = split_elements(name, data)
    if shape[:1] != [len(elements)] or not elements:
        raise BadRequest(f"{name}: {len(elements)} images, and shape says {shorten(shape)}")
    return elements


def split_elements(name: str, data: memoryview) -> tuple[bytes, ...]:
    """The elements of BYTES data; BadRequest where a length leads past the end."""
    found = []
    while data:
        size = struct.unpack("<I", data[:4])[0] if len(data) >= 4 else len(data)
        if size > len(data) - 4:
            raise BadRequest(f"{name}: an element's length leads past the end of the data")
        found.append(bytes(data[4 : 4 + size]))
        data = data[4 + size :]
    return tuple(found)


def _read_outputs(document: Mapping[str, Any], signature: Signature) -> tuple[tuple[str, bool], ...]:
    """Names and forms; all outputs where none are named."""
    everywhere = _flag(_parameters(document, "the request"), "binary_data_output", False)
    named = _list_of(document, "outputs", len(signature.outputs), needed=False)
    found: dict[str, bool] = {}
    for each in named:
        tensor = find_tensor(each.get("name"), signature.outputs, "output")
        parameters = _parameters(each, tensor.name)
        if parameters.get("classification"):
            raise BadRequest(f"{tensor.name}: classification is not offered; take the output itself")
        found[tensor.name] = _flag(parameters, "binary_data", everywhere)
    if not named:
        found = {tensor.name: everywhere for tensor in signature.outputs}
    for tensor in signature.outputs:
        if tensor.datatype in BINARY_ONLY and not found.get(tensor.name, True):
            raise BadRequest(
                f"{tensor.name}: {tensor.datatype} goes as binary data only; ask for binary_data"
            )
    return tuple(found.items())


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    found = parameters.get(name, default)
    if not isinstance(found, bool):
        raise BadRequest(f"{name} must be true or false, not {describe(found)}")
    return found


def write_answer(
    request: InferRequest, model: str, version: int, signature: Signature, outputs: Arrays
) -> tuple[list[bytes], dict[str, str]]:
    """The body, in pieces, and its headers."""
    # An image as the body cannot say in which form it wants its answer.
    asked = request.outputs or tuple((each.name, each.datatype in BINARY_ONLY) for each in signature.outputs)
    pieces: list[bytes] = []
    described = [
        _write_tensor(find_tensor(name, signature.outputs, "output"), outputs[name], pieces, is_binary)
        for name, is_binary in asked
    ]
    document: dict[str, Any] = {"model_name": model, "model_version": str(version), "outputs": described}
    if request.id is not None:
        document["id"] = request.id
    return _put_together(_encoder.encode(document).encode(), pieces)


def _write_tensor(
    tensor: Tensor, array: NDArray[Any], pieces: list[bytes], is_binary: bool
) -> dict[str, Any]:
    """What the JSON says of a tensor; its bytes are added to the pieces, where it goes as such."""
    about: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(array.shape)}
    if is_binary:
        pieces.append(np.ascontiguousarray(array, tensor.dtype).tobytes())
        return {**about, "parameters": {"binary_data_size": len(pieces[-1])}}
    return {**about, "data": array.ravel().tolist()}


def _put_together(text: bytes, pieces: list[bytes]) -> tuple[list[bytes], dict[str, str]]:
    """A body of JSON and what goes as bytes, in pieces, and its headers."""
    if not pieces:
        return [text], {"Content-Type": "application/json"}
    return [text, *pieces], {"Content-Type": "application/octet-stream", HEADER: str(len(text))}


def write_whole_answer(
    request: InferRequest, model: str, version: int, signature: Signature, outputs: Arrays
) -> tuple[bytes, dict[str, str]]:
    """`write_answer` in one piece."""
    pieces, headers = write_answer(request, model, version, signature, outputs)
    return b"".join(pieces), headers


def write_request(
    inputs: Arrays, signature: Signature, *, binary: bool = True
) -> tuple[list[bytes], dict[str, str]]:
    """The body, in pieces, and headers of a request for all outputs, in the form of the inputs.

    What goes as bytes only does so in any case.
    """
    pieces: list[bytes] = []
    described = [
        _write_tensor(each, inputs[each.name], pieces, binary or each.datatype in BINARY_ONLY)
        for each in signature.inputs
    ]
    document: dict[str, Any] = {"inputs": described, "parameters": {"binary_data_output": binary}}
    if not binary and any(each.datatype in BINARY_ONLY for each in signature.outputs):
        document["outputs"] = [
            {"name": each.name, "parameters": {"binary_data": each.datatype in BINARY_ONLY}}
            for each in signature.outputs
        ]
    # NaN is written as it is: that a request has one is for the server to refuse.
    return _put_together(json.dumps(document, separators=(",", ":")).encode(), pieces)


def read_answer(body: bytes, header: str | None, signature: Signature) -> Arrays:
    """The outputs of an answer; BadRequest where it is none of this model, or lacks one."""
    length = json_length(header, len(body))
    document, rest = read_json(memoryview(body)[:length]), memoryview(body)[length:]
    found: Arrays = {}
    for each in _list_of(document, "outputs", len(signature.outputs), needed=True):
        tensor = find_tensor(each.get("name"), signature.outputs, "output")
        data, rest = _own_bytes(tensor.name, each, rest)
        found[tensor.name] = _read_tensor(tensor, each, data)
    missing = [tensor.name for tensor in signature.outputs if tensor.name not in found]
    if missing:
        raise BadRequest(f"the output {missing[0]} is missing")
    return found


def describe_server() -> dict[str, Any]:
    return {"name": "hotloop", "version": VERSION, "extensions": list(EXTENSIONS)}


def describe_model(
    name: str, versions: list[int], signature: Signature, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of a model; its parameters are an extension."""

    def all_of(tensors: tuple[Tensor, ...]) -> list[dict[str, Any]]:
        return [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]

    about: dict[str, Any] = {
        "name": name,
        "versions": [str(version) for version in versions],
        "platform": "hotloop_stablehlo",
        "inputs": all_of(signature.inputs),
        "outputs": all_of(signature.outputs),
    }
    return {**about, "parameters": dict(parameters)} if parameters else about

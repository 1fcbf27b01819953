"""Messages of the Open Inference Protocol over gRPC (extra `grpc`): to a request's arrays, and from an answer's.

Messages are the published ones (`open-inference-grpc`). Tensors come raw or typed, and always go raw. No call is known
here.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from open_inference.grpc import protocol

from hotloop.engine.exportable import Signature, Tensor
from hotloop.serve import v2
from hotloop.serve.models import LoadedVersion
from hotloop.serve.refusal import BadRequest
from hotloop.serve.tensors import array_from_bytes, array_from_json, check_shape, find_tensor, shorten

CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of a type's typed contents; FP16 and BF16 have none."""
MOST_FIELDS, MOST_BESIDE, MOST_TYPED = 1000, 1 << 20, 1 << 16
"""Of a message: its fields, the bytes beside raw tensors, and the numbers of a tensor that is typed. Python makes an
object of each while everybody waits; raw tensors are free of that."""


def check_fields(message: bytes) -> None:
    """BadRequest where a message has too many fields, or too much beside its raw tensors, before it is read.

    It walks the outermost fields alone; one that is not well-formed is left to protobuf.
    """
    at = fields = beside = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind, fields = key & 7, fields + 1
        if kind == 2:
            size, at = _read_varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind, 0)
            if kind == 0:
                _, at = _read_varint(message, at)
        at += size
        if key >> 3 != protocol.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER:
            beside += size
        if fields > MOST_FIELDS:
            raise BadRequest(f"a message has at most {MOST_FIELDS:,} fields")
    if beside > MOST_BESIDE:
        raise BadRequest(f"more than {MOST_BESIDE:,} bytes beside raw_input_contents: send tensors raw")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of protobuf's, and where the next thing begins."""
    found = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return found, at


def read_request(request: Any, version: LoadedVersion) -> v2.InferRequest:
    """The tensors of a message; BadRequest where they do not fit the signature."""
    artefact = version.artefact
    signature, takes_images = artefact.signature, artefact.kind == "image"
    if len(request.inputs) > len(signature.inputs):
        raise BadRequest(f"{len(request.inputs):,} inputs, and the model has {len(signature.inputs)}")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    if raw and any(each.HasField("contents") for each in request.inputs):
        raise BadRequest("raw_input_contents and contents: give one of them")
    arrays: dict[str, NDArray[Any]] = {}
    encoded: dict[str, tuple[bytes, ...]] = {}
    for number, each in enumerate(request.inputs):
        tensor = find_tensor(each.name, signature.inputs, "input")
        if tensor.name in arrays or tensor.name in encoded:
            raise BadRequest(f"the input {tensor.name} is there twice")
        data = memoryview(raw[number]) if raw else None
        if each.datatype == "BYTES" and takes_images and tensor is signature.inputs[0]:
            encoded[tensor.name] = _read_images(each, data)
        else:
            arrays[tensor.name] = _read_tensor(tensor, each, data)
    return v2.InferRequest(arrays, encoded, _read_outputs(request, signature), request.id)


def _read_outputs(request: Any, signature: Signature) -> tuple[tuple[str, bool], ...]:
    """The outputs asked for, each once; all of them where none are named."""
    if len(request.outputs) > len(signature.outputs):
        raise BadRequest(f"{len(request.outputs):,} outputs, and the model has {len(signature.outputs)}")
    for each in request.outputs:
        find_tensor(each.name, signature.outputs, "output")
        if "classification" in each.parameters:
            raise BadRequest(f"{each.name}: classification is not offered; take the output itself")
    names = [each.name for each in request.outputs] or [tensor.name for tensor in signature.outputs]
    return tuple((name, True) for name in dict.fromkeys(names))


def _read_images(each: Any, data: memoryview | None) -> tuple[bytes, ...]:
    if data is not None:
        found = v2.split_elements(each.name, data)
    else:
        found = tuple(each.contents.bytes_contents)
    shape = list(each.shape)
    if not found or shape[1:] not in ([], [1]) or shape[:1] != [len(found)]:
        raise BadRequest(f"{each.name}: {len(found)} images, which have shape [n] or [n, 1]")
    return found


def _read_tensor(tensor: Tensor, each: Any, data: memoryview | None) -> NDArray[Any]:
    if each.datatype != tensor.datatype:
        raise BadRequest(f"{tensor.name}: datatype must be {tensor.datatype}, not {shorten(each.datatype)}")
    shape = check_shape(tensor.name, list(each.shape), tensor)
    if data is not None:
        return array_from_bytes(tensor, shape, data)
    if tensor.datatype not in CONTENTS:
        raise BadRequest(f"{tensor.name}: {tensor.datatype} goes as raw_input_contents only")
    numbers = getattr(each.contents, CONTENTS[tensor.datatype])
    if len(numbers) > MOST_TYPED:
        raise BadRequest(f"{tensor.name}: more than {MOST_TYPED:,} numbers go as raw_input_contents only")
    found = array_from_json(tensor, list(numbers))
    if found.size != np.prod(shape, dtype=object):
        raise BadRequest(f"{tensor.name}: {found.size} numbers, and shape {list(shape)}")
    return found.reshape(shape)


def write_answer(asked: v2.InferRequest, version: LoadedVersion, outputs: dict[str, NDArray[Any]]) -> Any:
    """The message for an answer: shapes, and their bytes in the same order."""
    name, number = version.key
    answer = protocol.ModelInferResponse(model_name=name, model_version=str(number), id=asked.id or "")
    for output, _ in asked.outputs:
        tensor = find_tensor(output, version.artefact.signature.outputs, "output")
        array = outputs[output]
        answer.outputs.add(name=output, datatype=tensor.datatype, shape=array.shape)
        answer.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
    return answer

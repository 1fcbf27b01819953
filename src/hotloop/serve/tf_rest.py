"""TensorFlow Serving's REST API as functions: status, metadata, and `:predict` in its row and column forms.

`instances` are rows and are answered by `predictions`, `inputs` are columns and are answered by `outputs`; a model of
one tensor need not name it. `{"b64": ...}` is an encoded image. NaN and Infinity are legal tokens of this JSON, though
a row that has them is refused like any other that is not finite.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.exportable import Arrays, Signature, Tensor
from hotloop.serve.refusal import BadRequest, NotFound
from hotloop.serve.tensors import array_from_json, describe, find_tensor, read_json, shorten

SIGNATURE = "serving_default"
TYPES = {
    "BOOL": "DT_BOOL",
    "UINT8": "DT_UINT8",
    "UINT16": "DT_UINT16",
    "UINT32": "DT_UINT32",
    "UINT64": "DT_UINT64",
    "INT8": "DT_INT8",
    "INT16": "DT_INT16",
    "INT32": "DT_INT32",
    "INT64": "DT_INT64",
    "FP16": "DT_HALF",
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "BF16": "DT_BFLOAT16",
}


@dataclass(frozen=True)
class PredictRequest:
    """Arrays by name, images still encoded by name, and whether the answer is a list of rows."""

    arrays: Mapping[str, NDArray[Any]]
    by_row: bool
    encoded: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    is_answered_in_json = True


@dataclass(frozen=True)
class Path:
    """What follows `/v1/models/`, taken apart."""

    model: str
    version: str | None = None
    verb: str | None = None  # after the colon
    metadata: bool = False


def read_path(text: str) -> Path:
    """`M[/versions/V][/metadata|:predict]`; NotFound for anything else, labels among them, since none are kept."""
    head, colon, verb = text.rpartition(":")
    if not colon or "/" in verb:
        head, verb = text, ""
    parts = head.split("/")
    is_metadata = len(parts) in (2, 4) and parts[-1] == "metadata" and not verb
    if is_metadata:
        parts = parts[:-1]
    if len(parts) == 3 and parts[1] == "labels":
        raise NotFound(f"the model {shorten(parts[0])} has no labels; ask for /versions/V")
    if len(parts) not in (1, 3) or (len(parts) == 3 and parts[1] != "versions") or not parts[0]:
        raise NotFound(f"there is nothing at /v1/models/{shorten(text)}")
    return Path(parts[0], parts[2] if len(parts) == 3 else None, verb or None, is_metadata)


def read_predict(body: bytes, signature: Signature, *, takes_images: bool = False) -> PredictRequest:
    """The request in a body; BadRequest where it is none for this signature."""
    document = read_json(body, odd_numbers=True)
    if document.get("signature_name") not in (None, "", SIGNATURE):
        raise BadRequest(f"there is one signature, {SIGNATURE}, not {shorten(document['signature_name'])}")
    forms = [key for key in ("instances", "inputs") if key in document]
    if len(forms) != 1:
        raise BadRequest("the body must have either instances or inputs, and not both")
    columns = (_columns_of_rows if forms == ["instances"] else _columns)(document[forms[0]], signature)
    arrays: dict[str, NDArray[Any]] = {}
    encoded: dict[str, tuple[bytes, ...]] = {}
    for name, values in columns.items():
        tensor = find_tensor(name, signature.inputs, "input")
        if takes_images and tensor is signature.inputs[0] and _are_encoded(values):
            encoded[name] = tuple(_decode(name, each) for each in values)
        else:
            arrays[name] = _as_rows(tensor, values)
    return PredictRequest(arrays, forms == ["instances"], encoded)


def _columns_of_rows(rows: Any, signature: Signature) -> dict[str, Any]:
    """The inputs by name, each a list with an element for each row."""
    if not isinstance(rows, list) or not rows:
        raise BadRequest("instances must be a list of at least one row")
    names = [tensor.name for tensor in signature.inputs]
    is_named = isinstance(rows[0], dict) and not _is_encoded(rows[0])
    if len(names) == 1 and not is_named:
        return {names[0]: rows}
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or sorted(row) != sorted(names):
            raise BadRequest(f"instances: row {number} must be an object with {', '.join(names)}")
    return {name: [row[name] for row in rows] for name in names}


def _columns(inputs: Any, signature: Signature) -> dict[str, Any]:
    names = [tensor.name for tensor in signature.inputs]
    if isinstance(inputs, dict) and not (len(names) == 1 and _is_encoded(inputs)):
        return inputs
    if len(names) > 1:
        raise BadRequest(f"inputs must be an object with {', '.join(names)}, not {describe(inputs)}")
    return {names[0]: [inputs] if isinstance(inputs, dict) else inputs}


def _is_encoded(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"b64"}


def _are_encoded(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(map(_is_encoded, values))


def _decode(name: str, value: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BadRequest(f"{name}: b64 must be a string in base64") from None


def _as_rows(tensor: Tensor, values: Any) -> NDArray[Any]:
    found = array_from_json(tensor, values)
    if found.shape[1:] != tensor.row:
        raise BadRequest(
            f"{tensor.name}: shape {shorten(list(found.shape))} does not fit {list(tensor.shape)}"
        )
    return found


def write_predict(request: PredictRequest, signature: Signature, outputs: Arrays) -> bytes:
    """The body of an answer, in the form of the request."""
    lists = {tensor.name: _as_lists(outputs[tensor.name]) for tensor in signature.outputs}
    document: dict[str, Any]
    if request.by_row:
        rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        document = {"predictions": rows if len(lists) > 1 else next(iter(lists.values()))}
    else:
        document = {"outputs": lists if len(lists) > 1 else next(iter(lists.values()))}
    return json.dumps(document).encode()


def write_whole_answer(
    request: PredictRequest, signature: Signature, outputs: Arrays
) -> tuple[bytes, dict[str, str]]:
    """The body of an answer, and its headers."""
    return write_predict(request, signature, outputs), {"Content-Type": "application/json"}


def _as_lists(array: NDArray[Any]) -> list[Any]:
    found: list[Any] = (array if array.dtype.kind != "V" else array.astype(np.float32)).tolist()
    return found


def write_instances(inputs: Arrays) -> bytes:
    """The body of a request in row form."""
    names = list(inputs)
    if len(names) == 1:
        return json.dumps({"instances": _as_lists(inputs[names[0]])}).encode()
    columns = [_as_lists(inputs[name]) for name in names]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return json.dumps({"instances": rows}).encode()


def read_predictions(body: bytes, signature: Signature) -> Arrays:
    """The outputs in an answer in row form; BadRequest where it is none of this model."""
    rows = read_json(body, odd_numbers=True).get("predictions")
    if not isinstance(rows, list) or not rows:
        raise BadRequest("the answer has no predictions")
    outputs = signature.outputs
    if len(outputs) == 1:
        return {outputs[0].name: _as_rows(outputs[0], rows)}
    try:
        return {each.name: _as_rows(each, [row[each.name] for row in rows]) for each in outputs}
    except (KeyError, TypeError):
        raise BadRequest(f"each prediction must have {', '.join(each.name for each in outputs)}") from None


STATES = {"READY": "AVAILABLE", "LOADING": "LOADING", "UNLOADING": "UNLOADING", "UNAVAILABLE": "END"}
"""What TensorFlow Serving calls a version's states; one that could not be loaded is at its end, with an error."""


def describe_status(versions: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    """The states of a model's versions, each with the reason why it was refused, or an empty one."""
    return {
        "model_version_status": [
            {
                "version": str(version),
                "state": STATES[word],
                "status": {
                    "error_code": "FAILED_PRECONDITION" if STATES[word] == "END" else "OK",
                    "error_message": reason if STATES[word] == "END" else "",
                },
            }
            for version, (word, reason) in sorted(versions.items(), reverse=True)
        ]
    }


def describe_signature(name: str, version: int, signature: Signature) -> dict[str, Any]:
    """The metadata of a version."""

    def all_of(tensors: tuple[Tensor, ...], prefix: str) -> dict[str, Any]:
        return {
            tensor.name: {
                "dtype": TYPES[tensor.datatype],
                "tensor_shape": {
                    "dim": [{"size": str(axis), "name": ""} for axis in tensor.shape],
                    "unknown_rank": False,
                },
                "name": f"{prefix}{tensor.name}:0",
            }
            for tensor in tensors
        }

    described = {
        "inputs": all_of(signature.inputs, f"{SIGNATURE}_"),
        "outputs": all_of(signature.outputs, "StatefulPartitionedCall_"),
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version)},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: described}}},
    }

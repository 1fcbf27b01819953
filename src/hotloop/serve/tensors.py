"""Untrusted JSON and bytes to the rows that a signature asks for, or a sentence about what is wrong with them.

Shared by all protocols. Nothing is allocated by what a request says of itself, only by what it has sent.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.exportable import Arrays, Signature, Tensor
from hotloop.errors import did_you_mean
from hotloop.serve.batcher import describe_not_finite
from hotloop.serve.refusal import BadRequest

LARGEST_AXIS = 2**31 - 1
AMPLIFIED = 8
"""Times the largest body that the tensors of an answer may have: a few bytes a row may ask for many."""
NUMBERS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "V": {int, float}}
"""What JSON may give a tensor, by numpy's letter of its type; V is bfloat16."""
SHOWN = 100  # characters of what a client sent, in a message


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


_plain, _odd = (
    json.JSONDecoder(parse_constant=_refuse),
    json.JSONDecoder(),
)  # a new one costs as much as a request
_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxlist, _brief.maxstring, _brief.maxlong = 3, 12, SHOWN, SHOWN


def read_json(text: bytes | memoryview, *, odd_numbers: bool = False) -> dict[str, Any]:
    """A JSON object; BadRequest where it is none. NaN and infinity are taken where `odd_numbers` are a protocol's."""
    try:
        found = (_odd if odd_numbers else _plain).decode(str(text, "utf-8"))
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest(f"the body must be a JSON object, not {describe(found)}")
    return found


def describe(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def check_shape(name: str, shape: Any, tensor: Tensor) -> tuple[int, ...]:
    """The shape as a tuple; BadRequest where it is not one of this tensor with at least one row."""
    if not isinstance(shape, list) or not all(type(axis) is int for axis in shape):
        raise BadRequest(f"{name}: shape must be a list of whole numbers")
    if len(shape) != len(tensor.shape) or shape[1:] != list(tensor.row):
        raise BadRequest(f"{name}: shape {shorten(shape)} does not fit {list(tensor.shape)}")
    if not 1 <= shape[0] <= LARGEST_AXIS:
        raise BadRequest(f"{name}: shape {shorten(shape)} must have at least one row, and fewer than 2^31")
    return tuple(shape)


def shorten(value: Any) -> str:
    """A value of the client's in a message, written out only as far as it is shown."""
    text = value[: SHOWN + 1] if isinstance(value, str) else _brief.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def array_from_json(tensor: Tensor, data: Any) -> NDArray[Any]:
    """Numbers, in lists nested as they may be, in the tensor's type; BadRequest for any that it cannot hold."""
    if not isinstance(data, list):
        raise BadRequest(f"{tensor.name}: data must be a list, not {describe(data)}")
    try:
        # As objects: numpy would give every element the room of the longest string.
        found = np.asarray(data, object)
    except (ValueError, RecursionError):
        raise BadRequest(f"{tensor.name}: the lists of the data have unequal lengths") from None
    if not found.size:
        raise BadRequest(f"{tensor.name}: there are no numbers in the data")
    numbers, dtype = found.ravel().tolist(), tensor.dtype
    kinds = set(map(type, numbers))
    if list in kinds:
        raise BadRequest(f"{tensor.name}: the lists of the data have unequal lengths")
    if not kinds <= NUMBERS[dtype.kind]:
        raise BadRequest(f"{tensor.name}: the data must be {tensor.datatype} numbers")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if min(numbers) < limits.min or max(numbers) > limits.max:
            raise BadRequest(f"{tensor.name}: {tensor.datatype} goes from {limits.min} to {limits.max}")
        return found.astype(dtype)
    try:
        with np.errstate(over="ignore"):  # it is infinite then, which is refused with its row
            return found.astype(np.float64 if dtype.kind in "fV" else dtype).astype(dtype)
    except OverflowError:
        raise BadRequest(f"{tensor.name}: a number is too large for {tensor.datatype}") from None


def array_from_bytes(tensor: Tensor, shape: tuple[int, ...], data: memoryview) -> NDArray[Any]:
    """Little-endian numbers in C order, without a copy; BadRequest where the shape takes more or fewer."""
    wanted = math.prod(shape) * tensor.dtype.itemsize
    if len(data) != wanted:
        raise BadRequest(f"{tensor.name}: {len(data):,} bytes, and shape {list(shape)} takes {wanted:,}")
    found = np.frombuffer(data, np.uint8) if tensor.datatype == "BOOL" else np.frombuffer(data, tensor.dtype)
    return (found != 0 if tensor.datatype == "BOOL" else found).reshape(shape)


def find_tensor(name: Any, tensors: tuple[Tensor, ...], what: str) -> Tensor:
    """The input or output (`what`) of this name; BadRequest where there is none."""
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    if not isinstance(name, str):
        raise BadRequest(f"an {what} needs a name")
    names = [tensor.name for tensor in tensors]
    raise BadRequest(f"there is no {what} '{shorten(name)}'{did_you_mean(name[:100], names)}")


def check_rows(
    signature: Signature, found: Mapping[str, NDArray[Any]], most_bytes: int | None = None
) -> Arrays:
    """All inputs in the signature's order; BadRequest where one is missing, has other rows, or is not finite.

    `most_bytes` is the limit on bodies: what they ask for is limited by it, too. None: it is not.
    """
    missing = [tensor.name for tensor in signature.inputs if tensor.name not in found]
    if missing:
        raise BadRequest(f"the input {missing[0]} is missing")
    ordered = {tensor.name: found[tensor.name] for tensor in signature.inputs}
    first, *others = ordered
    for name in others:
        if len(ordered[name]) != len(ordered[first]):
            raise BadRequest(
                f"{first} has {len(ordered[first])} rows and {name} {len(ordered[name])}; they must have the same"
            )
    for tensor in signature.inputs:
        if ordered[tensor.name].shape[1:] != tensor.row:
            shape = list(ordered[tensor.name].shape)
            raise BadRequest(f"{tensor.name}: shape {shorten(shape)} does not fit {list(tensor.shape)}")
    if most_bytes is not None:
        _check_answer(signature, len(ordered[first]), AMPLIFIED * most_bytes)
    if (sentence := describe_not_finite(ordered)) is not None:
        raise BadRequest(sentence)
    return ordered


def row_bytes(tensors: tuple[Tensor, ...]) -> int:
    """Bytes of one row of all of them."""
    return sum(math.prod(tensor.row) * tensor.dtype.itemsize for tensor in tensors)


def _check_answer(signature: Signature, rows: int, most: int) -> None:
    """BadRequest where the answer to so many rows would fill the memory."""
    size = rows * row_bytes(signature.outputs)
    if size > most:
        raise BadRequest(
            f"the answer to {rows:,} rows has {size:,} bytes, over the limit of {most:,}: ask for fewer"
        )

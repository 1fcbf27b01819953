"""Arrays as a safetensors file: written by the package `safetensors`, and read by it strictly.

The package makes sure that every tensor has the bytes of its type and shape, and that they follow one another without
gap or overlap to the end of the file. What it passes over is refused here: a name that stands twice, and entries that
say more than they should.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hotloop.engine.exportable import Arrays
from hotloop.errors import ModelError

WEIGHTS = "weights.safetensors"
_LENGTH = 8  # bytes before the header, which say how long it is
_ENTRY = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
_TYPES = {"BOOL": "?", "F64": "f8", "F32": "f4", "F16": "f2"} | {
    f"{sign}{8 * size}": f"{sign.lower()}{size}" for sign in "IU" for size in (1, 2, 4, 8)
}


def format_weights(leaves: Mapping[str, Any]) -> bytes:
    """The file of arrays by name."""
    from safetensors.numpy import save

    return save({name: np.asarray(leaf, order="C") for name, leaf in leaves.items()})


def parse_weights(data: bytes) -> Arrays:
    """The file's arrays by name, also bfloat16, which the package's own reader for numpy lacks; ModelError where it is
    not whole or not strictly such a file."""
    import ml_dtypes
    from safetensors import SafetensorError, deserialize

    types = {name: np.dtype(code) for name, code in _TYPES.items()} | {"BF16": np.dtype(ml_dtypes.bfloat16)}
    try:
        found = dict(deserialize(data))  # type: ignore[no-untyped-call]
        _check_header(data[_LENGTH : _LENGTH + int.from_bytes(data[:_LENGTH], "little")])
        return {
            name: np.frombuffer(each["data"], types[each["dtype"]]).reshape(each["shape"])
            for name, each in found.items()
        }
    except (KeyError, SafetensorError, ValueError) as error:
        raise ModelError(f"{WEIGHTS}: cannot be read ({error})") from None


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by path (`params/dense/kernel`) as the tree of dicts that they came from."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = leaf
    return tree


def _check_header(text: bytes) -> None:
    """ValueError for what the package passes over; it has read the same bytes before."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name stands twice")
        return dict(pairs)

    for name, entry in json.loads(text, object_pairs_hook=unique).items():
        if name != _METADATA and set(entry) != _ENTRY:
            raise ValueError(f"tensor {name[:100]!r} has other entries than {', '.join(sorted(_ENTRY))}")

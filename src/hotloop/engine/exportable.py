"""What an exported model takes and gives, and what a family hands over to have one written.

It knows no family and no folder: names, types and shapes of tensors in the words of the Open Inference Protocol, and
the function with its weights, which `model_folder` writes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.run import RECORDS, current_records, read_events, read_json
from hotloop.errors import CheckpointError, HotloopError

Arrays = dict[str, NDArray[Any]]
Kind = Literal["image", "tensors"]
"""Whether a JPEG or PNG may stand for the input."""
BATCH = -1
"""The first axis of every tensor: as many rows as are asked."""
DATATYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
}
"""Names of the Open Inference Protocol -> of numpy (bfloat16 by ml_dtypes, which jax registers)."""
_NAMES = {name: datatype for datatype, name in DATATYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """A named input or output; `shape` begins with BATCH."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: Any, *row: int) -> "Tensor":
        """The tensor whose rows have this type and shape; HotloopError for a type that the protocol has not."""
        datatype = _NAMES.get(np.dtype(dtype).name)
        if datatype is None:
            raise HotloopError(
                f"{name}: {np.dtype(dtype)} has no name in the Open Inference Protocol; cast it to one of "
                f"{', '.join(DATATYPES.values())}"
            )
        return cls(name, datatype, (BATCH, *row))

    @property
    def dtype(self) -> np.dtype[Any]:
        import ml_dtypes

        found: Any = ml_dtypes.bfloat16 if self.datatype == "BF16" else DATATYPES[self.datatype]
        dtype: np.dtype[Any] = np.dtype(found)
        return dtype

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.shape[1:]


@dataclass(frozen=True)
class Signature:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Exportable:
    """A model as a family hands it over: a function of its weights and of named inputs, and what is to be known of it.

    `function(weights, inputs)` gives the signature's outputs by name. It is traced once for a batch of any size: it has
    to take the number of rows from `shape[0]`, and no row may change what another one gets.
    """

    family: str
    name: str
    """What the model is called where nobody gives it a name."""
    function: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
    weights: Any
    """A tree of arrays, as they are to be on the device."""
    signature: Signature
    examples: Arrays
    """Inputs of a few rows, whose answers go into the folder."""
    tolerance: float
    preprocessing: str
    """In words: what happens to an input before the network sees it, and what the caller has to do."""
    kind: Kind = "tensors"
    classes: tuple[str, ...] | None = None
    config: Mapping[str, Any] | None = None
    """What the family's `rebuild` makes the function from, as JSON; None where only the caller's own code can."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Where the weights are from: run, step, metrics, data."""
    warnings: tuple[str, ...] = ()

    def compute(self, weights: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """`function`, whose products of 32 bits are computed in 32: left alone, a GPU rounds their factors to fewer in
        ways that differ from one batch size to the next, by more than the tolerance."""
        import jax

        with jax.default_matmul_precision("highest" if self.tolerance <= FULL else None):
            return self.function(weights, inputs)


FULL, HALF = 1e-5, 1e-2
"""How far two computations of one answer may be apart: of models that compute in 32 bits, and in 16."""


def tolerance_of(dtype: Any) -> float:
    """By the type that a model computes in."""
    return FULL if np.dtype(dtype).itemsize >= 4 else HALF


def best_step(run: Path, steps: Iterable[int], metric: str, sign: int) -> int:
    """Of the steps that are there the one whose validation on record was best, of equals the earliest; `sign` is 1
    where more is better, else -1. CheckpointError where there is none; NaN is none."""
    there, known = set(steps), {}
    for each in _read_records(run):
        value = each.get(metric)
        if each["event"] == "validation" and each["update"] in there and isinstance(value, int | float):
            known[int(each["update"])] = sign * float(value)
    known = {step: value for step, value in known.items() if not math.isnan(value)}
    if not known:
        raise CheckpointError(f"best=True: no validation of a checkpoint in {run} is on record; give step=N")
    return max(known, key=lambda step: (known[step], -step))


def _read_records(run: Path | None) -> list[dict[str, Any]]:
    """None where there is no run, or nothing on record."""
    return current_records(read_events(run)) if run is not None and (run / RECORDS).exists() else []


def describe_source(run: Path | None, step: int, data: str) -> dict[str, Any]:
    """Where weights are from: what the records of their run say of this step, and what they warned of."""
    records = _read_records(run)
    validated = [each for each in records if each["event"] == "validation" and each["update"] == step]
    frame = ("event", "update", "time", "elapsed", "nonfinite")
    environment = run / "environment.json" if run is not None else None
    return {
        "run": str(run) if run is not None else None,
        "step": step,
        "metrics": {
            name: value for each in validated[-1:] for name, value in each.items() if name not in frame
        },
        "commit": read_json(environment).get("commit") if environment and environment.exists() else None,
        "data": data,
        "notices": [each["message"] for each in records if each["event"] == "warning" and "message" in each],
    }

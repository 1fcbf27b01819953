"""A function as StableHLO that later processes run without its code (`jax.export`).

One program takes a batch of any size, on a CPU, an NVIDIA GPU and a TPU; what cannot be traced so becomes a program for
each rung of the ladder, or for the platform at hand, and says so. Weights are arguments: no program holds them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hotloop.engine.checkpoint import named_leaves
from hotloop.engine.exportable import Exportable, Signature
from hotloop.errors import MissingExtra, ModelError, first_line

ANY = "any"
"""The key of a program that takes every batch."""
PLATFORMS = ("cpu", "cuda", "tpu")
_CUSTOM_CALL = re.compile(r'custom_call @"?([^\s"(]+)')


@dataclass(frozen=True)
class Programs:
    by_rows: Mapping[str, bytes]
    """ANY or a rung -> the program."""
    platforms: tuple[str, ...]
    notices: tuple[str, ...]
    """What it cannot do that others can, in words."""


def platform_here() -> str:
    """The default device's platform as `jax.export` calls it: cpu, cuda, rocm or tpu."""
    from jax import export

    from hotloop.engine.device import platform

    here = platform()
    return str(export.default_export_platform()) if here == jax.default_backend() else here


def export_programs(exportable: Exportable, ladder: Sequence[int]) -> Programs:
    """The function as widely usable as it can be; ModelError where it cannot be exported at all."""
    check_serialisable()
    reasons: list[str] = []
    for rows in ((None,), tuple(ladder)):
        for platforms in dict.fromkeys((PLATFORMS, (platform_here(),))):
            try:
                found = {
                    ANY if count is None else str(count): _export(exportable, count, platforms)
                    for count in rows
                }
            except Exception as error:  # a user's function may raise whatever it likes
                reasons.append(_explain_refusal(error))
                continue
            return Programs(found, platforms, tuple(_explain(rows, platforms, reasons)))
    raise ModelError(f"{exportable.name} cannot be exported: {reasons[-1]}")


def _explain_refusal(error: Exception) -> str:
    """In one line. jax refuses operations that no later version promises to know (a GPU's own kernels, a library's),
    and names them after its first line."""
    targets = dict.fromkeys(_CUSTOM_CALL.findall(str(error)))
    if not targets:
        return first_line(error)
    return f"it calls {', '.join(targets)}, which is no part of StableHLO: export a plain path"


def _explain(rows: Sequence[int | None], platforms: Sequence[str], reasons: Sequence[str]) -> list[str]:
    notices = []
    if rows != (None,):
        notices.append(
            f"one program for each of {len(rows)} batch sizes, as it takes none of any size: {reasons[1]}"
        )
    if platforms != PLATFORMS:
        notices.append(f"for {', '.join(platforms)} alone: {reasons[-1]}")
    return notices


def check_serialisable() -> None:
    """MissingExtra where a package is lacking that files of a model are written and read by."""
    for package in ("flatbuffers", "safetensors"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtra(package, "serve", "a model folder") from None


def _export(exportable: Exportable, rows: int | None, platforms: Sequence[str]) -> bytes:
    """One program for so many rows, or for any number."""
    from jax import export

    count = export.symbolic_shape("rows")[0] if rows is None else rows
    inputs = _forms(exportable.signature, count)
    function = jax.jit(by_leaf(exportable.compute, exportable.weights))
    weights = {
        name: _form(np.shape(leaf), leaf.dtype) for name, leaf in named_leaves(exportable.weights).items()
    }
    exported = export.export(function, platforms=platforms)(weights, inputs)
    return bytes(exported.serialize())


def _forms(signature: Signature, rows: Any) -> dict[str, Any]:
    return {each.name: _form((rows, *each.row), each.dtype) for each in signature.inputs}


def _form(shape: tuple[Any, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def by_leaf(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    """The function with its weights by readable path, so that a program knows no tree but dicts of arrays."""
    structure, names = jax.tree.structure(weights), list(named_leaves(weights))

    def call(leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(function(jax.tree.unflatten(structure, [leaves[name] for name in names]), inputs))

    return call


def check_signature(exportable: Exportable, rows: int) -> None:
    """ModelError where the function gives something else than its signature says."""
    inputs = _forms(exportable.signature, rows)
    found = jax.eval_shape(exportable.compute, exportable.weights, inputs)
    given = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in found.items()}
    said = {each.name: (each.dtype, (rows, *each.row)) for each in exportable.signature.outputs}
    if given != said:
        raise ModelError(f"{exportable.name}: gives {given}, and its signature says {said}")


class LoadedProgram:
    """Programs read back, and the weights on the device: a call for every number of rows that there is one for."""

    def __init__(self, programs: Mapping[str, bytes], weights: Mapping[str, Any], signature: Signature):
        """ModelError for bytes that are no program that this jax reads."""
        self._calls = {rows: jax.jit(_deserialise(program).call) for rows, program in programs.items()}
        self._weights = {name: jax.device_put(value) for name, value in weights.items()}
        self._signature = signature

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs as host arrays; ValueError for a number of rows that there is no program for."""
        rows = len(next(iter(inputs.values())))
        call = self._calls.get(ANY) or self._calls.get(str(rows))
        if call is None:
            raise ValueError(f"{rows} rows: there are programs for {', '.join(self._calls)} alone")
        found = call(self._weights, {each.name: inputs[each.name] for each in self._signature.inputs})
        for value in found.values():  # all of them on their way before the first is waited for
            value.copy_to_host_async()
        return {each.name: np.asarray(found[each.name]) for each in self._signature.outputs}


def _deserialise(program: bytes) -> Any:
    from jax import export

    try:
        return export.deserialize(bytearray(program))
    except Exception as error:  # jax has no error of its own for a program that is too old or too new
        raise ModelError(f"this jax cannot read its program ({first_line(error)})") from None

"""A model as a folder, `DIR/NAME/VERSION`: program, weights, examples and model.json, which has a checksum of each.

It is written beside its place, compared in a fresh process, and only then renamed into it: what is there is whole. Only
checked bytes are handed on, and none of them is unpickled.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hotloop.engine.checkpoint import named_leaves
from hotloop.engine.device import PREALLOCATE, describe_environment, platform
from hotloop.engine.exportable import Arrays, Exportable, Signature, Tensor
from hotloop.engine.exported_program import ANY, Programs, check_signature, export_programs
from hotloop.engine.model_place import MODEL, check_place, put_in_place, staged
from hotloop.engine.run import write_all, write_json
from hotloop.engine.weights_file import WEIGHTS, format_weights
from hotloop.errors import ModelError
from hotloop.machine import run_child
from hotloop.options import to_jsonable
from hotloop.options.files import load_json

FORMAT = 1
LARGEST_BATCH = 64
"""Rows of the largest batch that is compiled, where nobody says."""
EXAMPLES = "examples.npz"
CHECK = "hotloop.serve.check"
"""The program that loads a folder in a process of its own and compares its examples."""
NO_DEVICE = 3
"""Its status where it cannot have the device, or has too little of its memory."""
COMPARING_SECONDS = 900.0
_READS = "jax {}, and those released up to 6 months after it or 3 weeks before; by none released after {}"
# jax does not say when it was released; that was before the export, so that six months from then are the most.
_READABLE = timedelta(days=184)


def write_model(
    exportable: Exportable,
    output: Path,
    *,
    name: str | None = None,
    version: int | None = None,
    ladder: Sequence[int],
    extend: Callable[[Exportable, Path], None] | None = None,
) -> tuple[Path, Programs]:
    """The model's new folder, after a fresh process has found it right; else nothing is left.

    `extend` may add files to the folder while it is made: the same model in another format, say.
    """
    name = name or exportable.name
    check_place(output, name, version)
    check_signature(exportable, ladder[0])
    answers = answer_examples(exportable)
    programs = export_programs(exportable, ladder)
    with staged(output / name) as part:
        for rows, program in programs.by_rows.items():
            _write(part / _program_file(rows), program)
        _write(part / WEIGHTS, format_weights(named_leaves(exportable.weights)))
        _write(part / EXAMPLES, _examples_bytes(exportable.examples, answers))
        if extend is not None:
            extend(exportable, part)
        about = {**describe(exportable, name, ladder, programs), "files": _list_files(part)}
        write_json(part / MODEL, {**about, "sha256": self_digest(about)})
        notice = compare_in_fresh_process(part)
        place = put_in_place(part, version)
    return place, replace(programs, notices=(*programs.notices, *([notice] if notice else [])))


def answer_examples(exportable: Exportable) -> Arrays:
    """What the family's own function gives; ModelError where that is not finite: a server would refuse every request,
    as if it were wrong."""
    found = jax.jit(exportable.compute)(exportable.weights, exportable.examples)
    answers = {each.name: np.asarray(found[each.name]) for each in exportable.signature.outputs}
    for name, value in answers.items():
        if value.dtype.kind not in "iub" and not np.isfinite(value).all():
            raise ModelError(
                f"its own examples are answered with NaN or infinity ({name}): the weights have diverged; "
                "export an earlier checkpoint"
            )
    return answers


def make_ladder(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the largest."""
    powers = [1]
    while 2 * powers[-1] < largest:
        powers.append(2 * powers[-1])
    return tuple(dict.fromkeys((*powers, largest)))


def describe(exportable: Exportable, name: str, ladder: Sequence[int], programs: Programs) -> dict[str, Any]:
    """What model.json says, but for the files: all that a server and its users need to know, and where it is from."""
    signature, now = exportable.signature, datetime.now(UTC)
    until = (now + _READABLE).date().isoformat()
    sides = {"inputs": signature.inputs, "outputs": signature.outputs}
    described: dict[str, Any] = to_jsonable({
        "format": FORMAT,
        "name": name,
        "family": exportable.family,
        "kind": exportable.kind,
        "signature": {
            side: [{"name": each.name, "datatype": each.datatype, "shape": each.shape} for each in tensors]
            for side, tensors in sides.items()
        },
        "classes": exportable.classes,
        "ladder": list(ladder),
        "preprocessing": exportable.preprocessing,
        "tolerance": exportable.tolerance,
        "programs": {rows: _program_file(rows) for rows in programs.by_rows},
        "platforms": programs.platforms,
        "notices": programs.notices,
        "readable_by": _READS.format(jax.__version__, until),
        "readable_until": until,
        "config": exportable.config,
        "source": exportable.source,
        "exported": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "environment": describe_environment(),
    })  # fmt: skip
    return described


def compare_in_fresh_process(folder: Path) -> str | None:
    """ModelError where a process that knows no family does not get the examples' answers from this folder; a notice
    where it was not the device here that gave them."""
    device = platform()
    status, said = _run_check(folder, device)
    notice = None
    if status == NO_DEVICE and device != "cpu":
        notice = f"compared on the CPU, as a second process cannot have the {device} beside this one: {said}"
        status, said = _run_check(folder, "cpu")
    if status:
        raise ModelError(f"not exported: the new folder, loaded in a fresh process, fails: {said}")
    return notice


def _run_check(folder: Path, device: str) -> tuple[int, str]:
    """Its status, and the last line of what it said."""
    # This process may hold most of a GPU, and may be one of several, which the new one is not.
    own = {PREALLOCATE: "false", "HOTLOOP_PROCESSES": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "HOTLOOP_NOTES"} | own
    try:
        words = [sys.executable, "-m", CHECK, str(folder), device]
        return run_child(words, environment, COMPARING_SECONDS)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {COMPARING_SECONDS:.0f} seconds"


def _program_file(rows: str) -> str:
    return "program.bin" if rows == ANY else f"program-{rows}.bin"


def _examples_bytes(inputs: Arrays, answers: Arrays) -> bytes:
    file = BytesIO()
    sides = {"inputs": inputs, "outputs": answers}
    arrays: dict[str, Any] = {
        f"{side}/{name}": value for side, found in sides.items() for name, value in found.items()
    }
    np.savez(file, **arrays)
    return file.getvalue()


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file, by its path in the folder."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        found[str(path.relative_to(folder))] = {"bytes": len(data), "sha256": _digest(data)}
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def self_digest(about: Mapping[str, Any]) -> str:
    """Of model.json's other contents, in one spelling."""
    body = {key: value for key, value in about.items() if key != "sha256"}
    return _digest(json.dumps(body, sort_keys=True).encode())


def read_about(folder: Path) -> dict[str, Any]:
    """The contents of model.json, whole and of a format that is read here; ModelError else."""
    path = folder / MODEL
    try:
        about = load_json(path)
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {MODEL} there; give a folder that `hotloop export` wrote") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None
    number = about.get("format") if isinstance(about, dict) else None
    if type(number) is not int:
        raise ModelError(f"{path}: not the description of a model")
    if number > FORMAT:
        raise ModelError(
            f"{folder}: its format is {number}, and this hotloop reads up to {FORMAT}: upgrade hotloop, or export again"
        )
    if about.get("sha256") != self_digest(about):
        raise ModelError(f"{path}: does not match its own checksum: it was cut or altered; export again")
    return dict(about)


def read_file(folder: Path, about: Mapping[str, Any], name: str) -> bytes:
    """A file's bytes as they were written; ModelError where they are not."""
    stored = about["files"][name]
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise ModelError(f"{folder / name}: cannot be read: {error.strerror}") from None
    if len(data) != stored["bytes"]:
        raise ModelError(
            f"{folder / name}: has {len(data)} bytes, {stored['bytes']} were written; export again"
        )
    if _digest(data) != stored["sha256"]:
        raise ModelError(
            f"{folder / name}: does not match its checksum: at least one byte differs; export again"
        )
    return data


def parse_signature(found: Mapping[str, Any]) -> Signature:
    def side(name: str) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(str(each["name"]), str(each["datatype"]), tuple(map(int, each["shape"])))
            for each in found[name]
        )

    return Signature(side("inputs"), side("outputs"))


def parse_examples(data: bytes, signature: Signature) -> tuple[Arrays, Arrays]:
    """Inputs and answers; npz knows no bfloat16, so that types are the signature's."""
    stream = BytesIO(data)
    with np.load(stream, allow_pickle=False) as found:
        sides = {"inputs": signature.inputs, "outputs": signature.outputs}
        inputs, answers = (
            {each.name: found[f"{side}/{each.name}"].view(each.dtype) for each in tensors}
            for side, tensors in sides.items()
        )
    return inputs, answers

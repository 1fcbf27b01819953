"""A model folder, opened and run: `DIR/NAME/VERSION` with a program, its weights, its signature and examples.

It needs neither the training code nor a checkpoint, and nothing in it is unpickled. A program is trusted input all the
same (it can reach any custom call of the compiler's library): load only folders that you made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hotloop.engine.exportable import Arrays, Signature, Tensor
from hotloop.engine.exported_program import LoadedProgram, check_serialisable, platform_here
from hotloop.engine.model_folder import (
    EXAMPLES,
    parse_examples,
    parse_signature,
    read_about,
    read_file,
)
from hotloop.engine.model_place import VERSION
from hotloop.engine.weights_file import WEIGHTS, parse_weights
from hotloop.errors import ModelError

__all__ = ["Artefact", "Signature", "Tensor", "find_disagreement", "in_rungs"]

Answer = Callable[[Mapping[str, Any]], Arrays]


@dataclass(frozen=True)
class Artefact:
    """A folder whose files are whole, of this format, and for a platform that is here."""

    folder: Path
    name: str
    version: int
    """The number that its folder is called; 0 for one that is not in its place yet."""
    signature: Signature
    ladder: tuple[int, ...]
    """Batch sizes to compile, rising; a batch is filled up to the next one."""
    kind: str
    """`image` where a JPEG or PNG may stand for the input, else `tensors`."""
    classes: tuple[str, ...] | None
    tolerance: float
    """How far an answer may be from the example's: 1e-5, or 1e-2 for a model that computes in 16 bits."""
    about: Mapping[str, Any]
    """All of model.json."""

    @classmethod
    def open(cls, folder: str | Path) -> "Artefact":
        """Check the checksums, the format and the platform; ModelError, in one line, where one is wrong."""
        folder = Path(folder)
        check_serialisable()
        about = read_about(folder)
        try:
            found = cls(
                folder=folder,
                name=str(about["name"]),
                version=int(folder.name) if VERSION.fullmatch(folder.name) else 0,
                signature=parse_signature(about["signature"]),
                ladder=tuple(map(int, about["ladder"])),
                kind=str(about["kind"]),
                classes=None if about["classes"] is None else tuple(map(str, about["classes"])),
                tolerance=float(about["tolerance"]),
                about=about,
            )
            files = [WEIGHTS, EXAMPLES, *about["programs"].values()]
            for name in files:
                read_file(folder, about, name)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{folder}: model.json cannot be read ({error!r}); export again") from None
        if found.version and folder.absolute().parent.name != found.name:
            raise ModelError(f"{folder}: holds the model {found.name}: put it into a folder of that name")
        here, there = platform_here(), about["platforms"]
        if here not in there:
            raise ModelError(
                f"{folder}: was exported for {', '.join(there)}, and here is {here}: export it here"
            )
        return found

    def parameters(self) -> dict[str, Any]:
        """What a client may want to know besides the signature: names of classes, whether encoded images are taken, and
        the range of ratings, with the one from which an item is liked where an order was learnt."""
        found: dict[str, Any] = {} if self.classes is None else {"classes": list(self.classes)}
        if self.kind == "image":
            found["kind"] = self.kind
        config = self.about.get("config") or {}
        if {"low", "high"} <= config.keys():
            found["ratings"] = {name: config.get(name) for name in ("low", "high", "relevant")}
        return found

    def examples(self) -> tuple[Arrays, Arrays]:
        """A few inputs, and what the model answered when it was exported."""
        data = read_file(self.folder, self.about, EXAMPLES)
        try:
            return parse_examples(data, self.signature)
        except (BadZipFile, KeyError, ValueError) as error:
            raise ModelError(f"{self.folder / EXAMPLES}: cannot be read ({error})") from None

    def load(self) -> Answer:
        """The model as a function of inputs with as many rows as a rung; its weights are on the device once.

        Each number of rows is compiled when it is first called with. The bytes that run are those whose checksums are
        compared here once more: a folder may have changed since it was opened.
        """
        programs = {
            rows: read_file(self.folder, self.about, name) for rows, name in self.about["programs"].items()
        }
        weights = parse_weights(read_file(self.folder, self.about, WEIGHTS))
        try:
            return LoadedProgram(programs, weights, self.signature)
        except ModelError as error:
            raise ModelError(f"{self.folder}: {error}; {self.renewal}") from None

    @property
    def renewal(self) -> str:
        """What to do about a program that this jax does not read, to end a sentence with."""
        return (
            f"it was made for {self.about.get('readable_by')}: "
            f"`hotloop export --refresh {self.folder}` makes a new one"
        )


def in_rungs(call: Answer, ladder: Sequence[int], inputs: Mapping[str, Any]) -> Arrays:
    """The answers to any number of rows: cut by the largest rung, the rest filled up with its last row to the next."""
    rows = len(next(iter(inputs.values())))
    parts = []
    for start in range(0, rows, ladder[-1]):
        count = min(ladder[-1], rows - start)
        rung = next(each for each in ladder if each >= count)
        picked = np.minimum(np.arange(start, start + rung), rows - 1)
        found = call({name: np.asarray(value)[picked] for name, value in inputs.items()})
        parts.append({name: value[:count] for name, value in found.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def find_disagreement(expected: Arrays, found: Arrays, tolerance: float) -> str | None:
    """In one line how answers differ by more than the tolerance, which is relative above 1; None where they do not.

    Whole numbers must be equal, unless they name a place in an order (classes, items) whose neighbours' figures are
    within the tolerance: such may change places.
    """
    figures = [name for name, value in expected.items() if value.dtype.kind not in "iub"]
    for name, value in expected.items():
        other = found.get(name)
        if other is None or other.shape != value.shape:
            return f"{name}: shape {None if other is None else other.shape}, not {value.shape}"
        if name in figures:
            wide, near = value.astype(np.float64), other.astype(np.float64)
            with np.errstate(invalid="ignore"):
                apart = np.abs(wide - near) / np.maximum(1, np.abs(wide))
            wrong = ~((apart <= tolerance) | (wide == near) | (np.isnan(wide) & np.isnan(near)))
            if wrong.any():
                return (
                    f"{name}: {near[wrong][0]:.9g}, not {wide[wrong][0]:.9g} (more than {tolerance:g} apart)"
                )
            continue
        scores = [expected[each] for each in figures if expected[each].shape == value.shape]
        wrong = (value != other) & ~_in_ties(scores, value.shape, tolerance)
        if wrong.any():
            return f"{name}: {other[wrong][0]}, not {value[wrong][0]}"
    return None


def _in_ties(scores: Sequence[Any], shape: tuple[int, ...], tolerance: float) -> Any:
    """Where a neighbour along the last axis has as good a figure; the last place may tie with one that was left out."""
    tied = np.zeros(shape, bool)
    if not scores or len(shape) < 2:
        return tied
    wide = scores[0].astype(np.float64)
    close = np.abs(np.diff(wide, axis=-1)) <= 2 * tolerance * np.maximum(1, np.abs(wide[..., 1:]))
    tied[..., 1:] |= close
    tied[..., :-1] |= close
    tied[..., -1] = True
    return tied

"""Models for tests of a server: real signatures, and a device that is a few lines of numpy."""

import asyncio
from pathlib import Path

import numpy as np

from hotloop.engine.exportable import Signature, Tensor
from hotloop.serve.artefact import Artefact
from hotloop.serve.batcher import Batcher, Ran, join_rows
from hotloop.serve.figures import Figures
from hotloop.serve.models import LoadedVersion, Models

IMAGE = Signature(
    (Tensor("image", "UINT8", (-1, 4, 4, 3)),),
    (Tensor("probabilities", "FP32", (-1, 2)), Tensor("classes", "INT32", (-1, 1))),
)
ROWS = Signature((Tensor("x", "FP32", (-1, 3)),), (Tensor("y", "FP32", (-1, 3)),))
TWO = Signature(
    (Tensor("items", "INT32", (-1, 2)), Tensor("ratings", "FP32", (-1, 2))),
    (Tensor("items", "INT32", (-1, 2)),),
)


def make_artefact(name="rows", version=1, signature=ROWS, ladder=(1, 2, 4)):
    return Artefact(
        folder=Path("nowhere") / name / str(version),
        name=name,
        version=version,
        signature=signature,
        ladder=ladder,
        kind="image" if signature is IMAGE else "tensors",
        classes=("cat", "dog") if signature is IMAGE else None,
        tolerance=1e-5,
        about={"config": {"dataset": "cifar10"}},
    )


def compute(artefact, rows):
    """What the fake device answers: of the rows alone, and other numbers for another version."""
    if artefact.signature is IMAGE:
        mean = rows["image"].reshape(len(rows["image"]), -1).mean(axis=1) / 255
        shares = np.stack([mean, 1 - mean], axis=1).astype(np.float32)
        return {"probabilities": shares, "classes": shares.argmax(axis=1).astype(np.int32)[:, None]}
    if artefact.signature is TWO:
        return {"items": rows["items"] + rows["ratings"].astype(np.int32)}
    with np.errstate(over="ignore"):
        return {"y": rows["x"] * np.float32(2 * artefact.version)}


class FakeDevice:
    """Runs batches as `compute` does; `busy` holds it up, `error` is raised once."""

    def __init__(self, artefact):
        self.artefact, self.rungs, self.error, self.busy = artefact, [], None, None

    async def __call__(self, parts, rung):
        self.rungs.append(rung)
        if self.busy is not None:
            await self.busy.wait()
        await asyncio.sleep(0)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return Ran(compute(self.artefact, join_rows(parts, rung)), 0.0, 0.001)


def load_fake(models, artefact, *, queue=256):
    """Put a fake version among the models; its device."""
    device = FakeDevice(artefact)
    name, version = artefact.name, artefact.version
    batcher = Batcher(
        device,
        artefact.ladder,
        queue=queue,
        on_batch=lambda record: models.figures.count_batch(name, version, record),
    )
    models.put(LoadedVersion(artefact, batcher, lambda: None))
    return device


def make_models(*artefacts):
    """Models with these, or with two versions of `rows`, an `image` and a `two`."""
    models = Models(Figures())
    default = (
        make_artefact(),
        make_artefact(version=2),
        make_artefact("image", signature=IMAGE),
        make_artefact("two", signature=TWO),
    )
    return models, {a.name + str(a.version): load_fake(models, a) for a in artefacts or default}

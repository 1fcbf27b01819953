"""Whole runs of a network with one label changed, or one weight moved before the first update: controls of tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hotloop.engine.batch_sources import ShuffledBatches
from hotloop.families.cnn import model
from same_numbers import with_other_label

WAYS = ("label", "weight")


@contextmanager
def changed(way: str, update: int = 1) -> Iterator[None]:
    """Trainings inside it have another label in the batch of this update, or another weight at their start."""
    batches, init = ShuffledBatches.batches, model.init

    def relabelled(self: Any, first: int, *others: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(self, first, *others), first):
            yield with_other_label(batch, 5, 1) if number == update else batch

    def moved(job: Any, key: Any, *weights: Any) -> Any:
        state = init(job, key, *weights)
        params = dict(state["params"])
        layer = next(node.name for node in job.network.nodes if "kernel" in params.get(node.name, ()))
        kernel = params[layer]["kernel"]
        params[layer] = {**params[layer], "kernel": kernel.at[(0,) * kernel.ndim].add(1e-2)}
        return {**state, "params": params}

    with pytest.MonkeyPatch.context() as patch:
        if way == "label":
            patch.setattr(ShuffledBatches, "batches", relabelled)
        else:
            patch.setattr(model, "init", moved)
        yield

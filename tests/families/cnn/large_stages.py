"""Two updates of a large network in stages, for slow tests: `python large_stages.py CONFIG SIDE REPLICAS [whole]`.

The configuration's own stages, precision and optimiser, on few made-up images of SIDE x SIDE; `whole` merges the stages
on one device. Rounding is to nearest, so that two ways can be compared. Prints one line of JSON; weights go to the file
that the environment's WEIGHTS names; those of `whole`, which is the faster one, beside a run's with one other label and
one's with a moved weight.
"""

import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from cnn_words import typed

from hotloop.engine.keys import seed_key
from hotloop.families.cnn import model
from hotloop.families.cnn.job import resolve
from hotloop.families.cnn.options import DatasetSize
from same_numbers import with_moved_weight, with_other_label

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MICRO, COUNT = 4, 4


def flat(params: Any) -> Any:
    return np.concatenate([np.ravel(leaf).astype(np.float32) for leaf in jax.tree.leaves(params)])


def main(name: str, side: int, replicas: int, merged: bool) -> None:
    words = ["--config", name, "--micro-batch-size", str(MICRO), "--gradient-accumulation-count", str(COUNT)]
    words += ["--stochastic-rounding", "OFF", "--lr-schedule", "const"]
    words += ["--lr-schedule-params", "{initial_learning_rate: 1e-4}", "--lr-staircase", "False"]
    config = replace(
        typed(*words).config, num_replicas=replicas, global_batch_size=None, lr_warmup_params=None
    )
    size = DatasetSize(MICRO * COUNT * replicas, 64, (side, side, 3), 1000)
    job = resolve(config, size, 1 if merged else replicas * config.stages)
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (size.train, side, side, 3)).astype(np.uint8)
    batch = {"image": images, "label": draws.integers(0, 1000, size.train).astype(np.int32)}
    start = model.init(job, seed_key(1))
    state = model.spread(job, start)
    began = time.perf_counter()
    update = jax.jit(model.update(job)).lower(state, batch, seed_key(2)).compile(QUICK)
    compiled = time.perf_counter() - began

    def two_updates(state: Any, batch: Any) -> tuple[Any, list[float]]:
        losses = []
        for number in range(2):
            state, figures = update(state, batch, seed_key(2 + number))
            losses.append(float(figures["loss"]))
        return model.gather(state)["params"], losses

    params, losses = two_updates(state, batch)
    if "WEIGHTS" in os.environ:
        trees = {"same": params, "start": start["params"]}
        if merged:
            moved = with_moved_weight(start, "params", job.network.nodes[0].name, "kernel", by=0.25)
            trees["label"] = two_updates(state, with_other_label(batch, 1000))[0]
            trees["weight"] = two_updates(model.spread(job, moved), batch)[0]
        np.savez(os.environ["WEIGHTS"], **{name: flat(each) for name, each in trees.items()})
    found = {"stages": job.stages, "replicas": job.batch.replicas, "losses": losses, "compiled": compiled}
    kinds = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
    print(json.dumps(found | {"kinds": kinds, "devices": len(jax.devices())}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["whole"])

"""The family in `hotloop demo`: a short training on drawn digits, curves and a picture."""

import base64
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from hotloop.data.dataset import binarise
from hotloop.data.stand_ins import draw_digits
from hotloop.engine.feed import Resident
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program, copy_state
from hotloop.families.vcd import model, samples
from hotloop.families.vcd.config import VcdModel

IMAGES, ROWS, COLUMNS = 5_000, 4, 3
USUAL, DIVERGENCE, TIMED = 1_500, 60, 40
MODEL = VcdModel(learning_rate=2e-3)


def demo_run() -> dict[str, Any]:
    """Curves of both phases, updates a second, and a PNG of reconstructions as base64."""
    grey, _ = draw_digits(IMAGES, seed=0)
    bits = binarise(grey).reshape(IMAGES, -1)
    job = model.Job(MODEL, IMAGES)
    state = copy_state(model.init(job, stream(seed_key(0), "init", 0)))
    # First by the usual bound, which is cheap: a few seconds on a CPU are then enough to see digits.
    usual = model.Job(replace(MODEL, method="kl"), IMAGES)
    bound, state = _trained(usual, {**state, "variate": {}}, bits, USUAL)
    state = {**state, "variate": model.init(job, seed_key(0))["variate"]}
    metrics, state = _trained(job, state, bits, DIVERGENCE)
    shown = bits[: ROWS * COLUMNS]
    drawn = jax.jit(samples.draw(job, 1, 2 * MODEL.hmc_steps))(state, shown, seed_key(2))
    parts = [samples.make_pictures(part) for part in (shown, drawn.before, drawn.after)]
    picture = samples.enlarge(samples.arrange_triples(parts, COLUMNS), 2)
    return {
        "elbo": bound["elbo"][:: USUAL // 100].tolist(),
        "log_joint_z0": metrics["log_joint_z0"].tolist(),
        "log_joint_zt": metrics["log_joint_zt"].tolist(),
        "updates_per_second": metrics["updates_per_second"],
        "batch_size": MODEL.micro_batch_size,
        "picture": base64.b64encode(samples.encode_png(picture)).decode(),
    }


def _trained(job: model.Job, state: Any, bits: NDArray[np.uint8], updates: int) -> tuple[dict[str, Any], Any]:
    feed = Resident({"image": bits, "index": np.arange(IMAGES)}, job.model.micro_batch_size)
    program = Program(model.update(job), feed, updates, seed_key(1))
    program.fit(state, {updates - TIMED: 1, TIMED: 1})
    program.compile(state, updates - TIMED)
    program.compile(state, TIMED)
    state, first = program(state, 0, updates - TIMED)
    first.wait()
    began = time.perf_counter()
    state, last = program(state, updates - TIMED, TIMED)
    last.wait()
    seconds = time.perf_counter() - began
    curves = {name: np.concatenate([first[name], last[name]]) for name in first}
    return {**curves, "updates_per_second": TIMED / seconds}, state

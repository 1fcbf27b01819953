"""`hotloop vcd evaluate`: the log-likelihood of a run's images by three proposals, as a table and a JSON file.

`estimate_likelihoods` does it for weights in memory, at the end of a training; `run` for a checkpoint.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine import processes
from hotloop.engine.device import mesh_of_replicas, replicas_that_fit
from hotloop.engine.feed import place_everywhere
from hotloop.engine.keys import seed_key
from hotloop.engine.progress import Console
from hotloop.engine.run import write_json
from hotloop.errors import DataError
from hotloop.families.vcd import images as image_sets
from hotloop.families.vcd import model
from hotloop.families.vcd.config import LikelihoodOptions, VcdEvaluate
from hotloop.families.vcd.images import Bits
from hotloop.families.vcd.likelihood import (
    BLOCK,
    HEADLINE,
    LikelihoodEstimate,
    LikelihoodEstimator,
    make_proposals,
)
from hotloop.families.vcd.model import Job, State
from hotloop.options import to_jsonable

FEW = 10
"""Effective samples below which a bound is loose and its Monte-Carlo error, made of the same weights, too small."""


def run(config: VcdEvaluate, context: Console) -> Mapping[str, Any]:
    """Evaluate a checkpoint; the result is also written to the run's folder."""
    if config.replicas is not None:
        mesh_of_replicas(config.replicas)  # too many are refused before anything is read
    found = model.load_run(config.run, config.step)
    job = replace(found.job, replicas=config.replicas or replicas_that_fit(found.config.replicas))
    state = place_everywhere(found.state, job.mesh)
    data = config.data or found.config.data
    sets = image_sets.load_images(data, context, hold_out=found.config.validation)
    rows: Bits = getattr(sets, config.split)
    if not len(rows):
        raise DataError(f"--split {config.split}: {sets.name} has no such images here; choose test or train")
    context.say(f"{config.run} after {found.step:,} updates: {config.split} images of {sets.source}")
    result = {
        "run": str(config.run),
        "step": found.step,
        "split": config.split,
        "data": sets.name,
        "source": sets.source,
        "notice": sets.notice,
        **estimate_likelihoods(job, state, rows[: config.images], config, config.seed, context),
    }
    # A quick look, or one at other data, never replaces the evaluation proper.
    other = "" if config.data in (None, found.config.data) else f"-{sets.name}"
    part = f"-first-{config.images}" if config.images else ""
    path = config.run / "evaluations" / f"{config.split}-{found.step}{other}{part}.json"
    if processes.is_writer():
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    context.say(f"written: {path}")
    return {**to_jsonable(result), "path": str(path)}


def estimate_likelihoods(
    job: Job, state: State, images: Bits, config: LikelihoodOptions, seed: int, context: Console
) -> dict[str, Any]:
    """The estimates for images [N, 784] of zeros and ones, said as a table and returned."""
    started = time.perf_counter()
    samples, leapfrogs = config.iwae_samples, job.model.leapfrog_steps
    estimator = LikelihoodEstimator(
        state["params"],
        images,
        seed_key(seed),
        batch_size=config.test_batch_size,
        samples=samples,
        mesh=job.mesh,
    )
    marks: list[float] = []
    with context.progress("ELBO", estimator.units(BLOCK)) as bar:

        def mark(count: int) -> None:
            marks.append(time.perf_counter())
            bar.advance(count)

        weighed = estimator.weigh("elbo", estimator.encoder, BLOCK, mark)
        elbo = np.asarray(weighed.elbo, np.float64)
    pace = (marks[-1] - marks[0]) / estimator.units(BLOCK)  # the first mark comes when all is compiled
    iterations = config.burn_in + config.kept
    weighing, sampling = 3 * samples * estimator.flops, 2 * iterations * leapfrogs * estimator.flops
    seconds = 3 * estimator.units(samples) * pace * (1 + sampling / weighing)
    if seconds < 90:
        duration = f"{max(1, round(seconds))} s"
    else:
        duration = f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
    context.say(
        f"estimate: 3 proposals x {samples:,} samples x {len(images):,} images after {iterations:,} HMC "
        f"iterations, {weighing + sampling:.1e} FLOP, about {duration} once compiled"
    )
    with context.progress("HMC", iterations) as bar:
        ensemble = estimator.sample(
            float(state["step_size"]), leapfrogs, config.burn_in, config.kept, bar.advance
        )
    chosen = make_proposals(estimator.encoder, ensemble.mean, ensemble.squares, config.kept)
    with context.progress("importance sampling", len(chosen) * estimator.units(samples)) as bar:
        figures = {
            name: summarise(estimator.weigh(name, proposal, samples, bar.advance), samples)
            for name, proposal in chosen.items()
        }
    result = {
        "log_likelihood": figures[HEADLINE]["log_likelihood"],
        "standard_error": figures[HEADLINE]["standard_error"],
        "headline": HEADLINE,
        "proposals": figures,
        "elbo": float(np.mean(elbo)),
        "elbo_standard_error": _error(elbo),
        "images": len(images),
        "iwae_samples": samples,
        "burn_in": config.burn_in,
        "kept": config.kept,
        "seed": seed,
        "trained_step_size": float(state["step_size"]),
        "step_size": float(ensemble.step_size),
        "acceptance": float(ensemble.acceptance),
        "seconds": time.perf_counter() - started,
    }
    _show(result, context)
    return result


def summarise(weighed: LikelihoodEstimate, samples: int) -> dict[str, float]:
    """The mean over images and its two errors, and the effective samples as a share of all.

    `standard_error` is what other images would change, `monte_carlo_error` what other samples for the same
    images would; `few_effective` is the share of images whose samples are too few to say so.
    """
    values, effective, variance, _ = (np.asarray(part, np.float64) for part in weighed)
    share = effective / samples
    return {
        "log_likelihood": float(values.mean()),
        "standard_error": _error(values),
        "monte_carlo_error": math.sqrt(float(variance.mean()) / len(values)),
        "effective_mean": float(share.mean()),
        "effective_median": float(np.median(share)),
        "effective_min": float(share.min()),
        "few_effective": float((effective < FEW).mean()),
    }


def _error(values: NDArray[np.float64]) -> float:
    """Of the mean over images; one image says nothing of it."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _show(result: Mapping[str, Any], context: Console) -> None:
    errors, shares = ("s.e. (images)", "s.e. (Monte Carlo)"), ("ESS mean", "median", "min")
    columns = ["proposal", "log-likelihood", *errors, *shares, f"images with ESS < {FEW}"]
    rows = []
    for name, figures in result["proposals"].items():
        value, error, monte_carlo, *shares = figures.values()
        numbers = (f"{number:.3f}" for number in (value, error, monte_carlo))
        rows.append((name, *numbers, *(f"{100 * share:.3g} %" for share in shares)))
    context.table(columns, rows)
    context.say(f"ELBO {result['elbo']:.3f}, s.e. (images) {result['elbo_standard_error']:.3f}")
    context.say(
        f"log-likelihood {result['log_likelihood']:.2f} +- {result['standard_error']:.2f} nats "
        f"({HEADLINE}, {result['images']:,} images, {result['seconds']:.1f} s)"
    )
    if few := result["proposals"][HEADLINE]["few_effective"]:
        context.warn(
            f"{100 * few:.3g} % of the images have fewer than {FEW} effective samples: their likelihood is "
            "understated; raise --iwae-samples, --burn-in or --kept"
        )

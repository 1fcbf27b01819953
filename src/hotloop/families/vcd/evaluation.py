"""`hotloop vcd evaluate`: the log-likelihood of a run's images by three proposals, as a table and a JSON file.

`likelihoods` does it for weights in memory, at the end of a training; `run` for a checkpoint. What is
computed, and how, is in `likelihood`, `proposals` and `estimator`.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.keys import seed_key
from hotloop.engine.progress import Console
from hotloop.engine.records import write_json
from hotloop.errors import DataError
from hotloop.families.vcd import images as image_sets
from hotloop.families.vcd import saved
from hotloop.families.vcd.config import LikelihoodOptions, VcdEvaluate
from hotloop.families.vcd.images import Images
from hotloop.families.vcd.likelihood import (
    BLOCK,
    HEADLINE,
    Ensemble,
    LikelihoodEstimate,
    Proposal,
    make_proposals,
)
from hotloop.families.vcd.likelihood_estimator import Advance, LikelihoodEstimator
from hotloop.families.vcd.model import Job, State
from hotloop.options import to_jsonable

ELBO_SAMPLES = BLOCK
"""Encoder samples for the ELBO of an image."""
FEW = 10
"""Effective samples below which a bound is loose and its Monte-Carlo error, made of the same weights, too small."""


def run(config: VcdEvaluate, context: Console) -> Mapping[str, Any]:
    """Evaluate a checkpoint; the result is also written to the run's folder."""
    found = saved.load_run(config.run, config.step)
    with context.progress("loading images"):
        sets = image_sets.load_images(config.data or found.config.data, context.say, context.progress)
    chosen = _chosen(sets.held_out() if found.config.validation else sets, config)
    context.say(f"{config.run} after {found.step:,} updates: {config.split} images of {sets.source}")
    result = {
        "run": str(config.run),
        "step": found.step,
        "split": config.split,
        "data": sets.name,
        "source": sets.source,
        "notice": sets.notice,
        **estimate_likelihoods(found.job, found.state, chosen, config, config.seed, context),
    }
    path = _path(config, found, sets.name)
    path.parent.mkdir(exist_ok=True)
    write_json(path, result)
    context.say(f"written: {path}")
    return {**to_jsonable(result), "path": str(path)}


def _chosen(sets: Images, config: VcdEvaluate) -> NDArray[np.uint8]:
    rows: NDArray[np.uint8] = getattr(sets, config.split)
    if not len(rows):
        raise DataError(f"--split {config.split}: {sets.name} has no such images here; choose test or train")
    return rows[: config.images]


def _path(config: VcdEvaluate, found: saved.TrainedRun, data: str) -> Path:
    """A quick look, or one at other data, never replaces the evaluation proper."""
    other = "" if config.data in (None, found.config.data) else f"-{data}"
    part = f"-first-{config.images}" if config.images else ""
    return config.run / "evaluations" / f"{config.split}-{found.step}{other}{part}.json"


def estimate_likelihoods(
    job: Job, state: State, images: NDArray[np.uint8], config: LikelihoodOptions, seed: int, context: Console
) -> dict[str, Any]:
    """The estimates for images [N, 784] of zeros and ones, said as a table and returned."""
    started = time.perf_counter()
    estimator = LikelihoodEstimator(
        state["params"],
        images,
        seed_key(seed),
        batch_size=config.test_batch_size,
        samples=config.iwae_samples,
    )
    with context.progress("ELBO", estimator.units(ELBO_SAMPLES)) as bar:
        elbo, pace = _elbo(estimator, bar.advance)
    context.say(_announcement(estimator, job.model.leapfrog_steps, config, pace))
    iterations = config.burn_in + config.kept
    with context.progress("HMC", iterations) as bar:
        ensemble = estimator.sample(
            float(state["step_size"]), job.model.leapfrog_steps, config.burn_in, config.kept, bar.advance
        )
    chosen = make_proposals(estimator.encoder, ensemble.mean, ensemble.squares, config.kept)
    figures = _figures(estimator, chosen, config.iwae_samples, context)
    result = {
        "log_likelihood": figures[HEADLINE]["log_likelihood"],
        "standard_error": figures[HEADLINE]["standard_error"],
        "headline": HEADLINE,
        "proposals": figures,
        "elbo": float(np.mean(elbo)),
        "elbo_standard_error": _error(elbo),
        "images": len(images),
        "iwae_samples": config.iwae_samples,
        "burn_in": config.burn_in,
        "kept": config.kept,
        "seed": seed,
        **_sampler(state, ensemble),
        "seconds": time.perf_counter() - started,
    }
    _show(result, context)
    return result


def _sampler(state: State, ensemble: Ensemble) -> dict[str, float]:
    return {
        "trained_step_size": float(state["step_size"]),
        "step_size": float(ensemble.step_size),
        "acceptance": float(ensemble.acceptance),
    }


def _elbo(estimator: LikelihoodEstimator, advance: Advance) -> tuple[NDArray[np.float64], float]:
    """The ELBO of each image, and the seconds that a unit of weighing takes once it is compiled."""
    marks: list[float] = []

    def mark(count: int) -> None:
        marks.append(time.perf_counter())
        advance(count)

    weighed = estimator.weigh("elbo", estimator.encoder, ELBO_SAMPLES, mark)
    elbo = np.asarray(weighed.elbo, np.float64)
    return elbo, (marks[-1] - marks[0]) / estimator.units(ELBO_SAMPLES)


def _announcement(
    estimator: LikelihoodEstimator, leapfrogs: int, config: LikelihoodOptions, pace: float
) -> str:
    """What is to come and how long it will take, by the pace of the products that were timed."""
    iterations, samples = config.burn_in + config.kept, config.iwae_samples
    weighing, sampling = 3 * samples * estimator.flops, 2 * iterations * leapfrogs * estimator.flops
    seconds = 3 * estimator.units(samples) * pace * (1 + sampling / weighing)
    return (
        f"estimate: 3 proposals x {samples:,} samples x {estimator.count:,} images after {iterations:,} HMC "
        f"iterations, {weighing + sampling:.1e} FLOP, about {_duration(seconds)} once compiled"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _figures(
    estimator: LikelihoodEstimator, chosen: Mapping[str, Proposal], samples: int, context: Console
) -> dict[str, dict[str, float]]:
    with context.progress("importance sampling", len(chosen) * estimator.units(samples)) as bar:
        return {
            name: summarise(estimator.weigh(name, proposal, samples, bar.advance), samples)
            for name, proposal in chosen.items()
        }


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


COLUMNS = (
    "proposal",
    "log-likelihood",
    "s.e. (images)",
    "s.e. (Monte Carlo)",
    "ESS mean",
    "median",
    "min",
    f"images with ESS < {FEW}",
)


def _show(result: Mapping[str, Any], context: Console) -> None:
    context.table(COLUMNS, [_row(name, *figures.values()) for name, figures in result["proposals"].items()])
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


def _row(name: str, value: float, error: float, monte_carlo: float, *shares: float) -> tuple[str, ...]:
    numbers = (f"{number:.3f}" for number in (value, error, monte_carlo))
    return name, *numbers, *(f"{100 * share:.3g} %" for share in shares)

"""`hmc.sample` against BlackJAX and numpyro: python benchmarks/peers/hmc.py [--device gpu] [--json FILE].

What is compared is effective draws a second: the smallest bulk or tail ESS of all numbers of a position over the time
of the draws that are kept, and over that and warm-up (`total`). Peers are NUTS, and HMC with the leapfrogs that ours
found (hmc_sides.py says with which settings), on three densities (hmc_targets.py) with 1, 64 and 4,096 chains. Every
side is compiled before, and has a first run that is not timed. All means and variances of that must be within standard
errors of the exact ones, or of ours where nothing exact is known: a peer that is not is left out, and said; where it is
ours the program stops. Then all take turns, each round with a seed of its own, so that warm-up and draws are those of
later runs: ours knows by then how long its calls take, and makes a warm-up of less than a quarter of a second in one. A
round's ratio is our ESS/s over theirs, so more is better for us. A missed floor, or a ratio that is no number, is said
and gives exit status 1. Where numpyro is not installed it is left out and said.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import load_before, save
from hmc_sides import Lengths, Run, Side, blackjax_side, numpyro_side, ours
from hmc_targets import TARGETS, Target

from hotloop.engine.device import setup
from hotloop.mcmc import diagnostics

LENGTHS = {1: Lengths(1, 1000, 4000), 64: Lengths(64, 500, 500), 4096: Lengths(4096, 200, 50)}
SMOKE = Lengths(4, 200, 200)
FLOOR = 1.5
STANDARD_ERRORS = (
    5.0  # beyond which moments are not equal: of some hundred that are looked at, chance takes none there
)
PEERS = ("blackjax", "numpyro")
KINDS = ("nuts", "hmc")


def sides(target: Target, lengths: Lengths, skip: list[str]) -> dict[str, Side]:
    """Ours, then every peer that is there and asked for; those that wait for nothing compile side by side."""
    makers = {"blackjax": blackjax_side, "numpyro": numpyro_side}
    peers = [peer for peer in PEERS if peer not in skip]
    kinds = [kind for kind in KINDS if kind not in skip]
    with ThreadPoolExecutor() as pool:
        nuts = {peer: pool.submit(makers[peer], target, lengths, None) for peer in peers if "nuts" in kinds}
        side, found = pool.submit(ours, target, lengths).result()
        leapfrogs = max(1, round(float(np.asarray(found.leapfrogs).mean())))
        fixed: dict[str, Any] = {"blackjax": leapfrogs, "numpyro": found.trajectory}
        hmc = {
            peer: pool.submit(makers[peer], target, lengths, fixed[peer]) for peer in peers if "hmc" in kinds
        }
    made = {"nuts": nuts, "hmc": hmc}
    return {"ours": side} | {f"{peer} {kind}": made[kind][peer].result() for peer in peers for kind in kinds}


def numbers(run: Run) -> Iterator[tuple[str, int, np.ndarray]]:
    """Leaf, place in it, and draws [chains, draws] of every number of a position."""
    for name, leaf in run.samples.items():
        flat = np.asarray(leaf, np.float64).reshape(*leaf.shape[:2], -1)
        for place in range(flat.shape[-1]):
            yield name, place, flat[..., place]


def least_ess(run: Run) -> float:
    def of_one(number: tuple[str, int, np.ndarray]) -> float:
        return float(np.min([diagnostics.ess_bulk(number[2]), diagnostics.ess_tail(number[2])]))

    with ThreadPoolExecutor() as pool:  # numpy sorts and transforms without Python's lock
        return float(np.min([*pool.map(of_one, numbers(run))]))  # NaN where one is


def estimate(draws: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error."""
    return draws.mean(), draws.std() / np.sqrt(diagnostics.ess_bulk(draws))


def disagreement(run: Run, reference: Run, exact: dict[str, tuple[np.ndarray, np.ndarray]]) -> float:
    """The largest difference of a mean or variance from the exact one, else the reference's, in standard errors;
    infinite where one is no number."""

    def of_one(pair: tuple[Any, Any]) -> float:
        (name, place, draws), (_, _, others) = pair
        if not (np.isfinite(draws).all() and np.isfinite(others).all()):
            return np.inf
        if name in exact:
            mean, variance = (np.reshape(values, -1)[place] for values in exact[name])
            pairs = [((mean, 0.0), draws), ((variance, 0.0), (draws - mean) ** 2)]
        else:
            middle = others.mean()
            squares = (others - middle) ** 2
            pairs = [(estimate(others), draws), (estimate(squares), (draws - middle) ** 2)]
        return max(errors_apart(estimate(values), expected) for expected, values in pairs)

    with ThreadPoolExecutor() as pool:
        return max(pool.map(of_one, zip(numbers(run), numbers(reference), strict=True)))


def errors_apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The difference of two values in their common standard error, infinite where that is no number."""
    (value, error), (expected, its_error) = one, other
    with np.errstate(divide="ignore", invalid="ignore"):  # draws that are all the same have no error
        apart = np.float64(abs(value - expected)) / np.hypot(error, its_error)
    return float(apart) if np.isfinite(apart) else np.inf


def compare(name: str, lengths: Lengths, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One density with one number of chains: checked, then timed in turns."""
    target = TARGETS[name]()
    all_sides = sides(target, lengths, options.skip)
    first = {name: side.run(1) for name, side in all_sides.items()}
    apart = {side: disagreement(run, first["ours"], target.exact) for side, run in first.items()}
    if not apart["ours"] <= STANDARD_ERRORS:
        raise SystemExit(f"{name}: a moment of ours is {apart['ours']:.1f} standard errors off: not timed")
    for side in [side for side, errors in apart.items() if not errors <= STANDARD_ERRORS]:
        print(
            f"{name}, {side}: a moment is {apart[side]:.1f} standard errors off: it has not mixed, not timed"
        )
        del all_sides[side]
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in all_sides}
    for turn in range(options.rounds):
        for side, sampler in all_sides.items():
            turns[side].append(measure(sampler.run(2 + turn)))
    return [
        {
            **result(name, lengths, side, turns, apart[side], first[side].divergences),
            "memory_bytes": sampler.memory,
        }
        for side, sampler in all_sides.items()
    ]


def measure(run: Run) -> dict[str, float]:
    ess = least_ess(run)
    return {
        "ess": ess,
        "ess_per_second": ess / run.sampling,
        "total_ess_per_second": ess / (run.sampling + run.warmup),
        "warmup_seconds": run.warmup,
        "sampling_seconds": run.sampling,
    }


def result(
    name: str,
    lengths: Lengths,
    side: str,
    turns: dict[str, list[dict[str, float]]],
    apart: float,
    divergences: int,
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": f"{name}, {lengths.chains} chains", "side": side, **lengths._asdict()}
    for figure in turns[side][0]:
        row |= median_and_range(figure, [turn[figure] for turn in turns[side]])
    for prefix, figure in (("ratio", "ess_per_second"), ("total_ratio", "total_ess_per_second")):
        ratios = [a[figure] / b[figure] for a, b in zip(turns["ours"], turns[side], strict=True)]
        row |= median_and_range(prefix, ratios)
    floor = None if side == "ours" else FLOOR
    return {
        **row,
        "standard_errors_off": apart,
        "divergences": divergences,
        "floor": floor,
        "missed": floor is not None and not row["ratio"] >= floor,
        "rounds": len(turns[side]),
    }


def median_and_range(name: str, values: list[float]) -> dict[str, float]:
    """NaN where one value is."""
    found = {name: np.median(values), f"{name}_low": np.min(values), f"{name}_high": np.max(values)}
    return {each: float(value) for each, value in found.items()}


HEADER = (
    f"{'case':24} {'side':14} {'ESS/s':>10} {'ratio':>7} {'range':>15} {'total':>7} {'range':>15} "
    f"{'warm-up s':>9} {'draws s':>8} {'off':>4}"
)


def show(row: dict[str, Any]) -> None:
    spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
    total = f"{row['total_ratio_low']:.2f} to {row['total_ratio_high']:.2f}"
    print(
        f"{row['case']:24} {row['side']:14} {row['ess_per_second']:10,.0f} {row['ratio']:7.2f} {spread:>15} "
        f"{row['total_ratio']:7.2f} {total:>15} {row['warmup_seconds']:9.3f} {row['sampling_seconds']:8.3f} "
        f"{row['standard_errors_off']:4.1f}{'  MISSED' if row['missed'] else ''}",
        flush=True,
    )


def main() -> int:
    options, load = arguments(), load_before()
    setup(options.device)
    # A GPU would make products of ten bits (TF32), and all sides would sample another density; ours would not anyway.
    jax.config.update("jax_default_matmul_precision", "highest")
    for peer in PEERS:
        if peer not in options.skip and find_spec(peer) is None:
            print(f"{peer} is not installed: left out")
            options.skip.append(peer)
    results = []
    print(HEADER)
    for chains in options.chains:
        lengths = SMOKE if options.smoke else LENGTHS[chains]
        if options.draws:
            lengths = lengths._replace(samples=options.draws)
        for name in options.cases:
            rows = compare(name, lengths, options)
            results += rows
            for row in rows:
                show(row)
            if options.json:  # after every case: what ends at a limit keeps what it had
                peers = {peer: version(peer) for peer in PEERS if peer not in options.skip}
                save(options.json, {**peers, "family": "hmc", "load_before": f"{load:.2f}"}, results)
    return int(any(row["missed"] for row in results) and not options.smoke)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--cases", nargs="*", default=list(TARGETS), choices=list(TARGETS), help="densities")
    parser.add_argument("--chains", nargs="*", type=int, default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument(
        "--draws", type=int, help="draws of a chain that are kept, instead of the number's own"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument(
        "--skip", nargs="*", default=[], choices=PEERS + KINDS, help="peers, or kinds of theirs, to leave out"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="four chains, 200 draws: that it runs, no figures"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    if options.smoke:
        options.chains, options.rounds = options.chains[:1], 1
    return options


if __name__ == "__main__":
    sys.exit(main())

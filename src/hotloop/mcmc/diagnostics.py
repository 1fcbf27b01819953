"""How far draws can be trusted: rank-normalised split R-hat, bulk and tail effective sample size (Vehtari et al. 2021).

Draws of one number are [chains, draws] in float64 on the host. The estimators are those of arviz, which the tests
compare them with; written here, they cost no dependency, and the autocorrelations of thousands of chains are averaged
before they are transformed back.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import rankdata

from hotloop.errors import OptionError

Values = NDArray[np.float64]
TAILS = (0.05, 0.95)
FEWEST = 4
"""Draws of a chain below which nothing can be said."""


def split(draws: Values) -> Values:
    """Each chain as two: a chain that drifts disagrees with itself."""
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]])


def rank_normalise(draws: Values) -> Values:
    """Normal scores of the ranks among all draws: no moments need exist."""
    ranks = rankdata(draws, method="average").reshape(draws.shape)
    scores: Values = ndtri((ranks - 0.375) / (draws.size + 0.25))
    return scores


def r_hat(draws: Values) -> float:
    """The larger of two rank-normalised split R-hats: of the draws, and of their distances from the median."""
    return _if_sensible(draws, _r_hat)


def ess_bulk(draws: Values) -> float:
    """The number of independent draws that would estimate a mean of the bulk as well."""
    return _if_sensible(draws, lambda draws: _ess(rank_normalise(split(draws))))


def ess_tail(draws: Values) -> float:
    """The smaller of those for the 5 % and the 95 % quantile."""
    return _if_sensible(draws, _ess_tail)


def _if_sensible(draws: Values, estimate: Callable[[Values], float]) -> float:
    draws = np.asarray(draws, np.float64)
    if draws.ndim != 2:
        raise OptionError(f"draws have shape {list(draws.shape)}: [chains, draws] of one number are needed")
    if draws.shape[1] < FEWEST or not np.isfinite(draws).all():
        return float("nan")
    return estimate(draws)


def _r_hat(draws: Values) -> float:
    parts = split(draws)
    folded = np.abs(parts - np.median(parts))
    return max(_plain_r_hat(rank_normalise(parts)), _plain_r_hat(rank_normalise(folded)))


def _plain_r_hat(parts: Values) -> float:
    """The root of total over within-chain variance."""
    length = parts.shape[1]
    between = length * parts.mean(1).var(ddof=1)
    within = parts.var(1, ddof=1).mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.sqrt((between / within + length - 1) / length))


def _ess_tail(draws: Values) -> float:
    return min(_ess(split((draws <= np.quantile(draws, share)).astype(float))) for share in TAILS)


def _mean_autocovariance(parts: Values) -> Values:
    """Of all lags, over n, the mean over the chains."""
    length = parts.shape[1]
    centred = parts - parts.mean(1, keepdims=True)
    size = 2 ** int(np.ceil(np.log2(2 * length)))
    power = np.square(np.abs(np.fft.rfft(centred, size))).mean(0)
    covariance: Values = np.fft.irfft(power, size)[:length] / length
    return covariance


def _ess(parts: Values) -> float:
    """Draws over their autocorrelation time, by Geyer's initial monotone sequence of pairs of lags."""
    chains, length = parts.shape
    if np.ptp(parts) == 0:
        return float(parts.size)  # all the same: nothing varies that draws could miss
    covariance = _mean_autocovariance(parts)
    within = covariance[0] * length / (length - 1)
    total = covariance[0] + (parts.mean(1).var(ddof=1) if chains > 1 else 0.0)
    correlation = 1 - (within - covariance) / total
    correlation[0] = 1.0
    time = max(_autocorrelation_time(correlation), 1 / np.log10(parts.size))
    return float(parts.size / time)


def _autocorrelation_time(correlation: Values) -> float:
    """1 + 2 sum of the correlations, cut where a sum of two neighbours is negative; such sums never grow."""
    length = len(correlation)
    kept, even, odd, lag = [correlation[0], correlation[1]], correlation[0], correlation[1], 1
    while lag < length - 3 and even + odd > 0:
        even, odd = correlation[lag + 1], correlation[lag + 2]
        if even + odd >= 0:
            kept += [even, odd]
        lag += 2
    last = lag - 2
    sums = np.zeros(length)
    sums[: len(kept)] = kept
    if even > 0:
        sums[last + 1] = even
    for t in range(1, last - 1, 2):
        if sums[t + 1] + sums[t + 2] > sums[t - 1] + sums[t]:
            sums[t + 1] = sums[t + 2] = (sums[t - 1] + sums[t]) / 2
    return float(-1 + 2 * sums[: last + 1].sum() + sums[last + 1 : last + 2].sum())

"""How long one batch takes when it comes alone: calls of one iteration, each timed by itself.

The loop's throughput says what a batch costs among many; this is what a caller waits for, dispatch included.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.families.kernels.data import OnDevice, make_pool
from hotloop.families.kernels.prepare import Bench, compile_loop

MOST_CALLS, MOST_SECONDS = 200, 2.0


def latency(bench: Bench) -> dict[str, float]:
    """Milliseconds from handing over one batch to its finished answer: percentiles over calls of one iteration."""
    config, kernel, place = bench.config, bench.kernel, bench.place
    pool = make_pool(kernel, config, bench.dtype)
    batches = OnDevice(pool, 1, place.pool(kernel, pool))
    params, count = jax.tree.map(jnp.copy, (bench.params, bench.count))
    single = compile_loop(config, kernel, place, bench.dtype, bench.key, (params, count, batches.pool), 1)
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < MOST_SECONDS:
        start = time.perf_counter()
        params, count, (result,) = batches.step(single, params, count)
        result.block_until_ready()
        times.append(time.perf_counter() - start)
    p50, p90, p99 = (float(1e3 * value) for value in np.percentile(times[1:] or times, [50, 90, 99]))
    return {"p50": p50, "p90": p90, "p99": p99, "calls": len(times[1:] or times)}

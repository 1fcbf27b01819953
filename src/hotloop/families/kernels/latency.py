"""How long one batch takes when it comes alone: calls of one iteration, each timed by itself.

The loop's throughput says what a batch costs among many; this is what a caller waits for, dispatch included.
"""

import time

import numpy as np

from hotloop.families.kernels.data import make_pool
from hotloop.families.kernels.prepare import Bench, compile_loop

MOST_CALLS, MOST_SECONDS = 200, 2.0


def latency(bench: Bench) -> dict[str, float]:
    """Milliseconds from handing over one batch to its finished answer: percentiles over calls of one iteration."""
    config, place = bench.config, bench.place
    pool = make_pool(bench.kernel, config, bench.dtype, bench.key, place)
    arguments = bench.params, bench.count, pool
    single = compile_loop(config, bench.kernel, place, bench.dtype, bench.key, arguments, 1)
    bench.params, bench.count, result = single(bench.params, bench.count, pool)
    result.block_until_ready()
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < MOST_SECONDS:
        start = time.perf_counter()
        bench.params, bench.count, result = single(bench.params, bench.count, pool)
        result.block_until_ready()
        times.append(time.perf_counter() - start)
    p50, p90, p99 = (float(1e3 * value) for value in np.percentile(times, [50, 90, 99]))
    return {"p50": p50, "p90": p90, "p99": p99, "calls": len(times)}

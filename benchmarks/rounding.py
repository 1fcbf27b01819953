"""Cost of stochastic rounding per element: plain cast, bits from the counter hash, bits from threefry.

Run `python benchmarks/rounding.py`; the ways take turns, and the fastest and the median time of each are
printed as a line of JSON.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine import precision


def threefry(x: Array, dtype: jnp.dtype, key: Array) -> Array:
    pattern = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jax.random.bits(key, x.shape, jnp.uint32)
    magnitude = precision.ROUND_MAGNITUDE[jnp.dtype(dtype)](pattern & ~precision.SIGN, bits)
    signed = magnitude | ((pattern & precision.SIGN) >> 16)
    return jax.lax.bitcast_convert_type(signed.astype(jnp.uint16), dtype)


WAYS = {
    "cast": lambda x, dtype, key: (x * key[0].astype(jnp.float32)).astype(dtype),
    "hash": lambda x, dtype, key: precision.stochastic_round(x * key[0].astype(jnp.float32), dtype, key),
    "threefry": lambda x, dtype, key: threefry(x * key[0].astype(jnp.float32), dtype, key),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (options.elements // 1024, 1024))
    for name in ("bfloat16", "float16"):
        dtype = jnp.dtype(name)
        programs = {way: jax.jit(lambda x, key, f=f, t=dtype: f(x, t, key)) for way, f in WAYS.items()}
        seconds: dict[str, list[float]] = {way: [] for way in programs}
        for turn in range(options.repeat + 1):
            key = jnp.array([1, turn], jnp.uint32)
            for way, program in programs.items():
                start = time.perf_counter()
                program(x, key).block_until_ready()
                seconds[way].append(time.perf_counter() - start)
        for way, taken in seconds.items():
            per_element = [1e9 * second / x.size for second in taken[1:]]
            figures = {"best_ns": min(per_element), "median_ns": statistics.median(per_element)}
            rounded = {figure: round(value, 3) for figure, value in figures.items()}
            device = jax.devices()[0]
            print(json.dumps({"device": device.device_kind, "dtype": name, "way": way, **rounded}))


if __name__ == "__main__":
    main()

"""A way to tell XLA that an array is to be written out, not worked out again inside each of its readers."""

from typing import Any

from jax import lax

from hotloop.layers.paths import Operation


def materialised(arrays: Any) -> Any:
    """The same arrays, behind a barrier that no fusion crosses."""
    return lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]


# For code that all platforms share: a GPU would pay for the barrier with another kernel.
materialised_on_cpu = Operation("materialised on the CPU", lambda arrays: arrays)
materialised_on_cpu.register("barrier", "cpu", materialised)

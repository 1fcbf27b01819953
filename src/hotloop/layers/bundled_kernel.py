"""Grouped convolutions of few channels a group as products of bundles of groups: one GPU kernel, for Hopper cards.

A bundle's kernel is a matrix for each tap, zero between groups, so that most of what the matrix unit does is for
nothing, and it is still far from busy. A block has some rows of an image and the channels of a bundle, which it fetches
once with the pixels around them; outside of the image the copy engine gives zeros. What a tap meets is read from
there, from one pixel on or the next, as the matrix unit's left operand. NHWC, a stride of 1; sums are float32.
"""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.layers.bundled_job import Job
from hotloop.layers.persistent_chain import plgpu, shared, swizzled
from hotloop.layers.persistent_tiles import ROWS

AHEAD = 1
"""Products that are not waited for. With all of them in flight their operands' registers would leave room for half as
many warpgroups on a multiprocessor, and blocks would have to wait for their turn."""


def run(job: Job, x: Array, bundles: Array, interpret: Any = None) -> Array:
    """`bundles` [bundle, tap, to, from]: what `bundled.join_kernels` makes."""
    rows, columns, channels = job.fetched
    # Whole groups of 8 pixels can be laid out so that the units write them to different banks, too; Mosaic copies them
    # to images of whole groups alone.
    is_whole = job.columns % 8 == 0 and job.width % 8 == 0
    result = swizzled(job.bundle, job.dtype) if is_whole else ()
    kernel = plgpu.kernel(
        partial(_body, job, interpret is None),
        out_type=jax.ShapeDtypeStruct((job.images, job.height, job.width, job.channels), job.dtype),  # type: ignore[no-untyped-call]
        scratch_types={
            # A row more, as the last tap's pixels end behind those that were fetched.
            "pixels": plgpu.SMEM(((rows + 1) * columns, channels), job.dtype),
            "filled": plgpu.Barrier(num_arrivals=rows),
            "weights": shared(prod(job.size), job.bundle, job.bundle, dtype=job.dtype),
            "weights_filled": plgpu.Barrier(),
            "result": plgpu.SMEM((job.parts, ROWS, job.bundle), job.dtype, transforms=result),
        },
        # By warpgroups no operand could begin at any pixel.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        grid=job.grid,
        grid_names=("bundle", "across", "down", "image"),
        num_threads=job.parts,
        thread_name="part",
        interpret=interpret,
    )
    y: Array = kernel(x, bundles)
    return y


def _body(job: Job, in_registers: bool, x: Any, bundles: Any, y: Any, **scratch: Any) -> None:
    bundle, across, down, image = (lax.axis_index(name) for name in ("bundle", "across", "down", "image"))
    part, row, column = lax.axis_index("part"), down * job.rows, across * job.columns
    rows, columns, channels = job.fetched

    def fetch(number: int) -> None:
        plgpu.copy_gmem_to_smem(
            x.at[
                image,
                row + (number - job.edge[0]),
                pl.ds(column - job.edge[1], columns),
                pl.ds(bundle * job.bundle, channels),
            ],
            scratch["pixels"].at[pl.ds(number * columns, columns)],
            scratch["filled"],
        )

    for number in range(rows):
        pl.when(part == number % job.parts)(partial(fetch, number))

    @pl.when(part == job.parts - 1)
    def _() -> None:
        plgpu.copy_gmem_to_smem(bundles.at[bundle], scratch["weights"], scratch["weights_filled"])

    plgpu.barrier_wait(scratch["weights_filled"])
    plgpu.barrier_wait(scratch["filled"])
    multiply = partial(_multiply, job, in_registers, scratch["pixels"], scratch["weights"], part)
    sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, job.bundle), jnp.float32))
    result = scratch["result"].at[part]
    result[...] = sums.astype(job.dtype)
    plgpu.commit_smem()
    for own in range(ROWS // job.pitch):
        plgpu.copy_smem_to_gmem(
            result.at[pl.ds(own * job.pitch, job.columns)],
            y.at[
                image,
                row + part * (ROWS // job.pitch) + own,
                pl.ds(column, job.columns),
                pl.ds(bundle * job.bundle, job.bundle),
            ],
        )
    plgpu.wait_smem_to_gmem(0)


def _multiply(job: Job, in_registers: bool, pixels: Any, weights: Any, part: Array, sums: Any) -> Array:
    """The sums over all taps of this warpgroup's pixels."""
    for row in range(job.size[0]):
        for column in range(job.size[1]):
            met = pl.ds(part * ROWS + row * job.pitch + column, ROWS)
            operand = pixels.at[met, pl.ds(0, job.bundle)]
            if (
                in_registers
            ):  # in shared memory an operand begins at a multiple of 8 pixels; the interpreter has no other
                operand = plgpu.load(operand, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.wgmma(sums, operand, weights.at[row * job.size[1] + column].transpose((1, 0)))
            plgpu.wgmma_wait(AHEAD)
    total: Array = sums[...]
    return total

"""The dense layer and the chain of grouped convolutions as benchmark kernels.

Both learn to copy their input: a target that needs no labels, that fresh data keeps, and whose gradient no
compiler can shorten (the old programs' mean of the output lets one delete the weight gradient's product).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.families.kernels import costs, reference
from hotloop.families.kernels.config import Dense, GroupedConv
from hotloop.families.kernels.kernel import Kernel, mean_square, normal
from hotloop.layers import dense, grouped_conv, initial


def dense_kernel(config: Dense) -> Kernel:
    """y = x W + b, N to N, with a ReLU if asked; trained to y = x."""
    rows, size = config.batch_size, config.size
    activation = jax.nn.relu if config.include_activation else lambda y: y

    def apply(params: Any, x: Array) -> Array:
        return activation(dense.dense(params, x))

    def reference_apply(params: Any, x: Array) -> Array:
        y = reference.dense(params, x)
        return jnp.maximum(y, 0) if config.include_activation else y

    return Kernel(
        title="Dense layer",
        sizes={"size": size, "activation": "relu" if config.include_activation else "none"},
        init=lambda key, dtype: dense.init(key, size, size, dtype),
        data=lambda generator, rows, dtype: {"x": normal(generator, (rows, size), dtype)},
        row_axes={"x": 0, "y": 0},
        apply=apply,
        loss=lambda params, batch: mean_square(apply(params, batch["x"]), batch["x"]),
        loss_terms=rows * size,
        reference_apply=reference_apply,
        reference_loss=lambda params, batch: reference.mean_square(
            reference_apply(params, batch["x"]), batch["x"]
        ),
        items=rows,
        cost=lambda width: costs.dense(config, width),
    )


def grouped_conv_kernel(config: GroupedConv) -> Kernel:
    """A chain of grouped convolutions, no bias or activation; trained to copy the pixels the strides keep."""
    rows, side = config.batch_size, config.input_size
    groups = [config.groups] + [config.later_groups] * (config.block_repeats - 1)
    shape = (config.kernel_size, config.kernel_size, config.depth, config.filter_out)
    spread = (config.kernel_size**2 * config.depth) ** -0.5  # keeps the variance along the chain

    def init(key: Array, dtype: Any) -> Any:
        specs = [initial.Spec(shape, "normal", spread)] * config.block_repeats
        return initial.draw(key, specs, dtype)

    def apply(params: Any, x: Array) -> Array:
        for kernel, count in zip(params, groups, strict=True):
            x = grouped_conv.grouped_conv2d(x, kernel, count, config.stride)
        return x

    def reference_apply(params: Any, x: Array) -> Array:
        for kernel, count in zip(params, groups, strict=True):
            x = reference.grouped_conv(x, kernel, count, config.stride)
        return x

    def target(x: Array) -> Array:
        kept = x[:, :: config.stride**config.block_repeats, :: config.stride**config.block_repeats]
        return kept[..., jnp.arange(config.filter_out) % config.filter_in]

    out = costs.conv_sizes(config)[-1]
    return Kernel(
        title="Grouped convolution",
        sizes={
            "input": f"{side}x{side}x{config.filter_in}",
            "filters": config.filter_out,
            "kernel": config.kernel_size,
            "stride": config.stride,
            "groups": config.groups,
            "blocks": config.block_repeats,
        },
        init=init,
        data=lambda generator, rows, dtype: {
            "x": normal(generator, (rows, side, side, config.filter_in), dtype)
        },
        row_axes={"x": 0, "y": 0},
        apply=apply,
        loss=lambda params, batch: mean_square(apply(params, batch["x"]), target(batch["x"])),
        loss_terms=rows * out**2 * config.filter_out,
        reference_apply=reference_apply,
        reference_loss=lambda params, batch: reference.mean_square(
            reference_apply(params, batch["x"]), target(batch["x"])
        ),
        items=rows * config.block_repeats,
        cost=lambda width: costs.grouped_conv(config, width),
        note=_regrouping(config),
    )


def _regrouping(config: GroupedConv) -> str:
    if config.block_repeats == 1 or config.later_groups == config.groups:
        return ""
    return (
        f"blocks after the first have {config.later_groups} groups instead of {config.groups}: they read "
        f"{config.filter_out} channels with filters of depth {config.depth}"
    )

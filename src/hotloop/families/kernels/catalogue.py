"""The dense layer and the chain of grouped convolutions as benchmark kernels.

Both learn to copy their input: a target that needs no labels, that fresh data keeps, and whose gradient no
compiler can shorten (the old programs' mean of the output lets one delete the weight gradient's product).

The recurrent layers as benchmark kernels: RNN, GRU, LSTM, and the stack of LSTMs with a read-out.
The layer benchmarks by name: config and builder of each. `hmc` is not a layer and has its own module.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from hotloop.families.kernels import config as configs
from hotloop.families.kernels import costs, reference
from hotloop.families.kernels.config import Dense, GroupedConv, Gru, LayerOptions, Lstm, LstmMulti, Rnn
from hotloop.families.kernels.kernel import HostBatch, Kernel, cross_entropy, draw_normal, mean_square
from hotloop.layers import dense, grouped_conv, initial, recurrent


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
        data=lambda generator, rows, dtype: {"x": draw_normal(generator, (rows, size), dtype)},
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
            "x": draw_normal(generator, (rows, side, side, config.filter_in), dtype)
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


Init = Callable[[Array, int, int, DTypeLike], Any]
Apply = Callable[[Any, Array], Array]


def rnn_kernel(config: Rnn) -> Kernel:
    """One tanh RNN, always the fast path."""
    return _layer(
        config, "RNN", 1, config.timesteps, config.hidden_size, config.hidden_size, recurrent.init_rnn,
        lambda params, x: recurrent.rnn(params, x)[0], reference.rnn, {},
    )  # fmt: skip


def gru_kernel(config: Gru) -> Kernel:
    """One GRU: fused, with the reset gate before or after the candidate's product, or a cell a step."""
    if config.reset_after:
        return _layer(
            config, "GRU", 3, config.timesteps, config.input_size, config.hidden_size,
            recurrent.init_gru_reset_after, lambda params, x: recurrent.gru_reset_after(params, x)[0],
            reference.gru_reset_after, {"variant": "fused, reset after"}, biases=2,
        )  # fmt: skip
    layer = recurrent.gru if config.fused else recurrent.gru_stepwise
    return _layer(
        config, "GRU", 3, config.timesteps, config.input_size, config.hidden_size, recurrent.init_gru,
        lambda params, x: layer(params, x)[0], reference.gru, _variant(config.fused),
    )  # fmt: skip


def lstm_kernel(config: Lstm) -> Kernel:
    """One LSTM, fused or a cell a step."""
    layer = recurrent.lstm if config.fused else recurrent.lstm_stepwise
    return _layer(
        config, "LSTM", 4, config.timesteps, config.hidden_size, config.hidden_size, recurrent.init_lstm,
        lambda params, x: layer(params, x)[0], reference.lstm, _variant(config.fused),
    )  # fmt: skip


def _variant(fused: bool) -> dict[str, str]:
    return {"variant": "fused" if fused else "stepwise"}


def _layer(
    config: LayerOptions, title: str, gates: int, time: int, inputs: int, hidden: int, init: Init, apply: Apply,
    reference_apply: Apply, variant: dict[str, str], biases: int = 1,
) -> Kernel:  # fmt: skip
    rows, classes = config.batch_size, min(inputs, hidden)

    def data(generator: np.random.Generator, rows: int, dtype: DTypeLike) -> HostBatch:
        x = draw_normal(generator, (time, rows, inputs), dtype)
        return {"x": x, "labels": np.argmax(x[..., :classes], -1).astype(np.int32)}

    return Kernel(
        title=f"{title} layer",
        sizes={"timesteps": time, "input size": inputs, "hidden size": hidden, **variant},
        init=lambda key, dtype: init(key, inputs, hidden, dtype),
        data=data,
        row_axes={"x": 1, "labels": 1, "y": 1},
        apply=apply,
        loss=lambda params, batch: cross_entropy(apply(params, batch["x"]), batch["labels"]),
        loss_terms=time * rows,
        reference_apply=reference_apply,
        reference_loss=lambda params, batch: reference.cross_entropy(
            reference_apply(params, batch["x"]), batch["labels"]
        ),
        items=rows,
        cost=lambda width: costs.recurrent(gates, time, rows, inputs, hidden, width, config.train, biases),
    )


def lstm_multi_kernel(config: LstmMulti) -> Kernel:
    """A stack of LSTMs, then a dense layer of one output on the last hidden state."""
    time, rows, inputs, hidden = config.timesteps, config.batch_size, config.input_size, config.hidden_size

    def init(key: Array, dtype: DTypeLike) -> Any:
        keys = jax.random.split(key, config.num_layers + 1)
        fan_in = [inputs] + [hidden] * (config.num_layers - 1)
        layers = [recurrent.init_lstm(k, size, hidden, dtype) for k, size in zip(keys, fan_in, strict=False)]
        return {"layers": layers, "readout": dense.init(keys[-1], hidden, 1, dtype)}

    def data(generator: np.random.Generator, rows: int, dtype: DTypeLike) -> HostBatch:
        x = draw_normal(generator, (time, rows, inputs), dtype)
        return {"x": x, "labels": x[-1, :, :1]}

    def apply(params: Any, x: Array) -> Array:
        return dense.dense(params["readout"], recurrent.lstm_stack(params["layers"], x))

    def reference_apply(params: Any, x: Array) -> Array:
        for layer in params["layers"]:
            x = reference.lstm(layer, x)
        return reference.dense(params["readout"], x[-1])

    return Kernel(
        title="Multi-layer LSTM",
        sizes={"timesteps": time, "input size": inputs, "hidden size": hidden, "layers": config.num_layers},
        init=init,
        data=data,
        row_axes={"x": 1, "labels": 0, "y": 0},
        apply=apply,
        loss=lambda params, batch: mean_square(apply(params, batch["x"]), batch["labels"]),
        loss_terms=rows,
        reference_apply=reference_apply,
        reference_loss=lambda params, batch: reference.mean_square(
            reference_apply(params, batch["x"]), batch["labels"]
        ),
        items=rows,
        cost=lambda width: costs.lstm_multi(config, width),
    )


BUILDERS: dict[type[configs.LayerOptions], Callable[[Any], Kernel]] = {
    configs.Dense: dense_kernel,
    configs.GroupedConv: grouped_conv_kernel,
    configs.Rnn: rnn_kernel,
    configs.Gru: gru_kernel,
    configs.Lstm: lstm_kernel,
    configs.LstmMulti: lstm_multi_kernel,
}


def build(config: configs.LayerOptions) -> Kernel:
    """The kernel that a config describes."""
    return BUILDERS[type(config)](config)

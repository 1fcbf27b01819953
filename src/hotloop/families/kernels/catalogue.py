"""The layers as benchmark kernels: dense, a chain of grouped convolutions, RNN, GRU, LSTM, a stack of LSTMs.

A `Kernel` is all that loops, timing, checking and printing see of a layer. Dense and convolutions learn to copy their
input: a target that needs no labels, that fresh data keeps, and whose gradient no compiler can shorten (the old
programs' mean of the output lets one delete the weight gradient's product). Sequences are time-major [T, B, I]. Single
recurrent layers classify every step: the label is the largest input feature (of those that have a unit), the units are
the logits. The stack recalls the first feature of the last step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from hotloop.families.kernels import reference
from hotloop.families.kernels.config import Dense, GroupedConv, Gru, LayerOptions, Lstm, LstmMulti, Rnn
from hotloop.layers import grouped_conv, initial, recurrent
from hotloop.layers.dense import dense, init_dense

Batch = dict[str, Array]  # `x`, and `labels` where the loss needs any
HostBatch = dict[str, np.ndarray[Any, Any]]
LABEL_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """One iteration of one replica."""

    flops: float
    bytes: float  # compulsory: inputs and parameters read once, outputs or updated parameters written once
    streamed_bytes: float  # through memory between layers, and the weights again at each time step
    weight_bytes: float
    serial_steps: int  # that wait for one another


@dataclass(frozen=True)
class Kernel:
    title: str
    sizes: Mapping[str, int | str]  # what the banner says of the shape
    init: Callable[[Array, DTypeLike], Any]  # (key, dtype) -> parameters
    x_shape: Callable[[int], tuple[int, ...]]  # rows -> shape of a batch's input
    row_axes: Mapping[str, int]  # which axis of `x`, `labels` and the output `y` counts rows
    apply: Callable[[Any, Array], Array]
    reference_apply: Callable[[Any, Array], Array]  # in plain float64
    criterion: str  # a name of `CRITERIA`: how far an output is from its target
    items: int  # what one replica's iteration counts in items/sec
    cost: Callable[[int], Cost]  # bytes of a number -> cost of one replica's iteration
    target: Callable[[Batch], Array] = lambda batch: batch["labels"]
    labels: Callable[[Any], Any] | None = None  # input -> labels, on the host, where there are any
    note: str = ""  # one line to say before the run, where the shape has a surprise in it

    def data(self, generator: np.random.Generator, rows: int, dtype: DTypeLike) -> HostBatch:
        """One batch, drawn in float32 whatever the type, so that every type sees the same data."""
        x = generator.standard_normal(self.x_shape(rows), np.float32).astype(dtype)
        return {"x": x, "labels": self.labels(x)} if self.labels else {"x": x}

    def loss(self, params: Any, batch: Batch) -> Array:
        """Mean over rows, in float32 at least."""
        return CRITERIA[self.criterion][0](self.apply(params, batch["x"]), self.target(batch))

    def reference_loss(self, params: Any, batch: Batch) -> Array:
        return CRITERIA[self.criterion][1](self.reference_apply(params, batch["x"]), self.target(batch))

    def lay_out(self, batch: Batch) -> Batch:
        """A batch of rows first with its rows where the layer has them."""
        return {name: jnp.moveaxis(leaf, 0, self.row_axes[name]) for name, leaf in batch.items()}

    def rows_first(self, batch: Mapping[str, Any]) -> Batch:
        return {name: jnp.moveaxis(leaf, self.row_axes[name], 0) for name, leaf in batch.items()}


def mean_square(y: Array, target: Array) -> Array:
    return jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)).mean()


def cross_entropy(logits: Array, labels: Array) -> Array:
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(wide, -1) - chosen).mean()


CRITERIA = {
    "mean square": (mean_square, reference.mean_square),
    "cross-entropy": (cross_entropy, reference.cross_entropy),
}


def dense_kernel(config: Dense) -> Kernel:
    """y = x W + b, N to N, with a ReLU if asked; trained to y = x."""
    rows, size, activation = config.batch_size, config.size, config.include_activation
    rectify = jax.nn.relu if activation else lambda y: y
    reference_rectify = (lambda y: jnp.maximum(y, 0)) if activation else lambda y: y
    return Kernel(
        title="Dense layer",
        sizes={"size": size, "activation": "relu" if activation else "none"},
        init=lambda key, dtype: init_dense(key, size, size, dtype),
        x_shape=lambda rows: (rows, size),
        row_axes={"x": 0, "y": 0},
        apply=lambda params, x: rectify(dense(params, x)),
        reference_apply=lambda params, x: reference_rectify(reference.dense(params, x)),
        criterion="mean square",
        target=lambda batch: batch["x"],
        items=rows,
        cost=lambda width: dense_cost(config, width),
    )


def grouped_conv_kernel(config: GroupedConv) -> Kernel:
    """A chain of grouped convolutions, no bias or activation; trained to copy the pixels the strides keep."""
    rows, side = config.batch_size, config.input_size
    groups = [config.groups] + [config.later_groups] * (config.block_repeats - 1)
    shape = (config.kernel_size, config.kernel_size, config.depth, config.filter_out)
    spread = (config.kernel_size**2 * config.depth) ** -0.5  # keeps the variance along the chain

    def init(key: Array, dtype: DTypeLike) -> Any:
        return initial.draw(key, [initial.Spec(shape, "normal", spread)] * config.block_repeats, dtype)

    def chain(convolve: Callable[..., Array], params: Any, x: Array) -> Array:
        for kernel, count in zip(params, groups, strict=True):
            x = convolve(x, kernel, count, config.stride)
        return x

    def target(batch: Batch) -> Array:
        every = config.stride**config.block_repeats
        return batch["x"][:, ::every, ::every][..., jnp.arange(config.filter_out) % config.filter_in]

    note = (
        f"blocks after the first have {config.later_groups} groups instead of {config.groups}: they read "
        f"{config.filter_out} channels with filters of depth {config.depth}"
    )
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
        x_shape=lambda rows: (rows, side, side, config.filter_in),
        row_axes={"x": 0, "y": 0},
        apply=partial(chain, grouped_conv.grouped_conv2d),
        reference_apply=partial(chain, reference.grouped_conv),
        criterion="mean square",
        target=target,
        items=rows * config.block_repeats,
        cost=lambda width: grouped_conv_cost(config, width),
        note=note if config.block_repeats > 1 and config.later_groups != config.groups else "",
    )


def sequence_kernel(config: Rnn | Gru | Lstm) -> Kernel:
    """One tanh RNN, always fused; one GRU or LSTM, fused or a cell a step."""
    time, rows, hidden = config.timesteps, config.batch_size, config.hidden_size
    inputs = config.input_size if isinstance(config, Gru) else hidden
    biases, variant = 1, "fused" if isinstance(config, Gru | Lstm) and config.fused else "stepwise"
    # A layer gives the outputs of all steps first, its reference nothing else.
    init: Callable[[Array, int, int, DTypeLike], Any]
    layer: Callable[[Any, Array], Any]
    match config:
        case Gru(reset_after=True):
            title, gates, biases, variant = "GRU", 3, 2, "fused, reset after"
            init, oracle = recurrent.init_gru_reset_after, reference.gru_reset_after
            layer = recurrent.gru_reset_after
        case Gru():
            title, gates, init, oracle = "GRU", 3, recurrent.init_gru, reference.gru
            layer = recurrent.gru if config.fused else recurrent.gru_stepwise
        case Lstm():
            title, gates, init, oracle = "LSTM", 4, recurrent.init_lstm, reference.lstm
            layer = recurrent.lstm if config.fused else recurrent.lstm_stepwise
        case _:
            title, gates, init, layer, oracle = "RNN", 1, recurrent.init_rnn, recurrent.rnn, reference.rnn
    kind = {} if title == "RNN" else {"variant": variant}
    return Kernel(
        title=f"{title} layer",
        sizes={"timesteps": time, "input size": inputs, "hidden size": hidden, **kind},
        init=lambda key, dtype: init(key, inputs, hidden, dtype),
        x_shape=lambda rows: (time, rows, inputs),
        labels=lambda x: np.argmax(x[..., : min(inputs, hidden)], -1).astype(np.int32),
        row_axes={"x": 1, "labels": 1, "y": 1},
        apply=lambda params, x: layer(params, x)[0],
        reference_apply=oracle,
        criterion="cross-entropy",
        items=rows,
        cost=lambda width: recurrent_cost(gates, time, rows, inputs, hidden, width, config.train, biases),
    )


def lstm_multi_kernel(config: LstmMulti) -> Kernel:
    """A stack of LSTMs, then a dense layer of one output on the last hidden state."""
    time, rows, inputs, hidden = config.timesteps, config.batch_size, config.input_size, config.hidden_size

    def init(key: Array, dtype: DTypeLike) -> Any:
        keys = jax.random.split(key, config.num_layers + 1)
        fan_in = [inputs] + [hidden] * (config.num_layers - 1)
        layers = [recurrent.init_lstm(k, size, hidden, dtype) for k, size in zip(keys, fan_in, strict=False)]
        return {"layers": layers, "readout": init_dense(keys[-1], hidden, 1, dtype)}

    def apply(params: Any, x: Array) -> Array:
        return dense(params["readout"], recurrent.lstm_stack(params["layers"], x))

    def reference_apply(params: Any, x: Array) -> Array:
        for layer in params["layers"]:
            x = reference.lstm(layer, x)
        return reference.dense(params["readout"], x[-1])

    return Kernel(
        title="Multi-layer LSTM",
        sizes={"timesteps": time, "input size": inputs, "hidden size": hidden, "layers": config.num_layers},
        init=init,
        x_shape=lambda rows: (time, rows, inputs),
        labels=lambda x: x[-1, :, :1],
        row_axes={"x": 1, "labels": 0, "y": 0},
        apply=apply,
        reference_apply=reference_apply,
        criterion="mean square",
        items=rows,
        cost=lambda width: lstm_multi_cost(config, width),
    )


# What one iteration must cost, from the sizes of one replica; `width` is the number of bytes of a number.
# One multiply-add is two operations, and training's update is that of SGD.


def dense_cost(config: Dense, width: int) -> Cost:
    """Forward 2 B N^2 and the bias; training adds weight gradient and update, but no input gradient."""
    rows, size = config.batch_size, config.size
    weights = size * size + size
    forward = 2 * rows * size**2 + rows * size * (1 + config.include_activation)
    if config.train:
        flops = forward + 2 * rows * size**2 + rows * size + 2 * weights
        moved = width * (rows * size + 2 * weights)
    else:
        flops, moved = forward, width * (2 * rows * size + weights)
    return Cost(flops, moved, moved, width * weights, 1)


def conv_sizes(config: GroupedConv) -> list[int]:
    """Height (= width) of the input and of every block's output: SAME padding makes ceil(size / stride)."""
    sizes = [config.input_size]
    for _ in range(config.block_repeats):
        sizes.append(ceil(sizes[-1] / config.stride))
    return sizes


def grouped_conv_cost(config: GroupedConv, width: int) -> Cost:
    """2 B Ho Wo Cout k^2 c a block; training the same again for each weight and inner input gradient."""
    sizes = conv_sizes(config)
    taps = config.kernel_size**2 * config.depth
    blocks = [2 * config.batch_size * out**2 * config.filter_out * taps for out in sizes[1:]]
    weights = taps * config.filter_out * config.block_repeats
    channels = [config.filter_in] + [config.filter_out] * config.block_repeats
    maps = [config.batch_size * side**2 * depth for side, depth in zip(sizes, channels, strict=True)]
    layerwise = sum(a + b for a, b in pairwise(maps)) + weights
    if config.train:
        flops, moved, passes = 3 * sum(blocks) - blocks[0], maps[0] + 2 * weights, 3
    else:
        flops, moved, passes = sum(blocks), maps[0] + maps[-1] + weights, 1
    return Cost(flops, width * moved, width * passes * layerwise, width * weights, len(blocks))


def recurrent_cost(
    gates: int, time: int, rows: int, inputs: int, hidden: int, width: int, train: bool, biases: int = 1
) -> Cost:
    """2 G T B H (I + H); training counts three times that, as is usual, and reads a label a row and step."""
    weights = gates * hidden * (inputs + hidden + biases)
    forward = 2 * gates * time * rows * hidden * (inputs + hidden)
    streamed = width * (time * rows * (inputs + hidden) + time * weights)
    if train:
        moved = width * (time * rows * inputs + 2 * weights) + LABEL_BYTES * time * rows
        return Cost(3 * forward, moved, 3 * streamed, width * weights, 2 * time)
    return Cost(forward, width * (time * rows * (inputs + hidden) + weights), streamed, width * weights, time)


def lstm_multi_cost(config: LstmMulti, width: int) -> Cost:
    """8 T B H [(I + H) + (L - 1) 2 H] and the read-out 2 B H; only [B, 1] leaves the chip."""
    time, rows, hidden, layers = config.timesteps, config.batch_size, config.hidden_size, config.num_layers
    fan_in = config.input_size + hidden + (layers - 1) * 2 * hidden
    weights = 4 * hidden * (fan_in + layers) + hidden + 1
    forward = 8 * time * rows * hidden * fan_in + 2 * rows * hidden
    ends = time * rows * config.input_size + rows
    streamed = ends + time * weights + 2 * (layers - 1) * time * rows * hidden
    # A layer can begin as soon as the one before has made its first output.
    serial = time + layers - 1
    if config.train:
        return Cost(
            3 * forward, width * (ends + 2 * weights), 3 * width * streamed, width * weights, 2 * serial
        )
    return Cost(forward, width * (ends + weights), width * streamed, width * weights, serial)


BUILDERS: dict[type[LayerOptions], Callable[[Any], Kernel]] = {
    Dense: dense_kernel,
    GroupedConv: grouped_conv_kernel,
    Rnn: sequence_kernel,
    Gru: sequence_kernel,
    Lstm: sequence_kernel,
    LstmMulti: lstm_multi_kernel,
}


def build(config: LayerOptions) -> Kernel:
    return BUILDERS[type(config)](config)

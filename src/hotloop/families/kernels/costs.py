"""What one iteration of each layer must cost, from its sizes alone, which are one replica's.

One multiply-add is two operations; `width` is the number of bytes of a number. Training's update is that of SGD.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from hotloop.families.kernels.config import Dense, GroupedConv, LstmMulti

LABEL_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """One iteration of one replica."""

    flops: float
    bytes: float  # compulsory: inputs and parameters read once, outputs or updated parameters written once
    streamed_bytes: float  # through memory between layers, and the weights again at each time step
    weight_bytes: float
    serial_steps: int  # that wait for one another


def dense(config: Dense, width: int) -> Cost:
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


def grouped_conv(config: GroupedConv, width: int) -> Cost:
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


def recurrent(
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


def lstm_multi(config: LstmMulti, width: int) -> Cost:
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

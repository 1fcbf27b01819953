"""Layers as plain functions over dicts of arrays, fast inside a compiled loop on each device.

Images are [N, H, W, C], kernels [H, W, I, O], sequences [T, B, I]. A recurrent layer has an `init_` of its own; other
weights are drawn from specs (`he_normal`, `glorot_uniform`, ...) by `draw`. Losses and norms are float32 inside.

>>> import jax, jax.numpy as jnp
>>> from hotloop import layers
>>> weights = layers.draw(jax.random.key(0), {"kernel": layers.he_normal((3, 3, 3, 8))})
>>> images = jnp.ones((2, 32, 32, 3))
>>> layers.max_pool(layers.conv2d(images, weights["kernel"]), size=2, stride=2, padding=0).shape
(2, 16, 16, 8)
"""

from hotloop.layers.conv import conv2d, max_pool
from hotloop.layers.dense import dense, init_dense
from hotloop.layers.grouped_conv import grouped_conv2d
from hotloop.layers.initial import constant, draw, glorot_uniform, he_normal, truncated_normal
from hotloop.layers.losses import correct, cross_entropy
from hotloop.layers.norm import batch_norm, group_norm
from hotloop.layers.paths import force_path
from hotloop.layers.recurrent import (
    gru,
    gru_reset_after,
    init_gru,
    init_gru_reset_after,
    init_lstm,
    init_rnn,
    lstm,
    lstm_stack,
    rnn,
)

__all__ = [
    "batch_norm",
    "constant",
    "conv2d",
    "correct",
    "cross_entropy",
    "dense",
    "draw",
    "force_path",
    "glorot_uniform",
    "group_norm",
    "grouped_conv2d",
    "gru",
    "gru_reset_after",
    "he_normal",
    "init_dense",
    "init_gru",
    "init_gru_reset_after",
    "init_lstm",
    "init_rnn",
    "lstm",
    "lstm_stack",
    "max_pool",
    "rnn",
    "truncated_normal",
]

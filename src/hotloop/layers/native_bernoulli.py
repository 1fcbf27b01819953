"""The log-likelihood of a network with Bernoulli outputs and its gradient in the input, by hotloop-native's handler.

ReLU layers, then logits; each row of `images` is of zeros and ones and belongs to a row of `z`. `layers` are the
weights [I, O], the bias [O] and the weights transposed of every layer in turn: the handler reads weights as they lie,
and a loop around it should not transpose them again.
"""

from jax import Array

from hotloop.layers import native
from hotloop.layers.native import like
from hotloop.layers.paths import Rival


def likelihood_and_gradient(images: Array, z: Array, *layers: Array) -> tuple[Array, Array]:
    results = (like(z[:, 0]), like(z))
    values, gradients = native.call("hotloop_bernoulli_gradient", results, images, z, *layers)
    return values, gradients


GRADIENT = Rival("bernoulli gradient", "hotloop_bernoulli_gradient", likelihood_and_gradient, stacked=(0, 1))

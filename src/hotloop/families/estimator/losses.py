"""The loss that a model has when it names none."""

import jax
from jax import Array


def cross_entropy(outputs: Array, labels: Array) -> Array:
    """Softmax cross-entropy of logits [N, classes] with whole-number labels [N] or [N, 1], a value a sample."""
    logits = outputs.astype("float32")
    chosen = labels.reshape(-1)
    return -jax.nn.log_softmax(logits)[jax.numpy.arange(len(chosen)), chosen]

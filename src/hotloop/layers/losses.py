"""Cross entropy from logits, with label smoothing, and whether the label is among the k largest logits.

Both answer for each sample, whatever the size of the batch; means belong to the callers. Logits may be of 16 bits,
the arithmetic is float32 (or wider, where they are). It knows no network.
"""

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits: Array, labels: Array, smoothing: float | None = None) -> Array:
    """-sum y log p of each sample [N], where y = (1 - e) onehot + e / K for a smoothing of e over K classes.

    A label outside 0 .. K - 1 gives NaN, so that a wrong data set is noticed with the first loss.
    """
    chosen = _onehot(logits, labels)
    log_p = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    # Picked rather than multiplied by 0 and 1: a class with p = 0 must not turn 0 * -inf into NaN.
    loss = -jnp.where(chosen, log_p, 0).sum(-1)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * log_p.mean(-1)
    return jnp.where(chosen.any(-1), loss, jnp.nan)


def correct(logits: Array, labels: Array, k: int = 1) -> Array:
    """Whether fewer than k classes are ranked before the label's, of equal logits the smaller class first; [N] bool.

    k = 1 is what `argmax` says. A label outside 0 .. K - 1 is never correct, nor is one whose logit is NaN.
    """
    chosen = _onehot(logits, labels)
    own = jnp.where(chosen, logits, 0).sum(-1, keepdims=True)
    earlier = jnp.arange(logits.shape[-1]) < labels[:, None]
    before = ~(logits <= own) | ((logits == own) & earlier)
    return chosen.any(-1) & (before.sum(-1) < min(k, logits.shape[-1]))


def _onehot(logits: Array, labels: Array) -> Array:
    """[N, K] bool; a comparison, as a gather would have a scatter for its gradient."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {labels.shape} do not fit logits {logits.shape}: one label a sample")
    return jnp.arange(logits.shape[-1]) == labels[:, None]

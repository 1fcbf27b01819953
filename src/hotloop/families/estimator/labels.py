"""Labels that are classes: which values a model can be trained with, and one line that names the first other one.

A model that says how many classes it has, or has no loss of its own, takes no other label. One with a loss of its own
may mean something by a label that is no class (-1 for "leave it out", a count): its loss is asked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.errors import DataError

Loss = Callable[[Any, Any], Any]


def no_class(value: int) -> str:
    """What is wrong with a label that is no class, where nothing else can be meant by it."""
    return "the model has"


@dataclass(frozen=True, eq=False)
class Classes:
    """Labels from 0 to `count` - 1."""

    count: int
    objection: Callable[[int], str] = no_class
    """Why another value cannot be taken, as the beginning of `... classes 0 to 9`; nothing where it can."""

    def check(self, labels: Any, where: str = "") -> None:
        """Refuse labels that the model has no class for; `where` says whose they are."""
        if not is_integer_array(labels):
            return
        values = np.asarray(labels)
        outside = (values < 0) | (values >= self.count)
        for value in np.unique(values[outside]).tolist():
            if reason := self.objection(value):
                sample = int(np.argwhere(values == value)[0][0])
                raise DataError(
                    f"labels: {value} at sample {sample}{where} is out of range: {reason} classes 0 to {self.count - 1}"
                )


def is_integer_array(labels: Any) -> bool:
    """One array of whole numbers, or its form."""
    return hasattr(labels, "dtype") and hasattr(labels, "shape") and np.dtype(labels.dtype).kind in "iu"


def find_classes(loss: Loss, outputs: Any, labels: Any) -> Classes | None:
    """The classes of a model with a loss of its own, where outputs [..., K] and labels [...] look like logits of K."""
    if not is_integer_array(labels) or not hasattr(outputs, "shape"):
        return None
    if outputs.shape[:-1] != labels.shape or outputs.shape[-1] < 2 or not labels.size:
        return None
    return Classes(outputs.shape[-1], _objection(loss, outputs, labels))


def _objection(loss: Loss, outputs: Any, labels: Any) -> Callable[[int], str]:
    """Ask the loss what it makes of a label: nothing finite, or the same as of a class, is an objection."""
    drawn = np.random.default_rng(0).normal(size=outputs.shape)
    last, kind = outputs.shape[-1] - 1, jax.dtypes.canonicalize_dtype(labels.dtype)

    @jax.jit
    def with_first(label: Array) -> Array:
        """The loss of a sample one of whose labels is `label`; all others are 0, so that some are always left."""
        given = jnp.zeros(labels.shape, kind).at[(0,) * labels.ndim].set(label)
        return jnp.asarray(loss(jnp.asarray(drawn, outputs.dtype), given))[0]

    def value_of(label: int) -> float:
        return float(with_first(np.asarray(label, kind)))

    @cache
    def objection(value: int) -> str:
        if not np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return no_class(value)
        found = value_of(value)
        if not np.isfinite(found):
            return f"its loss is then {found}, and the model's outputs have"
        # An index below 0 counts from the end, one that is clipped stops there: silently another class.
        for taken in {value % (last + 1), min(max(value, 0), last)}:
            if found == value_of(taken) != value_of((taken + 1) % (last + 1)):
                return f"the loss takes it for {taken}, and the model's outputs have"
        return ""

    return objection

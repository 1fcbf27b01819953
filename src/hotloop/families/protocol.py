"""The one shape of a family: three pure functions of a job, and the engine does the rest.

A job is all that a program is built from, frozen and hashable. `init` makes the first state, a pytree;
`update(job)` is ONE weight update (it may go over micro-batches inside), `evaluate(job)` gives a value, or a row, for
each sample of a batch and never averages: the engine masks and adds, so that any split of the data adds up. What the
types cannot say is held by `check_family` in the tests.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from jax import Array

State = Any
Batch = Any
Metrics = Mapping[str, Array]
"""Of one update, by name; every family has a `loss`."""
Values = Mapping[str, Array]
"""Of each sample of a batch, by name."""
JobOf = TypeVar("JobOf", contravariant=True)


class Family(Protocol[JobOf]):
    """A module with these functions; further arguments have defaults."""

    def init(self, job: JobOf, key: Array) -> State: ...

    def update(self, job: JobOf) -> Callable[[State, Batch, Array], tuple[State, Metrics]]: ...

    def evaluate(self, job: JobOf) -> Callable[[State, Batch], Values]: ...


if TYPE_CHECKING:  # so that the type checker holds every family to it
    from hotloop.families.cnn import model as _cnn
    from hotloop.families.estimator import model as _estimator
    from hotloop.families.kernels import model as _kernels
    from hotloop.families.recommender import model as _recommender
    from hotloop.families.vcd import model as _vcd

    _FAMILIES: tuple[Family[Any], ...] = (_cnn, _estimator, _kernels, _recommender, _vcd)

"""`Train`: every option of `hotloop cnn train`, and the error for each combination that cannot work.

The options themselves stand in `model_options`, `run_options` and `old_options`, in groups as the help shows
them. A config says what was asked for; `settings.resolve` says what that means on the devices at hand. No jax.
"""

from dataclasses import dataclass

from hotloop.families.cnn import checks
from hotloop.families.cnn.model_options import Model, Numbers, Optimiser, Rate
from hotloop.families.cnn.old_options import Old, Pipeline
from hotloop.families.cnn.run_options import Batch, Data, Events, Records, Run, Validation
from hotloop.options import validate

__all__ = ["Train"]


# The last base comes first in the help.
@dataclass(frozen=True)
class Train(Old, Pipeline, Records, Validation, Events, Numbers, Rate, Optimiser, Model, Batch, Data, Run):
    """All of `hotloop cnn train`; hashable."""

    def __post_init__(self) -> None:
        validate(self)
        checks.check(self)

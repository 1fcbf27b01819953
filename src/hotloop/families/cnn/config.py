"""`Train`: every option of `hotloop cnn train`, and the error for each combination that cannot work.

The options themselves stand in `model_options`, `run_options`, `old_options` and the engine's `plan_options`, in
groups as the help shows them. A config says what was asked for; `settings.resolve` says what that means on the
devices at hand. No jax.
"""

from dataclasses import dataclass
from pathlib import Path

from hotloop.engine.plan import PlanOptions
from hotloop.families.cnn import checks
from hotloop.families.cnn.model_options import Model, Numbers, Optimiser, Rate
from hotloop.families.cnn.old_options import Old, Pipeline
from hotloop.families.cnn.run_options import Data, Kept, Records, Run, Validation
from hotloop.options import argument, validate

__all__ = ["Train", "Validate"]


# The last base comes first in the help.
@dataclass(frozen=True)
class Train(
    Old, Pipeline, Records, Validation, Kept, Numbers, Rate, Optimiser, Model, Data, Run, PlanOptions
):
    """All of `hotloop cnn train`; hashable."""

    def __post_init__(self) -> None:
        validate(self)
        checks.check(self)


@dataclass(frozen=True)
class Validate(Train):
    """All of `hotloop cnn validate`: the same options, and the run that has values for them."""

    run: Path | None = argument(
        "Folder of a run, or of its checkpoints; its options are used.", default=None, metavar="RUN"
    )

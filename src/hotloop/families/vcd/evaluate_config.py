"""The options of `hotloop vcd evaluate`. It imports no jax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.families.vcd.config import EVALUATION, RUN, Test
from hotloop.options import argument, non_negative, option, positive, validate


@dataclass(frozen=True, kw_only=True)
class Evaluate(Test):
    """A run's folder, which images of it, and how hard to try."""

    run: Path = argument("Folder of the run.", metavar="RUN")
    split: Literal["test", "validation", "train"] = option("test", "Images to evaluate.", group=EVALUATION)
    images: int | None = option(
        None, "Only the first so many, for a quick look.", check=positive, group=EVALUATION
    )
    step: int | None = option(
        None, "Checkpoint after so many updates; else the newest.", check=non_negative, group=RUN
    )
    data: str | None = option(None, "Another data set or folder than the run's.", group=RUN)
    seed: int = option(0, "Seed of all draws of the evaluation.", check=non_negative, group=RUN)

    def __post_init__(self) -> None:
        validate(self)

"""The options of `hotloop recommender baselines`: the data options of `train`, and what to measure. No jax."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from hotloop.errors import OptionError
from hotloop.families.recommender.config import RUN, Train
from hotloop.families.recommender.evaluate_config import MEASURES, Ranked
from hotloop.options import non_negative, option, validate

AS_TRAINED: dict[str, Any] = {
    each.name: field(default=each.default, metadata=each.metadata) for each in fields(Train)
}
"""Every option of `train`, with the default, help and check that it has there."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The ratings, named as for training."""

    training_data_file: Path | None = AS_TRAINED["training_data_file"]
    validation_data_file: Path | None = AS_TRAINED["validation_data_file"]
    test_data_file: Path | None = AS_TRAINED["test_data_file"]
    data: Literal["random", "procedural", "ml-100k"] = AS_TRAINED["data"]
    split: Literal["random", "user-time"] = AS_TRAINED["split"]
    fractions: tuple[float, ...] = AS_TRAINED["fractions"]
    seed: int = AS_TRAINED["seed"]

    def training(self) -> Train:
        """These data as options of a training, whose checks they must pass."""
        only_test = self.test_data_file is not None and self.validation_data_file is None
        return Train(**self.values(), no_validation=only_test)

    def values(self) -> dict[str, Any]:
        """Names and values of the data options alone."""
        return {each.name: getattr(self, each.name) for each in fields(Data)}


@dataclass(frozen=True, kw_only=True)
class Baselines(Ranked, Data):
    """All of `hotloop recommender baselines`."""

    run: Path | None = option(
        None,
        "A trained run for the last row; without data options, its data are taken.",
        metavar="RUN",
        group=RUN,
    )
    step: int | None = option(
        None, "Checkpoint of --run; left out, the one that validated best.", check=non_negative, group=RUN
    )
    part: Literal["validation", "test"] | None = option(
        None, "Part to measure on; left out, test where there is one, else validation.", group=MEASURES
    )
    ease: Literal["auto", "yes", "no"] = option(
        "auto", "EASE, whose cost grows with the cube of the items: auto leaves it out where that is too much.",
        group=MEASURES,
    )  # fmt: skip

    def __post_init__(self) -> None:
        validate(self)
        if self.step is not None and self.run is None:
            raise OptionError(f"--step {self.step}: needs --run")
        self.training()

    @property
    def names_data(self) -> bool:
        """Whether any data option was given."""
        return self.values() != Data().values()

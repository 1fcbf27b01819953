"""The options of `hotloop recommender sweep`: those of one training, and the learning rates to try.

Rates are given as the old program took them, positive exponents that are negated: 16 means 2^-16 times the batch
size. It knows what each trial is, as the options of a training, not how trials are run.
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from hotloop.errors import OptionError
from hotloop.families.recommender import config
from hotloop.families.recommender.config import (
    TrainOptions,
    TrialOptions,
    UpdateOptions,
    old_option,
    run_option,
)
from hotloop.options import folder_name, option, positive

sweep_option = partial(option, group="Sweep")
USUAL_RATES = tuple(f"{12.5 + 0.5 * n:g}" for n in range(16))


def parse_exponents(texts: tuple[str, ...], count: int) -> tuple[float, ...]:
    """Exponents of two, below zero, from positive ones: a list, or A..B cut into `count` points, both ends included.

    ValueError with the reason where a text is no number, or has the wrong sign.
    """
    if any(".." in text for text in texts):
        if len(texts) != 1:
            raise ValueError("must be one range A..B or a list of numbers, not both")
        ends = texts[0].split("..", 1)
        if any(end.startswith(".") for end in ends):  # is 16...20 up to 20, or to .20?
            raise ValueError("must be two numbers with two dots between them, such as 16..20")
        first, last = map(_positive, ends)
        between = [first + (last - first) * n / (count - 1) for n in range(1, count - 1)]
        values = [first, *between, last][:count]
    else:
        values = [_positive(text) for text in texts]
    if not values:
        raise ValueError("must name at least one rate, such as 16,16.5 or 16..20")
    return tuple(0.0 - value for value in values)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number; write 16,16.5,17 or 16..20") from None
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    if math.copysign(1, value) < 0:
        raise ValueError(
            f"{text} would be a rate of 2^{-value:g} times the batch size: exponents are negated here, "
            f"so write {-value:g}"
        )
    return value


@dataclass(frozen=True)
class SweepOptions(TrialOptions):
    """All of `hotloop recommender sweep`."""

    # No option of a sweep: the rates are, and --base-learning-rate is understood as short for them, as it was.
    base_learning_rate: ClassVar[float] = UpdateOptions.base_learning_rate  # type: ignore[misc]

    base_learning_rates: tuple[str, ...] = sweep_option(
        USUAL_RATES,
        "Rates to try: a list, 16,16.5,17, or a range cut into --num-devices points, 16..20; "
        "16 is a rate of 2^-16 times the batch size.",
    )
    num_devices: int = sweep_option(
        16,
        "Trials, one for each rate. Where there are fewer devices they are used in turn.",
        check=positive,
        aliases=("--num-ipus",),
    )
    concurrent: int | None = sweep_option(
        None,
        "Trials at a time; left out, as many as there are devices (CPU: 1). More than that share devices.",
        check=positive,
    )
    engine: Literal["local", "ray"] = sweep_option(
        "local", "Processes of this machine, or tasks of a Ray cluster (needs hotloop[ray])."
    )
    ray_address: str | None = sweep_option(
        None,
        "Cluster of --engine ray, such as auto or ray://HOST:10001; left out, one is started here.",
        metavar="ADDRESS",
    )
    no_validation: bool = run_option(
        False, "Do not validate; random data and a training file alone are never validated."
    )
    steps_per_log: int = run_option(40, "Calls between logs.", check=positive)
    results_dir: Path = run_option(
        Path("results"), "Folder in which the sweep gets its own.", aliases=("--logdir",)
    )
    run_name: str | None = run_option(
        None, "Name of the sweep's folder; else made of seed and time.", check=folder_name
    )
    fp_exceptions: bool = old_option(False, "No effect: a trial whose loss is not finite always stops.")

    def check(self) -> None:
        if self.ray_address is not None and self.engine != "ray":
            raise OptionError(f"--ray-address {self.ray_address}: only with --engine ray")
        if self.lr_schedule == "stepped":
            raise OptionError(
                "--lr-schedule stepped: has its own rates, so that all trials would be the same"
            )
        given = ",".join(self.base_learning_rates)
        try:
            found = len(self.exponents)
        except ValueError as error:
            raise OptionError(f"--base-learning-rates {given}: {error}") from None
        if found != self.num_devices:
            raise OptionError(
                f"--base-learning-rates {given}: {found} rates for {self.num_devices} trials; "
                f"write --num-devices {found}, or a range A..B"
            )
        self.training(self.exponents[0])

    @property
    def exponents(self) -> tuple[float, ...]:
        """The exponent of each trial, as `train` takes it."""
        return parse_exponents(self.base_learning_rates, self.num_devices)

    @property
    def is_validated(self) -> bool:
        """Whether the trials are validated: the old program never did."""
        if self.training_data_file is not None:
            return self.validation_data_file is not None and not self.no_validation
        return self.data != "random" and not self.no_validation

    def training(self, exponent: float) -> TrainOptions:
        """The options of one trial; its folder is still the sweep's."""
        shared = {each.name: getattr(self, each.name) for each in fields(TrialOptions)}
        return TrainOptions(
            **{**shared, "base_learning_rate": exponent, "no_validation": not self.is_validated}
        )


PRESETS = {
    name: {key: value for key, value in values.items() if key != "base_learning_rate"}
    for name, values in config.PRESETS.items()
}
"""Those of `train`, but for the rate."""

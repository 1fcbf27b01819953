"""Which keys each schedule, warm-up and optimiser takes, and which values can work; checked without jax.

A config calls these checks before anything is compiled, `optim` calls them again for those built without a config.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotloop.errors import OptionError
from hotloop.options import Check

VELOCITY = "velocity"
"""What the link of a chain is called that holds a momentum, in an optimiser's state and in checkpoints."""


def number_that(holds: Callable[[float], bool], reason: str) -> Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return "must be a finite number"
        return None if holds(value) else reason

    return check


NUMBER = number_that(lambda value: True, "")
NON_NEGATIVE = number_that(lambda value: value >= 0, "must be at least 0")
POSITIVE = number_that(lambda value: value > 0, "must be greater than 0")
MOMENTUM = number_that(lambda value: 0 <= value < 1, "must be at least 0 and below 1")


def check_flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def check_list(value: Any) -> str | None:
    """Of numbers from 0."""
    if not isinstance(value, list | tuple):
        return "must be a list of numbers"
    return next((f"each {reason}" for reason in map(NON_NEGATIVE, value) if reason), None)


def check_warmup_mode(value: Any) -> str | None:
    return None if value in ("shift", "mask") else "must be shift or mask"


@dataclass(frozen=True)
class Keys:
    """The keys that must be there, and those that may be, each with the check of its value."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)
    optax: str = ""
    """Of an optimiser: the function of optax that gives its direction, where it takes these keys as they are."""

    def check(self, argument: str, owner: str, params: Mapping[str, Any]) -> None:
        """An OptionError in the argument's name where a key is missing or unknown, or a value cannot work."""
        known = {**self.required, **self.optional}
        missing = [key for key in self.required if key not in params]
        unknown = [key for key in params if key not in known]
        if missing or unknown:
            wrong = [f"{', '.join(missing)} missing"] if missing else []
            wrong += [f"{', '.join(unknown)} unknown"] if unknown else []
            optional = f" (and may take {', '.join(self.optional)})" if self.optional else ""
            raise OptionError(
                f"{argument}: {' and '.join(wrong)}: found {', '.join(params) or 'none'}; "
                f"{owner} takes {', '.join(self.required) or 'none'}{optional}"
            )
        for key, value in params.items():
            if reason := known[key](value):
                raise OptionError(f"{argument}: {owner}'s {key} {value}: {reason}")


SCHEDULES = {
    "const": Keys({"initial_learning_rate": NON_NEGATIVE}),
    "cosine": Keys({"initial_learning_rate": NON_NEGATIVE, "epochs_to_total_decay": POSITIVE}),
    "stepped": Keys({"boundaries": check_list, "values": check_list}),
    "polynomial": Keys(
        {"initial_learning_rate": NON_NEGATIVE, "epochs_to_total_decay": POSITIVE}
        | {"end_learning_rate_ratio": NON_NEGATIVE, "power": NON_NEGATIVE}
    ),
    "exponential": Keys(
        {"initial_learning_rate": NON_NEGATIVE, "decay_rate": NON_NEGATIVE, "decay_epochs": POSITIVE}
    ),
    "one_cycle": Keys(
        {"initial_learning_rate": NON_NEGATIVE, "total_epochs": POSITIVE, "peak_epoch": NON_NEGATIVE}
    ),
}
WARMUP = Keys({"warmup_mode": check_warmup_mode, "warmup_epochs": NON_NEGATIVE})
ADAM = {"b1": MOMENTUM, "b2": MOMENTUM, "eps": POSITIVE, "nesterov": check_flag}
OPTIMISERS = {
    "sgd": Keys({"momentum": MOMENTUM}, {"nesterov": check_flag}),
    "momentum": Keys({"momentum": MOMENTUM}, {"nesterov": check_flag}),
    "lars": Keys(
        {"momentum": MOMENTUM, "weight_decay": NON_NEGATIVE, "eeta": POSITIVE, "epsilon": NON_NEGATIVE},
        {"nesterov": check_flag},
    ),
    "rmsprop": Keys({"momentum": MOMENTUM, "base_decay_exponent": NUMBER, "epsilon": NON_NEGATIVE}),
    "rmsprop_outside": Keys({"decay": MOMENTUM, "epsilon": POSITIVE}, {"first_square": check_flag}),
    "adam": Keys({}, ADAM, optax="scale_by_adam"),
    "adamw": Keys({}, {"weight_decay": NON_NEGATIVE, **ADAM}),
    "muon": Keys(
        {},
        {"beta": MOMENTUM, "nesterov": check_flag, "weight_decay": NON_NEGATIVE, "eps": POSITIVE}
        | {"consistent_rms": POSITIVE}
        | {"adam_b1": MOMENTUM, "adam_b2": MOMENTUM, "adam_weight_decay": NON_NEGATIVE},
    ),
}
"""sgd, lars and rmsprop keep the rate inside the momentum, as Keras does; momentum does not. rmsprop has its epsilon
inside the root, rmsprop_outside outside."""

USUAL_PARAMS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0},
    "momentum": {"momentum": 0.9},
    # With a trust coefficient of 1 the rate is the share of its own norm by which a layer moves.
    "lars": {"momentum": 0.9, "weight_decay": 0, "eeta": 1, "epsilon": 0},
    # A mean of squares that keeps 0.9, whatever the batch.
    "rmsprop": {"momentum": 0, "base_decay_exponent": math.log2(0.1), "epsilon": 0},
    "rmsprop_outside": {"decay": 0.9, "epsilon": 1e-7},
}
"""For a training that names an optimiser and no more; those of rmsprop are for a `global_batch_size` of 1."""


def _known(owner: str, name: str, table: Mapping[str, Keys]) -> Keys:
    if name not in table:
        raise OptionError(f"{owner}: name={name}: must be one of {', '.join(table)}")
    return table[name]


def check_schedule(name: str, params: Mapping[str, Any], warmup: Mapping[str, Any] | None = None) -> None:
    """An OptionError where the schedule, its params or the warm-up cannot work."""
    _known("learning_rate", name, SCHEDULES).check("learning_rate: params", name, params)
    if name == "stepped":
        boundaries, values = params["boundaries"], params["values"]
        if len(boundaries) != len(values) - 1:
            raise OptionError(
                f"learning_rate: params: {len(values)} values and {len(boundaries)} boundaries:"
                " stepped takes one value more than boundaries"
            )
        if list(boundaries) != sorted(boundaries):
            shown = ", ".join(map(str, boundaries))
            raise OptionError(
                f"learning_rate: params: stepped's boundaries {shown}: must be in ascending order"
            )
    if name == "one_cycle" and params["peak_epoch"] >= params["total_epochs"]:
        peak, total = params["peak_epoch"], params["total_epochs"]
        raise OptionError(f"learning_rate: params: peak_epoch {peak}: must lie before total_epochs {total}")
    if warmup is not None:
        WARMUP.check("learning_rate: warmup", "a warm-up", warmup)


def check_optimiser(
    name: str, params: Mapping[str, Any], *, global_batch_size: int | None = None
) -> dict[str, Any]:
    """The params that are the optimiser's own; an OptionError where they cannot work, with this batch if it is known.

    A momentum of 0 is none, and goes with an optimiser that knows no momentum.
    """
    known = _known("optimizer", name, OPTIMISERS)
    takes = {**known.required, **known.optional}
    own = {key: value for key, value in params.items() if key in takes or key != "momentum" or value != 0}
    known.check("optimizer: params", name, own)
    if name == "rmsprop" and global_batch_size is not None:
        rmsprop_decay(params["base_decay_exponent"], global_batch_size)
    return own


def rmsprop_decay(exponent: float, global_batch_size: int) -> float:
    """rho = 1 - 2^exponent * batch: so that the mean of squares forgets after a fixed number of samples."""
    # A float exponent beyond the range of a double would be an OverflowError; it is out of range either way.
    rho: float = 1 - 2.0 ** min(exponent, 1000) * global_batch_size
    if not 0 <= rho < 1:
        # A memory of 16 to 32 updates: the highest exponent possible would give one of a single update.
        usable = math.floor(-math.log2(global_batch_size)) - 4
        raise OptionError(
            f"optimizer: params: rmsprop's base_decay_exponent {exponent}: gives rho {rho:.6g} with global batch"
            f" {global_batch_size}, which must be at least 0 and below 1; {usable} gives"
            f" {rmsprop_decay(usable, global_batch_size):.4g}"
        )
    return rho


def check_loss_scaling(static: float, automatic: bool) -> None:
    """An OptionError where both ways of loss scaling are asked for; 0 is no static scaling."""
    if automatic and static:
        raise OptionError(
            f"automatic=True and static={static:g}: only one can set the factor;"
            " static=0 leaves it to the automatic one"
        )

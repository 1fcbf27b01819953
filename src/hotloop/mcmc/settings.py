"""What a sampler is told, with its defaults, checked; what cannot work is one line."""

from dataclasses import dataclass
from math import inf
from typing import TypedDict

from hotloop.errors import OptionError


class Options(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments, for type checkers."""

    chains: int | None
    warmup: int
    samples: int
    leapfrogs: int | None
    jitter: float
    target_acceptance: float
    step_size: float | None
    max_leapfrogs: int


@dataclass(frozen=True)
class Settings:
    """See `hmc.sample`."""

    chains: int | None = None
    warmup: int = 1000
    samples: int = 1000
    leapfrogs: int | None = None
    jitter: float = 0.5
    target_acceptance: float = 0.8
    step_size: float | None = None
    max_leapfrogs: int = 1000

    def __post_init__(self) -> None:
        _check_count("warmup", self.warmup, 0)
        for name in ("chains", "samples", "leapfrogs", "max_leapfrogs"):
            value = getattr(self, name)
            if value is not None or name in ("samples", "max_leapfrogs"):
                _check_count(name, value, 1)
        if not 0 <= self.jitter < 1:
            raise OptionError(f"jitter is {self.jitter}: from 0 (all trajectories alike) to less than 1")
        if not 0 < self.target_acceptance < 1:
            raise OptionError(f"target_acceptance is {self.target_acceptance}: more than 0 and less than 1")
        if self.step_size is not None and not 0 < self.step_size < inf:
            raise OptionError(f"step_size is {self.step_size}: a positive number is needed")
        if self.warmup == 0 and (self.step_size is None or self.leapfrogs is None):
            raise OptionError(
                "warmup is 0: then step_size and leapfrogs must be given, as nothing is adapted"
            )


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} is {value!r}: an integer of at least {least} is needed")

"""What a sampler is told, with its defaults, checked; what cannot work is one line."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from operator import index
from typing import Any, TypedDict

from hotloop.errors import OptionError, did_you_mean


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
    devices: int


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
    devices: int = 1

    def __post_init__(self) -> None:
        _check_count("warmup", self.warmup, 0)
        for name in ("chains", "samples", "leapfrogs", "max_leapfrogs", "devices"):
            value = getattr(self, name)
            if value is not None or name in ("samples", "max_leapfrogs", "devices"):
                _check_count(name, value, 1)
        if self.leapfrogs is not None and self.leapfrogs > self.max_leapfrogs:
            raise OptionError(
                f"leapfrogs is {self.leapfrogs} and max_leapfrogs is {self.max_leapfrogs}: no draw takes more than "
                "that; give fewer leapfrogs, or a larger max_leapfrogs"
            )
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


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise OptionError(f"{name} is {value!r}: an integer of at least {least} is needed")


def read_settings(options: Mapping[str, Any]) -> Settings:
    """Settings of what a user gave; numbers of numpy are numbers, and an unknown name is told what was meant by it."""
    known = {each.name: each for each in fields(Settings)}
    if unknown := [name for name in options if name not in known]:
        # What other samplers call num_chains or n_chains.
        meant = unknown[0].removeprefix("num_").removeprefix("n_")
        hint = f"; did you mean {meant}?" if meant in known else did_you_mean(unknown[0], known)
        raise OptionError(f"hmc: there is no option {unknown[0]}{hint}")
    return Settings(**{name: _read_number(name, value) for name, value in options.items()})


def _read_number(name: str, value: Any) -> Any:
    """As Python's own int or float; None stays, where it is the default."""
    is_float = name in ("jitter", "target_acceptance", "step_size")
    if value is None and getattr(Settings, name) is None:
        return None
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value) if is_float else index(value)
    except (TypeError, ValueError):
        least = 0 if name == "warmup" else 1
        wanted = "a number" if is_float else f"an integer of at least {least}"
        raise OptionError(f"{name} is {value!r}: {wanted} is needed") from None

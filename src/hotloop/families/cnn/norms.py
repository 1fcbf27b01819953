"""Which normalisation a network has. A description only: no arrays, no jax."""

from dataclasses import dataclass
from typing import Literal

from hotloop.errors import OptionError


@dataclass(frozen=True)
class NormChoice:
    """Batch normalisation with moving statistics, or group normalisation by number or by size of the groups."""

    kind: Literal["batch", "group"] = "batch"
    momentum: float = 0.97
    groups: int | None = None
    channels_per_group: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.groups, self.channels_per_group)
        if self.kind == "group" and sizes.count(None) != 1:
            raise OptionError(
                f"--norm-layer: group_norm has num_groups {self.groups} and channels_per_group "
                f"{self.channels_per_group}: give exactly one of them, e.g. {{name: group_norm, num_groups: 32}}"
            )
        if self.kind == "batch" and sizes != (None, None):
            raise OptionError("--norm-layer: num_groups and channels_per_group belong to group_norm")
        if any(size is not None and size < 1 for size in sizes):
            raise OptionError("--norm-layer: num_groups and channels_per_group must be at least 1")

    def named(self, name: str) -> str:
        """A layer's name as it is with this normalisation: `conv1_bn` is `conv1_gn` with groups."""
        return name if self.kind == "batch" else name.replace("bn", "gn")

    def groups_of(self, channels: int) -> int:
        """How many groups `channels` fall into."""
        size = self.channels_per_group or channels / (self.groups or 1)
        if channels % size or size != int(size):
            wanted = (
                f"num_groups {self.groups}"
                if self.groups
                else f"channels_per_group {self.channels_per_group}"
            )
            raise OptionError(
                f"--norm-layer: {wanted} does not divide a layer of {channels} channels: "
                "take a divisor of every layer's channels"
            )
        return channels // int(size)

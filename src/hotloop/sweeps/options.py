"""The options that every sweep has of where its trials run, and what is refused of them. No jax."""

from functools import partial
from typing import Protocol

from hotloop.errors import OptionError
from hotloop.options import option, positive

sweep_option = partial(option, group="Sweep")
concurrent_option = partial(
    sweep_option,
    None,
    "Trials at a time; left out, as many as there are devices (CPU: 1). More than that share devices.",
    check=positive,
)
engine_option = partial(
    sweep_option, "local", "Processes of this machine, or tasks of a Ray cluster (needs hotloop[ray])."
)
ray_address_option = partial(
    sweep_option,
    None,
    "Cluster of --engine ray, such as auto or ray://HOST:10001; left out, one is started here.",
    metavar="ADDRESS",
)


class PlaceOptions(Protocol):
    @property
    def engine(self) -> str: ...

    @property
    def ray_address(self) -> str | None: ...

    @property
    def concurrent(self) -> int | None: ...


def check_place_options(options: PlaceOptions) -> None:
    """OptionError for a cluster's address without a cluster."""
    if options.ray_address is not None and options.engine != "ray":
        raise OptionError(f"--ray-address {options.ray_address}: only with --engine ray")

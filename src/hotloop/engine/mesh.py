"""Devices as a mesh: one axis, `replica`, for data-parallel copies. It knows no model and no batch."""

from typing import TYPE_CHECKING

from hotloop.errors import DeviceError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

REPLICA = "replica"


def replicas(count: int, platform: str | None = None) -> "Mesh":
    """A mesh of the first `count` devices of a platform (None: the default one) along the axis `replica`."""
    import jax
    from jax.sharding import AxisType

    devices = jax.devices(platform)
    if count > len(devices):
        here = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}"
        raise DeviceError(f"replicas={count}: only {here} here; use at most {len(devices)}")
    return jax.make_mesh((count,), (REPLICA,), (AxisType.Auto,), devices=devices[:count])


def device(number: int, platform: str | None = None) -> "jax.Device":
    """The device of a platform with this number, counted from 0; -1 is the first."""
    import jax

    devices = jax.devices(platform)
    if number >= len(devices):
        raise DeviceError(f"device_id={number}: the devices here are 0 to {len(devices) - 1}")
    return devices[max(number, 0)]

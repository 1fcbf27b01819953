"""Devices as a mesh: so far one axis, `replica`, for data-parallel copies. It knows no model and no batch."""

import jax
from jax.sharding import Mesh

from hotloop.errors import DeviceError

REPLICA = "replica"


def replicas(count: int) -> Mesh:
    """A mesh of the first `count` devices of the default platform, along the axis `replica`."""
    devices = jax.devices()
    if count > len(devices):
        platform = devices[0].platform
        raise DeviceError(
            f"--replicas {count}: {len(devices)} {platform} device{'s' * (len(devices) > 1)} here; "
            f"use at most {len(devices)}"
        )
    return jax.make_mesh((count,), (REPLICA,), devices=devices[:count])


def device(number: int) -> jax.Device:
    """The device with this number, counted as `hotloop devices` lists them; -1 is the first."""
    devices = jax.devices()
    if number >= len(devices):
        raise DeviceError(f"--device-id {number}: devices here are 0 to {len(devices) - 1}")
    return devices[max(number, 0)]

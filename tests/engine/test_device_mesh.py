import jax
import pytest

from hotloop.engine import device
from hotloop.errors import DeviceError


def test_replicas_take_the_first_devices_along_one_axis():
    made = device.replica_mesh(len(jax.devices()))
    assert made.axis_names == ("replica",)
    assert list(made.devices) == jax.devices()


def test_more_replicas_than_devices_is_one_line_with_the_number_here():
    here = len(jax.devices())
    with pytest.raises(DeviceError, match=rf"^replicas={here + 1}: only {here} .* use at most {here}$"):
        device.replica_mesh(here + 1)


def test_a_device_is_found_by_number_and_minus_one_is_the_first():
    devices = jax.devices()
    assert device.pick_device(-1) == device.pick_device(0) == devices[0]
    assert device.pick_device(len(devices) - 1) == devices[-1]
    with pytest.raises(DeviceError, match=f"device_id={len(devices)}: .* 0 to {len(devices) - 1}"):
        device.pick_device(len(devices))

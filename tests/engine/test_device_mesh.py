import os
from dataclasses import dataclass

import jax
import pytest

from hotloop.engine import device
from hotloop.errors import DeviceError


def test_replicas_take_the_first_devices():
    made = device.device_mesh(len(jax.devices()))
    assert made.axis_names == ("replica", "stage")
    assert list(made.devices[:, 0]) == jax.devices()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_the_stages_of_a_replica_lie_side_by_side():
    made = device.device_mesh(2, 2)
    assert made.devices.tolist() == [jax.devices()[:2], jax.devices()[2:4]]


@dataclass(frozen=True)
class Owned:
    """A device of one of several processes, as far as a mesh is concerned."""

    process_index: int
    number: int
    platform: str = "cpu"


def owned(monkeypatch, *counts):
    """So many devices in each process, listed as jax lists them."""
    found = [Owned(process, number) for process, count in enumerate(counts) for number in range(count)]
    monkeypatch.setattr(jax, "devices", lambda platform: found)
    return found


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_every_process_gives_equally_many_of_its_first_devices(monkeypatch, shape):
    owned(monkeypatch, 3, 3)
    made = device.device_mesh(*shape)
    assert made.devices.shape == shape
    assert [(each.process_index, each.number) for each in made.devices.ravel()] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_devices_that_do_not_divide_over_the_processes_are_refused(monkeypatch):
    owned(monkeypatch, 3, 3)
    with pytest.raises(DeviceError, match=r"^replicas=3: the 2 processes cannot take equally many"):
        device.device_mesh(3)
    with pytest.raises(DeviceError, match=r"^replicas=1, stages=3: the 2 processes cannot"):
        device.device_mesh(1, 3)


def test_a_process_that_has_fewer_devices_bounds_them_all(monkeypatch):
    owned(monkeypatch, 4, 2)
    with pytest.raises(
        DeviceError, match=r"^replicas=6: only 6 cpu devices here, .* at most 2; use at most 4$"
    ):
        device.device_mesh(6)


def test_more_replicas_than_devices_is_one_line_with_the_number_here():
    here = len(jax.devices())
    with pytest.raises(DeviceError, match=rf"^replicas={here + 1}: only {here} .* use at most {here}$"):
        device.device_mesh(here + 1)


def test_a_device_is_found_by_number_and_minus_one_is_the_first():
    devices = jax.devices()
    assert device.pick_device(-1) == device.pick_device(0) == devices[0]
    assert device.pick_device(len(devices) - 1) == devices[-1]
    with pytest.raises(DeviceError, match=f"device_id={len(devices)}: .* 0 to {len(devices) - 1}"):
        device.pick_device(len(devices))


VIRTUAL, PATIENCE = f"--{device.VIRTUAL_DEVICES}=8", f"--{device.CPU_PATIENCE}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("--xla_a=1", "--xla_a=1"),
        (VIRTUAL, f"{VIRTUAL} {PATIENCE}=600"),
        (f"{VIRTUAL} {PATIENCE}=5", f"{VIRTUAL} {PATIENCE}=5"),
    ],
)
def test_virtual_devices_that_share_cores_may_wait_for_each_other(monkeypatch, given, expected):
    monkeypatch.setenv("XLA_FLAGS", given)
    with device._patient_collectives():
        assert os.environ["XLA_FLAGS"] == expected
    assert os.environ["XLA_FLAGS"] == given

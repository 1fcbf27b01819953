"""Which engine the options of a sweep ask for, and what a sweep needs to speak and to choose its devices by."""

from typing import Protocol

from hotloop.engine.progress import Console
from hotloop.sweeps.engines import Engine, LocalEngine, find_devices
from hotloop.sweeps.options import PlaceOptions
from hotloop.sweeps.ray_engine import RayEngine


class SweepConsole(Console, Protocol):
    @property
    def device(self) -> str: ...

    @property
    def only_accelerator(self) -> bool: ...


def open_engine(options: PlaceOptions, console: SweepConsole) -> Engine:
    """A cluster, or this machine: DeviceError where the device that is asked for is not there."""
    if options.engine == "ray":
        return RayEngine(options.ray_address, options.concurrent, console.device, console.say)
    devices = find_devices(console.device, console.only_accelerator)
    for warning in devices.warnings:
        console.warn(warning)
    return LocalEngine(options.concurrent, devices, console.say)

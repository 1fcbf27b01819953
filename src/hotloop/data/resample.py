"""An image's pixels on a grid of places: bilinear, corners not aligned, nothing averaged that is skipped.

Rows first, each as one run of numbers, then columns, in float32: less than half the time of pillow's `transform` for
bytes. Where hotloop-native is installed its library does the same arithmetic to the bit, in a fifth of the time.
"""

import importlib
from ctypes import CDLL, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotloop.data.jpeg import Pixels
from hotloop.machine import is_switched_off

Places = NDArray[np.int32]
Weights = NDArray[np.float32]


class SamplingGrid(NamedTuple):
    """Which pixels an output image is made of: place i along an axis is read at `first + i * step`."""

    left: float
    top: float
    step_x: float
    step_y: float


class _Axis(NamedTuple):
    """Along an axis: the pixels before and after each place, and the weight of the second."""

    before: Places
    after: Places
    weight: Weights

    def mirrored(self) -> "_Axis":
        return _Axis(self.before[::-1], self.after[::-1], self.weight[::-1])

    def of_numbers(self, channels: int) -> "_Axis":
        """The same for the numbers of pixels that have so many."""

        within = np.arange(channels, dtype=np.int32)
        before = np.add.outer(channels * self.before, within, dtype=np.int32).ravel()
        after = np.add.outer(channels * self.after, within, dtype=np.int32).ravel()
        return _Axis(before, after, np.repeat(self.weight, channels))


def resample(pixels: Pixels, grid: SamplingGrid, size: int, mirrored: bool = False) -> NDArray[np.float32]:
    """The grid's size x size pixels as float32; the last row and column stand for what lies beyond."""
    height, width, channels = pixels.shape
    down = _find_neighbours(grid.top, grid.step_y, size, height)
    across = _find_neighbours(grid.left, grid.step_x, size, width)
    if mirrored:
        across = across.mirrored()
    if width > 4 * size:  # only the columns that are read: a large photograph has many more
        pixels = pixels[:, np.concatenate([across.before, across.after])]
        places = np.arange(2 * size, dtype=np.int32)
        across = _Axis(places[:size], places[size:], across.weight)
    across = across.of_numbers(channels)
    library = find_library()
    mixed = _mix(pixels, down, across) if library is None else _mix_natively(library, pixels, down, across)
    return mixed.reshape(size, size, channels)


def _find_neighbours(first: float, step: float, size: int, length: int) -> _Axis:
    at = first + np.arange(size, dtype=np.float64) * step
    lower = np.floor(at)
    weight = (at - lower).astype(np.float32)
    before, after = (np.clip(places, 0, length - 1).astype(np.int32) for places in (lower, lower + 1))
    return _Axis(before, after, weight)


def _mix(pixels: Pixels, down: _Axis, across: _Axis) -> NDArray[np.float32]:
    upper, lower = (
        pixels[places].reshape(len(places), -1).astype(np.float32) for places in (down.before, down.after)
    )
    rows = _between(upper, lower, down.weight[:, None])
    before, after = (rows.take(places, axis=1) for places in (across.before, across.after))
    return _between(before, after, across.weight)


def _between(near: Weights, far: Weights, weight: Weights) -> NDArray[np.float32]:
    """near + (far - near) * weight, in the memory of both."""
    far -= near
    far *= weight
    near += far
    return near


def _mix_natively(library: CDLL, pixels: Pixels, down: _Axis, across: _Axis) -> NDArray[np.float32]:
    _, width, channels = pixels.shape
    if pixels.dtype != np.uint8 or pixels.strides[1:] != (channels, 1) or pixels.strides[0] < 0:
        pixels = np.ascontiguousarray(pixels, np.uint8)
    arrays = [np.ascontiguousarray(each) for each in (*down, *across)]
    top, bottom, down_weight, before, after, weight = (c_void_p(each.ctypes.data) for each in arrays)
    out = np.empty((len(down.before), len(across.before)), np.float32)
    library.hotloop_resample(
        c_void_p(pixels.ctypes.data),
        c_int64(pixels.strides[0]),
        c_int64(width * channels),
        top,
        bottom,
        down_weight,
        c_int64(out.shape[0]),
        before,
        after,
        weight,
        c_int64(out.shape[1]),
        c_void_p(out.ctypes.data),
    )
    return out


def find_library() -> CDLL | None:
    """The functions of hotloop-native for images; None where they cannot be had."""
    return _load_library()[0]


def name_resampler() -> str:
    """Who resamples, and why it is not the faster one."""
    library, missing = _load_library()
    if library:
        return "hotloop-native resamples"
    return f"numpy resamples, in five times the time of hotloop-native, {missing}"


@cache
def _load_library() -> tuple[CDLL | None, str]:
    """The library, or what hotloop-native is instead."""
    if is_switched_off("HOTLOOP_NATIVE"):
        return None, "which HOTLOOP_NATIVE switches off"
    try:
        package = importlib.import_module("hotloop_native")
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "hotloop_native"
        return None, "which is not installed" if is_missing else f"which does not load: {error}"
    if not hasattr(package, "load_images"):
        return None, f"which is {package.VERSION} here and does so from 0.4.3 on"
    try:
        library: CDLL = package.load_images()
    except OSError as error:
        return None, f"which does not load: {error}"
    library.hotloop_resample.restype = None
    return library, ""

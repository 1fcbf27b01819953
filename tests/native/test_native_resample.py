"""hotloop-native's resampling of images: the bits of numpy's, from processes that load nothing else."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.data import resample as resampling
from hotloop.data.resample import SamplingGrid, find_library, name_resampler, resample
from native_calls import hotloop_native


def by_both(monkeypatch, pixels, *settings):
    found = []
    for library in (hotloop_native.load_images(), None):
        monkeypatch.setattr(resampling, "find_library", lambda library=library: library)
        found.append(resample(pixels, *settings))
    return found


@given(
    st.integers(1, 90),
    st.integers(1, 200),
    st.floats(-0.5, 3),
    st.floats(-0.5, 3),
    st.sampled_from([1 / 3, 0.7, 1, 1.9, 6.5]),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_the_bits_are_those_of_numpy(height, width, left, top, step, mirrored, channels):
    pixels = np.random.default_rng(height + width).integers(0, 256, (height, width, channels), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        ours, plain = by_both(patch, pixels, SamplingGrid(left, top, step, step * 0.8), 16, mirrored)
    np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize(
    "cut", [np.s_[3:40, 5:60], np.s_[::-1], np.s_[:, ::2], np.s_[::3, ::-1], np.s_[..., ::-1]], ids=str
)
def test_parts_of_an_image_are_read_where_they_lie(monkeypatch, cut):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)[cut]
    ours, plain = by_both(monkeypatch, pixels, SamplingGrid(0.3, 0.1, 1.1, 0.7), 32)
    np.testing.assert_array_equal(ours, plain)


@pytest.fixture
def unloaded():
    """As in a process that has not looked for the package yet."""
    resampling._load_library.cache_clear()
    yield
    resampling._load_library.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_it_is_taken_where_it_is_installed(monkeypatch):
    monkeypatch.setenv("HOTLOOP_NATIVE", "1")
    assert find_library() is hotloop_native.load_images()
    assert name_resampler() == "hotloop-native resamples"


def fail():
    raise OSError("no such file")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setenv("HOTLOOP_NATIVE", "off"), "which HOTLOOP_NATIVE switches off"),
        (lambda patch: patch.setitem(sys.modules, "hotloop_native", None), "which is not installed"),
        (
            lambda patch: patch.setattr(hotloop_native, "load_images", fail),
            "which does not load: no such file",
        ),
        (
            lambda patch: patch.delattr(hotloop_native, "load_images"),
            r"which is [\d.]+ here and does so from 0\.4\.3",
        ),
    ],
    ids=["switched off", "not installed", "library missing", "older"],
)
def test_numpy_says_why_it_is_numpy(monkeypatch, change, reason):
    monkeypatch.setenv("HOTLOOP_NATIVE", "1")
    change(monkeypatch)
    assert find_library() is None
    assert re.fullmatch(
        f"numpy resamples, in five times the time of hotloop-native, {reason}.*", name_resampler()
    )


def test_neither_jax_nor_another_library_is_loaded_for_it():
    code = (
        "import sys; from hotloop.data.resample import find_library; assert find_library();"
        "assert 'jax' not in sys.modules; maps = open('/proc/self/maps').read();"
        "assert 'libhotloop_images' in maps and 'libdnnl' not in maps and 'libtbb' not in maps"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})

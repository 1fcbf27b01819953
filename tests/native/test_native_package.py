"""The package hotloop-native: what it exports, and what it says where something is wrong."""

import importlib.metadata
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from native_calls import Convolution, draw, hotloop_native

CONV = Convolution(pads=(1, 1, 1, 1))


def refused(match, conv, target, shape, *shapes, **more):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match) as caught:
        jax.block_until_ready(conv.call(target, shape, *map(jnp.zeros, shapes), **more))
    assert len(str(caught.value).splitlines()) == 1


def test_the_library_has_every_handler_that_is_named():
    for target in hotloop_native.TARGETS:
        assert getattr(hotloop_native.load(), target)


def test_it_is_loaded_once():
    assert hotloop_native.load() is hotloop_native.load()


def test_jax_is_not_imported_by_it():
    code = "import sys, hotloop_native; hotloop_native.load(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_runtime_package_is_named(monkeypatch):
    def none(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(hotloop_native, "files", none)
    with pytest.raises(ImportError, match="pip install intel-cmplr-lib-rt"):
        hotloop_native.load.__wrapped__()


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(hotloop_native, "files", lambda package: [])
    with pytest.raises(OSError, match=r"libintlc\.so\.5 is not in the installed package intel-cmplr-lib-rt"):
        hotloop_native.load.__wrapped__()


def test_a_library_that_does_not_load_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "libintlc.so.5"
    broken.write_text("no library")
    monkeypatch.setattr(hotloop_native, "_path_in", lambda package, name: broken)
    with pytest.raises(OSError, match=r"libintlc\.so\.5 of hotloop-native cannot be loaded"):
        hotloop_native.load.__wrapped__()


# Where the result is empty, too, XLA has nothing to compute and calls nobody.
EMPTY = {
    "no images": ("kernel_gradient", (3, 3, 8, 8), (0, 4, 4, 8), (0, 4, 4, 8)),
    "no rows": ("forward", (2, 4, 4, 8), (2, 0, 4, 8), (3, 3, 8, 8)),
    "no columns": ("forward", (2, 4, 4, 8), (2, 4, 0, 8), (3, 3, 8, 8)),
    "no channels": ("forward", (2, 4, 4, 8), (2, 4, 4, 0), (3, 3, 0, 8)),
    "no filters": ("input_gradient", (2, 4, 4, 8), (2, 4, 4, 0), (3, 3, 8, 0)),
    "no kernel": ("input_gradient", (2, 4, 4, 8), (2, 4, 4, 8), (0, 3, 8, 8)),
}


@pytest.mark.parametrize("what", EMPTY)
def test_empty_images_and_kernels_are_refused(what):
    refused("an empty image, kernel or result", CONV, *EMPTY[what])


def test_sizes_that_do_not_fit_are_refused():
    refused("sizes of image, kernel and result", CONV, "forward", (2, 5, 4, 8), (2, 4, 4, 8), (3, 3, 8, 8))
    refused("do not agree", CONV, "forward", (2, 4, 4, 8), (2, 4, 4, 8), (3, 3, 4, 8))
    refused("do not agree", CONV, "input_gradient", (3, 4, 4, 8), (2, 4, 4, 8), (3, 3, 8, 8))


def test_settings_out_of_range_are_refused():
    shapes = ((2, 4, 4, 8), (2, 4, 4, 8), (3, 3, 8, 8))
    refused("pads must be 0 or more", Convolution(pads=(-1, 3, 1, 1)), "forward", *shapes)
    refused("strides and groups must be 1", Convolution((0, 1), CONV.pads), "forward", *shapes)
    refused("do not agree", Convolution(pads=CONV.pads, groups=0), "forward", *shapes)
    refused("strides are two numbers", Convolution((1,), CONV.pads), "forward", *shapes)
    bad_groups = ((2, 4, 4, 7), (2, 4, 4, 8), (3, 3, 4, 7))
    refused("groups must divide", Convolution(pads=CONV.pads, groups=2), "forward", *bad_groups)
    refused("one bias", CONV, "bias", *shapes, (7,), relu=True)
    refused("one bias", CONV, "bias_sum", *shapes, (7,), (2, 4, 4, 8), relu=True)
    refused("what is added", CONV, "bias_sum", *shapes, (8,), (2, 4, 3, 8), relu=True)


def test_other_types_are_refused():
    x, kernel = draw(0, (2, 4, 4, 8), (3, 3, 8, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="F32"):
        jax.block_until_ready(CONV.call("forward", (2, 4, 4, 8), x.astype(jnp.bfloat16), kernel))

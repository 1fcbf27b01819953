"""The seam: which implementation of an operation runs on which platform, and how a test forces one."""

import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from hotloop.layers.conv import conv2d
from hotloop.layers.paths import Operation, force_path
from hotloop.traced_platform import name_platform, trace_for


def three_ways() -> Operation:
    operation = Operation(lambda x, *, by: x + by)
    operation.register("times", "cpu", lambda x, *, by: x * by)
    operation.register("minus", "cuda", lambda x, *, by: x - by)
    return operation


def text_for(platform: str, function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_is_chosen_when_the_program_is_lowered() -> None:
    operation = three_ways()
    one = jnp.ones(())
    words = {"cpu": "stablehlo.multiply", "cuda": "stablehlo.subtract", "tpu": "stablehlo.add"}
    for platform, word in words.items():
        text = text_for(platform, lambda x: operation(x, by=3.0), one)
        assert word in text
        assert not any(other in text for other in words.values() if other != word)


def test_where_the_platform_is_known_no_other_path_is_traced_and_elsewhere_all_are() -> None:
    traced: list[str] = []

    def path(name: str, power: int):
        def implementation(x):
            traced.append(name)
            return x**power

        return implementation

    operation = Operation(
        path("default", 1), cpu=("squared", path("cpu", 2)), cuda=("cubed", path("cuda", 3))
    )
    gradient = jax.jit(jax.grad(lambda x: operation(x)))
    here = name_platform(jax.devices()[0])
    wanted = {"cpu": 4.0, "cuda": 12.0}.get(here, 1.0)
    for platform, paths, value in (
        (here, {here} if here in ("cpu", "cuda") else {"default"}, wanted),
        ("tpu", {"default"}, 1.0),
        ("cuda", {"cuda"}, 12.0),
        (None, {"default", "cpu", "cuda"}, wanted),
    ):
        traced.clear()
        with trace_for(platform):
            assert gradient(2.0) == value
        assert set(traced) == paths
    traced.clear()
    gradient(2.0)
    assert not traced  # as with None


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_program_for_a_known_platform_computes_what_the_one_that_is_chosen_later_does(
    platform: str,
) -> None:
    def loss(x, kernel):
        return conv2d(conv2d(x, kernel), kernel, stride=2).sum()

    arguments = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 4))
    found = []
    for target in (None, platform):
        with trace_for(target):
            text = text_for(platform, jax.grad(loss, (0, 1)), *arguments)
        found.append(Counter(re.findall(r"stablehlo\.(?!case|return|constant)\w+", text)))
    assert found[0] == found[1] and found[0]["stablehlo.convolution"] > 4


@pytest.mark.parametrize(
    ("platform", "version", "name"),
    [("cpu", "", "cpu"), ("gpu", "cuda 12090", "cuda"), ("gpu", "ROCM 6.4", "rocm"), ("tpu", "", "tpu")],
)
def test_gpus_are_named_by_their_maker(platform: str, version: str, name: str) -> None:
    client = SimpleNamespace(platform_version=version)
    assert name_platform(SimpleNamespace(platform=platform, client=client)) == name  # type: ignore[arg-type]


def test_the_latest_path_registered_for_a_platform_wins() -> None:
    operation = three_ways()
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    operation.register("power", here, lambda x, *, by: x**by)
    assert operation(jnp.asarray(2.0), by=3) == 8
    assert operation.paths == ("default", "times", "minus", "power")


def test_a_forced_path_is_traced_anew_by_the_same_jitted_function() -> None:
    operation = three_ways()
    function = jax.jit(lambda x: operation(x, by=3.0))
    plain = function(jnp.asarray(2.0))
    with force_path("minus"):
        assert function(jnp.asarray(2.0)) == -1
    with force_path("default"):
        assert function(jnp.asarray(2.0)) == 5
    assert function(jnp.asarray(2.0)) == plain


def test_forcing_a_path_that_an_operation_lacks_leaves_it_alone() -> None:
    operation = Operation(lambda x: x + 1)
    with force_path("times"):
        assert operation(jnp.asarray(1.0)) == 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_get_the_built_in_convolution_gradients(platform: str) -> None:
    x, kernel = jnp.ones((2, 5, 5, 3)), jnp.ones((3, 3, 3, 4))

    def built_in(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)

    def convolutions(function) -> list[str]:
        gradient = jax.grad(lambda x, kernel: jnp.sum(function(x, kernel) ** 2), (0, 1))
        lines = text_for(platform, gradient, x, kernel).splitlines()
        return sorted(line.split("dim_numbers")[1] for line in lines if "stablehlo.convolution" in line)

    assert convolutions(lambda x, kernel: conv2d(x, kernel, stride=2)) == convolutions(built_in)

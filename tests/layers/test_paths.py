"""The seam: which implementation of an operation runs on which platform, and how a test forces one."""

import jax
import jax.numpy as jnp
import pytest

from hotloop.layers.conv import conv2d
from hotloop.layers.paths import Operation, force_path


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

"""What a draw leaves behind, and that it takes one update to leave it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.mcmc import kernel, loops, target
from hotloop.mcmc.settings import Settings


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_packed_draw_is_taken_apart_bit_for_bit(dtype) -> None:
    with jax.enable_x64(dtype == "float64"):
        draw = np.random.default_rng(0)
        position, gradient = draw.normal(size=(2, 3, 6)).astype(dtype)
        log_density = draw.normal(size=6).astype(dtype)
        change = np.array([-1.0, 0.3, 999.0, 1000.0, np.inf, np.nan], dtype)
        state = kernel.State(*map(jnp.asarray, (position, log_density, gradient)))
        worse = state._replace(position=state.position + 1)
        _, info = kernel.metropolis(state, worse, jnp.asarray(change), jnp.full(6, 0.5, dtype), axis=0)
        found = loops.unpack(loops.pack(state, info)[None])
        np.testing.assert_array_equal(found.position[0], position)
        np.testing.assert_array_equal(found.log_density[0], log_density)
        np.testing.assert_array_equal(found.acceptance[0], info.acceptance)
        np.testing.assert_array_equal(found.diverging[0], [False, False, False, True, True, True])
        assert {found.position.dtype, found.log_density.dtype, found.acceptance.dtype} == {np.dtype(dtype)}


def test_a_draw_is_kept_by_one_update() -> None:
    """By the program: on a GPU each update is a kernel, and a small model's draw is little but kernels."""
    layout = target.layout_of(jnp.zeros(3))
    gradient = target.over_columns(lambda x: -0.5 * (x**2).sum(), layout)
    programs = loops.Programs(Settings(chains=4, samples=10), gradient, block=8)
    chains = jax.eval_shape(
        lambda columns: kernel.init(columns, gradient), target.abstract((3, 4), jnp.float32)
    )
    words, number = target.abstract((2,), jnp.uint32), target.abstract((), jnp.int32)
    begun = jax.eval_shape(programs.begin, chains, words)
    _, plan, room = jax.eval_shape(programs.prepare, begun)
    program = jax.jit(programs.draw).lower((chains, room), plan, words, number, number).as_text()
    assert program.count("stablehlo.dynamic_update_slice") == 1
    assert room.shape == (10, 3 + 2, 4)


@pytest.mark.parametrize("rows", [[2, 1, 3], list(range(1, target.FEW_PARTS + 2))])
def test_stacked_rows_are_concatenated_rows_whatever_is_in_them(rows) -> None:
    draw = np.random.default_rng(1)
    parts = [draw.normal(size=(count, 5)).astype(np.float32) for count in rows]
    parts[-1][0, :3] = np.inf, -np.inf, np.nan
    np.testing.assert_array_equal(
        target.stack_on_a_card([jnp.asarray(part) for part in parts]), np.concatenate(parts)
    )

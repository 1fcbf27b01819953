"""Blocks: every call is made of one program, or two; few trips to the host; operations are counted as they are."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine.blocks import (
    LARGE_UPDATE,
    LONGEST_BLOCK,
    LONGEST_SINGLE,
    MOST_UPDATES,
    Form,
    choose_form,
    count_operations,
    count_trips,
    split_call,
)

lengths = st.dictionaries(st.integers(1, 10**6), st.integers(1, 100), min_size=1, max_size=5)
form = st.builds(lambda block, blocks: Form(block, block * blocks), st.integers(1, 200), st.integers(1, 50))


@given(form=form, count=st.integers(1, 10**5))
def test_the_parts_of_a_call_are_whole_blocks_and_a_rest_that_fits(form: Form, count: int) -> None:
    parts = split_call(form, count)
    assert sum(part for _, part in parts) == count
    assert all(1 <= part <= each.capacity and part % each.block == 0 for each, part in parts)
    assert {each for each, _ in parts} <= {form, Form(1, form.block - 1)}
    assert sum(part < form.block for _, part in parts) <= 1


@given(lengths=lengths, operations=st.sampled_from([0.0, 1e9, LARGE_UPDATE]))
def test_a_form_is_whole_blocks_no_longer_than_any_call(lengths: dict[int, int], operations: float) -> None:
    block, capacity = choose_form(lengths, operations)
    longest = max(lengths)
    assert 1 <= block <= (longest if longest <= LONGEST_SINGLE else LONGEST_BLOCK)
    assert capacity % block == 0 and capacity <= max(MOST_UPDATES, block) and capacity <= longest
    assert block == 1 or operations < LARGE_UPDATE


@given(lengths=lengths)
def test_no_size_of_block_would_wait_for_the_host_less_often(lengths: dict[int, int]) -> None:
    chosen = count_trips(lengths, choose_form(lengths, 0.0).block)
    allowed = range(1, min(max(lengths), LONGEST_BLOCK) + 1)
    assert chosen <= min(count_trips(lengths, size) for size in allowed)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({100: 1562, 50: 1}, Form(100, 100)),  # the estimator's: its one short call takes the second program
        ({781: 6}, Form(71, 781)),  # 11 blocks: nothing is left over, so that one program is all
        ({4686: 1}, Form(71, 4686)),
        ({787: 1000}, Form(112, 784)),  # a prime: 7 blocks and 3 updates more
        ({10**6: 1}, Form(125, 32750)),
        ({1: 40}, Form(1, 1)),
        ({500: 10, 250: 10}, Form(125, 500)),
    ],
)  # fmt: skip
def test_the_calls_of_a_plan_decide(lengths: dict[int, int], expected: Form) -> None:
    assert choose_form(lengths, 5e9) == expected


@pytest.mark.parametrize(("operations", "expected"), [(4e9, Form(390, 390)), (1e10, Form(78, 390))])
def test_a_call_that_takes_long_is_no_single_block_so_that_its_first_updates_are_known_soon(
    operations: float, expected: Form
) -> None:
    assert choose_form({390: 4}, operations) == expected
    assert choose_form({100: 4}, operations) == Form(100, 100)  # no longer than a block of several


def test_large_updates_go_one_by_one_so_that_any_call_is_of_the_same_program() -> None:
    assert choose_form({781: 6}, LARGE_UPDATE) == Form(1, 781)


def test_trips_to_the_host_are_counted_for_blocks_rests_and_sending() -> None:
    assert count_trips({100: 7}, 100) == 0  # sent while the last one runs
    assert count_trips({100: 7}, 50) == 7 * (2 + 20)
    assert count_trips({100: 7}, 30) == 7 * (3 + 20 + 10 + 20) + 2000
    assert count_trips({100: 7, 4: 2}, 100) == 2 * (4 + 20) + 2000


def operations(function, *shapes) -> float:
    return count_operations(jax.make_jaxpr(function)(*map(jnp.zeros, shapes)).jaxpr)


def test_operations_of_products_and_convolutions_are_counted_through_calls_loops_and_branches() -> None:
    def product(x, y):
        return jnp.einsum("bij,bjk->bik", x, y)

    shapes = (5, 2, 3), (5, 3, 7)
    one = 2 * 5 * 2 * 3 * 7
    assert operations(product, *shapes) == one
    assert operations(jax.jit(product), *shapes) == one
    assert operations(lambda x, y: jax.lax.cond(x.sum() > 0, product, product, x, y), *shapes) == 2 * one

    def loop(x, y):
        return jax.lax.scan(lambda carry, _: (carry + product(x, y).sum(), None), 0.0, None, length=11)

    assert operations(loop, *shapes) == 11 * one
    # A gradient is two products more, of the same size.
    assert operations(jax.grad(lambda x, y: product(x, y).sum() ** 2, (0, 1)), *shapes) == 3 * one

    def convolve(x, kernel, groups=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    assert operations(convolve, (4, 8, 8, 6), (3, 3, 6, 10)) == 2 * (4 * 4 * 4 * 10) * (3 * 3 * 6)
    grouped = 2 * (4 * 4 * 4 * 10) * (3 * 3 * 3)
    assert operations(lambda x, kernel: convolve(x, kernel, 2), (4, 8, 8, 6), (3, 3, 3, 10)) == grouped

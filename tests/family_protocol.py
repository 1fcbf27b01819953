"""What the engine expects of every family, as one check: init, update and evaluate, pure and of one shape.

A family's tests call `check_family` with a small config and a handful of samples; whatever passes can be
trained, resumed, accumulated and evaluated by the engine without more ado.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine.feed import Resident, common_length
from hotloop.engine.loop import Evaluation, Program, copy_state


def check_family(
    init: Callable[[Any, Array], Any],
    update: Callable[[Any], Callable[[Any, Any, Array], tuple[Any, Mapping[str, Array]]]],
    evaluate: Callable[[Any], Callable[[Any, Any], Mapping[str, Array]]],
    config: Hashable,
    data: Any,
    batch_size: int,
) -> None:
    """Every rule below, on one config; raises AssertionError where the family breaks one."""
    assert hash(config) == hash(config), "a config must be frozen and hashable"
    state = init(config, jax.random.key(0))
    same_tree(state, init(config, jax.random.key(0)), "init must depend on its key alone")
    program = Program(update(config), Resident(data, batch_size, seed=1), 6, jax.random.key(3))
    once = _trained(program, state, calls=(6,))
    same_tree(once, _trained(program, state, calls=(1, 3, 2)), "calls must not change the result")
    assert _differs(state, once), "updates must change the state"
    _check_metrics(program, state)
    _check_sums(evaluate(config), once, data, batch_size)


def same_tree(one: Any, other: Any, why: str) -> None:
    """Bit for bit, leaf by leaf."""
    assert jax.tree.structure(one) == jax.tree.structure(other), why
    for (path, left), right in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        left, right = _bits(left), _bits(right)
        assert left.dtype == right.dtype and np.array_equal(left, right), (
            f"{why}: {jax.tree_util.keystr(path)}"
        )


def _bits(leaf: Any) -> np.ndarray:
    if isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.atleast_1d(np.asarray(leaf))
    return array.view(np.uint8)


def _differs(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(not np.array_equal(_bits(left), _bits(right)) for left, right in pairs)


def _trained(program: Program, state: Any, calls: tuple[int, ...]) -> Any:
    state, first = copy_state(state), 0
    for count in calls:
        state, _ = program(state, first, count)
        first += count
    return state


def _check_metrics(program: Program, state: Any) -> None:
    _, metrics = program(copy_state(state), 0, 2)
    assert "loss" in metrics, "every family reports its loss under this name"
    for name, values in metrics.items():
        assert len(values) == 2 and np.isfinite(values).all(), f"{name} must be finite for every update"


def _check_sums(evaluate: Any, state: Any, data: Any, batch_size: int) -> None:
    whole = Evaluation(evaluate, data, common_length(data))(state)
    assert whole["samples"] == common_length(data)
    parts = Evaluation(evaluate, data, batch_size)(state)
    for name, value in whole.items():
        if isinstance(value, int):
            assert parts[name] == value, f"{name} is counted, so any batch size gives the same"
        else:
            np.testing.assert_allclose(parts[name], value, rtol=1e-5, err_msg=name)

"""States as named host arrays, and back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.checkpoint import explain_mismatch, named_leaves, restore_leaf, snapshot
from hotloop.engine.checkpoint_folder import StoredLeaf
from hotloop.errors import CheckpointError


class Pair(NamedTuple):
    first: jax.Array
    rest: dict


def test_paths_read_like_the_state():
    state = {"optimiser": (Pair(jnp.ones(1), {"w": [1, 2.0]}),)}
    names = ["optimiser/0/first", "optimiser/0/rest/w/0", "optimiser/0/rest/w/1"]
    assert list(named_leaves(state)) == names
    assert list(named_leaves(jnp.ones(1))) == ["state"]


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match="both called a/b"):
        named_leaves({"a": {"b": 1}, "a/b": 2})


@pytest.mark.parametrize("leaf", ["text", b"bytes", object(), np.array(["x"]), 2**70])
def test_what_is_no_number_is_refused_by_name(leaf):
    with pytest.raises(CheckpointError, match="leaf a/0 is a"):
        snapshot({"a": [leaf]})


def aligned(size):
    """An array where jax on CPU would gladly use the memory as it is."""
    memory = np.empty(4 * size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * size].view(np.float32)


def test_a_restored_leaf_shares_no_memory_with_the_host():
    stored = aligned(1_000_000)
    stored[:] = 3
    leaf = restore_leaf(stored, jnp.zeros(1_000_000))
    stored[:] = 4
    assert float(leaf[0]) == 3.0
    jax.jit(lambda x: x + 1, donate_argnums=0)(leaf)
    assert leaf.is_deleted()


def test_the_first_of_several_differences_is_told_with_their_number():
    leaves = {"a": StoredLeaf("float32", (2,), ""), "b": StoredLeaf("int32", (), "")}
    assert explain_mismatch(leaves, {"a": np.zeros(2, np.float32), "b": np.int32(3)}) is None
    reason = explain_mismatch(leaves, {"a": np.zeros(3, np.float32), "b": np.int64(3)})
    assert reason == "leaf a is float32[2] in the checkpoint but float32[3] here (and 1 more leaves differ)"

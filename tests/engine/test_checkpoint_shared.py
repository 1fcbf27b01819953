"""Checkpoints of several runs in one folder: each finds its own, beside another's of the same number too."""

import jax.numpy as jnp
import pytest

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepLast
from hotloop.errors import CheckpointError


def small_state(scale=1.0):
    return {"w": jnp.full(3, float(scale))}


def saved(folder, steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, small_state(step), position={})


def weight(restored):
    return float(restored.state["w"][0])


def test_in_a_shared_folder_another_runs_steps_are_neither_found_nor_replaced(tmp_path):
    saved(tmp_path, [1, 2, 3], config={"run": "other"}, shared=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with Checkpoints(tmp_path, KeepLast(1), config={"run": "mine"}, shared=True) as checkpoints:
        assert checkpoints.steps() == [] and not checkpoints.begun() and checkpoints.best() is None
        with pytest.raises(CheckpointError, match="nothing there is named like a step"):
            checkpoints.restore(small_state())
        with pytest.raises(CheckpointError, match="no step 3"):
            checkpoints.restore(small_state(), step=3)
        checkpoints.save(2, small_state(8.0), position={})
        checkpoints.wait()
        checkpoints.check_fits(small_state())
        with pytest.raises(CheckpointError, match="does not fit this model"):
            checkpoints.check_fits({"v": jnp.ones(3)})
        assert checkpoints.steps() == [2] and weight(checkpoints.restore(small_state(), step=2)) == 8.0
        assert weight(Checkpoints(tmp_path).restore(small_state(), step=2)) == 2.0
        checkpoints.save(4, small_state(9.0), position={})
        checkpoints.save(4, small_state(10.0), position={})  # its own it may replace
    assert not list(tmp_path.glob("00000002-*"))  # one that bears a mark is forgotten as any other
    assert checkpoints.steps() == [4] and weight(checkpoints.restore(small_state())) == 10.0
    assert {path: path.read_bytes() for path in before} == before
    assert Checkpoints(tmp_path).steps() == [1, 2, 3, 4]


def test_a_damaged_step_that_says_whose_it_is_stays_where_it_is(tmp_path):
    saved(tmp_path, [3], config={"run": "other"}, shared=True)
    (tmp_path / "00000003" / "state" / "manifest.ocdbt").unlink()  # damaged, and still somebody's
    with Checkpoints(tmp_path, config={"run": "mine"}, shared=True) as checkpoints:
        checkpoints.save(3, small_state(5.0), position={})
        checkpoints.wait()
        assert weight(checkpoints.restore(small_state())) == 5.0
    assert not (tmp_path / "00000003" / "state" / "manifest.ocdbt").exists()
    assert not list(tmp_path.glob("*set-aside*"))

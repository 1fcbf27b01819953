"""Updates that are written out several in one turn of the loop are the same updates."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop import Program, Resident
from hotloop.engine import loop
from hotloop.errors import OptionError


@pytest.mark.parametrize("unroll", [3, 4, 16])
def test_states_and_metrics_do_not_depend_on_how_many_are_written_out(unroll):
    x = np.linspace(-1, 1, 64, dtype=np.float32)

    def update(slope, batch, key):
        noise = jax.random.normal(key, ()) * 0.01
        error = slope * batch["x"] - 3 * batch["x"] + noise
        return slope - (error * batch["x"]).mean(), {"loss": (error**2).mean()}

    def run(unroll):
        feed = Resident({"x": x}, batch_size=8)
        program = Program(update, feed, 10, jax.random.key(0), loop="scan", unroll=unroll)
        slope, metrics = program(jnp.zeros(()), first=0, count=10)
        return float(slope), metrics["loss"]

    (slope, losses), (expected, expected_losses) = run(unroll), run(1)
    assert slope == pytest.approx(expected, rel=1e-6)
    assert losses.shape == (10,)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


def test_accelerators_have_blocks_unless_loops_of_built_in_length_are_asked_for(monkeypatch):
    monkeypatch.setattr(loop, "platform", lambda: "gpu")
    monkeypatch.delenv("HOTLOOP_LOOP", raising=False)
    make = partial(Program, lambda state, batch, key: (state, {}), Resident({"x": np.zeros(8)}, 4), 2, None)
    assert make().loop == "blocks"
    monkeypatch.setenv("HOTLOOP_LOOP", "scan")
    assert make().loop == "scan"
    monkeypatch.setenv("HOTLOOP_LOOP", "block")
    with pytest.raises(OptionError, match="HOTLOOP_LOOP=block: must be scan or blocks"):
        make()

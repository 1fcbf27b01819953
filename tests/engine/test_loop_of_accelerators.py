"""Which loop an accelerator's programs have."""

from functools import partial

import numpy as np
import pytest

from hotloop import Program, Resident
from hotloop.engine import loop
from hotloop.errors import OptionError


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

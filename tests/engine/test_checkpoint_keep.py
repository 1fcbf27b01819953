"""Which steps stay: pure choices over steps and their metrics."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine.checkpoint_folder import KeepAll, KeepBest, KeepLast
from hotloop.errors import OptionError

STEPS = {0: {"loss": 3.0}, 5: {"loss": 1.0}, 6: {"loss": math.nan}, 7: {}, 9: {"loss": None}, 12: {"loss": 2}}
any_metrics = st.dictionaries(
    st.integers(0, 99), st.fixed_dictionaries({}, optional={"m": st.floats(width=16) | st.none()})
)


def test_each_rule_keeps_what_its_name_says():
    assert KeepAll().choose(STEPS) == set(STEPS)
    assert KeepLast(2).choose(STEPS) == {9, 12}
    assert KeepBest("loss", "min").choose(STEPS) == {5}
    assert KeepBest("loss", "max", 2).choose(STEPS) == {0, 12}
    assert KeepBest("accuracy").choose(STEPS) == set()
    assert (KeepLast(1) | KeepBest("loss", "min")).choose(STEPS) == {5, 12}


def test_the_best_step_is_that_of_the_rule_that_has_a_metric():
    assert KeepBest("loss", "min").best(STEPS) == 5
    assert (KeepLast(1) | KeepBest("loss", "max")).best(STEPS) == 0
    assert (KeepBest("loss", "max") | KeepLast(1)).best(STEPS) == 0
    assert KeepLast(1).best(STEPS) is None


def test_of_equal_steps_the_newest_is_best():
    assert KeepBest("m").best({1: {"m": 0.5}, 2: {"m": 0.5}}) == 2


@given(any_metrics, st.integers(1, 5), st.sampled_from(["max", "min"]))
def test_no_step_left_out_is_better_than_one_kept(metrics, n, mode):
    kept = KeepBest("m", mode, n).choose(metrics)
    values = {s: m["m"] for s, m in metrics.items() if m.get("m") is not None and not math.isnan(m["m"])}
    assert len(kept) == min(n, len(values))
    for step in set(values) - kept:
        for best in kept:
            assert values[best] >= values[step] if mode == "max" else values[best] <= values[step]


@given(any_metrics, st.integers(1, 5), st.integers(1, 5))
def test_together_two_rules_keep_the_union(metrics, n, m):
    last, best = KeepLast(n), KeepBest("m", "max", m)
    assert (last | best).choose(metrics) == last.choose(metrics) | best.choose(metrics)


def test_keeping_none_is_refused():
    for rule in (lambda: KeepLast(0), lambda: KeepBest("m", n=-1)):
        with pytest.raises(OptionError, match="keep at least 1"):
            rule()

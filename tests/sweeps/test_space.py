"""What --over means, and that a draw is a function of seed, trial and name alone."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.errors import OptionError
from hotloop.options import Kind, Params
from hotloop.sweeps.space import (
    Choices,
    Range,
    count_combinations,
    draw_values,
    grid_values,
    parse_domain,
    split_over,
)

FLOAT, INT, TEXT = Kind(float), Kind(int), Kind(str)


def test_words_that_were_cut_at_commas_come_together_again():
    words = ["--lr.key=1e-4", "2", "norm-layer={name: group_norm", "num_groups: 32}", "a=log:1..2"]
    assert split_over(words) == {
        "lr.key": "1e-4,2",
        "norm_layer": "{name: group_norm,num_groups: 32}",
        "a": "log:1..2",
    }


@pytest.mark.parametrize("words", [["3"], ["a=1", "a=2"], ["a-b=1", "a_b=2"], ["=3"], ["..=1"]])
def test_words_that_name_nothing_or_twice_are_refused(words):
    with pytest.raises(OptionError, match="--over"):
        split_over(words)


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("0.1..0.9", FLOAT, Range(0.1, 0.9)),
        ("1..9", FLOAT, Range(1.0, 9.0)),
        ("1..9", INT, Range(1, 9, whole=True)),
        ("-3..-1", None, Range(-3.0, -1.0)),
        ("int:1..9", None, Range(1, 9, whole=True)),
        ("log:1e-4..1e-1", FLOAT, Range(1e-4, 1e-1, log=True)),
        ("log:1..64", INT, Range(1, 64, log=True, whole=True)),
        ("1/2..2", Kind(Fraction), None),
        ("1,2", INT, Choices(("1", "2"))),
        ("16.10,ON", TEXT, Choices(("16.10", "ON"))),
        ("../a,../b", TEXT, Choices(("../a", "../b"))),
        ("0,0.1,false", None, Choices((0, 0.1, False))),
        ("{name: group_norm, num_groups: 32}", Kind(Params), Choices((Params(name="group_norm", num_groups=32),))),
        ("[a,b],[c]", Kind(str, many=True), Choices((["a", "b"], ["c"]))),
    ],
)  # fmt: skip
def test_lists_and_ranges(text, kind, found):
    if found is None:
        with pytest.raises(ValueError, match="two numbers"):
            parse_domain(text, kind)
    else:
        assert parse_domain(text, kind) == found


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("", FLOAT, "names no value"),
        ("2..1", FLOAT, "empty range"),
        ("1..1", INT, "empty range"),
        ("log:0..1", FLOAT, "above 0"),
        ("log:-1..1", None, "above 0"),
        ("log:1,2", FLOAT, "goes with a range"),
        ("int:1.5..3", None, "whole numbers"),
        ("1.5..3", INT, "whole numbers"),
        ("1..b", FLOAT, "two numbers"),
        ("nan..1", FLOAT, "finite"),
        ("0..inf", FLOAT, "finite"),
        ("1..2", TEXT, "not a range"),
        ("1..2", Kind(int, many=True), "not a range"),
    ],
)
def test_what_is_no_list_and_no_range_has_a_reason(text, kind, reason):
    with pytest.raises(ValueError, match=reason):
        parse_domain(text, kind)


SHARES = st.floats(0, 1, exclude_max=True)


@given(share=SHARES, low=st.floats(1e-8, 1e3), factor=st.floats(1.001, 1e6), log=st.booleans())
def test_a_draw_stays_inside_its_range(share, low, factor, log):
    found = Range(low, low * factor, log=log).pick(share)
    assert low <= found <= low * factor


@given(share=SHARES, low=st.integers(1, 50), more=st.integers(1, 50), log=st.booleans())
def test_a_whole_draw_is_a_whole_number_of_the_range(share, low, more, log):
    found = Range(low, low + more, log=log, whole=True).pick(share)
    assert type(found) is int and low <= found <= low + more


def test_every_whole_number_has_the_same_share_and_every_factor_of_a_log_range():
    whole = [Range(1, 4, whole=True).pick(n / 400) for n in range(400)]
    assert [whole.count(n) for n in (1, 2, 3, 4)] == [100] * 4
    log = [Range(1e-4, 1.0, log=True).pick(n / 400) for n in range(400)]
    decades = [math.floor(math.log10(each) + 1e-9) for each in log]
    assert [decades.count(n) for n in (-4, -3, -2, -1)] == [100] * 4


SPACE = {
    "rate": Range(1e-4, 1e-1, log=True),
    "momentum": Choices((0, 0.9)),
    "epochs": Range(1, 9, whole=True),
}


def test_a_draw_depends_on_seed_trial_and_name_alone():
    drawn = [draw_values(SPACE, 3, number) for number in range(1, 40)]
    assert drawn == [draw_values(SPACE, 3, number) for number in range(1, 40)]
    assert len({each["rate"] for each in drawn}) == 39 and {each["momentum"] for each in drawn} == {0, 0.9}
    fewer = {name: SPACE[name] for name in ("epochs", "rate")}
    for number, each in enumerate(drawn, start=1):
        assert draw_values(fewer, 3, number) == {name: each[name] for name in fewer}
    assert draw_values(SPACE, 4, 1) != drawn[0]
    # The same on every machine and with every Python: a sweep may go on elsewhere.
    assert drawn[0] == {"rate": pytest.approx(0.07649744691922766, rel=1e-12), "momentum": 0.9, "epochs": 9}


def test_lists_are_gone_through_in_order():
    space = {"a": Choices(("x", "y")), "b": Choices((1, 2, 3))}
    assert count_combinations(space) == 6 and count_combinations(SPACE) is None
    found = [tuple(grid_values(space, number).values()) for number in range(1, 7)]
    assert found == [("x", 1), ("x", 2), ("x", 3), ("y", 1), ("y", 2), ("y", 3)]

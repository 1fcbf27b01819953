import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.bench.benchmark import LONGEST_NAME, fill, name_variants


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--batch {n} --config bs{n}", "--batch 3 --config bs3"),
        ("{n}{n}", "33"),
        ("{other} {n}", "{other} 3"),
        ("--json '{{\"rate\": {n}}}'", "--json '{\"rate\": 3}'"),
        ("{{{n}}}", "{3}"),
        ("{{n}}", "{n}"),
        ('--json {"rate": {"a": {n}}}', '--json {"rate": {"a": 3}}'),
        ("{n.__class__} {n!r} {n:>9} {0} {}", "{n.__class__} {n!r} {n:>9} {0} {}"),
        ("{batch-size}", "8"),
        ("no braces", "no braces"),
    ],
)
def test_only_parameters_are_filled_in(text: str, filled: str) -> None:
    assert fill(text, {"n": "3", "batch-size": "8"}) == filled


def test_a_filled_in_value_is_not_filled_in_again() -> None:
    assert fill("{a} {b}", {"a": "{b}", "b": "{{x}}"}) == "{b} {{x}}"


@given(st.text(alphabet='{}an:"1. ', max_size=40))
def test_a_text_that_str_format_accepts_comes_out_the_same(text: str) -> None:
    params = {"a": "7", "n": "8"}
    try:
        expected = text.format(**params)
    except (ValueError, KeyError, IndexError, AttributeError):
        fill(text, params)
        return
    if not any(mark in text for mark in (":", ".")):  # format's own powers, which are not wanted
        assert fill(text, params) == expected


def test_variant_names_have_sorted_keys() -> None:
    assert list(name_variants("bench", [{"b": "1", "a": "x"}])) == ["bench_a_x_b_1"]
    assert list(name_variants("bench", [{}])) == ["bench"]


def test_equal_names_get_a_number_and_none_is_lost() -> None:
    rows = [{"n": "1"}, {"n": "1"}, {"n": "1_2"}, {"n": "1"}]
    variants = name_variants("x", rows)
    assert list(variants) == ["x_n_1", "x_n_1_2", "x_n_1_2_2", "x_n_1_3"]
    assert list(variants.values()) == rows


def test_variant_names_are_single_folders() -> None:
    (name,) = name_variants("x", [{"path": "../../etc/a b\n" + "c" * 500}])
    assert name.startswith("x_path_..-..-etc-a-b-ccc") and "/" not in name
    assert len(name) == LONGEST_NAME

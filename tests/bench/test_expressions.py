import ast
import math
import operator
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.bench.expressions import (
    DEEPEST,
    FUNCTIONS,
    LONGEST,
    ExpressionError,
    check_expression,
    evaluate_expression,
)

NAMES = {"time": 3.0, "x": -2.0, "time taken": 5.0, "batch-size": 8.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{time} * 400000 / 10000", 120.0),
        ("time*400000/10000", 120.0),
        ("1 + 2 * 3", 7.0),
        ("(1 + 2) * 3", 9.0),
        ("7 // 2 + 7 % 4 - -1", 7.0),
        ("-7 // 2", -4.0),
        ("-2 ** 2", -4.0),
        ("2 ** -2", 0.25),
        ("2 ** 3 ** 2", 512.0),
        ("2 - 3 - 4", -5.0),
        (" .5e1 ", 5.0),
        ("1.", 1.0),
        ("{time taken} + {batch-size}", 13.0),
        ("min(3, time, x)", -2.0),
        ("max(1, 2)", 2.0),
        ("abs(x)", 2.0),
        ("sqrt(16)", 4.0),
        ("log(8, 2)", 3.0),
        ("log(exp(2))", 2.0),
        ("round(2.567, 1)", 2.6),
        ("round(2.5)", 2.0),
    ],
)
def test_arithmetic_is_python_s(text: str, value: float) -> None:
    assert evaluate_expression(text, NAMES) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "breaks off"),
        ("1 +", "breaks off"),
        ("1 2", "unexpected '2'"),
        ("(1", "missing"),
        ("1)", "unexpected"),
        ("nothing * 2", "there is no 'nothing'; known: batch-size, time"),
        ("nothing(2)", "no function 'nothing'"),
        ("time.real", "'.'"),
        ("time[0]", "'\\['"),
        ("'a' * 9", '"\'"'),
        ("1 if 2 else 3", "unexpected 'if'"),
        ("lambda: 0", "':'"),
        ("1 / 0", "divides by zero"),
        ("1 % 0", "divides by zero"),
        ("log(2, 1)", "divides by zero"),
        ("0 ** -1", "no real value"),
        ("(0 - 8) ** 0.5", "no real value"),
        ("sqrt(x)", "no real value"),
        ("log(0)", "no real value"),
        ("1e999", "is inf"),
        ("10 ** 999", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("exp(1e6)", "too large"),
        ("round(1, 0.5)", "whole number of digits"),
        ("round(1, 1e9)", "whole number of digits"),
        ("min(1)", "takes 2 to 100"),
        ("sqrt(1, 2)", "takes 1 to 1"),
        ("sqrt()", "unexpected"),
        ("(" * (DEEPEST + 1) + "1" + ")" * (DEEPEST + 1), "nested"),
        ("-" * (DEEPEST + 1) + "1", "nested"),
        ("1+" * LONGEST + "1", "characters"),
    ],
)
def test_what_has_no_value_says_why(text: str, why: str) -> None:
    with pytest.raises(ExpressionError, match=why):
        evaluate_expression(text, NAMES)


def test_a_value_that_is_not_finite_does_not_pass_through() -> None:
    with pytest.raises(ExpressionError, match="nan"):
        evaluate_expression("x + 1", {"x": math.nan})


def test_check_finds_grammar_and_names_without_values() -> None:
    check_expression("a / (a - a)", {"a": None})
    with pytest.raises(ExpressionError, match="there is no 'b'"):
        check_expression("a / b", {"a": None})


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch HERE')",
        "().__class__.__base__.__subclasses__()",
        "{0.__class__}",
        "open('HERE', 'w')",
        "exec(x)",
        "[c for c in (1,)]",
        "x := 3",
        "f'{x}'",
    ],
)
def test_code_is_refused(text: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExpressionError):
        evaluate_expression(text, NAMES)
    assert not list(tmp_path.iterdir())


SIGNS = ["(", ")", ",", "+", "-", "*", "/", "//", "%", "**", ".", "{x}", "="]
PIECES = st.sampled_from([*SIGNS, *FUNCTIONS, "1", "2.5", "9e9", "x", "time", "__class__", "import", "eval"])


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=60).map(" ".join)))
def test_any_text_has_a_finite_value_or_an_error_at_once(text: str) -> None:
    began = time.monotonic()
    try:
        assert math.isfinite(evaluate_expression(text, NAMES))
    except ExpressionError as error:
        assert str(error)
    assert time.monotonic() - began < 5


TREES = st.recursive(
    st.sampled_from(["1", "2", "3.5", "x", "y", "0.25"]),
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from([" + ", "-", "*", " / ", "//", "%", "**"]), part).map("".join),
        part.map("({})".format),
        part.map("-{}".format),
        st.tuples(part, part).map(lambda both: f"max({both[0]}, {both[1]})"),
    ),
    max_leaves=8,
)


BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def walked(node: ast.AST, names: dict[str, float]) -> float:
    """The value by Python's own grammar and operators."""
    match node:
        case ast.Constant(value):
            return float(value)
        case ast.Name(name):
            return names[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -walked(operand, names)
        case ast.BinOp(left, sign, right):
            return BINARY[type(sign)](walked(left, names), walked(right, names))
        case ast.Call(_, [one, other]):
            return max(walked(one, names), walked(other, names))
    raise AssertionError(ast.dump(node))


def python_s_answer(text: str, names: dict[str, float]) -> float | None:
    try:
        value = walked(ast.parse(text, mode="eval").body, names)
    except (ZeroDivisionError, OverflowError, TypeError):  # TypeError: the next step after a complex number
        return None
    return value if isinstance(value, float) and math.isfinite(value) else None


@settings(max_examples=300)
@given(TREES)
def test_values_are_those_of_python(text: str) -> None:
    names = {"x": 1.5, "y": -2.0}
    expected = python_s_answer(text, names)
    if expected is None:
        with pytest.raises(ExpressionError):
            evaluate_expression(text, names)
    else:
        assert evaluate_expression(text, names) == expected

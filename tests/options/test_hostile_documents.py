"""YAML and JSON that somebody made to hurt: bounded in length, depth and what aliases unfold to, with one line."""

import json
import time
from pathlib import Path

import pytest

from hotloop.bench.spec import SpecError
from hotloop.bench.spec import load_benchmarks as load_spec
from hotloop.cli.main import main
from hotloop.errors import OptionError
from hotloop.options.document import DEEPEST, LONGEST, MOST, parse_document
from hotloop.options.files import DEEPEST as DEEPEST_JSON
from hotloop.options.files import load_json, parse_json, read_bounded

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}\nb:\n  <<: [" + "*a, " * 3000 + "*a]\n"
LADDER = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))
UNFOLDS = f"stands for more than {MOST:,} values"
TOO_DEEP = f"nested more than {DEEPEST} deep"
HOSTILE = {
    "billion laughs": (LAUGHS, UNFOLDS),
    "merged again and again": (MERGES, UNFOLDS),
    "a ladder of aliases": (LADDER, TOO_DEEP),
    "an open list in lists": ("[" * 100_000, TOO_DEEP),
    "lists in lists": ("x: " + "[" * 5000 + "]" * 5000, TOO_DEEP),
    "mappings in mappings": ('{"a": ' * 5000 + "1" + "}" * 5000, TOO_DEEP),
    "lists of dashes": ("- " * 20_000 + "1", TOO_DEEP),
    "keys of keys": ("? " * 20_000 + "1", TOO_DEEP),
    "itself": ("a: &a [1, *a]", "this part contains itself"),
    "too long": ("a: " + "b" * LONGEST, f"{LONGEST + 3:,} characters, at most {LONGEST:,} are read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_document_is_one_line_at_once(name, tmp_path):
    """It needs far less time than unfolding would; the bound is generous for a busy machine."""
    text, message = HOSTILE[name]
    began = time.process_time()
    with pytest.raises(OptionError, match=message) as error:
        parse_document(text, "f.yml")
    assert "\n" not in str(error.value)
    file = tmp_path / "benchmarks.yml"
    file.write_text(text)
    with pytest.raises(SpecError) as problems:
        load_spec([file])
    assert message.split(":")[-1][:20] in str(problems.value) or "at most" in str(problems.value)
    assert len(str(problems.value).splitlines()) == 1
    assert time.process_time() - began < 10


def test_just_so_deep_and_so_many_values_are_read():
    assert parse_document("[" * DEEPEST + "]" * DEEPEST, "f.yml") is not None
    assert len(parse_document("a: &a [1, 2]\nb: [" + "*a, " * 1000 + "*a]", "f.yml")["b"]) == 1001


def test_a_config_file_that_unfolds_ends_with_status_2_and_one_line(tmp_path, capsys):
    file = tmp_path / "laughs.yml"
    file.write_text(LAUGHS)
    assert main(["plan", "--config-path", str(file)]) == 2
    assert "values, with its aliases" in capsys.readouterr().err


def test_a_config_file_without_an_end_is_not_read_to_it(capsys):
    assert main(["plan", "--config-path", "/dev/zero"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000])
def test_a_number_of_thousands_of_digits_is_one_line(number, capsys):
    assert main(["cnn", "train", "--optimizer-params", f"{{momentum: {number}}}", "--plan"]) == 2
    assert "digits is too large" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        "[" * (DEEPEST_JSON + 1) + "]" * (DEEPEST_JSON + 1),
        '{"a":' * 500 + "1" + "}" * 500,
        "9" * 5000,
        '"\\ud800"',
        '{"\\uDFFF": 1}',
        b"\xff\xfe",
        b"",
        "nul",
    ],
    ids=repr,
)
def test_json_that_is_none_is_a_value_error_of_one_line(text):
    with pytest.raises(ValueError) as error:
        parse_json(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        1e300,
        [1, [2]],
        {"a": {"b": []}},
        "\U0001f600",
        json.loads("[" * DEEPEST_JSON + "]" * DEEPEST_JSON),
    ],
    ids=lambda value: str(value)[:9],
)
def test_other_json_is_read_as_ever(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


def test_a_file_of_json_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="more than 67,108,864 bytes"):
        load_json(Path("/dev/zero"))


def test_a_file_is_read_up_to_its_bound(tmp_path):
    (tmp_path / "file").write_bytes(b"[1234]")
    assert read_bounded(tmp_path / "file", 6) == b"[1234]"
    with pytest.raises(ValueError, match="more than 5 bytes"):
        read_bounded(tmp_path / "file", 5)

"""Config fields declared as options: what each type accepts, refuses, and says when it refuses."""

import json
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.errors import OptionError, did_you_mean
from hotloop.options import (
    Options,
    Params,
    argument,
    at_least,
    between,
    build,
    finite,
    non_negative,
    option,
    options_of,
    positive,
    to_jsonable,
)
from hotloop.options.document import parse_document


@dataclass(frozen=True)
class Every:
    count: int = option(1, "A count.", check=positive)
    rate: float = option(0.5, "A rate.", check=non_negative)
    period: Fraction = option(Fraction(1), "A period.")
    name: str = option("x", "A name.")
    on: bool = option(False, "A flag.")
    mode: Literal["fast", "exact"] = option("fast", "A mode.")
    bits: Literal[8, 16] = option(8, "A number of a few.")
    several: tuple[int, ...] = option((), "Several.", check=at_least(2))
    maybe: int | None = option(None, "Perhaps.", check=positive)
    params: Params = option(Params(), "More.")
    folder: Path | None = option(None, "A folder.")
    even: int = option(2, "Read its own way.", parse=lambda text: 2 * int(text))
    chosen: str = option("a", "Choices without Literal.", choices=("a", "b"))
    untold: int = 7


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("count", "12", 12),
        ("rate", "1e-3", 0.001),
        ("period", "1/3", Fraction(1, 3)),
        ("period", "0.1", Fraction(1, 10)),
        ("period", " 3 / 4 ", Fraction(3, 4)),
        ("period", 0.1, Fraction(1, 10)),
        ("mode", "EXACT", "exact"),
        ("bits", "16", 16),
        ("several", "2,3", (2, 3)),
        ("several", ["2", "3"], (2, 3)),
        ("several", [], ()),
        ("maybe", "None", None),
        ("maybe", "3", 3),
        ("params", '{"momentum": 0.9}', Params(momentum=0.9)),
        ("params", "{'momentum': 0.9, nesterov: True}", Params(momentum=0.9, nesterov=True)),
        ("params", "momentum: 1e-4", Params(momentum=1e-4)),
        ("params", {"a": {"b": [1, 2]}}, Params(a=Params(b=(1, 2)))),
        ("folder", "a/b", Path("a/b")),
        ("even", "21", 42),
        ("even", 21, 21),
        ("chosen", "b", "b"),
    ],
)
def test_a_value_is_read_as_its_type(field, text, value):
    read = getattr(build(Every, {field: text}), field)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("word", ["true", "T", "1", "yes", "Y", "ON", "True"])
def test_words_for_true(word):
    assert build(Every, {"on": word}).on is True


@pytest.mark.parametrize("word", ["false", "F", "0", "no", "N", "off", "False"])
def test_words_for_false(word):
    assert build(Every, {"on": word}).on is False


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("count", "0", "--count 0: must be at least 1"),
        ("count", "1.5", "--count 1.5: must be a whole number"),
        ("count", True, "--count True: must be a whole number"),
        ("count", "", "--count '': must be a whole number"),
        ("count", None, "--count None: a value is needed"),
        ("count", ["1", "2"], "--count 1 2: takes one value"),
        ("rate", "-1", "--rate -1: must be at least 0 and finite"),
        ("rate", "nan", "--rate nan: must be at least 0 and finite"),
        ("rate", "fast", "--rate fast: must be a number"),
        ("period", "1/0", "--period 1/0: divides by zero"),
        ("period", "1/2/3", "--period 1/2/3: must be a number or a fraction such as 1/2"),
        ("period", "1e99999", "--period 1e99999: must be a number or a fraction such as 1/2"),
        ("period", "1e400/3", "--period 1e400/3: is too large"),
        ("period", "1e9_99999999", "--period 1e9_99999999: must be a number or a fraction such as 1/2"),
        ("period", "1e٩٩٩٩٩", "--period 1e٩٩٩٩٩: must be a number or a fraction such as 1/2"),
        ("period", "1/nan", "--period 1/nan: must be a number or a fraction such as 1/2"),
        ("count", "9" * 30, f"--count {'9' * 30}: is too large: whole numbers go up to {2**63 - 1}"),
        ("count", "9" * 5000, f"--count {'9' * 200}...: must be a whole number"),
        ("count", "1\n2", "--count '1\\n2': must be a whole number"),
        ("rate", 10**400, f"--rate 1{'0' * 199}...: is too large"),
        (
            "folder",
            "~no-such-user/x",
            "--folder ~no-such-user/x: there is no such user; write the folder out",
        ),
        ("folder", "a\0b", "--folder 'a\\x00b': has a zero character, which no file name can have"),
        ("folder", "\ud800", "--folder '\\ud800': has half of a surrogate pair, which no file name can have"),
        (
            "folder",
            "x/" + "a" * 256,
            f"--folder x/{'a' * 198}...: is too long: names have at most 255 bytes, paths 4095",
        ),
        ("name", "a\0b", "--name 'a\\x00b': has a zero character"),
        ("period", "a/b", "--period a/b: must be a number or a fraction such as 1/2"),
        ("on", "maybe", "--on maybe: must be true or false (also yes/no, on/off, 1/0)"),
        ("mode", "fastt", "--mode fastt: must be one of fast, exact; did you mean fast?"),
        ("bits", "32", "--bits 32: must be one of 8, 16"),
        ("several", "2,1", "--several 2,1: must be at least 2"),
        ("maybe", "0", "--maybe 0: must be at least 1"),
        ("even", "x", "--even x: invalid literal for int() with base 10: 'x'"),
        ("chosen", "c", "--chosen c: must be one of a, b"),
    ],
)
def test_a_bad_value_is_one_line_with_option_value_and_reason(field, text, message):
    with pytest.raises(OptionError) as error:
        build(Every, {field: text})
    assert str(error.value) == message


@pytest.mark.parametrize("text", ["[1]", "3", "{", "{a: 1, a: 2}", "!!python/object:os.system {}"])
def test_text_that_is_no_mapping_is_refused_for_params(text):
    with pytest.raises(OptionError, match="must be a mapping"):
        build(Every, {"params": text})


@dataclass(frozen=True)
class Made(Options, Every):
    def check(self) -> None:
        if self.folder is not None and not self.folder.is_absolute():
            raise OptionError(f"--folder {self.folder}: must be absolute")


def test_a_config_made_in_python_takes_its_values_in_as_the_command_line_would():
    made = Made(folder="/a", several=[2, 3], params={"a": [1]})
    assert made == Made(folder=Path("/a"), several=(2, 3), params=Params(a=(1,)))
    with pytest.raises(OptionError, match="--count 0: must be at least 1"):
        replace(Made(), count=0)
    with pytest.raises(OptionError, match="--folder a: must be absolute"):
        Made(folder="a")


def test_fields_without_a_declaration_are_no_options():
    assert "untold" not in {each.name for each in options_of(Every)}
    assert Every().untold == 7


def test_a_needed_argument_that_is_missing_is_named():
    @dataclass(frozen=True)
    class Needs:
        data_set: str = argument("The data set.", metavar="NAME")

    with pytest.raises(OptionError, match="NAME is needed: The data set"):
        build(Needs, {})
    assert build(Needs, {"data_set": "mnist"}).data_set == "mnist"


def test_an_annotation_that_no_text_can_fill_is_a_defect_of_the_program():
    @dataclass(frozen=True)
    class Wrong:
        mapping: dict[str, int] = option(None, "No.")

    with pytest.raises(TypeError):
        options_of(Wrong)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(), st.recursive(st.integers() | st.text(), st.lists, max_leaves=5), max_size=4)
)
def test_params_hash_by_content_and_never_change(content):
    one, two = Params(content), Params(dict(reversed(content.items())))
    assert one == two
    assert hash(one) == hash(two)
    with pytest.raises(TypeError):
        one["new"] = 1  # type: ignore[index]


def test_params_differ_where_their_content_does():
    assert Params(a=1) != Params(a=2)
    assert len({Params(a={"b": 1}), Params(a={"b": 1}), Params(a={"b": 2})}) == 2


@settings(max_examples=40, deadline=None)
@given(st.fractions())
def test_every_fraction_reads_back_exactly(value):
    assert build(Every, {"period": str(value)}).period == value


def test_plain_is_strict_json_for_every_kind_of_result():
    result = {
        "nan": math.nan,
        "inf": [math.inf, np.float32(1.5)],
        "array": np.arange(3),
        "config": Every(params=Params(a=(1,))),
        "path": Path("x"),
        "bool": np.bool_(True),
    }
    text = json.dumps(to_jsonable(result), allow_nan=False)
    back = json.loads(text)
    assert back["nan"] is None
    assert back["inf"] == [None, 1.5]
    assert back["array"] == [0, 1, 2]
    assert back["config"]["period"] == "1"
    assert back["config"]["params"] == {"a": [1]}
    assert back["bool"] is True


def test_plain_refuses_what_json_cannot_hold():
    with pytest.raises(TypeError, match="object"):
        to_jsonable({"x": object()})


def test_checks_say_the_bound():
    assert between(0, 1)(0.5) is None
    assert between(0, 1)(math.nan) == "must be between 0 and 1"
    assert positive(0.0) is not None
    assert positive(math.inf) is not None
    assert finite(-1.0) is None
    assert finite(math.nan) is not None


def test_the_nearest_names_are_offered_else_all_of_a_few():
    assert did_you_mean("micro_bach", ["micro_batch", "epochs"]) == "; did you mean micro_batch?"
    assert did_you_mean("zzz", ["b", "a"]) == "; known: a, b"
    assert did_you_mean("zzz", [f"name{i}" for i in range(40)]) == ""
    assert did_you_mean("zzz", []) == ""


def test_documents_keep_text_as_written_and_merge_anchors():
    document = parse_document("base: &b {lr: 1e-4, tag: ON}\nrun:\n  <<: *b\n  tag: 16.10\n", "f.yml")
    assert document["run"] == {"lr": "1e-4", "tag": "16.10"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yml, line 3: the key 'a' is already in line 1"),
        ('{"a": 1,\n "a": 2}', "f.yml, line 2: the key 'a' is already in line 1"),
        ("a: 1\n b: 2\n", "f.yml, line 2: neither YAML nor JSON"),
        ("a: [1,\n", "f.yml, line 2: neither YAML nor JSON"),
        ("a: !!python/name:os.system x", "f.yml, line 1: the tag"),
        ("a: !mine x", "f.yml, line 1: the tag"),
        ("? [1, 2]\n: 3", "f.yml, line 1: a key must be a single word"),
        ("a: &a {b: *a}", "f.yml, line 1: this part contains itself; write it out"),
        ("a: \x00", "f.yml: neither YAML nor JSON"),
        ("<<: 3", "'<<' must name a mapping"),
    ],
)
def test_a_broken_document_is_one_line_with_file_and_line(text, message):
    with pytest.raises(OptionError) as error:
        parse_document(text, "f.yml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)

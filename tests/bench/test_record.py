"""Records: on disk one by one, whole after a kill, one runner at a time."""

import json

import pytest

from hotloop.bench.record import Results, add_provenance
from hotloop.errors import RunError


def test_records_are_lines_of_strict_json_in_order(tmp_path):
    results = Results(tmp_path)
    results.append({"a": 1.5, "b": float("nan")})
    assert (tmp_path / "results.jsonl").read_text() == '{"a": 1.5, "b": null}\n'
    results.append({"a": 2})
    results.close()
    assert Results(tmp_path).records == [{"a": 1.5, "b": None}, {"a": 2}]


def test_a_line_that_a_killed_runner_left_unfinished_is_cut_off(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"a": 1}\n{"a": 2, "b')
    results = Results(tmp_path)
    assert results.records == [{"a": 1}]
    results.append({"a": 3})
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == [
        {"a": 1},
        {"a": 3},
    ]


def test_a_file_that_is_damaged_in_the_middle_is_refused(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(RunError, match="damaged"):
        Results(tmp_path)


def test_equal_provenance_is_kept_once_and_different_beside_it(tmp_path):
    first = add_provenance(tmp_path, {"host": "a"})
    assert add_provenance(tmp_path, {"host": "a"}) == first
    second = add_provenance(tmp_path, {"host": "b"})
    assert json.loads((tmp_path / "provenance.json").read_text()) == {
        first: {"host": "a"},
        second: {"host": "b"},
    }

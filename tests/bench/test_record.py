"""Records: on disk one by one, whole after a kill, one runner at a time."""

import errno
import json
import os

import pytest

from bench_logs import record
from hotloop.bench.record import Results, add_provenance
from hotloop.errors import DataError, RunError


def whole(**more):
    return {**record("a", 1.0), "end": None, "exitcode": 0, "env": {}, **more}


def test_records_are_lines_of_strict_json_in_order(tmp_path):
    results = Results(tmp_path)
    results.append(whole(seconds=float("nan")))
    assert json.loads((tmp_path / "results.jsonl").read_text(), parse_constant=pytest.fail)["seconds"] is None
    results.append(whole(repeat=2))
    results.close()
    assert Results(tmp_path).records == [whole(seconds=None), whole(repeat=2)]


def test_a_line_that_a_killed_runner_left_unfinished_is_cut_off(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(whole()) + "\n" + json.dumps(whole())[:-30])
    results = Results(tmp_path)
    assert results.records == [whole()]
    results.append(whole(repeat=3))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [whole(), whole(repeat=3)]


def test_a_file_that_is_damaged_in_the_middle_is_refused(tmp_path):
    good = json.dumps(whole()) + "\n"
    (tmp_path / "results.jsonl").write_text(good + "nonsense\n" + good)
    with pytest.raises(DataError, match=r"results\.jsonl:2: damaged"):
        Results(tmp_path)


FOREIGN = ['{"foo": 1}', "[1]", "3", '{"benchmark":"b","variant":"b","status":"passed"}', ""]
FOREIGN += [json.dumps(whole(spec={})), json.dumps(whole(metrics={"x": {"value": 1}}))]
FOREIGN += [json.dumps(whole(**{name: "x"})) for name in ("repeat", "params", "start", "seconds", "log")]


@pytest.mark.parametrize("line", FOREIGN)
def test_a_line_of_something_else_is_refused_with_its_place_and_left_as_it_is(tmp_path, line):
    file = tmp_path / "results.jsonl"
    for end in ("\n", "") if line else ("\n",):
        file.write_text(json.dumps(whole()) + "\n" + line + end)
        with pytest.raises(DataError, match=r"results\.jsonl:2: damaged"):
            Results(tmp_path)
        assert file.read_text().endswith("\n" + line + end)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_record_that_cannot_be_written_is_told_in_one_line(tmp_path, monkeypatch, number):
    def write(*given):
        raise OSError(number, os.strerror(number))

    results = Results(tmp_path)
    monkeypatch.setattr("hotloop.bench.record.os.write", write)
    said = "the disk is full" if number == errno.ENOSPC else os.strerror(number)
    with pytest.raises(RunError, match=f"results.jsonl: .*{said}.*--resume"):
        results.append(whole())


def test_equal_provenance_is_kept_once_and_different_beside_it(tmp_path):
    first = add_provenance(tmp_path, {"host": "a"})
    assert add_provenance(tmp_path, {"host": "a"}) == first
    second = add_provenance(tmp_path, {"host": "b"})
    assert json.loads((tmp_path / "provenance.json").read_text()) == {
        first: {"host": "a"},
        second: {"host": "b"},
    }

"""JUnit files: one case a run, with its time, its message and its numbers, and always well-formed."""

from xml.etree import ElementTree

from hotloop.bench import result_files


def record(variant, status="passed", repeat=1, **more):
    return {
        "benchmark": "b",
        "variant": variant,
        "params": {},
        "repeat": repeat,
        "status": status,
        "reason": None,
        "command": "c",
        "exitcode": 0,
        "seconds": 1.25,
        "metrics": {},
        "problems": {},
        "log": {},
        **more,
    }


def written(folder, *records):
    result_files.write_junit(folder / "r.xml", records)
    return ElementTree.parse(folder / "r.xml").getroot()


def test_suites_count_their_cases_failures_and_skips(tmp_path):
    root = written(
        tmp_path,
        record("a"),
        record("a", repeat=2),
        record("x", "timeout", reason="late"),
        record("y", "skipped", reason="why", seconds=None),
    )
    (suite,) = root.findall("testsuite")
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped", "time")} == {
        "tests": "4",
        "failures": "1",
        "skipped": "1",
        "time": "3.750",
    }
    assert [case.get("name") for case in suite.findall("testcase")] == ["a", "a (repeat 2)", "x", "y"]
    assert suite.find("testcase/failure").attrib == {"type": "timeout", "message": "late"}
    assert suite.find("testcase/skipped").get("message") == "why"


def test_a_failure_carries_the_end_of_standard_error_and_the_numbers_are_properties(tmp_path):
    (tmp_path / "err").write_bytes(b"\x00\x1b[1m<first> & \xff\nlast\n")
    one = record(
        "a\x01",
        "failed",
        reason="bad \x02 \ud800",
        metrics={"throughput": {"value": 3.5}},
        params={"n": "1"},
        problems={"loss": "missing"},
        log={"stderr": "err"},
    )
    case = written(tmp_path, one).find("testsuite/testcase")
    assert case.find("failure").text == "<first> & \ufffd\nlast"
    assert case.get("name") == "a\ufffd"
    properties = {each.get("name"): each.get("value") for each in case.findall("properties/property")}
    assert properties == {
        "param.n": "1",
        "metric.throughput": "3.5",
        "problem.loss": "missing",
        "command": "c",
        "exitcode": "0",
    }

"""Results as a JUnit file, which every CI system shows: a suite for each benchmark, a test case for each run.

It knows records alone.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hotloop.bench.capture import last_lines

STDERR_LINES = 100
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """The file of all records; log files are looked for beside it."""
    path = Path(path)
    root = ElementTree.Element("testsuites")
    suites: dict[str, ElementTree.Element] = {}
    for record in records:
        name = record["benchmark"]
        suite = suites.get(name)
        if suite is None:
            suites[name] = suite = ElementTree.SubElement(root, "testsuite", name=_text(name))
        _case(suite, record, path.parent)
    for suite in suites.values():
        _count(suite)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _case(suite: ElementTree.Element, record: Mapping[str, Any], log: Path) -> None:
    repeat = f" (repeat {record['repeat']})" if record["repeat"] > 1 else ""
    case = ElementTree.SubElement(
        suite,
        "testcase",
        name=_text(record["variant"] + repeat),
        classname=_text(record["benchmark"]),
        time=f"{record['seconds'] or 0:.3f}",
    )
    _properties(case, record)
    reason = _text(record["reason"] or "")
    if record["status"] == "skipped":
        ElementTree.SubElement(case, "skipped", message=reason)
    elif record["status"] != "passed":
        failure = ElementTree.SubElement(case, "failure", type=record["status"], message=reason)
        stderr = (record.get("log") or {}).get("stderr")
        failure.text = _text("\n".join(last_lines(log / stderr, STDERR_LINES)) if stderr else "")


def _properties(case: ElementTree.Element, record: Mapping[str, Any]) -> None:
    said = {f"param.{name}": text for name, text in record["params"].items()}
    said |= {f"metric.{name}": one["value"] for name, one in record["metrics"].items()}
    said |= {f"problem.{name}": text for name, text in record["problems"].items()}
    said |= {"command": record["command"], "exitcode": record["exitcode"]}
    properties = ElementTree.SubElement(case, "properties")
    for name, value in said.items():
        if value is not None:
            ElementTree.SubElement(properties, "property", name=_text(name), value=_text(str(value)))


def _count(suite: ElementTree.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    suite.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")


def _text(text: str) -> str:
    """The text less what XML cannot hold."""
    return FORBIDDEN.sub("\ufffd", text)

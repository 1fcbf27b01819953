"""Results as JSON by benchmark and CSV, both of the older runner's shape, as JUnit for CI systems, and as the table at
the end of a run.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from hotloop.bench.process import last_lines
from hotloop.bench.record import Record, ended_well, group_by
from hotloop.engine.run import write_json

LEADING = ("throughput", "latency", "total_compiling_time")
ADDITIONAL = ("test_duration", "loss", "result", "cmd", "env", "git_commit_hash")
SAME = ("params", "command", "exitcode", "repeat", "status", "reason")  # under the older runner's names
ABSENT = ("compilation_end_time", "latest_checkpoint_path", "sdk_path", "sdk_version")
"""What the older runner had, and hotloop has no counterpart of."""
COLUMNS = ("variant", "status", "runs", "seconds", "metrics")
STDERR_LINES = 100
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML
COMPILING = ("total_compiling_time", "compile_time", "compile_seconds")


def write_results_json(path: Path, records: Sequence[Record]) -> None:
    """benchmark_results.json: for each benchmark the list of its runs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        times = (record["start"], record["end"])
        start, end = (at if at is None else datetime.fromtimestamp(at, UTC).isoformat() for at in times)
        found.setdefault(record["benchmark"], []).append(
            {
                "benchmark_path": record["spec"]["file"],
                "benchmark_name": record["benchmark"],
                "variant_name": record["variant"],
                **{name: record[name] for name in SAME},
                "results": {
                    name: {one["reduction"]: one["value"]} for name, one in record["metrics"].items()
                },
                "start_time": start,
                "end_time": end,
                "test_duration": record["seconds"],
                "log_paths": {name: str(path.parent / file) for name, file in record["log"].items()},
                **dict.fromkeys(ABSENT),
            }
        )
    write_json(path, found)


def write_csv(
    path: Path, records: Sequence[Record], more: Sequence[str], additional: bool, commit: str | None
) -> None:
    """benchmark_results.csv: a row for each run, everything quoted; the leading columns never change."""
    extra = dict.fromkeys((*(ADDITIONAL if additional else ()), *more))
    names = [*LEADING, *(name for name in extra if name not in LEADING)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["benchmark name", "Variant name", *names])
        for record in records:
            values = {
                "test_duration": record["seconds"],
                "result": record["status"],
                "cmd": record["command"],
                "env": " ".join(f"{key}={text}" for key, text in record["env"].items()),
                "git_commit_hash": commit,
                "repeat": record["repeat"],
                **record["params"],
                **{name: metric["value"] for name, metric in record["metrics"].items()},
            }
            compiling = [values[name] for name in COMPILING if name in record["metrics"]]
            values[LEADING[2]] = (*compiling, None)[0]
            cells = ["" if values.get(name) is None else values[name] for name in names]
            writer.writerow([record["benchmark"], record["variant"], *cells])


def table_rows(records: Sequence[Record]) -> Sequence[tuple[str, ...]]:
    """A line for each variant: how often it ran and passed, the median time, the median of each metric."""
    rows = []
    for name, runs in group_by(drop_replaced_skips(records), itemgetter("variant")).items():
        worst = next((run["status"] for run in runs if run["status"] != "passed"), "passed")
        passed = sum(run["status"] == "passed" for run in runs)
        seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
        reasons = [run["reason"] for run in runs if run["reason"]]
        said = describe_metrics([run for run in runs if ended_well(run)]) or (*reasons, "")[0]
        shares = "-" if worst == "skipped" else f"{passed}/{len(runs)}"
        rows.append((name, worst.upper(), shares, f"{median(seconds):.2f}" if seconds else "-", said[:120]))
    return rows


def drop_replaced_skips(records: Sequence[Record]) -> list[Record]:
    """The records without those of a skip that was made good later: what ran is the result."""
    ran = {record["variant"] for record in records if record["status"] != "skipped"}
    return [record for record in records if record["status"] != "skipped" or record["variant"] not in ran]


def describe_metrics(records: Sequence[Mapping[str, Any]]) -> str:
    """Each metric of runs in words; for several runs the median and its range."""
    parts = []
    for name, one in {name: one for record in records for name, one in record["metrics"].items()}.items():
        said = [record["metrics"][name]["value"] for record in records if name in record["metrics"]]
        values = [value for value in said if value is not None]
        if not values:
            continue
        spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
        unit = f" {one['unit']}" if one["unit"] and one["unit"] != name else ""
        parts.append(f"{name} {median(values):.6g}{unit}{spread}")
    return ", ".join(parts)


def write_junit(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """A file of all records; log files are looked for beside it."""
    root = ElementTree.Element("testsuites")
    for benchmark, runs in group_by(records, itemgetter("benchmark")).items():
        suite = ElementTree.SubElement(root, "testsuite", name=benchmark)
        for record in runs:
            repeat = f" (repeat {record['repeat']})" if record["repeat"] > 1 else ""
            said = {"name": record["variant"] + repeat, "time": f"{record['seconds'] or 0:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", classname=benchmark, **said)
            values = {f"param.{name}": text for name, text in record["params"].items()}
            values |= {f"metric.{name}": one["value"] for name, one in record["metrics"].items()}
            values |= {f"problem.{name}": text for name, text in record["problems"].items()}
            values |= {"command": record["command"], "exitcode": record["exitcode"]}
            properties = ElementTree.SubElement(case, "properties")
            for name, value in values.items():
                if value is not None:
                    ElementTree.SubElement(properties, "property", name=name, value=str(value))
            reason = record["reason"] or ""
            if record["status"] == "skipped":
                ElementTree.SubElement(case, "skipped", message=reason)
            elif record["status"] != "passed":
                failure = ElementTree.SubElement(case, "failure", type=record["status"], message=reason)
                if stderr := (record.get("log") or {}).get("stderr"):
                    failure.text = "\n".join(last_lines(path.parent / stderr, STDERR_LINES))
        suite.set("tests", str(len(runs)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
        suite.set("time", f"{sum(float(case.get('time', 0)) for case in suite):.3f}")
    text = FORBIDDEN.sub("\ufffd", ElementTree.tostring(root, encoding="unicode"))
    Path(path).write_text(f"<?xml version='1.0' encoding='utf-8'?>\n{text}", encoding="utf-8")

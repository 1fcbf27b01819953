"""Readers of what benchmarks are made of and leave: files, records, documents, expressions, output."""

import json
from pathlib import Path

from readers import Reader, in_file, of_text

from bench_logs import record
from hotloop.bench import peers
from hotloop.bench.benchmark import Benchmark, Metric
from hotloop.bench.compare import CompareRules, compare_samples, load_baselines
from hotloop.bench.expressions import ExpressionError, check_expression, evaluate_expression
from hotloop.bench.metrics import extract
from hotloop.bench.peers import is_peer_document
from hotloop.bench.record import Results, collect_samples, read_records
from hotloop.bench.report import build_report, gather_sources
from hotloop.bench.spec import load_benchmarks
from hotloop.options.files import parse_json


def of_benchmarks() -> list[Reader]:
    fixtures = Path(__file__).parents[1] / "bench" / "fixtures"
    specs = [file.read_bytes() for file in sorted(fixtures.glob("*.yml"))]
    lines = ["".join(json.dumps(record(name, 1.0 + n, n)) + "\n" for n in range(3)) for name in ("a", "b")]
    jsonl = [line.encode() for line in lines]
    rest = {"env": {}, "exitcode": 0, "end": 1767225601.0}
    whole = [(json.dumps(record("a", 1.0, **rest)) + "\n").encode() * 2]
    rows = [{"case": "c", "side": "torch", "ratio": 2.0, "ratio_low": 1.5, "ratio_high": 2.5, "floor": 1.2}]
    documents = [
        b'{"device": "x", "matmul_tflops": {"float32": 1.5, "bfloat16": 3}, "copy_gbps": 10}',
        b'{"device": "x", "kernels": {"lstm": {"cost": {"flops": 1e9, "bytes": 1e8}, "tflops": 1.0, "limits": '
        b'{"peak_tflops": 2.0, "copy_gbps": 10}, "dtype": "float32", "device": "x"}}}',
        json.dumps({"family": "cnn", "results": rows, "device": "x"}).encode(),
    ]
    kept = [
        b'{"thresholds": {"*": 0.1}, "devices": {"x": {"a": {"loss": {"benchmark": "a", "values": [1, 2, 3]}}}}}'
    ]
    printed = [
        b'throughput: 12.5 samples/sec\n{"event": "log", "update": 1, "loss": 0.5}\n'
        b'{"event": "validation", "accuracy": 0.5}\n{"loss": 1.5, "run": "x", "cost": {"flops": 3}}\n'
    ]
    metrics = [
        Metric("throughput", r"throughput: ([0-9.]+)"),
        Metric("loss", None),
        Metric("validation.accuracy", None),
        Metric("cost.flops", None),
    ]

    def compared(file: Path) -> None:
        found = collect_samples(read_records([file]))
        compare_samples(found, found, CompareRules())

    def shown(path: Path) -> str:
        return build_report(gather_sources([path])).render()

    def reopened(file: Path) -> None:
        Results(file.parent).close()

    def output(text: str) -> None:
        extract(Benchmark("b", Path("b.yml"), 1, "x", metrics=tuple(metrics)), text.split("\n"), [])

    def expression(text: str) -> None:
        check_expression(text, ["a", "b"])
        evaluate_expression(text, {"a": 2.0, "b": -1.0})

    def peer(file: Path) -> None:
        document = parse_json(file.read_bytes())
        if is_peer_document(document):
            [peers.table_cells(row) for row in peers.table_rows(document, "cnn")]

    texts = [
        b"a * 400000 / 10000",
        b"max(a, b) ** 2 + round(a, 1)",
        b"{a} // (b - 1) % 3",
        b"sqrt(abs(b)) + log(a, 2)",
    ]
    return [
        Reader(
            "benchmark files",
            specs,
            in_file("benchmarks.yml", lambda file: load_benchmarks([file])),
            lines=True,
        ),
        Reader("expressions", texts, of_text(expression), (ExpressionError,), lines=True),
        Reader("records of benchmarks", jsonl, in_file("results.jsonl", compared)),
        Reader("records of benchmarks, resumed", whole, in_file("results.jsonl", reopened)),
        Reader("report of records", jsonl, in_file("results.jsonl", lambda file: shown(file.parent))),
        Reader("report of documents", documents, in_file("document.json", shown)),
        Reader("peers", documents[2:], in_file("peers.json", peer), (ValueError,)),
        Reader("baselines", kept, in_file("baselines.json", load_baselines)),
        Reader("a program's output", printed, of_text(output)),
    ]

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench_logs import log_folder, record, repeats
from demo_results import kernel
from hotloop.bench.peers import PeerRow, read_peer_rows
from hotloop.bench.report import build_report, gather_sources
from hotloop.bench.roofline import median_result
from hotloop.cli.bench import REPORT
from hotloop.cli.main import execute
from hotloop.errors import DataError

VALUES = [100, 101, 99, 100.5]
REAL = Path(__file__).parents[2] / "benchmarks" / "results"


class Outline(HTMLParser):
    """Headings, links and rows of a page."""

    def __init__(self, html):
        super().__init__()
        self.links, self.headings, self.rows, self._in = [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.links += [found[name] for name in ("src", "href") if name in found]
        self._in = self._in if tag == "span" else tag  # a verdict is a span in its cell
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self._in == "h2":
            self.headings.append(data)
        elif self._in in ("td", "th") and data.strip():
            self.rows[-1].append(data)
        self._in = ""

    def row(self, *start):
        return next(row for row in self.rows if row[: len(start)] == list(start))


@pytest.fixture
def page():
    return lambda *paths: Outline(build_report(gather_sources(list(paths))).render())


def day(number, runs):
    return [run | {"start": 86400.0 * number} for run in runs]


def test_the_summary_tells_median_interval_spread_and_device(page, tmp_path):
    found = page(log_folder(tmp_path / "a", repeats("x", VALUES)))
    row = found.row("x", "throughput")
    assert row[2:4] == ["100.2", "samples/sec"]
    assert row[6:] == ["4", "–", "–", "a <fast> device", "2026-01-01", "0123456+"]
    assert found.headings == ["Summary", "Spread of repeats", "Machines"]


def test_the_page_needs_nothing_from_outside(page, tmp_path):
    found = page(log_folder(tmp_path / "a", repeats("x", VALUES)), REAL)
    assert all(link.startswith(("data:", "#")) for link in found.links)


def test_folders_are_ordered_by_time_and_the_last_is_judged_against_the_one_before(page, tmp_path):
    new = log_folder(tmp_path / "a", day(2, repeats("x", [value * 2 for value in VALUES])), commit="fffffff")
    old = log_folder(tmp_path / "b", day(1, repeats("x", VALUES)))
    found = page(new, old)
    assert "History" in found.headings
    assert found.row("x", "throughput")[2] == "200.5"
    assert found.row("x", "throughput")[7:] == ["FAST", "2", "a <fast> device", "1970-01-03", "fffffff+"]
    assert found.row("x", "latency")[7:9] == ["FAST", "0.5"]
    assert [row[1] for row in found.rows if row[0] == "x" and row[1].endswith("+")][:2] == [
        "0123456+",
        "fffffff+",
    ]


def test_folders_of_one_commit_are_told_apart_by_their_time(page, tmp_path):
    folders = [log_folder(tmp_path / str(n), day(n, repeats("x", VALUES))) for n in (1, 2)]
    names = [row[1] for row in page(*folders).rows if row[0] == "x"]
    assert {"01-02 00:00", "01-03 00:00"} <= set(names)


def test_two_devices_have_no_common_history(page, tmp_path):
    one = log_folder(tmp_path / "a", repeats("x", VALUES), device="one")
    two = log_folder(tmp_path / "b", repeats("x", VALUES), device="two")
    found = page(one, two)
    assert "History" not in found.headings
    assert [row[-3] for row in found.rows if row[:2] == ["x", "throughput"]] == ["one", "two"]


def test_runs_that_failed_are_shown_with_their_reason(page, tmp_path):
    failed = record("y", 1, status="timeout", reason="longer than 5 <s>", metrics={})
    found = page(log_folder(tmp_path / "a", [*repeats("x", VALUES), failed]))
    assert found.row("y")[2:4] == ["timeout", "longer than 5 <s>"]


def test_variants_of_several_batch_sizes_give_throughput_against_latency(page, tmp_path):
    runs = [
        run for size in (1, 8) for run in repeats(f"x_batch_{size}", VALUES, params={"batch_size": str(size)})
    ]
    assert "Throughput and latency" in page(log_folder(tmp_path / "a", runs)).headings
    assert "Throughput and latency" not in page(log_folder(tmp_path / "b", runs[:4])).headings


def test_without_a_measured_latency_it_is_batch_size_over_throughput(tmp_path):
    runs = [
        run for size in (1, 8) for run in repeats(f"x_batch_{size}", VALUES, params={"batch_size": str(size)})
    ]
    for run in runs:
        del run["metrics"]["latency"]
    html = build_report(gather_sources([log_folder(tmp_path, runs)])).render()
    assert "batch size / throughput, ms" in html
    assert f'data-value="{8 / 100.25 * 1e3}"' in html


def test_one_run_shows_the_readings_inside_it(page, tmp_path):
    run = record("x", 10)
    run["metrics"] = {"throughput": {"value": 10, "unit": "", "values": [9, 10, 11]}}
    found = page(log_folder(tmp_path, [run]))
    assert "Spread of repeats" in found.headings
    assert found.row("x", "0.95")[-1] == "0.9 1 1.1"


def test_how_busy_the_machine_was_is_shown_where_it_was_watched(page, tmp_path):
    busy = {"samples": 2, "host_cpu_percent": {"mean": 50.0, "max": 90.0}}
    found = page(log_folder(tmp_path, [record("x", 1, monitor=busy), record("y", 1, monitor={"samples": 0})]))
    assert found.row("x", "50") == ["x", "50", "90"]


def test_kernels_stand_on_a_roofline_from_files_and_from_what_runs_printed(page, tmp_path):
    one = kernel(1e6, 1e5, 0.02) | {"device": "d", "mode": "training", "dtype": "float16"}
    log = log_folder(tmp_path / "log", repeats("printed", VALUES))
    (log / "printed").mkdir()
    (log / "printed/stdout").write_text(json.dumps(one))
    (tmp_path / "all.json").write_text(json.dumps({"results": {"dense": one, "hmc": {"tflops": 1}}}))
    (tmp_path / "alone.json").write_text(json.dumps(one))
    limits = {"device": "d", "matmul_tflops": {"bfloat16": 0.5, "float32": 0.1}, "copy_gbps": 20.0}
    (tmp_path / "devices.json").write_text(json.dumps({"ceilings": limits}))
    found = page(log, *(tmp_path / f"{name}.json" for name in ("all", "alone", "devices")))
    shown = [row[0] for row in found.rows if row[1:3] == ["training", "float16"]]
    assert shown == ["dense", "alone", "printed"]
    assert found.row("bfloat16")[1:] == ["6.25", "0.125"]  # under the slope of the copy, 20 GB/s
    assert found.row("training", "10")[2] == "0.02"


def test_kernels_of_one_name_on_two_devices_are_both_shown(page, tmp_path):
    for device in ("one", "two"):
        (tmp_path / f"{device}.json").write_text(
            json.dumps({"results": {"dense": kernel(1e6, 1e5, 0.02) | {"device": device, "mode": "m"}}})
        )
    found = page(tmp_path)
    assert sum(row[:2] == ["dense", "m"] for row in found.rows) == 2


def test_peers_of_every_shape_become_rows_of_one():
    where = {"environment": {"platform": "cpu", "cpu": "P", "cores": 2}, "date": "2026-01-01"}
    same = {"ratio": 2.0, "ratio_low": 1.5, "ratio_high": 2.5, "floor": 1.1}
    shapes = [
        [{"case": "rnn", "dtype": "float32", "ours_us": 1.0, "torch_us": 2.0, **same}],
        [{"case": "rnn", "dtype": "float32", "ours_low_us": 0.9, "ours_us": 1.0, "ours_high_us": 1.2,
          "torch_low_us": 1.8, "torch_us": 2.0, "torch_high_us": 2.2, **same}],
        [{"shape": "rnn", "precision": "Policy(compute=dtype('float32'))", "ours": {"milliseconds": 1.0},
          "torch": {"milliseconds": 2.0}, **same}],
        [{"side": "ours", "case": "rnn, float32", "milliseconds": 1.0, "ratio": 1.0},
         {"side": "torch", "case": "rnn, float32", "milliseconds": 2.0, **same}],
    ]  # fmt: skip
    for results in shapes:
        (row,) = read_peer_rows({"results": results, **where}, "2026-01-01_kernels_cpu")
        assert (row.family, row.case, row.peer, row.ours, row.theirs) == (
            "kernels",
            "rnn, float32",
            "torch",
            1,
            2,
        )
        assert (row.ratio, row.low, row.high, row.floor, row.device) == (2.0, 1.5, 2.5, 1.1, "P, 2 cores")


def test_a_sampler_is_shown_with_its_effective_draws_a_second():
    ours = {"side": "ours", "case": "funnel", "ess_per_second": 4000.0, "ratio": 1.0}
    theirs = {"side": "blackjax nuts", "case": "funnel", "ess_per_second": 1000.0}
    theirs |= {"ratio": 4.0, "ratio_low": 3.0, "ratio_high": 5.0}
    (row,) = read_peer_rows({"family": "hmc", "results": [ours, theirs]}, "2026-01-01_hmc_cpu")
    assert (row.family, row.ours, row.theirs, row.unit, row.word) == ("hmc", 4000.0, 1000.0, "ESS/s", "FAST")


def test_the_comparisons_kept_in_the_repository_can_be_shown(page):
    found = page(REAL)
    assert found.headings[0] == "Beside other programs"
    assert {row[0] for row in found.rows if row[2:3] == ["torch"]} >= {"kernels", "cnn", "recommender", "vcd"}


def test_the_command_writes_the_page_and_names_what_it_left_out(tmp_path, capsys):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/other.json").write_text("{}")
    log = log_folder(tmp_path / "a", repeats("x", VALUES))
    words = [
        str(log),
        str(tmp_path / "files"),
        "-o",
        str(tmp_path / "deep/page.html"),
        "--title",
        "A & B",
        "--json",
    ]
    execute(REPORT, "hotloop bench report", words)
    said = capsys.readouterr()
    assert json.loads(said.out)["runs"] == 4
    assert "other.json" in said.err
    assert "<h1>A &amp; B</h1>" in (tmp_path / "deep/page.html").read_text()


@pytest.mark.parametrize(("text", "said"), [("{}", "holds no results"), ("x", "cannot be read as JSON")])
def test_a_file_of_something_else_is_told(tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=said):
        gather_sources([tmp_path / "a.json"])


def printed(folder, variant, speeds, start=0.0, **more):
    """A log folder of a kernel whose runs printed these numbers of items a second."""
    results = [
        kernel(1e6, 1e5, speed / 1e5) | {"device": "d", "mode": "m", "items_per_second": speed}
        for speed in speeds
    ]
    runs = []
    for place, result in enumerate(results, 1):
        metrics = {
            "throughput": {"value": result["items_per_second"], "unit": "items/sec"},
            "tflops": {"value": result["tflops"], "unit": "TFLOP/s"},
        }
        log = {"stdout": f"{variant}-{place}"}
        runs.append(record(variant, 1, place, metrics=metrics, log=log, start=start, **more))
    log_folder(folder, runs)
    for place, result in enumerate(results, 1):
        (folder / f"{variant}-{place}").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("file", sorted(REAL.iterdir()), ids=lambda file: file.name)
def test_every_result_file_of_the_repository_can_be_shown_with_what_it_measured(file):
    found = gather_sources([file])
    page = build_report(found)
    outline = Outline(page.render())
    assert not found.left_out and page.headline and outline.headings
    assert any(re.fullmatch(r"-?[\d,.]+", cell) for row in outline.rows for cell in row)


@pytest.mark.parametrize("file", sorted(REAL.glob("*.json")), ids=lambda file: file.name)
def test_the_times_beside_a_ratio_are_those_it_is_of(file):
    for row in gather_sources([file]).peers:
        ratio = row.ours / row.theirs if row.unit == "ESS/s" else row.theirs / row.ours
        assert 0.9 * row.low <= ratio <= 1.1 * row.high, row
        assert row.peer != "peer" and "_" not in row.peer


def test_cases_stand_in_the_order_of_their_numbers(tmp_path):
    rows = [
        {"case": f"batch {size}", "ours_us": 1.0, "torch_us": 2.0, "ratio": 2.0} for size in (128, 8, 32, 512)
    ]
    (tmp_path / "a.json").write_text(json.dumps({"date": "2026-01-01", "results": rows}))
    html = build_report(gather_sources([tmp_path])).render()
    assert re.findall(r'<text class="note" x="0" y="[\d.]+">batch (\d+)', html)[:4] == [
        "8",
        "32",
        "128",
        "512",
    ]


def test_the_headline_and_the_tally_are_of_the_last_measurement_of_each_comparison(tmp_path):
    def peers(date, ratio):
        row = {"case": "rnn", "ours_us": 1.0, "torch_us": ratio}
        ends = {"ratio": ratio, "ratio_low": 0.98 * ratio, "ratio_high": 1.1 * ratio}
        where = {"platform": "gpu", "device_kinds": ["D"], "commit": f"{date[-2:]}34567890", "dirty": True}
        document = {"date": date, "environment": where, "family": "kernels", "results": [row | ends]}
        (tmp_path / f"{date}.json").write_text(json.dumps(document))

    peers("2026-01-01", 0.5)
    peers("2026-01-02", 2.0)
    page = build_report(gather_sources([tmp_path]))
    assert page.tally == {"FAST": 1}
    assert "faster in 1 of 1 comparison with torch, and slower in 0" in page.headline
    html = page.render()
    found = Outline(html)
    rows = [row for row in found.rows if row[:2] == ["kernels", "rnn"]]
    assert [row[3] for row in rows] == ["SLOW", "FAST"]
    assert [row[-2:] for row in rows] == [["2026-01-01", "0134567+"], ["2026-01-02", "0234567+"]]
    for word, detail in (("SLOW", "01-01 0134567+"), ("FAST", "01-02 0234567+")):  # beside their strips, too
        assert f'<span class="word {word.lower()}">{word}</span>' in html
        assert f'class="word {word.lower()}"' in html and detail in html


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.01, 3, "FAST"),
        (0.2, 0.99, "SLOW"),
        (0.985, 1.019, "SAME"),
        (0.9, 1.1, "AMBIGUOUS"),
        (0.97, 1.5, "AMBIGUOUS"),
        (0.5, 1.01, "AMBIGUOUS"),
        (2, 2, "AMBIGUOUS"),
    ],
)
def test_the_verdict_on_a_peer_is_that_of_every_round(low, high, word):
    row = PeerRow("f", "c", "p", 1, 1, "ms", (low + high) / 2, low, high, None, "d", "2026-01-01")
    assert row.word == word


FIGURES = {"items_per_second": 3, "microseconds_per_iteration": 4, "tflops": 5, "gbps": 6, "roofline": 7}


def test_every_figure_of_the_roofline_is_the_summarys_median_also_where_the_limits_differ(page, tmp_path):
    speeds, peaks = [100.0, 400.0, 200.0, 50.0, math.nan], [0.1, 0.4, 0.05, 0.3, 0.2]
    folder = printed(tmp_path / "a", "rnn", speeds[:4])
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for place, (line, peak) in enumerate(zip(lines, peaks, strict=False), 1):
        result = json.loads((folder / f"rnn-{place}").read_text())
        result |= {"microseconds_per_iteration": 1e6 / speeds[place - 1], "gbps": speeds[place - 1] / 7}
        result["limits"]["peak_tflops"] = peak
        result["roofline"] = result["tflops"] / peak
        (folder / f"rnn-{place}").write_text(json.dumps(result))
        line["metrics"] = {name: {"value": result[name], "unit": ""} for name in FIGURES}
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = page(folder)
    for name, column in FIGURES.items():
        told = float(found.row("rnn", name)[2].replace(",", "")) * (100 if name == "roofline" else 1)
        assert float(found.row("rnn", "m")[column].replace(",", "")) == pytest.approx(told, rel=1e-3), name
    dot = next(row for row in found.rows if row[0] == "m")  # where it stands in the chart
    assert float(dot[2]) == pytest.approx(float(found.row("rnn", "tflops")[2]), rel=1e-3)


def test_a_repeat_that_is_no_number_counts_neither_in_the_summary_nor_on_the_roofline():
    assert median_result([{"a": 1.0}, {"a": math.nan}, {"a": 3.0}, {"a": 2.0}]) == {"a": 2.0}


@pytest.mark.parametrize("speeds", [[104_648.0, 110_000.0, 40_858.0], [100.0, 400.0, 200.0, 50.0]])
def test_the_roofline_and_the_summary_show_the_same_number_over_all_repeats(page, tmp_path, speeds):
    found = page(printed(tmp_path / "a", "rnn", speeds))
    assert found.row("rnn", "m")[3] == found.row("rnn", "throughput")[2]
    assert found.row("rnn", "m")[5] == found.row("rnn", "tflops")[2]


def test_the_roofline_and_the_summary_are_of_the_same_folder_in_whatever_order_they_are_named(page, tmp_path):
    old = printed(tmp_path / "old", "rnn", [100.0, 110.0, 120.0], 86400.0)
    new = printed(tmp_path / "new", "rnn", [200.0, 210.0, 220.0], 2 * 86400.0)
    for folders in ((old, new), (new, old)):
        found = page(*folders)
        assert found.row("rnn", "throughput")[2] == found.row("rnn", "m")[3] == "210"


def test_a_run_that_lacks_another_metric_counts_on_the_roofline_as_it_does_in_the_summary(page, tmp_path):
    folder = printed(tmp_path / "a", "rnn", [100.0, 110.0, 120.0])
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    lines[0] |= {"status": "failed", "exitcode": 0, "problems": {"other": "not found"}}
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = page(folder)
    assert found.row("rnn", "throughput")[2] == found.row("rnn", "m")[3] == "110"


def test_a_roofline_without_ceilings_has_the_median_of_what_its_kernels_were_judged_by(page, tmp_path):
    for name, peak in (("a", 0.1), ("b", 0.2), ("c", 0.9)):
        one = kernel(1e6, 1e5, 0.02) | {"device": "d", "mode": "m", "dtype": "float32"}
        one["limits"] = {"bound": "compute", "peak_tflops": peak, "copy_gbps": 20.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    line = [row for row in page(tmp_path).rows if row[0] == "measured limits, float32"]
    assert max(float(row[2]) for row in line) == 0.2


def test_the_spread_is_that_of_the_folder_and_device_in_the_summary(page, tmp_path):
    old = log_folder(tmp_path / "old", day(1, repeats("x", [100, 150, 200])), device="one")
    new = log_folder(tmp_path / "new", day(2, repeats("x", [100, 100, 101])), device="one")
    other = log_folder(tmp_path / "other", day(3, repeats("x", [10, 30, 50])), device="two")
    html = page(old, new, other)
    dots = [row[-1] for row in html.rows if row[0].startswith("x") and row[-1].count(" ") == 2]
    assert "1 1 1.01" in dots
    assert any(each.startswith("0.33") for each in dots)
    assert not any(each.startswith("0.66") for each in dots)


def test_skipped_variants_are_no_runs(tmp_path):
    skipped = record("y", 1, status="skipped", reason="no", metrics={})
    found = gather_sources([log_folder(tmp_path, [*repeats("x", VALUES), skipped])])
    assert build_report(found).lead.startswith("4 runs of 1 variant, 0 failed")


def test_how_busy_the_machine_was_is_told_over_all_runs_of_the_latest_folder(page, tmp_path):
    def runs(*means):
        return [
            record("x", 1, place, monitor={"samples": 2, "cpu": {"mean": mean, "max": mean + 1}})
            for place, mean in enumerate(means)
        ]

    new = log_folder(tmp_path / "new", day(2, runs(50.0, 60.0, 10.0)))
    old = log_folder(tmp_path / "old", day(1, runs(1.0)))
    assert page(new, old).row("x", "50") == ["x", "50", "61"]

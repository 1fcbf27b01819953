"""benchmarks/serving_load.py: rates by the count of the server, clients that must have been sending, a small model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.cli.main import find_command
from hotloop.cli.parser import resolve, scan

TINY = "--model-name toy_model --dataset cifar10 --synthetic-data host"


@pytest.fixture
def program(monkeypatch):
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    monkeypatch.syspath_prepend(str(benchmarks / "peers"))
    import serving_load

    return serving_load


class Counting:
    """A server that answers 320 rows in 10 batches, a tenth more of them filled up, in each window of two seconds."""

    def __init__(self):
        self.asked = -1

    def stats(self):
        self.asked += 1
        rows, batches = 1000 + 320 * self.asked, 50 + 10 * self.asked
        return 2.0 * self.asked, {
            "inference_count": rows,
            "execution_count": batches,
            "padded_rows": 32 * self.asked,
        }


def test_a_rate_is_the_servers_count_over_the_seconds_between(program):
    found = program.window(Counting(), 0.0)
    assert found == {"rate": 160.0, "batches": 10, "rows_a_batch": 32.0, "padded_rows": 32}


def test_a_window_lasts_until_one_batch_more_or_less_is_half_a_percent_of_it(program, monkeypatch):
    monkeypatch.setattr(program, "POLL", 0.0)
    assert program.BATCHES * 0.005 >= 1
    server = Counting()
    assert program.window(server, 0.0, 35) == {
        "rate": 160.0,
        "batches": 40,
        "rows_a_batch": 32.0,
        "padded_rows": 128,
    }
    asked = []
    monkeypatch.setattr(program, "window", lambda _ready, seconds, fewest=0: asked.append((seconds, fewest)))
    clients = program.Clients([])
    monkeypatch.setattr(program, "SETTLING", 0.0)
    program.one_round(server, clients, 1.2)
    assert asked == [(1.2, program.BATCHES)]


def test_a_window_of_a_slow_server_ends_and_says_how_many_batches_it_had(program, monkeypatch):
    monkeypatch.setattr(program, "POLL", 0.0)
    found = program.window(Counting(), 0.0, 10**6)
    assert found["rate"] == 160.0 and found["batches"] == 10 * program.LONGEST / 2


def test_clients_that_failed_or_began_late_end_the_program(program):
    good = {"failures": 0, "reasons": {}, "seconds": 10.0}
    program.check_clients([good, good], 9.9)
    with pytest.raises(SystemExit, match=r"2 requests failed: \{'refused': 2\}"):
        program.check_clients([good, {**good, "failures": 2, "reasons": {"refused": 2}}], 9.9)
    with pytest.raises(SystemExit, match=r"sent for 10\.0 s, and the rounds took 10\.1"):
        program.check_clients([good], 10.1)


def test_a_share_is_of_the_program_in_the_same_round(program):
    rounds = [
        {"rate": 50.0, "alone": 100.0, "rows_a_batch": 64},
        {"rate": 90.0, "alone": 100.0, "rows_a_batch": 64},
    ]
    rounds += [{"rate": 60.0, "alone": 200.0, "rows_a_batch": 64}]
    ready = program.Ready("16", "resnet50", [], "http://localhost:1", None, {}, 1.0)
    told = [{"latency_ms": {"total": {"p50": value}}} for value in (1.0, 2.0, 6.0)]
    row = program.row_of(ready, rounds, told, ["c"])
    assert row["share"] == {"median": 0.5, "low": 0.3, "high": 0.9}
    assert row["served"]["median"] == 60.0 and row["alone"]["median"] == 100.0
    assert row["p50_ms"] == {"median": 2.0, "low": 1.0, "high": 6.0}
    assert (row["clients"], row["bits"], row["model"]) == (16, 16, "resnet50")


def config_of(words):
    command, _, rest = find_command(words.split())
    return resolve(command, scan(rest, command.options)).config


def test_the_commands_are_command_lines_and_requests_fit_the_ladder(program):
    for precision in program.FORMATS.values():
        words = f"export {program.MODEL} --precision {precision} --ladder {program.LADDER} -o models"
        exported = config_of(words)
        assert (exported.model_name, exported.precision) == ("resnet50", precision)
    assert exported.ladder[0] == program.ROWS and exported.ladder[-1] == program.ALONE_ROWS
    asked = config_of(
        f"request http://localhost:1 --batch-size {program.ROWS} --num-threads {program.THREADS}"
    )
    assert (asked.batch_size, asked.num_threads) == (16, 4)
    assert config_of("serve models --port 0 --grpc-port none").grpc_port is None


@pytest.mark.slow
def test_a_small_model_is_served_and_measured_in_two_formats(program, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(program, "MODEL", TINY)
    monkeypatch.setitem(os.environ, "HOTLOOP_NATIVE", "0")
    file = tmp_path / "2026-01-01_serving_cpu.json"
    program.main(["--device", "cpu", "--rounds", "2", "--seconds", "0.3", "--json", str(file)])
    document = json.loads(file.read_text())
    assert [row["bits"] for row in document["results"]] == [16, 32]
    assert document["environment"]["platform"] == "cpu"
    for row in document["results"]:
        assert len(row["rounds"]) == 2 and row["served"]["median"] > 0
        assert row["rounds"][0]["rate"] / row["rounds"][0]["alone"] in row["share"].values()
        assert all(16 <= each["rows_a_batch"] <= 64 for each in row["rounds"])
        assert row["commands"][0].startswith(f"hotloop export {TINY} --precision ")
    assert "images/s served" in capfd.readouterr().out

    import speed_rows

    found = list(speed_rows.rows_of(file))
    assert [row.case.split(", ")[2] for row in found] == ["16 bits", "32 bits"]
    assert found[0].ours == document["results"][0]["served"]["median"]


def test_a_client_without_any_figures_ends_the_program_with_what_it_said(program):
    with pytest.raises(SystemExit, match="a client had no answer: no request was answered"):
        program.check_clients([{"error": "no request was answered"}], 1.0)


@pytest.mark.parametrize("words", ["--rounds 0", "--seconds 0", "--seconds nan", "--json missing/file.json"])
def test_what_cannot_be_measured_is_refused_before_anything_is_exported(program, words, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(words.split())
    assert ended.value.code == 2 and words.split()[0] in capsys.readouterr().err


def test_a_client_that_ends_before_it_began_ends_the_program_with_what_it_said(program):
    def client(said):
        command = [sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr)"]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    with client("URL: 99 rows to m, 4 clients, 16 rows a request") as good:
        program.await_line(good, ", 4 clients, ")
    with client("no such model") as bad, pytest.raises(SystemExit, match="before it began: no such model"):
        program.await_line(bad, ", 4 clients, ")

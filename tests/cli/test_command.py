"""How a command speaks: text, warnings, tables and the progress bar, on a terminal and off it."""

import io
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import hotloop
from hotloop.cli.command import Command, Context, print_error, spell_options
from hotloop.cli.main import execute, main
from hotloop.engine.interrupt import Stopped
from hotloop.engine.plan import Batch
from hotloop.engine.run import Run, read_events
from hotloop.engine.sinks import ConsoleSink
from hotloop.errors import HotloopError, PlanError
from hotloop.options import option


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_text_goes_to_standard_output_and_under_json_to_standard_error(capsys):
    Context().say("one [bold] [1, 2]")
    assert capsys.readouterr() == ("one [bold] [1, 2]\n", "")
    Context(json=True).say("two")
    assert capsys.readouterr() == ("", "two\n")


def test_warnings_go_to_standard_error(capsys):
    Context().warn("look")
    assert capsys.readouterr() == ("", "warning: look\n")


def test_a_run_outlives_the_reader_of_its_console(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        context = Context()
        with Run(tmp_path, {}, command="x", environment={}, sinks=[ConsoleSink(context.say)]) as run:
            run.event("log", update=1, epoch=0.5, loss=0.5)
            context.say("Finished training.")  # what a family says beside its records must not end it either
    start, warning, log, end = read_events(tmp_path)
    assert (start["event"], log["loss"], end["status"]) == ("start", 0.5, "finished")
    assert warning["message"] == "nobody reads what this run prints any more; its records go on"


def test_a_line_beside_the_records_does_not_end_a_run_whose_reader_has_gone(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with Run(tmp_path, {}, command="x", environment={}):
            Context().say("Starting training...")
            Context().say("Finished training.")
    assert [record["event"] for record in read_events(tmp_path)] == ["start", "warning", "end"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_run_lives_on_when_the_disk_of_its_output_is_full(tmp_path, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with Run(tmp_path, {}, command="x", environment={}):
            Context().say("Starting training...")
            Context().say("Finished training.")
    _, warning, end = read_events(tmp_path)
    assert "No space left on device" in warning["message"] and "its records go on" in warning["message"]
    assert end["status"] == "finished"


def test_a_command_without_a_run_ends_when_its_reader_has_gone(monkeypatch):
    monkeypatch.setattr("hotloop.engine.run.OPEN", set())  # another test may hold one that it never closed
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError):
            Context().say("a table")


def test_colours_only_on_a_terminal_and_never_with_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    print_error("x")
    assert "\033[31merror:\033[0m x" in sys.stderr.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    print_error("y")
    assert "hotloop: error: y" in sys.stderr.getvalue()


def test_no_bar_where_standard_error_is_no_terminal(capsys):
    with Context().progress("working", 3) as progress:
        progress.advance()
        progress.update("still")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [3, None])
def test_a_bar_on_a_terminal_leaves_standard_output_alone(monkeypatch, total):
    monkeypatch.setenv("TERM", "xterm")
    terminal, output = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", output)
    context = Context()
    with context.progress("working", total) as progress:
        progress.advance(2)
        progress.update("still working")
        context.say("a result")
    assert output.getvalue() == "a result\n"
    assert "still working" in terminal.getvalue()
    assert "a result" not in terminal.getvalue()


def test_tables_align_numbers_right_and_text_left(capsys):
    def printed(columns, rows):
        Context().table(columns, rows)
        return capsys.readouterr().out.splitlines()

    assert printed(("id", "name"), [(1, "a"), (10, "bcd")]) == ["id  name", " 1  a", "10  bcd"]
    rows = [("train", "79,941", "3.75 %", 0.5), ("valid", "-", "12.70 %", 1e-7)]
    assert printed(("part", "ratings", "share", "x"), rows) == [
        "part   ratings    share      x",
        "train   79,941   3.75 %    0.5",
        "valid        -  12.70 %  1e-07",
    ]
    assert printed(("id", "name"), []) == ["id  name"]


OPTIONS = {"num_replicas", "micro_batch_size", "resume", "logs_per_epoch", "data"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("replicas=8: only 4 here", "--num-replicas 8: only 4 here"),
        ("micro=0 and replicas=0", "--micro-batch-size 0 and --num-replicas 0"),
        ("(logs_per_epoch=2/3); logs_per_epoch=1 would fit", "(--logs-per-epoch 2/3); --logs-per-epoch 1 would fit"),
        ("continue it with resume=True, or not", "continue it with --resume, or not"),
        ("data_dir=/a b: no such folder", "--data /a b: no such folder"),
        ("learning_rate: name=cosin: must be", "--lr-schedule cosin: must be"),
        ("HOTLOOP_DATA=/x, other=1, x.replicas=2", "HOTLOOP_DATA=/x, other=1, x.replicas=2"),
    ],
)  # fmt: skip
def test_arguments_that_are_options_are_spelled_as_options(text, told):
    assert spell_options(text, OPTIONS) == told


@dataclass(frozen=True)
class Places:
    micro_batch_size: int = option(8, "Images.")
    model_dir: Path = option(Path("results"), "A folder.")


def test_an_error_keeps_its_kind_and_place():
    command = Command("wrong", "", Places, lambda config, context: Batch(0))
    with pytest.raises(PlanError, match=r"^--micro-batch-size 0: must be at least 1$") as caught:
        execute(command, "wrong", [])
    assert caught.traceback[-1].name == "whole"


def test_a_stop_says_how_to_go_on_in_options():
    def stop(config, context):
        raise Stopped("interrupted; to resume: train again with model_dir=results/a", 15)

    with pytest.raises(Stopped) as caught:
        execute(Command("stop", "", Places, stop), "stop", [])
    assert str(caught.value) == "interrupted; to resume: train again with --model-dir results/a"
    assert caught.value.exit_status == 143


def test_a_command_names_options_where_the_engine_names_arguments(capsys):
    asked = ["--samples", "100", "--micro-batch-size", "8", "--global-batch-size", "3"]
    assert main(["plan", *asked]) == 2
    assert "error: --global-batch-size 3: micro batch 8" in capsys.readouterr().err
    assert main(["plan", "--samples", "781", "--num-epochs", "6", "--logs-per-epoch", "7"]) == 0
    assert "warning: --logs-per-epoch 7 would interrupt a weight update" in capsys.readouterr().err
    with pytest.raises(HotloopError, match=r"^global_size=3: micro batch 8"):
        Batch.of(8, global_size=3)


def test_the_rooms_below_the_commands_name_no_options_in_errors():
    """But for the engine's advice to give a command again, which is the default of an argument."""
    root = Path(hotloop.__file__).parent
    rooms = [path for room in ("engine", "layers", "mcmc", "data") for path in (root / room).glob("*.py")]
    raised = re.compile(r"raise \w*Error\((?:[^()]|\([^()]*\))*\)")
    found = [
        (path.name, text)
        for path in rooms
        for text in raised.findall(path.read_text())
        if re.search(r"""["' (]--[a-z]""", text)
    ]
    assert rooms and found == []

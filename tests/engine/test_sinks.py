"""Every sink shows the same records; the console in words that old patterns find."""

import errno
import math
import os
import re
import sys
import threading
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.data.tfrecord import index_records, read_record
from hotloop.engine.sinks import ConsoleSink, TensorBoardSink, WandbSink, console_line, fixed
from hotloop.errors import MissingExtra

# As the benchmark files of the older programs have them.
THROUGHPUT = r"throughput: *(.*?) samples\/sec"
ACCURACY = r"accuracy: *(.*?) \%"
LOSS = r"loss: *(\d*\.\d*)"


def record(event="log", update=781, epoch=1.0, **figures):
    return {"event": event, "update": update, "epoch": epoch, "time": 1.8e9, "elapsed": 3.0, **figures}


def found(pattern, text):
    (value,) = re.findall(pattern, text)
    return float(value)


def test_the_old_patterns_find_their_figures():
    line = console_line(record(loss=1.25, training_accuracy=0.4567, throughput=5120.5, learning_rate=1e-5))
    assert line.startswith("update 781, epoch 1.00: loss: 1.25, training accuracy: 45.67 %, ")
    assert found(THROUGHPUT, line) == 5120.5
    assert found(ACCURACY, line) == pytest.approx(45.67, abs=1e-9)
    assert found(LOSS, line) == 1.25
    validation = console_line(record("validation", accuracy=1))
    assert found(ACCURACY, validation) == 100.0
    assert validation.startswith("validation at update 781")


def test_the_old_patterns_find_nothing_that_they_do_not_mean():
    """The last loss that is read is the training's, the last accuracy a checkpoint's, every throughput a log's."""
    validation = console_line(
        record("validation", validation_accuracy=0.5, validation_loss=2.5, throughput=9.0)
    )
    assert re.findall(LOSS, validation) == re.findall(THROUGHPUT, validation) == []
    assert validation.endswith("validation accuracy: 50.0 %, validation loss 2.5, throughput 9.0 samples/sec")
    assert re.findall(ACCURACY, console_line(record("sweep", target_accuracy=0.759))) == []


@given(st.floats(1e-12, 1e12))
def test_any_loss_and_throughput_is_found_with_six_digits(value):
    line = console_line(record(loss=value, throughput=value))
    assert found(LOSS, line) == pytest.approx(value, rel=1e-5)
    assert found(THROUGHPUT, line) == pytest.approx(value, rel=1e-5)


def test_numbers_never_have_an_exponent():
    assert [fixed(x) for x in (0.0, 3.0, 0.4, -1.5e-7, 123456789.0)] == [
        "0.0",
        "3.0",
        "0.4",
        "-0.00000015",
        "123456789.0",
    ]
    assert fixed(math.nan) == "nan"


def test_figures_that_are_not_finite_are_shown_and_lists_are_not():
    line = console_line(
        record(loss=None, nonfinite={"loss": "nan"}, losses=[1.0, 2.0], accuracy=None, note="ok")
    )
    assert line == "update 781, epoch 1.00: loss: nan, note: ok"
    line = console_line(record(accuracy=None, nonfinite={"accuracy": "nan"}))
    assert line.endswith("accuracy: nan %")


def test_every_event_is_one_line():
    said = []
    sink = ConsoleSink(said.append)
    for event in ("start", "compile", "checkpoint", "end", "profile"):
        sink.write(record(event, seconds=1.5))
    sink.write(record("warning", message="look out"))
    sink.write(record("resume"))
    sink.close()
    assert said == [
        "start: seconds: 1.5",
        "compile: seconds: 1.5",
        "checkpoint at update 781, epoch 1.00: seconds: 1.5",
        "end at update 781, epoch 1.00: seconds: 1.5",
        "profile at update 781, epoch 1.00: seconds: 1.5",
        "warning: look out",
        "resume at update 781, epoch 1.00",
    ]


def test_tensorboard_gets_the_curves(tmp_path):
    Event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(record(loss=1.25, flag=True, text="x", bad=None))
    sink.write(record("validation", accuracy=0.5))
    sink.write(record("compile", seconds=2.5))
    sink.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    data = path.read_bytes()
    assert path.name.startswith("events.out.tfevents")
    assert b"log/loss" in data
    assert b"validation/accuracy" in data
    assert not any(tag in data for tag in (b"flag", b"text", b"bad", b"seconds"))
    version, loss, accuracy = (read_record(path, *where, check=True) for where in index_records(path))
    assert Event.FromString(version).file_version == "brain.Event:2"
    point = Event.FromString(loss)
    assert (point.step, point.wall_time, point.summary.value[0].simple_value) == (781, 1.8e9, 1.25)
    assert Event.FromString(accuracy).summary.value[0].tag == "validation/accuracy"


def test_tensorboard_says_at_once_that_the_disk_is_full(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(record(loss=1.25))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        sink.write(record(loss=1.0))
    monkeypatch.undo()
    sink.close()


def test_tensorboard_needs_neither_thread_nor_folder_before_the_first_curve(tmp_path):
    pytest.importorskip("tensorboardX")
    threads = threading.active_count()
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(record("start", folder="x"))
    assert threading.active_count() == threads
    sink.close()
    assert not (tmp_path / "tensorboard").exists()


def without(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    without(monkeypatch, "tensorboardX")
    without(monkeypatch, "wandb")
    with pytest.raises(MissingExtra, match=r"hotloop\[tensorboard\]"):
        TensorBoardSink(tmp_path)
    with pytest.raises(MissingExtra, match=r"hotloop\[wandb\]"):
        WandbSink("project", "name", {}, tmp_path)


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, figures):
        self.logged.append(figures)

    def finish(self):
        self.finished = True


def fake_wandb(monkeypatch, reachable):
    calls, run = [], FakeRun()

    def init(**about):
        calls.append(about)
        if not reachable and about.get("mode") != "offline":
            raise RuntimeError("api_key not configured")
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls, run


def test_wandb_gets_the_curves_and_the_config(tmp_path, monkeypatch):
    calls, run = fake_wandb(monkeypatch, reachable=True)
    sink = WandbSink("hotloop", "a run", {"size": 4}, tmp_path, ["night"])
    sink.write(record(loss=1.25, note="x"))
    sink.write(record("checkpoint", seconds=1.0))
    sink.close()
    about = {"project": "hotloop", "name": "a run", "config": {"size": 4}, "dir": str(tmp_path)}
    assert calls == [{**about, "settings": {"init_timeout": 20}, "tags": ["night"]}]
    (figures,) = run.logged
    assert (figures["log/loss"], figures["update"]) == (1.25, 781) and "epoch" in figures
    assert run.finished


def test_wandb_goes_offline_when_its_service_is_out_of_reach(tmp_path, monkeypatch):
    calls, run = fake_wandb(monkeypatch, reachable=False)
    sink = WandbSink("hotloop", "a run", {}, tmp_path)
    sink.write(record(loss=1.0))
    assert [call.get("mode") for call in calls] == [None, "offline"]
    assert run.logged

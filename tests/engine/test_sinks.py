"""Every sink shows the same records; how they read on the console is in `test_sinks_lines`."""

import errno
import os
import sys
import threading
import types

import pytest

from hotloop.data.tfrecord import read_record
from hotloop.engine.sinks import FRAME, SHOWN, Announcer, ConsoleSink, TensorBoardSink, WandbSink
from hotloop.errors import MissingExtra
from records import index_records


def record(event="log", update=781, epoch=1.0, **figures):
    return {"event": event, "update": update, "epoch": epoch, "time": 1.8e9, "elapsed": 3.0, **figures}


def test_the_console_shows_what_people_follow_and_the_rest_where_it_is_asked_for():
    said, asked = [], []
    sink, other = ConsoleSink(said.append), ConsoleSink(asked.append, ("checkpoint",))
    hidden = ("checkpoint", "summary", "evaluation", "training", "time_to_train", "clean_dir")
    for event in (*SHOWN, *hidden):
        for each in (sink, other):
            each.write(record(event, seconds=1.5))
    sink.close()
    assert len(said) == len(SHOWN)
    assert [line for line in asked if line not in said] == [
        "checkpoint at update 781, epoch 1.00: seconds: 1.50000"
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
        WandbSink(project="project", name="name")


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
    about = {"project": "hotloop", "name": "a run", "config": {"size": 4}, "dir": str(tmp_path)}
    sink = WandbSink(**about, tags=["night"])
    sink.write(record(loss=1.25, note="x"))
    sink.write(record("checkpoint", seconds=1.0))
    sink.close()
    assert calls == [{**about, "settings": {"init_timeout": 20}, "tags": ["night"]}]
    (figures,) = run.logged
    assert (figures["log/loss"], figures["update"]) == (1.25, 781) and "epoch" in figures
    assert run.finished


def test_wandb_goes_offline_when_its_service_is_out_of_reach(tmp_path, monkeypatch):
    calls, run = fake_wandb(monkeypatch, reachable=False)
    sink = WandbSink(project="hotloop", name="a run", config={}, dir=str(tmp_path))
    sink.write(record(loss=1.0))
    assert [call.get("mode") for call in calls] == [None, "offline"]
    assert run.logged


# Records that are told and not kept.


class Kept:
    """A sink that remembers, and fails when it is told to."""

    patience = None

    def __init__(self, fails=False):
        self.records, self.fails, self.closed = [], fails, False

    def write(self, record):
        if self.fails:
            raise OSError("the disk is full")
        self.records.append(record)

    def close(self):
        self.closed = True


def test_sinks_see_every_record_and_one_that_fails_is_named_and_left_out():
    sink, broken = Kept(), Kept(fails=True)
    with Announcer([broken, sink]) as record:
        record.event("validation", update=6, epoch=1.0, loss=float("nan"))
        record.event("sweep", accuracy=0.5)
    warning, first, second = sink.records
    assert warning["message"] == "Kept failed and is off: the disk is full"
    assert (first["update"], first["epoch"], first["loss"], first["nonfinite"]) == (
        6,
        1.0,
        None,
        {"loss": "nan"},
    )
    assert second["accuracy"] == 0.5 and set(FRAME) - set(second) == {"nonfinite"}
    assert sink.closed and broken.closed


def test_two_sinks_that_fail_at_once_are_both_left_out():
    class Failing:
        patience = None
        written = 0

        def write(self, record):
            self.written += 1
            raise OSError("no network")

        def close(self):
            raise OSError("not even that")

    sinks = [Failing(), Failing()]
    with Announcer(sinks) as record:
        record.event("log", update=1, epoch=0.5, loss=0.5)
        record.event("log", update=2, epoch=1.0, loss=0.5)
    assert [sink.written for sink in sinks] == [1, 1]

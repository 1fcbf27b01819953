"""A run's folder: one process, one config, whole records, whatever kills it."""

import errno
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine import run as records
from hotloop.engine.run import (
    Run,
    check_can_make,
    check_makeable,
    current_records,
    default_path,
    read_events,
    take_folder,
)
from hotloop.errors import RunError
from hotloop.options import argument, option, to_jsonable
from hotloop.options.files import whole_file

CONFIG = {"size": 4, "rate": 0.1, "epochs": 2}
HERE = {"cores": 2, "jax": "0.10.2", "device_kinds": ["cpu"], "commit": "abc"}


def new_run(path, config=CONFIG, environment=HERE, **options):
    return Run(path, config, command="kernel dense", environment=environment, **options)


def events_of(path):
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (path / "events.jsonl").read_text().splitlines()
    ]


def test_a_run_leaves_its_config_environment_and_records(tmp_path):
    with new_run(tmp_path / "run") as run:
        returned = run.event("log", update=10, epoch=0.5, loss=1.25)
    start, log, end = events_of(run.path)
    assert json.loads((run.path / "config.json").read_text()) == CONFIG
    assert json.loads((run.path / "environment.json").read_text()) == HERE
    assert (start["event"], start["command"], start["resumed"]) == ("start", "kernel dense", False)
    assert log == returned
    assert (log["event"], log["update"], log["epoch"], log["loss"]) == ("log", 10, 0.5, 1.25)
    assert 0 <= log["elapsed"] < 60
    assert log["time"] > 1.7e9
    assert (end["event"], end["status"], end["update"], end["epoch"]) == ("end", "finished", 10, 0.5)


def test_a_record_is_of_the_place_that_the_training_has_reached_unless_it_says_another(tmp_path):
    with new_run(tmp_path) as run:
        run.event("log", update=10, epoch=0.5)
        run.reach(20, 1.0)
        run.event("evaluation", update=10, epoch=0.5, rmse=0.9)  # the best weights, which are older
        run.event("validation", update=99, epoch=5.0)  # those of another run
        run.event("sweep", found=3)
        for half in ({"update": 3}, {"epoch": 0.5}):
            with pytest.raises(ValueError, match="give both, or neither"):
                run.event("evaluation", **half)
    places = [(record["event"], record["update"], record["epoch"]) for record in events_of(tmp_path)]
    assert places == [
        ("start", 0, 0), ("log", 10, 0.5), ("evaluation", 10, 0.5), ("validation", 99, 5.0), ("sweep", 20, 1.0),
        ("end", 20, 1.0),
    ]  # fmt: skip


def test_the_environment_is_that_of_the_device_module_when_none_is_given(tmp_path):
    Run(tmp_path, CONFIG, command="x").close()
    assert "jax" in json.loads((tmp_path / "environment.json").read_text())


def test_records_are_strict_json_whatever_the_figures(tmp_path):
    with new_run(tmp_path) as run:
        run.event(
            "log",
            loss=jnp.float32(math.nan),
            norm=-math.inf,
            half=jnp.bfloat16(0.5),
            count=np.int64(3),
            share=Fraction(1, 3),
            losses=np.array([1.0, np.nan]),
            folder=Path("x"),
            none=None,
            on=True,
        )
    record = events_of(tmp_path)[1]
    assert record["nonfinite"] == {"loss": "nan", "norm": "-inf", "losses": "some"}
    assert record["loss"] is None
    assert record["norm"] is None
    assert record["losses"] == [1.0, None]
    assert (record["half"], record["count"], record["share"], record["folder"]) == (0.5, 3, "1/3", "x")
    assert (record["none"], record["on"]) == (None, True)


def test_a_figure_cannot_hide_what_every_record_has(tmp_path):
    with new_run(tmp_path) as run, pytest.raises(ValueError, match="elapsed"):
        run.event("log", elapsed=3)


def test_the_end_says_how_the_run_ended(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_run(tmp_path / "a"):
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), new_run(tmp_path / "b"):
        raise ZeroDivisionError("first\nsecond")
    assert events_of(tmp_path / "a")[-1]["status"] == "interrupted"
    assert events_of(tmp_path / "b")[-1]["status"] == "failed"
    assert events_of(tmp_path / "b")[-1]["error"] == "ZeroDivisionError: first"


def test_closing_twice_writes_one_end(tmp_path):
    with new_run(tmp_path) as run:
        run.close("interrupted", updates=3)
    ends = [record for record in events_of(tmp_path) if record["event"] == "end"]
    assert [(end["status"], end["updates"]) for end in ends] == [("interrupted", 3)]


def test_a_folder_with_a_run_is_refused_unless_resumed(tmp_path):
    new_run(tmp_path).close()
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(
        RunError, match=r"already holds a run \(config.json\): continue it with resume=True, or choose"
    ):
        new_run(tmp_path)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    new_run(tmp_path, resume=True).close()
    assert [record["event"] for record in events_of(tmp_path)] == ["start", "end", "start", "end"]


def test_there_must_be_something_to_resume(tmp_path):
    for path in (tmp_path, tmp_path / "not there"):
        with pytest.raises(RunError, match="nothing to resume"):
            new_run(path, resume=True)
    assert not (tmp_path / "not there").exists()


def test_resume_with_another_config_names_every_key_that_may_not_differ(tmp_path):
    new_run(tmp_path).close()
    other = {"size": 5, "epochs": 3, "rate": 0.1, "new": "x"}
    with pytest.raises(RunError, match="another config: new: absent -> x; size: 4 -> 5; use the old values"):
        new_run(tmp_path, other, resume=True, may_differ={"epochs"})
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    new_run(tmp_path, {**CONFIG, "epochs": 3}, resume=True, may_differ={"epochs"}).close()
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == 3
    assert "epochs: 2 -> 3" in events_of(tmp_path)[-2]["message"]


def test_of_many_differences_a_refusal_names_the_first(tmp_path):
    new_run(tmp_path).close()
    with pytest.raises(RunError, match=r"a07: absent -> 7 and 15 more; use the old values") as found:
        new_run(tmp_path, {f"a{number:02}": number for number in range(20)}, resume=True)
    assert len(str(found.value)) < 400


def test_a_config_equals_itself_after_a_trip_through_json(tmp_path):
    config = {"groups": (1, 2), "period": Fraction(1, 2), "path": Path("a"), "none": None}
    new_run(tmp_path, config).close()
    new_run(tmp_path, config, resume=True).close()
    assert "warning" not in {record["event"] for record in events_of(tmp_path)}


def test_resume_warns_when_what_sums_depend_on_differs(tmp_path):
    new_run(tmp_path).close()
    new_run(tmp_path, environment={**HERE, "cores": 8, "jax": "0.11.2", "commit": "def"}, resume=True).close()
    messages = [record["message"] for record in events_of(tmp_path) if record["event"] == "warning"]
    assert len(messages) == 2
    assert "cores: 2 -> 8" in messages[0]
    assert "jax: 0.10.2 -> 0.11.2" in messages[1]


def test_a_torn_last_line_is_read_over_and_repaired_at_resume(tmp_path):
    new_run(tmp_path).close()
    path = tmp_path / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "log", "upd')
    assert [record["event"] for record in read_events(tmp_path)] == ["start", "end"]
    new_run(tmp_path, resume=True).close()
    assert path.read_bytes().startswith(whole)
    assert [record["event"] for record in read_events(path)] == ["start", "end", "start", "warning", "end"]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    new_run(tmp_path).close()
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"what\n" + path.read_bytes())
    with pytest.raises(RunError, match=r"events\.jsonl line 1"):
        list(read_events(tmp_path))
    with pytest.raises(RunError, match="cannot be read"):
        list(read_events(tmp_path / "nowhere"))


def test_what_was_run_again_after_a_resume_counts_once(tmp_path):
    with new_run(tmp_path) as run:
        for update in (1, 2, 3):
            run.event("log", update=update, epoch=update / 4, loss=float(update))
    with new_run(tmp_path, resume=True) as run:
        run.event("resume", update=2, epoch=0.5)
        run.event("log", update=3, epoch=0.75, loss=30.0)
    logs = [record for record in current_records(read_events(tmp_path)) if record["event"] == "log"]
    assert [(record["update"], record["loss"]) for record in logs] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_second_run_on_the_folder_is_refused_with_the_process_that_holds_it(tmp_path):
    with new_run(tmp_path), pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        new_run(tmp_path, resume=True)


CHILD = """
    import sys
    from hotloop.engine.run import Run
    config = {"size": 4, "rate": 0.1, "epochs": 2}
    run = Run(sys.argv[1], config, command="x", environment={"cores": 2})
    print("held", flush=True)
    update = 0
    while True:
        update += 1
        run.event("log", update=update, epoch=1.0, loss=0.5)
"""


def test_a_killed_process_leaves_whole_records_and_no_lock(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"in use by process {child.pid}"):
        new_run(tmp_path, resume=True)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    logs = [record["update"] for record in read_events(tmp_path) if record["event"] == "log"]
    assert logs == list(range(1, len(logs) + 1))
    new_run(tmp_path, resume=True, environment={"cores": 2}).close()


class Killed(BaseException):
    pass


class Kill:
    """Lets a process make some system calls and none after them, as a kill does."""

    CALLS = ("mkdir", "open", "write", "pwrite", "ftruncate", "truncate", "fsync", "replace", "unlink")

    def __init__(self, monkeypatch, calls):
        self.left = calls
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call):
        def counted(*words, **options):
            if self.left <= 0:
                raise Killed
            self.left -= 1
            return call(*words, **options)

        return counted


def kill_after(calls, monkeypatch, work):
    """Whether the work was killed after so many system calls."""
    with monkeypatch.context() as patched:
        Kill(patched, calls)
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("next_try", ["start", "resume"])
@pytest.mark.parametrize("there_before", [False, True])
def test_a_kill_at_any_moment_leaves_a_folder_that_can_start_or_resume(
    tmp_path, monkeypatch, there_before, next_try
):
    moments = 0
    while True:
        path = tmp_path / f"{moments:02d}"
        if there_before:
            path.mkdir()
        if not kill_after(moments, monkeypatch, lambda: new_run(path)):  # noqa: B023
            break
        try:
            run = new_run(path, resume=next_try == "resume")
        except RunError as error:
            other = {"start": "continue it with resume=True", "resume": "leave out resume=True"}
            assert other[next_try] in str(error), moments
            run = new_run(path, resume=next_try != "resume")
        run.close()
        assert {file.name for file in path.iterdir()} == {
            ".lock",
            "config.json",
            "environment.json",
            "events.jsonl",
        }
        assert [record["event"] for record in events_of(path)][-2:] == ["start", "end"]
        new_run(path, resume=True).close()
        moments += 1
    assert moments > 8


def test_a_kill_at_any_moment_of_a_resume_leaves_a_folder_that_resumes(tmp_path, monkeypatch):
    moments = 0
    while True:
        path = tmp_path / f"{moments:02d}"
        with new_run(path) as run:
            run.event("log", update=1, epoch=0.5, loss=0.5)
        with (path / "events.jsonl").open("a") as file:
            file.write("torn")
        if not kill_after(moments, monkeypatch, lambda: new_run(path, resume=True)):  # noqa: B023
            break
        with pytest.raises(RunError, match="already holds a run"):
            new_run(path)
        new_run(path, resume=True).close()
        assert [record["event"] for record in events_of(path)][:3] == ["start", "log", "end"]
        assert not list(path.glob(".*.part"))
        moments += 1
    assert moments > 5


def test_a_folder_with_checkpoints_but_no_records_is_no_kill_and_stays(tmp_path):
    new_run(tmp_path).close()
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunError, match=r"already holds a run \(config.json\)"):
        new_run(tmp_path)


def test_a_folder_left_between_config_and_environment_by_an_older_version_resumes_and_starts(tmp_path):
    for resume in (True, False):
        path = tmp_path / str(resume)
        path.mkdir()
        records.write_json(path / "config.json", CONFIG)
        new_run(path, resume=resume).close()
        assert records.read_json(path / "environment.json") == HERE
        assert [record["event"] for record in events_of(path)] == ["start", "end"]


def test_a_run_without_its_environment_resumes_with_a_warning(tmp_path):
    new_run(tmp_path).close()
    (tmp_path / "environment.json").unlink()
    new_run(tmp_path, resume=True).close()
    (warning,) = [record["message"] for record in events_of(tmp_path) if record["event"] == "warning"]
    assert "environment.json was gone" in warning


def test_a_full_disk_is_one_line_and_leaves_no_parts(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("write", "pwrite", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, full)
            if call == "pwrite":
                new_run(tmp_path / call).close()  # the holder's number is a courtesy
            else:
                with pytest.raises(RunError, match=r"cannot write in .*No space left on device"):
                    new_run(tmp_path / call)
        assert not list((tmp_path / call).glob(".*.part"))
    new_run(tmp_path / "write").close()


def test_a_file_size_limit_is_not_called_a_full_disk(tmp_path, monkeypatch):
    with new_run(tmp_path) as run, monkeypatch.context() as patched:
        write, parts = os.write, []

        def limited(file, data):
            if parts:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            parts.append(data)
            return write(file, data[:5])  # as a limit lets the first part through

        patched.setattr(os, "write", limited)
        with pytest.raises(RunError, match=r"cannot write .*events.jsonl: File too large"):
            run.event("log", update=1, epoch=0.5, loss=0.5)
    assert [record["event"] for record in events_of(tmp_path)] == ["start", "end"]


def test_the_error_that_ends_a_run_is_told_even_where_its_end_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    good = Collecting()
    with pytest.raises(ZeroDivisionError), new_run(tmp_path, sinks=[good]):
        monkeypatch.setattr(os, "write", full)
        raise ZeroDivisionError
    monkeypatch.undo()
    assert good.closed
    new_run(tmp_path, resume=True).close()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot make the run folder .*Not a directory; choose another one"):
        new_run(tmp_path / "file" / "run")


@pytest.mark.parametrize("check", [check_makeable, lambda path: take_folder(path, resume=False)])
def test_a_folder_whose_name_checkpoints_could_not_write_is_refused_at_once(check, tmp_path):
    with pytest.raises(RunError, match="no UTF-8 text"):
        check(tmp_path / "run\udcff")
    assert not list(tmp_path.iterdir())


def test_a_refused_run_lets_go_of_the_folder(tmp_path):
    new_run(tmp_path).close()
    with pytest.raises(RunError, match="already holds"):
        new_run(tmp_path)
    new_run(tmp_path, resume=True).close()


class Collecting:
    patience = 5.0

    def __init__(self, fails=False):
        self.records, self.closed, self.fails = [], False, fails

    def write(self, record):
        if self.fails:
            raise OSError("no network")
        self.records.append(record)

    def close(self):
        self.closed = True


def test_sinks_see_the_records_that_are_on_disk_and_a_failing_one_costs_nothing(tmp_path):
    good, bad = Collecting(), Collecting(fails=True)
    with new_run(tmp_path, sinks=[bad, good]) as run:
        run.event("log", update=1, epoch=1.0, loss=0.5)
    assert sorted(map(json.dumps, good.records)) == sorted(map(json.dumps, events_of(tmp_path)))
    warnings = [record for record in events_of(tmp_path) if record["event"] == "warning"]
    assert [record["message"] for record in warnings] == ["Collecting failed and is off: no network"]
    assert good.closed


class Stuck(Collecting):
    """Answers never to what it is told; a thread that waits for it can only be left behind."""

    def __init__(self, in_what):
        super().__init__()
        self.in_what, self.threads = in_what, []
        self.patience = 60.0  # for what it does answer to, however busy the machine is

    def write(self, record):
        if self.in_what == "write" and record["event"] == "log":
            self._hang()
        if record["event"] == {"write": "start", "close": "end"}[self.in_what]:
            self.patience = 0.05
        super().write(record)

    def close(self):
        if self.in_what == "close":
            self._hang()
        super().close()

    def _hang(self):
        self.threads.append(threading.current_thread())
        assert threading.current_thread() is not threading.main_thread(), "the run itself would hang"
        threading.Event().wait()


@pytest.mark.parametrize("in_what", ["write", "close"])
def test_a_stuck_sink_is_left_behind_and_named_once_while_the_run_goes_on(tmp_path, in_what):
    stuck, good = Stuck(in_what), Collecting()
    with new_run(tmp_path, sinks=[stuck, good]) as run:
        for update in (1, 2, 3):
            run.event("log", update=update, epoch=update / 2, loss=0.5)
    records = events_of(tmp_path)
    assert [record["update"] for record in records if record["event"] == "log"] == [1, 2, 3]
    warnings = [record["message"] for record in records if record["event"] == "warning"]
    assert warnings == ["Stuck failed and is off: no answer in 0.05 seconds"]
    assert [(end["update"], end["epoch"]) for end in records if end["event"] == "end"] == [(3, 1.5)]
    assert good.closed
    assert [thread.daemon for thread in stuck.threads] == [True]  # so that the process can leave


def test_a_sink_that_fails_to_close_is_named_and_the_folder_is_free_again(tmp_path):
    class Failing(Collecting):
        def close(self):
            raise OSError(28, "No space left on device")

    good = Collecting()
    new_run(tmp_path, sinks=[Failing(), good]).close()
    assert (
        events_of(tmp_path)[-1]["message"] == "Failing failed and is off: [Errno 28] No space left on device"
    )
    assert good.closed
    new_run(tmp_path, resume=True).close()


def test_two_sinks_that_fail_at_once_are_both_switched_off(tmp_path):
    with new_run(tmp_path, sinks=[Collecting(fails=True), Collecting(fails=True)]) as run:
        run.event("log", update=1, epoch=0.5, loss=0.5)
    assert [record["event"] for record in events_of(tmp_path)] == [
        "start",
        "warning",
        "warning",
        "log",
        "end",
    ]


def test_a_warning_of_a_sink_does_not_move_the_run_back(tmp_path):
    bad = Collecting()
    with new_run(tmp_path, sinks=[bad]) as run:
        bad.fails = True
        run.event("log", update=7, epoch=3.5, loss=0.5)
    warning, end = events_of(tmp_path)[-2:]
    assert (warning["event"], warning["update"], end["update"], end["epoch"]) == ("warning", 7, 7, 3.5)


def test_a_sink_with_patience_lives_in_one_thread_that_ends_with_it(tmp_path):
    class Bound(Collecting):
        def write(self, record):
            self.records.append(threading.current_thread())

        def close(self):
            self.write(None)

    sink = Bound()
    with new_run(tmp_path, sinks=[sink]) as run:
        run.event("log", update=1, epoch=1.0)
        run.event("log", update=2, epoch=1.0)
    assert len(sink.records) >= 3
    assert len(set(sink.records)) == 1
    sink.records[0].join(60)
    assert not sink.records[0].is_alive()


def test_records_from_several_threads_are_whole_lines(tmp_path):
    with new_run(tmp_path) as run:
        write = lambda: [run.event("log", update=n, epoch=0.0, text="x" * 500) for n in range(50)]  # noqa: E731
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events_of(tmp_path)) == 202


def test_default_folders_carry_family_time_and_an_id_of_their_own():
    one, two = default_path("kernel dense"), default_path("kernel dense")
    assert re.fullmatch(r"results/kernel-dense-\d{8}-\d{6}-[0-9a-f]{8}", str(one))
    assert one != two


def test_a_file_that_cannot_be_finished_vanishes_and_is_named(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, whole_file(tmp_path / "x") as part:
        part.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_in_one_piece(tmp_path):
    path = tmp_path / "config.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="a function has no JSON form"):
        records.write_json(path, {"a": lambda: 0})
    assert records.read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_value_becomes_strict_json(value):
    json.dumps(to_jsonable(value), allow_nan=False)


def test_that_a_run_is_resumed_is_no_other_config(tmp_path):
    for resume in (False, True):
        config = {"resume": resume, "seed": 1}
        Run(tmp_path, config, command="x", resume=resume, may_differ=("resume",), environment={}).close()
    assert [record["event"] for record in read_events(tmp_path)] == ["start", "end"] * 2


def test_a_folder_that_could_not_be_made_is_known_before(tmp_path, monkeypatch):
    check_can_make(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        check_can_make(tmp_path / "file" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="Permission denied"):
        check_can_make(tmp_path / "a")


@dataclass(frozen=True)
class LaterOptions:
    data: str = argument("There from the start, and never left out.")
    size: int = option(4, "There from the start.")
    shape: tuple[int, ...] = option((1, 2), "Came later.")


def test_an_option_that_an_old_config_lacks_was_at_its_default(tmp_path):
    new_run(tmp_path, {"data": "x", "size": 4, "gone": 1}).close()
    for shape, gone, wrong in (
        ((1, 3), {"gone": 1}, r"shape: \[1, 2\] -> \[1, 3\]; use"),
        ((1, 2), {}, "gone: 1 -> absent; use"),
    ):
        config = {"data": "x", "size": 4, "shape": shape, **gone}
        with pytest.raises(RunError, match=f"cannot resume with another config: {wrong}"):
            new_run(tmp_path, config, resume=True, options=LaterOptions)
    config = {"data": "x", "size": 4, "shape": (1, 2), "gone": 1}
    with pytest.raises(RunError, match=r"shape: absent -> \[1, 2\]"):
        new_run(tmp_path, config, resume=True)
    new_run(tmp_path, config, resume=True, options=LaterOptions).close()
    assert "warning" not in [record["event"] for record in read_events(tmp_path)]


def test_what_hotloop_logs_while_a_run_is_open_is_on_its_record(tmp_path):
    log = logging.getLogger("hotloop.something")
    log.warning("before")
    with Run(tmp_path / "run", CONFIG, command="x", environment=HERE):
        log.warning("slow: %s", "install it")
        log.info("nothing to miss")
    log.warning("after")
    messages = [each["message"] for each in read_events(tmp_path / "run") if each["event"] == "warning"]
    assert messages == ["slow: install it"]

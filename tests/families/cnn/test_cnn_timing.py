"""Time to train over several processes of a run, from records alone."""

import json

import pytest

from hotloop.engine.run import Run, read_events
from hotloop.families.cnn.timing import TrainingClock, seconds_of_processes, time_in_words


def records(*pairs):
    return [{"event": event, "elapsed": elapsed} for event, elapsed in pairs]


def test_a_process_counts_from_its_clock_to_its_last_record():
    first = records(("start", 0.0), ("compile", 7.0), ("training", 8.0), ("log", 20.0), ("end", 25.0))
    killed = records(("start", 0.0), ("training", 1.0), ("log", 4.5))
    no_training = records(("start", 0.0), ("compile", 3.0), ("end", 9.0))
    last = records(("start", 0.0), ("training", 2.0))
    assert seconds_of_processes([*first, *killed, *no_training, *last]) == [17.0, 3.5, 0.0]


def test_the_clock_goes_on_where_earlier_processes_left_it(tmp_path):
    with Run.create(tmp_path / "run", {}, command="", environment={}):
        pass
    with (tmp_path / "run" / "events.jsonl").open("a") as lines:
        for event, elapsed in (("start", 0.0), ("training", 10.0), ("log", 3610.0)):
            print(json.dumps({"event": event, "update": 0, "epoch": 0.0, "elapsed": elapsed}), file=lines)
    with Run.create(tmp_path / "run", {}, command="", environment={}, resume=True) as record:
        figures = TrainingClock.start(record).stop(record, 18, 3.0)
    assert 3600 <= figures["time_to_train_seconds"] < 3630 and figures["time_to_train_processes"] == 2
    (event,) = [each for each in read_events(tmp_path / "run") if each["event"] == "time_to_train"]
    assert (event["processes"], event["update"]) == (2, 18)
    assert event["seconds"] == figures["time_to_train_seconds"]


@pytest.mark.parametrize(
    ("seconds", "processes", "text"),
    [(59.6, 1, "time to train: 0:01:00"), (7325.0, 3, "time to train: 2:02:05, in 3 processes")],
)
def test_the_time_is_told_in_hours_and_how_many_processes(seconds, processes, text):
    assert time_in_words({"time_to_train_seconds": seconds, "time_to_train_processes": processes}) == text

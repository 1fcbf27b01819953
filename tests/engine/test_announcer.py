"""Records that are told and not kept: as a run's, and a sink that fails is left out."""

from hotloop.engine.records import FRAME
from hotloop.engine.sinks import Announcer


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

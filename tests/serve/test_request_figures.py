"""Figures of a load are arithmetic: latencies, percentiles and throughput by a clock that only the answers move."""

import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from fake_models import ROWS, Signature, Tensor

from hotloop.serve.client import RemoteModel, Reply, ServerError
from hotloop.serve.load import Load, Sender, make_batches

MODEL = RemoteModel("m", None, ROWS)
WARM_UP = 7.0


class FakeTime:
    """In place of `time`: it stands still but for sleeps and what a test adds."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr("hotloop.serve.load.time", fake)
    return fake


class Delayed:
    """A client each of whose answers takes as many seconds as the list says, after one that warms up."""

    def __init__(self, clock, delays, refusals=()):
        self._clock, self._refusals = clock, list(refusals)
        self._delays = iter([WARM_UP, *delays])

    def infer(self, model, inputs, protocol):
        seconds = next(self._delays)
        self._clock.now += seconds
        if seconds in self._refusals:
            raise ServerError("full", 429, retry_after=0.5)
        return Reply({"y": inputs["x"]}, seconds, {"queue": seconds / 8, "compute": seconds / 2})


def send(clock, delays, load, **more):
    client = nullcontext(Delayed(clock, delays, **more))
    batches = [{"x": np.ones((load.batch_size, 3), np.float32)}]
    told = []
    sender = Sender(lambda: client, MODEL, load, batches)
    sender._is_gone.wait = clock.sleep  # until a request is due
    outcome = sender.run(told.append)
    assert sum(told) == outcome.answered
    return outcome


def test_percentiles_and_throughput_are_those_of_the_known_delays(clock):
    delays = [n / 1000 for n in range(1, 101)]
    outcome = send(clock, delays, Load(batch_size=4, images=400))
    found = outcome.as_dict()
    assert (found["sent"], found["answered"], found["failures"]) == (400, 400, 0)
    assert found["seconds"] == pytest.approx(5.05)  # 1 + 2 + ... + 100 ms, without the warm-up
    assert found["throughput"] == pytest.approx(400 / 5.05)
    total = {"p50": 50.5, "p90": 90.1, "p99": 99.01, "max": 100.0}  # linear between neighbours
    shares = {"total": 1, "queue": 1 / 8, "compute": 1 / 2, "rest": 3 / 8}
    assert found["latency_ms"].keys() == shares.keys()
    for phase, share in shares.items():
        assert found["latency_ms"][phase] == pytest.approx({q: ms * share for q, ms in total.items()})


def test_in_an_open_loop_a_latency_counts_from_when_the_request_was_due(clock):
    outcome = send(clock, [0.15] * 5, Load(images=5, rate=10.0))
    assert outcome.latencies["total"] == pytest.approx([0.15, 0.20, 0.25, 0.30, 0.35])
    assert outcome.latencies["late"] == pytest.approx([0.0, 0.05, 0.10, 0.15, 0.20])
    assert outcome.latencies["rest"] == pytest.approx([0.15 * 3 / 8] * 5)
    quick = send(clock, [0.05] * 5, Load(images=5, rate=10.0))
    assert quick.latencies["total"] == pytest.approx([0.05] * 5)
    assert quick.seconds == pytest.approx(0.45)


def test_a_pause_after_a_refusal_is_part_of_the_latency(clock):
    outcome = send(clock, [0.01, 0.02, 0.01, 0.03], Load(images=2), refusals=[0.01])
    assert outcome.latencies["total"] == pytest.approx([0.53, 0.54])
    assert (outcome.retries, outcome.answered, outcome.throughput) == (2, 2, pytest.approx(2 / 1.07))


def test_failures_count_as_sent_and_never_as_throughput(clock):
    outcome = send(clock, [0.5, 0.25, 0.25], Load(batch_size=2, images=8))
    # The list is at its end before the fourth request.
    assert (outcome.sent, outcome.answered, outcome.throughput) == (8, 6, 6.0)
    assert outcome.as_dict()["reasons"] == {"StopIteration: ": 1}


def test_of_a_load_that_is_broken_off_the_figures_are_those_until_then(clock, monkeypatch):
    monkeypatch.setattr("hotloop.serve.load.LOOK", 0.01)
    hangs, goes_on, has_ended = threading.Event(), threading.Event(), threading.Event()

    class Hanging(Delayed):
        left = 4  # the one that warms up, and three more

        def infer(self, model, inputs, protocol):
            self.left -= 1
            if self.left < 0:
                hangs.set()
                goes_on.wait(10)
                has_ended.set()
            return super().infer(model, inputs, protocol)

    def stop(rows):
        assert hangs.wait(10)
        raise KeyboardInterrupt

    client = nullcontext(Hanging(clock, [0.5] * 9))
    sender = Sender(lambda: client, MODEL, Load(images=9), [{"x": np.ones((1, 3), np.float32)}])
    with pytest.raises(KeyboardInterrupt):
        sender.run(stop)
    found = sender.outcome
    assert (found.sent, found.answered, found.seconds, found.throughput) == (4, 3, 1.5, 2.0)
    goes_on.set()
    assert has_ended.wait(10)
    time.sleep(0.02)
    assert (found.sent, found.answered, found.failures, found.answers) == (4, 3, [], 3)


def test_images_are_sent_in_turn_beside_rows_of_the_examples():
    signature = Signature((Tensor("image", "UINT8", (-1, 2)), Tensor("seed", "INT32", (-1,))), ())
    images = np.arange(10, dtype=np.uint8).reshape(5, 2)
    examples = {"image": np.zeros((3, 2), np.uint8), "seed": np.array([7, 8, 9], np.int32)}
    batches = make_batches(signature, 3, examples, images)
    sent = np.concatenate([batch["image"] for batch in batches])
    assert (sent == images[np.arange(len(sent)) % 5]).all()
    assert {int(seed) for batch in batches for seed in batch["seed"]} <= {7, 8, 9}
    with pytest.raises(Exception, match=r"its images are \(3,\), and the model's image \(2,\)"):
        make_batches(signature, 3, examples, np.zeros((5, 3), np.uint8))

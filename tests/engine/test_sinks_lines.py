"""Every family's records as lines: the same order, names, widths and units, and what old patterns read in them."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine.sinks import console_line, format_fixed

# As the benchmark files of the older programs have them.
THROUGHPUT = r"throughput: *(.*?) samples\/sec"
ACCURACY = r"accuracy: *(.*?) \%"
LOSS = r"loss: *(\d*\.\d*)"
TIME = r"Time taken: *(.*?),"


def record(event="log", update=781, epoch=1.0, **figures):
    return {"event": event, "update": update, "epoch": epoch, "time": 1.8e9, "elapsed": 3.0, **figures}


def found(pattern, text):
    (value,) = re.findall(pattern, text)
    return float(value)


VCD = {
    "acceptance": 0.85625, "control_variate": 140.627293, "elbo": -884.157, "f": 362.226638, "learning_rate": 0.0005,
    "log_joint_z0": -880.919, "log_joint_zt": -676.855, "loss": 36.2235416, "step_size": 0.0480921,
    "throughput": 3407.1, "seconds_per_10000_updates": 293.505,
}  # fmt: skip
RECOMMENDER = {
    "gradient_norm": 6.86209, "learning_rate": 2**-10, "loss": 12.6822, "rmse": 3.36636, "throughput": 277758.25,
}  # fmt: skip
CNN = {
    "learning_rate": 0.1, "loss": 2.3026, "training_accuracy": 0.1, "throughput": 5120.5, "memory_gib": 1.25,
    "mfu": 0.4115,
}  # fmt: skip
ESTIMATOR = {"accuracy": 1.0, "learning_rate": 0.01, "loss": 0.012345678, "throughput": 98.76}


@pytest.mark.parametrize(
    ("update", "epoch", "figures", "line"),
    [
        (10, 0.02, VCD,
         "update 10, epoch 0.02:        loss:    36.2235, acceptance:  85.62 %, control variate:    140.627, "
         "ELBO:   -884.157, f:    362.227, log joint z0:   -880.919, log joint zt:   -676.855, "
         "step size:  0.0480921, learning rate:  0.0005000, Time taken:    293.505, for 10,000 updates, "
         "throughput:    3407.10 samples/sec, "
         "time: 0:00:03"),
        (2198, 149.2, RECOMMENDER,
         "update 2,198, epoch 149.20:   loss:    12.6822, gradient norm:    6.86209, RMSE:    3.36636, "
         "learning rate:  0.0009766, throughput:   277758.2 samples/sec, time: 0:00:03"),
        (781, 1.0, CNN,
         "update 781, epoch 1.00:       loss:    2.30260, training accuracy:  10.00 %, learning rate:     0.1000, "
         "throughput:    5120.50 samples/sec, memory:    1.25000 GiB, MFU:  41.15 %, time: 0:00:03"),
        (200, 0.5, ESTIMATOR,
         "update 200, epoch 0.50:       loss:  0.0123457, accuracy: 100.00 %, learning rate:    0.01000, "
         "throughput:    98.7600 samples/sec, time: 0:00:03"),
    ],
)  # fmt: skip
def test_a_log_of_each_family_reads_in_the_same_order_with_the_same_names(update, epoch, figures, line):
    assert console_line(record(update=update, epoch=epoch, **figures)) == line


@given(
    st.integers(1, 999_999),
    st.floats(0.01, 999.99),
    st.floats(0.001, 1e7) | st.floats(-1e6, -0.01),
    st.floats(0, 1),
    st.floats(1e-5, 10),
    st.floats(1, 1e7),
)
def test_the_lines_of_a_log_stand_under_each_other(update, epoch, loss, accuracy, rate, throughput):
    line = console_line(
        record(
            update=update,
            epoch=epoch,
            loss=loss,
            accuracy=accuracy,
            learning_rate=rate,
            throughput=throughput,
        )
    )
    usual = console_line(record(loss=1.0, accuracy=0.5, learning_rate=0.1, throughput=1e3))
    names = ("loss", "accuracy", "learning rate", "throughput", "time")
    assert [line.index(name) for name in names] == [usual.index(name) for name in names]


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("start: results/first", record("start", command="x", folder="results/first", resumed=False)),
        ("start: results/first, resumed", record("start", command="x", folder="results/first", resumed=True)),
        ("compiled in 8.9 s, calls of 10,000 updates",
         record("compile", updates_per_call=10_000, lower_seconds=0.558869, compile_seconds=8.31137)),
        ("compiled evaluation in 35.5 s",
         record("compile", program="evaluation", lower_seconds=0.5, compile_seconds=35)),
        ("resume at update 1,526, epoch 103.57", record("resume", 1526, 103.567)),
        ("validation at update 1,526, epoch 103.57: validation RMSE: 0.926734, validation ratings: 5,146",
         record("validation", 1526, 103.567, validation_rmse=0.926734, validation_ratings=5146)),
        ("validation at update 60, epoch 0.12: test ELBO: -1478.34",
         record("validation", 60, 0.12, test_elbo=-1478.342)),
        ("validation at update 781, epoch 1.00: validation loss 2.50000, validation accuracy: 50.00 %, "
         "validation top 5: 91.25 %, samples: 10,000",
         record("validation", validation_accuracy=0.5, validation_top_5=0.9125, validation_loss=2.5, samples=10_000)),
        ("checkpoint at update 781, epoch 1.00: seconds: 1.50000", record("checkpoint", seconds=1.5)),
        ("profile at update 781, epoch 1.00: updates: 14, folder: x", record("profile", updates=14, folder="x")),
        ("warning: look out", record("warning", message="look out")),
        ("end at update 2,198, epoch 149.20: status: finished", record("end", 2198, 149.2, status="finished")),
        ("evaluation all at update 10: loss 0.500000, samples: 32",
         {"event": "evaluation all", "update": 10, "loss": 0.5, "samples": 32}),
    ],
)  # fmt: skip
def test_every_other_record_is_one_plain_line(line, given):
    assert console_line(given) == line


def test_the_old_patterns_find_their_figures():
    line = console_line(record(loss=1.25, training_accuracy=0.4567, throughput=5120.5, learning_rate=1e-5))
    assert found(THROUGHPUT, line) == 5120.5
    assert found(ACCURACY, line) == pytest.approx(45.67, abs=1e-9)
    assert found(LOSS, line) == 1.25
    assert found(TIME, console_line(record(**VCD))) == 293.505
    validation = console_line(record("validation", accuracy=1))
    assert found(ACCURACY, validation) == 100.0
    assert validation.startswith("validation at update 781")


def test_the_old_patterns_find_nothing_that_they_do_not_mean():
    """The last loss that is read is the training's, the last accuracy a checkpoint's, every throughput a log's."""
    validation = console_line(
        record("validation", validation_accuracy=0.5, validation_loss=2.5, throughput=9.0)
    )
    assert re.findall(LOSS, validation) == re.findall(THROUGHPUT, validation) == []
    assert found(ACCURACY, validation) == 50
    assert re.findall(ACCURACY, console_line(record("sweep", target_accuracy=0.759))) == []


@given(st.floats(1e-12, 1e12))
def test_any_loss_and_throughput_is_found_with_six_digits(value):
    line = console_line(record(loss=value, throughput=value, seconds_per_10000_updates=value))
    for pattern in (LOSS, THROUGHPUT, TIME):
        assert found(pattern, line) == pytest.approx(value, rel=1e-5)


def test_numbers_never_have_an_exponent():
    assert [format_fixed(x) for x in (0.0, 3.0, 0.4, -1.5e-7, 123456789.0)] == [
        "0.00000",
        "3.00000",
        "0.400000",
        "-0.000000150000",
        "123456789.0",
    ]
    assert format_fixed(math.nan) == "nan"


def test_figures_that_are_not_finite_are_shown_and_lists_are_not():
    line = console_line(
        record(loss=None, nonfinite={"loss": "nan"}, losses=[1.0, 2.0], accuracy=None, note="ok")
    )
    assert line == "update 781, epoch 1.00:       loss:        nan, note:         ok, time: 0:00:03"
    line = console_line(record(accuracy=None, nonfinite={"accuracy": "nan"}))
    assert "accuracy:    nan %" in line


def test_a_time_is_hours_minutes_and_seconds():
    for seconds, clock in ((0.4, "0:00:00"), (59.9, "0:00:59"), (3599, "0:59:59"), (90061, "25:01:01")):
        record = {"event": "log", "update": 1, "epoch": 0.5, "elapsed": seconds, "loss": 1.0}
        assert console_line(record).endswith(f", time: {clock}")

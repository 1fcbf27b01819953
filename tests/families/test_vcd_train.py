"""What `hotloop vcd train` says of its speed: a wrong factor must not pass."""

import re

import pytest

from hotloop.engine.sinks import console_line
from hotloop.families.vcd.train import log_pace


@pytest.mark.parametrize(
    ("batch_size", "images_per_second", "seconds"), [(100, 2500.0, 400.0), (16, 64_000.0, 2.5), (1, 1.0, 1e4)]
)
def test_a_log_says_how_long_10000_updates_take_and_its_line_prints_that(
    batch_size, images_per_second, seconds
):
    throughput = {"throughput": images_per_second}
    figures = throughput | log_pace(batch_size)(None, throughput)
    assert figures["seconds_per_10000_updates"] == pytest.approx(seconds)
    line = console_line({"event": "log", "update": 7, "epoch": 0.1, "elapsed": 3.0, **figures})
    (printed,) = re.findall(r"Time taken: *(.*?), for 10,000 updates", line)
    assert float(printed) == pytest.approx(seconds)


def test_a_log_without_a_speed_says_nothing_of_10000_updates():
    assert log_pace(100)(None, {"throughput": 0.0}) == {}

"""Two processes with two devices each compute what one device computes: figures, photographs, groups of replicas."""

from pathlib import Path

import numpy as np
import pytest
from cnn_in_processes import BATCHES, everything

from pictures import image_folder
from same_numbers import assert_close, assert_seen
from started_processes import run_together

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("cnn_in_processes.py")
LIMIT = 120.0


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What one device finds, and two processes with two devices each."""
    pytest.importorskip("PIL")
    parts = {"train": {"a": 4, "b": 3}, "validation": {"a": 3, "b": 2}}
    folder = image_folder(tmp_path_factory.mktemp("photographs"), parts)
    alone, together = everything(folder, 1), run_together(PROGRAM, folder, devices=2, limit=LIMIT)
    assert (alone["processes"], together["processes"]) == (1, 2)
    return alone, together


def test_validation_over_processes_counts_every_image_once(both):
    alone, together = both
    assert together["counts"] == alone["counts"]
    *whole, few = together["counts"]
    assert [each["samples"] for each in whole] == [50_000] * len(BATCHES) and few["samples"] == 3
    assert all(each["right"] > 1000 and each["label"] > 1000 for each in whole) and few["label"] > 0


def test_each_photograph_is_decoded_by_one_process_and_all_see_the_same_batch(both):
    alone, together = (each["photographs"] for each in both)
    for name in ("second", "samples", "labels"):
        assert together[name] == alone[name]
    assert together["samples"] == 5 and len(together["labels"]) == 4
    assert together["pixels"] == alone["pixels"] > 0  # bytes: not a bit differs
    assert together["bright"] == pytest.approx(alone["bright"], rel=1e-6) and alone["bright"] > 0
    (whole,), shares = alone["decoded"], together["decoded"]
    assert sorted(map(tuple, whole)) == sorted(tuple(each) for share in shares for each in share)
    assert len(whole) == 9 and {len([each for each in share if each[0] == "train"]) for share in shares} == {
        2
    }


def test_of_processes_that_share_stages_the_first_decodes_and_all_train_as_one_device(both):
    """Process 1 has the last two of four stages: it reads labels, and images that nobody looks at are zeros."""
    alone, together = (each["staged"] for each in both)
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=1e-5)
    assert np.isfinite(alone["losses"]).all() and min(alone["losses"]) > 0
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5) and together["samples"] == 5
    assert together["correct"] == alone["correct"]
    (whole,), shares = alone["decoded"], together["decoded"]
    assert (
        sorted(map(tuple, shares[0])) == sorted(map(tuple, whole))
        and len(whole) == 5 + 2 * 4
        and shares[1] == []
    )


def test_statistics_shared_over_processes_are_those_of_one_larger_micro_batch(both):
    alone, together = (each["groups"] for each in both)
    assert (alone["group"], together["group"]) == (1, 4)
    assert all(np.any(leaf) for leaf in together["numbers"])

    def compare(other):
        for name in ("losses", "numbers"):
            assert_close(other[name], together[name], 1e-6)

    compare(alone)
    assert_seen(compare, *both[0]["changed groups"])


def test_the_metrics_toy_is_three_and_a_half_over_processes(both):
    assert both[1]["toy"] == both[0]["toy"] == [[3.5] * 3] * 2


def test_memory_is_that_of_both_processes(both):
    assert both[1]["memory"] > 2**27

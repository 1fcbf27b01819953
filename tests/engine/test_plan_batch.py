"""Batch arithmetic: sizes, rounding, and evaluation that counts each sample once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.engine.plan import Batch, EvaluationBatches
from hotloop.errors import PlanError


def test_accumulation_gives_the_global_size():
    assert Batch.of(8, accumulation=8).global_ == 64
    assert Batch.of(16, 4, accumulation=128).global_ == 8192
    assert Batch.of(5, 2).accumulation == 1


@pytest.mark.parametrize(
    ("micro", "replicas", "asked", "accumulation", "size", "quotient"),
    [
        (3, 2, 10, 2, 12, "1.667"),
        (18, 16, 3520, 12, 3456, "12.22"),
        (8, 1, 20, 2, 16, "2.5"),
        (8, 1, 28, 4, 32, "3.5"),
        (8, 1, 6, 1, 8, "0.75"),
    ],
)
def test_a_global_size_that_does_not_divide_is_rounded_half_to_even_with_a_warning(
    micro, replicas, asked, accumulation, size, quotient
):
    batch = Batch.of(micro, replicas, global_size=asked)
    assert (batch.accumulation, batch.global_) == (accumulation, size)
    assert len(batch.warnings) == 1
    for part in (quotient, f"count is {accumulation}", f"global batch size {size}"):
        assert part in batch.warnings[0]


def test_a_global_size_that_divides_gives_no_warning():
    batch = Batch.of(16, 4, global_size=16384)
    assert (batch.accumulation, batch.warnings) == (256, ())


def test_accumulation_is_never_zero():
    with pytest.raises(PlanError, match=r"^global_size=4: .* ask for at least 8"):
        Batch.of(8, global_size=4)
    with pytest.raises(PlanError, match=r"^accumulation=0: must be at least 1"):
        Batch.of(8, accumulation=0)


def test_accumulation_and_global_size_exclude_each_other():
    with pytest.raises(PlanError, match="give only one"):
        Batch.of(8, accumulation=2, global_size=16)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"micro": 0}, "micro=0"),
        ({"micro": 1, "replicas": -1}, "replicas=-1"),
        ({"micro": 1, "global_size": 0}, "global_size=0"),
    ],
)
def test_sizes_below_one_name_the_option(sizes, text):
    with pytest.raises(PlanError, match=f"^{text}: must be at least 1"):
        Batch.of(**sizes)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 10_000))
def test_the_rounded_global_size_is_at_most_half_a_unit_away(micro, replicas, asked):
    unit = micro * replicas
    if 2 * asked <= unit:
        with pytest.raises(PlanError):
            Batch.of(micro, replicas, global_size=asked)
        return
    batch = Batch.of(micro, replicas, global_size=asked)
    assert batch.accumulation >= 1
    assert 2 * abs(batch.global_ - asked) <= unit
    assert bool(batch.warnings) == (asked % unit != 0)


@pytest.mark.parametrize(
    ("size", "padded"), [(256, 50176), (512, 50176), (1728, 50112), (1840, 51520), (460, 50140), (32, 50016)]
)
def test_padding_of_the_imagenet_validation_set(size, padded):
    whole = EvaluationBatches(50_000, size)
    assert whole.batches * size == padded
    assert whole.padding == padded - 50_000


def test_no_padding_where_the_batch_divides():
    assert EvaluationBatches(10_000, 100).padding == 0


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64))
def test_there_is_room_for_every_sample_and_not_a_batch_more(samples, batch):
    plan = EvaluationBatches(samples, batch)
    assert plan.batches * batch >= samples > (plan.batches - 1) * batch
    assert plan.batches * batch == samples + plan.padding


@pytest.mark.parametrize(("sizes", "name"), [((0, 8), "samples=0"), ((8, 0), "global_size=0")])
def test_an_evaluation_of_nothing_is_an_error(sizes, name):
    with pytest.raises(PlanError, match=name):
        EvaluationBatches(*sizes)

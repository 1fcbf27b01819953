"""The table of a pipeline alone: every micro-batch through every stage and back, in the ticks of the formulas."""

from itertools import pairwise

import pytest

from hotloop.engine.pipeline_table import BACKWARD, FORWARD, IDLE, SCHEDULES, forward_table, make_table
from hotloop.errors import OptionError

STAGES, MICRO_BATCHES = range(1, 9), range(1, 34)


def group_ticks(stages, size):
    """A group forward and backward; two ticks a micro-batch and the way there and back, which overlap."""
    if stages == 1 or size == 0:
        return size
    return 2 * stages - 1 if size == 1 else 2 * size + 2 * stages - 4


def ticks(schedule, stages, count):
    """The formulas of docs/engine.md."""
    if schedule == "Sequential":
        return count * (2 * stages - 1)
    if schedule == "Interleaved":
        return group_ticks(stages, count)
    groups, rest = divmod(count, 2 * stages)
    return groups * group_ticks(stages, 2 * stages) + group_ticks(stages, rest)


def visits(table):
    """Every step that is made, as (kind, stage, micro-batch), with its tick."""
    found = [
        ((kind, stage, number), tick)
        for tick, row in enumerate(table.rows)
        for stage, (kind, number) in enumerate(row)
        if kind != IDLE
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", STAGES)
def test_every_micro_batch_goes_through_every_stage_and_back_after_what_it_needs(schedule, stages):
    last = stages - 1
    for count in MICRO_BATCHES:
        done = visits(make_table(schedule, stages, count))
        steps = [(FORWARD, stage) for stage in range(last)]
        steps += [(BACKWARD, stage) for stage in reversed(range(stages))]
        assert done.keys() == {(*step, number) for step in steps for number in range(count)}
        for number in range(count):
            way = [done[(*step, number)] for step in steps]
            assert all(before < after for before, after in pairwise(way))
        for stage in range(
            stages
        ):  # statistics are added in the order of the micro-batches, as on one device
            ticks = [done[BACKWARD, stage, number] for number in range(count)]
            assert ticks == sorted(ticks)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", STAGES)
def test_ticks_and_busy_share_are_those_of_the_formulas(schedule, stages):
    for count in MICRO_BATCHES:
        table = make_table(schedule, stages, count)
        assert (table.ticks, len(table.rows)) == (ticks(schedule, stages, count),) * 2
        share = count * (2 * stages - 1) / (stages * table.ticks)
        assert table.busy_share == pytest.approx(share, rel=1e-12)


def waiting_at_once(done, begin, end):
    """The most micro-batches between a step's tick and another's, both counted, by going through all ticks."""
    spans = [
        (done[(*begin, number)], done[(*end, number)]) for (*step, number) in done if tuple(step) == begin
    ]
    return max(sum(first <= tick <= last for first, last in spans) for tick in range(max(done.values()) + 1))


@pytest.mark.parametrize("stages", STAGES)
def test_no_stage_has_more_in_flight_than_its_schedule_allows(stages):
    for count in MICRO_BATCHES:
        most = {
            "Grouped": [min(count, 2 * stages)] * (stages - 1) + [1],
            "Interleaved": [min(count, stages - stage) for stage in range(stages)],
            "Sequential": [1] * stages,
        }
        for schedule, expected in most.items():
            table = make_table(schedule, stages, count)
            done = visits(table)
            counted = [
                waiting_at_once(done, (FORWARD, stage), (BACKWARD, stage)) for stage in range(stages - 1)
            ]
            assert list(table.in_flight) == [*counted, 1]
            assert all(here <= bound for here, bound in zip(table.in_flight, expected, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", STAGES)
def test_a_slot_is_free_when_the_next_value_comes_and_one_less_would_not_be(schedule, stages):
    for count in MICRO_BATCHES:
        table = make_table(schedule, stages, count)
        done = visits(table)

        def overwritten(slots, came, used, done=done, count=count):
            """Whether a value or gradient is gone before the tick that reads it: written in tick t, read after t."""
            return any(
                done[(*came, number)] < done[(*used, number - slots)]
                for number in range(slots, count)
                if (*came, number) in done
            )

        values = [((FORWARD, stage - 1), (BACKWARD, stage)) for stage in range(1, stages)]
        gradients = [((BACKWARD, stage + 1), (BACKWARD, stage)) for stage in range(stages - 1)]
        for slots, ways in ((table.slots, values), (table.gradient_slots, gradients)):
            assert not any(overwritten(slots, *way) for way in ways)
            assert slots == 1 or any(overwritten(slots - 1, *way) for way in ways)


def test_grouped_takes_the_same_memory_for_12_and_for_128_micro_batches():
    for stages in range(1, 7):
        few, many = (make_table("Grouped", stages, count) for count in (12, 128))
        assert (few.slots, few.gradient_slots, few.in_flight) == (
            many.slots,
            many.gradient_slots,
            many.in_flight,
        )
        assert many.slots <= 2 * stages


@pytest.mark.parametrize("stages", STAGES)
def test_an_evaluation_goes_forward_alone_and_no_value_waits(stages):
    for count in MICRO_BATCHES:
        table = forward_table(stages, count)
        assert visits(table) == {
            (FORWARD, stage, number): stage + number for stage in range(stages) for number in range(count)
        }
        assert (table.ticks, table.slots) == (count + stages - 1, 1)
        assert table.busy_share == pytest.approx(count / table.ticks, rel=1e-12)


def test_an_unknown_schedule_is_refused_in_one_line():
    with pytest.raises(
        OptionError, match="schedule=grouped: must be one of Grouped, Interleaved, Sequential"
    ):
        make_table("grouped", 2, 4)

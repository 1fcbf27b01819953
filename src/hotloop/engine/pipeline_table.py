"""When each stage of a model that is cut in stages goes forward and backward, and with which micro-batch: a table.

A row of it is a tick, in which every stage makes one step or none. The last stage goes forward and backward in one
tick, as it has the loss at once. Plain Python: it knows no model and no device. docs/engine.md has the formulas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hotloop.errors import OptionError

IDLE, FORWARD, BACKWARD = range(3)
SCHEDULES = ("Grouped", "Interleaved", "Sequential")
Row = tuple[tuple[int, int], ...]
"""Of each stage: what it does in a tick (IDLE, FORWARD, BACKWARD), and the number of the micro-batch."""


@dataclass(frozen=True)
class Table:
    """The ticks of one weight update, or of one evaluation, in which no stage goes backward."""

    stages: int
    micro_batches: int
    rows: tuple[Row, ...]

    @property
    def ticks(self) -> int:
        return len(self.rows)

    @property
    def busy_share(self) -> float:
        """The share of stages at work in the mean of all ticks, from 0 to 1."""
        return sum(kind != IDLE for row in self.rows for kind, _ in row) / (self.ticks * self.stages)

    @cached_property
    def done(self) -> dict[tuple[int, int, int], int]:
        """The tick by (kind, stage, micro-batch); the last stage's forward is in its backward's."""
        found = {}
        for tick, row in enumerate(self.rows):
            for stage, (kind, number) in enumerate(row):
                found[kind, stage, number] = tick
                if stage == self.stages - 1 and kind == BACKWARD:
                    found[FORWARD, stage, number] = tick
        return found

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By stage: the most micro-batches that it had begun and not yet come back from, that at work included."""
        return tuple(
            _most_at_once(
                (self.done[FORWARD, stage, number], self._last_use(stage, number))
                for number in range(self.micro_batches)
            )
            for stage in range(self.stages)
        )

    @cached_property
    def slots(self) -> int:
        """The most values from the stage before that wait at one stage, until it has gone backward with them."""
        waits = (
            _most_at_once(
                (self.done[FORWARD, stage - 1, number] + 1, self._last_use(stage, number))
                for number in range(self.micro_batches)
            )
            for stage in range(1, self.stages)
        )
        return max(waits, default=1)

    @cached_property
    def gradient_slots(self) -> int:
        """The most gradients from the stage behind that wait at one stage, until it goes backward with them."""
        waits = (
            _most_at_once(
                (self.done[BACKWARD, stage + 1, number] + 1, self.done[BACKWARD, stage, number])
                for number in range(self.micro_batches)
            )
            for stage in range(self.stages - 1)
            if (BACKWARD, stage, 0) in self.done
        )
        return max(waits, default=1)

    def _last_use(self, stage: int, number: int) -> int:
        return self.done.get((BACKWARD, stage, number), self.done[FORWARD, stage, number])


def _most_at_once(spans: Iterator[tuple[int, int]]) -> int:
    """The most spans (first tick, last tick) that one tick lies in, where both ends rise from span to span."""
    ordered = list(spans)
    return max(
        sum(first <= other <= last for other, _ in ordered[number:])
        for number, (first, last) in enumerate(ordered)
    )


def group_size(stages: int) -> int:
    """The most micro-batches of a group of `Grouped`: memory is the same for any number of groups."""
    return 2 * stages


def make_table(schedule: str, stages: int, micro_batches: int) -> Table:
    """Every micro-batch forward and backward through every stage; OptionError for a schedule that is unknown.

    `Grouped`: a group of micro-batches forward, then backward, then the next group. `Interleaved`: backward as soon as
    `stages - s` micro-batches are in flight at stage s, so that fewer wait. `Sequential`: one micro-batch at a time.
    """
    if schedule not in SCHEDULES:
        raise OptionError(f"schedule={schedule}: must be one of {', '.join(SCHEDULES)}")
    if schedule == "Sequential":
        return Table(stages, micro_batches, tuple(_one_after_another(stages, micro_batches)))
    forwards, backwards = [0] * stages, [0] * stages
    rows: list[Row] = []
    while backwards[0] < micro_batches:
        row = tuple(_choose(schedule, stage, micro_batches, forwards, backwards) for stage in range(stages))
        for stage, (kind, _) in enumerate(row):
            backwards[stage] += kind == BACKWARD
            forwards[stage] += kind == FORWARD or (kind == BACKWARD and stage == stages - 1)
        rows.append(row)
    return Table(stages, micro_batches, tuple(rows))


def _choose(
    schedule: str, stage: int, micro_batches: int, forwards: list[int], backwards: list[int]
) -> tuple[int, int]:
    """What a stage does in the next tick, after so many micro-batches forward and backward at each."""
    stages, forward, backward = len(forwards), forwards[stage], backwards[stage]
    arrived = forwards[stage - 1] if stage else micro_batches
    if stage == stages - 1:
        return (BACKWARD, backward) if backward < arrived else (IDLE, 0)
    if schedule == "Interleaved":
        most, waits = backward + stages - stage, False
    else:
        size = group_size(stages)
        most = min((backward // size + 1) * size, micro_batches)
        waits = forward < most
    if forward < min(arrived, most):
        return FORWARD, forward
    may_return = not waits and backward < min(forward, backwards[stage + 1])
    return (BACKWARD, backward) if may_return else (IDLE, 0)


def _one_after_another(stages: int, micro_batches: int) -> Iterator[Row]:
    up, down = range(stages - 1), reversed(range(stages))
    steps = [*((stage, FORWARD) for stage in up), *((stage, BACKWARD) for stage in down)]
    for number in range(micro_batches):
        for at, kind in steps:
            yield tuple((kind, number) if stage == at else (IDLE, 0) for stage in range(stages))


def forward_table(stages: int, micro_batches: int) -> Table:
    """For evaluation: micro-batch m is at stage s in tick m + s."""

    def step(number: int) -> tuple[int, int]:
        return (FORWARD, number) if 0 <= number < micro_batches else (IDLE, 0)

    ticks = micro_batches + stages - 1
    rows = tuple(tuple(step(tick - stage) for stage in range(stages)) for tick in range(ticks))
    return Table(stages, micro_batches, rows)

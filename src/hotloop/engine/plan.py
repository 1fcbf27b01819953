"""Turn what people ask for (epochs, logs per epoch, checkpoints per epoch, ...) into one immutable `Plan`.

Pure integers and fractions, no jax: the same plan drives a run, is printed by `--plan`, and is tested number
for number. The rules are told in docs/host-events.md.
"""

from fractions import Fraction

from hotloop.engine.batch import Batch, whole
from hotloop.engine.calls import KINDS, Event, Kind, Mark, Plan, Span
from hotloop.engine.periods import Clock, Frequency, closest_divisor, exact
from hotloop.errors import PlanError

__all__ = ["Batch", "Event", "Plan", "Span", "closest_divisor", "plan_epochs", "plan_updates"]

MOST_UPDATES, MOST_EVENTS = 10**12, 2_000_000
"""Weeks of the shortest updates, and more records than anybody reads: a plan lists its events."""


def plan_epochs(
    samples: int,
    epochs: int,
    batch: Batch,
    *,
    logs_per_epoch: Frequency = 1,
    ckpts_per_epoch: Frequency | None = None,
    first_ckpt_epoch: Frequency = 0,
    validations_per_epoch: Frequency = 0,
    weight_updates_per_epoch: int | None = None,
) -> Plan:
    """Plan `epochs` passes over `samples`; a frequency of 0 means never.

    Checkpoints that nobody asked for (None) fall on calls that the logs make anyway: at most one an epoch,
    one at the end. Asked-for ones, and validations, end calls of their own and include the end of the run.
    """
    whole("epochs", epochs)
    per_epoch = _updates_per_epoch(samples, batch, weight_updates_per_epoch)
    draft = _Draft(Clock(per_epoch, per_epoch * epochs), batch, samples)
    log_period = draft.log("logs_per_epoch", logs_per_epoch)
    draft.repeat("validate", "validations_per_epoch", validations_per_epoch)
    first = draft.point("first_ckpt_epoch", first_ckpt_epoch)
    if ckpts_per_epoch is None:
        period = max(log_period or draft.clock.total, per_epoch)
        draft.every("checkpoint", period, -(-first // period) * period)
    else:
        draft.repeat("checkpoint", "ckpts_per_epoch", ckpts_per_epoch, first)
    return draft.plan()


def plan_updates(
    total: int,
    *,
    log_every: int = 0,
    checkpoint_every: int | None = None,
    validate_every: int = 0,
    validate_first: int = 0,
    updates_per_epoch: int | Fraction | None = None,
    batch: Batch | None = None,
) -> Plan:
    """Plan `total` weight updates with events every so many of them and at the end; 0 means never.

    Without `checkpoint_every` (None) only the end is saved; without `updates_per_epoch` the run is one epoch. Where
    batches run over from one epoch into the next, an epoch is a fraction of updates. `validate_first` adds a
    validation after so many.
    """
    whole("total", total)
    per_epoch = total if updates_per_epoch is None else _per_epoch(updates_per_epoch)
    draft = _Draft(Clock(per_epoch, total), batch or Batch())
    draft.every("log", whole("log_every", log_every, 0))
    draft.every("validate", whole("validate_every", validate_every, 0))
    if validate_first and not any(
        validate_first in mark.updates for mark in draft.marks if mark.kind == "validate"
    ):
        draft.marks.append(Mark("validate", range(validate_first, validate_first + 1)))
    draft.every(
        "checkpoint", total if checkpoint_every is None else whole("checkpoint_every", checkpoint_every, 0)
    )
    return draft.plan()


def _per_epoch(updates: int | Fraction) -> int | Fraction:
    if isinstance(updates, Fraction) and updates.denominator > 1:
        return updates
    return whole("updates_per_epoch", int(updates) if isinstance(updates, Fraction) else updates)


def _updates_per_epoch(samples: int, batch: Batch, override: int | None) -> int:
    whole("samples", samples)
    if samples < batch.global_:
        raise PlanError(
            f"{samples} samples do not fill one global batch of {batch.global_} ({batch.describe()}); "
            f"lower the micro batch, the replicas or the accumulation so that it is at most {samples}"
        )
    return samples // batch.global_ if override is None else whole("weight_updates_per_epoch", override)


class _Draft:
    """A plan in the making: marks and warnings collected against one clock."""

    def __init__(self, clock: Clock, batch: Batch, samples: int | None = None):
        self.clock = clock
        self.batch = batch
        self.samples = samples
        self.marks: list[Mark] = []
        self.warnings = list(batch.warnings)
        if clock.total > MOST_UPDATES:
            raise PlanError(
                f"a run of {clock.total:,} weight updates: at most {MOST_UPDATES:,} can be planned; ask for less"
            )
        seen = clock.updates_per_epoch * batch.global_
        if samples is not None and seen > samples:
            self.warnings.append(
                f"weight_updates_per_epoch={clock.updates_per_epoch}: an epoch takes {seen} samples "
                f"of a set of {samples}, so that some are seen more than once"
            )

    def every(self, kind: Kind, period: int, first: int = 0) -> None:
        """Mark first, first + period, ... and the end; `first` 0 starts at `period`, period 0 is none."""
        if period == 0:
            return
        total = self.clock.total
        end = range(total, total + 1)
        updates = range(first or period, total + 1, period)
        self.marks += [
            Mark(kind, part) for part in ((updates,) if total in updates else (updates, end)) if part
        ]

    def log(self, argument: str, frequency: Frequency) -> int:
        """Mark the logs of a frequency and return their period, 0 for none."""
        wanted = exact(argument, frequency)
        period = self.clock.log_period(argument, wanted) if wanted else 0
        self.every("log", period)
        self.warnings += self.clock.adjustment(argument, wanted, period)
        return period

    def repeat(self, kind: Kind, argument: str, frequency: Frequency, first: int = 0) -> None:
        """Mark events of a frequency, of which the first comes after `first` updates."""
        wanted = exact(argument, frequency)
        period = self.clock.save_period(wanted, first) if wanted else 0
        self.every(kind, period, first)
        self.warnings += self.clock.adjustment(argument, wanted, period)

    def point(self, argument: str, epoch: Frequency) -> int:
        """The update boundary nearest to a point of the run given in epochs."""
        wanted = exact(argument, epoch) * self.clock.updates_per_epoch
        if wanted > self.clock.total:
            raise PlanError(f"{argument}={epoch}: the run ends after {self.clock.epochs} epochs")
        if wanted.denominator != 1:
            self.warnings.append(
                f"{argument}={epoch} lies inside a weight update: moved to update {round(wanted)}"
            )
        return round(wanted)

    def plan(self) -> Plan:
        """The finished plan, with a warning when the host hears nothing before the end."""
        marks = sorted(self.marks, key=lambda mark: KINDS.index(mark.kind))
        if (events := sum(len(mark.updates) for mark in marks)) > MOST_EVENTS:
            raise PlanError(
                f"{events:,} logs, validations and checkpoints: at most {MOST_EVENTS:,} can be planned; ask for fewer"
            )
        if all(mark.kind != "log" and mark.updates[0] == self.clock.total for mark in marks):
            self.warnings.append(
                "nothing is logged before the end: "
                f"the entire run of {self.clock.total} weight updates is one call on the device"
            )
        return Plan(
            total_updates=self.clock.total,
            updates_per_epoch=self.clock.updates_per_epoch,
            batch=self.batch,
            marks=tuple(marks),
            samples=self.samples,
            warnings=tuple(self.warnings),
        )

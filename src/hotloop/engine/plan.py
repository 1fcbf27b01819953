"""The plan of a run in whole numbers, without jax: the batch of an update (micro batches, replicas, accumulation),
compiled calls of updates, and the host events that follow each call.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from hotloop.errors import PlanError
from hotloop.options import non_negative, option, positive


def whole(argument: str, value: int, least: int = 1) -> int:
    """`value` itself, or a PlanError that names the argument when it is below `least`."""
    if value < least:
        raise PlanError(f"{argument}={value}: must be at least {least}")
    return value


@dataclass(frozen=True)
class Batch:
    """What one weight update sees: `accumulation` micro batches on each of `replicas` copies of the model."""

    micro: int = 1
    replicas: int = 1
    accumulation: int = 1
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("micro", "replicas", "accumulation"):
            whole(name, getattr(self, name))

    @property
    def global_(self) -> int:
        """Samples in one weight update."""
        return self.micro * self.replicas * self.accumulation

    @classmethod
    def of(
        cls, micro: int, replicas: int = 1, *, accumulation: int | None = None, global_size: int | None = None
    ) -> "Batch":
        """The batch for an accumulation count, or for the global size nearest to the one asked for."""
        if accumulation is not None and global_size is not None:
            raise PlanError(
                f"accumulation={accumulation} and global_size={global_size}: "
                "each follows from the other, give only one"
            )
        if global_size is None:
            return cls(micro, replicas, 1 if accumulation is None else accumulation)
        unit = cls(micro, replicas).global_
        quotient = Fraction(whole("global_size", global_size), unit)
        count = round(quotient)  # the nearest; a half goes to the even count
        asked = f"global_size={global_size}: micro batch {micro} x replicas {replicas} = {unit}"
        if count == 0:
            raise PlanError(
                f"{asked} is at least twice as much, so that the accumulation count "
                f"would be 0; ask for at least {unit}, or lower the micro batch or the replicas"
            )
        if count == quotient:
            return cls(micro, replicas, count)
        warning = (
            f"{asked} goes into it {float(quotient):.4g} times, not a whole number; "
            f"gradient accumulation count is {count} and global batch size {unit * count} instead"
        )
        return cls(micro, replicas, count, (warning,))

    def describe(self) -> str:
        return (
            f"micro batch {self.micro} x replicas {self.replicas} x accumulation {self.accumulation}"
            f" = global batch {self.global_}"
        )


@dataclass(frozen=True)
class EvaluationBatches:
    """A whole set in batches of one size, each sample counted once: padding fills the last batch, with weight 0."""

    samples: int
    batch: int

    def __post_init__(self) -> None:
        whole("samples", self.samples)
        whole("global_size", self.batch)

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch)

    @property
    def padding(self) -> int:
        """Samples that run and do not count."""
        return self.batches * self.batch - self.samples


Frequency = int | float | str | Fraction
Kind = Literal["log", "validate", "checkpoint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Every kind of host event, in the order in which those after the same update happen."""
MOST_UPDATES, MOST_EVENTS = 10**12, 2_000_000
"""Weeks of the shortest updates, and more records than can be read: a plan lists its events."""


class Event(NamedTuple):
    """Something the host does after `update` updates, which are `epoch` epochs and `call` calls."""

    kind: Kind
    update: int
    epoch: float
    call: int


class Span(NamedTuple):
    """One compiled call, the `call`-th: `count` updates after `first` earlier ones, and its events."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    call: int
    events: tuple[Event, ...]


class Mark(NamedTuple):
    """A kind of event and, as a range, the numbers of updates after which it happens."""

    kind: Kind
    updates: range


@dataclass(frozen=True)
class Plan:
    """A whole run, immutable and hashable; a million calls take a few numbers until they are listed.

    >>> from hotloop import Plan
    >>> plan = Plan.for_epochs(samples=50_000, epochs=6, batch=64, logs_per_epoch="1/2")
    >>> plan.total_updates, plan.updates_per_call, plan.calls
    (4686, 1562, 3)
    """

    total_updates: int
    updates_per_epoch: int | Fraction
    batch: Batch
    marks: tuple[Mark, ...]
    samples: int | None = None
    warnings: tuple[str, ...] = ()
    longest_call: int = 0
    """A call also ends after every so many updates of the run; 0: only where an event is due."""

    @classmethod
    def for_epochs(
        cls,
        samples: int,
        epochs: int,
        batch: Batch | int,
        *,
        logs_per_epoch: Frequency = 1,
        ckpts_per_epoch: Frequency | None = None,
        first_ckpt_epoch: Frequency = 0,
        validations_per_epoch: Frequency = 0,
        weight_updates_per_epoch: int | None = None,
    ) -> "Plan":
        """Plan `epochs` passes over `samples`; a frequency of 0 means never.

        Checkpoints that nobody asked for (None) fall on calls that the logs make anyway: at most one an epoch,
        one at the end. Asked-for ones, and validations, end calls of their own and include the end of the run.
        """
        whole("epochs", epochs)
        batch = Batch.of(batch) if isinstance(batch, int) else batch
        if whole("samples", samples) < batch.global_:
            raise PlanError(
                f"{samples} samples do not fill one global batch of {batch.global_} (micro={batch.micro} x "
                f"replicas={batch.replicas} x accumulation={batch.accumulation}); make it at most {samples}"
            )
        per_epoch = samples // batch.global_
        if weight_updates_per_epoch is not None:
            per_epoch = whole("weight_updates_per_epoch", weight_updates_per_epoch)
        draft = _Draft(per_epoch * epochs, per_epoch, batch, samples)
        log_period = draft.repeat("log", "logs_per_epoch", logs_per_epoch)
        draft.repeat("validate", "validations_per_epoch", validations_per_epoch)
        first = draft.point("first_ckpt_epoch", first_ckpt_epoch)
        if ckpts_per_epoch is None:
            period = max(log_period or draft.total, per_epoch)
            draft.every("checkpoint", period, -(-first // period) * period)
        else:
            draft.repeat("checkpoint", "ckpts_per_epoch", ckpts_per_epoch, first)
        return draft.finish()

    @classmethod
    def for_updates(
        cls,
        total: int,
        *,
        log_every: int = 0,
        checkpoint_every: int | None = None,
        validate_every: int = 0,
        validate_first: int = 0,
        updates_per_epoch: int | Fraction | None = None,
        batch: Batch | None = None,
    ) -> "Plan":
        """Plan `total` weight updates with events every so many of them and at the end; 0 means never.

        Without `checkpoint_every` (None) only the end is saved; without `updates_per_epoch` the run is one epoch.
        Where batches run over from one epoch into the next, an epoch is a fraction of updates. `validate_first` adds
        a validation after so many.
        """
        whole("total", total)
        per_epoch = total if updates_per_epoch is None else updates_per_epoch
        if per_epoch.denominator == 1:
            per_epoch = whole("updates_per_epoch", int(per_epoch))
        draft = _Draft(total, per_epoch, batch or Batch())
        draft.every("log", whole("log_every", log_every, 0))
        logs = len(draft.marks)
        draft.every("validate", whole("validate_every", validate_every, 0))
        if validate_first and not any(validate_first in mark.updates for mark in draft.marks[logs:]):
            draft.marks.append(Mark("validate", range(validate_first, validate_first + 1)))
        saves = total if checkpoint_every is None else whole("checkpoint_every", checkpoint_every, 0)
        draft.every("checkpoint", saves)
        return draft.finish()

    @property
    def epochs(self) -> Fraction:
        return Fraction(self.total_updates, self.updates_per_epoch)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The number of updates done at the end of each call."""
        cuts = range(self.longest_call, self.total_updates, self.longest_call) if self.longest_call else ()
        return tuple(sorted({self.total_updates}.union(cuts, *(mark.updates for mark in self.marks))))

    @property
    def calls(self) -> int:
        return len(self.ends)

    @cached_property
    def updates_per_call(self) -> int:
        return max(end - start for start, end in pairwise((0, *self.ends)))

    def count_lengths(self, start: int = 0) -> Counter[int]:
        """How many calls there are of each length after `start` updates."""
        later = self.ends[bisect_right(self.ends, start) :]
        return Counter(end - begin for begin, end in pairwise((start, *later)))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for span in self.spans() for event in span.events)

    def epoch_at(self, update: int) -> float:
        return float(update / self.updates_per_epoch)

    def spans(self, start: int = 0) -> Iterator[Span]:
        """The calls still to make after `start` updates; the first is cut where `start` lies inside it."""
        first = start
        for index in range(bisect_right(self.ends, start), self.calls):
            end = self.ends[index]
            epoch, due = self.epoch_at(end), [mark.kind for mark in self.marks if end in mark.updates]
            yield Span(
                first, end - first, index + 1, tuple(Event(kind, end, epoch, index + 1) for kind in due)
            )
            first = end

    def has(self, kind: Kind) -> bool:
        return any(mark.kind == kind and mark.updates for mark in self.marks)

    def updates(self, kind: Kind) -> tuple[int, ...]:
        return tuple(sorted({update for mark in self.marks if mark.kind == kind for update in mark.updates}))

    def describe(self) -> str:
        """The plan for people, one thing a line: batch, data, calls, events."""
        lines = [self.batch.describe()]
        if self.samples is not None:
            left = self.samples - self.updates_per_epoch * self.batch.global_
            rest = f", {left:,} samples of each begin the next" if left > 0 else ""
            per_epoch = _format_count(self.updates_per_epoch)
            lines.append(f"{self.samples:,} samples: {per_epoch} weight updates an epoch{rest}")
        equal = self.calls * self.updates_per_call == self.total_updates
        lines.append(
            f"epochs: {_format_count(self.epochs)} = {self.total_updates:,} weight updates; "
            f"calls: {self.calls:,} of {'' if equal else 'at most '}{self.updates_per_call:,} updates"
        )
        for kind in KINDS:
            updates = [f"{update}" for update in self.updates(kind)]  # commas stand between, so none within
            shown = updates if len(updates) <= 8 else [*updates[:5], "...", updates[-1]]
            after = f", after update {', '.join(shown)}" if updates else ""
            lines.append(f"{kind}: {len(updates):,}{after}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        per_epoch, batch = self.updates_per_epoch, self.batch
        sizes = {"micro": batch.micro, "replicas": batch.replicas, "accumulation": batch.accumulation}
        return {
            "samples": self.samples,
            "batch": {**sizes, "global": batch.global_},
            "epochs": float(self.epochs),
            "updates_per_epoch": int(per_epoch) if per_epoch.denominator == 1 else float(per_epoch),
            "total_updates": self.total_updates,
            "updates_per_call": self.updates_per_call,
            "calls": self.calls,
            "events": [
                {"event": event.kind, "update": event.update, "epoch": event.epoch, "call": event.call}
                for event in self.events
            ],
            "warnings": list(self.warnings),
        }


class _Draft:
    """A plan in the making: marks and warnings, collected for a run of `total` updates."""

    def __init__(self, total: int, per_epoch: int | Fraction, batch: Batch, samples: int | None = None):
        self.total, self.per_epoch, self.batch, self.samples = total, per_epoch, batch, samples
        self.marks: list[Mark] = []
        self.warnings = list(batch.warnings)
        if total > MOST_UPDATES:
            raise PlanError(
                f"a run of {total:,} weight updates: at most {MOST_UPDATES:,} can be planned; ask for less"
            )
        seen = per_epoch * batch.global_
        if samples is not None and seen > samples:
            self.warnings.append(
                f"weight_updates_per_epoch={per_epoch}: an epoch takes {seen} samples "
                f"of a set of {samples}, so that some are seen more than once"
            )

    def every(self, kind: Kind, period: int, first: int = 0) -> None:
        """Mark first, first + period, ... and the end; `first` 0 starts at `period`, period 0 is none."""
        if period:
            updates = range(first or period, self.total + 1, period)
            end = range(self.total, self.total if self.total in updates else self.total + 1)
            self.marks += [Mark(kind, part) for part in (updates, end) if part]

    def repeat(self, kind: Kind, argument: str, frequency: Frequency, first: int = 0) -> int:
        """Mark events of a frequency, of which the first comes after `first` updates; their period, 0 for none."""
        wanted, period = _parse_frequency(argument, frequency), 0

        def cut(updates: int) -> int:
            """Equal parts of `updates`, so many that they come nearest to the frequency."""
            return updates // closest_divisor(updates, wanted * updates / self.per_epoch)

        if wanted >= 1:
            period = cut(int(self.per_epoch))
        elif wanted and kind == "log":  # cut the run, which an epoch's part need not divide
            epochs = Fraction(self.total, self.per_epoch)
            if (epochs * wanted).denominator != 1:
                near = sorted(sorted({*_divisors(int(epochs))}), key=lambda n: abs(n - 1 / wanted))[:2]
                advice = " or ".join(str(Fraction(1, n)) for n in sorted(near))
                raise PlanError(
                    f"It is not possible to log {float(1 / wanted)} epochs a time for {int(epochs)} epochs"
                    f" ({argument}={wanted}); {argument}={advice} would fit"
                )
            period = cut(self.total)
        elif wanted and (self.per_epoch / wanted).denominator == 1:
            period = int(self.per_epoch / wanted)
        elif wanted:
            period = self.total if first == self.total else cut(self.total - first)
        self.every(kind, period, first)
        got = Fraction(self.per_epoch, period) if period else Fraction(0)
        if got != wanted:
            self.warnings.append(
                f"{argument}={wanted} would interrupt a weight update ({self.per_epoch} updates an epoch): "
                f"adjusted to {_format_count(got)} an epoch, one every {period} updates"
            )
        return period

    def point(self, argument: str, epoch: Frequency) -> int:
        """The update boundary nearest to a point of the run given in epochs."""
        wanted = _parse_frequency(argument, epoch) * self.per_epoch
        if wanted > self.total:
            epochs = Fraction(self.total, self.per_epoch)
            raise PlanError(f"{argument}={epoch}: the run ends after {epochs} epochs")
        if wanted.denominator != 1:
            self.warnings.append(
                f"{argument}={epoch} lies inside a weight update: moved to update {round(wanted)}"
            )
        return round(wanted)

    def finish(self) -> Plan:
        """The finished plan, with a warning when no event comes before the end."""
        marks = sorted(self.marks, key=lambda mark: KINDS.index(mark.kind))
        if (events := sum(len(mark.updates) for mark in marks)) > MOST_EVENTS:
            raise PlanError(
                f"{events:,} logs, validations and checkpoints: at most {MOST_EVENTS:,} can be planned; ask for fewer"
            )
        if all(mark.kind != "log" and mark.updates[0] == self.total for mark in marks):
            self.warnings.append(
                "nothing is logged before the end: "
                f"the entire run of {self.total} weight updates is one call on the device"
            )
        return Plan(
            self.total, self.per_epoch, self.batch, tuple(marks), self.samples, warnings=tuple(self.warnings)
        )


def _parse_frequency(argument: str, value: Frequency) -> Fraction:
    """A number of at least 0 as the fraction that was meant: 0.1 is 1/10 and the float 1/49 is 1/49."""
    try:
        fraction = Fraction(value)
        if isinstance(value, float):
            simple = fraction.limit_denominator(10**6)
            fraction = simple if float(simple) == value else Fraction(repr(value))
    except (ValueError, OverflowError, ZeroDivisionError):
        raise PlanError(f"{argument}={value}: not a number; write for example 2, 0.5 or 1/2") from None
    if fraction < 0:
        raise PlanError(f"{argument}={value}: must be at least 0")
    return fraction


def closest_divisor(number: int, target: Fraction | int) -> int:
    """The divisor of `number` nearest to `target`.

    Divisors are tried in the order 1, n/1, 2, n/2, ... up to the square root, and of two equally near
    ones the first stays: (12, 5) gives 6 and not 4, (781, 41) gives 11 and not 71.
    """
    return min(_divisors(number), key=lambda divisor: abs(Fraction(divisor - target)))


def _divisors(number: int) -> Iterator[int]:
    """1, n/1, 2, n/2, ... as far as they divide; a square's root comes twice."""
    for n in range(1, math.isqrt(number) + 1):
        if number % n == 0:
            yield from (n, number // n)


def _format_count(number: int | Fraction) -> str:
    """A number as people write it: 1,100, 1/2, or four digits where the fraction is long."""
    if number.denominator == 1:
        return f"{int(number):,}"
    return str(number) if number.denominator < 100 else f"{float(number):.4g}"


RUN_GROUP, EVENTS_GROUP, BATCH_GROUP = "Run", "Logs and checkpoints", "Batch"


def _check_updates(value: int) -> str | None:
    return None if value == -1 or value >= 1 else "must be at least 1, or -1 for as many as the samples fill"


@dataclass(frozen=True)
class PlanOptions:
    """How long a run is, when the host logs and saves, and how many samples make an update."""

    num_epochs: int = option(1, "Passes over the training samples.", check=positive, group=RUN_GROUP)
    weight_updates_per_epoch: int = option(
        -1,
        "Weight updates that count as one epoch; -1: as many as the samples fill.",
        check=_check_updates,
        group=RUN_GROUP,
    )
    logs_per_epoch: Fraction = option(
        Fraction(1),
        "Logs an epoch: 10, 1/2 (every second epoch), 0 (none).",
        check=non_negative,
        group=EVENTS_GROUP,
    )
    ckpts_per_epoch: Fraction | None = option(
        None,
        "Checkpoints an epoch, 0 for none; left out, 1, on calls that the logs make anyway.",
        check=non_negative,
        group=EVENTS_GROUP,
    )
    first_ckpt_epoch: Fraction = option(
        Fraction(0),
        "Epoch of the first checkpoint; the others follow from it.",
        check=non_negative,
        group=EVENTS_GROUP,
    )
    micro_batch_size: int = option(
        1, "Samples per replica that go through the network at once.", check=positive, group=BATCH_GROUP
    )
    num_replicas: int = option(
        1, "Copies of the model that share the work.", check=positive, group=BATCH_GROUP
    )
    gradient_accumulation_count: int | None = option(
        None,
        "Micro-batches per replica in an update; 1 when neither this nor the next is given. Replaces a "
        "configuration's global batch size.",
        aliases=("--gradient-accumulation",),
        check=positive,
        group=BATCH_GROUP,
    )
    global_batch_size: int | None = option(
        None,
        "Samples in an update; the accumulation follows, rounded with a warning. Replaces a configuration's "
        "accumulation.",
        check=positive,
        group=BATCH_GROUP,
    )

    def make_plan(self, samples: int, batch: Batch, *, validations_per_epoch: Frequency = 0) -> Plan:
        """Calls and host events of a training on so many samples in such batches."""
        updates = self.weight_updates_per_epoch
        return Plan.for_epochs(
            samples,
            self.num_epochs,
            batch,
            logs_per_epoch=self.logs_per_epoch,
            ckpts_per_epoch=self.ckpts_per_epoch,
            first_ckpt_epoch=self.first_ckpt_epoch,
            validations_per_epoch=validations_per_epoch,
            weight_updates_per_epoch=None if updates == -1 else updates,
        )

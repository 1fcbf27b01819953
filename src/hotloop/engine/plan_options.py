"""`Planned`: the options from which a run's batches, calls and host events follow, for every command that has them.

Names and defaults are the old trainer's. A command's config takes `Planned` as a base and adds its own options; the
arithmetic is in `batch` and `plan`. No jax.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hotloop.engine.batch import Batch
from hotloop.engine.periods import Frequency
from hotloop.engine.plan import Plan, plan_epochs
from hotloop.options import non_negative, option, positive

RUN, EVENTS, BATCH = "Run", "Logs and checkpoints", "Batch"


def updates_or_all(value: Any) -> str | None:
    """The reason why a number of updates an epoch cannot work."""
    return None if value == -1 or value >= 1 else "must be at least 1, or -1 for as many as the samples fill"


@dataclass(frozen=True)
class Planned:
    """How long a run is, when the host hears of it, and how many samples make an update."""

    num_epochs: int = option(1, "Passes over the training samples.", check=positive, group=RUN)
    weight_updates_per_epoch: int = option(
        -1,
        "Weight updates that count as one epoch; -1: as many as the samples fill.",
        check=updates_or_all,
        group=RUN,
    )
    logs_per_epoch: Fraction = option(
        Fraction(1),
        "Logs an epoch: 10, 1/2 (every second epoch), 0 (none).",
        check=non_negative,
        group=EVENTS,
    )
    ckpts_per_epoch: Fraction | None = option(
        None,
        "Checkpoints an epoch, 0 for none; left out, 1, on calls that the logs make anyway.",
        check=non_negative,
        group=EVENTS,
    )
    first_ckpt_epoch: Fraction = option(
        Fraction(0),
        "Epoch of the first checkpoint; the others follow from it.",
        check=non_negative,
        group=EVENTS,
    )
    micro_batch_size: int = option(
        1, "Samples per replica that go through the network at once.", check=positive, group=BATCH
    )
    num_replicas: int = option(1, "Copies of the model that share the work.", check=positive, group=BATCH)
    gradient_accumulation_count: int | None = option(
        None,
        "Micro-batches per replica in an update; 1 when neither this nor the next is given. Replaces a "
        "configuration's global batch size.",
        aliases=("--gradient-accumulation",),
        check=positive,
        group=BATCH,
    )
    global_batch_size: int | None = option(
        None,
        "Samples in an update; the accumulation follows, rounded with a warning. Replaces a configuration's "
        "accumulation.",
        check=positive,
        group=BATCH,
    )

    def planned(self, samples: int, batch: Batch, *, validations_per_epoch: Frequency = 0) -> Plan:
        """Calls and host events of a training on so many samples in such batches."""
        updates = self.weight_updates_per_epoch
        return plan_epochs(
            samples,
            self.num_epochs,
            batch,
            logs_per_epoch=self.logs_per_epoch,
            ckpts_per_epoch=self.ckpts_per_epoch,
            first_ckpt_epoch=self.first_ckpt_epoch,
            validations_per_epoch=validations_per_epoch,
            weight_updates_per_epoch=None if updates == -1 else updates,
        )

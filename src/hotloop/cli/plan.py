"""`hotloop plan`: what a training run would do, worked out before anything is compiled.

Thin: options in, `engine.plan` does the arithmetic, text or JSON out. `show` is what `--plan` of the train
commands prints too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from hotloop.cli.command import Command, Context
from hotloop.engine.plan import Batch, Plan, plan_epochs
from hotloop.families.cnn.settings import SAMPLES
from hotloop.options import non_negative, option, positive

BATCH, RUN = "Batch", "Run and host events"


@dataclass(frozen=True)
class PlanConfig:
    """What decides the batch arithmetic and the host events of a run."""

    dataset: Literal["cifar10", "cifar100", "mnist", "imagenet"] = option(
        "cifar10", "The data set whose training samples are counted.", group=RUN
    )
    samples: int | None = option(None, "Training samples, instead of --dataset.", check=positive, group=RUN)
    num_epochs: int = option(1, "Passes over the training samples.", check=positive, group=RUN)
    weight_updates_per_epoch: int = option(
        -1, "Weight updates that count as one epoch; -1 takes as many as the samples fill.", group=RUN
    )
    logs_per_epoch: Fraction = option(
        Fraction(1), "Logs per epoch: 10, 1/2 (every second epoch), 0 (none).", check=non_negative, group=RUN
    )
    ckpts_per_epoch: Fraction | None = option(
        None,
        "Checkpoints per epoch, 0 for none; left out, they fall on calls that the logs make anyway.",
        check=non_negative,
        group=RUN,
    )
    first_ckpt_epoch: Fraction = option(
        Fraction(0),
        "Epoch of the first checkpoint; later ones follow from it.",
        check=non_negative,
        group=RUN,
    )
    validations_per_epoch: Fraction = option(
        Fraction(0), "Validations per epoch during the run, 0 for none.", check=non_negative, group=RUN
    )
    micro_batch_size: int = option(
        1, "Samples per replica that go through the model at once.", check=positive, group=BATCH
    )
    num_replicas: int = option(1, "Copies of the model that share the work.", check=positive, group=BATCH)
    gradient_accumulation_count: int | None = option(
        None,
        "Micro batches per replica in one weight update; 1 when neither this nor the next is given.",
        aliases=("--gradient-accumulation",),
        group=BATCH,
    )
    global_batch_size: int | None = option(
        None, "Samples in one weight update; the accumulation follows, rounded with a warning.", group=BATCH
    )


def planned(config: PlanConfig) -> Plan:
    """The plan that the options ask for."""
    override = config.weight_updates_per_epoch
    return plan_epochs(
        SAMPLES[config.dataset].train if config.samples is None else config.samples,
        config.num_epochs,
        Batch.of(
            config.micro_batch_size,
            config.num_replicas,
            accumulation=config.gradient_accumulation_count,
            global_size=config.global_batch_size,
        ),
        logs_per_epoch=config.logs_per_epoch,
        ckpts_per_epoch=config.ckpts_per_epoch,
        first_ckpt_epoch=config.first_ckpt_epoch,
        validations_per_epoch=config.validations_per_epoch,
        weight_updates_per_epoch=None if override == -1 else override,
    )


def show(plan: Plan, context: Context) -> dict[str, Any]:
    """Say what would run, with its warnings, and hand it back as JSON has it."""
    context.say(plan.describe())
    for warning in plan.warnings:
        context.warn(warning)
    return plan.as_dict()


def run(config: PlanConfig, context: Context) -> Mapping[str, Any]:
    """Plan and show."""
    return show(planned(config), context)


COMMAND = Command(
    name="plan",
    summary="Work out batch sizes, updates a call and host events before a run.",
    config=PlanConfig,
    run=run,
    epilog="Example: hotloop plan --num-epochs 6 --micro-batch-size 8 --global-batch-size 64 --json",
)

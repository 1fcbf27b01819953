"""`hotloop plan`: what a training run would do, worked out before anything is compiled."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from hotloop.cli.command import Command, Context, Result
from hotloop.engine.plan import EVENTS_GROUP, RUN_GROUP, Batch, Plan, PlanOptions
from hotloop.families.cnn.options import DATASET_SIZES
from hotloop.options import non_negative, option, positive


@dataclass(frozen=True)
class PlanConfig(PlanOptions):
    dataset: Literal["cifar10", "cifar100", "mnist", "imagenet"] = option(
        "cifar10", "The data set whose training samples are counted.", group=RUN_GROUP
    )
    samples: int | None = option(
        None, "Training samples, instead of --dataset.", check=positive, group=RUN_GROUP
    )
    validations_per_epoch: Fraction = option(
        Fraction(0),
        "Validations an epoch during the run, 0 for none.",
        check=non_negative,
        group=EVENTS_GROUP,
    )


def make_plan(config: PlanConfig) -> Plan:
    batch = Batch.of(
        config.micro_batch_size,
        config.num_replicas,
        accumulation=config.gradient_accumulation_count,
        global_size=config.global_batch_size,
    )
    samples = DATASET_SIZES[config.dataset].train if config.samples is None else config.samples
    return config.make_plan(samples, batch, validations_per_epoch=config.validations_per_epoch)


def run(config: PlanConfig, context: Context) -> Result:
    return context.show_plan(make_plan(config))


COMMAND = Command(
    config=PlanConfig,
    run=run,
    epilog="Example: hotloop plan --num-epochs 6 --micro-batch-size 8 --global-batch-size 64 --json",
)

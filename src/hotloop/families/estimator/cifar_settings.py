"""From the example's options to what runs on this device: the Estimator's run config, and the plan."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from hotloop.engine.device import platform
from hotloop.engine.plan import Batch, Plan, plan_updates
from hotloop.families.estimator import cifar_data
from hotloop.families.estimator.cifar_config import Cifar
from hotloop.families.estimator.cifar_network import PARAMETERS
from hotloop.families.estimator.run_config import RunConfig


def run_config(config: Cifar, folder: Path, images: int, report: Path | None) -> RunConfig:
    """The options as the Estimator has them, with its folder."""
    every = config.evaluation_period(images)
    return RunConfig(
        model_dir=folder,
        batch_size=config.batch_size,
        iterations_per_call=config.batches_per_step,
        replicas=config.replicas,
        accumulation=config.gradient_accumulation_count,
        precision=precision(config),
        seed=config.seed,
        log_steps=every,
        log_seconds=config.log_interval,
        summary_steps=config.summary_interval,
        checkpoint_steps=every,
        report=report,
    )


def precision(config: Cifar) -> Any:
    """The one asked for, else the recipe's on this device."""
    half = config.chosen.half and platform() != "cpu"
    return config.precision or ("16.32" if half else "32.32")


def planned(config: Cifar) -> tuple[str, Plan]:
    """What would run: network and rule in a line, and the plan; nothing is fetched or compiled."""
    images, recipe = cifar_data.training_images(config), config.chosen
    parts = config.replicas * config.gradient_accumulation_count
    total, every = config.total_updates(images), config.evaluation_period(images) or 0
    plan = plan_updates(
        total,
        log_every=every or total,
        validate_every=every,
        checkpoint_every=every or None,
        updates_per_epoch=Fraction(images, config.batch_size),
        batch=Batch(config.batch_size // parts, config.replicas, config.gradient_accumulation_count),
    )
    line = (
        f"{PARAMETERS:,} parameters, recipe {config.recipe}: {recipe.rule}, learning rate {config.learning_rate:g}, "
        f"augmentation {recipe.augmentation}, precision {precision(config)}; besides the events below a log every "
        f"{config.log_interval:g} s"
    )
    # That nothing is logged before the end is not so: logs go by seconds.
    return line, replace(plan, samples=images, longest_call=config.batches_per_step, warnings=())

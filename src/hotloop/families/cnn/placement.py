"""Batches of `hotloop cnn train`: what is asked for, and how it is placed on the devices that there are.

More replicas or stages than devices are no error: replicas become accumulation and stages merge, so that the
global batch, and with it every update, stays what it was. Whole numbers only, no jax.
"""

from collections.abc import Set
from dataclasses import dataclass

from hotloop.engine.batch import Batch
from hotloop.errors import DeviceError
from hotloop.families.cnn.config import Train

BATCH_OPTIONS = ("gradient_accumulation_count", "global_batch_size")


def stages(config: Train) -> int:
    """Stages that the splits make."""
    return len(config.pipeline_splits) + 1


def devices_per_replica(config: Train) -> int:
    """Devices over which the stages of one replica were meant to spread."""
    return stages(config) if config.device_mapping is None else max(config.device_mapping) + 1


def asked(config: Train, explicit: Set[str] = frozenset()) -> Batch:
    """The batch as the options have it; of accumulation and global size the one on the command line counts.

    Without that, both are one too many: a PlanError.
    """
    values = {name: getattr(config, name) for name in BATCH_OPTIONS}
    if replaced := replaced_option(config, explicit):
        values[replaced] = None
    return Batch.of(
        config.micro_batch_size,
        config.num_replicas,
        accumulation=values["gradient_accumulation_count"],
        global_size=values["global_batch_size"],
    )


def replaced_option(config: Train, explicit: Set[str]) -> str | None:
    """Which of accumulation and global size a configuration has and the command line replaces by the other."""
    given = [name for name in BATCH_OPTIONS if getattr(config, name) is not None]
    kept = [name for name in given if name in explicit]
    if len(given) == 2 and len(kept) == 1:
        return next(name for name in given if name not in kept)
    return None


@dataclass(frozen=True)
class Placed:
    """A batch on real devices, and the line that tells how it differs from the one asked for (or none)."""

    batch: Batch
    notice: str = ""


def place(config: Train, batch: Batch, devices: int, explicit: Set[str] = frozenset()) -> Placed:
    """The same global batch on at most `devices` replicas, each of which holds all stages."""
    _refuse(config, devices, explicit)
    group = config.dbn_replica_group_size
    units = batch.replicas // group * batch.accumulation
    # Replicas that share statistics are one replica with a larger micro-batch, sample for sample.
    most = min(devices, batch.replicas // group)
    replicas = next(count for count in range(most, 0, -1) if units % count == 0)
    placed = Batch(batch.micro * group, replicas, units // replicas)
    return Placed(placed, _notice(config, batch, placed, devices))


def _refuse(config: Train, devices: int, explicit: Set[str]) -> None:
    there = "there is 1 device" if devices == 1 else f"there are {devices} devices"
    # Who says that devices need not suffice gets accumulation for the replicas of a command line, too.
    must_suffice = "num_replicas" in explicit and "strict_devices" not in explicit
    if must_suffice and config.num_replicas > devices:
        raise DeviceError(
            f"--num-replicas {config.num_replicas}: {there}; ask for at most {devices}, or with "
            "--strict-devices False for accumulation in their place"
        )
    if not config.strict_devices:
        return
    per_replica = devices_per_replica(config)
    if config.num_replicas * per_replica > devices:
        raise DeviceError(
            f"--strict-devices: {_wish(config)} need {config.num_replicas * per_replica} devices and {there}; "
            "leave it out to run on these"
        )
    if per_replica > 1:
        raise DeviceError(
            f"--strict-devices: {_wish(config)}: stages run merged on one device; leave out --strict-devices "
            "or --pipeline-splits"
        )


def _wish(config: Train) -> str:
    per_replica = devices_per_replica(config)
    spread = f" x {per_replica} devices for {stages(config)} stages" if per_replica > 1 else ""
    return f"{config.num_replicas} replicas{spread}"


def _notice(config: Train, batch: Batch, placed: Batch, devices: int) -> str:
    changes = []
    if devices_per_replica(config) > 1:
        changes.append(f"{stages(config)} stages merge into one")
    if (group := config.dbn_replica_group_size) > 1:
        changes.append(f"{group} replicas that share statistics become a micro-batch of {placed.micro}")
    if placed.replicas < batch.replicas // group:
        changes.append(
            f"{batch.replicas // group} replicas become {placed.replicas} with accumulation {placed.accumulation} "
            f"instead of {batch.accumulation}"
        )
        if config.statistics_rule == "seed":
            changes.append("--statistics-rule seed then leaves out what lies between their means")
    if not changes:
        return ""
    on = f"{devices} device{'s' if devices > 1 else ''}"
    return f"{_wish(config)} on {on}: {'; '.join(changes)}; the global batch {batch.global_} and the learning rate stay"


def validation_size(config: Train) -> int:
    """Samples of one validation batch over all replicas, as the old program counted them."""
    piped = config.pipeline_validation_model and bool(config.pipeline_splits)
    replicas = config.num_replicas if piped else config.num_replicas * devices_per_replica(config)
    return (
        (config.validation_micro_batch_size or config.micro_batch_size)
        * (config.validation_num_replicas or replicas)
        * (2 * stages(config) if piped else 1)
    )

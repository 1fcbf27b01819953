"""Where a training computes: its replicas and stages on the devices that there are, and its validation.

What no devices could do is refused first (`check_placement`), before one is opened. More replicas or stages than
devices are no error: stages merge, and then replicas become accumulation, so that the global batch, and with it every
update, stays what it was; --strict-devices refuses that. No jax.
"""

import os
from collections.abc import Sequence, Set
from typing import NamedTuple

from hotloop.engine.device_shares import check_instances
from hotloop.engine.plan import Batch, EvaluationBatches
from hotloop.errors import DeviceError, OptionError, did_you_mean
from hotloop.families.cnn.options import TrainConfig

BATCH_OPTIONS = ("gradient_accumulation_count", "global_batch_size")
DEVICES_PER_REPLICA = "HOTLOOP_DEVICES_PER_REPLICA"  # what a launcher was told by --ipus-per-replica


class Asked(NamedTuple):
    """The batch of the configuration, and which of its options the command line replaces, if any."""

    batch: Batch
    replaced: str | None


class Placement(NamedTuple):
    """The samples of a batch on the devices in use, the layers that open a new stage on a device of its own (none:
    every replica has one device), and what the user should know of it."""

    batch: Batch
    splits: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Those in use."""
        return self.batch.replicas * (len(self.splits) + 1)


class ValidationPlacement(NamedTuple):
    """Batches of validation (None without that phase), the devices that share one where it does not run in the
    training's stages, and what the user should know of it."""

    batches: EvaluationBatches | None
    devices: int
    warnings: tuple[str, ...]
    notices: tuple[str, ...]


def check_placement(config: TrainConfig, layers: Sequence[str], explicit: Set[str], instances: int) -> Asked:
    """What is asked for; an OptionError, PlanError or DeviceError where no devices could make it work.

    `layers` are the model's, `explicit` the names of options from the command line itself, `instances` the processes.
    """
    _check_splits(config, layers)
    given, needed = os.environ.get(DEVICES_PER_REPLICA), config.devices_per_replica
    if given is not None and given != str(needed):
        stages = f"{config.stages} stage{'s' if config.stages > 1 else ''}"
        raise OptionError(
            f"--ipus-per-replica {given}: the {stages} of a replica take{'s' if config.stages == 1 else ''} "
            f"{needed} device{'s' if needed > 1 else ''} (--pipeline-splits, --device-mapping)"
        )
    check_instances(instances, config.num_replicas, needed)
    if config.strict_devices and not config.device_splits and needed > 1:
        mapping = " ".join(map(str, config.device_mapping or ()))
        raise DeviceError(
            f"--strict-devices: --device-mapping {mapping}: the stages of one device do not follow each other, so that "
            f"all {config.stages} would merge into one; leave one of the two out"
        )
    return _find_batch(config, explicit)


def _check_splits(config: TrainConfig, layers: Sequence[str]) -> None:
    """An OptionError where --pipeline-splits name no layer of the model, or not in its order."""
    splits = config.pipeline_splits
    for split in splits:
        if split not in layers:
            near = did_you_mean(split, layers) or ": hotloop cnn describe lists them"
            raise OptionError(f"--pipeline-splits {split}: no layer of {config.model_name}{near}")
    if list(splits) != (ordered := sorted(set(splits), key=layers.index)):
        raise OptionError(
            f"--pipeline-splits {' '.join(splits)}: must be different layers in the model's order: "
            f"{' '.join(ordered)}"
        )
    if layers[0] in splits:
        raise OptionError(f"--pipeline-splits {layers[0]}: the first layer opens the first stage anyway")


def _find_batch(config: TrainConfig, explicit: Set[str]) -> Asked:
    """Of accumulation and global size the one on the command line counts; without it both are one too many."""
    given = [name for name in BATCH_OPTIONS if getattr(config, name) is not None]
    kept = [name for name in given if name in explicit]
    replaced = next(name for name in given if name not in kept) if (len(given), len(kept)) == (2, 1) else None
    accumulation, global_size = (
        None if name == replaced else getattr(config, name) for name in BATCH_OPTIONS
    )
    batch = Batch.of(
        config.micro_batch_size, config.num_replicas, accumulation=accumulation, global_size=global_size
    )
    return Asked(batch, replaced)


def place(config: TrainConfig, asked: Asked, devices: int, explicit: Set[str], instances: int) -> Placement:
    """Stages and replicas on at most `devices` devices, of which every process gives equally many.

    Where they do not suffice, stages merge and then replicas become accumulation; DeviceError where that will not do.
    """
    there = "there is 1 device" if devices == 1 else f"there are {devices} devices"
    # Who says that devices need not suffice gets accumulation for the replicas of a command line, too.
    must_suffice = "num_replicas" in explicit and "strict_devices" not in explicit
    if must_suffice and config.num_replicas > devices:
        raise DeviceError(
            f"--num-replicas {config.num_replicas}: {there}; ask for at most {devices}, or with "
            "--strict-devices False for accumulation in their place"
        )
    needed = config.num_replicas * config.devices_per_replica
    splits = config.device_splits if needed <= devices else ()
    batch = _fit_batch(config, asked.batch, len(splits) + 1, devices, instances)
    notices = []
    if changes := _describe_changes(config, asked.batch, batch, splits):
        spread = f" x {config.devices_per_replica} devices for {config.stages} stages"
        replicas = f"{config.num_replicas} replica{'s' if config.num_replicas > 1 else ''}"
        wish = f"{replicas}{spread if config.devices_per_replica > 1 else ''}"
        if config.strict_devices:
            raise DeviceError(
                f"--strict-devices: {wish} need {needed} devices and {there}; leave it out to run on these"
            )
        on = f"{wish} on {devices} device{'s' if devices > 1 else ''}"
        stays = f"the global batch {batch.global_} and the learning rate stay"
        notices.append(f"{on}: {'; '.join(changes)}; {stays}")
    if asked.replaced:
        spelled = f"--{asked.replaced.replace('_', '-')} {getattr(config, asked.replaced)}"
        notices.append(f"{spelled} of the configuration is replaced")
    return Placement(batch, splits, tuple(notices))


def _fit_batch(config: TrainConfig, asked: Batch, stages: int, devices: int, instances: int) -> Batch:
    """The same samples on as many devices as can share them, each replica of so many stages.

    Replicas that share statistics are one replica with a larger micro-batch, sample for sample; where there are devices
    left they stay `apart` and add up their sums.
    """
    group = config.dbn_replica_group_size
    groups = asked.replicas // group
    units = groups * asked.accumulation
    for count in range(min(devices // stages, groups), 0, -1):
        for apart in range(group if count == groups else 1, 0, -1):
            used = count * apart * stages
            if units % count == group % apart == used % instances == 0 and used <= devices:
                return Batch(asked.micro * (group // apart), count * apart, units // count)
    merged = " with their stages merged" if config.devices_per_replica > stages else ""
    what = f"{groups} replicas{merged}" if group == 1 else f"{groups} groups of {group} replicas"
    raise DeviceError(
        f"--num-instances {instances}: {what} do not spread evenly over {instances} processes; start a number of them "
        f"that divides the {'replicas' if group == 1 else 'groups'}"
    )


def _describe_changes(config: TrainConfig, asked: Batch, placed: Batch, splits: tuple[str, ...]) -> list[str]:
    """What differs from the stages and replicas that were asked for; nothing where all have devices of their own."""
    changes = []
    if config.devices_per_replica > len(splits) + 1:
        mixed = "" if config.device_splits else ", as those of one device do not follow each other"
        changes.append(f"{config.stages} stages merge into one{mixed}")
    joined = placed.micro // asked.micro
    if joined > 1:
        changes.append(f"{joined} replicas that share statistics become a micro-batch of {placed.micro}")
    if placed.replicas * joined < asked.replicas:
        changes.append(
            f"{asked.replicas // config.dbn_replica_group_size} replicas become {placed.replicas} with accumulation "
            f"{placed.accumulation} instead of {asked.accumulation}"
        )
        if config.statistics_rule == "seed":
            changes.append("--statistics-rule seed then leaves out what lies between their means")
    return changes


def place_validation(
    config: TrainConfig, samples: int, placed: Placement, devices: int, instances: int
) -> ValidationPlacement:
    """Batches of the old program's size, over all replicas, on the devices of the training or those asked for."""
    if not config.validation:
        return ValidationPlacement(None, placed.devices, (), ())
    piped = config.pipeline_validation_model and bool(config.pipeline_splits)
    devices_each, shares = (1, 2 * config.stages) if piped else (config.devices_per_replica, 1)
    replicas = config.validation_num_replicas or config.num_replicas * devices_each
    at_once = replicas * shares * (config.validation_micro_batch_size or config.micro_batch_size)
    if piped and placed.splits:  # each replica's share is as many micro-batches again
        unit = placed.batch.replicas * shares
        at_once = -(-at_once // unit) * unit
        used, warnings = placed.devices, _warn_of_replicas_in_stages(config, placed.batch.replicas)
    else:
        used, warnings = _choose_devices(config, placed.devices, devices, instances)
    notices = []
    if not piped and placed.devices // instances % (len(placed.splits) + 1):
        notices.append(
            "stages lie in several processes: validation runs merged, with the whole network on every device; "
            "--pipeline-validation-model keeps it in stages"
        )
    return ValidationPlacement(EvaluationBatches(samples, at_once), used, tuple(warnings), tuple(notices))


def _warn_of_replicas_in_stages(config: TrainConfig, replicas: int) -> list[str]:
    asked = config.validation_num_replicas
    if asked in (None, replicas):
        return []
    return [
        f"--validation-num-replicas {asked}: in stages validation has the training's replicas: {replicas}"
    ]


def _choose_devices(config: TrainConfig, in_use: int, devices: int, instances: int) -> tuple[int, list[str]]:
    """How many devices share a batch of validation, and what is to be warned of: --validation-num-replicas, as far as
    there are devices and every process can give equally many; where it is not given, all that the run uses."""
    asked = config.validation_num_replicas
    if asked is None:
        return in_use, []
    count = max(min(asked, devices) // instances, 1) * instances
    if count == asked:
        return count, []
    why = f"there are {devices}" if asked > devices else f"each of {instances} processes gives equally many"
    devices_in_words = f"{count} device{'s' if count > 1 else ''}"
    return count, [f"--validation-num-replicas {asked}: validation takes {devices_in_words}, as {why}"]

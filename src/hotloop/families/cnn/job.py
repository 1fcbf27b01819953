"""`Job`: a training as it will be on this data and these devices; `resolve` makes it of the options.

A job is made before anything is compiled, so that a run which cannot work says so at once, and every warning and
notice comes before the first update. More replicas or stages than devices are no error: stages merge, and then replicas
become accumulation, so that the global batch, and with it every update, stays what it was.
"""

import os
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from hotloop.engine import optim, precision, processes
from hotloop.engine.device import REPLICA, device_mesh, platform
from hotloop.engine.plan import Batch, EvaluationBatches, Plan
from hotloop.engine.precision import SPLIT, AutoScale, LossScale
from hotloop.errors import DeviceError, OptionError, did_you_mean
from hotloop.families.cnn.network import Network, NormChoice, build
from hotloop.families.cnn.options import WITHOUT_EFFECT, DatasetSize, TrainConfig
from hotloop.layers.norm import ReplicaGroups

BATCH_OPTIONS = ("gradient_accumulation_count", "global_batch_size")
DEVICES_PER_REPLICA = "HOTLOOP_DEVICES_PER_REPLICA"  # what a launcher was told by --ipus-per-replica


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the training program is built from; hashable."""

    config: TrainConfig
    size: DatasetSize
    asked: Batch  # the batch of the configuration
    batch: Batch  # the same samples on the devices that there are
    plan: Plan | None  # None without a training phase
    validation: EvaluationBatches | None  # None without a validation phase
    network: Network
    policy: precision.Policy
    scale: LossScale
    optimiser: optim.Transformation = field(compare=False)  # it and the rate follow from what is above
    rate: Callable[[Array | int], Array] | None = field(compare=False)  # None without a training phase
    splits: tuple[
        str, ...
    ] = ()  # the layers that open a new stage, on a device of its own; fewer where stages merge
    repeated: bool = False  # whether every micro-batch of an update is the same one
    group: int = 1  # neighbouring replicas that take the statistics of batch norm together
    validation_devices: int = 1  # that share a batch of validation
    warnings: tuple[str, ...] = field(default=(), compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def stages(self) -> int:
        """Devices of a replica."""
        return len(self.splits) + 1

    @cached_property
    def mesh(self) -> Mesh | None:
        """Replicas x stages; None for one device."""
        replicas, stages = self.batch.replicas, self.stages
        return device_mesh(replicas, stages, platform()) if replicas * stages > 1 else None

    @property
    def sharding(self) -> NamedSharding | None:
        """Of a batch over the replicas."""
        return NamedSharding(self.mesh, SPLIT) if self.mesh is not None else None

    @property
    def validates_in_stages(self) -> bool:
        """Whether validation runs in the training's stages; else every device has the whole network."""
        return self.config.pipeline_validation_model and bool(self.splits)

    @cached_property
    def validation_sharding(self) -> NamedSharding | None:
        """Of a batch of validation over its devices; None for one."""
        if self.validates_in_stages:
            return self.sharding
        if self.validation_devices == 1:
            return None
        return NamedSharding(device_mesh(self.validation_devices, platform=platform()), SPLIT)

    @property
    def groups(self) -> ReplicaGroups | None:
        """The replicas in groups; None where each has statistics of its own."""
        if self.group == 1:
            return None
        firsts = range(0, self.batch.replicas, self.group)
        return ReplicaGroups(REPLICA, tuple(tuple(range(first, first + self.group)) for first in firsts))

    @property
    def shuffled(self) -> bool:
        return self.config.shuffle and not self.config.deterministic


def resolve(
    config: TrainConfig,
    size: DatasetSize,
    devices: int | None = None,
    explicit: Set[str] = frozenset(),
    configured: Set[str] = frozenset(),
    *,
    repeated: bool = False,
) -> Job:
    """The job on so many devices (None: on those that there are).

    `explicit` holds the names of options from the command line itself, `configured` of those that a configuration has.
    """
    _check_launched(config, processes.count())
    asked, batch, splits, notices = _place(config, devices, explicit, processes.count())
    if config.top_k > size.classes:
        raise OptionError(f"--top-k {config.top_k}: {config.dataset} has only {size.classes} classes")
    plan = config.make_plan(size.train, batch) if config.training else None
    # As the old program counted the samples of one validation batch over all replicas.
    piped = config.pipeline_validation_model and bool(config.pipeline_splits)
    devices_each, shares = (1, 2 * config.stages) if piped else (config.devices_per_replica, 1)
    replicas = config.validation_num_replicas or config.num_replicas * devices_each
    at_once = replicas * shares * (config.validation_micro_batch_size or config.micro_batch_size)
    if piped and splits:  # each replica's share is as many micro-batches again
        unit = batch.replicas * shares
        at_once = -(-at_once // unit) * unit
    validation = EvaluationBatches(size.validation, at_once) if config.validation else None
    devices_used = batch.replicas * (len(splits) + 1)
    validation_devices, warnings = _place_validation(config, devices, devices_used, processes.count())
    if piped and splits:
        own = config.validation_num_replicas in (None, batch.replicas)
        in_stages = f"in stages validation has the training's replicas: {batch.replicas}"
        warnings = [] if own else [f"--validation-num-replicas {config.validation_num_replicas}: {in_stages}"]
    if config.deterministic and config.shuffle:
        warnings.append("--deterministic: turns --shuffle off")
    if config.pipeline_validation_model and not config.pipeline_splits:
        warnings.append("--pipeline-validation-model: there are no --pipeline-splits, so it is off")
    if config.validation and not piped and devices_used // processes.count() % (len(splits) + 1):
        notices.append(
            "stages lie in several processes: validation runs merged, with the whole network on every device; "
            "--pipeline-validation-model keeps it in stages"
        )
    if "pipeline_schedule" in explicit and not config.pipeline_splits:
        warnings.append("--pipeline-schedule: there are no --pipeline-splits, so it changes nothing")
    if config.ckpt_all_instances and processes.count() == 1:
        warnings.append("--ckpt-all-instances: this is the only process, so it is off")
    named = explicit | configured | config.without_effect.keys()
    if ignored := [each.spelling for each in WITHOUT_EFFECT if each.name in named]:
        notices.append(f"without effect here: {', '.join(ignored)}")

    spared = config.exclude_norms_and_biases
    network = build(config.model_name, size.shape, size.classes, NormChoice.of(config.norm_layer))
    if config.pipeline_splits:
        _check_splits(config, [node.name for node in network.nodes])
    return Job(
        config=config,
        size=size,
        asked=asked,
        batch=batch,
        plan=plan,
        validation=validation,
        network=network,
        policy=precision.parse(
            config.precision,
            config.half,
            stochastic_rounding=config.stochastic_rounding != "OFF",
            half_partials=config.half_partials,
        ),
        scale=AutoScale() if config.auto_loss_scaling else float(config.loss_scaling or 1),
        optimiser=optim.make(
            config.optimizer,
            config.optimizer_params,
            weight_decay=config.weight_decay,
            l2=config.l2_regularization,
            global_batch_size=batch.global_,
            exclude=optim.exclude_norms_and_biases if spared else None,
        ),
        rate=optim.learning_rate(
            config.lr_schedule,
            config.lr_schedule_params,
            global_batch_size=batch.global_,
            updates_per_epoch=int(plan.updates_per_epoch),
            warmup=config.lr_warmup_params,
            staircase=config.lr_staircase,
        )
        if plan
        else None,
        splits=splits,
        repeated=repeated,
        validation_devices=validation_devices,
        group=config.dbn_replica_group_size * asked.micro // batch.micro,
        warnings=(*warnings, *asked.warnings, *plan.warnings) if plan else tuple(warnings),
        notices=tuple(notices),
    )


def _check_splits(config: TrainConfig, layers: list[str]) -> None:
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


class Placement(NamedTuple):
    """Who computes what: the batch that is asked for, the same samples on the devices in use, the layers that open a
    new stage on a device of its own (none: every replica has one device), and what the user should know of it."""

    asked: Batch
    batch: Batch
    splits: tuple[str, ...]
    notices: list[str]


def _place(config: TrainConfig, devices: int | None, explicit: Set[str], instances: int) -> Placement:
    """Stages and replicas on at most `devices` devices, of which every process gives equally many.

    Where they do not suffice, stages merge and then replicas become accumulation.
    """
    devices = len(jax.devices(platform())) if devices is None else devices
    asked, replaced = _asked_batch(config, explicit)
    there = "there is 1 device" if devices == 1 else f"there are {devices} devices"
    # Who says that devices need not suffice gets accumulation for the replicas of a command line, too.
    must_suffice = "num_replicas" in explicit and "strict_devices" not in explicit
    if must_suffice and config.num_replicas > devices:
        raise DeviceError(
            f"--num-replicas {config.num_replicas}: {there}; ask for at most {devices}, or with "
            "--strict-devices False for accumulation in their place"
        )
    per_replica, group = config.devices_per_replica, config.dbn_replica_group_size
    spread = f" x {per_replica} devices for {config.stages} stages" if per_replica > 1 else ""
    wish, needed = f"{config.num_replicas} replicas{spread}", config.num_replicas * per_replica
    if config.strict_devices and needed > devices:
        raise DeviceError(
            f"--strict-devices: {wish} need {needed} devices and {there}; leave it out to run on these"
        )
    splits = config.device_splits if needed <= devices and needed % instances == 0 else ()
    # Replicas that share statistics are one replica with a larger micro-batch, sample for sample; where there are
    # devices left they stay apart and add up their sums.
    grouped = asked.replicas // group
    units = grouped * asked.accumulation
    stages = len(splits) + 1
    fitting = [
        (count, apart)
        for count in range(min(devices // stages, grouped), 0, -1)
        for apart in range(group if count == grouped else 1, 0, -1)
        if units % count == 0
        and group % apart == 0
        and count * apart * stages <= devices
        and count * apart * stages % instances == 0
    ]
    if not fitting:
        most = f"{grouped} replicas" + (" with their stages merged" if per_replica > stages else "")
        raise DeviceError(
            f"--num-instances {instances}: {most} do not spread evenly over {instances} processes; start a number of "
            "them that divides the replicas"
        )
    replicas, apart = fitting[0]
    placed = Batch(asked.micro * (group // apart), replicas * apart, units // replicas)
    changes = []
    if per_replica > stages:
        mixed = "" if config.device_splits else ", as those of one device do not follow each other"
        changes.append(f"{config.stages} stages merge into one{mixed}")
    if apart < group:
        merged = f"{group // apart} replicas that share statistics"
        changes.append(f"{merged} become a micro-batch of {placed.micro}")
    if replicas < grouped:
        changes.append(
            f"{grouped} replicas become {placed.replicas} with accumulation {placed.accumulation} "
            f"instead of {asked.accumulation}"
        )
        if config.statistics_rule == "seed":
            changes.append("--statistics-rule seed then leaves out what lies between their means")
    notices = []
    if changes:
        on = f"{wish} on {devices} device{'s' if devices > 1 else ''}"
        stays = f"the global batch {asked.global_} and the learning rate stay"
        notices.append(f"{on}: {'; '.join(changes)}; {stays}")
    if replaced:
        spelled = f"--{replaced.replace('_', '-')} {getattr(config, replaced)}"
        notices.append(f"{spelled} of the configuration is replaced")
    return Placement(asked, placed, splits, notices)


def _place_validation(
    config: TrainConfig, devices: int | None, in_use: int, instances: int
) -> tuple[int, list[str]]:
    """How many devices share a batch of validation, and what is to be warned of: --validation-num-replicas, as far as
    there are devices and every process can give equally many; where it is not given, all that the run uses."""
    asked = config.validation_num_replicas
    if asked is None or not config.validation:
        return in_use, []
    there = len(jax.devices(platform())) if devices is None else devices
    count = max(min(asked, there) // instances, 1) * instances
    if count == asked:
        return count, []
    why = f"there are {there}" if asked > there else f"each of {instances} processes gives equally many"
    devices_in_words = f"{count} device{'s' if count > 1 else ''}"
    return count, [f"--validation-num-replicas {asked}: validation takes {devices_in_words}, as {why}"]


def _asked_batch(config: TrainConfig, explicit: Set[str]) -> tuple[Batch, str | None]:
    """The batch of the configuration, and which of its options the command line replaces.

    Of accumulation and global size the one on the command line counts; without it both are one too many.
    """
    given = [name for name in BATCH_OPTIONS if getattr(config, name) is not None]
    kept = [name for name in given if name in explicit]
    replaced = next(name for name in given if name not in kept) if (len(given), len(kept)) == (2, 1) else None
    accumulation, global_size = (
        None if name == replaced else getattr(config, name) for name in BATCH_OPTIONS
    )
    batch = Batch.of(
        config.micro_batch_size, config.num_replicas, accumulation=accumulation, global_size=global_size
    )
    return batch, replaced


def _check_launched(config: TrainConfig, instances: int) -> None:
    """An OptionError where the launcher's words do not fit the stages and replicas."""
    given, needed = os.environ.get(DEVICES_PER_REPLICA), config.devices_per_replica
    if given is not None and given != str(needed):
        stages = f"{config.stages} stage{'s' if config.stages > 1 else ''}"
        raise OptionError(
            f"--ipus-per-replica {given}: the {stages} of a replica take{'s' if config.stages == 1 else ''} "
            f"{needed} device{'s' if needed > 1 else ''} (--pipeline-splits, --device-mapping)"
        )
    if instances > config.num_replicas * needed:
        raise OptionError(
            f"--num-instances {instances}: {config.num_replicas} replicas x {needed} devices are fewer than "
            f"that; start at most {config.num_replicas * needed}"
        )

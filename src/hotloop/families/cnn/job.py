"""`Job`: a training as it will be on this data and these devices; `resolve` makes it of the options.

A job is made before anything is compiled, so that a run which cannot work says so at once, and every warning and
notice comes before the first update. What needs no device is checked before one is opened (`check_before_devices`).
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from hotloop.engine import optim, precision, processes
from hotloop.engine.device import REPLICA, device_mesh, platform
from hotloop.engine.plan import Batch, EvaluationBatches, Plan
from hotloop.engine.precision import SPLIT, AutoScale, LossScale
from hotloop.errors import OptionError
from hotloop.families.cnn.freezing import find_frozen, leave_out
from hotloop.families.cnn.initial_weights import check_origin, find_variant
from hotloop.families.cnn.network import Network, NormChoice, build
from hotloop.families.cnn.options import (
    ADAPTIVE,
    DECOUPLED,
    HIGH_RATE,
    WITHOUT_EFFECT,
    DatasetSize,
    TrainConfig,
)
from hotloop.families.cnn.own_folder import expected_size, is_own
from hotloop.families.cnn.placement import Asked, check_placement, place, place_validation
from hotloop.layers.norm import ReplicaGroups


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
    frozen: frozenset[str] = frozenset()  # layers that keep what they begin with
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


def check_before_devices(config: TrainConfig, explicit: Set[str] = frozenset()) -> None:
    """Refuse, before a device is opened and data are read, what could not work on any."""
    size = expected_size(config)
    network, _ = _check(fit_top_k(config, size, explicit), size, explicit)
    check_origin(config, network)


def fit_top_k(config: TrainConfig, size: DatasetSize, explicit: Set[str]) -> TrainConfig:
    """--top-k of one's own images is at most their classes, unless somebody asked for more."""
    is_default = is_own(config) and "top_k" not in explicit and config.top_k > size.classes
    return replace(config, top_k=size.classes) if is_default else config


def _check(config: TrainConfig, size: DatasetSize, explicit: Set[str]) -> tuple[Network, Asked]:
    """The network and the batch that are asked for; an error where no devices could make them work on this data."""
    if config.top_k > size.classes:
        data = config.dataset_path if is_own(config) else config.dataset
        raise OptionError(f"--top-k {config.top_k}: {data} has only {size.classes} classes")
    norm, variant = NormChoice.of(config.norm_layer), find_variant(config)
    network = build(config.model_name, size.shape, size.classes, norm, variant)
    asked = check_placement(config, [node.name for node in network.nodes], explicit, processes.count())
    if config.training:
        config.make_plan(size.train, asked.batch)
        for name in ("mixup", "cutmix"):
            if getattr(config, name) and asked.batch.global_ == 1:
                raise OptionError(f"--{name}: a batch of one image has no other one to mix it with")
    return network, asked


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
    config = fit_top_k(config, size, explicit)
    network, asked = _check(config, size, explicit)
    frozen = find_frozen(network, config.freeze)
    instances = processes.count()
    there = len(jax.devices(platform())) if devices is None else devices
    placed = place(config, asked, there, explicit, instances)
    validation = place_validation(config, size.validation, placed, there, instances)
    plan = config.make_plan(size.train, placed.batch) if config.training else None
    warnings = (
        *validation.warnings,
        *_warn_of_options(config, explicit),
        *_warn_of_rate(config, placed.batch),
    )
    return Job(
        config=config,
        size=size,
        asked=asked.batch,
        batch=placed.batch,
        plan=plan,
        validation=validation.batches,
        network=network,
        policy=precision.parse(
            config.precision,
            config.half,
            stochastic_rounding=config.stochastic_rounding != "OFF",
            half_partials=config.half_partials,
        ),
        scale=AutoScale() if config.auto_loss_scaling else float(config.loss_scaling or 1),
        optimiser=leave_out(_make_optimiser(config, placed.batch.global_), frozen),
        rate=_make_rate(config, plan) if plan else None,
        splits=placed.splits,
        repeated=repeated,
        frozen=frozen,
        validation_devices=validation.devices,
        group=config.dbn_replica_group_size * asked.batch.micro // placed.batch.micro,
        warnings=(*warnings, *asked.batch.warnings, *plan.warnings) if plan else warnings,
        notices=(*placed.notices, *validation.notices, *_name_ignored(config, explicit | configured)),
    )


def _make_optimiser(config: TrainConfig, global_size: int) -> optim.Transformation:
    return optim.make(
        config.optimizer,
        config.optimizer_params,
        weight_decay=config.weight_decay,
        l2=config.l2_regularization,
        global_batch_size=global_size,
        exclude=optim.exclude_norms_and_biases if config.exclude_norms_and_biases else None,
    )


def _make_rate(config: TrainConfig, plan: Plan) -> Callable[[Array | int], Array]:
    return optim.learning_rate(
        config.lr_schedule,
        config.lr_schedule_params,
        global_batch_size=plan.batch.global_,
        updates_per_epoch=int(plan.updates_per_epoch),
        warmup=config.lr_warmup_params,
        staircase=config.lr_staircase,
    )


def _warn_of_options(config: TrainConfig, explicit: Set[str]) -> list[str]:
    """Options that others turn off."""
    warnings = []
    if config.deterministic and config.shuffle:
        warnings.append("--deterministic: turns --shuffle off")
    if config.pipeline_validation_model and not config.pipeline_splits:
        warnings.append("--pipeline-validation-model: there are no --pipeline-splits, so it is off")
    if "pipeline_schedule" in explicit and not config.pipeline_splits:
        warnings.append("--pipeline-schedule: there are no --pipeline-splits, so it changes nothing")
    if config.l2_regularization and config.optimizer in DECOUPLED:
        warnings.append(
            f"--l2-regularization {config.l2_regularization:g}: {config.optimizer} scales it away with the gradient; "
            "--weight-decay is its decay"
        )
    if config.freeze and config.init_from is None:
        warnings.append(f"--freeze {config.freeze}: without --init-from the frozen layers stay random")
    if config.ckpt_all_instances and processes.count() == 1:
        warnings.append("--ckpt-all-instances: this is the only process, so it is off")
    return warnings


def _warn_of_rate(config: TrainConfig, batch: Batch) -> list[str]:
    """A rate that was meant for a whole batch, and grew with it: people know those of adaptive rules by heart."""
    given = config.lr_schedule_params.get("initial_learning_rate", 0)
    if not config.training or config.optimizer not in ADAPTIVE or given * batch.global_ <= HIGH_RATE:
        return []
    return [
        f"--lr-schedule-params: initial_learning_rate {given:g} is for one sample, and times the global batch "
        f"{batch.global_:,} {given * batch.global_:g}: much for {config.optimizer}; for a rate of {given:g} give "
        f"{given / batch.global_:.4g}"
    ]


def _name_ignored(config: TrainConfig, named: Set[str]) -> list[str]:
    """A line about the options without effect that somebody has named, if there are any."""
    ignored = [each.spelling for each in WITHOUT_EFFECT if each.name in named | config.without_effect.keys()]
    return [f"without effect here: {', '.join(ignored)}"] if ignored else []

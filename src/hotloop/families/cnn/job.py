"""Batches of `hotloop cnn train`: what is asked for, and how it is placed on the devices that there are.

More replicas or stages than devices are no error: replicas become accumulation and stages merge, so that the
global batch, and with it every update, stays what it was. Whole numbers only, no jax.

`resolve`: from what was asked for to what will run, on this data and these devices; numbers and names only.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from hotloop.engine.batch import Batch, EvaluationBatches, plan_evaluation
from hotloop.engine.optim_keys import check_optimiser
from hotloop.engine.plan import Plan
from hotloop.errors import DeviceError, OptionError
from hotloop.families.cnn.checks import check_splits
from hotloop.families.cnn.norms import NormChoice
from hotloop.families.cnn.options import NO_EFFECT, Train
from hotloop.options import Params

BATCH_OPTIONS = ("gradient_accumulation_count", "global_batch_size")


def count_stages(config: Train) -> int:
    """Stages that the splits make."""
    return len(config.pipeline_splits) + 1


def devices_per_replica(config: Train) -> int:
    """Devices over which the stages of one replica were meant to spread."""
    return count_stages(config) if config.device_mapping is None else max(config.device_mapping) + 1


def requested_batch(config: Train, explicit: Set[str] = frozenset()) -> Batch:
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
class PlacedBatch:
    """A batch on real devices, and the line that tells how it differs from the one asked for (or none)."""

    batch: Batch
    notice: str = ""


def place_batch(config: Train, batch: Batch, devices: int, explicit: Set[str] = frozenset()) -> PlacedBatch:
    """The same global batch on at most `devices` replicas, each of which holds all stages."""
    _check_devices(config, devices, explicit)
    group = config.dbn_replica_group_size
    units = batch.replicas // group * batch.accumulation
    # Replicas that share statistics are one replica with a larger micro-batch, sample for sample.
    most = min(devices, batch.replicas // group)
    replicas = next(count for count in range(most, 0, -1) if units % count == 0)
    placed = Batch(batch.micro * group, replicas, units // replicas)
    return PlacedBatch(placed, _placement_notice(config, batch, placed, devices))


def _check_devices(config: Train, devices: int, explicit: Set[str]) -> None:
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
    spread = f" x {per_replica} devices for {count_stages(config)} stages" if per_replica > 1 else ""
    return f"{config.num_replicas} replicas{spread}"


def _placement_notice(config: Train, batch: Batch, placed: Batch, devices: int) -> str:
    changes = []
    if devices_per_replica(config) > 1:
        changes.append(f"{count_stages(config)} stages merge into one")
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
        * (2 * count_stages(config) if piped else 1)
    )


MOMENTUM = {"batch_norm": 0.99, "custom_batch_norm": 0.97}
"""Momentum of running statistics where --norm-layer has none: each the old program's."""


class DatasetSize(NamedTuple):
    """What must be known of a data set."""

    train: int
    validation: int
    shape: tuple[int, int, int]
    classes: int


SAMPLES = {
    "imagenet": DatasetSize(1_281_167, 50_000, (224, 224, 3), 1000),
    "cifar10": DatasetSize(50_000, 10_000, (32, 32, 3), 10),
    "cifar100": DatasetSize(50_000, 10_000, (32, 32, 3), 100),
    "mnist": DatasetSize(60_000, 10_000, (28, 28, 1), 10),
}
"""--dataset -> what its complete files hold; synthetic data have the same sizes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run as it will be; hashable. `asked` is the batch of the configuration, `batch` the one that runs."""

    model: str
    dataset: str
    samples: DatasetSize
    norm: NormChoice
    statistics_rule: str
    splits: tuple[str, ...]
    recomputation: bool
    asked: Batch
    batch: Batch
    validation: EvaluationBatches | None
    """None without a validation phase."""
    optimizer: str
    optimizer_params: Params
    weight_decay: float
    l2: float
    exclude_norms_and_biases: bool
    schedule: str
    schedule_params: Params
    warmup: Params | None
    staircase: bool
    loss_scale: float
    """1 without scaling; without meaning under `auto_loss_scale`."""
    auto_loss_scale: bool
    precision: str
    half: str
    stochastic_rounding: bool
    half_partials: bool
    smoothing: float | None
    epochs: int
    plan: Plan | None
    """None without a training phase."""
    seed: int | None
    shuffle: bool
    warnings: tuple[str, ...] = field(default=(), compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def base_rate(self) -> float:
        """The highest rate of the schedule for the global batch, warm-up aside."""
        if self.schedule == "stepped":
            return float(max(self.schedule_params["values"]))
        return float(self.schedule_params["initial_learning_rate"]) * self.batch.global_


def resolve(
    config: Train,
    samples: DatasetSize,
    devices: int,
    explicit: Set[str] = frozenset(),
    configured: Set[str] = frozenset(),
) -> Settings:
    """The settings on so many devices; `explicit` holds the names of options from the command line itself,
    `configured` of those that a configuration has."""
    batch = requested_batch(config, explicit)
    check_optimiser(config.optimizer, config.optimizer_params, global_batch_size=batch.global_)
    if config.pipeline_splits:
        check_splits(config.pipeline_splits, _layer_names(config, samples), config.model_name)
    if config.top_k > samples.classes:
        raise OptionError(f"--top-k {config.top_k}: {config.dataset} has only {samples.classes} classes")
    placed = place_batch(config, batch, devices, explicit)
    plan = config.make_plan(samples.train, placed.batch) if config.training else None
    warnings = (*_warnings(config), *(batch.warnings if plan else ()), *(plan.warnings if plan else ()))
    notices = (
        placed.notice,
        _replacement_notice(config, explicit),
        _no_effect_notice(config, explicit | configured),
    )
    return Settings(
        model=config.model_name,
        dataset=config.dataset,
        samples=samples,
        norm=read_norm(config.norm_layer),
        statistics_rule=config.statistics_rule,
        splits=config.pipeline_splits,
        recomputation=config.recomputation,
        asked=batch,
        batch=placed.batch,
        validation=plan_evaluation(samples.validation, validation_size(config))
        if config.validation
        else None,
        optimizer=config.optimizer,
        optimizer_params=config.optimizer_params,
        weight_decay=config.weight_decay,
        l2=config.l2_regularization,
        exclude_norms_and_biases=config.exclude_norms_and_biases,
        schedule=config.lr_schedule,
        schedule_params=config.lr_schedule_params,
        warmup=config.lr_warmup_params,
        staircase=config.lr_staircase,
        loss_scale=config.loss_scaling or 1.0,
        auto_loss_scale=config.auto_loss_scaling,
        precision=config.precision,
        half=config.half,
        stochastic_rounding=config.stochastic_rounding != "OFF",
        half_partials=config.half_partials,
        smoothing=config.label_smoothing,
        epochs=config.num_epochs,
        plan=plan,
        seed=config.seed,
        shuffle=config.shuffle and not config.deterministic,
        warnings=warnings,
        notices=tuple(filter(None, notices)),
    )


def read_norm(params: Params) -> NormChoice:
    """--norm-layer as the network takes it."""
    if params["name"] == "group_norm":
        return NormChoice(
            "group", groups=params.get("num_groups"), channels_per_group=params.get("channels_per_group")
        )
    return NormChoice("batch", momentum=float(params.get("momentum", MOMENTUM[params["name"]])))


def _layer_names(config: Train, samples: DatasetSize) -> list[str]:
    from hotloop.families.cnn.network import build

    network = build(config.model_name, samples.shape, samples.classes, read_norm(config.norm_layer))
    return [layer.name for layer in network.layers]


def _warnings(config: Train) -> list[str]:
    found = []
    if config.deterministic and config.shuffle:
        found.append("--deterministic: turns --shuffle off")
    if config.pipeline_validation_model and not config.pipeline_splits:
        found.append("--pipeline-validation-model: there are no --pipeline-splits, so it is off")
    if config.ckpt_all_instances:
        found.append("--ckpt-all-instances: this is the only process, so it is off")
    return found


def _replacement_notice(config: Train, explicit: Set[str]) -> str:
    replaced = replaced_option(config, explicit)
    return (
        f"{_spell(replaced)} {getattr(config, replaced)} of the configuration is replaced" if replaced else ""
    )


def _no_effect_notice(config: Train, asked_for: Set[str]) -> str:
    given = [
        name
        for name in NO_EFFECT
        if name in asked_for or getattr(config, name) != Train.__dataclass_fields__[name].default
    ]
    return f"without effect here: {', '.join(map(_spell, given))}" if given else ""


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"

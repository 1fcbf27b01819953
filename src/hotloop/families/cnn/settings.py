"""`resolve`: from what was asked for to what will run, on this data and these devices; numbers and names only.

`Settings` is all that the training program is built from. It is made before anything is compiled, so that a run
which cannot work says so at once, and every warning and notice comes before the first update. No jax.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from hotloop.engine.batch import Batch, EvaluationBatches, plan_evaluation
from hotloop.engine.optim_keys import check_optimiser
from hotloop.engine.plan import Plan
from hotloop.errors import OptionError
from hotloop.families.cnn.checks import check_splits
from hotloop.families.cnn.config import Train
from hotloop.families.cnn.norms import Norm
from hotloop.families.cnn.old_options import NO_EFFECT
from hotloop.families.cnn.placement import asked, place, replaced_option, validation_size
from hotloop.options import Params

MOMENTUM = {"batch_norm": 0.99, "custom_batch_norm": 0.97}
"""Momentum of running statistics where --norm-layer has none: each the old program's."""


class Samples(NamedTuple):
    """What must be known of a data set."""

    train: int
    validation: int
    shape: tuple[int, int, int]
    classes: int


SAMPLES = {
    "imagenet": Samples(1_281_167, 50_000, (224, 224, 3), 1000),
    "cifar10": Samples(50_000, 10_000, (32, 32, 3), 10),
    "cifar100": Samples(50_000, 10_000, (32, 32, 3), 100),
    "mnist": Samples(60_000, 10_000, (28, 28, 1), 10),
}
"""--dataset -> what its complete files hold; synthetic data have the same sizes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run as it will be; hashable. `asked` is the batch of the configuration, `batch` the one that runs."""

    model: str
    dataset: str
    samples: Samples
    norm: Norm
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
    samples: Samples,
    devices: int,
    explicit: Set[str] = frozenset(),
    configured: Set[str] = frozenset(),
) -> Settings:
    """The settings on so many devices; `explicit` holds the names of options from the command line itself,
    `configured` of those that a configuration has."""
    batch = asked(config, explicit)
    check_optimiser(config.optimizer, config.optimizer_params, global_batch_size=batch.global_)
    if config.pipeline_splits:
        check_splits(config.pipeline_splits, _layers(config, samples), config.model_name)
    if config.top_k > samples.classes:
        raise OptionError(f"--top-k {config.top_k}: {config.dataset} has only {samples.classes} classes")
    placed = place(config, batch, devices, explicit)
    plan = config.planned(samples.train, placed.batch) if config.training else None
    warnings = (*_warnings(config), *(batch.warnings if plan else ()), *(plan.warnings if plan else ()))
    notices = (placed.notice, _replacement(config, explicit), _no_effect(config, explicit | configured))
    return Settings(
        model=config.model_name,
        dataset=config.dataset,
        samples=samples,
        norm=norm(config.norm_layer),
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


def norm(params: Params) -> Norm:
    """--norm-layer as the network takes it."""
    if params["name"] == "group_norm":
        return Norm(
            "group", groups=params.get("num_groups"), channels_per_group=params.get("channels_per_group")
        )
    return Norm("batch", momentum=float(params.get("momentum", MOMENTUM[params["name"]])))


def _layers(config: Train, samples: Samples) -> list[str]:
    from hotloop.families.cnn.network import build

    network = build(config.model_name, samples.shape, samples.classes, norm(config.norm_layer))
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


def _replacement(config: Train, explicit: Set[str]) -> str:
    replaced = replaced_option(config, explicit)
    return (
        f"{_spelled(replaced)} {getattr(config, replaced)} of the configuration is replaced"
        if replaced
        else ""
    )


def _no_effect(config: Train, asked_for: Set[str]) -> str:
    given = [
        name
        for name in NO_EFFECT
        if name in asked_for or getattr(config, name) != Train.__dataclass_fields__[name].default
    ]
    return f"without effect here: {', '.join(map(_spelled, given))}" if given else ""


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"

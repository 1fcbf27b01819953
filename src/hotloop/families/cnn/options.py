"""Every option of `hotloop cnn train`, in the order of its help; those that change nothing stand in one table.

Names and defaults are the old program's, so that its command lines and files mean the same here. What a config means
on the data and devices at hand is said by `job.resolve`. No jax.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hotloop.engine.optim_keys import check_loss_scaling, check_optimiser, check_schedule
from hotloop.engine.plan import BATCH_GROUP, EVENTS_GROUP, RUN_GROUP, PlanOptions
from hotloop.errors import OptionError
from hotloop.options import (
    Options,
    Params,
    argument,
    between,
    did_you_mean,
    folder_name,
    non_negative,
    option,
    option_table,
    positive,
    table_option,
)

MODEL, OPTIMISER, RATE, NUMBERS = "Model", "Optimiser", "Learning rate", "Numbers"
DATA, VALIDATION, RECORDS = "Data", "Validation", "Records"
PIPELINE, OLD = "Pipeline stages", "Without effect here"
NORMS = {
    "batch_norm": ("momentum",),
    "custom_batch_norm": ("momentum",),
    "group_norm": ("num_groups", "channels_per_group"),
}
"""--norm-layer's names -> the keys that each may have."""
ADAPTIVE_KEYS = ("eeta", "epsilon", "weight_decay")
DECAY_KEYS = ("epochs_to_total_decay", "end_learning_rate_ratio", "power", "boundaries", "values")
DatasetName = Literal["imagenet", "cifar10", "cifar100", "mnist"]
SYNTHETIC = {"host": "host", "device": "device", "cpu": "host", "ipu": "device"}
"""Every word for where synthetic data are made -> the one used here."""
MODELS = (
    *(f"resnet{layers}" for layers in (18, 34, 50, 101, 152)),
    *(f"cifar_resnet{layers}" for layers in (8, 20, 32, 44, 56)),
    "toy_model",
    "toy_model_bn",
)


class DatasetSize(NamedTuple):
    """What must be known of a data set."""

    train: int
    validation: int
    shape: tuple[int, int, int]
    classes: int


DATASET_SIZES = {
    "imagenet": DatasetSize(1_281_167, 50_000, (224, 224, 3), 1000),
    "cifar10": DatasetSize(50_000, 10_000, (32, 32, 3), 10),
    "cifar100": DatasetSize(50_000, 10_000, (32, 32, 3), 100),
    "mnist": DatasetSize(60_000, 10_000, (28, 28, 1), 10),
}
"""--dataset -> what its complete files hold; synthetic data have the same sizes."""


def cifar_layers(model: str) -> int | None:
    """The layers that a name such as cifar_resnet20 asks for; None for other names and for numbers not 6n + 2."""
    found = re.fullmatch(r"cifar_resnet([1-9][0-9]{0,3})", model)
    layers = int(found[1]) if found else 0
    return layers if layers >= 8 and layers % 6 == 2 else None


def check_model(name: Any) -> str | None:
    """The reason why a name is no model's, with all the names that are."""
    if name in MODELS or cifar_layers(name):
        return None
    return f"must be one of {', '.join(MODELS)}, or another cifar_resnet of 6n + 2 layers"


def parse_synthetic(text: str) -> str:
    if text.lower() not in SYNTHETIC:
        raise ValueError("must be host (or cpu) or device (or ipu)")
    return SYNTHETIC[text.lower()]


# Read, so that old command lines and files load; one notice names those that were given.
_old = partial(table_option, group=OLD)
WITHOUT_EFFECT = (
    table_option(
        "pipeline_schedule",
        Literal["Grouped", "Interleaved", "Sequential"],
        "Grouped",
        "Order in which stages take micro-batches; without effect while they run merged.",
        group=PIPELINE,
    ),
    _old("on_demand", bool, True, "Devices are opened when they are needed."),
    _old("accelerator_side_reduction", bool, False, "Metrics are always reduced on the device."),
    _old("optimizer_state_offloading", bool, True, "The optimiser's state stays on the device."),
    _old("fp_exceptions", bool, False, "A loss that is not finite always stops a run."),
    _old("nanoo", bool, False, "What overflows float16 becomes infinite."),
    _old("fused_preprocessing", bool, False, "The compiler fuses the normalisation by itself."),
    _old(
        "internal_exchange_optimization_target",
        Literal["cycles", "memory", "balanced"] | None,
        None,
        "Nothing to exchange.",
    ),
    _old(
        "max_cross_replica_buffer_size",
        int,
        0,
        "The compiler combines sums over replicas.",
        check=non_negative,
    ),
    _old("max_reduce_many_buffer_size", int, 0, "The compiler combines reductions.", check=non_negative),
    _old("conv_dithering", bool, False, "Convolutions have no start tiles."),
    _old("gather_conv_output", bool, False, "The compiler combines small sums."),
    _old("min_remote_tensor_size", int, 128, "Nothing is stored off the device.", check=non_negative),
    _old("stable_norm", bool, False, "Statistics of norms are always float32 and stable."),
    _old(
        "available_memory_proportion",
        tuple[float, ...],
        (),
        "Percent of memory for convolutions and products: one value, or two for each stage.",
        check=between(0, 100),
    ),
    _old(
        "scheduling_algorithm",
        Literal["CHOOSE_BEST", "CLUSTERING", "POST_ORDER", "LOOK_AHEAD", "SHORTEST_PATH"],
        "CHOOSE_BEST",
        "The compiler schedules by itself.",
    ),
    _old("prefetch_depth", int, 1, "The next call's batches are always on their way.", check=positive),
)


@dataclass(frozen=True)
class TrainConfig(Options, PlanOptions):
    """What was asked for; hashable. `without_effect` has the values of its table that are not the defaults."""

    training: bool = option(True, "Train.", group=RUN_GROUP)
    resume: bool = option(False, "Go on with the newest run of this name.", group=RUN_GROUP)
    compile_only: bool = option(False, "Compile the training program, and stop.", group=RUN_GROUP)
    plan: bool = option(False, "Say what would run, and stop.", group=RUN_GROUP)
    strict_devices: bool = option(
        False,
        "Stop where a configuration asks for more devices than there are, instead of merging stages and "
        "accumulating for the missing replicas.",
        group=BATCH_GROUP,
    )
    dataset: DatasetName = option("cifar10", "The images.", group=DATA)
    dataset_path: Path = option(Path(), "Folder with the data set's files.", group=DATA)
    synthetic_data: Literal["host", "device"] | None = option(
        None,
        "Train on made-up images of the data set's shape, from the host (cpu) or made on the device (ipu).",
        parse=parse_synthetic,
        group=DATA,
    )
    eight_bit_transfer: bool = option(
        False, "Send images as bytes; with --accelerator-side-preprocess.", group=DATA
    )
    accelerator_side_preprocess: bool = option(
        False,
        "Augmenting and normalising happen on the device in any case; --eight-bit-transfer asks for this, as before.",
        group=DATA,
    )
    pipeline_num_parallel: int = option(
        48, "At most so many workers that decode images on the host.", check=positive, group=DATA
    )
    skip_corrupt: bool = option(
        False,
        "Let other images take the place of broken ones, and count them; else the first one stops the run.",
        group=DATA,
    )
    shuffle: bool = option(True, "Shuffle the training images; validation never does.", group=DATA)
    seed: int | None = option(
        None,
        "Seed of weights, order and draws; left out, one is drawn and told.",
        check=between(0, 2**63 - 1),
        group=DATA,
    )
    deterministic: bool = option(
        False,
        "Give the same bits again for the same seed, on a GPU by slower kernels; turns --shuffle off.",
        group=DATA,
    )
    model_name: str = option(
        "toy_model",
        "The network: resnet18, 34, 50, 101, 152; cifar_resnet8, 20, 32, 44, 56; toy_model, toy_model_bn.",
        aliases=("--model",),
        metavar="NAME",
        check=check_model,
        group=MODEL,
    )
    norm_layer: Params = option(
        Params(name="custom_batch_norm", momentum=0.97),
        "Normalisation: name batch_norm or custom_batch_norm (the same here) with momentum; or group_norm with "
        "num_groups or channels_per_group.",
        group=MODEL,
    )
    statistics_rule: Literal["spread", "seed"] = option(
        "spread",
        "Running variance of batch norm: spread counts the differences between the means of micro-batches, so that "
        "any split equals the undivided batch; seed leaves them out, as the old program did.",
        group=MODEL,
    )
    dbn_replica_group_size: int = option(
        1, "Replicas that share batch-norm statistics; 1: none.", check=positive, group=MODEL
    )
    label_smoothing: float | None = option(
        None, "Share of each label spread over all classes.", check=between(0, 1), group=MODEL
    )
    optimizer: Literal["sgd", "lars", "rmsprop", "momentum", "rmsprop_outside", "adam", "adamw", "muon"] = (
        option(
            "sgd",
            "The update rule; muon is for matrices and kernels, everything else goes by adam.",
            group=OPTIMISER,
        )
    )
    optimizer_params: Params = option(
        Params(momentum=0),
        "sgd, momentum: momentum, nesterov; lars: momentum, weight_decay, eeta, epsilon; rmsprop: momentum, "
        "base_decay_exponent, epsilon; rmsprop_outside: decay, epsilon; "
        "adam, adamw: b1, b2, eps (adamw: weight_decay); muon: beta, weight_decay.",
        group=OPTIMISER,
    )
    weight_decay: float = option(
        0.0, "Decay beside the rule: the step is -rate * (rule + X * W).", check=non_negative, group=OPTIMISER
    )
    l2_regularization: float = option(
        0.0,
        "Decay through the rule: X * W is added to the gradient, and so passes the momentum.",
        check=non_negative,
        group=OPTIMISER,
    )
    exclude_norms_and_biases: bool = option(
        False,
        "Leave scales, offsets and biases out of both decays; most recent recipes do.",
        group=OPTIMISER,
    )
    lr_schedule: Literal["const", "cosine", "stepped", "polynomial", "exponential", "one_cycle"] = option(
        "const", "Shape of the rate over the run.", group=RATE
    )
    lr_schedule_params: Params = option(
        Params(initial_learning_rate=0.0001),
        "initial_learning_rate is for one sample and grows with the global batch; cosine and polynomial: "
        "epochs_to_total_decay; polynomial: end_learning_rate_ratio, power; exponential: decay_rate, decay_epochs; "
        "one_cycle: total_epochs, peak_epoch; stepped: boundaries (epochs) and one more values, taken as they are.",
        group=RATE,
    )
    lr_warmup_params: Params | None = option(
        None,
        "warmup_epochs, and warmup_mode: shift starts the schedule after the warm-up, mask lets it run from the "
        "first update.",
        group=RATE,
    )
    lr_staircase: bool = option(False, "Keep the rate of an epoch's first update all epoch.", group=RATE)
    precision: Literal["16.16", "16.32", "32.32"] = option(
        "16.16", "Bits of the computation and of the weights kept between updates.", group=NUMBERS
    )
    half: Literal["bfloat16", "float16"] = option(
        "bfloat16",
        "What 16 bits are. bfloat16 has the range of float32, so that no gradient under- or overflows and no loss "
        "scaling is needed; float16 is the old program's, finer and to be used with --loss-scaling.",
        group=NUMBERS,
    )
    half_partials: bool = option(
        False, "Also add up products in 16 bits, where the device can.", group=NUMBERS
    )
    stochastic_rounding: Literal["ON", "OFF", "replica-identical"] = option(
        "ON",
        "Round 16-bit weights up or down at random, so that small steps count on average; replicas always round "
        "alike, and validation never does.",
        group=NUMBERS,
    )
    loss_scaling: float = option(
        0.0,
        "Multiply the loss by this and divide the gradients; 0: not at all.",
        check=non_negative,
        group=NUMBERS,
    )
    auto_loss_scaling: bool = option(
        False,
        "Find the factor during the run; for sgd without momentum and a constant rate.",
        group=NUMBERS,
    )
    checkpoint_input_dir: Path | None = option(
        None,
        "A run's folder, or one of checkpoints, to validate instead of those just made.",
        metavar="DIR",
        group=EVENTS_GROUP,
    )
    checkpoint_output_dir: Path | None = option(
        None, "Folder for checkpoints; left out, one in the run's folder.", metavar="DIR", group=EVENTS_GROUP
    )
    ckpt_all_instances: bool = option(
        False, "Every process of a distributed run saves, not the first alone.", group=EVENTS_GROUP
    )
    clean_dir: bool | None = option(
        None,
        "After validation remove all checkpoints that this run made (True) or none of them (False); left out, the best "
        "and the last stay.",
        group=EVENTS_GROUP,
    )
    validation: bool = option(True, "Validate every checkpoint after training.", group=VALIDATION)
    random_weights: bool = option(
        False, "Validate random weights, where no checkpoint is meant to be there.", group=VALIDATION
    )
    validation_micro_batch_size: int | None = option(
        None, "Images at once per replica; left out, the training's.", check=positive, group=VALIDATION
    )
    validation_num_replicas: int | None = option(
        None,
        "Replicas in validation; left out, one for each device of the training, or as many as in training with "
        "--pipeline-validation-model.",
        check=positive,
        group=VALIDATION,
    )
    pipeline_validation_model: bool = option(
        False, "Validate with the training's pipeline stages.", group=VALIDATION
    )
    top_k: int = option(
        5, "Also count labels among the K likeliest classes.", check=positive, group=VALIDATION
    )
    sweep: bool = option(False, "Also tell when --target-accuracy was reached.", group=VALIDATION)
    target_accuracy: float = option(
        0.759, "Accuracy that --sweep asks for, as a fraction.", check=between(0, 1), group=VALIDATION
    )
    results_dir: Path = option(Path("results"), "Folder in which runs get theirs.", group=RECORDS)
    run_name: str | None = option(
        None, "Name of the run's folder; else made of model and data.", check=folder_name, group=RECORDS
    )
    report: Path | None = option(
        None, "Write the compiler's report and a profile to this folder.", metavar="DIR", group=RECORDS
    )
    mlperf_logging: bool = option(
        False, "Compile and load before the clock of time-to-train starts.", group=RECORDS
    )
    wandb: bool = option(False, "Log to Weights & Biases, too.", group=RECORDS)
    wandb_run_name: str | None = option(None, "The run's name there.", group=RECORDS)
    wandb_tags: tuple[str, ...] | None = option(None, "The run's tags there.", group=RECORDS)
    expect: str = option("", "What a configuration promises, in its own words.", hidden=True, group=RECORDS)
    pipeline_splits: tuple[str, ...] = option(
        (), "Layers that open a new stage, in the model's order.", metavar="LAYER ...", group=PIPELINE
    )
    device_mapping: tuple[int, ...] | None = option(
        None, "Device of each stage, from 0 without gaps.", check=non_negative, group=PIPELINE
    )
    recomputation: bool = option(
        False, "Compute activations again in the backward pass, stage by stage: less memory.", group=PIPELINE
    )
    without_effect: Params = option_table(*WITHOUT_EFFECT)

    def check(self) -> None:
        check_options(self)

    @property
    def stages(self) -> int:
        return len(self.pipeline_splits) + 1

    @property
    def devices_per_replica(self) -> int:
        """Devices over which the stages of one replica were meant to spread."""
        return self.stages if self.device_mapping is None else max(self.device_mapping) + 1


@dataclass(frozen=True)
class ValidateConfig(TrainConfig):
    """The same options, and the run that has values for them."""

    run: Path | None = argument(
        "Folder of a run, or of its checkpoints; its options are used.", default=None, metavar="RUN"
    )


def check_options(config: TrainConfig) -> None:
    """An OptionError that names the option where options do not go together.

    What depends on the data, the devices or the layers of the model is checked by `job.resolve`.
    """
    _check_stages(config)
    _check_shared_statistics(config)
    if not config.accelerator_side_preprocess:
        if config.eight_bit_transfer:
            raise OptionError("--eight-bit-transfer: needs --accelerator-side-preprocess")
        if config.without_effect.get("fused_preprocessing"):
            raise OptionError("--fused-preprocessing: needs --accelerator-side-preprocess")
    check_norm(config.norm_layer)
    if config.auto_loss_scaling:
        _check_automatic_scaling(config)
    check_optimiser(config.optimizer, config.optimizer_params)
    check_schedule(config.lr_schedule, config.lr_schedule_params, config.lr_warmup_params)
    check_loss_scaling(config.loss_scaling, config.auto_loss_scaling)
    if config.ckpt_all_instances and config.ckpts_per_epoch == 0:
        raise OptionError(
            "--ckpt-all-instances: --ckpts-per-epoch 0 saves no checkpoints; ask for some, or leave it out"
        )


def _check_stages(config: TrainConfig) -> None:
    mapping, stages = config.device_mapping, config.stages
    if config.recomputation and stages == 1:
        raise OptionError("--recomputation: goes stage by stage, so it needs --pipeline-splits")
    if mapping is not None:
        given = f"--device-mapping {' '.join(map(str, mapping))}"
        if len(mapping) != stages:
            raise OptionError(
                f"{given}: has {len(mapping)} entries for {stages} stages (--pipeline-splits and one more)"
            )
        if set(mapping) != set(range(max(mapping) + 1)):
            raise OptionError(f"{given}: must use every device from 0 to {max(mapping)}")
    count = len(config.without_effect.get("available_memory_proportion", ()))
    if count > 1 and stages == 1:
        raise OptionError(
            f"--available-memory-proportion: {count} values without --pipeline-splits; give one"
        )
    if count > 1 and count != 2 * stages:
        raise OptionError(
            f"--available-memory-proportion: {count} values for {stages} stages; give one, or {2 * stages} "
            "(convolutions and products of each stage)"
        )


def _check_shared_statistics(config: TrainConfig) -> None:
    group = config.dbn_replica_group_size
    if config.devices_per_replica > 1 and group > 1:
        raise OptionError(
            f"--dbn-replica-group-size {group}: needs one device per replica; leave out --pipeline-splits or map "
            "every stage to device 0 with --device-mapping"
        )
    if config.num_replicas % group:
        raise OptionError(
            f"--dbn-replica-group-size {group}: does not divide --num-replicas {config.num_replicas}; "
            "give a divisor, or 1"
        )


def check_norm(norm: Mapping[str, Any]) -> None:
    name = norm.get("name")
    if name not in NORMS:
        given = f"name {name}" if "name" in norm else "no name"
        raise OptionError(f"--norm-layer: {given}: must be one of {', '.join(NORMS)}")
    keys = [key for key in norm if key != "name"]
    for key in keys:
        if key not in NORMS[name]:
            raise OptionError(f"--norm-layer: {name} takes no {key}{did_you_mean(key, NORMS[name])}")
    if name == "group_norm" and len(keys) != 1:
        raise OptionError(
            "--norm-layer: group_norm takes num_groups or channels_per_group, "
            f"{'not both' if keys else 'and neither is given'}"
        )
    for key in keys:
        value, is_number = norm[key], not isinstance(norm[key], bool)
        if key == "momentum" and not (is_number and isinstance(value, int | float) and 0 <= value < 1):
            raise OptionError(f"--norm-layer: {key} {value}: must be a number from 0 to below 1")
        if key != "momentum" and not (is_number and isinstance(value, int) and value >= 1):
            raise OptionError(f"--norm-layer: {key} {value}: must be a whole number of at least 1")


def _check_automatic_scaling(config: TrainConfig) -> None:
    """The old program's rule: automatic scaling goes with plain sgd at a constant rate, and with nothing else."""
    wrong = [f"--optimizer {config.optimizer}"] if config.optimizer != "sgd" else []
    if config.optimizer_params.get("momentum"):
        wrong.append(f"momentum {config.optimizer_params['momentum']} in --optimizer-params")
    wrong += [f"{key} in --optimizer-params" for key in ADAPTIVE_KEYS if key in config.optimizer_params]
    if config.lr_schedule != "const":
        wrong.append(f"--lr-schedule {config.lr_schedule}")
    wrong += [f"{key} in --lr-schedule-params" for key in DECAY_KEYS if key in config.lr_schedule_params]
    if config.lr_warmup_params is not None:
        wrong.append("--lr-warmup-params")
    if wrong:
        raise OptionError(
            f"--auto-loss-scaling: goes with sgd without momentum at a constant rate, not with {', '.join(wrong)}"
        )

"""Every option of `hotloop cnn train`, in the order of its help; those that change nothing stand in one table.

Names and defaults are the old program's, so that its command lines and files mean the same here. What a config means
on the data and devices at hand is said by `job.resolve`. No jax.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hotloop.engine.optim_keys import (
    OPTIMISERS,
    SCHEDULES,
    check_loss_scaling,
    check_optimiser,
    check_schedule,
)
from hotloop.engine.plan import BATCH_GROUP, EVENTS_GROUP, RUN_GROUP, PlanOptions
from hotloop.errors import OptionError, did_you_mean
from hotloop.options import (
    Options,
    Params,
    argument,
    between,
    expand_path,
    folder_name,
    non_negative,
    option,
    option_table,
    positive,
    table_option,
)

PIPELINE = "Pipeline stages"
_run, _batch, _events, _data, _model, _optimiser, _rate, _numbers, _validation, _records, _pipeline, _augment = (
    partial(option, group=group)
    for group in (
        RUN_GROUP, BATCH_GROUP, EVENTS_GROUP, "Data", "Model", "Optimiser", "Learning rate", "Numbers", "Validation",
        "Records", PIPELINE, "Augmentation",
    )
)  # fmt: skip
NORMS = {  # --norm-layer's names -> the keys that each may have
    "batch_norm": ("momentum",),
    "custom_batch_norm": ("momentum",),
    "group_norm": ("num_groups", "channels_per_group"),
}
ADAPTIVE_KEYS = ("eeta", "epsilon", "weight_decay")
DECOUPLED = ("adamw", "muon")  # rules with a decay of their own that is --weight-decay's
ADAPTIVE = ("adam", *DECOUPLED)  # rules whose steps are about as large as the rate, whatever the gradient
HIGH_RATE = 0.1  # for these
DECAY_KEYS = ("epochs_to_total_decay", "end_learning_rate_ratio", "power", "boundaries", "values")
DatasetName = Literal["imagenet", "cifar10", "cifar100", "mnist"]
FOLDER = (
    "folder"  # --dataset's word for images of one's own, at --dataset-path; --dataset DIR is short for both
)
PHOTOGRAPHS = (
    "imagenet",
    FOLDER,
)  # images of any size, of which the network sees the middle, by ImageNet's colours
RESIDENT_MIB = 2048  # a few thousand images of 256 x 256, and little of any accelerator's memory
ALL_BUT_CLASSIFIER = "all-but-classifier"
SYNTHETIC = {"host": "host", "device": "device", "cpu": "host", "ipu": "device"}
"""Every word for where synthetic data are made -> the one used here."""
MODELS = (
    *(f"resnet{layers}" for layers in (18, 34, 50, 101, 152)),
    *(f"cifar_resnet{layers}" for layers in (8, 20, 32, 44, 56)),
    "cifar_resnet20x8",
    "toy_model",
    "toy_model_bn",
)


class DatasetSize(NamedTuple):
    train: int
    validation: int
    shape: tuple[int, int, int]
    classes: int


DATASET_SIZES = {  # --dataset -> what its complete files hold; synthetic data have the same sizes
    "imagenet": DatasetSize(1_281_167, 50_000, (224, 224, 3), 1000),
    "cifar10": DatasetSize(50_000, 10_000, (32, 32, 3), 10),
    "cifar100": DatasetSize(50_000, 10_000, (32, 32, 3), 100),
    "mnist": DatasetSize(60_000, 10_000, (28, 28, 1), 10),
}


class CifarSize(NamedTuple):
    layers: int
    width: int  # times the channels of the paper


def cifar_size(model: str) -> CifarSize | None:
    """What a name such as cifar_resnet20 or cifar_resnet20x8 (eight times as wide) asks for; None for other names and
    for numbers of layers not 6n + 2."""
    found = re.fullmatch(r"cifar_resnet([1-9][0-9]{0,3})(?:x([2-9]|[1-9][0-9]))?", model)
    layers = int(found[1]) if found else 0
    return CifarSize(layers, int(found[2] or 1)) if found and layers >= 8 and layers % 6 == 2 else None


def check_dataset(name: Any) -> str | None:
    """The reason why a name is neither a set's nor a folder's."""
    known = (*DATASET_SIZES, FOLDER)
    if name.lower() in known or expand_path(name).is_dir():
        return None
    hint = did_you_mean(name, known)
    listed = f"no such folder, and none of the sets {', '.join(DATASET_SIZES)}"
    return listed if hint.startswith("; known") else listed + hint


def check_freeze(text: Any) -> str | None:
    """The reason why a text is none of the three forms; how many stages there are the network knows."""
    if text in ("stem", ALL_BUT_CLASSIFIER) or re.fullmatch(r"stages:[1-9][0-9]?", text):
        return None
    return f"must be stem, stages:N (the stem and the first N stages) or {ALL_BUT_CLASSIFIER}"


def check_model(name: Any) -> str | None:
    """The reason why a name is no model's, with all the names that are."""
    if name in MODELS or cifar_size(name):
        return None
    return f"must be one of {', '.join(MODELS)}, or another cifar_resnet of 6n + 2 layers, x2 to x99 as wide"


def check_decay(value: Any) -> str | None:
    return None if 0 < value < 1 else "must lie between 0 and 1, such as 0.999"


def parse_synthetic(text: str) -> str:
    if text.lower() not in SYNTHETIC:
        raise ValueError("must be host (or cpu) or device (or ipu)")
    return SYNTHETIC[text.lower()]


# Read, so that old command lines and files load; one notice names those that were given.
_old = partial(table_option, group="Without effect here")
WITHOUT_EFFECT = (
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

    training: bool = _run(True, "Train.")
    resume: bool = _run(False, "Go on with the newest run of this name.")
    compile_only: bool = _run(False, "Compile the training program, and stop.")
    plan: bool = _run(False, "Say what would run, and stop.")
    strict_devices: bool = _batch(
        False,
        "Stop where a configuration asks for more devices than there are, instead of merging stages and "
        "accumulating for the missing replicas.",
    )
    dataset: str = _data(
        "cifar10",
        "The images: imagenet, cifar10, cifar100, mnist; or a folder of your own, with train/CLASS/*.jpg and, if you "
        "have them, val/CLASS/*.jpg (else a tenth is held out), or with records of `hotloop cnn build-records`.",
        metavar="NAME|DIR",
        check=check_dataset,
    )
    dataset_path: Path = _data(Path(), "Folder with the data set's files.")
    image_size: int | None = _data(
        None,
        "Own images: pixels a side that the network sees; left out, 224 for resnets, 32 for others.",
        check=between(8, 1024),
    )
    resident_mib: int = _data(
        RESIDENT_MIB,
        "Own images: at most so many MiB of pixels, decoded once, stay on the device; larger sets are streamed, and "
        "decoded again each time.",
        check=non_negative,
    )
    synthetic_data: Literal["host", "device"] | None = _data(
        None,
        "Train on made-up images of the data set's shape, from the host (cpu) or made on the device (ipu).",
        parse=parse_synthetic,
    )
    eight_bit_transfer: bool = _data(False, "Send images as bytes; with --accelerator-side-preprocess.")
    accelerator_side_preprocess: bool = _data(
        False,
        "Augmenting and normalising happen on the device in any case; --eight-bit-transfer asks for this, as before.",
    )
    pipeline_num_parallel: int = _data(
        48, "At most so many workers that decode images on the host.", check=positive
    )
    skip_corrupt: bool = _data(
        False,
        "Let other images take the place of broken ones, and count them; else the first one stops the run.",
    )
    shuffle: bool = _data(True, "Shuffle the training images; validation never does.")
    seed: int | None = _data(
        None,
        "Seed of weights, order and draws; left out, one is drawn and printed.",
        check=between(0, 2**63 - 1),
    )
    deterministic: bool = _data(
        False, "Give the same bits again for the same seed, on a GPU by slower kernels; turns --shuffle off."
    )
    model_name: str = _model(
        "toy_model",
        "The network: resnet18, 34, 50, 101, 152; cifar_resnet8, 20, 32, 44, 56, and 20x8, which is eight times as "
        "wide; toy_model, toy_model_bn.",
        aliases=("--model",),
        metavar="NAME",
        check=check_model,
    )
    norm_layer: Params = _model(
        Params(name="custom_batch_norm", momentum=0.97),
        "Normalisation: name batch_norm or custom_batch_norm (the same here) with momentum; or group_norm with "
        "num_groups or channels_per_group.",
    )
    statistics_rule: Literal["spread", "seed"] = _model(
        "spread",
        "Running variance of batch norm: spread counts the differences between the means of micro-batches, so that "
        "any split equals the undivided batch; seed leaves them out, as the old program did.",
    )
    dbn_replica_group_size: int = _model(
        1, "Replicas that share batch-norm statistics; 1: none.", check=positive
    )
    label_smoothing: float | None = _model(
        None, "Share of each label spread over all classes.", check=between(0, 1)
    )
    init_from: Path | None = _model(
        None,
        "Weights to begin with: a .safetensors file of a torchvision or timm ResNet, a run's folder or one of "
        "checkpoints (the newest; its averages where it has --ema), or an exported model; for other classes "
        "the classifier is drawn anew.",
        metavar="PATH",
    )
    freeze: str | None = _model(
        None,
        "Layers that keep the weights and norm statistics that they begin with: stem, stages:N (the stem and the first "
        "N stages) or all-but-classifier.",
        metavar="LAYERS",
        check=check_freeze,
    )
    mixup: float = _augment(
        0.0,
        "Add another image of the batch to each, its label too, in shares of Beta(ALPHA, ALPHA) (0.2 is usual); with "
        "--cutmix one of the two, drawn for each image. 0: not at all.",
        metavar="ALPHA",
        check=non_negative,
    )
    cutmix: float = _augment(
        0.0,
        "Put a part of another image of the batch into each, its label by the part's area, which is one minus "
        "Beta(ALPHA, ALPHA) (1 is usual). 0: not at all.",
        metavar="ALPHA",
        check=non_negative,
    )
    trivial_augment: bool = _augment(
        False,
        "Change each image in one of 14 ways (shear, rotate, contrast, ...), of any strength, drawn evenly: "
        "TrivialAugment's wide space. After crops and mirroring.",
    )
    random_erasing: float = _augment(
        0.0,
        "Erase a part of 2 to 33 % of so many of the images (0.25 is usual), before they are mixed.",
        metavar="SHARE",
        check=between(0, 1),
    )
    optimizer: str = _optimiser(
        "sgd",
        "The update rule. muon is for kernels and matrices; scales, offsets and biases go by adam at the same rate "
        "(consistent_rms 0.2 lets both take steps of one size).",
        choices=tuple(dict.fromkeys(("sgd", "lars", "rmsprop", *OPTIMISERS))),
    )
    optimizer_params: Params = _optimiser(
        Params(momentum=0),
        "sgd, momentum: momentum, nesterov; lars: momentum, weight_decay, eeta, epsilon; rmsprop: momentum, "
        "base_decay_exponent, epsilon; rmsprop_outside: decay, epsilon; "
        "adam, adamw: b1, b2, eps (adamw: weight_decay); muon: beta, weight_decay, consistent_rms, adam_b1, adam_b2.",
    )
    weight_decay: float = _optimiser(
        0.0,
        "Decay beside the rule: the step is -rate * (rule + X * W). adamw's own, 1e-4, unless it is given there.",
        check=non_negative,
    )
    l2_regularization: float = _optimiser(
        0.0,
        "Decay through the rule: X * W is added to the gradient, and so passes the momentum.",
        check=non_negative,
    )
    exclude_norms_and_biases: bool = _optimiser(
        False, "Leave scales, offsets and biases out of both decays; most recent recipes do."
    )
    ema: float | None = _optimiser(
        None,
        "Also keep an average of weights and of norms' statistics, which moves by 1 - DECAY an update (0.999 is usual; "
        "the first updates move it more). It is validated beside the weights, and is what export and predict take.",
        metavar="DECAY",
        check=check_decay,
    )
    lr_schedule: str = _rate("const", "Shape of the rate over the run.", choices=tuple(SCHEDULES))
    lr_schedule_params: Params = _rate(
        Params(initial_learning_rate=0.0001),
        "initial_learning_rate is for one sample and grows with the global batch; cosine and polynomial: "
        "epochs_to_total_decay; polynomial: end_learning_rate_ratio, power; exponential: decay_rate, decay_epochs; "
        "one_cycle: total_epochs, peak_epoch; stepped: boundaries (epochs) and one more values, taken as they are.",
    )
    lr_warmup_params: Params | None = _rate(
        None,
        "warmup_epochs, and warmup_mode: shift starts the schedule after the warm-up, mask lets it run from the "
        "first update.",
    )
    lr_staircase: bool = _rate(False, "Keep the rate of an epoch's first update all epoch.")
    precision: Literal["16.16", "16.32", "32.32"] = _numbers(
        "16.16", "Bits of the computation and of the weights kept between updates."
    )
    half: Literal["bfloat16", "float16"] = _numbers(
        "bfloat16",
        "What 16 bits are. bfloat16 has the range of float32, so that no gradient under- or overflows and no loss "
        "scaling is needed; float16 is the old program's, finer and to be used with --loss-scaling.",
    )
    half_partials: bool = _numbers(False, "Also add up products in 16 bits, where the device can.")
    stochastic_rounding: Literal["ON", "OFF", "replica-identical"] = _numbers(
        "ON",
        "Round 16-bit weights up or down at random, so that small steps count on average; replicas always round "
        "alike, and validation never does.",
    )
    loss_scaling: float = _numbers(
        0.0, "Multiply the loss by this and divide the gradients; 0: not at all.", check=non_negative
    )
    auto_loss_scaling: bool = _numbers(
        False, "Find the factor during the run; for sgd without momentum and a constant rate."
    )
    checkpoint_input_dir: Path | None = _events(
        None, "A run's folder, or one of checkpoints, to validate instead of those just made.", metavar="DIR"
    )
    checkpoint_output_dir: Path | None = _events(
        None, "Folder for checkpoints; left out, one in the run's folder.", metavar="DIR"
    )
    ckpt_all_instances: bool = _events(
        False, "Every process of a distributed run saves, not the first alone."
    )
    clean_dir: bool | None = _events(
        None,
        "After validation remove all checkpoints that this run made (True) or none of them (False); left out, the best "
        "and the last stay.",
    )
    validation: bool = _validation(True, "Validate every checkpoint after training.")
    random_weights: bool = _validation(
        False, "Validate random weights, where no checkpoint is meant to be there."
    )
    validation_micro_batch_size: int | None = _validation(
        None, "Images at once per replica; left out, the training's.", check=positive
    )
    validation_num_replicas: int | None = _validation(
        None,
        "Replicas in validation; left out, one for each device of the training, or as many as in training with "
        "--pipeline-validation-model.",
        check=positive,
    )
    pipeline_validation_model: bool = _validation(
        False, "Validate in the training's pipeline stages, not with every device as a replica of the whole."
    )
    top_k: int = _validation(5, "Also count labels among the K likeliest classes.", check=positive)
    sweep: bool = _validation(False, "Also tell when --target-accuracy was reached.")
    target_accuracy: float = _validation(
        0.759, "Accuracy that --sweep asks for, as a fraction.", check=between(0, 1)
    )
    results_dir: Path = _records(Path("results"), "Folder in which runs get theirs.")
    run_name: str | None = _records(
        None, "Name of the run's folder; else made of model and data.", check=folder_name
    )
    report: Path | None = _records(
        None, "Write the compiler's report and a profile to this folder.", metavar="DIR"
    )
    mlperf_logging: bool = _records(False, "Compile and load before the clock of time-to-train starts.")
    wandb: bool = _records(False, "Log to Weights & Biases, too.")
    wandb_run_name: str | None = _records(None, "The run's name there.")
    wandb_tags: tuple[str, ...] | None = _records(None, "The run's tags there.")
    expect: str = _records("", "What a configuration promises, in its own words.", hidden=True)
    pipeline_splits: tuple[str, ...] = _pipeline(
        (),
        "Layers that open a new stage, in the model's order. Each stage is on a device of its own where there are "
        "enough of them; `hotloop cnn describe MODEL --stages N` recommends some.",
        metavar="LAYER ...",
    )
    device_mapping: tuple[int, ...] | None = _pipeline(
        None,
        "Device of each stage, from 0 without gaps; those on one device run merged there. Left out, one each.",
        check=non_negative,
    )
    pipeline_schedule: Literal["Grouped", "Interleaved", "Sequential"] = _pipeline(
        "Grouped",
        "Order in which stages take the micro-batches of an update: Grouped goes forward with up to twice as many as "
        "there are stages, then back; Interleaved takes turns, and keeps fewer activations; Sequential has one "
        "stage at work at a time, and keeps the fewest. The weights are the same.",
    )
    recomputation: bool = _pipeline(
        False,
        "Compute activations again in the backward pass, stage by stage: less memory. Stages on devices of their own "
        "always do.",
    )
    without_effect: Params = option_table(*WITHOUT_EFFECT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset.lower() in (*DATASET_SIZES, FOLDER):
            object.__setattr__(self, "dataset", self.dataset.lower())
        else:  # `--dataset DIR`
            object.__setattr__(self, "dataset_path", expand_path(self.dataset))
            object.__setattr__(self, "dataset", FOLDER)

    def check(self) -> None:
        """What depends on the data, the devices or the layers of the model is checked by `job.resolve`."""
        mapping, stages, group = self.device_mapping, self.stages, self.dbn_replica_group_size
        if self.recomputation and stages == 1:
            raise OptionError("--recomputation: goes stage by stage, so it needs --pipeline-splits")
        if mapping is not None:
            given = f"--device-mapping {' '.join(map(str, mapping))}"
            if len(mapping) != stages:
                raise OptionError(
                    f"{given}: has {len(mapping)} entries for {stages} stages (--pipeline-splits and one more)"
                )
            if set(mapping) != set(range(max(mapping) + 1)):
                raise OptionError(f"{given}: must use every device from 0 to {max(mapping)}")
        count = len(self.without_effect.get("available_memory_proportion", ()))
        if count > 1 and stages == 1:
            raise OptionError(
                f"--available-memory-proportion: {count} values without --pipeline-splits; give one"
            )
        if count > 1 and count != 2 * stages:
            raise OptionError(
                f"--available-memory-proportion: {count} values for {stages} stages; give one, or {2 * stages} "
                "(convolutions and products of each stage)"
            )
        if self.devices_per_replica > 1 and group > 1:
            raise OptionError(
                f"--dbn-replica-group-size {group}: needs one device per replica; leave out --pipeline-splits or map "
                "every stage to device 0 with --device-mapping"
            )
        if self.num_replicas % group:
            raise OptionError(
                f"--dbn-replica-group-size {group}: does not divide --num-replicas {self.num_replicas}; "
                "give a divisor, or 1"
            )
        if not self.accelerator_side_preprocess:
            if self.eight_bit_transfer:
                raise OptionError("--eight-bit-transfer: needs --accelerator-side-preprocess")
            if self.without_effect.get("fused_preprocessing"):
                raise OptionError("--fused-preprocessing: needs --accelerator-side-preprocess")
        _check_norm(self.norm_layer)
        for name, usual in (("image_size", None), ("resident_mib", RESIDENT_MIB)):
            if self.dataset.lower() in DATASET_SIZES and (value := getattr(self, name)) != usual:
                raise OptionError(
                    f"--{name.replace('_', '-')} {value}: is for images of your own (--dataset DIR); {self.dataset} is "
                    "taken as it is"
                )
        if self.init_from is not None and not self.training:
            raise OptionError(f"--init-from {self.init_from}: there is no training to begin; leave it out")
        if self.auto_loss_scaling:
            _check_automatic_scaling(self)
        check_optimiser(self.optimizer, self.optimizer_params)
        if self.weight_decay and self.optimizer in DECOUPLED and "weight_decay" in self.optimizer_params:
            raise OptionError(
                f"--weight-decay {self.weight_decay:g}: is what {self.optimizer}'s weight_decay in --optimizer-params "
                "is; keep one"
            )
        check_schedule(self.lr_schedule, self.lr_schedule_params, self.lr_warmup_params)
        check_loss_scaling(self.loss_scaling, self.auto_loss_scaling)
        if self.ckpt_all_instances and self.ckpts_per_epoch == 0:
            raise OptionError(
                "--ckpt-all-instances: --ckpts-per-epoch 0 saves no checkpoints; ask for some, or leave it out"
            )

    @property
    def stages(self) -> int:
        return len(self.pipeline_splits) + 1

    @property
    def devices_per_replica(self) -> int:
        """Devices over which the stages of one replica are meant to spread."""
        return self.stages if self.device_mapping is None else max(self.device_mapping) + 1

    @property
    def device_splits(self) -> tuple[str, ...]:
        """The splits at which another device begins; none where those of one device do not follow each other."""
        if self.device_mapping is None:
            return self.pipeline_splits
        steps = zip(self.pipeline_splits, pairwise(self.device_mapping), strict=True)
        splits = tuple(split for split, (before, after) in steps if before != after)
        return splits if len(splits) + 1 == self.devices_per_replica else ()


@dataclass(frozen=True)
class ValidateConfig(TrainConfig):
    """The same options, and the run that has values for them."""

    run: Path | None = argument(
        "Folder of a run, or of its checkpoints; its options are used.", default=None, metavar="RUN"
    )


def _check_norm(norm: Mapping[str, Any]) -> None:
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

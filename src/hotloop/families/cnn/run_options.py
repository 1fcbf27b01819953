"""Options of `hotloop cnn` around the updates: data, what runs, checkpoints, validation, records.

Batch, length and frequencies are the engine's `plan_options`. Names and defaults are the old program's; what it had
not (resume, a run's folder, top-k, the plan) is marked by nothing but its help. Only types and single values are
looked at here. No jax.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.engine.plan import BATCH_GROUP, EVENTS_GROUP, RUN_GROUP
from hotloop.options import between, folder_name, option, positive

DATA, VALIDATION, RECORDS = "Data", "Validation", "Records"
SYNTHETIC = {"host": "host", "device": "device", "cpu": "host", "ipu": "device"}
"""Every word for where synthetic data are made -> the one used here."""


def synthetic(text: str) -> str:
    """host or device, whichever word said so."""
    if text.lower() not in SYNTHETIC:
        raise ValueError("must be host (or cpu) or device (or ipu)")
    return SYNTHETIC[text.lower()]


@dataclass(frozen=True)
class Data:
    """What is trained on, and how it comes to the device."""

    dataset: Literal["imagenet", "cifar10", "cifar100", "mnist"] = option(
        "cifar10", "The images.", group=DATA
    )
    dataset_path: Path = option(Path(), "Folder with the data set's files.", group=DATA)
    synthetic_data: Literal["host", "device"] | None = option(
        None,
        "Train on made-up images of the data set's shape, from the host (cpu) or made on the device (ipu).",
        parse=synthetic,
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


@dataclass(frozen=True)
class Run:
    """What runs, and where."""

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


@dataclass(frozen=True)
class Kept:
    """Which checkpoints are read, and which stay."""

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


@dataclass(frozen=True)
class Validation:
    """What is validated, and how."""

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


@dataclass(frozen=True)
class Records:
    """What is written beside checkpoints."""

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

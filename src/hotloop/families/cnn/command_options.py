"""The options of `hotloop cnn`'s other commands: describe, predict, import, build-records, verify, data-benchmark."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.errors import OptionError
from hotloop.families.cnn.options import (
    DATASET_SIZES,
    DatasetName,
    check_dataset,
    check_model,
    parse_synthetic,
)
from hotloop.options import Options, argument, non_negative, option, positive

_WORKERS = "Processes that work at the same time; none: one for each processor."


@dataclass(frozen=True)
class DescribeConfig(Options):
    model: str = argument("A model: resnet50, cifar_resnet20, toy_model, ...", check=check_model)
    dataset: DatasetName | None = option(
        None, "Images it is for; left out, imagenet for resnets, else cifar10."
    )
    stages: int | None = option(
        None,
        "Also recommend --pipeline-splits for so many stages, and tell what each of them would have.",
        check=positive,
    )
    measure: bool = option(
        True, "With --stages: time the layers on the device, for some seconds; False: go by their FLOPs."
    )
    micro_batch_size: int = option(8, "With --stages: images at once while layers are timed.", check=positive)
    precision: Literal["16.16", "16.32", "32.32"] = option(
        "16.16", "With --stages: as in training; values cross in the type before the point."
    )


@dataclass(frozen=True)
class PredictConfig(Options):
    run: Path = argument("Folder of a run, or of its checkpoints.", metavar="RUN")
    image: tuple[Path, ...] = argument("Image files.", metavar="IMAGE")
    step: int | None = option(
        None, "Checkpoint after so many updates; left out, the newest.", check=non_negative
    )
    top: int | None = option(
        None, "So many classes for each image; left out, 5, or all where there are fewer.", check=positive
    )
    weights: Literal["auto", "raw", "ema"] = option(
        "auto",
        "raw: those that were trained; ema: their averages; auto: averages where the run has them (--ema).",
    )


@dataclass(frozen=True)
class ImportConfig(Options):
    weights: Path = argument("A .safetensors file of a torchvision or timm ResNet.")
    out: Path = argument("Folder for the checkpoint.")


@dataclass(frozen=True)
class BuildConfig(Options):
    """Class folders of images, and how to make records of them."""

    source: Path = argument("Folder with train/CLASS/*.jpg and val/CLASS/*.jpg (one of the two will do).")
    out: Path = argument(
        "Folder for the shards, labels.txt and manifest.json; an unfinished build is continued."
    )
    train_shards: int | None = option(
        None, "Training shards; none: about 1,250 images each, 1,024 for ImageNet.", check=positive
    )
    validation_shards: int | None = option(
        None, "Validation shards; none: about 390 images each, 128 for ImageNet.", check=positive
    )
    synset_texts: Path | None = option(
        None, "Lines of `class TAB text`; the text goes into each record.", metavar="FILE"
    )
    boxes: Path | None = option(
        None, "CSV of `file,xmin,ymin,xmax,ymax`, shares of width and height.", metavar="FILE"
    )
    hold_out: bool = option(
        False,
        "From train/ alone: make validation shards too, of the tenth of each class that `hotloop cnn train --dataset "
        "SOURCE` would hold out.",
    )
    skip_corrupt: bool = option(False, "Leave out images that do not decode, and count them.")
    workers: int | None = option(None, _WORKERS, check=positive)

    def check(self) -> None:
        if self.source.absolute() == self.out.absolute():
            raise OptionError(f"OUT {self.out}: is the folder of the images; take another one")


@dataclass(frozen=True)
class _SetConfig(Options):
    dataset: str = option("cifar10", "The data set.", choices=tuple(DATASET_SIZES))
    dataset_path: Path | None = option(
        None, "Folder with the set's files; none: where `hotloop data list` finds it.", metavar="DIR"
    )

    def check(self) -> None:
        if self.dataset == "imagenet" and self.dataset_path is None:
            raise OptionError(
                "--dataset imagenet: needs --dataset-path, the folder of its records or class folders"
            )


@dataclass(frozen=True)
class VerifyConfig(_SetConfig):
    dataset: str = option(
        "cifar10",
        "The data set: imagenet, cifar10, cifar100, mnist; or a folder of your own images, as `cnn train` takes it.",
        metavar="NAME|DIR",
        check=check_dataset,
    )
    checksums: bool = option(True, "Compare every record with its checksum; False: only count.")
    decode: bool = option(False, "Decode every image as well.")
    workers: int | None = option(None, _WORKERS, check=positive)


@dataclass(frozen=True)
class BenchmarkConfig(_SetConfig):
    micro_batch_size: int = option(8, "Images of a batch.", check=positive)
    num_epochs: int = option(
        1, "Passes over the set; of several, up to two are for warming up and are left out.", check=positive
    )
    batches_per_epoch: int | None = option(
        None, "End a pass after so many batches; none: the whole set.", check=positive
    )
    split: Literal["train", "test"] = option("train", "Images with or without random crops and flips.")
    precision: Literal["16.16", "16.32", "32.32"] = option(
        "16.16", "Small sets: type of the finished images, the part before the point."
    )
    eight_bit_transfer: bool = option(
        False, "ImageNet: photographs leave the workers as bytes; needs --accelerator-side-preprocess."
    )
    accelerator_side_preprocess: bool = option(
        False,
        "Small sets: augment and normalise on the device, not on the host. Photographs are normalised on the device "
        "in any case; --eight-bit-transfer asks for this, as in training.",
    )
    synthetic_data: Literal["host", "device"] | None = option(
        None,
        "Made-up images in place of the set, from the host (cpu); device (ipu) is taken as host.",
        parse=parse_synthetic,
    )
    pipeline_num_parallel: int = option(
        48, "ImageNet: workers that decode, at most one for each processor.", check=positive
    )
    workers: Literal["auto", "threads", "processes"] = option("auto", "ImageNet: what the workers are.")
    skip_corrupt: bool = option(False, "ImageNet: let another image take the place of one that is broken.")
    seed: int = option(0, "Seed of order, crops and flips.", check=non_negative)

    def check(self) -> None:
        if self.eight_bit_transfer and not self.accelerator_side_preprocess:
            raise OptionError(
                "--eight-bit-transfer: needs --accelerator-side-preprocess, as in training; add it"
            )
        if self.synthetic_data is None:
            super().check()

"""The options of `hotloop cnn describe`, `predict` and `import`. It imports neither jax nor numpy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.families.cnn.model_options import known_model
from hotloop.options import argument, non_negative, option, positive, validate


@dataclass(frozen=True)
class Describe:
    """Which network to show."""

    model: str = argument("A model: resnet50, cifar_resnet20, toy_model, ...", check=known_model)
    dataset: Literal["imagenet", "cifar10", "cifar100", "mnist"] | None = option(
        None, "Images it is for; left out, imagenet for resnets, else cifar10."
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Predict:
    """Which images, by which weights."""

    run: Path = argument("Folder of a run, or of its checkpoints.", metavar="RUN")
    image: tuple[Path, ...] = argument("Image files.", metavar="IMAGE")
    step: int | None = option(
        None, "Checkpoint after so many updates; left out, the newest.", check=non_negative
    )
    top: int = option(5, "So many classes for each image.", check=positive)

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Import:
    """Which weights to take over."""

    weights: Path = argument("A .safetensors file of a torchvision or timm ResNet.")
    out: Path = argument("Folder for the checkpoint.")

    def __post_init__(self) -> None:
        validate(self)

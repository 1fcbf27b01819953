"""The options of `hotloop cnn speedrun`, and the recipe: every number that decides what a run computes. No jax.

The network and most numbers are those of two public programs: K. Jordan's airbench94_muon and hiverge's
cifar10-speedrun (2025), whose values these are where they differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Literal

from hotloop.errors import OptionError
from hotloop.options import Options, folder_name, non_negative, option, positive


@dataclass(frozen=True)
class SpeedrunConfig(Options):
    plan: bool = option(False, "Say what would run, and stop.")
    seed: int = option(0, "Seed of the first run.", check=non_negative)
    repeats: int = option(
        1, "So many runs of the same compiled program, with seeds one after another.", check=positive
    )
    epochs: Fraction = option(
        Fraction(8), "Passes over the training images, in whole updates rounded up.", check=positive
    )
    batch_size: int = option(1536, "Images an update; those left over in a pass are dropped.", check=positive)
    precision: Literal["auto", "float16", "bfloat16", "float32"] = option(
        "auto", "Type of images and products; weights are float32. auto: float16 on a GPU, else float32."
    )
    dataset_path: Path | None = option(
        None, "Folder with CIFAR-10's files; none: where `hotloop data list` finds it.", metavar="DIR"
    )
    results_dir: Path = option(Path("results"), "Folder for the folders of runs.", metavar="DIR")
    run_name: str | None = option(
        None, "Name of the run's folder; none: speedrun and the time.", check=folder_name
    )
    expect: str = option("", "What a configuration promises, in its own words.", hidden=True)


@dataclass(frozen=True)
class Recipe:
    """Rates are those of the first update; all of them fall to zero along a straight line."""

    batch_size: int = 1536
    epochs: Fraction = Fraction(8)
    widths: tuple[int, int, int] = (64, 256, 256)  # channels of the three groups
    whitening_epochs: Fraction = Fraction("0.19")  # in which the bias of the whitening is trained, too
    whitening_images: int = 960  # from which its filters are made
    whitening_epsilon: float = 5e-4  # added to variances
    smoothing: float = 0.09  # of labels
    decay: float = 1.0418e-6  # of weights, for each image of a batch
    offset_rate: float = 0.0573  # of the offsets of norms, and of the whitening's bias
    head_rate: float = 0.5415
    momentum: float = 0.825
    kernel_rate: float = 0.205
    kernel_momentum: float = 0.655
    kept_statistics: float = 0.5566  # share of a norm's running statistics that an update keeps
    translation: int = 2  # pixels
    brightness: float = 0.1399
    contrast: float = 0.1308
    uncertain: Fraction = Fraction(1, 4)  # of the test images are looked at in six views

    def updates_per_epoch(self, images: int) -> int:
        if images < self.batch_size:
            raise OptionError(f"batch_size={self.batch_size}: there are only {images} training images")
        return images // self.batch_size

    def updates(self, images: int) -> int:
        return ceil(self.epochs * self.updates_per_epoch(images))

    def whitening_updates(self, images: int) -> int:
        """Those at the start in which the bias of the whitening is trained."""
        return min(ceil(self.whitening_epochs * self.updates_per_epoch(images)), self.updates(images))


def rescaled_updates(total: int) -> Iterator[bool]:
    """For each update whether kernels are first brought back to their norm: every second at the start, and less and
    less often, every seventeenth at the end."""
    last = 0
    for number in range(1, total + 1):
        is_due = number - last >= 2 + 15 * number // total
        last = number if is_due else last
        yield is_due

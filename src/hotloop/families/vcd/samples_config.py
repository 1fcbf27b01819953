"""The options of `hotloop vcd samples`. It imports no jax."""

from dataclasses import dataclass
from pathlib import Path

from hotloop.options import argument, non_negative, option, positive, validate


@dataclass(frozen=True)
class Samples:
    """Which run to draw from, and how many pictures of what size."""

    run: Path = argument("Folder of a run, as `hotloop vcd train` named it.")
    rows: int = option(10, "Lines of a grid.", check=positive)
    columns: int = option(
        10, "Images in a line; of reconstructions, which take three each, a third as many.", check=positive
    )
    scale: int = option(2, "Pixels of the file along each side of a pixel.", check=positive)
    hmc_steps: int | None = option(
        None,
        "HMC iterations before the last picture of a reconstruction; none: as in training.",
        check=positive,
    )
    seed: int = option(0, "Seed of all draws and of the choice of test images.", check=non_negative)
    step: int | None = option(None, "Update to take the weights of; none: the newest saved.", check=positive)
    data: str | None = option(None, "Images to reconstruct; none: those the run was trained on.")
    output: Path | None = option(
        None, "Folder for the pictures; none: `samples` in the run's.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def folder(self) -> Path:
        """Where the pictures go."""
        return self.output or self.run / "samples"

    @property
    def triples(self) -> int:
        """Reconstructions in a line of their grid."""
        return max(1, self.columns // 3)

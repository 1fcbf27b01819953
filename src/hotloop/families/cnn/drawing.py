"""A network while it is put together: named pieces in order, each with the names of its inputs.

It works out shapes as pieces are added and refuses images that are too small. It knows no topology.
"""

from dataclasses import dataclass, field

from hotloop.errors import OptionError
from hotloop.families.cnn.norms import Norm
from hotloop.families.cnn.pieces import BatchNorm, GroupNorm, Piece, Shape

INPUT = "images"


@dataclass(frozen=True)
class Placed:
    """A piece at its place in a network."""

    name: str
    piece: Piece
    inputs: tuple[str, ...]
    shape: Shape


@dataclass
class Drawing:
    """Collects the pieces; `add` and `norm` return the name of the value they add."""

    images: Shape
    normalisation: Norm
    epsilon: float
    placed: list[Placed] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes[INPUT] = self.images

    def add(self, name: str, piece: Piece, *inputs: str) -> str:
        """Put `piece` last."""
        shape = piece.shape(*(self.shapes[x] for x in inputs))
        if min(shape) < 1:
            size = "x".join(map(str, self.images))
            raise OptionError(
                f"--model-name: images of {size} are too small: {name} would have shape {shape}"
            )
        self.placed.append(Placed(name, piece, inputs, shape))
        self.shapes[name] = shape
        return name

    def norm(self, name: str, x: str, gamma: float = 1.0) -> str:
        """Put the chosen normalisation last, its scale starting from `gamma`."""
        if self.normalisation.kind == "batch":
            return self.add(name, BatchNorm(gamma, self.epsilon), x)
        groups = self.normalisation.groups_of(self.shapes[x][-1])
        return self.add(self.normalisation.named(name), GroupNorm(groups, gamma, self.epsilon), x)

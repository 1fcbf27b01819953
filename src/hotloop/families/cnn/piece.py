"""What every piece of a network offers: its output's shape, its parameters, its cost and how to compute it.

A piece computes in the type of its parameters. It knows neither its name nor its neighbours.
"""

from typing import Any, Protocol

from jax import Array

from hotloop.layers.initial import Spec

Shape = tuple[int, ...]  # of one image's value: rows, columns, channels; or features
Leaves = dict[str, Array]


class Piece(Protocol):
    """What every piece offers; `shapes` are its inputs' shapes, `xs` its inputs [N, ...]."""

    @property
    def kind(self) -> str:
        """One word for tables."""

    def shape(self, *shapes: Shape) -> Shape:
        """The output's shape."""

    def values(self, shape: Shape) -> dict[str, Spec]:
        """The parameters, as what they start from."""

    def flops(self, shape: Shape) -> int:
        """Two for each multiply-add of products and convolutions, for one image."""

    def __call__(self, leaves: Leaves, *xs: Array) -> Any:
        """The output."""


class Plain:
    """A piece with neither parameters nor products, that keeps its input's shape."""

    def shape(self, *shapes: Shape) -> Shape:
        """That of the first input."""
        return shapes[0]

    def values(self, shape: Shape) -> dict[str, Spec]:
        """None."""
        return {}

    def flops(self, shape: Shape) -> int:
        """None that count."""
        return 0

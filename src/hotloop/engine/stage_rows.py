"""A tree whose parts belong to the stages of a model, as one flat row a stage: each device holds its own stage's alone.

Rows are kept by type, so that a tree of several types keeps each bit, and padded to the longest stage's. A checkpoint
knows `StageRows`: on disk they are the leaves of the undivided tree, by its own names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hotloop.engine import processes
from hotloop.engine.device import STAGE
from hotloop.errors import HotloopError

Tree = Any
HostArray = np.ndarray[Any, Any]
RowOf = Mapping[str, Array]
"""One stage's rows [longest], by the names of the types of the leaves in them."""
BY_STAGE = PartitionSpec(STAGE)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class TreeForm:
    """The leaves of a tree without their values, in its own order."""

    structure: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]

    @classmethod
    def of(cls, tree: Tree) -> "TreeForm":
        """Of arrays, or of anything else with shapes and types."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
        forms = [leaf for _, leaf in leaves]
        return cls(
            structure,
            tuple(names),
            tuple(tuple(leaf.shape) for leaf in forms),
            tuple(str(leaf.dtype) for leaf in forms),
        )

    def blank(self) -> Tree:
        """The tree with host arrays that hold nothing and take no memory."""
        blanks = [
            np.broadcast_to(np.zeros((), jnp.dtype(kind)), shape)
            for shape, kind in zip(self.shapes, self.types, strict=True)
        ]
        return jax.tree.unflatten(self.structure, blanks)

    def places(self) -> list[tuple[str, int, int]]:
        """Of each leaf: the type of its row, and its first and last + 1 place in it."""
        ends: dict[str, int] = {}
        found = []
        for shape, kind in zip(self.shapes, self.types, strict=True):
            start = ends.get(kind, 0)
            ends[kind] = start + prod(shape)
            found.append((kind, start, ends[kind]))
        return found


@dataclass(frozen=True)
class Layout:
    """Where the leaves of several trees, one a stage, lie in rows; hashable, so that it may be static."""

    trees: tuple[TreeForm, ...]
    whole: TreeForm | None = None  # the undivided tree, where there is one

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> "Layout":
        return cls(tuple(map(TreeForm.of, trees)))

    def __repr__(self) -> str:
        return f"Layout({len(self.trees)} stages, {self.lengths})"

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The longest stage's number of values, by type."""
        longest: dict[str, int] = {}
        for form in self.trees:
            for kind, _, end in form.places():
                longest[kind] = max(longest.get(kind, 0), end)
        return longest

    def ravel(self, stage: int, tree: Tree, dtype: Any = None) -> dict[str, Array]:
        """A stage's tree as its rows; with `dtype` every row is in that type, whatever its name.

        ValueError for a tree of another form than the layout's.
        """
        form = self.trees[stage]
        found = TreeForm.of(tree)
        if (found.structure, found.shapes) != (form.structure, form.shapes):
            raise ValueError(
                f"a stage's tree has {found.structure} of {found.shapes}, not those it began with"
            )
        if dtype is None and found.types != form.types:
            raise ValueError(f"a stage's leaves {form.names} have types {found.types}, not {form.types}")
        parts: dict[str, list[Array]] = {kind: [] for kind in self.lengths}
        for leaf, kind in zip(jax.tree.leaves(tree), form.types, strict=True):
            parts[kind].append(jnp.ravel(leaf).astype(dtype or leaf.dtype))
        rows = {}
        for kind, length in self.lengths.items():
            row = jnp.concatenate(parts[kind]) if parts[kind] else jnp.zeros(0, dtype or kind)
            rows[kind] = jnp.pad(row, (0, length - row.size))
        return rows

    def unravel(self, stage: int, rows: RowOf) -> Tree:
        """A stage's tree from its rows, each leaf in the type that its row now has."""
        form = self.trees[stage]
        leaves = [
            rows[kind][start:end].reshape(shape)
            for (kind, start, end), shape in zip(form.places(), form.shapes, strict=True)
        ]
        return jax.tree.unflatten(form.structure, leaves)

    def zeros(self, dtype: Any = None) -> dict[str, Array]:
        """Empty rows of one stage; with `dtype` all in that type."""
        return {kind: jnp.zeros(length, dtype or kind) for kind, length in self.lengths.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageRows:
    """A tree in rows [stages, longest] by type, spread over the mesh's `stage`. A leaf that several stages have (an
    optimiser's count of updates) is in the rows of each."""

    rows: dict[str, Array]
    layout: Layout = field(metadata={"static": True})

    @property
    def stages(self) -> int:
        return len(self.layout.trees)


def divide(trees: Sequence[Tree], whole: Tree, mesh: Mesh) -> StageRows:
    """Rows on a mesh of a whole tree, of which `trees` are the stages' parts: any values by the names of the whole's.

    HotloopError where a leaf is in no stage, or in one alone that the whole has not.
    """
    form = TreeForm.of(whole)
    known = dict(zip(form.names, zip(form.shapes, form.types, strict=True), strict=True))
    layout = Layout(tuple(map(TreeForm.of, trees)), form)
    for part in layout.trees:
        for name, shape, kind in zip(part.names, part.shapes, part.types, strict=True):
            if known.get(name) != (shape, kind):
                raise HotloopError(
                    f"stages: leaf {name} {kind}{list(shape)} is not so in the undivided model"
                )
    if missing := sorted(set(known) - {name for part in layout.trees for name in part.names}):
        raise HotloopError(f"stages: {missing[0]} belongs to none of them")
    sharding = NamedSharding(mesh, BY_STAGE)
    return fill_rows(layout, whole, dict.fromkeys(layout.lengths, sharding))


def place_everywhere(tree: Tree, mesh: Mesh) -> Tree:
    """A copy of a tree on every device of a mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    return jax.tree.map(lambda leaf: processes.place(np.asarray(leaf), everywhere).copy(), tree)


def fill_rows(layout: Layout, whole: Tree, places: Mapping[str, Any]) -> StageRows:
    """A whole tree's values in rows of this layout, each type's at its place: a sharding."""
    assert layout.whole is not None
    values = dict(zip(layout.whole.names, map(np.asarray, jax.tree.leaves(whole)), strict=True))
    rows = {}
    for kind, length in layout.lengths.items():
        row = np.zeros((len(layout.trees), length), jnp.dtype(kind))
        for stage, part in enumerate(layout.trees):
            for name, (own, start, end) in zip(part.names, part.places(), strict=True):
                if own == kind:
                    row[stage, start:end] = values[name].ravel()
        # A copy: jax on CPU takes host memory as it is, and such a buffer cannot be donated.
        rows[kind] = processes.place(row, places[kind]).copy()
    return StageRows(rows, layout)


def whole(rows: StageRows) -> Tree:
    """The undivided tree as host arrays, copies of their own; of a leaf that several stages have, the first's."""
    form = rows.layout.whole
    assert form is not None
    host = processes.fetch(rows.rows)
    values: dict[str, HostArray] = {}
    for stage, part in enumerate(rows.layout.trees):
        for name, shape, (kind, start, end) in zip(part.names, part.shapes, part.places(), strict=True):
            if name not in values:
                values[name] = host[kind][stage, start:end].reshape(shape).copy()
    return jax.tree.unflatten(form.structure, [values[name] for name in form.names])


def form_of_whole(rows: StageRows) -> Tree:
    """The undivided tree with arrays of its shapes and types that hold nothing, and take no memory."""
    assert rows.layout.whole is not None
    return rows.layout.whole.blank()


def undivided(state: Tree, of: Callable[[StageRows], Tree] = whole) -> Tree:
    """A state with every `StageRows` in it replaced by `of` it."""
    return jax.tree.map(lambda leaf: of(leaf) if _is_rows(leaf) else leaf, state, is_leaf=_is_rows)


def divide_like(like: Tree, state: Tree) -> Tree:
    """An undivided state with `StageRows` where `like` has them, laid out and placed alike."""

    def node(old: Any, new: Any) -> Any:
        if not _is_rows(old):
            return new
        return fill_rows(old.layout, new, {kind: row.sharding for kind, row in old.rows.items()})

    return jax.tree.map(node, like, state, is_leaf=_is_rows)


def _is_rows(node: Any) -> bool:
    return isinstance(node, StageRows)

"""YAML text as a tree of nodes that is safe to walk: its length, its depth and what its aliases unfold to are bounded.

A few hundred bytes of aliases can stand for more values than any memory holds, and a few thousand brackets for more
depth than any stack. It knows nothing of what the values mean, and executes nothing.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml.nodes import Node

LONGEST = 1 << 18
"""Characters; the parser needs some 10 microseconds for each."""
DEEPEST = 40
MOST = 100_000
"""Values, each counted wherever an alias puts it."""


class TooMuch(ValueError):
    """YAML that is too long, too deep, or unfolds to too much; `line` is where."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


def compose(text: str) -> "Node | None":
    """The root of the document, None where it is empty; TooMuch, or yaml's own errors where it is no YAML."""
    import yaml

    if len(text) > LONGEST:
        raise TooMuch(1, f"{len(text):,} characters, at most {LONGEST:,} are read")
    node: Node | None = yaml.compose(text, Loader=_loader())
    if node is not None:
        _Unfolding().measure(node)
    return node


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Stops where the text itself is nested too deeply, before Python's stack does."""

        depth = 0

        def fetch_flow_collection_start(self, token: Any) -> None:
            """The scanner runs a thousand brackets ahead of the nodes, and looks back at all of them for each."""
            if self.flow_level > DEEPEST:
                _too_deep(self.get_mark().line + 1)
            super().fetch_flow_collection_start(token)

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > DEEPEST:
                _too_deep(self.peek_event().start_mark.line + 1)  # type: ignore[no-untyped-call]
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader


class _Unfolding:
    """How many values and levels each node stands for; each is measured once, an alias where its anchor was."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()

    def measure(self, node: "Node") -> tuple[int, int]:
        if id(node) not in self.sizes:
            line = node.start_mark.line + 1
            if id(node) in self.open:
                raise TooMuch(line, "this part contains itself; write it out")
            self.open.add(id(node))
            inside = [self.measure(child) for child in _children(node)]
            count = 1 + sum(count for count, _ in inside)
            depth = 1 + max((depth for _, depth in inside), default=0)
            if count > MOST:
                raise TooMuch(line, f"this part stands for more than {MOST:,} values, with its aliases")
            if depth > DEEPEST:
                _too_deep(line)
            self.open.remove(id(node))
            self.sizes[id(node)] = count, depth
        return self.sizes[id(node)]


def _children(node: "Node") -> list["Node"]:
    from yaml.nodes import MappingNode, SequenceNode

    if isinstance(node, MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _too_deep(line: int) -> None:
    raise TooMuch(line, f"nested more than {DEEPEST} deep")

"""YAML and JSON text as nested dicts and lists whose unquoted scalars keep the text that was written.

The text is kept because only the option knows its type: `precision: 16.10` must not become 16.1, nor `ON`
true. Anchors and merge keys (`<<`) work; a duplicated key, a tag or a broken text, and one that is too long, too
deep or unfolds to too much, is an OptionError that names file and line: a few hundred bytes of aliases can stand for
more values than any memory holds. Nothing in a document is ever executed.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from hotloop.errors import OptionError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

LONGEST = 1 << 18
"""Characters; the parser needs some 10 microseconds for each."""
DEEPEST = 40
MOST = 100_000
"""Values, each counted wherever an alias puts it."""
MOST_DIGITS = 1000  # Python's own limit is 4,300, and a setting of its environment
INTEGER = re.compile(r"[-+]?[0-9]+")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
WORDS = {
    "": None,
    "~": None,
    "null": None,
    "none": None,
    "true": True,
    "false": False,
    ".inf": float("inf"),
    "-.inf": float("-inf"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    ".nan": float("nan"),
    "nan": float("nan"),
}


class Unquoted(str):
    """A scalar that was written without quotes: its type is still open."""

    __slots__ = ()


class Key(str):
    """A key that knows its line, for the messages about it."""

    line: int = 0

    @classmethod
    def at(cls, text: str, line: int) -> "Key":
        """The key with the (first) line it stands on."""
        key = cls(text)
        key.line = line
        return key


def infer_value(text: Unquoted) -> Any:
    """The value of an unquoted scalar where no option says what it is: None, bool, int, float or text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        if len(text) > MOST_DIGITS:
            raise ValueError(f"a number of {len(text):,} digits is too large")
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else str(text)


def parse_document(text: str, origin: str) -> Any:
    """The document in `text`, None where it is empty; `origin` (a file, an option) begins every error."""
    import yaml

    try:
        node = compose_nodes(text.replace("\t", " "))
    except DocumentTooLarge as error:
        raise OptionError(f"{origin}, line {error.line}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise OptionError(f"{origin}{line}: neither YAML nor JSON: {error.problem}") from error
    except yaml.YAMLError as error:
        raise OptionError(f"{origin}: neither YAML nor JSON: {' '.join(str(error).split())}") from error
    return None if node is None else _value(node, origin)


def _value(node: "Node", origin: str) -> Any:
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    here = f"{origin}, line {node.start_mark.line + 1}"
    if not node.tag.startswith("tag:yaml.org,2002:") or "/" in node.tag:
        raise OptionError(f"{here}: the tag {node.tag} is not supported; write the plain value")
    if isinstance(node, MappingNode):
        return _mapping(node, origin)
    if isinstance(node, SequenceNode):
        return [_value(item, origin) for item in node.value]
    assert isinstance(node, ScalarNode)
    return Unquoted(node.value) if node.style is None else str(node.value)


def _mapping(node: "MappingNode", origin: str) -> dict[str, Any]:
    """Keys of the mapping itself win over merged ones, as YAML's merge key has it."""
    merged: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key_node, value_node in node.value:
        here = f"{origin}, line {key_node.start_mark.line + 1}"
        key = _value(key_node, origin)
        value = _value(value_node, origin)
        if not isinstance(key, str):
            raise OptionError(f"{here}: a key must be a single word")
        if isinstance(key, Unquoted) and key == "<<":
            for layer in value if isinstance(value, list) else [value]:
                if not isinstance(layer, dict):
                    raise OptionError(f"{here}: '<<' must name a mapping")
                merged = {**layer, **merged}
        elif key in own:
            raise OptionError(f"{here}: the key '{key}' stands here twice; keep one")
        else:
            own[Key.at(key, key_node.start_mark.line + 1)] = value
    return {**merged, **own}


class DocumentTooLarge(ValueError):
    """YAML that is too long, too deep, or unfolds to too much; `line` is where."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


def compose_nodes(text: str) -> "Node | None":
    """The root of the document, None where it is empty; DocumentTooLarge, or yaml's own errors where it is no YAML."""
    import yaml

    if len(text) > LONGEST:
        raise DocumentTooLarge(1, f"{len(text):,} characters, at most {LONGEST:,} are read")
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
                raise DocumentTooLarge(line, "this part contains itself; write it out")
            self.open.add(id(node))
            inside = [self.measure(child) for child in _children(node)]
            count = 1 + sum(count for count, _ in inside)
            depth = 1 + max((depth for _, depth in inside), default=0)
            if count > MOST:
                raise DocumentTooLarge(
                    line, f"this part stands for more than {MOST:,} values, with its aliases"
                )
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
    raise DocumentTooLarge(line, f"nested more than {DEEPEST} deep")

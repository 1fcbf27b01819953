"""YAML and JSON text as located values: every key and scalar keeps its line and the text that was written.

The text is kept because only the option knows its type: `precision: 16.10` must not become 16.1, nor `ON` true.
Anchors and merge keys (`<<`, one or a list: a shallow merge in which own keys and earlier items win) are resolved here.
Length, depth and what aliases unfold to are bounded: a few hundred bytes of aliases can stand for more values than any
memory holds, and a few thousand brackets for more depth than any stack. Nothing in a document is ever executed.
`read_located` is for readers that tell every problem of a file, `parse_document` for those that stop at the first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hotloop.errors import OptionError
from hotloop.options.declare import Unquoted

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

ReportProblem = Callable[[int, str], None]
"""Takes a line and what is wrong there; it may raise, or collect the problems of a whole document."""
UNWRITABLE = re.compile("[\\0\\ud800-\\udfff]")  # the zero character and halves of surrogate pairs
LONGEST = 1 << 18  # characters; the parser needs some 10 microseconds for each
DEEPEST = 40
MOST = 100_000  # values, each counted wherever an alias puts it


class DocumentTooLarge(ValueError):
    """YAML that is too long, too deep, or unfolds to too much; `line` is where."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


class NotYaml(ValueError):
    """A text that is neither YAML nor JSON; `line` is where, None if that is not known."""

    def __init__(self, line: int | None, reason: str):
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class LocatedText:
    """A scalar as it was written; `is_null` for an empty place or an unquoted null."""

    text: str
    line: int
    is_null: bool = False
    is_quoted: bool = False


@dataclass(frozen=True)
class LocatedList:
    items: tuple["LocatedValue", ...]
    line: int


class LocatedPair(NamedTuple):
    line: int
    value: "LocatedValue"


@dataclass(frozen=True)
class LocatedMapping:
    """A mapping, merge keys already resolved."""

    pairs: Mapping[str, LocatedPair]
    line: int


LocatedValue: TypeAlias = LocatedText | LocatedList | LocatedMapping


def read_located(text: str, report: ReportProblem) -> LocatedValue | None:
    """The document in `text`, None where it is empty or too large, which is reported; NotYaml where it is none."""
    try:
        node = compose_nodes(text)
    except DocumentTooLarge as error:
        report(error.line, str(error))
        return None
    return None if node is None else _Conversion(report).value(node)


class Key(str):
    """A key that knows its line, for the messages about it."""

    line: int = 0

    @classmethod
    def at(cls, text: str, line: int) -> "Key":
        key = cls(text)
        key.line = line
        return key


def parse_document(text: str, origin: str) -> Any:
    """The document in `text`, None where it is empty; `origin` (a file, an option) begins every error."""

    def refuse(line: int, problem: str) -> None:
        raise OptionError(f"{origin}, line {line}: {problem}")

    try:
        value = read_located(text.replace("\t", " "), refuse)
    except NotYaml as error:
        line = "" if error.line is None else f", line {error.line}"
        raise OptionError(f"{origin}{line}: neither YAML nor JSON: {error}") from error
    return None if value is None else _unlocated(value)


def _unlocated(value: LocatedValue) -> Any:
    if isinstance(value, LocatedMapping):
        return {Key.at(key, line): _unlocated(inner) for key, (line, inner) in value.pairs.items()}
    if isinstance(value, LocatedList):
        return [_unlocated(item) for item in value.items]
    return value.text if value.is_quoted else Unquoted(value.text)


class _Conversion:
    """Turns nodes into values, each node once: aliases share what they name."""

    def __init__(self, report: ReportProblem):
        self.report = report
        self.done: dict[int, LocatedValue] = {}

    def value(self, node: "Node") -> LocatedValue:
        if id(node) not in self.done:
            self.done[id(node)] = self.convert(node, node.start_mark.line + 1)
        return self.done[id(node)]

    def convert(self, node: "Node", line: int) -> LocatedValue:
        from yaml.nodes import MappingNode, ScalarNode, SequenceNode

        if not node.tag.startswith("tag:yaml.org,2002:") or "/" in node.tag:
            self.report(line, f"the tag {node.tag} is not supported; write the plain value")
        if isinstance(node, MappingNode):
            return self.mapping(node, line)
        if isinstance(node, SequenceNode):
            return LocatedList(tuple(self.value(item) for item in node.value), line)
        assert isinstance(node, ScalarNode)
        if UNWRITABLE.search(node.value):
            self.report(
                line, f"{ascii(node.value)[:60]} has a character that no file name or program can take"
            )
        return LocatedText(node.value, line, node.tag.endswith(":null"), node.style is not None)

    def mapping(self, node: "MappingNode", line: int) -> LocatedMapping:
        own: dict[str, LocatedPair] = {}
        merged: dict[str, LocatedPair] = {}
        for key_node, value_node in node.value:
            key, value = self.value(key_node), self.value(value_node)
            if not isinstance(key, LocatedText):
                self.report(key.line, "a key must be a single word")
            elif key_node.tag.endswith(":merge"):
                merged = {**self.merged(value, key.line), **merged}
            elif key.text in own:
                first = own[key.text].line
                self.report(key.line, f"the key '{key.text}' is already in line {first}; keep one")
            else:
                own[key.text] = LocatedPair(key.line, value)
        return LocatedMapping({**{key: pair for key, pair in merged.items() if key not in own}, **own}, line)

    def merged(self, value: LocatedValue, line: int) -> dict[str, LocatedPair]:
        """The keys that `<<` brings; of a list, the earlier mapping wins."""
        pairs: dict[str, LocatedPair] = {}
        for layer in value.items if isinstance(value, LocatedList) else [value]:
            if isinstance(layer, LocatedMapping):
                pairs = {**layer.pairs, **pairs}
            else:
                self.report(line, "'<<' must name a mapping or a list of mappings, such as *common_options")
        return pairs


def compose_nodes(text: str) -> "Node | None":
    """The root of the document, None where it is empty; DocumentTooLarge or NotYaml where there is none to walk."""
    import yaml

    if len(text) > LONGEST:
        raise DocumentTooLarge(1, f"{len(text):,} characters, at most {LONGEST:,} are read")
    try:
        node: Node | None = yaml.compose(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise NotYaml(mark.line + 1 if mark else None, str(error.problem)) from error
    except yaml.YAMLError as error:
        raise NotYaml(None, " ".join(str(error).split())) from error
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

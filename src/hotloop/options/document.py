"""YAML and JSON text as located values: every key and scalar keeps its line and the text that was written.

The text is kept because only the option knows its type: `precision: 16.10` must not become 16.1, nor `ON` true.
Anchors and merge keys (`<<`, one or a list: a shallow merge in which own keys and earlier items win) are resolved here.
Length, depth and what aliases unfold to are bounded: a few hundred bytes can stand for more than any memory holds.
`read_located` is for readers that tell every problem of a file, `parse_document` for those that stop at the first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hotloop.errors import OptionError
from hotloop.options import Unquoted

if TYPE_CHECKING:
    from yaml.nodes import Node

ReportProblem = Callable[[int, str], None]
"""Takes a line and what is wrong there; it may raise, or collect the problems of a whole document."""
UNWRITABLE = re.compile("[\\0\\ud800-\\udfff]")  # the zero character and halves of surrogate pairs
LONGEST = 1 << 18  # characters; the parser needs some 10 microseconds for each
DEEPEST = 40
TOO_DEEP = f"nested more than {DEEPEST} deep"
MOST = 100_000  # values, each counted wherever an alias puts it


class DocumentError(ValueError):
    """`line` is where it is, None if that is not known."""

    def __init__(self, line: int | None, reason: str):
        super().__init__(reason)
        self.line = line


class DocumentTooLarge(DocumentError):
    """YAML that is too long, too deep, or unfolds to too much."""


class NotYaml(DocumentError):
    """A text that is neither YAML nor JSON."""


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
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    try:
        root = compose_nodes(text)
    except DocumentTooLarge as error:
        report(error.line or 1, str(error))
        return None

    @cache  # aliases share what they name
    def convert(node: "Node") -> LocatedValue:
        line = node.start_mark.line + 1
        if not node.tag.startswith("tag:yaml.org,2002:") or "/" in node.tag:
            report(line, f"the tag {node.tag} is not supported; write the plain value")
        if isinstance(node, SequenceNode):
            return LocatedList(tuple(map(convert, node.value)), line)
        if isinstance(node, MappingNode):
            return LocatedMapping(pairs_of(node), line)
        assert isinstance(node, ScalarNode)
        if UNWRITABLE.search(node.value):
            shown = ascii(node.value)[:60]
            report(line, f"{shown} has a character that no file name or program can take")
        return LocatedText(node.value, line, node.tag.endswith(":null"), node.style is not None)

    def pairs_of(node: MappingNode) -> dict[str, LocatedPair]:
        own: dict[str, LocatedPair] = {}
        merged: dict[str, LocatedPair] = {}
        for key_node, value_node in node.value:
            key, value = convert(key_node), convert(value_node)
            if not isinstance(key, LocatedText):
                report(key.line, "a key must be a single word")
            elif key_node.tag.endswith(":merge"):
                for layer in value.items if isinstance(value, LocatedList) else [value]:
                    if isinstance(layer, LocatedMapping):
                        merged = {**layer.pairs, **merged}
                    else:
                        named = "must name a mapping or a list of mappings, such as *common_options"
                        report(key.line, f"'<<' {named}")
            elif key.text in own:
                first = own[key.text].line
                report(key.line, f"the key '{key.text}' is already in line {first}; keep one")
            else:
                own[key.text] = LocatedPair(key.line, value)
        return {**{key: pair for key, pair in merged.items() if key not in own}, **own}

    return None if root is None else convert(root)


class Key(str):
    """A key that knows its line, for the messages about it."""

    line: int

    def __new__(cls, text: str, line: int) -> "Key":
        key = super().__new__(cls, text)
        key.line = line
        return key


def parse_document(text: str, origin: str) -> Any:
    """The document in `text`, None where it is empty; `origin` (a file, an option) begins every error."""

    def refuse(line: int, problem: str) -> None:
        raise OptionError(f"{origin}, line {line}: {problem}")

    def without_places(value: LocatedValue) -> Any:
        if isinstance(value, LocatedMapping):
            return {Key(key, line): without_places(inner) for key, (line, inner) in value.pairs.items()}
        if isinstance(value, LocatedList):
            return [without_places(item) for item in value.items]
        return value.text if value.is_quoted else Unquoted(value.text)

    try:
        value = read_located(text.replace("\t", " "), refuse)
    except NotYaml as error:
        line = "" if error.line is None else f", line {error.line}"
        raise OptionError(f"{origin}{line}: neither YAML nor JSON: {error}") from error
    return None if value is None else without_places(value)


def compose_nodes(text: str) -> "Node | None":
    """The root of the document, None where it is empty; DocumentTooLarge or NotYaml where there is none to walk."""
    import yaml

    if len(text) > LONGEST:
        raise DocumentTooLarge(1, f"{len(text):,} characters, at most {LONGEST:,} are read")
    try:
        root: Node | None = yaml.compose(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise NotYaml(mark.line + 1 if mark else None, str(error.problem)) from error
    except yaml.YAMLError as error:
        raise NotYaml(None, " ".join(str(error).split())) from error
    unfinished: set[Node] = set()

    @cache  # an alias stands for as much as its anchor
    def measure(node: "Node") -> tuple[int, int]:
        """How many values and levels it stands for."""
        line = node.start_mark.line + 1
        if node in unfinished:
            raise DocumentTooLarge(line, "this part contains itself; write it out")
        unfinished.add(node)
        children: list[Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        inside = [measure(child) for child in children]
        count = 1 + sum(count for count, _ in inside)
        depth = 1 + max((depth for _, depth in inside), default=0)
        if count > MOST:
            raise DocumentTooLarge(line, f"this part stands for more than {MOST:,} values, with its aliases")
        if depth > DEEPEST:
            raise DocumentTooLarge(line, TOO_DEEP)
        unfinished.remove(node)
        return count, depth

    if root is not None:
        measure(root)
    return root


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Stops where the text itself is nested too deeply, before Python's stack does."""

        depth = 0

        def fetch_flow_collection_start(self, token: Any) -> None:
            """The scanner runs a thousand brackets ahead of the nodes, and looks back at all of them for each."""
            if self.flow_level > DEEPEST:
                raise DocumentTooLarge(self.get_mark().line + 1, TOO_DEEP)
            super().fetch_flow_collection_start(token)

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > DEEPEST:
                line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
                raise DocumentTooLarge(line, TOO_DEEP)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader

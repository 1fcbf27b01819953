"""YAML text as located values: every key and scalar keeps its line and the text that was written.

Anchors and merge keys (`<<`, one or a list: a shallow merge in which own keys and earlier items win) are resolved
here. Problems are handed to a `Report`, so that a file's are all told at once. Nothing is executed, and it does
not know what a benchmark is.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hotloop.options.document import DocumentTooLarge, compose_nodes

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

ReportProblem = Callable[[int, str], None]
UNWRITABLE = re.compile("[\\0\\ud800-\\udfff]")  # the zero character and halves of surrogate pairs


@dataclass(frozen=True)
class LocatedText:
    """A scalar as it was written; `is_null` for an empty place or an unquoted null."""

    text: str
    line: int
    is_null: bool = False


@dataclass(frozen=True)
class LocatedList:
    """A list."""

    items: tuple["LocatedValue", ...]
    line: int


class LocatedPair(NamedTuple):
    """A key's line and its value."""

    line: int
    value: "LocatedValue"


@dataclass(frozen=True)
class LocatedMapping:
    """A mapping, merge keys already resolved."""

    pairs: Mapping[str, LocatedPair]
    line: int


LocatedValue: TypeAlias = LocatedText | LocatedList | LocatedMapping


def read_located(text: str, report: ReportProblem) -> LocatedValue | None:
    """The document in `text`, or None where it is empty or no YAML."""
    import yaml

    try:
        node = compose_nodes(text)
    except DocumentTooLarge as error:
        report(error.line, str(error))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        report(mark.line + 1 if mark else 1, f"no YAML: {error.problem}; check indentation and quotes")
    except yaml.YAMLError as error:
        report(1, f"no YAML: {' '.join(str(error).split())}")
    else:
        return None if node is None else _Conversion(report).value(node)
    return None


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
        from yaml.nodes import MappingNode, SequenceNode

        if not node.tag.startswith("tag:yaml.org,2002:") or "/" in node.tag:
            self.report(line, f"the tag {node.tag} is not supported; write the plain value")
        if isinstance(node, MappingNode):
            return self.mapping(node, line)
        if isinstance(node, SequenceNode):
            return LocatedList(tuple(self.value(item) for item in node.value), line)
        if UNWRITABLE.search(node.value):
            self.report(
                line, f"{ascii(node.value)[:60]} has a character that no file name or program can take"
            )
        return LocatedText(node.value, line, is_null=node.tag.endswith(":null"))

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

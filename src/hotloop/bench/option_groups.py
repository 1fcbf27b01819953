"""The words of an older command line, option by option, and the error where no command of ours takes its place."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hotloop.errors import OptionError

OPTION = re.compile(r"--?[A-Za-z]")


class CompatError(OptionError):
    """A command that has no hotloop command in its place."""


class OptionGroup(NamedTuple):
    """An option as it was typed, under its name with hyphens, and the words after it."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]


def group_options(words: Sequence[str]) -> list[OptionGroup]:
    """The words option by option; those before the first option have no name."""
    starts = [at for at, word in enumerate(words) if at == 0 or OPTION.match(word)]
    groups = []
    for start, end in pairwise([*starts, len(words)]):
        name, *values = words[start:end]
        if not OPTION.match(name):
            name, values = "", [name, *values]
        elif "=" in name:
            name, _, value = name.partition("=")
            values = [value, *values]
        groups.append(OptionGroup(name.replace("_", "-"), tuple(values), tuple(words[start:end])))
    return groups

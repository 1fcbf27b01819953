"""The command line that a benchmark was started by, as its record keeps it: to be typed again by anybody.

It needs nothing but Python, since some benchmarks compare checkouts and have no hotloop of their own.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = ("--json", "--save")
"""Options of the benchmarks whose file is the record itself, which says nothing of how it was made."""


def describe_command(words: Sequence[str] | None = None) -> str:
    """`words` (this program's own, if nothing else is asked for) without the file that is written, and with an option's
    name in place of a path: a record is published, and a user's folders are not."""
    program, *options = sys.argv if words is None else words
    place = Path(program).resolve()
    name = place.relative_to(ROOT).as_posix() if place.is_relative_to(ROOT) else place.name
    return " ".join(["python", name, *map(shlex.quote, _to_publish(options))])


def _to_publish(words: Sequence[str]) -> Iterator[str]:
    option = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if option not in OUTPUTS:
                yield f"{option}={_hide_path(value, option)}" if equals else option
        elif option in OUTPUTS:
            option = ""  # what follows is of no option
        else:
            yield _hide_path(word, option)


def _hide_path(word: str, option: str) -> str:
    """A path has a slash, which but for fractions nothing else has, or is the name of a folder."""
    is_fraction = re.fullmatch(r"\d+/\d+", word)
    is_path = ("/" in word and not is_fraction) or Path(word).is_dir()
    return (option.removeprefix("--").upper().replace("-", "_") or "DATA") if is_path else word

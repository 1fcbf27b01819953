"""The errors that are meant for the user: each message is one line that says what to do.

Whatever raises one of these does so before any work is lost; the command line prints the message alone and leaves
with status 2. Anything else that escapes is a defect of hotloop.
"""

from collections.abc import Iterable, Mapping
from errno import EACCES, EDQUOT, EFBIG, EIO, ENAMETOOLONG, ENOSPC, EPERM, EROFS
from types import MappingProxyType
from typing import Any

LONGEST = 1200  # characters of a message; a value in it may be of any length
DISK_ERRORS = frozenset((EACCES, EDQUOT, EFBIG, EIO, ENAMETOOLONG, ENOSPC, EPERM, EROFS))
"""What the user's disk and its permissions can do to any command at any moment: no defect."""
CUTOFF, MARGIN = 0.6, 0.15  # how like a name must be to be offered, and how close to the best one


def one_line(text: str) -> str:
    """The text on one line that a terminal can show, its middle left out where it is too long."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in " ".join(text.split()))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST // 2]} ... {shown[-LONGEST // 3 :]}"


def first_line(error: BaseException) -> str:
    """What an error of another library says first, to stand in a message of ours; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class HotloopError(Exception):
    """Base of every error whose message is written for the user; it is one line whatever values are in it."""

    result: Mapping[str, Any] = MappingProxyType({})
    """What was found all the same, which --json prints beside the message."""

    def __init__(self, text: str = ""):
        super().__init__(one_line(text))


class OptionError(HotloopError, ValueError):
    """An option, preset or config file asks for something that cannot work."""


class PlanError(OptionError):
    """Batch sizes, epochs and host events that do not fit together."""


class DataError(HotloopError):
    """A data set or data file that is missing, unreadable or malformed."""


class DeviceError(HotloopError):
    """The device or the number of devices asked for is not there."""


class CheckpointError(HotloopError):
    """A checkpoint that is missing, damaged, or made by another program."""


class RunError(HotloopError):
    """A run folder that cannot be created, locked or continued."""


class ModelError(HotloopError):
    """A model folder that is missing, damaged, expired, or for another platform."""


class WrongResult(HotloopError):
    """A computation that disagrees with its reference: it must not be timed."""


class MissingExtra(HotloopError):
    """An optional package is needed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs {package}: pip install 'hotloop[{extra}]'")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known names, else all of them where they are few."""
    from difflib import SequenceMatcher

    def bare(name: str) -> str:  # two option names must not look alike for their hyphens
        return name.lower().lstrip("-").replace("_", "-")

    names = sorted(set(known))
    ratios = {name: SequenceMatcher(None, bare(word), bare(name)).ratio() for name in names}
    best = max(ratios.values(), default=0.0)
    near = [name for name in names if ratios[name] >= max(CUTOFF, best - MARGIN)]
    near = sorted(near, key=lambda name: -ratios[name])[:3]
    if near:
        return f"; did you mean {join_with_or(near)}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def join_with_or(names: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

"""Checks of what users give, each with one line for what cannot work, before any work is done. No jax."""

from collections.abc import Iterable
from numbers import Real
from os import PathLike
from typing import Any

from hotloop.errors import HotloopError, OptionError
from hotloop.options import folder_name

HOOK_METHODS = ("begin", "after_call", "on_checkpoint", "end")


def is_whole(value: Any) -> bool:
    """An int, of Python or another's."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_path(value: Any) -> bool:
    """Text or a Path; empty text is none."""
    return isinstance(value, str | PathLike) and value != ""


def is_number(value: Any) -> bool:
    """A real number, of Python or another's."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_value(
    name: str, value: Any, wanted: str, fits: bool, error: type[HotloopError] = OptionError
) -> None:
    if not fits:
        raise error(f"{name}={value!r} must be {wanted}")


def check_kind(name: str, value: Any, wanted: str, fits: bool) -> None:
    if not fits:
        raise OptionError(f"{name} must be {wanted}, not {_kind(value)}")


def check_steps(steps: Any, max_steps: Any = None) -> tuple[int | None, int | None]:
    """The same as Python's numbers: whole ones from 1, and one of the two at most."""
    if steps is not None and max_steps is not None:
        raise OptionError(
            f"steps={steps} and max_steps={max_steps}: the first is how many more, the second how many in all; give one"
        )
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        check_whole(name, value)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}: must be at least 1")
    return steps and int(steps), max_steps and int(max_steps)


def check_whole(name: str, value: Any) -> None:
    if value is not None and not is_whole(value):
        raise OptionError(f"{name}={value!r}: must be a whole number")


def check_name(name: Any) -> None:
    """The name of an evaluation is a part of its folder's, and leads nowhere else."""
    if name is not None and (not isinstance(name, str) or folder_name(f"eval_{name}")):
        raise OptionError(f"name={name!r}: must be a word that can stand in a folder's name, without /")


def check_hooks(hooks: Any) -> tuple[Any, ...]:
    if not isinstance(hooks, Iterable):
        raise OptionError(f"hooks={_kind(hooks)}: must be a list of hooks, as hooks=[hook]")
    found = tuple(hooks)
    for hook in found:
        if isinstance(hook, type) or not all(hasattr(hook, name) for name in HOOK_METHODS):
            raise OptionError(
                f"hooks: {_kind(hook)} is no Hook: derive a class from Hook and give an object of it"
            )
    return found


def describe(value: Any) -> str:
    """A value and its type, for an error."""
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:80]


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"

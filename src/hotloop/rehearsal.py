"""A rehearsal of a command: it does everything that comes before its work, and ends where that would begin.

So it is the command itself that checks, in its own order, and nothing is fetched, compiled or written. What
begins work says so with `begin_work`; outside a rehearsal that does nothing. It knows no command.
"""

from collections.abc import Callable
from contextvars import ContextVar

_ON: ContextVar[bool] = ContextVar("rehearsal", default=False)


class WorkBegins(BaseException):
    """Here a rehearsal ends. It is no Exception: what handles errors must let it pass."""


def is_on() -> bool:
    return _ON.get()


def begin_work(what: str) -> None:
    """Everything that can be checked before `what` has been checked; a rehearsal ends here."""
    if is_on():
        raise WorkBegins(what)


def rehearse(command: Callable[[], object]) -> str:
    """Run a command up to its work; what that would be, or nothing where the command ended by itself."""
    before = _ON.set(True)
    try:
        command()
    except WorkBegins as end:
        return str(end)
    finally:
        _ON.reset(before)
    return ""

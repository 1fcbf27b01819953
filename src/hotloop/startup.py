"""What the time went to until a run's first update: parts by name, one after the other. It imports nothing of hotloop,
so that the first run's clock starts before everything else; the next one's starts where the run before it ended."""

import time

_began = _last = time.monotonic()
_parts: dict[str, float] = {}


def end_part(name: str) -> None:
    """What was done since the last part ended was of this name; a part may come in pieces."""
    global _last
    now = time.monotonic()
    _parts[name] = _parts.get(name, 0.0) + now - _last
    _last = now


def leave_out() -> None:
    """What was done since the last part ended is of no part: the run's records tell of it in another way."""
    global _last
    _last = time.monotonic()


def start_again() -> None:
    """A run has ended: what follows is the next one's."""
    global _began, _last
    _began = _last = time.monotonic()
    _parts.clear()


def seconds() -> float:
    """Since the process began to import hotloop, or the run before ended."""
    return time.monotonic() - _began


def parts() -> dict[str, float]:
    """The seconds of each part so far."""
    return dict(_parts)

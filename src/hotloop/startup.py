"""What the time of this process went to until its first update: parts by name, one after the other. It imports nothing
of hotloop, so that its clock starts before everything else."""

import time

_began = _last = time.monotonic()
_parts: dict[str, float] = {}


def end_part(name: str) -> None:
    """What was done since the last part ended was of this name; a part may come in pieces."""
    global _last
    now = time.monotonic()
    _parts[name] = _parts.get(name, 0.0) + now - _last
    _last = now


def seconds() -> float:
    """Since the process began to import hotloop."""
    return time.monotonic() - _began


def parts() -> dict[str, float]:
    """The seconds of each part so far."""
    return dict(_parts)

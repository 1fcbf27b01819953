"""How fast this machine is right now: the same few milliseconds of work beside every run of a program.

Shared and throttled machines change their pace by more than the differences that people look for. Two sets of results
that were measured at different paces say so, and the comparison believes it.
"""

import time

_TURNS, _WORK = 3, 20_000


def pace() -> float:
    """Turns of a small fixed loop a second, the best of a few; takes some five milliseconds."""

    def seconds() -> float:
        began = time.perf_counter()
        sum(number * number for number in range(_WORK))
        return time.perf_counter() - began

    return 1 / min(seconds() for _ in range(_TURNS))

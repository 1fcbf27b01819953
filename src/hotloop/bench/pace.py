"""How fast this machine is right now: the same few milliseconds of work, again and again beside every run of a program.

Shared and throttled machines change their pace by more than the differences that people look for. Two sets of results
that were measured at different paces say so, and the comparison claims nothing that the pace may explain.
"""

import time

READINGS = 8  # before a run, and after it; a single one is too noisy to tell anything
_TURNS, _WORK = 3, 20_000


def paces() -> list[float]:
    """Turns of a small fixed loop a second, several times; takes some twenty-five milliseconds.

    The readings follow each other without a rest: a machine that is busy lets a short burst through and makes a longer
    one wait its turn, as it does with programs.
    """
    return [pace() for _ in range(READINGS)]


def pace() -> float:
    """One reading; a turn that was interrupted counts as long as it took."""
    began = time.perf_counter()
    for _ in range(_TURNS):
        sum(number * number for number in range(_WORK))
    return _TURNS / (time.perf_counter() - began)

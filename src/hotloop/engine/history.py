"""The records of a run as if nothing had disturbed it, whatever stopped or killed its processes on the way.

It knows which records a process makes of itself and which belong to the run; figures mean nothing here.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

OF_A_DISTURBANCE = ("resume", "stop")
"""Records of a run that was stopped or killed, and of no other."""
OF_A_PROCESS: Mapping[str, tuple[str, ...]] = {
    "start": (),
    "compile": ("updates_per_call",),
    "profile": (),
    "warning": ("message",),
}
"""Records that every process makes of itself, and the figures that tell two of them apart: the first one stays."""


def current(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of the run as it stands.

    What came after a resumed update was run again, so it goes. What a later process did once more (a validation at
    the end, say) takes the place of what it repeats. Of the ends only the last one stays.
    """
    kept: dict[Hashable, dict[str, Any]] = {}
    seen: Counter[Hashable] = Counter()
    for record in events:
        event = record["event"]
        if event == "start":
            seen.clear()
            kept = {key: old for key, old in kept.items() if old["event"] != "end"}
        if event == "resume":
            kept = {key: old for key, old in kept.items() if old["update"] <= record["update"]}
        if event in OF_A_DISTURBANCE or (event == "warning" and record.get("resumed")):
            continue
        identity = _identity(record)
        key = (identity, seen[identity])
        seen[identity] += 1
        if event not in OF_A_PROCESS or key not in kept:
            kept[key] = dict(record)
    return list(kept.values())


def _identity(record: Mapping[str, Any]) -> Hashable:
    """What two records have in common that are of the same thing: a validation of the same update, say."""
    event = record["event"]
    if event in OF_A_PROCESS:
        return (event, *(repr(record.get(name)) for name in OF_A_PROCESS[event]))
    words = sorted((name, value) for name, value in record.items() if isinstance(value, str))
    return (event, record["update"], *words)

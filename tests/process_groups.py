"""The processes of a launcher, and what is left of them, as /proc has it."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LONGEST = 30.0
"""Seconds that processes have to start, and to be gone."""


def living_members(group: int) -> list[int]:
    """The processes of a group that run; one that nobody has asked after is none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = entry.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def find_processes(launcher: int, count: int) -> list[int]:
    """The processes of a launcher, by their numbers, once there are so many; each leads a group of its own."""
    limit = time.monotonic() + LONGEST
    while time.monotonic() < limit:
        found = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, parent = entry.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == launcher and state not in "ZX":
                    variables = entry.with_name("environ").read_bytes().split(b"\0")
                    numbers = [each[16:] for each in variables if each.startswith(b"HOTLOOP_PROCESS=")]
                    found |= {int(number): int(entry.parent.name) for number in numbers}
        if len(found) == count:
            return [found[number] for number in sorted(found)]
        time.sleep(0.02)
    raise TimeoutError(f"{count} processes did not start")


def wait_until_gone(groups: Sequence[int]) -> list[list[int]]:
    """What is left of these groups, waited for a while."""
    limit = time.monotonic() + LONGEST
    while any(living_members(group) for group in groups) and time.monotonic() < limit:
        time.sleep(0.02)
    return [living_members(group) for group in groups]

"""The process's own memory: how much it has had, and keeping what was freed, for programs compiled for a CPU.

glibc hands large blocks back to the system when they are freed. Every compiled call, and many an operation in it,
allocates its temporaries anew: each page is then cleared and mapped again, 450,000 times in 150 updates of a small CNN.
Kept, it is a third of that; the updates took 5 to 10 % less time, and the process no more memory at its peak.
"""

import ctypes
import re
import resource
import sys
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h
_NEVER = 2**31 - 1


def keep_freed() -> bool:
    """Let malloc keep what is freed; False where there is no glibc to tell."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 * 2**20))
    return all(mallopt(name, value) == 1 for name, value in settings)


def peak_bytes() -> int:
    """The most memory that this process has had.

    By the kernel's own mark where there is one: `ru_maxrss` begins with that of the process which started this one.
    """
    try:
        mark = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        mark = None
    if mark:
        return 1024 * int(mark[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most

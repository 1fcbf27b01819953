"""What malloc does with freed memory, so that a compiled program's calls on a CPU need not have theirs mapped anew.

Every call of a program allocates its temporaries, one block for all, and frees them. It knows nothing of programs, and
does nothing where there is no glibc to tell.
"""

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # malloc.h
_NEVER = -1  # a threshold for handing memory back
_HUGE_PAGE, _ADVISE_HUGE = 2 * 2**20, 14  # x86-64 and arm64; sys/mman.h
_CALLS = 4
"""Blocks of temporaries that come to be held: a call's are freed when the next one has begun, and something small may
come to lie where they were before they are asked for again."""


def keep_freed() -> bool:
    """Let malloc keep what is freed, up to 2 GiB; False where there is no glibc to tell. Best before there are threads.

    glibc hands large blocks back to the system, and every compiled call allocates its temporaries anew: each page is
    cleared and mapped again, 450,000 times in 150 updates of a small CNN. Kept, it is a third of that; the updates took
    5 to 10 % less time, and the process no more memory at its peak. Blocks above 64 MiB that a thread takes from a
    place of its own are handed back whatever is asked for, so there is one place: ResNet-50's updates at batch 8 were
    12 % faster.
    """
    mallopt = _c_function("mallopt")
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20), (_ARENA_MAX, 1))
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in settings)


def reserve(size: int) -> None:
    """Have the next block of `size` bytes in huge pages, where the system gives those to whoever asks. Where a quarter
    of the machine's memory holds several such blocks, they all are, and malloc keeps what they leave.

    For a program's temporaries: ResNet-50's updates at batch 8 (673 MiB) were 7 % faster for the huge pages. Beyond
    2 GiB malloc handed all of it back, and every third update had its memory mapped anew, which took a fifth longer.
    """
    malloc, free, advise, mallopt = map(_c_function, ("malloc", "free", "madvise", "mallopt"))
    if size < 2 * _HUGE_PAGE or malloc is None or free is None or advise is None or mallopt is None:
        return
    if _CALLS * size <= _memory() // 4:
        size *= _CALLS
        if size >= 2**31:
            mallopt(_TRIM_THRESHOLD, _NEVER)
    malloc.restype = ctypes.c_void_p
    if block := malloc(ctypes.c_size_t(size)):
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        length = (block + size - start) // _HUGE_PAGE * _HUGE_PAGE
        advise(ctypes.c_void_p(start), ctypes.c_size_t(length), _ADVISE_HUGE)
        free(ctypes.c_void_p(block))


def _memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _c_function(name: str) -> Any:
    """Of glibc under Linux; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None

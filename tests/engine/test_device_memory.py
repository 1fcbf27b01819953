"""Freed memory is kept for the next call, and the most memory is this process's own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hotloop.engine.device import peak_bytes

PROGRAM = """
import ctypes, resource, sys
from hotloop.engine.device import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = bytearray(32 * 2**20)  # cleared: every page is touched
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_block_that_was_freed_is_not_mapped_anew():
    def counted(word: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert counted("keep") < counted("plain") / 10


THREAD = """
import resource, sys, threading
from hotloop.engine.device import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
def fill():
    for _ in range(3):
        block = bytearray(100 * 2**20)  # more than a thread's own place can hold
        del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_large_block_of_another_thread_is_kept_too():
    def counted(word: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", THREAD, word], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert counted("keep") < counted("plain") / 4


RESERVED = """
import sys
from hotloop.engine.device import keep_freed, reserve
assert keep_freed()
size = 100 * 2**20
if sys.argv[1] == "reserve":
    reserve(size)
block = bytearray(size)
print(sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages:")))
"""
ADVISED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not ADVISED.is_file() or "[madvise]" not in ADVISED.read_text(),
    reason="huge pages are not by request here",
)
def test_a_reserved_block_is_in_huge_pages():
    def kilobytes(word: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", RESERVED, word], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert kilobytes("plain") < 10_000
    assert kilobytes("reserve") > 80_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own mark is Linux's")
def test_the_peak_is_that_of_this_process_and_not_of_the_one_that_started_it():
    held = np.ones(60_000_000)  # 480 MB, which a child's ru_maxrss would begin with
    code = "from hotloop.engine.device import peak_bytes; print(peak_bytes())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5e6 < int(child.stdout) < 1e8
    assert peak_bytes() > held.nbytes

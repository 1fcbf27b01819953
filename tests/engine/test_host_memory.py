"""Freed memory is kept for the next call."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from hotloop.engine.host_memory import keep_freed
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

"""Freed memory is kept for the next call, and the most memory is this process's own."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine import device as devices
from hotloop.engine import loop, malloc
from hotloop.engine.device import GPU_MEMORY, may_have_accelerator, peak_bytes, setup, take_memory_as_needed
from hotloop.engine.malloc import reserve

PROGRAM = """
import ctypes, resource, sys
from hotloop.engine.malloc import keep_freed
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


def number_from(program: str, word: str) -> int:
    done = subprocess.run([sys.executable, "-c", program, word], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_block_that_was_freed_is_not_mapped_anew():
    assert number_from(PROGRAM, "keep") < number_from(PROGRAM, "plain") / 10


THREAD = """
import resource, sys, threading
from hotloop.engine.malloc import keep_freed
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
    assert number_from(THREAD, "keep") < number_from(THREAD, "plain") / 4


RESERVED = """
import sys
from hotloop.engine.malloc import keep_freed, reserve
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
    assert number_from(RESERVED, "plain") < 10_000
    assert number_from(RESERVED, "reserve") > 80_000


SIZES = """
import sys
from hotloop.engine.device import peak_bytes
from hotloop.engine.malloc import keep_freed, reserve
assert keep_freed()
before = peak_bytes()
for size in (-1, 0, 1, 4 * 2**20 - 1, 4 * 2**20, 3 * 2**30, 2**62, 2**63 - 1):
    reserve(size)
    block = bytearray(8 * 2**20)
    assert not any(block[:: 4096])
print(peak_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_to_reserve_takes_no_memory_whatever_the_size():
    done = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 2**20


@given(block=st.integers(1, 2**46), size=st.integers(-1, 2**40))
def test_what_is_advised_lies_within_the_block_in_whole_pages_and_the_block_is_freed(block, size):
    calls = []

    def function(name):
        def call(*given):
            calls.append((name, *(each if isinstance(each, int) else each.value for each in given)))
            return block

        return call

    with (
        mock.patch.object(malloc, "_c_function", function),
        mock.patch.object(malloc, "_memory", lambda: 2**33),
    ):
        reserve(size)
    if size < 4 * 2**20:
        assert calls == []
        return
    size *= 4 if size <= 2**29 else 1  # four of them in a quarter of the memory
    if calls[0][0] == "mallopt":  # whether it is: below
        calls = calls[1:]
    (_, asked), (_, start, length, _), freed = calls
    assert (asked, freed) == (size, ("free", block))
    assert start % 2**21 == length % 2**21 == 0
    assert block <= start < start + length <= block + size
    assert length > size - 2 * 2**21


@pytest.mark.parametrize(
    ("mebibytes", "gibibytes", "is_kept"),
    [(511, 64, False), (512, 64, True), (4096, 64, True), (4097, 64, False), (512, 7, False), (512, 8, True)],
)
def test_all_is_kept_where_several_calls_temporaries_are_large_and_fit_in_a_quarter_of_the_memory(
    monkeypatch, mebibytes, gibibytes, is_kept
):
    told = mock.Mock()
    monkeypatch.setattr(malloc, "_memory", lambda: gibibytes * 2**30)
    monkeypatch.setattr(
        malloc, "_c_function", lambda name: told if name == "mallopt" else mock.Mock(return_value=0)
    )
    reserve(mebibytes * 2**20)
    assert told.call_args_list == ([mock.call(-1, -1)] if is_kept else [])  # M_TRIM_THRESHOLD, never


LARGE = """
import ctypes, resource, sys
from hotloop.engine import malloc
assert malloc.keep_freed()
malloc._memory = lambda: 2**40
size, libc = 700 * 2**20, ctypes.CDLL(None)
if sys.argv[1] == "reserve":
    malloc.reserve(size)
libc.malloc.restype = ctypes.c_void_p
def take():
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    for page in range(0, size, 4096 * 16):  # a few pages are enough to count
        ctypes.c_char.from_address(block.value + page).value = 1
    return block
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for block in [take() for _ in range(4)]:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_four_large_blocks_that_were_freed_are_not_mapped_anew():
    assert number_from(LARGE, "reserve") < number_from(LARGE, "plain") / 10


def test_nothing_is_advised_where_there_is_no_memory():
    names = "malloc", "free", "madvise", "mallopt"
    functions = {name: mock.Mock(return_value=None) for name in names}
    with mock.patch.object(malloc, "_c_function", functions.get):
        reserve(2**40)
    assert functions["malloc"].called
    assert not functions["free"].called and not functions["madvise"].called


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU's temporaries are malloc's")
@pytest.mark.parametrize(("sizes", "wanted"), [(SimpleNamespace(temp_size_in_bytes=7), [7]), (None, [])])
def test_a_programs_temporaries_are_reserved_where_their_size_is_known(monkeypatch, sizes, wanted):
    reserved: list[int] = []
    monkeypatch.setattr(loop, "reserve", reserved.append)
    loop._reserve_temporaries(SimpleNamespace(memory_analysis=lambda: sizes))
    assert reserved == wanted


@pytest.mark.parametrize(
    ("variable", "nvidia", "found", "may"),
    [
        (None, False, [], False),
        (None, True, [], True),
        (None, False, ["libtpu"], True),
        (None, False, ["jax_plugins"], True),
        ("cpu", True, ["libtpu", "jax_plugins"], False),
        ("cuda,cpu", True, [], True),
    ],
)
def test_an_accelerator_may_be_there_where_jax_might_find_one(monkeypatch, variable, nvidia, found, may):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if variable is not None:
        monkeypatch.setenv("JAX_PLATFORMS", variable)
    monkeypatch.setattr(devices, "nvidia_present", lambda: nvidia)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name in found or None)
    assert may_have_accelerator() == may


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="opens the CPU")
@pytest.mark.parametrize(
    ("device", "accelerator", "wanted"),
    [
        ("cpu", False, ["kept", "opened", "kept"]),
        ("cpu", True, ["kept", "opened", "kept"]),
        ("auto", False, ["kept", "opened", "kept"]),
        ("auto", True, ["opened", "kept"]),
        ("gpu", False, ["opened"]),
    ],
)
def test_memory_is_kept_before_a_device_opens_only_where_that_is_surely_a_cpu(
    monkeypatch, device, accelerator, wanted
):
    order, open_devices = [], jax.local_devices

    def opened(backend=None):
        order.append("opened")
        return [SimpleNamespace(platform="gpu")] if backend == "gpu" else open_devices(backend=backend)

    monkeypatch.setattr(devices, "may_have_accelerator", lambda: accelerator)
    monkeypatch.setattr(devices, "keep_freed", lambda: order.append("kept"))
    monkeypatch.setattr(devices, "take_memory_as_needed", lambda variables: None)
    monkeypatch.setattr(devices, "configure", lambda **_: None)
    monkeypatch.setattr(devices.processes, "greet", lambda platform: None)
    monkeypatch.setattr(jax, "local_devices", opened)
    setup(device)
    assert order == wanted


def test_a_gpus_memory_is_taken_as_needed_unless_the_user_has_said_how():
    variables = {"HOME": "/", GPU_MEMORY[1]: ""}  # jax, too, takes what is empty for what is not there
    take_memory_as_needed(variables)
    assert variables == {"HOME": "/", GPU_MEMORY[1]: "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for name, value in zip(GPU_MEMORY, ("true", "0.5", "0.5", "platform"), strict=True):
        variables = {name: value}
        take_memory_as_needed(variables)
        assert variables == {name: value}


def test_jax_reads_the_variables_by_which_memory_is_taken():
    from jaxlib import xla_client

    text = Path(xla_client.__file__).read_text()
    assert all(f"'{name}'" in text for name in GPU_MEMORY)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="opens the CPU")
@pytest.mark.parametrize(
    ("device", "accelerator", "is_left"),
    [("cpu", True, False), ("auto", False, False), ("auto", True, True), ("gpu", False, True)],
)
def test_memory_is_left_to_be_taken_before_a_gpu_may_open_and_nowhere_else(
    monkeypatch, device, accelerator, is_left
):
    open_devices, seen = jax.local_devices, []

    def opened(backend=None):
        seen.append(os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
        return [SimpleNamespace(platform="gpu")] if backend == "gpu" else open_devices(backend=backend)

    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in {*os.environ} - {*GPU_MEMORY}})
    monkeypatch.setattr(devices, "may_have_accelerator", lambda: accelerator)
    monkeypatch.setattr(devices, "keep_freed", lambda: None)
    monkeypatch.setattr(devices, "configure", lambda **_: None)
    monkeypatch.setattr(devices.processes, "greet", lambda platform: None)
    monkeypatch.setattr(jax, "local_devices", opened)
    setup(device)
    assert seen == ["false" if is_left else None]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own mark is Linux's")
def test_the_peak_is_that_of_this_process_and_not_of_the_one_that_started_it():
    held = np.ones(60_000_000)  # 480 MB, which a child's ru_maxrss would begin with
    code = "from hotloop.engine.device import peak_bytes; print(peak_bytes())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5e6 < int(child.stdout) < 1e8
    assert peak_bytes() > held.nbytes

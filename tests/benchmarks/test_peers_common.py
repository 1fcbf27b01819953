"""What benchmarks/peers/common.py says of memory: the compiler's count for jax, torch's own on a GPU, none on a CPU."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROWS = 1000
BYTES = 4 * ROWS * ROWS


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))
    import common

    return common


def compiled(function, **options):
    like = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
    return jax.jit(function, **options).lower(like).compile()


def test_an_output_counts_unless_it_takes_an_arguments_place(common):
    assert common.program_bytes(compiled(lambda x: x + 1)) == 2 * BYTES
    assert common.program_bytes(compiled(lambda x: x + 1, donate_argnums=0)) == BYTES


def test_what_a_program_needs_in_between_counts(common):
    summed = compiled(lambda x: jnp.sort(x, axis=0).sum())
    assert 2 * BYTES <= common.program_bytes(summed) < 3 * BYTES


def test_of_several_programs_the_neediest_counts(common):
    small, large = compiled(lambda x: x.sum()), compiled(lambda x: x + 1)
    assert common.program_bytes(small) < BYTES + 1000
    assert common.program_bytes(small, large) == common.program_bytes(large)


class Allocator:
    """As torch.cuda counts: bytes in use, and the most since the last reset."""

    def __init__(self):
        self.held = self.most = 0

    def take(self, count):
        self.held += count
        self.most = max(self.most, self.held)

    def reset_peak_memory_stats(self):
        self.most = self.held

    def memory_allocated(self):
        return self.held

    def max_memory_allocated(self):
        return self.most


def test_torchs_peak_is_that_of_the_run_less_what_was_held_before_it_was_made(common, monkeypatch):
    cuda = Allocator()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    cuda.take(1000)
    before = common.torch_bytes("cuda")
    cuda.take(70)  # its weights
    cuda.take(500), cuda.take(-500)  # its start

    def update():
        cuda.take(30), cuda.take(-30)

    assert common.torch_peak(update, before) == 100
    assert cuda.held == 1070


def test_on_a_cpu_torch_is_not_counted_nor_run(common):
    before = common.torch_bytes("cpu")
    assert before is None
    assert common.torch_peak(lambda: pytest.fail("it ran"), before) is None


def test_memory_in_a_table(common):
    assert (common.mebibytes(3 * 2**19), common.mebibytes(None)) == ("1.5", "")


def test_the_processors_family_is_what_the_system_says(common):
    said = re.findall(r"(?m)^cpu family\s*:\s*(\d+)$", Path("/proc/cpuinfo").read_text())
    assert common.cpu_family() == (int(said[0]) if said else None)


def test_results_are_saved_with_the_processors_family(common, tmp_path):
    file = tmp_path / "found.json"
    common.save(file, {"torch": "2"}, [{"case": "x", "ratio": np.float64(1.0)}])
    assert f'"cpu_family": {common.cpu_family()}'.replace("None", "null") in file.read_text()

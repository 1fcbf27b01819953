"""The profile's table: bytes of an instruction are those of its operands and results, and kernels have their kind."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kernel_times

PROGRAM = """
  %x = bf16[8,4]{1,0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %conv.1 = (bf16[8,2]{1,0}, u8[16]{0}) custom-call(%x, %y), custom_call_target="cudnn", metadata={op_name="a/conv"}
  ROOT %loop_add_fusion = bf16[8,4]{1,0} fusion(%x, %y), kind=kLoop, metadata={op_name="transpose(jvp())/add"}
"""


def test_bytes_are_those_of_operands_and_results():
    found = kernel_times.read_program(PROGRAM)
    assert found["conv.1"]["bytes"] == (8 * 2 * 2 + 16) + 8 * 4 * 2 + 4 * 4
    assert found["loop_add_fusion"]["bytes"] == 2 * (8 * 4 * 2) + 4 * 4
    assert found["loop_add_fusion"]["op_name"] == "transpose(jvp())/add"


@pytest.mark.parametrize(
    ("instruction", "source", "kind"),
    [
        ("cudnn-conv.3", "jvp()/conv", "convolutions, forward"),
        ("cudnn-conv-bias-activation.3", "transpose(jvp())/conv", "convolutions, of inputs"),
        ("cudnn-conv-bw-filter.3", "transpose(jvp())/conv", "convolutions, of kernels"),
        ("input_reduce_fusion.2", "transpose(jvp())/reduce_sum", "sums of norms, back"),
        ("loop_select_fusion", "transpose(jvp())/select_n", "element by element, back"),
        ("input_scatter_fusion", "transpose(jvp())/select_and_scatter", "max pool"),
    ],
)
def test_kernels_have_their_kind(instruction, source, kind):
    row = {"instruction": instruction, "op_name": source, "us": 500.0, "calls": 2, "bytes": 10**9}
    assert kernel_times.sum_by_kind([row, row]) == {kind: {"milliseconds": 1, "gigabytes": 4, "kernels": 4}}

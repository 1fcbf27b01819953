"""Options of XLA's compiler for one program, given where they were measured to be faster (docs/layers.md).

They concern the program alone, never the process, and are recorded with its compilation. This knows programs as the
compiler gets them, not what they are for: the engine compiles with them, and layers time their paths as they will run.
"""

import os
import re
from typing import Any

from hotloop.machine import usable_cores

LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
# What XLA:CPU hands to YNNPACK by default, without its convolutions: those run on one core up to 64 output channels,
# XLA's other kernel runs on all of them.
WITHOUT_CONVOLUTIONS: dict[str, str | bool] = {
    LIBRARY: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
}
COMMANDS = "xla_gpu_enable_command_buffer"
# A CUDA graph with its loops and branches in it: the card decides how often they run, where the host would wait for
# each decision otherwise. XLA's own choice has neither of the two.
LOOPS_ON_THE_CARD: dict[str, str | bool] = {
    COMMANDS: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}
CONVOLUTION = re.compile(r"stablehlo\.convolution\(.*")
# The other kernel takes neither groups nor float64, which would be left with naive loops.
TAKEN = re.compile(r"batch_group_count = 1 .*feature_group_count = 1 .*xf32>$")


def choose_options(lowered: Any, platform: str) -> dict[str, str | bool]:
    """The options for a traced and lowered program; empty where the compiler's own choice stays.

    A CPU of several cores computes float32 convolutions without YNNPACK, unless XLA_FLAGS say what it is for.
    """
    if platform != "cpu" or usable_cores() == 1 or LIBRARY in os.environ.get("XLA_FLAGS", ""):
        return {}
    text = lowered.compiler_ir().operation.get_asm(large_elements_limit=8)
    found = CONVOLUTION.findall(text)
    return WITHOUT_CONVOLUTIONS if found and all(map(TAKEN.search, found)) else {}


def keep_loops_on_the_card(platform: str) -> dict[str, str | bool]:
    """The options for a program of loops within loops whose bodies take microseconds; empty where there is no such
    choice, or XLA_FLAGS make it."""
    is_ours = platform == "gpu" and COMMANDS not in os.environ.get("XLA_FLAGS", "")
    return LOOPS_ON_THE_CARD if is_ours else {}

"""The options of every kernel benchmark, with the old programs' names and defaults."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from hotloop.engine.optim_keys import OPTIMISERS
from hotloop.errors import OptionError
from hotloop.options import Options, Params, at_least, non_negative, option, positive

# Options of the groups that `--help` shows.
TIMING, DATA, OLD = (
    partial(option, group=title) for title in ("Timing", "Data and devices", "From the old programs")
)
Dtype = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class TimingOptions(Options):
    steps: int = TIMING(5, "Timed calls of the compiled loop.", check=positive)
    repeat: int = TIMING(1, "Do the whole timing this many times and report the spread.", check=positive)
    dtype: Dtype = TIMING(
        "auto", "Number type; auto is float16 on a GPU, bfloat16 on a TPU, float32 on a CPU."
    )
    seed: int = TIMING(0, "Seed of parameters and data.", check=non_negative)
    report: Path | None = TIMING(
        None,
        "Write compile time, cost, memory, the optimised program and a profiler trace to this folder.",
        metavar="DIR",
    )
    save_graph: bool = TIMING(False, "Write the program's text, before and after optimisation, to results.")


@dataclass(frozen=True)
class LayerOptions(TimingOptions):
    batches_per_step: int = TIMING(
        1000,
        "Iterations inside one compiled call; raise it until items/sec stands still. On an accelerator an even "
        "number: others may cost a copy of every batch.",
        check=positive,
    )
    batch_size: int = option(1, "Rows of one replica's batch.", check=positive)
    train: bool = option(False, "Train inside the loop; --no-train (default) is inference.")
    learning_rate: float = option(0.01, "Step of --train.", check=positive)
    optimizer: str = option(
        "sgd", "Update rule of --train, with its usual parameters.", choices=tuple(OPTIMISERS)
    )
    use_generated_data: bool = DATA(
        False, "Send every batch from the host; off makes the data on the device."
    )
    use_zero_values: bool = DATA(False, "Data made on the device is zero instead of random.")
    replicas: int = DATA(1, "Copies on as many devices, gradients averaged in training.", check=positive)
    device_id: int = DATA(
        -1, "Use this one device (numbers as in `hotloop devices`); -1 takes the first.", check=at_least(-1)
    )
    enable_half_partials: bool = DATA(
        False, "Sum products in 16 bits: faster where the device can, less exact."
    )
    shards: int = OLD(1, "Model shards: only 1 works, as before.", check=positive)
    convolution_options: Params | None = OLD(
        None, "Poplar convolution options: explained, no effect.", metavar="JSON"
    )
    matmul_options: Params | None = OLD(None, "Poplar matmul options: explained, no effect.", metavar="JSON")
    report_hw_cycle_count: bool = OLD(False, "IPU cycle counter: explained, no effect.")

    def check(self) -> None:
        if self.shards > 1:
            raise OptionError(
                f"--shards {self.shards}: a single layer is not split over devices; --replicas makes copies"
            )
        if self.use_zero_values and self.use_generated_data:
            raise OptionError(
                "--use-zero-values: only for data made on the device; leave out --use-generated-data"
            )
        if self.device_id >= 0 and self.replicas > 1:
            raise OptionError(
                f"--device-id {self.device_id}: names one device, but --replicas {self.replicas} need more; "
                "leave one of them out"
            )
        if self.enable_half_partials and self.dtype == "float32":
            raise OptionError("--enable-half-partials: needs 16-bit numbers; use --dtype float16 or bfloat16")


@dataclass(frozen=True)
class Dense(LayerOptions):
    batches_per_step: int = TIMING(5000, "Iterations inside one compiled call.", check=positive)
    batch_size: int = option(32, "Rows of one replica's batch.", check=positive)
    size: int = option(1024, "Inputs and outputs of the layer.", check=positive)
    include_activation: bool = option(False, "Put a ReLU after the layer.")


@dataclass(frozen=True)
class GroupedConv(LayerOptions):
    filter_in: int = option(64, "Channels of the input.", check=positive)
    filter_out: int = option(64, "Channels of every block's output.", check=positive)
    kernel_size: int = option(3, "Height and width of the filters.", check=positive)
    stride: int = option(1, "Stride of every block.", check=positive)
    input_size: int = option(56, "Height and width of the input.", check=positive)
    block_repeats: int = option(10, "Convolutions in the chain.", check=positive)
    group_dim: int = option(1, "Output filters in a group; 1 is a depthwise convolution.", check=positive)

    def check(self) -> None:
        super().check()
        if self.filter_out % self.group_dim:
            raise OptionError(f"--group-dim {self.group_dim}: must divide --filter-out {self.filter_out}")
        if self.filter_in % self.groups:
            raise OptionError(
                f"--filter-in {self.filter_in}: not divisible by the {self.groups} groups that --filter-out "
                f"{self.filter_out} and --group-dim {self.group_dim} make; use a multiple of {self.groups}"
            )
        if self.block_repeats > 1 and self.filter_out % self.depth:
            raise OptionError(
                f"--filter-out {self.filter_out}: later blocks read it in groups of {self.depth} channels, "
                "which do not divide it; use --block-repeats 1 or other channels"
            )

    @property
    def groups(self) -> int:
        return self.filter_out // self.group_dim

    @property
    def depth(self) -> int:
        """Input channels of a group, the same in every block because the kernel's shape is."""
        return self.filter_in // self.groups

    @property
    def later_groups(self) -> int:
        """Groups of the blocks after the first, whose input has `filter_out` channels."""
        return self.filter_out // self.depth


@dataclass(frozen=True)
class Rnn(LayerOptions):
    timesteps: int = option(5, "Length of the sequences.", check=positive)
    hidden_size: int = option(128, "Units, and features of the input.", check=positive)


@dataclass(frozen=True)
class Gru(Rnn):
    hidden_size: int = option(128, "Units.", check=positive)
    input_size: int = option(128, "Features of the input.", check=positive)
    fused: bool = option(False, "The fast layer; off runs one cell a time step.", aliases=("--popnn",))
    reset_after: bool = option(
        False, "Reset gate after the candidate's product, as cuDNN has it: one product a step. Needs --fused."
    )

    def check(self) -> None:
        super().check()
        if self.reset_after and not self.fused:
            raise OptionError("--reset-after: only the fast layer has it; add --fused")


@dataclass(frozen=True)
class Lstm(Rnn):
    fused: bool = option(False, "The fast layer; off runs one cell a time step.", aliases=("--popnn",))


@dataclass(frozen=True)
class LstmMulti(LayerOptions):
    timesteps: int = option(200, "Length of the sequences.", check=positive)
    input_size: int = option(16, "Features of the input.", check=positive)
    hidden_size: int = option(256, "Units of every layer.", check=positive)
    num_layers: int = option(2, "LSTMs in the stack.", check=positive)


@dataclass(frozen=True)
class Hmc(TimingOptions):
    steps: int = TIMING(100, "Timed calls of the compiled loop.", check=positive)
    dtype: Literal["auto", "float32"] = TIMING(
        "auto", "HMC runs in float32: 16 bits cannot hold its energies."
    )
    hmc_steps: int = option(10000, "HMC steps inside one compiled call.", check=positive)
    leapfrog_steps: int = option(5, "Leapfrogs of a step's trajectory.", check=positive)
    target: Literal["toy", "vcd"] = option(
        "toy",
        "toy: log density -x - x^2; vcd: 10 latents of a random 10-200-200-784 decoder given random images.",
    )
    chains: int | None = option(None, "Independent chains; 1 for toy, 100 for vcd.", check=positive)
    step_size: float | None = option(None, "Leapfrog step; 1.0 for toy, 0.05 for vcd.", check=positive)

    @property
    def number_of_chains(self) -> int:
        return self.chains or {"toy": 1, "vcd": 100}[self.target]

    @property
    def leapfrog_step_size(self) -> float:
        return self.step_size or {"toy": 1.0, "vcd": 0.05}[self.target]


@dataclass(frozen=True)
class AllKernels(Options):
    steps: int | None = option(None, "Timed calls, instead of each kernel's default.", check=positive)
    batches_per_step: int | None = option(
        None, "Iterations (HMC steps too) of a call, instead of each kernel's default.", check=positive
    )
    train: bool = option(False, "Train instead of inference (HMC stays as it is).")
    optimizer: str = option("sgd", "Update rule of --train.", choices=tuple(OPTIMISERS))
    dtype: Dtype = option("auto", "Number type of the layers.")
    repeat: int = option(1, "Do every timing this many times.", check=positive)
    seed: int = option(0, "Seed of parameters and data.", check=non_negative)


_PLANNER = (
    "planner (memory share, partials type); XLA plans by itself, so it has no effect; for 16-bit sums use "
)
IDLE = {
    "convolution_options": f"tuned Poplar's convolution {_PLANNER}--enable-half-partials",
    "matmul_options": f"tuned Poplar's matrix product {_PLANNER}--enable-half-partials",
    "report_hw_cycle_count": "logged the IPU's cycle counter; it has no effect here: --report DIR writes a trace with "
    "the device's own times",
}


def explain_idle_options(config: LayerOptions) -> list[str]:
    """One line for each option that was given and has no effect on this hardware."""
    given = {name: text for name, text in IDLE.items() if getattr(config, name) not in (None, False)}
    if config.enable_half_partials and isinstance(config, GroupedConv):
        given["enable_half_partials"] = (
            "reaches matrix products only; convolutions keep the sums of their library"
        )
    return [f"--{name.replace('_', '-')} {text}" for name, text in given.items()]

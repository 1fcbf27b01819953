"""Options of `hotloop cnn` that came with the old program's hardware: pipeline stages, and compiler settings.

Stages are checked as they always were and run merged on one device, where their order means nothing. The compiler
settings are read, so that old files load, and change nothing: `NO_EFFECT` lists all such options for the one notice
that says so. No jax.
"""

from dataclasses import dataclass
from typing import Literal

from hotloop.options import between, non_negative, option, positive

PIPELINE, OLD = "Pipeline stages", "Without effect here"


@dataclass(frozen=True)
class Pipeline:
    """How a model is cut into stages."""

    pipeline_splits: tuple[str, ...] = option(
        (), "Layers that open a new stage, in the model's order.", metavar="LAYER ...", group=PIPELINE
    )
    device_mapping: tuple[int, ...] | None = option(
        None, "Device of each stage, from 0 without gaps.", check=non_negative, group=PIPELINE
    )
    pipeline_schedule: Literal["Grouped", "Interleaved", "Sequential"] = option(
        "Grouped",
        "Order in which stages take micro-batches; without effect while they run merged.",
        group=PIPELINE,
    )
    recomputation: bool = option(
        False, "Compute activations again in the backward pass, stage by stage: less memory.", group=PIPELINE
    )


@dataclass(frozen=True)
class Old:
    """Settings of a compiler that is not used here."""

    on_demand: bool = option(True, "Devices are opened when they are needed.", group=OLD)
    accelerator_side_reduction: bool = option(False, "Metrics are always reduced on the device.", group=OLD)
    optimizer_state_offloading: bool = option(True, "The optimiser's state stays on the device.", group=OLD)
    fp_exceptions: bool = option(False, "A loss that is not finite always stops a run.", group=OLD)
    nanoo: bool = option(False, "What overflows float16 becomes infinite.", group=OLD)
    fused_preprocessing: bool = option(False, "The compiler fuses the normalisation by itself.", group=OLD)
    internal_exchange_optimization_target: Literal["cycles", "memory", "balanced"] | None = option(
        None, "Nothing to exchange.", group=OLD
    )
    max_cross_replica_buffer_size: int = option(
        0, "The compiler combines sums over replicas.", check=non_negative, group=OLD
    )
    max_reduce_many_buffer_size: int = option(
        0, "The compiler combines reductions.", check=non_negative, group=OLD
    )
    conv_dithering: bool = option(False, "Convolutions have no start tiles.", group=OLD)
    gather_conv_output: bool = option(False, "The compiler combines small sums.", group=OLD)
    min_remote_tensor_size: int = option(
        128, "Nothing is stored off the device.", check=non_negative, group=OLD
    )
    stable_norm: bool = option(False, "Statistics of norms are always float32 and stable.", group=OLD)
    available_memory_proportion: tuple[float, ...] = option(
        (),
        "Percent of memory for convolutions and products: one value, or two for each stage.",
        check=between(0, 100),
        group=OLD,
    )
    scheduling_algorithm: Literal[
        "CHOOSE_BEST", "CLUSTERING", "POST_ORDER", "LOOK_AHEAD", "SHORTEST_PATH"
    ] = option("CHOOSE_BEST", "The compiler schedules by itself.", group=OLD)
    prefetch_depth: int = option(
        1, "The next call's batches are always on their way.", check=positive, group=OLD
    )


NO_EFFECT = ("pipeline_schedule", *Old.__dataclass_fields__)
"""The options that load and change nothing."""

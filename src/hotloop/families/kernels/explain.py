"""Options of the old programs that mean nothing here, each with the line that says so."""

from hotloop.families.kernels.config import GroupedConv, Layer


def explanations(config: Layer) -> list[str]:
    """One line for each option that was given and has no effect on this hardware."""
    texts = []
    if config.convolution_options is not None:
        texts.append(
            "--convolution-options tuned Poplar's convolution planner (memory share, partials type); XLA plans by "
            "itself, so it has no effect; for 16-bit sums use --enable-half-partials"
        )
    if config.matmul_options is not None:
        texts.append(
            "--matmul-options tuned Poplar's matrix product planner (memory share, partials type); XLA plans by "
            "itself, so it has no effect; for 16-bit sums use --enable-half-partials"
        )
    if config.report_hw_cycle_count:
        texts.append(
            "--report-hw-cycle-count logged the IPU's cycle counter; it has no effect here: --report DIR writes a "
            "trace with the device's own times"
        )
    if config.enable_half_partials and isinstance(config, GroupedConv):
        texts.append(
            "--enable-half-partials reaches matrix products only; convolutions keep the sums of their library"
        )
    return texts

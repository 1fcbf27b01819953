"""The layer benchmarks by name: config and builder of each. `hmc` is not a layer and has its own module."""

from collections.abc import Callable
from typing import Any

from hotloop.families.kernels import config as configs
from hotloop.families.kernels.feedforward import dense_kernel, grouped_conv_kernel
from hotloop.families.kernels.kernel import Kernel
from hotloop.families.kernels.recurrent import gru_kernel, lstm_kernel, lstm_multi_kernel, rnn_kernel

BUILDERS: dict[type[configs.Layer], Callable[[Any], Kernel]] = {
    configs.Dense: dense_kernel,
    configs.GroupedConv: grouped_conv_kernel,
    configs.Rnn: rnn_kernel,
    configs.Gru: gru_kernel,
    configs.Lstm: lstm_kernel,
    configs.LstmMulti: lstm_multi_kernel,
}


def build(config: configs.Layer) -> Kernel:
    """The kernel that a config describes."""
    return BUILDERS[type(config)](config)

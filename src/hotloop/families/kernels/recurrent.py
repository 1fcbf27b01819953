"""The recurrent layers as benchmark kernels: RNN, GRU, LSTM, and the stack of LSTMs with a read-out.

Sequences are time-major [T, B, I]. The single layers classify every step: the label is the largest input
feature (of those that have a unit), the units are the logits. The stack recalls the first feature of the
last step. Both can be learnt from fresh data.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from hotloop.families.kernels import costs, reference
from hotloop.families.kernels.config import Gru, Layer, Lstm, LstmMulti, Rnn
from hotloop.families.kernels.kernel import HostBatch, Kernel, cross_entropy, mean_square, normal
from hotloop.layers import dense, recurrent

Init = Callable[[Array, int, int, DTypeLike], Any]
Apply = Callable[[Any, Array], Array]


def rnn_kernel(config: Rnn) -> Kernel:
    """One tanh RNN, always the fast path."""
    return _layer(
        config, "RNN", 1, config.timesteps, config.hidden_size, config.hidden_size, recurrent.init_rnn,
        lambda params, x: recurrent.rnn(params, x)[0], reference.rnn, {},
    )  # fmt: skip


def gru_kernel(config: Gru) -> Kernel:
    """One GRU: fused, with the reset gate before or after the candidate's product, or a cell a step."""
    if config.reset_after:
        return _layer(
            config, "GRU", 3, config.timesteps, config.input_size, config.hidden_size,
            recurrent.init_gru_reset_after, lambda params, x: recurrent.gru_reset_after(params, x)[0],
            reference.gru_reset_after, {"variant": "fused, reset after"}, biases=2,
        )  # fmt: skip
    layer = recurrent.gru if config.fused else recurrent.gru_stepwise
    return _layer(
        config, "GRU", 3, config.timesteps, config.input_size, config.hidden_size, recurrent.init_gru,
        lambda params, x: layer(params, x)[0], reference.gru, _variant(config.fused),
    )  # fmt: skip


def lstm_kernel(config: Lstm) -> Kernel:
    """One LSTM, fused or a cell a step."""
    layer = recurrent.lstm if config.fused else recurrent.lstm_stepwise
    return _layer(
        config, "LSTM", 4, config.timesteps, config.hidden_size, config.hidden_size, recurrent.init_lstm,
        lambda params, x: layer(params, x)[0], reference.lstm, _variant(config.fused),
    )  # fmt: skip


def _variant(fused: bool) -> dict[str, str]:
    return {"variant": "fused" if fused else "stepwise"}


def _layer(
    config: Layer, title: str, gates: int, time: int, inputs: int, hidden: int, init: Init, apply: Apply,
    reference_apply: Apply, variant: dict[str, str], biases: int = 1,
) -> Kernel:  # fmt: skip
    rows, classes = config.batch_size, min(inputs, hidden)

    def data(generator: np.random.Generator, rows: int, dtype: DTypeLike) -> HostBatch:
        x = normal(generator, (time, rows, inputs), dtype)
        return {"x": x, "labels": np.argmax(x[..., :classes], -1).astype(np.int32)}

    return Kernel(
        title=f"{title} layer",
        sizes={"timesteps": time, "input size": inputs, "hidden size": hidden, **variant},
        init=lambda key, dtype: init(key, inputs, hidden, dtype),
        data=data,
        row_axes={"x": 1, "labels": 1, "y": 1},
        apply=apply,
        loss=lambda params, batch: cross_entropy(apply(params, batch["x"]), batch["labels"]),
        loss_terms=time * rows,
        reference_apply=reference_apply,
        reference_loss=lambda params, batch: reference.cross_entropy(
            reference_apply(params, batch["x"]), batch["labels"]
        ),
        items=rows,
        cost=lambda width: costs.recurrent(gates, time, rows, inputs, hidden, width, config.train, biases),
    )


def lstm_multi_kernel(config: LstmMulti) -> Kernel:
    """A stack of LSTMs, then a dense layer of one output on the last hidden state."""
    time, rows, inputs, hidden = config.timesteps, config.batch_size, config.input_size, config.hidden_size

    def init(key: Array, dtype: DTypeLike) -> Any:
        keys = jax.random.split(key, config.num_layers + 1)
        fan_in = [inputs] + [hidden] * (config.num_layers - 1)
        layers = [recurrent.init_lstm(k, size, hidden, dtype) for k, size in zip(keys, fan_in, strict=False)]
        return {"layers": layers, "readout": dense.init(keys[-1], hidden, 1, dtype)}

    def data(generator: np.random.Generator, rows: int, dtype: DTypeLike) -> HostBatch:
        x = normal(generator, (time, rows, inputs), dtype)
        return {"x": x, "labels": x[-1, :, :1]}

    def apply(params: Any, x: Array) -> Array:
        return dense.dense(params["readout"], recurrent.lstm_stack(params["layers"], x))

    def reference_apply(params: Any, x: Array) -> Array:
        for layer in params["layers"]:
            x = reference.lstm(layer, x)
        return reference.dense(params["readout"], x[-1])

    return Kernel(
        title="Multi-layer LSTM",
        sizes={"timesteps": time, "input size": inputs, "hidden size": hidden, "layers": config.num_layers},
        init=init,
        data=data,
        row_axes={"x": 1, "labels": 0, "y": 0},
        apply=apply,
        loss=lambda params, batch: mean_square(apply(params, batch["x"]), batch["labels"]),
        loss_terms=rows,
        reference_apply=reference_apply,
        reference_loss=lambda params, batch: reference.mean_square(
            reference_apply(params, batch["x"]), batch["labels"]
        ),
        items=rows,
        cost=lambda width: costs.lstm_multi(config, width),
    )

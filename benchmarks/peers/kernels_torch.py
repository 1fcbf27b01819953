"""The same layers in plain torch, and its loops: what benchmarks/peers/kernels.py runs against ours.

Eager calls in torch's best plain form: inference mode, its own number of threads, images channels last (faster than
channels first in every case on the CPU), the optimiser fused where that is faster; on a GPU both inference and whole
updates are replayed as CUDA graphs. It must not know jax.
"""

from collections.abc import Callable

import torch
from common import torch_bytes, torch_peak

from hotloop.families.kernels import config as configs


class Stack(torch.nn.Module):
    """LSTMs in a row and a dense layer of one output on the last hidden state."""

    def __init__(self, config: configs.LstmMulti):
        super().__init__()
        self.layers = torch.nn.LSTM(config.input_size, config.hidden_size, config.num_layers)
        self.readout = torch.nn.Linear(config.hidden_size, 1)

    def forward(self, x):
        return self.readout(self.layers(x)[0][-1])


class Every(torch.nn.Module):
    """All outputs of a recurrent layer, without its last state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def torch_model(config: configs.LayerOptions) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """The same layer in torch, and the shape of its input."""
    if isinstance(config, configs.Dense):
        return torch.nn.Linear(config.size, config.size), (config.batch_size, config.size)
    if isinstance(config, configs.GroupedConv):
        side, k = config.input_size, config.kernel_size
        blocks = [
            torch.nn.Conv2d(
                config.filter_in,
                config.filter_out,
                k,
                config.stride,
                k // 2,
                groups=config.groups,
                bias=False,
            )
            for _ in range(config.block_repeats)
        ]
        return torch.nn.Sequential(*blocks), (config.batch_size, config.filter_in, side, side)
    if isinstance(config, configs.LstmMulti):
        return Stack(config), (config.timesteps, config.batch_size, config.input_size)
    kind = {configs.Rnn: torch.nn.RNN, configs.Gru: torch.nn.GRU, configs.Lstm: torch.nn.LSTM}[type(config)]
    inputs = getattr(config, "input_size", config.hidden_size)
    return Every(kind(inputs, config.hidden_size)), (config.timesteps, config.batch_size, inputs)


def torch_loss(
    config: configs.LayerOptions, shape: tuple[int, ...], device: str
) -> Callable[..., torch.Tensor]:
    """The loss that our kernel trains with."""
    if isinstance(config, configs.Rnn | configs.Gru | configs.Lstm):
        classes = min(shape[-1], config.hidden_size)
        labels = torch.randint(classes, (shape[0] * shape[1],), device=device)
        return lambda y: torch.nn.functional.cross_entropy(y.flatten(0, 1).float(), labels)
    return lambda y: y.float().square().mean()


def torch_iterations(
    config: configs.LayerOptions, dtype: str, device: str
) -> tuple[torch.nn.Module, Callable[[int], None], int | None]:
    """The model, a function that runs so many iterations to their end, and the bytes that these need on a GPU."""
    before = torch_bytes(device)
    model, shape = torch_model(config)
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    model = model.to(device, kind)
    x = torch.randn(shape, device=device, dtype=kind)
    if x.ndim == 4:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    one = _training(config, model, x, shape, device) if config.train else _inference(model, x)
    memory = None
    if device == "cuda":
        eager, captured = one, []
        with torch.inference_mode(not config.train):
            memory = torch_peak(lambda: captured.append(_as_graph(eager)), before)
        one = captured[0]

    def run(count: int) -> None:
        with torch.inference_mode(not config.train):
            for _ in range(count):
                one()
            if device == "cuda":
                torch.cuda.synchronize()

    return model, run, memory


def _training(config, model, x, shape, device) -> Callable[[], object]:
    # Fused, an update of many rows is a few percent faster on the CPU; for one row the usual way is.
    fused = device == "cuda" or config.batch_size > 1
    loss, optimiser = (
        torch_loss(config, shape, device),
        torch.optim.SGD(model.parameters(), 1e-4, fused=fused),
    )

    def update() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss(model(x)).backward()
        optimiser.step()

    return update


def _inference(model, x) -> Callable[[], object]:
    return lambda: model(x)


def _as_graph(one: Callable[[], object]) -> Callable[[], object]:
    """Run a few times on a stream of its own, as the capture asks for, then captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    return graph.replay

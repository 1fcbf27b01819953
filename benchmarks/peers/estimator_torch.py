"""The example's CIFAR network and its loop in plain torch: what benchmarks/peers/estimator.py runs against ours.

Images are channels last, bytes that stay in memory (on the GPU, if there is one); each update takes the next rows of a
fresh permutation of all samples, widens them and makes one step of SGD. No metrics are kept: torch has less to do than
ours. It must not know jax.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = ("conv1", "conv2", "conv3", "conv4", "dense1", "dense2")
CLASSES = 10
Weights = dict[str, dict[str, np.ndarray]]


class Network(nn.Module):
    """Four convolutions and two dense layers; rows, columns and channels are flattened in our order."""

    def __init__(self, dropout: bool = True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 32, 3)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv4 = nn.Conv2d(64, 64, 3)
        self.dense1 = nn.Linear(6 * 6 * 64, 512)
        self.dense2 = nn.Linear(512, CLASSES)
        self.after_pool = nn.Dropout(0.25 if dropout else 0.0)
        self.after_dense = nn.Dropout(0.5 if dropout else 0.0)

    def forward(self, pixels_NHWC: Tensor) -> Tensor:
        x = pixels_NHWC.permute(0, 3, 1, 2).to(self.conv1.weight.dtype) / 255
        for first, second in ((self.conv1, self.conv2), (self.conv3, self.conv4)):
            x = functional.relu_(second(functional.relu_(first(x))))
            x = self.after_pool(functional.max_pool2d(x, 2))
        x = functional.relu_(self.dense1(x.permute(0, 2, 3, 1).flatten(1)))
        return self.dense2(self.after_dense(x))


def load(network: Network, weights: Weights) -> None:
    """Our weights: HWIO to OIHW, [I, O] to [O, I]."""
    turn = {2: (1, 0), 4: (3, 2, 0, 1)}
    with torch.no_grad():
        for name in LAYERS:
            layer, kernel = getattr(network, name), weights[name]["kernel"]
            for tensor, values in (
                (layer.weight, kernel.transpose(turn[kernel.ndim])),
                (layer.bias, weights[name]["bias"]),
            ):
                if tensor.shape != values.shape:
                    raise SystemExit(f"{name}: our weights do not fit: not the same network, not timed")
                tensor.copy_(torch.from_numpy(values.copy()))


def weights_of(network: Network) -> Weights:
    """In our layout, float64."""
    turn = {2: (1, 0), 4: (2, 3, 1, 0)}
    found: Weights = {}
    for name in LAYERS:
        layer = getattr(network, name)
        kernel, bias = (tensor.detach().double().cpu().numpy() for tensor in (layer.weight, layer.bias))
        found[name] = {"kernel": kernel.transpose(turn[kernel.ndim]), "bias": bias}
    return found


class Trainer:
    """A network, its optimiser and the whole data set on one device."""

    def __init__(
        self, network: Network, images: np.ndarray, labels: np.ndarray, batch: int, rate: float, device: str
    ):
        self.network = network.to(device, memory_format=torch.channels_last).train()
        self.images = torch.from_numpy(images).to(device)
        self.labels = torch.from_numpy(labels.astype(np.int64)).to(device)
        self.optimiser = torch.optim.SGD(self.network.parameters(), rate, fused=True)
        self.batch, self.device, self.loss = batch, device, self._loss
        self.batches = self._batches()

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(images), labels)

    def compile(self, mode: str | None = None) -> None:
        """Losses go through torch.compile from now on; it works at the first of them."""
        self.loss = torch.compile(self._loss, mode=mode)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once a pass; the last few of a pass are left out where the batch does not divide them."""
        while True:
            order = torch.randperm(len(self.images), device=self.device)
            for rows in order[: len(order) // self.batch * self.batch].split(self.batch):
                yield self.images[rows], self.labels[rows]

    def update(self, count: int) -> None:
        for _ in range(count):
            self.optimiser.zero_grad(set_to_none=True)
            self.loss(*next(self.batches)).backward()
            self.optimiser.step()
        if self.device == "cuda":
            torch.cuda.synchronize()

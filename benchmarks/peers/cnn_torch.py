"""The same ResNets and the same recipe in plain torch: what benchmarks/peers/cnn.py runs against ours.

Modules stand in the order of our layers, so that weights go over by position. A stride-2 convolution pads below and
to the right only, as ours does (Keras' SAME). Of torch's plain forms these are the fastest on a CPU, too: channels last
rather than first (7 to 18 % faster), the optimiser fused (1 to 8 %). It must not know jax.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

ORDER = ("kernel", "bias", "scale", "offset", "mean", "variance")
EPSILON, MOMENTUM = 1.001e-5, 0.97
LEAVES = {nn.Conv2d: ("kernel",), nn.BatchNorm2d: ("scale", "offset"), nn.Linear: ("kernel", "bias")}
"""What our leaves of a layer are called, in the order of torch's."""


class Conv(nn.Conv2d):
    """3x3 or 1x1 without a bias; with stride 2 an even image is padded below and to the right."""

    def __init__(self, channels: int, filters: int, size: int, stride: int = 1):
        uneven = size == 3 and stride == 2
        super().__init__(channels, filters, size, stride, 0 if uneven else size // 2, bias=False)
        self.uneven = uneven

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (0, 1, 0, 1)) if self.uneven else x)


class Norm(nn.BatchNorm2d):
    def __init__(self, channels: int):
        super().__init__(channels, EPSILON, 1 - MOMENTUM)


def conv_norm(channels: int, filters: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(Conv(channels, filters, size, stride), Norm(filters))


class Basic(nn.Module):
    """Two 3x3 convolutions; the shortcut thins out and adds channels of zeros (option A)."""

    def __init__(self, channels: int, filters: int, stride: int):
        super().__init__()
        self.first = conv_norm(channels, filters, 3, stride)
        self.second = conv_norm(filters, filters, 3)
        self.stride, self.more = stride, filters - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu_())
        if self.stride > 1:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more))
        return (x + y).relu_()


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, 1x1; the first of a stack projects its shortcut."""

    def __init__(self, channels: int, width: int, stride: int, projected: bool):
        super().__init__()
        self.shortcut = conv_norm(channels, 4 * width, 1, stride) if projected else nn.Identity()
        self.narrow = conv_norm(channels, width, 1)
        self.middle = conv_norm(width, width, 3, stride)
        self.widen = conv_norm(width, 4 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.narrow(x).relu_()).relu_()
        return (self.shortcut(x) + self.widen(y)).relu_()


def cifar_resnet(layers: int, classes: int) -> nn.Sequential:
    """6n + 2 layers: n basic blocks in each of three stacks, for small images."""
    widths, depth = (16, 32, 64), (layers - 2) // 6
    firsts = [Basic(a, b, 1 if a == b else 2) for a, b in pairwise((16, *widths))]
    blocks = []
    for width, first in zip(widths, firsts, strict=True):
        blocks += [first, *(Basic(width, width, 1) for _ in range(depth - 1))]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    return nn.Sequential(conv_norm(3, 16, 3), nn.ReLU(inplace=True), *blocks, *head)


def resnet50(classes: int) -> nn.Sequential:
    """Sixteen bottlenecks in four stacks; the stem is padded by three pixels on each side."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), Norm(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    blocks, channels = [], 64
    for stack, (depth, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for i in range(depth):
            blocks.append(Bottleneck(channels, width, 2 if i == 0 and stack else 1, i == 0))
            channels = 4 * width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*stem, *blocks, *head)


def build(model: str, classes: int) -> nn.Sequential:
    """By our name for it."""
    if model == "resnet50":
        return resnet50(classes)
    return cifar_resnet(int(model.removeprefix("cifar_resnet")), classes)


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers with weights, in order."""
    return (module for module in model.modules() if isinstance(module, tuple(LEAVES)))


def leaves(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A layer's parameters and statistics by our names."""
    names = next(names for kind, names in LEAVES.items() if isinstance(layer, kind))
    yield from zip(names, layer.parameters(), strict=True)
    if isinstance(layer, nn.BatchNorm2d):
        yield from (("mean", layer.running_mean), ("variance", layer.running_var))


def to_numpy(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()


def to_ours(weight: Tensor) -> np.ndarray:
    """Axes as ours: OIHW to HWIO, [O, I] to [I, O]."""
    return to_numpy(weight).transpose({1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}[weight.ndim])


def load(model: nn.Module, weights: list[dict[str, np.ndarray]]) -> None:
    """Our weights and statistics, a dict for each layer in order."""
    back = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}
    with torch.no_grad():
        for layer, ours in zip(layers(model), weights, strict=True):
            for name, tensor in leaves(layer):
                turned = torch.from_numpy(ours[name].transpose(back[ours[name].ndim]).copy())
                if turned.shape != tensor.shape:
                    raise SystemExit(f"{layer}: our {name} does not fit: not the same model, not timed")
                tensor.copy_(turned)


@dataclass(frozen=True)
class Recipe:
    """What an update does with a gradient."""

    rate: float
    momentum: float
    decay: float
    smoothing: float


class Trainer:
    """A model with its optimiser and one batch in memory; `half` computes under bfloat16 autocast."""

    def __init__(
        self,
        model: nn.Module,
        images: np.ndarray,
        labels: np.ndarray,
        recipe: Recipe,
        device: str,
        half: bool,
    ):
        self.model = model.to(device, memory_format=torch.channels_last)
        given = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).to(device)
        self.images = given.contiguous(memory_format=torch.channels_last)
        if half:
            self.images = self.images.bfloat16()
        self.labels = torch.from_numpy(labels.astype(np.int64)).to(device)
        self.loss = nn.CrossEntropyLoss(label_smoothing=recipe.smoothing)
        self.optimiser = torch.optim.SGD(
            self.model.parameters(), recipe.rate, recipe.momentum, weight_decay=recipe.decay, fused=True
        )
        self.device, self.half, self.call = device, half, self.model.__call__

    def to(self, dtype: torch.dtype) -> "Trainer":
        """Model and images in another type."""
        self.model, self.images = self.model.to(dtype), self.images.to(dtype)
        return self

    def fold_norms(self) -> None:
        """Put every norm that follows a convolution into its kernel and bias, by torch's own tool; to infer alone."""
        self.model.eval()
        for block in [module for module in self.model.modules() if isinstance(module, nn.Sequential)]:
            for place, (first, second) in enumerate(pairwise(list(block))):
                if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
                    block[place], block[place + 1] = fuse_conv_bn_eval(first, second), nn.Identity()
        self.model.to(memory_format=torch.channels_last)

    def compile(self) -> None:
        """Calls go through torch.compile from now on; it works at the first of them."""
        self.call = torch.compile(self.model)

    def typed(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device, torch.bfloat16) if self.half else nullcontext()

    def gradient(self) -> Tensor:
        """Logits; leaves the gradient of the mean loss in the parameters."""
        self.optimiser.zero_grad(set_to_none=True)
        with self.typed():
            logits = self.call(self.images)
            loss = self.loss(logits, self.labels)
        loss.backward()
        return logits

    def update(self, count: int) -> None:
        self.model.train()
        for _ in range(count):
            self.gradient()
            self.optimiser.step()
        self.wait()

    def infer(self, count: int) -> None:
        """Weights are bfloat16 throughout where `half` is asked for: faster than autocast."""
        self.model.eval().to(self.images.dtype)
        with torch.inference_mode():
            for _ in range(count):
                self.call(self.images).argmax(1)
            self.wait()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

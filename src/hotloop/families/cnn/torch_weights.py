"""Other people's weights: a torchvision or timm ResNet from a safetensors file into a network of the torch variant.

Only the names and the layout of axes differ; the logits are the same. Formats that can run code when they are opened
(.pt, .pth, .bin) are refused, and so is whatever does not fit the network to the last tensor.
"""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from hotloop.errors import DataError, OptionError
from hotloop.families.cnn.models import BASIC, DEPTHS
from hotloop.families.cnn.network import Network, Params, Statistics, build
from hotloop.families.cnn.network_layers import BatchNorm
from hotloop.families.cnn.safetensors import Tensor, tensors

Leaf = tuple[str, str]  # layer and leaf
_REFUSED = {
    (
        ".pt",
        ".pth",
        ".bin",
        ".ckpt",
        ".pkl",
    ): "a pickle can run any code when it is opened: convert it once with "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'weights.safetensors')",
    (
        ".h5",
        ".hdf5",
        ".keras",
    ): "Keras files are not read: take the same model's .safetensors file of torchvision "
    "or timm, e.g. timm/resnet50.tv_in1k on the Hugging Face hub",
}
_ORDER = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}  # of axes: [O, I] to [I, O], OIHW to HWIO
_OF_NORM = {"weight": "scale", "bias": "offset"}
_OF_STATISTICS = {"running_mean": "mean", "running_var": "variance"}


def recognise(path: str | Path) -> Network:
    """The network that a file's weights belong to, for images of 224x224x3."""
    found = _open_file(path)
    stages = [
        len({name.split(".")[1] for name in found if name.startswith(f"layer{stage}.")})
        for stage in range(1, 5)
    ]
    classes = prod(found["fc.bias"].shape) if "fc.bias" in found else 0
    basic = "layer1.0.conv3.weight" not in found
    for model, depths in DEPTHS.items():
        if depths == tuple(stages) and (model in BASIC) == basic and classes:
            return build(model, (224, 224, 3), classes, variant="torch")
    raise DataError(
        f"{path}: holds none of {', '.join(DEPTHS)} by torchvision's names (conv1.weight ... fc.bias)"
    )


def load(path: str | Path, network: Network) -> tuple[Params, Statistics]:
    """The weights of a file as float32 parameters and statistics of `network`."""
    if network.variant != "torch" or network.norm.kind != "batch":
        raise OptionError(
            f"{path}: weights from torch fit only the variant 'torch' with batch_norm, "
            f"not {network.model} of variant {network.variant!r} with {network.norm.kind}_norm"
        )
    found, wanted = _open_file(path), dict(_tensor_names(network))
    _check_names(path, network, found, wanted)
    _check_shapes(path, network, found, wanted)
    params: Params = {}
    statistics: Statistics = {}
    for name, (layer, leaf) in wanted.items():
        values = found[name].read()
        tree = statistics if leaf in _OF_STATISTICS.values() else params
        turned = np.ascontiguousarray(values.transpose(_ORDER[values.ndim]))
        tree.setdefault(layer, {})[leaf] = jnp.asarray(turned)
    return params, statistics


def _open_file(path: str | Path) -> dict[str, Tensor]:
    """The file's tensors without torch's step counters."""
    for suffixes, reason in _REFUSED.items():
        if Path(path).suffix.lower() in suffixes:
            raise DataError(f"{path}: {reason}")
    return {
        name: tensor for name, tensor in tensors(path).items() if not name.endswith(".num_batches_tracked")
    }


def _tensor_names(network: Network) -> Iterator[tuple[str, Leaf]]:
    """torch's name of every leaf, and ours."""
    for placed in network.placed:
        layer = placed.name
        if isinstance(placed.piece, BatchNorm):
            for theirs, ours in (_OF_NORM | _OF_STATISTICS).items():
                yield f"{_module(layer)}.{theirs}", (layer, ours)
        elif placed.piece.kind == "conv":
            yield f"{_module(layer)}.weight", (layer, "kernel")
        elif placed.piece.kind == "dense":
            yield "fc.weight", (layer, "kernel")
            yield "fc.bias", (layer, "bias")


def _module(layer: str) -> str:
    """`conv3_block2_1_bn` is `layer2.1.bn1`; the shortcut's `_0_conv` and `_0_bn` are `downsample.0` and `.1`."""
    found = re.fullmatch(r"conv(\d)_block(\d+)_(\d)_(conv|bn)", layer)
    if not found:
        return layer.removeprefix("conv1_") + "1"
    stack, block, number, kind = found.groups()
    inner = f"{kind}{number}" if number != "0" else f"downsample.{int(kind == 'bn')}"
    return f"layer{int(stack) - 1}.{int(block) - 1}.{inner}"


def _check_shapes(
    path: str | Path, network: Network, found: dict[str, Tensor], wanted: dict[str, Leaf]
) -> None:
    placed = {placed.name: placed for placed in network.placed}
    for name, (layer, leaf) in wanted.items():
        values = network.values(placed[layer])
        ours = values[leaf].shape if leaf in values else placed[layer].shape[-1:]
        theirs = tuple(ours[_ORDER[len(ours)].index(axis)] for axis in range(len(ours)))
        if found[name].shape != theirs:
            raise DataError(
                f"{path}: {name} has shape {list(found[name].shape)}, but {network.model} for images of "
                f"{network.shape[2]} channels and {network.classes} classes needs {list(theirs)}"
            )


def _check_names(
    path: str | Path, network: Network, found: dict[str, Tensor], wanted: dict[str, Leaf]
) -> None:
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of the {len(wanted)} tensors of {network.model} are missing, "
            f"{missing[0]} first: only torchvision's and timm's plain ResNets are read"
        )
    if unknown:
        raise DataError(
            f"{path}: {len(unknown)} tensors do not belong to {network.model}, {unknown[0][:200]!r} first: "
            "only torchvision's and timm's plain ResNets are read"
        )

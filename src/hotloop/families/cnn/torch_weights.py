"""`hotloop cnn import`: a torchvision or timm ResNet from a safetensors file as a checkpoint of ours.

Only the names and the layout of axes differ; the logits are the same. Formats that can run code when they are opened
(.pt, .pth, .bin) are refused, and so is whatever does not fit the network to the last tensor. Files are read by the
safetensors package (extra `weights`).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll
from hotloop.engine.progress import Console
from hotloop.errors import CheckpointError, DataError, MissingExtra, OptionError
from hotloop.families.cnn.command_options import ImportConfig
from hotloop.families.cnn.network import (
    BASIC,
    BATCH_NORM,
    DEPTHS,
    NamedLayer,
    Network,
    Params,
    Statistics,
    build,
)
from hotloop.families.cnn.presets import FAMILY
from hotloop.families.cnn.saved_network import SavedNetwork

LONGEST_ERROR = 300  # characters of what the package says; a name in a file may be long
_PICKLE = (
    "a pickle can run any code when it is opened: convert it once with "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'weights.safetensors')"
)
_KERAS = (
    "Keras files are not read: take the same model's .safetensors file of torchvision "
    "or timm, e.g. timm/resnet50.tv_in1k on the Hugging Face hub"
)
_REFUSED = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pkl"), _PICKLE) | dict.fromkeys(
    (".h5", ".hdf5", ".keras"), _KERAS
)
_READ = ("F32", "F16", "BF16")
_ORDER = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}  # of axes: [O, I] to [I, O], OIHW to HWIO
_LEAVES = {
    "conv": {"weight": "kernel"},
    "dense": {"weight": "kernel", "bias": "bias"},
    BATCH_NORM: {"weight": "scale", "bias": "offset", "running_mean": "mean", "running_var": "variance"},
}


def run(config: ImportConfig, console: Console) -> Mapping[str, Any]:
    """Read, check, and write one checkpoint at step 0, ready to validate and predict with."""
    network = recognise(config.weights)
    with Checkpoints(config.out, KeepAll(), family=FAMILY) as checkpoints:
        if checkpoints.steps():
            raise CheckpointError(f"{config.out}: holds checkpoints already; choose another folder")
    params, statistics = load(config.weights, network)
    SavedNetwork(network, "imagenet", "32.32", "bfloat16", 1.0).write(config.out)
    with Checkpoints(config.out, KeepAll(), family=FAMILY) as checkpoints:
        checkpoints.save(0, {"params": params, "statistics": statistics}, position={})
        checkpoints.wait()
    console.say(f"{network.model}, {network.classes} classes, written to {config.out}")
    return {"checkpoint": str(config.out), "model": network.model, "classes": network.classes}


def recognise(path: str | Path) -> Network:
    """The network that a file's weights belong to, for images of 224x224x3."""
    with _open_file(path) as file:
        found = _shapes(file)
    stages = [
        len({name.split(".")[1] for name in found if name.startswith(f"layer{stage}.")})
        for stage in range(1, 5)
    ]
    classes = prod(found["fc.bias"]) if "fc.bias" in found else 0
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
    wanted: dict[str, tuple[NamedLayer, str]] = {}  # torch's name of every leaf, and ours
    for node in network.nodes:
        module = "fc" if node.kind == "dense" else _module(node.name)
        for theirs, ours in _LEAVES.get(node.kind, {}).items():
            wanted[f"{module}.{theirs}"] = node, ours
    params: Params = {}
    statistics: Statistics = {}
    with _open_file(path) as file:
        found = _shapes(file)
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
        for name, (node, leaf) in wanted.items():
            shape = node.parameters[leaf].shape if leaf in node.parameters else node.shape[-1:]
            needed = tuple(shape[_ORDER[len(shape)].index(axis)] for axis in range(len(shape)))
            if found[name] != needed:
                raise DataError(
                    f"{path}: {name} has shape {list(found[name])}, but {network.model} for images of "
                    f"{network.shape[2]} channels and {network.classes} classes needs {list(needed)}"
                )
        for name, (node, leaf) in wanted.items():
            kind = file.get_slice(name).get_dtype()
            if kind not in _READ:
                raise DataError(f"{path}: tensor {name!r} is {kind}: only F32, F16 and BF16 are read")
            values = file.get_tensor(name)
            turned = np.ascontiguousarray(values.transpose(_ORDER[values.ndim]), np.float32)
            tree = params if leaf in node.parameters else statistics
            tree.setdefault(node.name, {})[leaf] = jnp.asarray(turned)
    return params, statistics


@contextmanager
def _open_file(path: str | Path) -> Iterator[Any]:
    """A file whose whole header has been checked; whatever is wrong with it is a DataError of one line."""
    if reason := _REFUSED.get(Path(path).suffix.lower()):
        raise DataError(f"{path}: {reason}")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtra("safetensors", "weights", "reading weights") from None
    try:
        with Path(path).open("rb"):
            pass  # Python's own words for a file that is not there or not to be read
        # Not mapped into memory: a file that shrinks is then an error and not the end of the process.
        with safe_open(str(path), framework="np", backend="pread") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        said = " ".join(str(error).split())[:LONGEST_ERROR]
        raise DataError(f"{path}: not a whole safetensors file: {said}") from error


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor but torch's step counters."""
    names = (name for name in file.keys() if not name.endswith(".num_batches_tracked"))  # noqa: SIM118
    return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def _module(layer: str) -> str:
    """`conv3_block2_1_bn` is `layer2.1.bn1`; the shortcut's `_0_conv` and `_0_bn` are `downsample.0` and `.1`."""
    found = re.fullmatch(r"conv(\d)_block(\d+)_(\d)_(conv|bn)", layer)
    if not found:
        return layer.removeprefix("conv1_") + "1"
    stack, block, number, kind = found.groups()
    inner = f"{kind}{number}" if number != "0" else f"downsample.{int(kind == 'bn')}"
    return f"layer{int(stack) - 1}.{int(block) - 1}.{inner}"

"""Weights as timm and torchvision name them, of a network of ours: for tests that have neither."""

import re

import jax
import numpy as np
from safetensors.numpy import save_file

from hotloop.families.cnn.network import build

LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "offset": "bias",
    "mean": "running_mean",
    "variance": "running_var",
}


def timm_name(layer):
    """`layer2.0.bn1` for `conv3_block1_1_bn`."""
    if layer == "predictions":
        return "fc"
    if not (found := re.fullmatch(r"conv(\d)_block(\d+)_(\d)_(conv|bn)", layer)):
        return {"conv1_conv": "conv1", "conv1_bn": "bn1"}[layer]
    stack, block, number, kind = found.groups()
    last = f"{kind}{number}" if number != "0" else f"downsample.{['conv', 'bn'].index(kind)}"
    return f"layer{int(stack) - 1}.{int(block) - 1}.{last}"


def drawn(model, classes, seed=5):
    """A network in torch's variant with weights, and norms that are not the identity."""
    network = build(model, (224, 224, 3), classes, variant="torch")
    params, statistics = jax.tree.map(np.asarray, network.init_on_host(jax.random.key(seed)))
    draws = np.random.default_rng(seed)
    spread = {"scale": (0.8, 1.2), "offset": (-0.1, 0.1), "mean": (-0.1, 0.1), "variance": (0.8, 1.2)}
    for tree in (params, statistics):
        for leaves in tree.values():
            for name in leaves.keys() & spread.keys():
                leaves[name] = draws.uniform(*spread[name], leaves[name].shape).astype(np.float32)
    return network, params, statistics


def write_timm(path, params, statistics):
    found = {}
    for tree in (params, statistics):
        for layer, leaves in tree.items():
            for name, leaf in leaves.items():
                turned = leaf.transpose({1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}[leaf.ndim])
                found[f"{timm_name(layer)}.{LEAVES[name]}"] = np.ascontiguousarray(turned, np.float32)
    save_file(found, path)
    return path

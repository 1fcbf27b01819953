"""Weights from torch: the same logits; and safetensors files, good and bad, read or refused."""

import json
import os
import sys

import jax
import numpy as np
import pytest

from hotloop.errors import DataError, MissingExtra, OptionError
from hotloop.families.cnn import torch_weights
from hotloop.families.cnn.network import NormChoice, build
from hotloop.families.cnn.torch_weights import load, recognise

QUICK = {"xla_backend_optimization_level": 0}
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def torch_resnet(layers, classes):
    """A ResNet in torch with torchvision's names."""
    torch = pytest.importorskip("torch")
    from torch import nn

    def conv(inputs, outputs, size, stride=1):
        return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)

    class Block(nn.Module):
        def __init__(self, inputs, width, stride):
            super().__init__()
            wide = width if layers < 50 else 4 * width
            sizes = ((3, stride), (3, 1)) if layers < 50 else ((1, 1), (3, stride), (1, 1))
            shape = inputs
            for i, (size, step) in enumerate(sizes, start=1):
                outputs = wide if i == len(sizes) else width
                setattr(self, f"conv{i}", conv(shape, outputs, size, step))
                setattr(self, f"bn{i}", nn.BatchNorm2d(outputs))
                shape = outputs
            self.steps, self.downsample = len(sizes), None
            if stride != 1 or inputs != wide:
                self.downsample = nn.Sequential(conv(inputs, wide, 1, stride), nn.BatchNorm2d(wide))

        def forward(self, x):
            y = x
            for i in range(1, self.steps + 1):
                y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
                y = torch.relu(y) if i < self.steps else y
            return torch.relu(y + (x if self.downsample is None else self.downsample(x)))

    def stack(number, inputs, width):
        wide = width if layers < 50 else 4 * width
        first = Block(inputs, width, 1 if number == 0 else 2)
        return nn.Sequential(first, *(Block(wide, width, 1) for _ in range(DEPTHS[layers][number] - 1)))

    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1, widen = (
                nn.Conv2d(3, 64, 7, 2, 3, bias=False),
                nn.BatchNorm2d(64),
                1 if layers < 50 else 4,
            )
            for i in range(4):
                setattr(self, f"layer{i + 1}", stack(i, 64 if i == 0 else widen * 32 * 2**i, 64 * 2**i))
            self.fc = nn.Linear(512 * widen, classes)

        def forward(self, x):
            x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
            for i in range(4):
                x = getattr(self, f"layer{i + 1}")(x)
            return self.fc(x.mean((2, 3)))

    torch.manual_seed(0)
    model = ResNet().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "bn" in name or "downsample.1" in name:  # not the identity that norms begin as
                low, high = (-0.2, 0.2) if name.endswith(("bias", "mean")) else (0.6, 1.2)
                tensor.copy_(torch.empty(tensor.shape).uniform_(low, high))
        model.bn1.running_var.fill_(2e-5)  # small enough to show which epsilon is added to it
        model.bn1.weight.mul_(0.005)
    return model


def saved(path, arrays, kind="F32"):
    """A safetensors file, written as the format says."""
    code = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}
    header, data, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, array in arrays.items():
        form = "I64" if name.endswith("tracked") else kind
        values = np.asarray(array)
        if form == "BF16":
            piece = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            piece = values.astype(code[form]).tobytes()
        header[name] = entry(form, values.shape, (at, at + len(piece)))
        data.append(piece)
        at += len(piece)
    return written(path, header, b"".join(data))


def written(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def logits_of(network, params, statistics, images):
    apply = jax.jit(lambda *a: network.apply(*a, train=False)[0], compiler_options=QUICK)
    return apply(params, statistics, images)


@pytest.mark.parametrize(
    "layers", [18, 50, pytest.param(34, marks=pytest.mark.slow), pytest.param(101, marks=pytest.mark.slow)]
)
def test_a_resnet_of_torch_has_the_same_logits_here(tmp_path, layers):
    torch = pytest.importorskip("torch")
    model = torch_resnet(layers, 7)
    path = saved(tmp_path / "weights.safetensors", model.state_dict())
    assert recognise(path) == build(f"resnet{layers}", (224, 224, 3), 7, variant="torch")
    network = build(f"resnet{layers}", (64, 64, 3), 7, variant="torch")
    params, statistics = load(path, network)
    assert jax.tree.map(np.shape, (params, statistics)) == jax.tree.map(
        np.shape, jax.eval_shape(network.init, jax.random.key(0))
    )
    images = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(logits_of(network, params, statistics, images), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [18, 34, 50])
def test_a_resnet_of_timm_has_the_same_logits_here(tmp_path, layers):
    torch = pytest.importorskip("torch")
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model(f"resnet{layers}", num_classes=7).eval()
    path = saved(tmp_path / "weights.safetensors", model.state_dict())
    network = build(f"resnet{layers}", (64, 64, 3), 7, variant="torch")
    images = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(logits_of(network, *load(path, network), images), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_values_of_every_type_come_back_as_float32(tmp_path, kind):
    draws = np.random.default_rng(0)
    # Multiples of 1/16 below 16: exact in each of the types.
    arrays = {name: draws.integers(-128, 128, shape) / 16 for name, shape in resnet18_shapes().items()}
    path = saved(tmp_path / "x.safetensors", arrays | {"bn1.num_batches_tracked": np.zeros(1)}, kind)
    params, statistics = load(path, RESNET18)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, statistics))} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(params["predictions"]["kernel"], arrays["fc.weight"].T)
    np.testing.assert_array_equal(
        params["conv3_block1_1_conv"]["kernel"], arrays["layer2.0.conv1.weight"].transpose(2, 3, 1, 0)
    )
    np.testing.assert_array_equal(
        statistics["conv5_block2_2_bn"]["variance"], arrays["layer4.1.bn2.running_var"]
    )


def test_other_types_are_refused(tmp_path):
    arrays = {name: np.zeros(shape) for name, shape in resnet18_shapes().items()}
    with pytest.raises(DataError, match=r"tensor 'conv1.weight' is I64: only F32, F16 and BF16 are read"):
        load(saved(tmp_path / "x.safetensors", arrays, "I64"), RESNET18)


def entry(kind="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{", b""),
        (b"\xff\xfe", b""),
        (b"[" * 100_000, b""),
        (b'{"a":' * 100_000, b""),
        (b"[]", b""),
        ({"a": 3}, b""),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        ({"a": entry(kind="F31")}, bytes(8)),
        ({"a": entry(kind=["F32"])}, bytes(8)),
        ({"a": entry(shape=(-2,))}, bytes(8)),
        ({"a": entry(shape=(2.0,))}, bytes(8)),
        ({"a": entry(shape=(2**62, 2**62))}, bytes(8)),
        ({"a": entry(offsets=(0,))}, bytes(8)),
        ({"a": entry(offsets=(-8, 0))}, bytes(8)),
        ({"a": entry(offsets=(0, 4))}, bytes(4)),
        ({"a": entry(offsets=(8, 0))}, bytes(8)),
        ({"a": entry()}, bytes(7)),
        ({"a": entry()}, bytes(9)),
        ({"a": entry(), "b": entry()}, bytes(16)),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        ({"a\nb" * 1000: entry(offsets=(8, 16))}, bytes(16)),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(tmp_path, header, data):
    path = written(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(DataError) as refused:
        recognise(path)
    said = str(refused.value)
    assert said.startswith(f"{path}: not a whole safetensors file: ") and "\n" not in said and len(said) < 600


@pytest.mark.parametrize(
    "content", [b"", b"\x01", (2**63).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}"]
)
def test_a_header_longer_than_its_file_is_not_read(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a whole safetensors file"):
        recognise(path)


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path, monkeypatch):
    path = sparse(tmp_path / "x.safetensors", resnet18_shapes())
    found = torch_weights._shapes

    def shrink(file):
        shapes = found(file)
        os.truncate(path, 100_000)
        return shapes

    monkeypatch.setattr(torch_weights, "_shapes", shrink)
    with pytest.raises(DataError, match="not a whole safetensors file: Could not read tensor"):
        load(path, RESNET18)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        MissingExtra, match=r"reading weights needs safetensors: pip install 'hotloop\[weights\]'"
    ):
        recognise(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("name", "words"),
    [("w.pth", "safetensors.torch.save_file"), ("w.PT", "pickle"), ("w.bin", "pickle"), ("w.h5", "timm")],
)
def test_formats_that_are_not_read_are_refused_with_what_to_do(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(DataError, match=words):
        recognise(tmp_path / name)


def resnet18_shapes(classes=5):
    """What torchvision's ResNet-18 consists of."""

    def norm(name, width):
        return {f"{name}.{leaf}": (width,) for leaf in ("weight", "bias", "running_mean", "running_var")}

    shapes = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            inputs = width // 2 if stage > 1 and block == 0 else width
            name = f"layer{stage}.{block}"
            shapes |= {
                f"{name}.conv1.weight": (width, inputs, 3, 3),
                f"{name}.conv2.weight": (width, width, 3, 3),
            }
            shapes |= norm(f"{name}.bn1", width) | norm(f"{name}.bn2", width)
            if inputs < width:
                shapes |= {
                    f"{name}.downsample.0.weight": (width, inputs, 1, 1),
                    **norm(f"{name}.downsample.1", width),
                }
    return shapes | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


def sparse(path, shapes):
    """A file of zeros of those shapes that takes no room."""
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = entry("F16", shape, (at, at + 2 * int(np.prod(shape))))
        at += 2 * int(np.prod(shape))
    written(path, header, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + at)
    return path


RESNET18 = build("resnet18", (64, 64, 3), 5, variant="torch")


def test_without_torch_too_a_file_is_recognised_and_every_leaf_is_filled(tmp_path):
    path = sparse(tmp_path / "x.safetensors", resnet18_shapes())
    assert recognise(path) == build("resnet18", (224, 224, 3), 5, variant="torch")
    filled = jax.tree.map(np.shape, load(path, RESNET18))
    assert filled == jax.tree.map(np.shape, jax.eval_shape(RESNET18.init, jax.random.key(0)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"layer3.1.bn2.running_var": None},
            "1 of the 102 tensors of resnet18 are missing, layer3.1.bn2.running_var",
        ),
        ({"layer1.0.conv3.weight": (2,)}, "1 tensors do not belong to resnet18, 'layer1.0.conv3.weight'"),
        (
            {"fc.weight": (1000, 512), "fc.bias": (1000,)},
            r"fc.weight has shape \[1000, 512\], .* 5 classes needs \[5, 512\]",
        ),
        ({"conv1.weight": (64, 3, 3, 3)}, r"conv1.weight .* needs \[64, 3, 7, 7\]"),
        ({"layer2.0.conv1.weight": (64, 128, 3, 3)}, r"layer2.0.conv1.weight .* needs \[128, 64, 3, 3\]"),
        ({"bn1.running_mean": (1, 64)}, r"bn1.running_mean .* needs \[64\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, words):
    shapes = {name: shape for name, shape in (resnet18_shapes() | change).items() if shape is not None}
    with pytest.raises(DataError, match=words):
        load(sparse(tmp_path / "x.safetensors", shapes), RESNET18)


def test_a_file_of_something_else_is_not_recognised(tmp_path):
    with pytest.raises(DataError, match="holds none of resnet18"):
        recognise(sparse(tmp_path / "x.safetensors", {"embedding.weight": (3, 4)}))


@pytest.mark.parametrize(
    "network",
    [
        build("resnet18", (64, 64, 3), 5),
        build("resnet18", (64, 64, 3), 5, NormChoice("group", groups=32), "torch"),
    ],
)
def test_only_networks_of_the_same_function_take_the_weights(tmp_path, network):
    with pytest.raises(OptionError, match="variant 'torch' with batch_norm"):
        load(tmp_path / "x.safetensors", network)

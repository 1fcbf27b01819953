"""The servers that ours is compared with: python benchmarks/peers/serving_servers.py KIND FOLDER PORT.

Each takes the raw bytes of an image and answers with the raw bytes of shares, classes and scores, so that nobody pays
for JSON. `litserve` runs the very program that ours serves, loaded from its folder and filled up to the same batch
sizes; `litserve-torch` and `fastapi-torch` run the same weights in torch, norms folded, two threads. LitServe has one
worker, as XLA and torch use both cores by themselves, and waits for company for SERVING_WAIT seconds.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

TOP = 5
SHAPE = (32, 32, 3)
MOST = 64
WEIGHTS = "torch.npz"


class Compiled:
    """The exported program, every batch size compiled beforehand."""

    def __init__(self, folder: str):
        from hotloop.serve.artefact import Artefact
        from hotloop.serve.batcher import join_rows

        artefact = Artefact.open(folder)
        self._join, self._ladder, self._call = join_rows, artefact.ladder, artefact.load()
        for rung in self._ladder:
            self(np.zeros((rung, *SHAPE), np.uint8))

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        """The outputs for [n, H, W, C] bytes."""
        count = len(images)
        rung = next(each for each in self._ladder if each >= count)
        found = self._call(self._join([{"image": images}], rung))
        return [value[:count] for value in found.values()]


class Torch:
    """The same network in torch: weights as `write_weights` left them, norms folded into kernels."""

    def __init__(self, folder: str):
        import cnn_torch
        import torch

        torch.set_num_threads(2)
        self._torch = torch
        model = cnn_torch.build("cifar_resnet8", 10)
        with np.load(Path(folder) / WEIGHTS) as found:
            layers: dict[int, dict[str, np.ndarray]] = {}
            for name, value in found.items():
                number, _, leaf = name.partition("/")
                layers.setdefault(int(number), {})[leaf] = value
        cnn_torch.load(model, [layers[number] for number in sorted(layers)])
        self._model = fold(model.eval()).to(memory_format=torch.channels_last)
        for rows in (1, MOST):
            self(np.zeros((rows, *SHAPE), np.uint8))

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        torch = self._torch
        with torch.inference_mode():
            x = torch.tensor(images).permute(0, 3, 1, 2).float()  # channels last already
            apart, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
            shares = self._model((x - mean) / apart.clamp(min=x[0].numel() ** -0.5)).softmax(1)
            scores, classes = shares.topk(TOP)
        return [shares.numpy(), classes.int().numpy(), scores.numpy()]


def fold(model: Any) -> Any:
    """Each norm into the convolution before it, as somebody who wants speed does."""
    from torch import nn
    from torch.nn.utils import fuse_conv_bn_eval

    for name, child in model.named_children():
        parts = list(child.children())
        if len(parts) == 2 and isinstance(parts[0], nn.Conv2d) and isinstance(parts[1], nn.BatchNorm2d):
            setattr(model, name, fuse_conv_bn_eval(*parts))
        else:
            fold(child)
    return model


def serve_fastapi(folder: str, port: int) -> None:
    """One request after the other, as people write it."""
    import uvicorn
    from fastapi import FastAPI, Request, Response

    app, function = FastAPI(), Torch(folder)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        image = np.frombuffer(await request.body(), np.uint8).reshape(1, *SHAPE)
        body = b"".join(each.tobytes() for each in function(image))
        return Response(body, media_type="application/octet-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


def write_weights(folder: Path, to: Path) -> None:
    """A model folder's weights in the order of torch's layers, folded norms as norms that only add."""
    import json

    from hotloop.engine.weights_file import parse_weights
    from hotloop.families.cnn.network import NormChoice, build

    network = json.loads((folder / "model.json").read_text())["config"]["network"]
    made = {"shape": tuple(network["shape"]), "norm": NormChoice(**network["norm"])}
    weights = parse_weights((folder / "weights.safetensors").read_bytes())
    layers, number = {}, 0
    for node in build(**network | made).nodes:
        prefix = f"params/{node.name}/"
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        if not own:
            continue
        if set(own) == {"bias"}:
            flat = np.ones_like(own["bias"])
            own = {"scale": flat, "offset": own["bias"], "mean": 0 * flat}
            own["variance"] = flat - np.float32(1.001e-5)  # the epsilon that torch adds to it
        layers |= {f"{number}/{name}": value for name, value in own.items()}
        number += 1
    np.savez(to / WEIGHTS, **layers)


if __name__ == "__main__":
    kind, where, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "fastapi-torch":
        serve_fastapi(where, number)
    else:
        from serving_litserve import serve_litserve

        serve_litserve(Torch if kind == "litserve-torch" else Compiled, where, number)

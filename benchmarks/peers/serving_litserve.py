"""LitServe around a function of images: what benchmarks/peers/serving_servers.py starts. Its workers import this file.

SERVING_ROWS and SERVING_WAIT of the environment are its max_batch_size and batch_timeout.
"""

import os
from typing import Annotated

import litserve
import numpy as np
from fastapi import Body, Response

SHAPE = (32, 32, 3)


class Images(litserve.LitAPI):
    """Raw bytes in and out: an image as the body, outputs one after the other as the answer."""

    def prepare(self, function: type, folder: str) -> "Images":
        self.make, self.folder = function, folder
        return self

    def setup(self, device: str) -> None:
        self.function = self.make(self.folder)

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]):
        return np.frombuffer(request, np.uint8).reshape(SHAPE)

    def batch(self, inputs: list) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, images: np.ndarray) -> list[np.ndarray]:
        return self.function(images if images.ndim == 4 else images[None])

    def unbatch(self, outputs: list[np.ndarray]) -> list:
        return [[each[row : row + 1] for each in outputs] for row in range(len(outputs[0]))]

    def encode_response(self, output: list) -> Response:
        return Response(b"".join(each.tobytes() for each in output), media_type="application/octet-stream")


def serve_litserve(function: type, folder: str, port: int) -> None:
    """With one worker and its faster queue (fast_queue)."""
    rows, wait = int(os.environ.get("SERVING_ROWS", "64")), float(os.environ.get("SERVING_WAIT", "0.01"))
    api = Images(max_batch_size=rows, batch_timeout=wait if rows > 1 else 0.0).prepare(function, folder)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60, fast_queue=True)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, log_level="error", generate_client_file=False)

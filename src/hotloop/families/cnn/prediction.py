"""`hotloop cnn predict`: the likeliest classes of image files, by a checkpoint alone.

ImageNet's networks see the middle of a photograph as in validation; the others see the whole image at their size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from hotloop.data.encoded import EncodedImage
from hotloop.data.jpeg import ImageError, loaded, opened
from hotloop.errors import DataError, OptionError
from hotloop.families.cnn import folding, images, saved
from hotloop.families.cnn.keeping import Keeping
from hotloop.families.cnn.photographs import evaluation_image, in_bytes
from hotloop.families.cnn.small_config import Predict
from hotloop.families.console import Console

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def run(config: Predict, console: Console) -> Mapping[str, Any]:
    """A line for each class of each image."""
    keeping = Keeping.at(config.run)
    keeping.check_any()
    known = saved.about(keeping.folder)
    if config.top > known.network.classes:
        raise OptionError(f"--top {config.top}: there are only {known.network.classes} classes")
    pixels = np.stack([read(path, known.network.shape, known.dataset) for path in config.image])
    with keeping.opened() as checkpoints:
        step, weights = saved.weights_among(checkpoints, config.step, known)
    shares = np.asarray(_shares(known, weights, pixels))
    found: dict[str, list[dict[str, Any]]] = {}
    for path, row in zip(config.image, shares, strict=True):
        order = np.argsort(-row, kind="stable")[: config.top]
        found[str(path)] = [
            {"class": int(k), "name": name_of(known.dataset, int(k)), "probability": float(row[k])}
            for k in order
        ]
        console.say(f"{path}:")
        for each in found[str(path)]:
            console.say(f"  {100 * each['probability']:6.2f} %  {each['name']}")
    return {"checkpoint": str(keeping.folder), "step": step, "predictions": found}


def _shares(known: saved.About, weights: Any, pixels: NDArray[np.uint8]) -> jax.Array:
    @jax.jit
    def shares(weights: Any, pixels: jax.Array) -> jax.Array:
        seen = images.evaluated(known.dataset, pixels)
        return jax.nn.softmax(folding.logits(known.network, known.policy, weights, seen))

    result: jax.Array = shares(weights, jnp.asarray(pixels))
    return result


def read(path: str | Path, shape: tuple[int, int, int], dataset: str) -> NDArray[np.uint8]:
    """An image file as the network's bytes."""
    path = Path(path)
    try:
        encoded = path.read_bytes()
        if dataset == "imagenet":
            whole = EncodedImage(encoded, 0, str(path))
            return evaluation_image(whole, shape[0], in_bytes).astype(np.uint8)
        image = loaded(opened(encoded)).convert("L" if shape[2] == 1 else "RGB")
        pixels = np.asarray(image.resize((shape[1], shape[0])), np.uint8)
        return pixels.reshape(shape)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ImageError as error:
        raise DataError(f"{path}: not a whole image ({error})") from None


def name_of(dataset: str, label: int) -> str:
    """A class for people."""
    return CIFAR10[label] if dataset == "cifar10" else f"class {label}"

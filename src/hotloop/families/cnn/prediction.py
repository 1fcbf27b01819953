"""`hotloop cnn predict`: the likeliest classes of image files, by a checkpoint alone.

ImageNet's networks, and those of one's own images, see the middle of a photograph as in validation; the others see the
whole image at their size.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from hotloop.data.jpeg import ImageError, load_rgb, open_image
from hotloop.engine import processes
from hotloop.engine.device import device_mesh, platform
from hotloop.engine.feed import fill_up
from hotloop.engine.loop import pad_batch
from hotloop.engine.precision import EVERYWHERE, SPLIT
from hotloop.engine.progress import Console, compiling
from hotloop.errors import DataError, OptionError
from hotloop.families.cnn import images
from hotloop.families.cnn.command_options import PredictConfig
from hotloop.families.cnn.network import inference_logits
from hotloop.families.cnn.options import FOLDER, PHOTOGRAPHS
from hotloop.families.cnn.photographs import fit_to_network
from hotloop.families.cnn.saved_network import check_any, checkpoints_at, read_saved_network, weights_of

if TYPE_CHECKING:
    from PIL import Image

# So many times as wide, as high, or as long in form, or so many times less: the network sees something else then.
FAR = 2
TOP = 5
GREY = 16  # differences of an image's channels below which it is grey; JPEG leaves a few


def run(config: PredictConfig, console: Console) -> Mapping[str, Any]:
    """A line for each class of each image."""
    checkpoints = checkpoints_at(config.run)
    check_any(checkpoints)
    known = read_saved_network(checkpoints.folder)
    kind = known.choose(config.weights, checkpoints.run or checkpoints.folder)
    top = min(TOP, known.network.classes) if config.top is None else config.top
    if top > known.network.classes:
        raise OptionError(f"--top {config.top}: there are only {known.network.classes} classes")
    shape, dataset = known.network.shape, known.dataset
    pixels = []
    for path in config.image:
        found, differences = read_image(path, shape, dataset)
        if differences:
            console.warn(f"{path}: unlike the images of the training: {'; '.join(differences)}")
        pixels.append(found)
    with checkpoints.open() as opened:
        restored = opened.restore(known.weights(kind), config.step, in_part=True).warn()

    def predict(weights: Any, pixels: jax.Array) -> jax.Array:
        seen = images.preprocess(dataset, pixels)
        return jax.nn.softmax(inference_logits(known.network, known.policy, weights, seen))

    with console.progress("predicting"):
        shares = _on_devices(predict, weights_of(restored.state, kind), np.stack(pixels))
    predictions: dict[str, list[dict[str, Any]]] = {}
    for path, row in zip(config.image, shares, strict=True):
        order = np.argsort(-row, kind="stable")[:top]
        names = {int(k): known.class_names[k] if known.class_names else f"class {k}" for k in order}
        predictions[str(path)] = [
            {"class": k, "name": name, "probability": float(row[k])} for k, name in names.items()
        ]
        console.say(f"{path}:")
        for each in predictions[str(path)]:
            console.say(f"  {100 * each['probability']:6.2f} %  {each['name']}")
    return {"checkpoint": str(checkpoints.folder), "step": restored.step, "predictions": predictions}


def _on_devices(predict: Callable[..., jax.Array], weights: Any, pixels: NDArray[Any]) -> NDArray[Any]:
    """A row for each image, by as many devices as have one to look at; the last image fills up their shares."""
    devices, count = len(jax.devices(platform())), len(pixels)
    used = devices if processes.count() > 1 else min(devices, count)
    everywhere = sharding = None
    if used > 1:
        mesh = device_mesh(used, platform=platform())
        everywhere, sharding = NamedSharding(mesh, EVERYWHERE), NamedSharding(mesh, SPLIT)
    given = (
        processes.place(weights, everywhere),
        processes.place(pad_batch(pixels, fill_up(sharding, count)), sharding),
    )
    with compiling():
        found = processes.JitTogether(predict, out_shardings=everywhere)(*given)
    return np.asarray(found)[:count]


def read_image(
    path: str | Path, shape: tuple[int, int, int], dataset: str
) -> tuple[NDArray[np.uint8], list[str]]:
    """An image file as the network's bytes, and how it is unlike the images of the training."""
    try:
        image = load_rgb(open_image(Path(path).read_bytes()))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ImageError as error:
        raise DataError(f"{path}: not a whole image ({error})") from None
    return fit_to_network(image, shape, dataset), unlike_training(image, shape, dataset)


def unlike_training(image: "Image.Image", shape: tuple[int, int, int], dataset: str) -> list[str]:
    """What an image has that those of the training had not: other colours, or a size that is far from theirs.

    What those of an own folder had is not known.
    """
    found: list[str] = []
    if dataset == FOLDER:
        return found
    thumbnail = np.asarray(image.resize((32, 32)), np.int16)
    is_grey = np.ptp(thumbnail, axis=-1).max() < GREY
    if is_grey != (shape[2] == 1):
        found.append("grey, and they were in colour" if is_grey else "in colour, and they were grey")
    height, width, _ = shape
    across, down = image.width / width, image.height / height
    if dataset in PHOTOGRAPHS:  # photographs of any size and form, of which the middle is seen
        is_far = min(across, down) < 1 / FAR
    else:
        sides = (across, down, across / down)
        is_far = not all(1 / FAR <= each <= FAR for each in sides)
    if is_far:
        found.append(f"of {image.width} x {image.height} pixels, and they had {width} x {height}")
    return found

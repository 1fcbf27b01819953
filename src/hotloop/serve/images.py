"""Encoded images to a model's input, as `hotloop cnn predict` reads files. It runs on a pool of threads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.jpeg import ImageError, load_rgb, open_image
from hotloop.engine.exportable import Arrays
from hotloop.families.cnn.photographs import fit_to_network
from hotloop.serve.artefact import Artefact
from hotloop.serve.refusal import BadRequest
from hotloop.serve.tensors import check_rows, row_bytes

CONTENT_TYPES = frozenset({"image/jpeg", "image/png"})
FORMATS = ("JPEG", "PNG")
MOST_PIXELS = 1 << 24
"""Of one image. Fewer than files may have: two kilobytes of a stranger's may take a second to decode."""
MOST_TOGETHER = 4 * MOST_PIXELS
"""Pixels of all images of a request: some hundred bytes may claim as many as one image may have."""


def decode_images(encoded: Sequence[bytes], artefact: Artefact, most_bytes: int) -> NDArray[np.uint8]:
    """A row for each image; BadRequest where one is no whole image, or they are too large, decoded or by their claims.

    `most_bytes` is the limit on bodies: it would refuse the same rows as bytes.
    """
    tensor = artefact.signature.inputs[0]
    shape, size = tensor.row, len(encoded) * row_bytes((tensor,))
    if size > most_bytes:
        raise BadRequest(f"{len(encoded):,} images have {size:,} bytes decoded; the limit is {most_bytes:,}")
    config: Any = artefact.about.get("config") or {}
    dataset = str(config.get("dataset", ""))
    rows, pixels = [], 0
    for number, each in enumerate(encoded):
        try:
            image = open_image(each, FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise ImageError(f"too large: an image of a request may have {MOST_PIXELS:,} pixels")
            pixels += image.width * image.height
            if pixels > MOST_TOGETHER:
                raise ImageError(f"the images of a request may have {MOST_TOGETHER:,} pixels together")
            rows.append(fit_to_network(load_rgb(image), (shape[0], shape[1], shape[2]), dataset))
        except ImageError as error:
            raise BadRequest(f"image {number}: not a whole image ({error})") from None
    return np.stack(rows)


def decode_rows(
    arrays: Mapping[str, NDArray[Any]],
    encoded: Mapping[str, Sequence[bytes]],
    artefact: Artefact,
    most_bytes: int,
) -> Arrays:
    """All inputs, images decoded, checked against the signature and the limit; BadRequest where they do not fit."""
    decoded = {name: decode_images(images, artefact, most_bytes) for name, images in encoded.items()}
    return check_rows(artefact.signature, {**arrays, **decoded}, most_bytes)

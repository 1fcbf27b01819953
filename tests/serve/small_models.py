"""Models of a few weights to export in tests: an image classifier's form, and nothing to compile for long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine import model_folder
from hotloop.engine.exportable import Exportable, Signature, Tensor
from hotloop.layers.highest import highest

LADDER = (1, 2, 4)


def classify(weights, inputs):
    """Shares of three classes, the likeliest two of them, from four numbers."""
    logits = inputs["x"].astype(weights["w"].dtype) @ weights["w"] + weights["b"][0] * weights["scale"]
    shares = jax.nn.softmax(logits.astype(jnp.float32))
    scores, classes = highest(shares, k=2)
    return {"shares": shares, "classes": classes.astype(jnp.int32), "scores": scores}


def small(function=classify, dtype=np.float32, seed=0, **more):
    generator = np.random.default_rng(seed)
    weights = {
        "w": jnp.asarray(generator.normal(size=(4, 3)), dtype),
        "b": (jnp.asarray(generator.normal(size=3), dtype),),  # a tuple: trees are not only dicts
        "scale": jnp.ones((), dtype),
    }
    outputs = (
        Tensor.of("shares", np.float32, 3),
        Tensor.of("classes", np.int32, 2),
        Tensor.of("scores", np.float32, 2),
    )
    settings = {
        "family": "none",
        "name": "small",
        "signature": Signature((Tensor.of("x", np.float32, 4),), outputs),
        "examples": {"x": generator.normal(size=(3, 4)).astype(np.float32)},
        "tolerance": 1e-5,
        "preprocessing": "none",
    }
    return Exportable(function=function, weights=weights, **{**settings, **more})


def shade(weights, inputs):
    """How light an image is, and how dark."""
    light = weights["scale"] * jnp.mean(inputs["image"].astype(jnp.float32), axis=(1, 2, 3)) / 255
    return {"probabilities": jnp.stack([light, 1 - light], axis=1)}


def small_image():
    """A model that also takes encoded images."""
    image = Tensor.of("image", np.uint8, 8, 8, 3)
    return Exportable(
        family="none",
        name="shade",
        function=shade,
        weights={"scale": jnp.ones((), np.float32)},
        signature=Signature((image,), (Tensor.of("probabilities", np.float32, 2),)),
        examples={"image": np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)},
        tolerance=1e-5,
        preprocessing="none",
        kind="image",
        classes=("light", "dark"),
    )


def small_pair():
    """A model of two inputs and two outputs."""

    def combine(weights, inputs):
        a, b = weights["scale"] * inputs["a"], inputs["b"].astype(jnp.float32)
        return {"sum": a + b, "product": a * b}

    generator = np.random.default_rng(0)
    return Exportable(
        family="none",
        name="pair",
        function=combine,
        weights={"scale": jnp.full((), 0.5, np.float32)},
        signature=Signature(
            (Tensor.of("a", np.float32, 4), Tensor.of("b", np.int32, 4)),
            (Tensor.of("sum", np.float32, 4), Tensor.of("product", np.float32, 4)),
        ),
        examples={
            "a": generator.normal(size=(3, 4)).astype(np.float32),
            "b": generator.integers(0, 9, (3, 4), np.int32),
        },
        tolerance=1e-5,
        preprocessing="none",
    )


def without_comparing(patch):
    """An export that believes itself: a fresh process takes seconds, and has tests of its own."""
    patch.setattr(model_folder, "compare_in_fresh_process", lambda folder: None)


def write_uncompared(place, *models, ladder=LADDER, **more):
    """The folders of these models, in their order."""
    with pytest.MonkeyPatch.context() as patch:
        without_comparing(patch)
        return [model_folder.write_model(model, place, ladder=ladder, **more)[0] for model in models]

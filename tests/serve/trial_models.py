"""Models to try on the server's page: the signatures of the families, and a few weights whose answers are known."""

import jax.numpy as jnp
import numpy as np
from small_models import small, small_image

from hotloop.engine.exportable import Exportable, Signature, Tensor

ITEMS, TOP = 8, 5
TITLES = {
    10: "Toy Story (1995)",
    11: "Jumanji (1995)",
    12: "Heat (1995)",
    13: "Sudden Death (1995)",
    14: "GoldenEye (1995)",
    15: "Casino (1995)",
    16: "Sense & <b>Sensibility</b>",
    17: "Four Rooms (1995)",
}


def exportable(name, function, inputs, outputs, examples, **more):
    return Exportable(
        family="none", name=name, function=function, weights={"one": jnp.ones((), np.float32)},
        signature=Signature(inputs, outputs), examples=examples, tolerance=1e-5, preprocessing="none", **more,
    )  # fmt: skip


def tall_or_wide():
    """A classifier of digits' form: whether ink is spread more down or across."""

    def classify(weights, inputs):
        ink = weights["one"] * inputs["image"][..., 0].astype(jnp.float32)
        mass = jnp.sum(ink, (1, 2)) + 1e-3
        at = jnp.arange(28.0)

        def spread(profile):
            mean = profile @ at / mass
            return jnp.sum(profile * (at - mean[:, None]) ** 2, axis=1) / mass

        down, across = spread(ink.sum(2)), spread(ink.sum(1))
        share = (down + 1e-3) / (down + across + 2e-3)
        return {"probabilities": jnp.stack([share, 1 - share], axis=1)}

    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), np.uint8)
    return exportable(
        "digits", classify, (Tensor.of("image", np.uint8, 28, 28, 1),),
        (Tensor.of("probabilities", np.float32, 2),), {"image": images}, kind="image", classes=("tall", "wide"),
    )  # fmt: skip


def mirror():
    """The form of vcd: its reconstruction is the image upside down, and its ELBO minus the number of white pixels."""

    def rebuild(weights, inputs):
        white = weights["one"] * (inputs["image"] > 127)
        return {
            "reconstruction": white[:, ::-1],
            "elbo": -jnp.sum(white, (1, 2, 3)) - 1000.0 * inputs["seed"],
        }

    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), np.uint8)
    return exportable(
        "vcd", rebuild, (Tensor.of("image", np.uint8, 28, 28, 1), Tensor.of("seed", np.int32)),
        (Tensor.of("reconstruction", np.float32, 28, 28, 1), Tensor.of("elbo", np.float32)),
        {"image": images, "seed": np.arange(3, dtype=np.int32)},
    )  # fmt: skip


def neighbours():
    """A recommender of eight items: each rating goes to the item after, and rated items are left out."""

    def recommend(weights, inputs):
        items, ratings = inputs["items"], inputs["ratings"]
        places = jnp.where((items >= 10) & (items < 10 + ITEMS), items - 10, ITEMS)
        rows = jnp.arange(items.shape[0])[:, None]
        dense = jnp.zeros((items.shape[0], ITEMS)).at[rows, places].set(ratings, mode="drop")
        scores = jnp.where(dense > 0, -jnp.inf, weights["one"] * jnp.roll(dense, 1, 1) + 1)
        order = jnp.argsort(-scores, axis=1)[:, :TOP]
        best = jnp.take_along_axis(scores, order, 1)
        there = best > -jnp.inf
        return {
            "items": jnp.where(there, order + 10, -1).astype(jnp.int32),
            "predictions": jnp.where(there, jnp.minimum(best, 5), 0),
        }

    items = np.array([[10, 11, -1, -1, -1, -1, -1, -1], [-1] * 8], np.int32)
    return exportable(
        "films", recommend,
        (Tensor.of("items", np.int32, ITEMS), Tensor.of("ratings", np.float32, ITEMS)),
        (Tensor.of("items", np.int32, TOP), Tensor.of("predictions", np.float32, TOP)),
        {"items": items, "ratings": (items > 0).astype(np.float32)},
        config={"low": 1.0, "high": 5.0, "relevant": 0.0},
    )  # fmt: skip


def ranker():
    """The form of a recommender that has learnt an order, with its users inside: user 7 has rated items 10 and 11."""

    def recommend(weights, inputs):
        liked = (inputs["ratings"] >= 4).sum(1) + 2 * (inputs["user"] == 7)
        order = jnp.where(liked[:, None] > 1, jnp.array([12, 13, -1]), jnp.array([17, 16, 15])).astype(
            jnp.int32
        )
        share = jnp.broadcast_to(jnp.array([0.5, 0.00125, 0.001]), order.shape)
        return {"items": order, "predictions": jnp.where(order < 0, 0, weights["one"] * jnp.log(share))}

    return exportable(
        "ranker", recommend,
        (Tensor.of("items", np.int32, 4), Tensor.of("ratings", np.float32, 4), Tensor.of("user", np.int32)),
        (Tensor.of("items", np.int32, 3), Tensor.of("predictions", np.float32, 3)),
        {"items": np.full((2, 4), -1, np.int32), "ratings": np.zeros((2, 4), np.float32),
         "user": np.array([-1, 7], np.int32)},
        config={"low": 1.0, "high": 5.0, "relevant": 4.0},
    )  # fmt: skip


def all_of_them():
    return small(), small_image(), tall_or_wide(), mirror(), neighbours(), ranker()

"""A trained network as a model to serve: bytes of images in, shares of all classes and the likeliest ones out.

Norms are folded into the kernels and these rounded to the type of the computation once, here, so that a call has only
the network left to do. Normalising the image is part of the program.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.data.image_stores import class_names
from hotloop.engine.exportable import (
    Arrays,
    Exportable,
    Signature,
    Tensor,
    best_step,
    describe_source,
    tolerance_of,
)
from hotloop.engine.keys import seed_key, stream
from hotloop.errors import DataError, ModelError, OptionError
from hotloop.families.cnn import images
from hotloop.families.cnn.network import Network, NormChoice, build, prepare_inference
from hotloop.families.cnn.options import FOLDER, TrainConfig
from hotloop.families.cnn.own_folder import expected_size
from hotloop.families.cnn.presets import FAMILY, read_run_options
from hotloop.families.cnn.saved_network import (
    SavedNetwork,
    check_any,
    checkpoints_at,
    read_saved_network,
    weights_of,
)
from hotloop.layers.highest import highest

TOP = 5
EXAMPLES = 3
_SEEN = {
    "imagenet": "the middle of a photograph, resampled to the network's size; colours minus ImageNet's mean, over its "
    "deviations",
    FOLDER: "the middle of a photograph, resampled to the network's size; colours minus ImageNet's mean, over its "
    "deviations",
    "mnist": "the whole image at the network's size, grey; pixels over 255",
    "cifar": "the whole image at the network's size; each minus its mean, over its standard deviation",
}


def from_run(
    path: Path,
    *,
    step: int | None = None,
    best: bool = False,
    top: int | None = None,
    weights: Literal["auto", "raw", "ema"] = "auto",
) -> Exportable:
    """The model of a run's checkpoint: the newest, the one after `step` updates, or the best by its validation; its
    averages where it was trained with --ema, or what `weights` asks for."""
    checkpoints = checkpoints_at(path)
    check_any(checkpoints)
    saved = read_saved_network(checkpoints.folder)
    kind = saved.choose(weights, checkpoints.run or checkpoints.folder)
    if best:
        where = checkpoints.run or checkpoints.folder
        metric = "validation_accuracy" if kind == "raw" else "ema_accuracy"
        step = best_step(where, checkpoints.steps(), metric, 1)
    with checkpoints.open() as opened:
        restored = opened.restore(saved.weights(kind), step, in_part=True)
    options = read_run_options(checkpoints.run) if checkpoints.run else {}
    data = f"made-up images like {saved.dataset}'s" if options.get("synthetic_data") else saved.dataset
    source = describe_source(checkpoints.run, restored.step, data)
    source["run"] = source["run"] or str(checkpoints.folder)
    source["weights"] = kind
    classes = _names_of_classes(saved, options.get("dataset_path"))
    state = weights_of(restored.state, kind)
    return _exportable(saved, state, top, classes, source, tuple(restored.skipped))


def from_options(config: TrainConfig, *, top: int | None = None) -> Exportable:
    """The network that the options name, with random weights: for measuring a server, and for nothing else."""
    size = expected_size(config)
    network = build(config.model_name, size.shape, size.classes, NormChoice.of(config.norm_layer))
    saved = SavedNetwork(network, config.dataset, config.precision, config.half, 1.0)
    params, statistics = network.init(stream(seed_key(config.seed or 0), "init", 0))
    weights = {"params": saved.policy.to_update(params), "statistics": statistics}
    warning = "RANDOM WEIGHTS: no checkpoint was given, so that every answer of this model is worthless"
    source = describe_source(None, 0, "none: random weights")
    classes = _names_of_classes(saved, str(config.dataset_path) if config.dataset_path != Path() else None)
    return _exportable(saved, weights, top, classes, source, (warning,))


def rebuild(about: Mapping[str, Any], weights: Mapping[str, Any], examples: Arrays) -> Exportable:
    """The same model from its own folder: model.json's contents, its weights as a tree, and its examples."""
    try:
        config = about["config"]
        network = config["network"]
        made = {"shape": tuple(network["shape"]), "norm": NormChoice(**network["norm"])}
        saved = SavedNetwork(
            build(**network | made), config["dataset"], config["precision"], config["half"], 1.0
        )
        names = tuple(about["classes"]) if about["classes"] else None
        top = int(config["top"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"its config in model.json cannot be read ({error!r})") from None
    whole = {"params": weights.get("params", {}), "statistics": weights.get("statistics", {})}
    return _describe(saved, whole, top, names, about["source"], (), examples)


def _names_of_classes(saved: SavedNetwork, folder: str | None) -> tuple[str, ...] | None:
    """In the order of the labels; None where nobody named them."""
    if saved.class_names:
        return saved.class_names
    if saved.dataset == "mnist":
        return tuple(map(str, range(saved.network.classes)))
    if saved.dataset == "imagenet" and folder:
        try:
            names = class_names(folder)
        except (DataError, OSError):
            return None
        return names if len(names) == saved.network.classes else None
    return None


def _exportable(
    saved: SavedNetwork,
    state: Mapping[str, Any],
    top: int | None,
    classes: tuple[str, ...] | None,
    source: Mapping[str, Any],
    warnings: tuple[str, ...],
) -> Exportable:
    """The model of a checkpoint's weights: norms folded, kernels rounded."""
    network = saved.network
    if top is not None and top > network.classes:
        raise OptionError(f"top={top}: there are only {network.classes} classes")

    def prepare(state: Mapping[str, Any]) -> Any:
        params, statistics = prepare_inference(network, saved.policy, state)
        return {"params": params, "statistics": statistics}

    pixels = np.random.default_rng(0).integers(0, 256, (EXAMPLES, *network.shape), np.uint8)
    count = min(TOP, network.classes) if top is None else top
    weights = jax.jit(prepare)(dict(state))
    return _describe(saved, weights, count, classes, source, warnings, {"image": pixels})


def _describe(
    saved: SavedNetwork,
    weights: Mapping[str, Any],
    top: int,
    classes: tuple[str, ...] | None,
    source: Mapping[str, Any],
    warnings: tuple[str, ...],
    examples: Arrays,
) -> Exportable:
    network = saved.network
    look = _SEEN.get(saved.dataset, _SEEN["cifar"])
    return Exportable(
        family=FAMILY,
        name=network.model,
        function=classifier(network, saved, top),
        weights=weights,
        signature=Signature(
            (Tensor.of("image", np.uint8, *network.shape),),
            (
                Tensor.of("probabilities", np.float32, network.classes),
                Tensor.of("classes", np.int32, top),
                Tensor.of("scores", np.float32, top),
            ),
        ),
        examples=examples,
        tolerance=tolerance_of(saved.policy.compute),
        preprocessing=f"Bytes of images. Of a file: {look}. The arithmetic is the program's, resizing the caller's.",
        kind="image",
        classes=classes,
        config={
            "network": asdict(network),
            "dataset": saved.dataset,
            "precision": saved.precision,
            "half": saved.half,
            "top": top,
        },
        source=source,
        warnings=warnings,
    )


def classifier(
    network: Network, saved: SavedNetwork, top: int
) -> Callable[[Any, Mapping[str, Any]], dict[str, Array]]:
    """Shares of all classes, and the `top` likeliest with theirs, from prepared weights and bytes [n, H, W, C]."""

    def classify(weights: Any, inputs: Mapping[str, Any]) -> dict[str, Array]:
        seen = saved.policy.to_compute(images.preprocess(saved.dataset, inputs["image"]))
        logits, _ = network.apply(weights["params"], weights["statistics"], seen, train=False)
        shares = jax.nn.softmax(logits.astype(jnp.float32))
        scores, classes = highest(shares, k=top)
        return {"probabilities": shares, "classes": classes.astype(jnp.int32), "scores": scores}

    return classify

"""`--init-from PATH`: the weights that a training begins with, from whatever lies at the path.

That is a safetensors file of a torchvision or timm ResNet, a run's folder or one of checkpoints, or an exported model.
All but the classifier must fit to the last leaf; the classifier is taken where the classes are the same, and drawn anew
where they are not. A run that goes on from a checkpoint of its own does not look at the path again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from hotloop.engine.model_folder import read_about, read_file
from hotloop.engine.model_place import MODEL, versions_in
from hotloop.engine.weights_file import WEIGHTS, nest, parse_weights
from hotloop.errors import HotloopError, ModelError, OptionError
from hotloop.families.cnn import torch_weights
from hotloop.families.cnn.freezing import classifier_of, find_frozen
from hotloop.families.cnn.network import BATCH_NORM, Network, NormChoice, Variant, build
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.presets import FAMILY, NETWORK_FILE
from hotloop.families.cnn.saved_network import check_any, checkpoints_at, read_saved_network, weights_of

Weights = tuple[Any, Any]  # parameters and statistics, float32 on the host


@dataclass(frozen=True)
class Origin:
    """What lies at the path."""

    path: Path
    network: Network
    classes: tuple[str, ...]  # names; none where they are not known
    read: Callable[[], Weights]
    is_folded: bool = False  # whether its norms have become a part of its kernels


class Beginning(NamedTuple):
    """The weights of the first update, and where they are from, in words."""

    weights: Weights
    said: str


def find_variant(config: TrainConfig) -> Variant:
    """Which of two forms a ResNet has: that of the weights it begins with. A run that goes on has it in its folder."""
    if config.init_from is None:
        return "keras"
    folder = own_checkpoints(config)
    if folder is not None:
        return read_saved_network(folder).network.variant
    found = find_origin(config.init_from)
    _check_model(found, config.model_name)
    return found.network.variant


def own_checkpoints(config: TrainConfig) -> Path | None:
    """The folder of the checkpoints that a run goes on from; None where there is none yet. Other processes are not
    asked: they may not know each other yet."""
    if not (config.resume and config.run_name):
        return None
    folder = config.checkpoint_output_dir or config.results_dir / config.run_name / "checkpoints"
    steps = (*folder.glob("[0-9]*"), *folder.glob("rank*/[0-9]*"))
    return folder if steps and (folder / NETWORK_FILE).exists() else None


def check_origin(config: TrainConfig, network: Network) -> None:
    """Refuse, before data are read, what could not be the beginning of this network."""
    if config.init_from is not None and own_checkpoints(config) is None:
        check_fits(find_origin(config.init_from), network, config.freeze)


def find_origin(path: Path) -> Origin:
    """An error in one line, which names the option, where it is nothing that is read here."""
    try:
        if path.is_file():
            network = torch_weights.recognise(path)
            return Origin(path, network, (), lambda: torch_weights.load(path, network))
        if not path.exists():
            raise OptionError(
                f"{path}: no such file or folder; give a .safetensors file, a run's folder or an exported model"
            )
        exported = path if (path / MODEL).is_file() else _newest(path)
        return _read_checkpoints(path) if exported is None else _read_exported(exported)
    except HotloopError as error:
        raise type(error)(f"--init-from {error}") from None


def _newest(path: Path) -> Path | None:
    versions = versions_in(path)
    return versions[max(versions)] if versions else None


def _read_checkpoints(path: Path) -> Origin:
    checkpoints = checkpoints_at(path)
    check_any(checkpoints)
    saved = read_saved_network(checkpoints.folder)

    def read() -> Weights:
        with checkpoints.open() as opened:
            kind = saved.choose("auto", path)
            found = weights_of(opened.restore(saved.weights(kind), in_part=True).warn().state, kind)
        return _on_host(found["params"]), _on_host(found["statistics"])

    return Origin(path, saved.network, saved.class_names, read)


def _read_exported(folder: Path) -> Origin:
    about = read_about(folder)
    if about.get("family") != FAMILY:
        raise ModelError(f"{folder}: is a model of {about.get('family')}, not of {FAMILY}")
    try:
        found = about["config"]["network"]
        made = {"shape": tuple(found["shape"]), "norm": NormChoice(**found["norm"])}
        network = build(**found | made)
        classes = tuple(map(str, about["classes"] or ()))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}: its config in {MODEL} cannot be read ({error!r})") from None

    def read() -> Weights:
        tree = nest(parse_weights(read_file(folder, about, WEIGHTS)))
        return _unfold(network, _on_host(tree["params"]), _on_host(tree.get("statistics", {})))

    is_folded = any(node.kind == BATCH_NORM for node in network.nodes)
    return Origin(folder, network, classes, read, is_folded)


def _unfold(network: Network, params: Any, statistics: Any) -> Weights:
    """Norms again where an export left biases: those that change nothing but by that bias."""
    for node in network.nodes:
        if node.kind == BATCH_NORM and node.name not in statistics:
            bias = params[node.name]["bias"]
            params[node.name] = {"scale": np.ones_like(bias), "offset": bias}
            one = np.full_like(bias, 1 - network.epsilon)  # what a norm divides by is then 1
            statistics[node.name] = {"mean": np.zeros_like(bias), "variance": one}
    return params, statistics


def _on_host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)


def check_fits(origin: Origin, network: Network, freeze: str | None) -> None:
    """OptionError that names the first leaf of all but the classifier that is not the network's."""
    there, here = origin.network, network
    where = f"--init-from {origin.path}"
    _check_model(origin, here.model)
    theirs, ours = _shapes(there), _shapes(here)
    for leaf in sorted(ours.keys() | theirs.keys()):
        if leaf not in theirs:
            raise OptionError(f"{where}: has no {leaf}, which {here.model} has with {here.norm.kind} norm")
        if leaf not in ours:
            raise OptionError(f"{where}: has {leaf}, which {here.model} has not with {here.norm.kind} norm")
        if theirs[leaf] != ours[leaf]:
            raise OptionError(
                f"{where}: {leaf} has shape {list(theirs[leaf])}, and {list(ours[leaf])} is needed for images of "
                f"{here.shape[2]} channels"
            )
    norms = {node.name for node in here.nodes if node.kind == BATCH_NORM}
    if origin.is_folded and not norms <= find_frozen(here, freeze):
        raise OptionError(
            f"{where}: an exported model has its norms folded into its kernels and cannot train them: give the run "
            "that it was exported from, or --freeze all-but-classifier"
        )


def _check_model(origin: Origin, model: str) -> None:
    there = origin.network.model
    if there != model:
        raise OptionError(
            f"--init-from {origin.path}: holds a {there}, and --model is {model}; give --model {there}"
        )


def _shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Of every leaf but the classifier's, by `layer/leaf`."""
    return {
        f"{node.name}/{name}": spec.shape
        for node in network.nodes
        if node.name != classifier_of(network)
        for name, spec in node.parameters.items()
    }


def begin_with(
    config: TrainConfig, network: Network, classes: tuple[str, ...], key: Array
) -> Beginning | None:
    """The weights of the first update, and what to say of them; None where they are random."""
    if config.init_from is None:
        return None
    origin = find_origin(config.init_from)
    check_fits(origin, network, config.freeze)
    try:
        params, statistics = origin.read()
    except HotloopError as error:
        raise type(error)(f"--init-from {error}") from None
    last = classifier_of(network)
    said = f"weights from {config.init_from}"
    if reason := why_anew(origin, network, classes):
        params = {**params, last: network.init_on_host(key)[0][last]}
        said += f"; the classifier {last} is drawn anew: {reason}"
    return Beginning((params, statistics), said)


def why_anew(origin: Origin, network: Network, classes: tuple[str, ...]) -> str:
    """Why the classifier cannot be taken over; empty where it can."""
    there = origin.network
    if there.classes != network.classes:
        return f"{network.classes} classes, {there.classes} there"
    if origin.classes and classes and origin.classes != classes:
        return "the classes have other names there"
    if replace(there, norm=network.norm).nodes[-1].parameters != network.nodes[-1].parameters:
        return f"images of {network.shape[0]} x {network.shape[1]}, {there.shape[0]} x {there.shape[1]} there"
    return ""

"""A trained estimator as a model to serve: features in, what `predict` gives for them out, be it an array or a dict.

Names of tensors are the keys of the features and of the predictions; a plain array is `features`, or `predictions`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hotloop.engine.exportable import (
    Arrays,
    Exportable,
    Signature,
    Tensor,
    describe_source,
    tolerance_of,
)
from hotloop.engine.feed import path_name
from hotloop.engine.run import read_json
from hotloop.errors import CheckpointError, DataError, ModelError, OptionError
from hotloop.families.cnn.saved_network import CIFAR10
from hotloop.families.estimator import model
from hotloop.families.estimator.config import EvalSpec, Mode, RunConfig, call_with_known, check_value
from hotloop.families.estimator.model import Job, State, build_job
from hotloop.families.estimator.training import FAMILY, open_checkpoints
from hotloop.options.files import parse_json

if TYPE_CHECKING:
    from hotloop.families.estimator.estimator import Estimator

EXAMPLES = 3
FEATURES, PREDICTIONS = "features", "predictions"


def from_estimator(estimator: "Estimator", input_fn: Any, checkpoint: Any = None) -> Exportable:
    """The model of an estimator's checkpoint; the input tells its form, and its first rows are the examples."""
    source = estimator._read_input(input_fn, Mode.PREDICT)
    first = next(iter(source.batches()), None)
    if first is None:
        raise DataError("export: input_fn gives no samples: the first few become the model's examples")
    features = jax.tree.map(lambda leaf: np.asarray(leaf)[:EXAMPLES], first["features"])
    job = make_job(estimator, source.example)
    step, state = estimator._restore(job, checkpoint)
    about = describe_evaluated(estimator.model_dir, step, "what its input_fn gave")
    return describe(job, state, features, name_of(estimator.model_dir), about)


def describe_evaluated(model_dir: Path, step: int, data: str) -> dict[str, Any]:
    """Where weights are from; the metrics are the last evaluation of this step, which has a file of its own."""
    source = describe_source(model_dir, step, data)
    file = model_dir / "eval" / "results.jsonl"
    metrics = source["metrics"]
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            result = parse_json(line)
        except ValueError:
            continue  # a kill tore it
        if isinstance(result, dict) and result.pop("global_step", None) == step:
            metrics = result
    return {**source, "metrics": metrics}


def make_job(estimator: "Estimator", batch: Any) -> Job:
    """The model on one device, whatever it was trained on: stages are merged."""
    known = {"features": batch["features"], "labels": batch.get("labels"), "mode": Mode.PREDICT}
    spec = call_with_known(
        "model_fn", estimator._model_fn, **known, params=estimator.params, config=estimator.config
    )
    return build_job(spec, Mode.PREDICT, batch, estimator.config)


def name_of(folder: Path) -> str:
    """The folder's name, of what a model's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-._") or FAMILY


def describe(
    job: Job, state: State, features: Any, name: str, source: Mapping[str, Any], **more: Any
) -> Exportable:
    """The model of a job and its weights, with a signature of the form of `features` and of what comes of them."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)), features)
    inputs = name_leaves(narrow, FEATURES)
    weights = {**state, "weights": job.policy.to_compute(state["weights"])}
    function = predictor(job, jax.tree.structure(narrow), list(inputs))
    outputs = jax.eval_shape(function, weights, inputs)
    return Exportable(
        family=FAMILY,
        name=name,
        function=function,
        weights=weights,
        signature=Signature(
            tuple(Tensor.of(each, leaf.dtype, *leaf.shape[1:]) for each, leaf in inputs.items()),
            tuple(Tensor.of(each, leaf.dtype, *leaf.shape[1:]) for each, leaf in outputs.items()),
        ),
        examples=inputs,
        tolerance=tolerance_of(job.policy.compute),
        preprocessing=more.pop("preprocessing", "Features as the model's apply takes them."),
        source=source,
        **more,
    )


def name_leaves(tree: Any, alone: str) -> dict[str, Any]:
    """Every leaf of features or predictions by its path; a plain array has the name that is given."""
    leaves = jax.tree.leaves_with_path(tree)
    return {path_name(path) if path else alone: leaf for path, leaf in leaves}


def predictor(
    job: Job, structure: Any, names: list[str]
) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    """`predict` of a job, by the names of tensors."""
    predict = model.predict(job)

    def answer(weights: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found = predict(weights, jax.tree.unflatten(structure, [inputs[name] for name in names]))
        return name_leaves(found, PREDICTIONS)

    return answer


def from_run(folder: Path, *, step: int | None = None, best: bool = False) -> Exportable:
    """The CIFAR program's model of a MODEL_DIR; another program has the model in its own code."""
    had = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    params = had.get("params") or {}
    if had.get("model_fn") != "model_fn" or "recipe" not in params or "updates" not in params:
        raise CheckpointError(
            f"{folder}: was trained by a program of your own, which has the model: call Estimator.export there"
        )
    if best:
        raise OptionError("best=True: hotloop estimator keeps the newest checkpoints; give step=N")
    config = {"params": params, "precision": had["precision"], "half": had.get("half", "bfloat16")}
    job = _cifar_job(config)
    key = jax.eval_shape(lambda: jax.random.key(0))
    like = jax.eval_shape(lambda key: model.init_served(job, key), key)
    with open_checkpoints(folder) as checkpoints:
        if not checkpoints.steps():
            raise CheckpointError(f"{folder}: holds no checkpoint; train first")
        found = checkpoints.restore(like, step, in_part=True)
    images = np.random.default_rng(0).integers(0, 256, (EXAMPLES, 32, 32, 3), np.uint8)
    source = describe_evaluated(
        folder, found.step, "random images" if params.get("generated_data") else "cifar10"
    )
    return _describe_cifar(job, found.state, images, config, source)


def rebuild(about: Mapping[str, Any], weights: Mapping[str, Any], examples: Arrays) -> Exportable:
    """The CIFAR program's model from its own folder: model.json's contents, its weights, and its examples."""
    try:
        job, config = _cifar_job(about["config"]), about["config"]
    except (KeyError, TypeError) as error:
        raise ModelError(f"its config in model.json cannot be read ({error!r})") from None
    state = {"model": {}, **weights}
    return _describe_cifar(job, state, examples["features"], config, about["source"])


def _cifar_job(config: Mapping[str, Any]) -> Job:
    from hotloop.families.estimator.cifar.model import model_fn

    params = {name: value for name, value in config["params"].items() if name != "model_shard_position"}
    batch = {"features": jax.eval_shape(lambda: np.zeros((1, 32, 32, 3), np.uint8))}
    run = RunConfig(batch_size=1, precision=config["precision"], half=config["half"])
    return build_job(model_fn(Mode.PREDICT, params), Mode.PREDICT, batch, run)


def _describe_cifar(
    job: Job, state: State, images: Any, config: Mapping[str, Any], source: Mapping[str, Any]
) -> Exportable:
    return describe(
        job,
        state,
        images,
        "cifar10",
        source,
        kind="image",
        classes=CIFAR10,
        config=config,
        preprocessing="Bytes of images of 32 x 32, in colour. The arithmetic is the program's, resizing the caller's.",
    )


class Exporters:
    """The exports of train_and_evaluate, by the words of its EvalSpec; each goes to `export/WORD` in the model_dir."""

    WORDS = ("best", "latest", "final")

    def __init__(self, estimator: "Estimator", spec: EvalSpec):
        """HotloopError for what is none of the words."""
        words = (spec.exporters,) if isinstance(spec.exporters, str) else spec.exporters
        check_value("EvalSpec: exporters", words, "a list of words", isinstance(words, Sequence))
        for word in words:
            check_value("EvalSpec: exporters", word, f"one of {', '.join(self.WORDS)}", word in self.WORDS)
        self._estimator, self._input_fn, self._words = estimator, spec.input_fn, frozenset(words)
        self._metric, self._way = estimator.config.best or ("loss", "min")
        self._results = estimator._results_file(spec.name)

    def after_evaluation(self, result: Mapping[str, Any]) -> None:
        """`result` has been added to the results, and its checkpoint is there."""
        if "latest" in self._words:
            self._export("latest", result["global_step"])
        if "best" in self._words and self._is_best(result):
            self._export("best", result["global_step"])

    def at_end(self) -> None:
        if "final" in self._words:
            self._export("final", None)

    def _is_best(self, result: Mapping[str, Any]) -> bool:
        """Against all evaluations on record, those of earlier trainings too; NaN is never best."""
        sign = -1 if self._way == "min" else 1
        lines = self._results.read_bytes().splitlines() if self._results.exists() else []
        earlier = [parse_json(line).get(self._metric) for line in lines[:-1]]
        values = [sign * float(value) for value in earlier if isinstance(value, int | float)]
        found = sign * float(result[self._metric])
        return found == found and all(found > value for value in values if value == value)

    def _export(self, word: str, step: int | None) -> None:
        self._estimator.export(self._estimator.model_dir / "export" / word, self._input_fn, checkpoint=step)

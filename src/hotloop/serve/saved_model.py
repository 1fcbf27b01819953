"""The same model as a SavedModel (extra `tf`), which TensorFlow and TensorFlow Serving run: beside the program, in the
same folder, by `jax2tf`. Its signature is `serving_default`, by the names of the tensors."""

from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engine.checkpoint import named_leaves
from hotloop.engine.exportable import Arrays, Exportable
from hotloop.engine.exported_program import PLATFORMS, by_leaf
from hotloop.errors import MissingExtra, ModelError, first_line
from hotloop.layers.highest import SORTED
from hotloop.layers.paths import force_path

FILE = "saved_model.pb"
SIGNATURE = "serving_default"


def import_tensorflow() -> Any:
    """The package, which computes on the CPU here: the accelerator is jax's."""
    try:
        import tensorflow as tf
    except ImportError:
        raise MissingExtra("tensorflow", "tf", "a SavedModel") from None
    tf.config.set_visible_devices([], "GPU")
    return tf


def write_saved_model(exportable: Exportable, folder: Path) -> None:
    """Add it to a folder; ModelError for a model that does not take a batch of any size."""
    tf = import_tensorflow()
    from jax.experimental import jax2tf

    leaves, inputs = named_leaves(exportable.weights), exportable.signature.inputs
    function = jax2tf.convert(
        by_leaf(exportable.compute, exportable.weights),
        polymorphic_shapes=[None, {each.name: f"(rows{', _' * len(each.row)})" for each in inputs}],
        with_gradient=False,
        native_serialization_platforms=PLATFORMS,
    )
    module = tf.Module()
    module.leaves = [tf.Variable(np.asarray(leaf), trainable=False) for leaf in leaves.values()]

    def serve(**given: Any) -> Any:
        return function(dict(zip(leaves, module.leaves, strict=True)), given)

    specs = {each.name: tf.TensorSpec([None, *each.row], each.dtype, name=each.name) for each in inputs}
    try:
        with force_path(SORTED):
            answer = tf.function(serve, autograph=False).get_concrete_function(**specs)
            tf.saved_model.save(module, str(folder), signatures={SIGNATURE: answer})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ModelError(f"{exportable.name} cannot be a SavedModel: {first_line(error)}") from None


def answer_by_tensorflow(folder: Path, inputs: Arrays) -> Arrays:
    """What TensorFlow answers from the folder."""
    tf = import_tensorflow()
    loaded = tf.saved_model.load(str(folder))
    found = loaded.signatures[SIGNATURE](**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in found.items()}

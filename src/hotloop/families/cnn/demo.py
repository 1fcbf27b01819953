"""The family in `hotloop demo`: a small ResNet learns drawn digits, validated after every call."""

import time
from typing import Any

from hotloop.data.dataset import Dataset, LabelledImages
from hotloop.data.stand_ins import draw_digits
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program, copy_state
from hotloop.families.cnn import model
from hotloop.families.cnn.job import resolve
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.sources import resident_images
from hotloop.families.cnn.train import validation_figures
from hotloop.options import Params

TRAIN, TEST = 3_200, 500
BATCH, PER_CALL, CALLS = 32, 25, 6
RECIPE = TrainConfig(
    model_name="cifar_resnet8",
    dataset="mnist",
    micro_batch_size=BATCH,
    norm_layer=Params(name="batch_norm", momentum=0.9),
    optimizer_params=Params(momentum=0.9),
    lr_schedule_params=Params(initial_learning_rate=0.03 / BATCH),
    precision="32.32",
    seed=0,
)


def demo_run(calls: int = CALLS) -> dict[str, Any]:
    """Accuracy in training and on digits not seen, call by call, and images a second."""
    images, labels = draw_digits(TRAIN + TEST, 0)
    train = LabelledImages(images[:TRAIN], labels[:TRAIN])
    test = LabelledImages(images[TRAIN:], labels[TRAIN:])
    source = resident_images(Dataset(name="digits", source="drawn", train=train, test=test, classes=10))
    job = resolve(RECIPE, source.size, 1)
    key = seed_key(0)
    program = Program(model.update(job), source.feed(job), PER_CALL, key)
    state = copy_state(model.init(job, stream(key, "init", 0)))
    program.compile(state, PER_CALL)
    evaluation = source.evaluation(model.evaluate(job), TEST)
    training, validation, seconds = [], [], []
    for call in range(calls):
        began = time.perf_counter()
        state, metrics = program(state, call * PER_CALL, PER_CALL)
        metrics.wait()
        seconds.append(time.perf_counter() - began)
        training.append(float(metrics["training_accuracy"].mean()))
        validation.append(validation_figures(evaluation(state), RECIPE.top_k)["validation_accuracy"])
    return {
        "model": RECIPE.model_name,
        "training": training,
        "validation": validation,
        "updates_per_call": PER_CALL,
        "images": TRAIN,
        "images_per_second": BATCH * PER_CALL / min(seconds),
    }

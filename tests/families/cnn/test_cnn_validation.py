"""Validation: every image once whatever the batch, checkpoints in the order of epochs, and which is the best."""

from dataclasses import replace
from functools import cached_property

import jax
import numpy as np
import pytest
from cnn_words import job_of, typed
from jax.sharding import NamedSharding

from hotloop.data.dataset import Dataset, LabelledImages
from hotloop.engine import processes
from hotloop.engine.device import device_mesh
from hotloop.engine.plan import EvaluationBatches
from hotloop.engine.precision import SPLIT
from hotloop.errors import CheckpointError, DataError
from hotloop.families.cnn import model, saved_network
from hotloop.families.cnn.network import INPUT, Network, NetworkBuilder, NormChoice, build
from hotloop.families.cnn.options import DatasetSize
from hotloop.families.cnn.sources import open_source, resident_images, synthetic_images
from hotloop.families.cnn.train import sweep_figures, validation_figures
from listener import Listener

IMAGES, CLASSES, TOP = 125, 10, 3
IN_STAGES = "--pipeline-splits flatten --pipeline-validation-model"


class Flat(Network):
    """A norm by its moving statistics, and a dense layer."""

    epsilon = 0.0

    @cached_property
    def nodes(self):
        builder = NetworkBuilder(self.shape, self.norm, self.epsilon)
        builder.logits("dense", builder.flatten("flatten", builder.norm("bn", INPUT)), self.classes)
        return tuple(builder.nodes)


@pytest.fixture(scope="module")
def digits():
    """Images, labels and weights that numpy drew, and for each image the classes from likeliest to least."""
    draws = np.random.default_rng(4)
    images = draws.integers(0, 256, (IMAGES, 3, 3, 1)).astype(np.uint8)
    kernel, bias = draws.normal(size=(9, CLASSES)), draws.normal(size=CLASSES)
    state = {
        "params": {
            "bn": {"scale": np.ones(1), "offset": np.zeros(1)},
            "dense": {"kernel": kernel, "bias": bias},
        },
        "statistics": {"bn": {"mean": np.full(1, 0.4), "variance": np.full(1, 0.09)}},
    }
    state = jax.tree.map(np.float32, state)
    logits = ((images.reshape(IMAGES, 9) / 255 - 0.4) / 0.3) @ kernel + bias
    # Labels that are often the likeliest class, and for the last image, which pads the last batch, always.
    ranks = np.append(draws.choice(CLASSES, IMAGES - 1, p=[0.3, 0.2, *([0.0625] * 8)]), 0)
    order = np.argsort(-logits, 1)
    labels = order[np.arange(IMAGES), ranks].astype(np.int32)
    loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(IMAGES), labels]
    split = LabelledImages(images, labels)
    data = Dataset(name="mnist", source="drawn here", classes=CLASSES, train=split, test=split)
    return resident_images(data), state, ranks, loss


@pytest.mark.parametrize("batch", [1, 64, 43, 46, 125, 1000])
def test_every_image_counts_once_whatever_the_batch(digits, batch):
    source, state, ranks, loss = digits
    job = job_of("--dataset", "mnist", "--precision", "32.32", "--top-k", str(TOP))
    job = replace(job, network=Flat("flat", (3, 3, 1), CLASSES))
    found = validation_figures(source.evaluation(model.evaluate(job), batch)(state), TOP)
    assert found["samples"] == IMAGES
    assert found["validation_accuracy"] == (ranks == 0).sum() / IMAGES
    assert found[f"validation_top_{TOP}"] == (ranks < TOP).sum() / IMAGES
    assert found["validation_loss"] == pytest.approx(loss.mean(), rel=1e-5)


def over(devices):
    if devices > jax.device_count():
        pytest.skip(f"{devices} devices")
    return NamedSharding(device_mesh(devices), SPLIT) if devices > 1 else None


@pytest.mark.parametrize(("devices", "batch"), [(4, 43), (3, 64), (4, 3), (4, 1000)])
def test_devices_count_every_image_once_together(digits, devices, batch):
    source, state, ranks, _ = digits
    job = job_of("--dataset", "mnist", "--precision", "32.32", "--top-k", str(TOP))
    job = replace(job, network=Flat("flat", (3, 3, 1), CLASSES))
    alone, together = (
        source.evaluation(model.evaluate(job), batch, sharding)(state) for sharding in (None, over(devices))
    )
    for name in ("correct", "correct_top", "samples"):
        assert together[name] == alone[name] > 0
    assert together["correct"] == (ranks == 0).sum()
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6) and np.isfinite(alone["loss"])
    moved = jax.tree.map(np.copy, state)
    moved["params"]["dense"]["kernel"][0, 0] += 0.1
    assert source.evaluation(model.evaluate(job), batch, over(devices))(moved)["loss"] != pytest.approx(
        alone["loss"], rel=1e-6
    )


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("batch", [256, 1728, 1840])
def test_fifty_thousand_images_are_counted_exactly_in_the_old_batches_on_any_devices(batch, devices):
    """Made-up images, of which 256 differ: each is right or wrong by its label and one pixel."""
    source = synthetic_images(DatasetSize(60, 50_000, (1, 1, 1), CLASSES), seed=1, on_device=True)

    def fn(state, batch):
        return {"right": batch["image"][:, 0, 0, 0] % CLASSES == batch["label"], "label": batch["label"]}

    kept = source.evaluation(fn, 1)._data
    numbers = np.arange(50_000) % 256
    pixels, labels = (np.asarray(kept[name])[numbers] for name in ("image", "label"))
    right = int((pixels[:, 0, 0, 0] % CLASSES == labels).sum())
    found = source.evaluation(fn, batch, over(devices))(None)
    assert found == {"right": right, "label": int(labels.sum()), "samples": 50_000} and right > 1000


@pytest.mark.parametrize(
    ("words", "devices", "used", "warned"),
    [
        ("--num-replicas 4", 4, 4, None),
        ("--num-replicas 4 --validation-num-replicas 2", 4, 2, None),
        ("--validation-num-replicas 4", 4, 4, None),
        ("", 4, 1, None),
        ("--validation-num-replicas 8", 4, 4, "--validation-num-replicas 8: validation takes 4 devices"),
        ("--validation-num-replicas 8 --validation False", 4, 1, None),
        ("--validation-num-replicas 2", 1, 1, "--validation-num-replicas 2: validation takes 1 device"),
        (f"{IN_STAGES} --num-replicas 2", 4, 4, None),
        (f"{IN_STAGES} --num-replicas 2 --validation-num-replicas 2", 4, 4, None),
        (
            f"{IN_STAGES} --validation-num-replicas 3",
            4,
            2,
            "--validation-num-replicas 3: in stages validation has the training's replicas: 1",
        ),
    ],
)
def test_validation_takes_the_devices_of_the_run_or_those_it_was_given(words, devices, used, warned):
    job = job_of(*words.split(), devices=devices)
    if used <= jax.device_count():
        assert getattr(job.validation_sharding, "num_devices", 1) == used
    found = [line for line in job.warnings if line.startswith("--validation-num-replicas")]
    assert [line[: len(warned)] for line in found] == [warned] if warned else not found


def test_a_batch_of_validation_in_stages_is_whole_micro_batches_of_every_replica():
    job = job_of(*f"{IN_STAGES} --num-replicas 2 --validation-num-replicas 3".split(), devices=4)
    assert job.validation.batch % (2 * 4) == 0 and job.validation.batch >= 3 * 4


def test_the_old_batches_are_padded_and_lose_nothing():
    """50,000 images in the batches of the old configurations."""
    for batch, padded in ((256, 50_176), (1728, 50_112), (1840, 51_520), (460, 50_140), (32, 50_016)):
        plan = EvaluationBatches(50_000, batch)
        assert (plan.batches * batch, plan.padding) == (padded, padded - 50_000)


def test_made_up_images_count_as_many_as_the_set_has():
    source = synthetic_images(DatasetSize(60, 25, (3, 3, 1), CLASSES), seed=1, on_device=True)

    def fn(state, batch):
        return {"one": batch["label"] >= 0, "outside": (batch["label"] < 0) | (batch["label"] >= CLASSES)}

    for batch in (4, 25, 30):
        assert source.evaluation(fn, batch)(None) == {"one": 25, "outside": 0, "samples": 25}


@pytest.mark.parametrize("on_device", [False, True])
def test_made_up_images_are_validated_alike_in_any_batch(on_device):
    source = synthetic_images(DatasetSize(60, 600, (3, 3, 1), CLASSES), seed=1, on_device=on_device)

    def fn(state, batch):
        return {"label": batch["label"], "bright": batch["image"].mean((1, 2, 3))}

    whole = source.evaluation(fn, 600)(None)
    for batch in (40, 1000):
        found = source.evaluation(fn, batch)(None)
        assert (found["label"], found["samples"]) == (whole["label"], 600)
        assert found["bright"] == pytest.approx(whole["bright"], rel=1e-5)


def test_photographs_are_counted_once_in_any_batch_and_decoded_again_for_every_checkpoint(tmp_path):
    pytest.importorskip("PIL")
    from pictures import image_folder

    parts = {"train": {"a": 1, "b": 1}, "validation": {"a": 3, "b": 2}}
    image_folder(tmp_path, parts)
    words = ("--dataset", "imagenet", "--dataset-path", str(tmp_path), "--training", "False")

    def fn(state, batch):
        return {"second": batch["label"] == 1, "bright": state * batch["image"].mean((1, 2, 3))}

    with open_source(typed(*words).config, Listener(), seed=0) as source:
        assert source.size.validation == 5
        whole = source.evaluation(fn, 5)(1.0)
        parted = source.evaluation(fn, 2)
        one, again = parted(1.0), parted(2.0)
        spread = source.evaluation(fn, 2, over(3))(1.0)
    assert (one["second"], one["samples"]) == (whole["second"], whole["samples"]) == (2, 5)
    assert one["bright"] == pytest.approx(whole["bright"], rel=1e-6)
    assert (spread["second"], spread["samples"]) == (2, 5)
    assert spread["bright"] == pytest.approx(whole["bright"], rel=1e-6)
    assert again["bright"] == pytest.approx(2 * whole["bright"], rel=1e-6)


@pytest.mark.parametrize("elsewhere", [0, 2])
def test_broken_photographs_of_all_processes_are_counted_at_the_end(tmp_path, monkeypatch, elsewhere):
    pytest.importorskip("PIL")
    from pictures import image_folder

    image_folder(tmp_path, {"validation": {"a": 3, "b": 2}})
    (tmp_path / "validation/a/a_1.JPEG").write_bytes(b"no image")
    words = f"--dataset imagenet --dataset-path {tmp_path} --training False --skip-corrupt --random-weights"
    listener = Listener()
    monkeypatch.setattr(processes, "gathered", lambda own: [own, elsewhere])
    with open_source(typed(*words.split()).config, listener, seed=0) as source:
        found = source.evaluation(lambda state, batch: {"label": batch["label"]}, 2)(None)
    assert found == {"label": 2, "samples": 4}
    assert f"--skip-corrupt: {1 + elsewhere} broken images" in listener.warnings[-1]


def test_more_classes_of_photographs_than_the_network_has_are_refused(tmp_path):
    for number in range(1001):
        folder = tmp_path / "train" / f"{number:04}"
        folder.mkdir(parents=True)
        (folder / "one.jpg").touch()
    words = ("--dataset", "imagenet", "--dataset-path", str(tmp_path), "--validation", "False")
    refusal = f"--dataset-path {tmp_path}: 1,001 classes, but the network has 1,000"
    with pytest.raises(DataError, match=refusal), open_source(typed(*words).config, Listener(), seed=0):
        pass


def found(*accuracies):
    """Checkpoints at epochs 1, 2, ... of 10 updates with these accuracies."""
    return [
        {"step": 10 * epoch, "epoch": float(epoch), "validation_accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies, 1)
    ]


def test_a_sweep_maximises_the_last_accuracy_reached_early():
    told = sweep_figures(found(0.5, 0.76, 0.9, 0.739), 0.759)
    assert (told["epoch_to_target"], told["target_accuracy"]) == (2.0, 0.759)
    assert told["optimization_metric"] == pytest.approx(np.exp(-0.5) / 4)  # one width below
    told = sweep_figures(found(0.1, 0.2), 0.759)
    assert told["epoch_to_target"] is None and 0 < told["optimization_metric"] < 1e-9
    assert sweep_figures(found(0.1, 0.8), 0.759)["optimization_metric"] == 0.5
    at_once = {"step": 0, "epoch": 0.0, "validation_accuracy": 0.8}
    assert sweep_figures([at_once], 0.7)["optimization_metric"] is None


@pytest.mark.parametrize(
    "network",
    [
        build("cifar_resnet8", (32, 32, 3), 100, NormChoice(momentum=0.9)),
        build("toy_model_bn", (28, 28, 1), 10, NormChoice("group", groups=2)),
        build("resnet18", (224, 224, 3), 1000, variant="torch"),
    ],
)
def test_what_a_folder_of_checkpoints_belongs_to_is_read_back(network, tmp_path):
    about = saved_network.SavedNetwork(network, "cifar100", "16.32", "float16", 781.0)
    about.write(tmp_path / "run" / "checkpoints")
    folder = tmp_path / "run" / "checkpoints"
    for path in (tmp_path / "run", folder):
        assert saved_network.checkpoints_at(path).folder == folder
    assert saved_network.read_saved_network(folder) == about


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"network": 3}', "an unknown model"])
def test_a_damaged_description_is_one_line_that_names_it(text, tmp_path):
    saved_network.SavedNetwork(build("toy_model", (28, 28, 1), 10), "mnist", "16.16", "bfloat16", 6.0).write(
        tmp_path
    )
    file = tmp_path / "network.json"
    file.write_text(file.read_text().replace("toy_model", "boy_model") if "unknown" in text else text)
    with pytest.raises(CheckpointError, match=r"network\.json: cannot be read"):
        saved_network.read_saved_network(tmp_path)
    with pytest.raises(CheckpointError, match=r"no network\.json there"):
        saved_network.read_saved_network(tmp_path / "elsewhere")


def test_networks_are_the_same_but_for_their_momentum(tmp_path):
    here = build("toy_model_bn", (28, 28, 1), 10)
    saved_network.check_same(build("toy_model_bn", (28, 28, 1), 10, NormChoice(momentum=0.1)), here, tmp_path)
    for there, word in (
        (build("toy_model", (28, 28, 1), 10), "a toy_model for"),
        (build("toy_model_bn", (32, 32, 3), 10), "32 x 32 x 3"),
        (build("toy_model_bn", (28, 28, 1), 100), "100 classes"),
        (build("toy_model_bn", (28, 28, 1), 10, NormChoice("group", groups=2)), r"group norm \(2 groups\)"),
    ):
        with pytest.raises(CheckpointError, match=word):
            saved_network.check_same(there, here, tmp_path)

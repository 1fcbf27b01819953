"""Own photographs from end to end: training on a folder, fine-tuning with other classes and frozen layers."""

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
from PIL import Image
from timm_files import drawn, write_timm

from hotloop.cli.main import main
from hotloop.cli.parser import resolve, scan
from hotloop.engine.checkpoint_folder import read_leaves, read_whole
from hotloop.engine.device import setup
from hotloop.families.cnn import train
from hotloop.families.cnn.export import from_run
from listener import Listener
from pictures import picture
from same_numbers import share_apart

COLOURS = {"grass": (40, 190, 60), "night sky": (25, 30, 120), "rust": (190, 80, 20), "snow": (235, 240, 245)}
RATE = ("--optimizer-params", "{momentum: 0.9}", "--lr-schedule-params", "{initial_learning_rate: 0.004}")
RUN = (
    "--precision",
    "32.32",
    "--micro-batch-size",
    "4",
    "--num-epochs",
    "3",
    "--seed",
    "5",
    "--clean-dir",
    "False",
)
TOY = ("--model", "toy_model_bn", *RUN, *RATE)
"""Runs of three epochs of two updates of sixteen images."""
ONE, FOUR = ("--gradient-accumulation", "4"), ("--num-replicas", "4")


class Crash(BaseException):
    """The end of a process without any goodbye."""


def write_photographs(folder, names, numbers):
    """Pictures with grain and soft shades of a class's colour, JPEG and PNG, no two of a class of a size."""
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number in numbers:
            size = (60 + 3 * number, 50 + 5 * label)
            soft = np.asarray(picture(*size, seed=100 * label + number), np.float32)
            pixels = Image.fromarray((0.35 * soft + 0.65 * np.array(COLOURS[name])).astype(np.uint8))
            pixels.save(folder / name / f"{number:02d}.{'png' if number % 3 == 0 else 'JPG'}")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    setup()
    root = tmp_path_factory.mktemp("photos")
    write_photographs(root / "train", tuple(COLOURS)[:3], range(14))
    return root


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Four classes in place of three, and photographs to validate with."""
    root = tmp_path_factory.mktemp("others")
    write_photographs(root / "train", COLOURS, range(10))
    write_photographs(root / "val", COLOURS, range(10, 16))
    return root


def called(*words):
    """Exit status, the JSON result (or None), and everything that was said."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["cnn", *map(str, words), "--json"])
    lines = out.getvalue().splitlines()
    return status, json.loads(lines[-1]) if lines else None, err.getvalue()


def trained(folder, *words, split=ONE, program=TOY):
    """The last checkpoint's leaves, the result, and what was said."""
    place = ("--results-dir", folder.parent, "--run-name", folder.name)
    status, result, said = called("train", *program, *split, *words, *place)
    assert status == 0, said
    return leaves(folder), result, said


def leaves(run):
    last = max((run / "checkpoints").glob("0*"))
    return read_leaves(last, read_whole(last, int(last.name)))


def crashed(folder, when, *words):
    """Begin a run and end it at once when a line says so."""
    from hotloop.cli.cnn import TRAIN

    def stop(text):
        if text.startswith(when):
            raise Crash

    place = ("--results-dir", str(folder.parent), "--run-name", folder.name)
    config = resolve(TRAIN, scan([*TOY, *ONE, *map(str, words), *place], TRAIN.options)).config
    with pytest.raises(Crash):
        train.run(config, Listener(stop), "test")


@pytest.fixture(scope="module")
def first(photos, tmp_path_factory):
    """A run on the first folder: its folder, last checkpoint, result and words."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, *trained(folder, "--dataset", photos)


def test_a_folder_is_trained_on_and_its_classes_have_names_ever_after(first, photos, tmp_path):
    folder, _, result, said = first
    assert "data: 39 + 3 images of 3 classes" in said and "decoded once, stay on the device" in said
    assert [row["samples"] for row in result["validation"]] == [3, 3, 3]
    assert result["best"]["validation_accuracy"] > 1 / 3
    written = json.loads((folder / "config.json").read_text())
    assert (written["dataset"], written["dataset_path"]) == ("folder", str(photos))
    assert (
        json.loads((folder / "checkpoints" / "network.json").read_text())["own_classes"] == list(COLOURS)[:3]
    )
    assert from_run(folder).classes == tuple(COLOURS)[:3]
    status, shown, said = called("predict", folder, photos / "train" / "rust" / "01.JPG")
    assert status == 0, said
    (rows,) = shown["predictions"].values()
    assert {row["name"] for row in rows} == {"grass", "night sky", "rust"}
    status, again, said = called("validate", folder)
    assert status == 0, said
    assert again["validation"] == result["validation"]


def test_streamed_records_and_files_that_stay_on_the_device_are_all_trained_on(first, photos, tmp_path):
    """All see the same images in the same order of epochs; parts of them are cut by two rules of draws."""
    records = tmp_path / "records"
    assert called("build-records", photos, records, "--hold-out")[0] == 0
    for name, words in {
        "streamed": ("--dataset", photos, "--resident-mib", "0"),
        "records": ("--dataset", records),
    }.items():
        _, result, said = trained(tmp_path / name, *words)
        assert "39 + 3 images of 3 classes" in said
        assert ("streamed by" in said) == (name == "streamed")
        assert result["best"]["validation_accuracy"] > 1 / 3


def test_own_images_are_mixed_and_changed_and_averages_are_what_others_begin_with(photos, tmp_path):
    mixed = (
        "--mixup",
        "0.2",
        "--cutmix",
        "1",
        "--random-erasing",
        "0.5",
        "--trivial-augment",
        "--ema",
        "0.5",
    )
    kept, result, _ = trained(tmp_path / "mixed", "--dataset", photos, *mixed)
    assert {"ema_accuracy", "validation_accuracy"} <= set(result["validation"][-1])
    kept_too, _, _ = trained(
        tmp_path / "four",
        "--dataset",
        photos,
        *mixed,
        split=FOUR,
    )
    begun, _, _ = trained(
        tmp_path / "begun", "--dataset", photos, "--init-from", tmp_path / "mixed", "--freeze", "stem"
    )
    stem = [
        name
        for name in begun
        if name.startswith("params") and np.array_equal(begun[name], kept["ema_" + name])
    ]
    assert stem and not any(np.array_equal(kept["ema_" + name], kept[name]) for name in stem)
    for name, leaf in kept.items():
        np.testing.assert_allclose(leaf, kept_too[name], atol=1e-5, err_msg=name)


def tuned_words(first, others):
    return ("--dataset", others, "--init-from", first[0], "--freeze", "stem", "--weight-decay", "0.01")


@pytest.fixture(scope="module")
def tuned(first, others, tmp_path_factory):
    """A run that began with the first one's weights, on four classes, the stem frozen."""
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    return folder, *trained(folder, *tuned_words(first, others))


def test_a_run_is_fine_tuned_on_other_classes_and_frozen_layers_keep_every_bit(first, tuned):
    (_, old, _, _), (_, new, result, said) = first, tuned
    assert f"weights from {first[0]}; the classifier dense is drawn anew: 4 classes, 3 there" in said
    assert "--freeze stem: 92 of 212 parameters are trained, 2 layers stay as they are" in said
    frozen = [name for name in old if any(f"/{layer}/" in name for layer in ("conv2d_0", "bn_0"))]
    kept = [name for name in frozen if name.startswith(("params", "statistics"))]
    assert len(kept) == 6
    for name in kept:
        assert new[name].tobytes() == old[name].tobytes(), name
    assert not any(name in new for name in set(frozen) - set(kept))  # the optimiser has nothing for them
    for name in ("params/conv2d_1/kernel", "params/bn_1/scale", "statistics/bn_1/mean"):
        assert not np.array_equal(new[name], old[name]), name
    assert new["params/dense/kernel"].shape == (8, 4)
    assert result["best"]["validation_accuracy"] > 1 / 4


@pytest.mark.parametrize("when", ["update 2,", "update 6,"])
def test_a_fine_tuned_run_that_was_killed_goes_on_to_the_same_bits(first, others, tuned, tmp_path, when):
    """Before its first checkpoint it begins once more; after it, it needs nothing of where it began."""
    moved = tmp_path / "moved"
    shutil.copytree(first[0], moved)
    words = ("--dataset", others, "--init-from", moved, "--freeze", "stem", "--weight-decay", "0.01")
    crashed(tmp_path / "tuned", when, *words)
    saved = sorted(path.name for path in (tmp_path / "tuned" / "checkpoints").glob("0*"))
    assert saved == ([] if when == "update 2," else ["00000002", "00000004"])
    if saved:
        shutil.rmtree(moved)
    found, _, said = trained(tmp_path / "tuned", *words, "--resume")
    assert ("weights from" in said) == (not saved)
    assert set(found) == set(tuned[1])
    for name, leaf in tuned[1].items():
        assert found[name].tobytes() == leaf.tobytes(), name


def test_four_devices_fine_tune_as_one_does(first, others, tuned, tmp_path):
    found, _, _ = trained(tmp_path / "four", *tuned_words(first, others), split=FOUR)
    assert share_apart(found, tuned[1]) < 1e-5


@pytest.mark.parametrize("words", [("--resident-mib", "2048"), ("--resident-mib", "0")])
def test_a_broken_image_is_named_before_anything_is_compiled(photos, tmp_path, words):
    own = tmp_path / "own"
    shutil.copytree(photos, own)
    broken = own / "train" / "rust" / "04.JPG"
    broken.write_bytes(b"no image")
    asked = ("--dataset", own, *words, "--results-dir", tmp_path, "--run-name", "run")
    status, _, said = called("train", *TOY, *ONE, *asked)
    (error,) = [line for line in said.splitlines() if line.startswith("hotloop: error:")]
    assert status == 2 and f"{broken}: corrupt image" in error and "--skip-corrupt" in error
    assert not (tmp_path / "run").exists()
    _, result, said = trained(tmp_path / "run", "--dataset", own, *words, "--skip-corrupt")
    assert str(broken) in said and result["validation"][-1]["samples"] == 3


def test_verify_counts_an_own_folder_and_names_what_is_broken(photos, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(photos, own)
    status, result, _ = called("verify", "--dataset", own, "--decode", "--workers", "1")
    assert (status, result["parts"]) == (0, {"train": {"images": 39}, "validation": {"images": 3}})
    assert result["classes"] == list(COLOURS)[:3]
    cut = own / "train" / "grass" / "07.JPG"
    cut.write_bytes(cut.read_bytes()[:-300])
    status, _, said = called("verify", "--dataset", own, "--decode", "--workers", "1")
    assert status == 2 and f"1 broken, first {cut}: corrupt image" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dataset NOWHERE", "--dataset NOWHERE: no such folder, and none of the sets imagenet, cifar10"),
        ("--dataset PHOTOS/train", "no folder train in it; expected train/CLASS/*.jpg"),
        ("--dataset PHOTOS --top-k 4", "--top-k 4: PHOTOS has only 3 classes"),
        ("--dataset PHOTOS --freeze stages:7", "--freeze stages:7: toy_model_bn has 1 stage"),
        ("--dataset PHOTOS --freeze dense", "--freeze dense: must be stem, stages:N"),
        ("--dataset PHOTOS --init-from NOWHERE", "--init-from NOWHERE: no such file or folder"),
        (
            "--dataset mnist --image-size 64",
            "--image-size 64: is for images of your own (--dataset DIR); mnist is",
        ),
        ("--dataset cifar10 --resident-mib 1", "--resident-mib 1: is for images of your own (--dataset DIR)"),
        ("--dataset PHOTOS --image-size 4", "--image-size 4: must be between 8 and 1024"),
    ],
)
def test_what_cannot_work_is_one_line(photos, tmp_path, words, message):
    asked = [word.replace("PHOTOS", str(photos)) for word in words.split()]
    status, _, said = called("train", *TOY, *ONE, *asked, "--results-dir", tmp_path, "--run-name", "run")
    (error,) = said.splitlines()
    assert status == 2 and message.replace("PHOTOS", str(photos)) in error
    assert not (tmp_path / "run").exists()


def test_a_run_neither_goes_on_with_nor_is_validated_by_other_classes(first, photos, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(photos, own)
    (own / "train" / "rust").rename(own / "train" / "coal")
    crashed(tmp_path / "run", "update 6,", "--dataset", photos)
    again = ("--results-dir", tmp_path, "--run-name", "run", "--resume")
    for command in (("validate", first[0]), ("train", *TOY, *ONE, *again)):
        status, _, said = called(*command, "--dataset", own)
        assert status == 2, said
        assert "was trained on other classes than --dataset has: grass there is coal here" in said


def test_a_plan_says_what_is_trained_and_from_what(first, others):
    status, _, said = called("train", *TOY, *ONE, *tuned_words(first, others), "--plan")
    assert status == 0, said
    assert "data: 40 + 24 images of 4 classes" in said and "--resident-mib 2048: on the device" in said
    assert f"weights from {first[0]}; the classifier is drawn anew (4 classes, 3 there)" in said
    assert "--freeze stem: 92 of 212 parameters are trained" in said


@pytest.mark.slow
def test_weights_of_timm_are_fine_tuned_on_own_photographs(others, tmp_path):
    """A ResNet-18 by timm's names and another number of classes: the first three stages stay, the rest learns."""
    _, params, statistics = drawn("resnet18", 7)
    file = write_timm(tmp_path / "r18.safetensors", params, statistics)
    longer = ("--num-epochs", "12", "--lr-schedule-params", "{initial_learning_rate: 0.0002}")
    program = ("--model", "resnet18", "--image-size", "32", *RUN, *RATE, *longer)
    words = ("--dataset", others, "--init-from", file, "--freeze", "stages:3", "--weight-decay", "0.01")
    whole, result, said = trained(tmp_path / "whole", *words, program=program)
    assert "the classifier predictions is drawn anew: 4 classes, 7 there" in said
    assert result["best"]["validation_accuracy"] > 1 / 2  # of four classes
    for part, tree in (("params", params), ("statistics", statistics)):
        for layer, leaves_of in tree.items():
            for leaf, value in leaves_of.items():
                is_frozen = layer.startswith(("conv1_", "conv2_", "conv3_", "conv4_"))
                assert np.array_equal(whole[f"{part}/{layer}/{leaf}"], value) == is_frozen, (
                    f"{part}/{layer}/{leaf}"
                )
    assert from_run(tmp_path / "whole").classes == tuple(COLOURS)
    four, _, _ = trained(tmp_path / "four", *words, split=FOUR, program=program)
    assert share_apart(four, whole) < 1e-4

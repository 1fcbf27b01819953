"""A folder of one's own images: its classes, what is held out, and what is refused."""

import os
import random
import subprocess
import sys

import pytest

from hotloop.data import build_records
from hotloop.data.build_records import Build
from hotloop.data.image_stores import RecordSet
from hotloop.data.own_images import hold_out, open_own_images
from hotloop.errors import DataError
from pictures import image_folder

NAMES = ("crème brûlée", "a dish", "Zebra")


def touched(root, *files):
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def test_images_of_every_ending_count_and_classes_are_sorted_by_name(tmp_path):
    files = [
        f"train/{name}/{k}.{end}" for name in NAMES for k, end in enumerate(("jpg", "JPG", "jpeg", "PNG"))
    ]
    own = open_own_images(
        touched(
            tmp_path,
            *files,
            *(f"val/{name}/1.png" for name in NAMES),
            "train/Zebra/notes.txt",
            "train/.git/x",
        )
    )
    assert own.classes == ("Zebra", "a dish", "crème brûlée") and not own.held_out
    assert (len(own.train), len(own.validation)) == (12, 3)
    assert own.train._labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert own.train.path(1).endswith("train/Zebra/1.JPG")


@pytest.mark.parametrize("folder", ["val", "validation", "test"])
def test_any_of_three_folders_is_validated_with(tmp_path, folder):
    own = open_own_images(
        touched(tmp_path, *(f"{part}/{name}/1.jpg" for part in ("train", folder) for name in "ab"))
    )
    assert (len(own.train), len(own.validation), own.held_out) == (2, 2, False)
    assert f"/{folder}/" in own.validation.path(0)


def test_a_test_folder_without_classes_has_no_labels_and_is_passed_over(tmp_path):
    own = open_own_images(
        touched(tmp_path, *(f"train/{name}/{k}.jpg" for name in "ab" for k in range(4)), "test/1.jpg")
    )
    assert own.held_out and (len(own.train), len(own.validation)) == (6, 2)


def test_a_tenth_of_each_class_is_held_out_by_names_alone(tmp_path):
    counts = {"a": 40, "b": 26, "c": 3}
    images = [
        (tmp_path / name / f"{k}.jpg", label)
        for label, name in enumerate(counts)
        for k in range(counts[name])
    ]
    train, held = hold_out(images)
    assert sorted([*train, *held]) == sorted(images) and not {*train} & {*held}
    assert [sum(label == each for _, label in held) for each in range(3)] == [4, 3, 1]
    # Elsewhere, and listed in another order, the same ones.
    moved = [(tmp_path / "moved" / path.parent.name / path.name, label) for path, label in images]
    for label in range(3):
        group = [each for each in moved if each[1] == label]
        random.Random(label).shuffle(group)
        wanted = {path.name for path, other in held if other == label}
        assert {path.name for path, _ in hold_out(group)[1]} == wanted
    # One more image moves at most one.
    more = hold_out([(tmp_path / "a" / f"{k}.jpg", 0) for k in range(41)])[1]
    assert len({path for path, _ in more} ^ {path for path, label in held if label == 0}) <= 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "no folder train in it; expected train/CLASS"),
        (("a.jpg",), "no folder train in it; expected train/CLASS"),
        (("train/1.jpg",), "train: no class folders"),
        (("train/a/1.txt",), r"train/a: class folder without images \(.jpeg, .jpg, .png"),
        (("train/a/1.jpg", "train/a/2.jpg"), "only one class, a: there is nothing to tell apart"),
        (("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"), "val: has no class b, which .*train has"),
        (("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/1.jpg", "val/c/1.jpg"), "val/c: class c has no"),
        (("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/1.txt"), "val/b: class folder without images"),
        (("train/a/1.jpg", "train/b/1.jpg", "train/b/2.jpg"), "train/a: one image alone, and one of each class"),
        (("train/a\nb/1.jpg", "train/b/1.jpg"), "a name that cannot be printed"),
    ],
)  # fmt: skip
def test_what_no_training_could_use_is_refused(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        open_own_images(touched(tmp_path, *files))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such folder; expected train/CLASS"):
        open_own_images(tmp_path / "nowhere")


def built(source, out, **options):
    task = Build(source=source, out=out, shards={"train": None, "validation": None}, **options)
    build_records.run_build(task, build_records.plan_build(task), lambda images: None)
    return out


def test_records_have_the_classes_and_the_images_that_the_folder_would_hold_out(tmp_path):
    source = image_folder(tmp_path / "own", {"train": {"dog": 4, "a cat": 12}})
    folder, records = open_own_images(source), open_own_images(built(source, tmp_path / "out", hold_out=True))
    assert records.classes == folder.classes == ("a cat", "dog")
    for part in ("train", "validation"):
        ours, theirs = getattr(records, part), getattr(folder, part)
        assert isinstance(ours, RecordSet)
        pairs = [
            sorted((store.read(k).label, store.read(k).encoded) for k in range(len(store)))
            for store in (ours, theirs)
        ]
        assert pairs[0] == pairs[1]


def test_names_of_records_are_read_as_they_were_written_whatever_the_locale(tmp_path):
    source = image_folder(tmp_path / "own", {"train": dict.fromkeys(NAMES, 3)})
    out = built(source, tmp_path / "out", hold_out=True)
    code = (
        "import sys; from hotloop.data.own_images import open_own_images; "
        "print(ascii(open_own_images(sys.argv[1]).classes))"
    )
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.run(
        [sys.executable, "-c", code, out], env={**os.environ, **ascii_alone}, capture_output=True, text=True
    )
    assert said.stdout.strip() == ascii(tuple(sorted(NAMES))), said.stderr


def test_records_that_lack_what_a_training_needs_say_how_to_get_it(tmp_path):
    source = image_folder(tmp_path / "own", {"train": {"dog": 3, "cat": 3}})
    out = built(source, tmp_path / "out")
    with pytest.raises(DataError, match=r"no validation records; build them anew .* with hold_out$"):
        open_own_images(out)
    (out / "labels.txt").unlink()
    with pytest.raises(DataError, match=r"without a readable labels\.txt"):
        open_own_images(out)
    image_folder(source, {"val": {"dog": 1, "cat": 1}})
    with pytest.raises(DataError, match="there are images to validate with already; hold none out"):
        built(source, tmp_path / "more", hold_out=True)

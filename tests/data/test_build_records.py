"""Record sets, image folders and the builder between them."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from hotloop.data import build_records
from hotloop.data.build_records import Build
from hotloop.data.image_stores import ImageFolder, RecordSet, check_images, shard_name
from hotloop.data.jpeg import decode
from hotloop.data.tfrecord import read_example, read_record, write_example
from hotloop.errors import DataError
from pictures import encoded, image_folder, picture
from records import index_records, write_records

SHARDS = {"train": 3, "validation": 2}
PARTS = {"train": {"n02": 4, "n01": 3, "n10": 3}, "val": {"n10": 2, "n01": 2, "n02": 1}}


def build(source, out, **options):
    task = Build(source, out, options.pop("shards", SHARDS), **options)
    return build_records.run_build(task, build_records.plan_build(task), lambda images: None)


def digests(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*-of-*"))
    }


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("photos"), PARTS)


@pytest.fixture(scope="module")
def built(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("built")
    build(photos, out)
    return out


@pytest.fixture
def source(photos, tmp_path):
    return shutil.copytree(photos, tmp_path / "source")


def examples(path):
    return [read_example(read_record(path, *place, check=True)) for place in index_records(path).tolist()]


def test_every_image_is_in_one_shard_with_its_label(photos, built):
    files = ImageFolder(photos, "train")
    wanted = sorted((files.read(k).encoded, files.read(k).label) for k in range(len(files)))
    records = RecordSet(built, "train", check=True)
    assert sorted((records.read(k).encoded, records.read(k).label) for k in range(len(records))) == wanted
    assert len(records) == 10
    assert records.classes == files.classes == 3
    assert [path.name for path in records.files] == [shard_name("train", k, 3) for k in range(3)]
    assert records.counts.tolist() == [3, 3, 4]


@pytest.mark.parametrize("name", [b"n\n03", b"n\xff03"], ids=["of two lines", "no UTF-8"])
def test_a_class_whose_name_no_line_can_hold_is_refused(source, tmp_path, name):
    (source / "train" / "n02").rename(source / "train" / os.fsdecode(name))
    with pytest.raises(
        DataError, match=r"train: class folder 'n.*03': a name that cannot be printed; rename"
    ):
        build(source, tmp_path / "out")


def test_labels_follow_sorted_synsets_and_are_the_same_in_both_parts(built):
    for path in built.glob("*-of-*"):
        for example in examples(path):
            synset = example["image/class/synset"][0].decode()
            assert example["image/class/label"][0] == {"n01": 1, "n02": 2, "n10": 3}[synset]
    assert (built / "labels.txt").read_text() == "n01\nn02\nn10\n"


def test_records_hold_the_fields_that_other_readers_expect(built):
    (example, *_) = examples(built / "train-00000-of-00003")
    width, height = int(example["image/width"][0]), int(example["image/height"][0])
    assert decode(example["image/encoded"][0]).shape == (height, width, 3)
    assert {name: example[name] for name in ("image/colorspace", "image/format", "image/class/text")} == {
        "image/colorspace": [b"RGB"],
        "image/format": [b"JPEG"],
        "image/class/text": [b""],
    }
    assert example["image/channels"].tolist() == [3]
    assert example["image/filename"][0].endswith(b".JPEG")
    assert all(f"image/object/bbox/{side}" in example for side in ("xmin", "ymin", "xmax", "ymax", "label"))


def test_images_are_shuffled(built):
    labels = [RecordSet(built, "train").read(k).label for k in range(10)]
    assert labels != sorted(labels)


def test_texts_and_boxes_go_into_the_records(source, tmp_path):
    (tmp_path / "texts").write_text("n01\ttench\nn02\tgoldfish, carp\nn10\tshark\nn99\tunused\n")
    (tmp_path / "boxes").write_text("file,xmin,ymin,xmax,ymax\nn02_1.JPEG,.1,.2,.5,.75\nn02_1.JPEG,0,0,1,1\n")
    build(source, tmp_path / "out", texts=tmp_path / "texts", boxes=tmp_path / "boxes")
    records = RecordSet(tmp_path / "out", "train")
    boxes = [records.read(k).boxes for k in range(len(records))]
    (boxed,) = [each for each in boxes if len(each)]
    np.testing.assert_array_equal(boxed, np.array([[0.1, 0.2, 0.5, 0.75], [0, 0, 1, 1]], np.float32))
    texts = {
        example["image/class/text"][0] for path in records.files for example in examples(path)
    }  # fmt: skip
    assert texts == {b"tench", b"goldfish, carp", b"shark"}


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("texts", "n01\ttench\nn10\tshark\n", "no text for 1 of 3 classes, first n02"),
        ("texts", "n01 tench\n", "line 1: expected synset, tab and text"),
        ("boxes", "a,.1,.2,.5,.75\na,.1,.2,.5\n", "line 2: expected file,xmin,ymin,xmax,ymax"),
        ("boxes", "a,.6,.2,.5,.75\n", "line 1: expected file,xmin,ymin,xmax,ymax"),
    ],
)
def test_tables_that_cannot_be_understood_are_named_with_the_line(photos, tmp_path, option, content, message):
    (tmp_path / "table").write_text(content)
    with pytest.raises(DataError, match=f"table: {message}"):
        build(photos, tmp_path / "out", **{option: tmp_path / "table"})


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "PNG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("L", "PNG"), ("P", "PNG")]
)
def test_whatever_is_no_rgb_jpeg_is_repaired_whatever_its_name(source, tmp_path, mode, kind):
    odd = source / "train/n01/n01_1.JPEG"
    odd.write_bytes(encoded(50, 20, 99, mode, kind))
    manifests = build(source, tmp_path / "out")
    assert sum(shard.repaired for shard in manifests["train"].shards.values()) == 1
    records = RecordSet(tmp_path / "out", "train")
    (repaired,) = [
        pixels
        for k in range(len(records))
        if (pixels := decode(records.read(k).encoded)).shape == (20, 50, 3)
    ]
    assert np.abs(repaired.astype(np.int16) - decode(odd.read_bytes())).max() <= 3
    drawn = np.asarray(picture(50, 20, 99, mode).convert("RGB"), np.int16)
    assert np.abs(repaired.astype(np.int16) - drawn).mean() < 8  # not a negative of itself


def test_grey_and_plain_jpegs_are_kept_byte_for_byte(source, tmp_path):
    grey = encoded(50, 20, 99, "L")
    (source / "train/n01/n01_1.JPEG").write_bytes(grey)
    build(source, tmp_path / "out")
    records = RecordSet(tmp_path / "out", "train")
    assert grey in [records.read(k).encoded for k in range(len(records))]


def test_several_processes_write_the_same_bytes(photos, built, tmp_path):
    build(photos, tmp_path, workers=2)
    assert digests(tmp_path) == digests(built)


def test_a_build_goes_on_with_what_is_missing_or_damaged(source, built, tmp_path, monkeypatch):
    build(source, tmp_path / "out")
    (tmp_path / "out/train-00001-of-00003").unlink()
    damaged = tmp_path / "out/validation-00000-of-00002"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    made = []
    plain = build_records.build_shard
    monkeypatch.setattr(
        build_records, "build_shard", lambda skip, task: made.append(task[0].name) or plain(skip, task)
    )
    build(source, tmp_path / "out")
    assert made == ["train-00001-of-00003", "validation-00000-of-00002"]
    assert digests(tmp_path / "out") == digests(built)
    build(source, tmp_path / "out")
    assert len(made) == 2


def test_a_corrupt_image_stops_the_build_by_name_and_skipping_it_continues(source, tmp_path):
    bad = source / "train/n02/n02_2.JPEG"
    bad.write_bytes(bad.read_bytes()[:-150])
    with pytest.raises(DataError, match=r"n02_2\.JPEG: .*truncated.*; skip_corrupt=True"):
        build(source, tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.endswith(".part")]
    before = json.loads((tmp_path / "out/manifest.json").read_text())["parts"]["train"]["shards"]
    manifests = build(source, tmp_path / "out", skip_corrupt=True)
    skipped = [text for shard in manifests["train"].shards.values() for text in shard.skipped]
    assert len(before) < 3
    assert len(RecordSet(tmp_path / "out", "train")) == 9
    assert len(skipped) == 1
    assert "n02_2.JPEG" in skipped[0]
    with pytest.raises(DataError, match=r"n02_2\.JPEG"):  # a set with gaps is not taken for a whole one
        build(source, tmp_path / "out")


def test_text_named_as_an_image_is_no_image(source, tmp_path):
    (source / "val/n01/notes.jpg").write_text("not a picture")
    with pytest.raises(DataError, match=r"notes\.jpg: not a JPEG, PNG, WEBP or BMP image; skip_corrupt=True"):
        build(source, tmp_path / "out")


def test_shards_of_other_images_are_not_mixed(source, tmp_path):
    build(source, tmp_path / "out")
    (source / "train/n01/more.JPEG").write_bytes(encoded(30, 30))
    with pytest.raises(DataError, match="out: holds train shards of other images or options"):
        build(source, tmp_path / "out")


def test_a_class_folder_without_images_is_named(source, tmp_path):
    (source / "train/n03").mkdir()
    (source / "train/n03/readme.txt").write_text("soon")
    with pytest.raises(DataError, match="train/n03: class folder without images"):
        build(source, tmp_path / "out")


def test_a_validation_class_without_training_images_is_named(source, tmp_path):
    shutil.copytree(source / "val/n01", source / "val/n77")
    with pytest.raises(DataError, match="val/n77: class n77 has no training folder"):
        build(source, tmp_path / "out")


def test_more_shards_than_images_are_refused(photos, tmp_path):
    with pytest.raises(DataError, match="5 validation images do not fill 6 shards"):
        build(photos, tmp_path / "out", shards={"train": 1, "validation": 6})


def test_the_default_gives_imagenet_its_usual_shards():
    per_shard = build_records.IMAGES_PER_SHARD
    assert -(-1_281_167 // per_shard["train"]) == 1024
    assert -(-50_000 // per_shard["validation"]) == 128


@pytest.mark.parametrize("instances", [1, 2, 3])
def test_the_shards_of_the_instances_are_disjoint_and_complete(built, instances):
    parts = [RecordSet(built, "train", instance=k, instances=instances) for k in range(instances)]
    read = [part.read(k).encoded for part in parts for k in range(len(part))]
    whole = RecordSet(built, "train")
    assert len(set(read)) == len(read) == len(whole)
    assert set(read) == {whole.read(k).encoded for k in range(len(whole))}


def test_too_many_instances_are_refused(built):
    with pytest.raises(DataError, match="3 train shards cannot be shared by 4 instances"):
        RecordSet(built, "train", instance=0, instances=4)


def test_the_files_of_the_instances_of_an_image_folder_are_disjoint_and_complete(photos):
    parts = [ImageFolder(photos, "train", instance=k, instances=3) for k in range(3)]
    read = [part.read(k).where for part in parts for k in range(len(part))]
    assert len(set(read)) == len(read) == 10


def test_missing_mixed_and_absent_shards_are_told_apart(built, tmp_path):
    some = shutil.copytree(built, tmp_path / "some")
    (some / "train-00001-of-00003").unlink()
    with pytest.raises(DataError, match="1 of 3 train shards are missing, first train-00001-of-00003"):
        RecordSet(some, "train")
    (some / "train-00000-of-00004").write_bytes(b"")
    with pytest.raises(DataError, match="train shards of two sets, of 3 and of 4 files"):
        RecordSet(some, "train")
    with pytest.raises(
        DataError, match="no validation shards; expected files named validation-00000-of-01024"
    ):
        RecordSet(tmp_path, "validation")


@pytest.mark.parametrize("name", ["train-00005-of-00003", "train-00000-of-00000"])
@pytest.mark.parametrize("faults", [None, []])
def test_shards_with_numbers_beyond_their_set_are_none(tmp_path, name, faults):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="no train shards; expected files named train-00000-of-01024"):
        RecordSet(tmp_path, "train", faults=faults)


def test_a_kept_index_is_used_until_a_shard_changes(built, tmp_path, monkeypatch):
    some = shutil.copytree(built, tmp_path / "some", ignore=lambda *_: [".train.index.npz"])
    first = RecordSet(some, "train")
    monkeypatch.setattr("hotloop.data.tfrecord.index_until_fault", lambda path: pytest.fail("read again"))
    assert RecordSet(some, "train").read(7).encoded == first.read(7).encoded
    monkeypatch.undo()
    write_records(some / "train-00000-of-00003", [])
    assert len(RecordSet(some, "train")) == 7
    (some / ".train.index.npz").write_bytes(b"PK\x03\x04 damaged")
    assert len(RecordSet(some, "train")) == 7


def record_set(folder, features):
    write_records(folder / "train-00000-of-00001", [write_example(features)])
    return RecordSet(folder, "train")


@pytest.mark.parametrize("label", [0, -1, 1001])
def test_a_label_out_of_range_is_named_with_its_place(tmp_path, label):
    features = {"image/encoded": [b"x"], "image/class/label": np.array([label])}
    with pytest.raises(DataError, match=rf"of-00001: byte 12: label {label}, expected 1 to 1000"):
        record_set(tmp_path, features).read(0)


@pytest.mark.parametrize("missing", ["image/encoded", "image/class/label"])
def test_a_record_without_image_or_label_is_named_with_its_place(tmp_path, missing):
    features = {"image/encoded": [b"x"], "image/class/label": np.array([1])}
    del features[missing]
    with pytest.raises(DataError, match=f"byte 12: the record has no {missing}"):
        record_set(tmp_path, features).read(0)


def test_a_record_that_is_no_example_is_named_with_its_place(tmp_path):
    write_records(tmp_path / "train-00000-of-00001", [b"", b"\x0a\x05abc"])
    with pytest.raises(DataError, match=r"of-00001: byte \d+: no image record \(field of 5 bytes"):
        RecordSet(tmp_path, "train").read(1)


def test_checking_names_broken_records_and_broken_images(built, tmp_path):
    some = shutil.copytree(built, tmp_path / "some")
    path = some / "train-00001-of-00003"
    start, length = index_records(path)[1].tolist()
    data = bytearray(path.read_bytes())
    data[start + length - 3] ^= 0xFF
    path.write_bytes(data)
    broken = {"image/encoded": [encoded(30, 30)[:300]], "image/class/label": np.array([1])}
    write_records(some / "train-00002-of-00003", [write_example(broken)])
    seen = []
    faults = check_images(RecordSet(some, "train", check=True), decoding=True, workers=1, advance=seen.append)
    assert sum(seen) == 7
    assert len(faults) == 2
    assert f"train-00001-of-00003: byte {start:,}: a record of {length:,} bytes does not match" in faults[0]
    assert "train-00002-of-00003: byte 12: corrupt image" in faults[1]
    assert not check_images(RecordSet(built, "train"), decoding=True, workers=1, advance=seen.append)

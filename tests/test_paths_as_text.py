"""Text and Path are equal in the public interface: whatever takes a path takes both, and answers the same."""

import dataclasses
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from hotloop import data
from hotloop.bench import compare, record, report, result_files
from hotloop.bench.page import Page
from hotloop.cli.command import Context
from hotloop.cli.main import COMMANDS
from hotloop.data import build_records, content, dataset, image_stores, ratings, tfrecord
from hotloop.data import image_stores as folders
from hotloop.data.tfrecord import write_example
from hotloop.engine import measure as reports
from hotloop.engine import run
from hotloop.engine import run as run_records
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.run import Run, read_events
from hotloop.errors import HotloopError, OptionError
from hotloop.families.cnn import prediction, torch_weights
from hotloop.families.cnn import saved_network as cnn_saved
from hotloop.families.recommender import convert
from hotloop.families.recommender import saved_run as recommender_saved
from hotloop.families.vcd import model as vcd_model
from hotloop.families.vcd.samples import write_png
from hotloop.options import options_of
from pictures import encoded, image_folder
from records import index_records, write_records


def idx_file(array):
    return (0x0800 | array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(folder):
    for part, count in (("train", 6), ("t10k", 3)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_file(np.zeros((count, 28, 28), np.uint8)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_file(np.arange(count, dtype=np.uint8)))


def write_record_set(folder):
    features = {"image/encoded": [encoded(8, 8)], "image/class/label": np.array([1])}
    write_records(str(folder / "train-00000-of-00001"), [write_example(features)])
    assert index_records(str(folder / "train-00000-of-00001")).shape == (1, 2)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small file or folder for each reader."""
    root = tmp_path_factory.mktemp("paths")
    write_mnist(root)
    write_record_set(root)
    image_folder(root / "images", {"train": {"a": 1}})
    (root / "a.png").write_bytes(encoded(8, 8, kind="PNG"))
    (root / "a.amat").write_text(" ".join(["1"] * 784) + "\n")
    (root / "a.bin").write_bytes(bytes(3073))
    (root / "u.data").write_text("1\t2\t3\t4\n")
    (root / "r.csv").write_text("1,2,3\n")
    (root / "texts").write_text("a\tan a\n")
    (root / "boxes").write_text("a.png,0,0,1,1\n")
    np.savez(root / "a.npz", a=np.ones(3))
    (root / "mv_1.txt").write_text("1:\n5,3,2005-09-09\n")
    (root / "results.jsonl").write_text('{"benchmark": "b", "variant": "b", "status": "passed"}\n')
    (root / "devices.json").write_text('{"device": "x", "matmul_tflops": {"float32": 1}, "copy_gbps": 1}')
    with Run(str(root / "run"), {"seed": 1}, command="test", environment={}):
        pass
    return root


def text_of(found):
    """What a reader gave, as text that can be compared."""
    if dataclasses.is_dataclass(found):
        return str([text_of(getattr(found, field.name)) for field in dataclasses.fields(found)])
    if isinstance(found, data.Dataset | image_stores.RecordSet | folders.ImageFolder):
        return str(vars(found))
    return str(found)


READERS = {
    "data.load": (lambda path: data.load("mnist", path, say=lambda _: None), "."),
    "data.load_binarised": (lambda path: data.load_binarised(path, say=lambda _: None), "."),
    "data.load_ratings": (lambda path: data.load_ratings(data_dir=path, say=lambda _: None), "."),
    "content.read": (content.read_content, "a.bin"),
    "read_idx": (lambda path: dataset.read_idx(path, 1), "t10k-labels-idx1-ubyte"),
    "read_amat": (dataset.read_amat, "a.amat"),
    "read_cifar": (lambda path: dataset.read_cifar([path], (10,)), "a.bin"),
    "read_u_data": (ratings.read_u_data, "u.data"),
    "read_rating_text": (ratings.read_rating_text, "r.csv"),
    "read_npz": (content.read_npz, "a.npz"),
    "RecordSet": (lambda path: image_stores.RecordSet(path, "train").read(0), "."),
    "is_record_folder": (image_stores.is_record_folder, "."),
    "read_record": (lambda path: tfrecord.read_record(path, 12, 5), "train-00000-of-00001"),
    "ImageFolder": (lambda path: folders.ImageFolder(path, "train").read(0), "images"),
    "is_image_folder": (folders.is_image_folder, "images"),
    "class_names": (folders.class_names, "images"),
    "read_texts": (lambda path: build_records.read_texts(path, ["a"]), "texts"),
    "read_boxes": (build_records.read_boxes, "boxes"),
    "read_json": (run_records.read_json, "run/config.json"),
    "read_events": (lambda path: list(read_events(path)), "run"),
    "config_of": (lambda path: run.read_config(path, "cnn", {"seed": int}), "run"),
    "Checkpoints": (lambda path: Checkpoints(path).steps(), "run"),
    "report.check_writable": (reports.check_report_folder, "report"),
    "results.read": (lambda path: record.read_records([path]), "."),
    "gather": (lambda path: report.gather_sources([path]), "devices.json"),
    "prediction.read": (lambda path: prediction.read_image(path, (8, 8, 3), "cifar10"), "a.png"),
    "convert.read_source": (lambda path: convert.read_source(path, Context()), "mv_1.txt"),
    "cnn.saved.checkpoints_at": (cnn_saved.checkpoints_at, "images"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_text_as_it_takes_a_path(name, place):
    read, file = READERS[name]
    assert text_of(read(str(place / file))) == text_of(read(place / file))


REFUSING = {
    "data.load": lambda path: data.load("mnist", path),
    "baselines.load": compare.load_baselines,
    "vcd.model.load_run": vcd_model.load_run,
    "recommender.saved_run.load_run": recommender_saved.load_run,
    "cnn.saved.about": cnn_saved.read_saved_network,
    "torch_weights.recognise": torch_weights.recognise,
    "read_idx": lambda path: dataset.read_idx(path, 3),
    "read_npz": content.read_npz,
    "shards": lambda path: image_stores.list_shards(path, "train"),
    "class_names": folders.class_names,
    "prediction.read": lambda path: prediction.read_image(path, (8, 8, 3), "cifar10"),
}


@pytest.mark.parametrize("name", REFUSING)
def test_an_error_about_a_path_is_the_same_for_text(name, tmp_path):
    said = []
    for path in (tmp_path / "nothing", str(tmp_path / "nothing")):
        with pytest.raises(HotloopError) as error:
            REFUSING[name](path)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_writers_take_text(tmp_path):
    run_records.write_json(str(tmp_path / "a.json"), {"a": 1})
    run_records.append_line(str(tmp_path / "a.jsonl"), {"a": 1})
    write_png(str(tmp_path / "a.png"), np.zeros((2, 2), np.uint8))
    compare.save_baselines(str(tmp_path / "b.json"), compare.BaselineFile())
    result_files.write_junit(str(tmp_path / "junit.xml"), [])
    Page("title").write(str(tmp_path / "page.html"))
    assert {path.name for path in tmp_path.iterdir()} == {
        *("a.json", "a.jsonl", "a.png", "b.json", "junit.xml", "page.html")
    }


def path_options():
    """(config class, its options that are paths) of every command."""
    todo = [import_module(module).COMMAND for module, _ in COMMANDS.values()]
    seen = {}
    while todo:
        command = todo.pop()
        todo += command.children
        wanted = [each for each in options_of(command.config) if each.kind.element is Path]
        if wanted and command.config.__module__.startswith("hotloop.families."):
            seen[command.config] = wanted
    return seen


@pytest.mark.parametrize(
    "config", path_options(), ids=lambda config: f"{config.__module__}.{config.__name__}"
)
def test_a_config_made_in_python_holds_paths_where_text_was_given(config, tmp_path):
    for option in path_options()[config]:
        needed = {
            each.name: each.kind.choices[0]
            if each.kind.choices
            else (tmp_path,)
            if each.kind.many
            else tmp_path
            for each in options_of(config)
            if each.required
        }
        given = [str(tmp_path)] if option.kind.many else str(tmp_path)
        try:
            made = config(**{**needed, option.name: given})
        except OptionError:
            continue  # this one does not go alone
        held = getattr(made, option.name)
        assert held == ((tmp_path,) if option.kind.many else tmp_path)
        assert all(isinstance(each, Path) for each in (held if option.kind.many else (held,)))

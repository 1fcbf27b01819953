"""build-records, verify and the data benchmark as a user meets them."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from hotloop.data.image_stores import RecordSet
from hotloop.data.jpeg_rows import name_decoder
from hotloop.engine import processes
from hotloop.errors import DataError, OptionError
from hotloop.families.cnn import data_commands
from hotloop.families.cnn.command_options import BenchmarkConfig, BuildConfig, VerifyConfig
from hotloop.families.cnn.data_commands import run_benchmark, run_build, run_verify
from hotloop.families.cnn.photographs import PhotoReader
from listener import Listener
from pictures import image_folder

PARTS = {"train": {"n02": 6, "n01": 5}, "val": {"n01": 4, "n02": 3}}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("photos"), PARTS)


@pytest.fixture(scope="module")
def built(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("built")
    run_build(BuildConfig(photos, out, train_shards=2, workers=1), Listener())
    return out


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("HOTLOOP_DATA", raising=False)


def verify(folder, **options):
    listener = Listener()
    config = VerifyConfig("imagenet", folder, workers=1, **options)
    return run_verify(config, listener), listener


def test_building_says_what_was_made_and_what_was_kept(photos, built):
    listener = Listener()
    result = run_build(BuildConfig(photos, built, train_shards=2, workers=1), listener)
    assert listener.lines[0] == f"{built}: 3 finished shards are whole and are kept"
    assert ["train", "2", "11", "0", "0"] in listener.lines
    assert result["parts"]["validation"] == {"shards": 1, "images": 7, "repaired": 0, "skipped": 0}


def test_building_warns_of_every_image_it_leaves_out(photos, tmp_path):
    source = shutil.copytree(photos, tmp_path / "source")
    (source / "val/n01/n01_2.JPEG").write_bytes(b"")
    listener = Listener()
    result = run_build(BuildConfig(source, tmp_path / "out", skip_corrupt=True, workers=1), listener)
    assert result["parts"]["validation"]["skipped"] == 1
    (warning,) = listener.warnings
    assert "n01_2.JPEG: not a JPEG, " in warning


def test_records_are_not_written_among_the_images(photos):
    with pytest.raises(OptionError, match=r"OUT .*: is the folder of the images"):
        BuildConfig(photos, photos)


def test_verifying_counts_both_parts_and_says_that_it_is_not_the_whole_set(built):
    result, listener = verify(built, decode=True)
    assert {part: each["images"] for part, each in result["parts"].items()} == {"train": 11, "validation": 7}
    assert "train: 11 images, ImageNet has 1,281,167" in listener.warnings
    assert ["train", "11", "1,281,167", "0"] in listener.lines


def test_verifying_an_image_folder_counts_it_too(photos):
    result, _ = verify(photos, decode=True)
    assert {part: each["images"] for part, each in result["parts"].items()} == {"train": 11, "validation": 7}


def test_verifying_finds_a_changed_byte_by_record_and_by_manifest(built, tmp_path):
    some = shutil.copytree(built, tmp_path / "some")
    path = some / "train-00001-of-00002"
    data = bytearray(path.read_bytes())
    data[500] ^= 4
    path.write_bytes(data)
    with pytest.raises(
        DataError, match=r"some: 2 broken, first .*train-00001-of-00002: does not match its sha256"
    ):
        verify(some)
    (some / "manifest.json").unlink()
    with pytest.raises(
        DataError, match=r"some: 1 broken, first .*of-00002: byte 12: a record .* does not match"
    ):
        verify(some)
    assert verify(some, checksums=False)[0]["parts"]["train"]["images"] == 11


def test_verifying_finds_a_truncated_shard_by_its_byte(built, tmp_path):
    some = shutil.copytree(built, tmp_path / "some")
    path = some / "validation-00000-of-00001"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"validation-00000-of-00001: byte [\d,]+: the file ends in a record"):
        verify(some)


def test_verifying_goes_on_after_a_truncated_and_a_missing_shard_and_tells_everything(built, tmp_path):
    some = shutil.copytree(built, tmp_path / "some")
    first, second = sorted(some.glob("train-*"))[:2]
    cut, changed = bytearray(first.read_bytes()), bytearray(second.read_bytes())
    cut[40] ^= 1  # in the first record, which is told though the end is missing
    first.write_bytes(cut[:-5])
    changed[-30] ^= 1
    second.write_bytes(changed)
    validation = some / "validation-00000-of-00001"
    validation.rename(some / "validation-00001-of-00002")
    listener = Listener()
    with pytest.raises(DataError, match=r"some: \d+ broken, first .*train-00000-of-"):
        run_verify(VerifyConfig("imagenet", some, workers=1), listener)
    told = "\n".join(listener.warnings)
    for reason in (
        f"{first.name}: byte [\\d,]+: the file ends in a record",
        f"{first.name}: byte 12: a record of [\\d,]+ bytes does not match its checksum",
        f"{second.name}: byte [\\d,]+: a record of [\\d,]+ bytes does not match its checksum",
        "1 of 2 validation shards are missing, first validation-00000-of-00002",
        "validation-00001-of-00002: not in manifest.json",
    ):
        assert re.search(reason, told), (reason, told)
    with pytest.raises(DataError, match="the file ends in a record"):  # an index of a broken set is not kept
        RecordSet(some, "train")


def test_verifying_misses_a_part_of_which_no_shard_is_left(built, tmp_path):
    some = shutil.copytree(built, tmp_path / "some")
    for path in some.glob("validation-*"):
        path.unlink()
    with pytest.raises(DataError, match=r"some: 1 broken, first .*some: no validation shard is there"):
        verify(some)


def test_verifying_a_set_that_is_not_here_is_an_error_not_a_stand_in(offline):
    with pytest.raises(DataError, match="mnist: not on this machine"):
        run_verify(VerifyConfig("mnist"), Listener())


def test_imagenet_needs_a_path():
    for config in (VerifyConfig, BenchmarkConfig):
        with pytest.raises(OptionError, match="--dataset imagenet: needs --dataset-path"):
            config("imagenet")
    BenchmarkConfig("imagenet", synthetic_data="host")


def test_bytes_need_preprocessing_on_the_device():
    with pytest.raises(OptionError, match="--eight-bit-transfer: needs --accelerator-side-preprocess"):
        BenchmarkConfig(eight_bit_transfer=True)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("source", ["built", "photos"])
def test_the_benchmark_reads_records_and_folders(request, source, split):
    config = BenchmarkConfig(
        "imagenet", request.getfixturevalue(source), 3, num_epochs=2, split=split, pipeline_num_parallel=2
    )
    listener = Listener()
    result = run_benchmark(config, listener)
    assert result["images_per_second"] == result["epochs"][1] > 0
    folder = request.getfixturevalue(source)
    assert result["pipeline"].startswith(f"2 threads, {name_decoder()}, ")
    assert result["pipeline"].endswith(f" at {folder}")
    assert listener.lines[-1].endswith(f"throughput: {result['images_per_second']:.1f} samples/sec")


@pytest.mark.parametrize("synthetic", [None, "host"])
def test_photographs_are_timed_as_training_takes_them_without_normalising_on_the_host(
    photos, monkeypatch, synthetic
):
    """Small sets are still normalised where the device does not do it."""
    normalised = []

    def evaluated(dataset, images):
        normalised.append(dataset)
        return images

    monkeypatch.setattr(data_commands, "preprocess", evaluated)
    config = BenchmarkConfig(
        "imagenet", photos, 3, batches_per_epoch=1, pipeline_num_parallel=1, synthetic_data=synthetic
    )
    run_benchmark(config, Listener())
    assert normalised == []
    run_benchmark(replace(config, dataset="mnist", synthetic_data="host"), Listener())
    assert normalised == ["mnist"]


def test_the_benchmark_drops_at_most_two_epochs_and_counts_images(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(data_commands.time, "perf_counter", lambda: next(clock))
    config = BenchmarkConfig("mnist", None, 8, num_epochs=5, batches_per_epoch=4, synthetic_data="host")
    result = run_benchmark(config, Listener())
    assert result["epochs"] == [32.0] * 5  # four batches of eight, and a second passes between two looks
    assert result["warm_up_epochs"] == 2
    assert run_benchmark(replace(config, num_epochs=1), Listener())["warm_up_epochs"] == 0


def test_synthetic_data_on_the_device_is_taken_as_host_with_a_warning():
    listener = Listener()
    config = BenchmarkConfig("cifar10", None, 2, batches_per_epoch=1, synthetic_data="device")
    assert run_benchmark(config, listener)["pipeline"] == "synthetic on the host"
    assert "taken as host" in listener.warnings[0]


@pytest.mark.parametrize("on_device", [False, True])
def test_the_benchmark_times_small_sets_on_host_and_device(monkeypatch, on_device):
    import numpy as np

    from hotloop.data.dataset import Dataset, LabelledImages

    split = LabelledImages(np.zeros((20, 32, 32, 3), np.uint8), np.zeros(20, np.int32))
    small = Dataset(name="cifar10", source="here", classes=10, train=split, test=split)
    monkeypatch.setattr(data_commands, "load", lambda *_, **__: small)
    config = BenchmarkConfig("cifar10", None, 8, accelerator_side_preprocess=on_device)
    result = run_benchmark(config, Listener())
    assert result["images_per_second"] > 0
    assert result["pipeline"] == ("on the device" if on_device else "on the host")
    with pytest.raises(DataError, match="20 train images do not fill --micro-batch-size 32"):
        run_benchmark(replace(config, micro_batch_size=32), Listener())


def test_the_options_and_the_workers_import_no_jax():
    code = (
        "import sys; import hotloop.families.cnn.command_options; assert 'numpy' not in sys.modules; "
        "import hotloop.families.cnn.photographs, hotloop.data.build_records; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_verifying_a_small_set_counts_it(offline, tmp_path):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name, count in (("data_batch_1.bin", 4), ("test_batch.bin", 2)):
        (folder / name).write_bytes(bytes(3073 * count))
    listener = Listener()
    result = run_verify(VerifyConfig("cifar10", tmp_path), listener)
    assert result["parts"]["train"] == {"images": 4, "expected": 50_000}
    assert "cifar10 test: 2 images, the whole set has 10,000" in listener.warnings
    assert ["train", "4", "50,000"] in listener.lines


def test_several_processes_read_shares_of_each_batch_and_add_up_their_speeds(built, monkeypatch):
    """Process 1 of 2, the other of which read 1,000 images a second."""
    read = []
    plain = PhotoReader.image

    def watched(reader, number, epoch=0):
        read.append(number)
        return plain(reader, number, epoch)

    monkeypatch.setattr(PhotoReader, "image", watched)
    config = BenchmarkConfig("imagenet", built, micro_batch_size=2, workers="threads")
    run_benchmark(config, Listener())
    whole, read[:] = sorted(read), []
    monkeypatch.setattr(processes, "count", lambda: 2)
    shares = []
    for index in (0, 1):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        monkeypatch.setattr(
            processes, "gathered", lambda value: [value, 1000.0 if isinstance(value, float) else value]
        )
        listener = Listener()
        result = run_benchmark(config, listener)
        shares += read
        read.clear()
        assert result["processes"] == 2 and result["images_per_second"] > 1000
        assert "2 processes together: throughput: " in listener.lines[-1]
    # Eleven images are five batches of two, or two of four.
    assert len(whole) == 10 and len(shares) == len(set(shares)) == 8

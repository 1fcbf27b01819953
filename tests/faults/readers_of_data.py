"""Readers of data: sets, ratings, images, records, archives, weights."""

import gzip
import hashlib
import io
import json
import os
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from readers import Read, Reader, in_file

from hotloop.data import build_records, content, dataset, image_stores, ratings, tfrecord
from hotloop.data.build_records import Shard, read_manifest, shard_fault
from hotloop.data.catalogue import Download, KnownFile
from hotloop.data.fetch import no_progress, unpack
from hotloop.data.image_stores import EncodedImage, ImageFolder
from hotloop.data.jpeg import ImageError, check_image, decode
from hotloop.data.load import load
from hotloop.data.tfrecord import index_shards, write_example
from hotloop.families.cnn import prediction, torch_weights
from hotloop.families.cnn.photographs import evaluation_image, training_image
from hotloop.families.recommender import convert
from pictures import encoded
from records import write_records


def idx_bytes(array: np.ndarray) -> bytes:
    return (0x0800 | array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def archive(pack: Callable[[io.BytesIO], None]) -> bytes:
    out = io.BytesIO()
    pack(out)
    return out.getvalue()


def as_zip(method: int) -> Callable[[io.BytesIO], None]:
    def pack(out: io.BytesIO) -> None:
        with zipfile.ZipFile(out, "w", method) as packed:
            packed.writestr("a/one.bin", "hello")
            packed.writestr("../two.bin", "hello " * 20)

    return pack


def as_tar(kind: str) -> Callable[[io.BytesIO], None]:
    def pack(out: io.BytesIO) -> None:
        with tarfile.open(fileobj=out, mode=kind) as packed:
            info = tarfile.TarInfo("a/one.bin")
            info.size = 5
            packed.addfile(info, io.BytesIO(b"hello"))

    return pack


def of_data() -> list[Reader]:
    images = idx_bytes(np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28))
    labels = idx_bytes(np.array([1, 2], np.uint8))
    bits = b" ".join([b"1", b"0"] * 392) + b"\n"
    member = KnownFile(
        "one.bin",
        5,
        "sha256:" + hashlib.sha256(b"hello").hexdigest(),
        Download("x", (), 5, "sha256:0"),
        "a/one.bin",
    )
    photographs = [encoded(20, 15, kind=kind) for kind in ("JPEG", "PNG", "WEBP", "BMP")]
    photographs += [encoded(9, 8, mode=mode) for mode in ("L", "CMYK")]
    photographs += [encoded(9, 8, mode=mode, kind="PNG") for mode in ("L", "P", "1")]
    sides = {
        f"image/object/bbox/{side}": np.array([0.1], np.float32) for side in ("xmin", "ymin", "xmax", "ymax")
    }
    example = write_example({"image/encoded": [photographs[0]], "image/class/label": np.array([3]), **sides})
    shard = "train-00000-of-00001"
    names = [
        "fc.bias",
        *(f"layer{stage}.{block}.conv1.weight" for stage in range(1, 5) for block in range(2)),
    ]
    tensors = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * at, 8 * at + 8]}
        for at, name in enumerate(names)
    }
    header = json.dumps(tensors).encode()
    safe = len(header).to_bytes(8, "little") + header + bytes(8 * len(names))
    finished = {"bytes": 5, "sha256": "0", "records": 1, "repaired": 0, "skipped": ["x"]}
    part = {"plan": "p", "images": 1, "total": 1, "shards": {shard: finished}}
    manifest = json.dumps({"program": "hotloop", "format": 1, "parts": {"train": part}}).encode()
    text = [
        b"1\t2\t3\t4\n5\t6\t1\t8\n",
        b"1,2,3.5\n4,5,1e0\n",
        b"1::2::3::978300760\n",
        b"userId,movieId,rating\n1,2,3\n",
    ]
    raw = [b"1:\n5,3,2005-09-09\n6,4,2004-01-02\n2:\n7,1,1999-12-31\n"]

    def mnist(folder: Path, data: bytes) -> object:
        for part in ("train", "t10k"):
            (folder / f"{part}-images-idx3-ubyte").write_bytes(data if part == "train" else images)
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
        return load("mnist", folder, say=lambda _: None)

    def cifar_of(*labels: int) -> Callable[[Path], object]:
        return lambda file: dataset.read_cifar([file], labels)

    def unpacked(name: str) -> Read:
        return in_file(name, lambda file: unpack(file, [member], file.parent))

    def record_set(folder: Path, data: bytes) -> None:
        (folder / shard).write_bytes(data)
        for check in (False, True):
            found = image_stores.RecordSet(folder, "train", check=check)
            for number in range(min(len(found), 3)):
                trained(found.read(number))

    def one_example(folder: Path, data: bytes) -> None:
        write_records(folder / shard, [data])
        trained(image_stores.RecordSet(folder, "train").read(0))

    def kept_index(folder: Path, data: bytes) -> None:
        write_records(folder / shard, [b"hello"])
        (folder / ".train.index.npz").write_bytes(data)
        _, index = index_shards([folder / shard], folder / ".train.index.npz")
        assert tfrecord.read_record(folder / shard, *index[0].tolist()) == b"hello"

    def image_set(folder: Path, name: str, data: bytes) -> None:
        (folder / "train" / name).mkdir(parents=True)
        (folder / "train" / name / f"{name}.png").write_bytes(data)
        ImageFolder(folder, "train").read(0)

    def named_set(folder: Path, data: bytes) -> None:
        name = os.fsdecode(bytes(byte for byte in data[:40] if byte not in b"\0/")) or "x"
        if name not in (".", ".."):
            image_set(folder, name, photographs[0])

    def picture(folder: Path, data: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pillow's own about odd metadata
            with suppress(ImageError):
                check_image(data)
            decode(data)

    def trained(image: EncodedImage) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training_image(image, np.random.default_rng(0), 32)
            evaluation_image(image, 32)

    def predicted(file: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prediction.read_image(file, (224, 224, 3), "imagenet")

    def texts(file: Path) -> object:
        return build_records.read_texts(file, ["a"])

    def manifests(file: Path) -> None:
        for each in read_manifest(file.parent).values():
            [shard_fault(file.parent / "x", one) for one in each.shards.values() if isinstance(one, Shard)]

    def netflix_files(file: Path) -> object:
        console = type("Console", (), {"progress": staticmethod(no_progress)})()
        return convert.read_netflix([file], console)

    arrays = archive(lambda out: np.savez(out, a=np.arange(3), names=np.array(["x", "yz"])))
    index = archive(
        lambda out: np.savez(
            out,
            names=np.array([shard]),
            stamps=np.zeros((1, 2), np.int64),
            counts=np.array([1]),
            index=np.array([[12, 5]]),
        )
    )
    return [
        Reader("MNIST", [images, gzip.compress(images)], mnist),
        Reader("idx", [labels, gzip.compress(labels)], in_file("x", lambda file: dataset.read_idx(file, 1))),
        Reader("amat", [bits, gzip.compress(bits)], in_file("x", dataset.read_amat)),
        Reader("CIFAR-10", [bytes(3073) * 2, gzip.compress(bytes(3073))], in_file("x", cifar_of(10))),
        Reader("CIFAR-100", [bytes(3074) * 2], in_file("x", cifar_of(20, 100))),
        Reader("u.data", [text[0], gzip.compress(text[0])], in_file("u.data", ratings.read_u_data)),
        Reader("files of ratings", [*text, gzip.compress(text[1])], in_file("ratings.csv", ratings.read_rating_text)),
        Reader("the Netflix Prize", raw, in_file("mv_1.txt", netflix_files)),
        Reader("npz", [arrays], in_file("a.npz", content.read_npz)),
        Reader("a kept index", [index, arrays], kept_index),
        Reader("zip archives", [archive(as_zip(method)) for method in (0, 8, 14)], unpacked("toy.zip")),
        Reader("tar archives", [archive(as_tar(kind)) for kind in ("w", "w:gz", "w:xz")], unpacked("toy.tar.gz")),
        Reader("TFRecords", [tfrecord.encode_record(example) * 2], record_set, (ImageError,)),
        Reader("examples", [example], one_example, (ImageError,)),
        Reader("images", photographs, picture, (ImageError,)),
        Reader("images to train on", photographs, lambda _, data: trained(EncodedImage(data, 0, "")), (ImageError,)),
        Reader("images to predict", photographs, in_file("a.jpeg", predicted)),
        Reader("image folders", photographs[:1], lambda folder, data: image_set(folder, "n01", data)),
        Reader("names of classes", [b"n01", "caf\u00e9".encode()], named_set),
        Reader("texts of classes", [b"a\tan a\nb\ta b\n"], in_file("x", texts)),
        Reader("boxes", [b"file,xmin\na.png,0,0.1,0.5,1\n"], in_file("x", build_records.read_boxes)),
        Reader("manifests of shards", [manifest], in_file("manifest.json", manifests)),
        Reader("safetensors", [safe], in_file("a.safetensors", torch_weights.recognise)),
    ]  # fmt: skip

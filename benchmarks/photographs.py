"""What a photograph costs on its way to a batch: python benchmarks/photographs.py [--json FILE] [--images N].

JPEGs of 500x375 are made up: noise on soft colours, and noise with the spectrum of photographs in two qualities. Each
way to a training or validation image, and each part of it, takes turns with the others on one core; printed are
milliseconds of processor time an image (other work on the machine touches them less than wall time) with the range of
the rounds, and images a second of a core. `before` is this program until 8c93971: pillow decodes the whole image, cuts
it and resamples it by its `transform`. Then two worker processes read training images, their start left out, and last
comes the hand-over from workers, of images that cost nothing.
"""

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent / "peers"))

import numpy as np
from common import load_before, save
from numpy.typing import NDArray
from PIL import Image

from hotloop.data import jpeg_rows
from hotloop.data.image_stores import EncodedImage, no_boxes
from hotloop.data.jpeg import Pixels, decode, open_image
from hotloop.data.resample import SamplingGrid, resample
from hotloop.families.cnn.photographs import (
    SIZE,
    PhotoReader,
    Workers,
    evaluation_image,
    grid_of_middle,
    random_crop,
    training_image,
)

WIDTH, HEIGHT = 500, 375
CARD = 7_800  # images/s that one H200 trains of ResNet-50
Work = Callable[[int, bytes], object]  # number of an image, and its bytes


def soft_noise(seed: int) -> bytes:
    """Noise on soft colours, about 90 KB: as the records of docs/results.md."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
    return as_jpeg(smooth + generator.integers(-14, 15, smooth.shape), 95)


def like_a_photograph(seed: int, power: float, quality: int) -> bytes:
    """Amplitudes that fall with the frequency to a power, colours that go together: as photographs have them."""
    generator = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    frequency[0, 0] = 1
    white = np.fft.rfft2(generator.standard_normal((3, HEIGHT, WIDTH)))
    planes = np.fft.irfft2(white / frequency**power, (HEIGHT, WIDTH))
    planes /= planes.std(axis=(1, 2), keepdims=True)
    colours = np.stack([planes[0], *(0.85 * planes[0] + 0.5 * planes[1:])], axis=-1)
    return as_jpeg(120 + 60 * colours, quality)


def as_jpeg(pixels: NDArray[Any], quality: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=quality)
    return out.getvalue()


SETS: Mapping[str, Callable[[int], bytes]] = {
    "noise on soft colours": soft_noise,
    "like photographs, quality 95": partial(like_a_photograph, power=1.35, quality=95),
    "like photographs, quality 85": partial(like_a_photograph, power=1.5, quality=85),
}


def train(number: int, encoded: bytes) -> Pixels:
    return training_image(EncodedImage(encoded, 0, ""), np.random.default_rng((0, 0, number)), SIZE).astype(
        np.uint8
    )


def evaluate(number: int, encoded: bytes) -> Pixels:
    return evaluation_image(EncodedImage(encoded, 0, ""), SIZE).astype(np.uint8)


def by_pillow(work: Work, number: int, encoded: bytes) -> object:
    """The same as where simplejpeg is not installed."""
    with patch.object(jpeg_rows, "find_simplejpeg", lambda: None):
        return work(number, encoded)


def train_before(number: int, encoded: bytes) -> Pixels:
    opened = open_image(encoded)
    generator = np.random.default_rng((0, 0, number))
    crop = random_crop(generator, *opened.size, no_boxes())
    mirrored = bool(generator.integers(2))
    cut = opened.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
    return transform(cut, SamplingGrid(0, 0, crop.width / SIZE, crop.height / SIZE), mirrored)


def evaluate_before(number: int, encoded: bytes) -> Pixels:
    opened = open_image(encoded)
    return transform(opened, grid_of_middle(*opened.size, SIZE), False)


def transform(image: Image.Image, grid: SamplingGrid, mirrored: bool) -> Pixels:
    """By pillow: the floats truncated."""
    step_x = -grid.step_x if mirrored else grid.step_x
    first_x = grid.left + (SIZE - 1) * grid.step_x if mirrored else grid.left
    affine = (step_x, 0, first_x + 0.5 - step_x / 2, 0, grid.step_y, grid.top + 0.5 - grid.step_y / 2)
    result = image.transform((SIZE, SIZE), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    return np.asarray(result)


WAYS: Mapping[str, Work] = {
    "training, before": train_before,
    "training": train,
    "training, pillow alone": partial(by_pillow, train),
    "validation, before": evaluate_before,
    "validation": evaluate,
    "validation, pillow alone": partial(by_pillow, evaluate),
}


def parts(sample: bytes) -> Mapping[str, Work]:
    """Where the time goes; cutting and resampling are those of a part of 300x280."""
    pixels = decode(sample)[40:320, 100:400]
    image, grid = Image.fromarray(pixels), SamplingGrid(0, 0, 300 / SIZE, 280 / SIZE)
    ways: dict[str, Work] = {
        "header read by pillow": lambda number, encoded: open_image(encoded),
        "crop drawn": lambda number, encoded: random_crop(
            np.random.default_rng((0, 0, number)), WIDTH, HEIGHT, no_boxes()
        ),
        "whole image, pillow": lambda number, encoded: decode(encoded),
        "height changed": lambda number, encoded: jpeg_rows.shorten(encoded, HEIGHT // 2),
        "resampled": lambda number, encoded: resample(pixels, grid, SIZE).astype(np.uint8),
        "resampled by pillow's transform": lambda number, encoded: transform(image, grid, False),
        "averaged by pillow's resize": lambda number, encoded: np.asarray(
            image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        ),
    }
    if module := jpeg_rows.find_simplejpeg():
        ways["whole image, simplejpeg"] = lambda number, encoded: module.decode_jpeg(encoded)
        # An eighth of each side needs every code, and next to nothing of what follows.
        ways["entropy coding, simplejpeg"] = lambda number, encoded: module.decode_jpeg(
            encoded, min_width=-(-WIDTH // 8), min_height=-(-HEIGHT // 8)
        )
    return ways


def take_turns(ways: Mapping[str, Work], images: Sequence[bytes], rounds: int) -> list[dict[str, Any]]:
    """A row for each way: milliseconds an image, of the processor and of the clock."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, work in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for number, encoded in enumerate(images):
                work(number, encoded)
            if turn:  # the first warms up
                spent = (time.process_time() - cpu, time.perf_counter() - wall)
                times[name].append((1e3 * spent[0] / len(images), 1e3 * spent[1] / len(images)))
    return [summarise(name, *zip(*values, strict=True)) for name, values in times.items()]


def summarise(name: str, cpu: Sequence[float], wall: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(cpu)
    return {
        "way": name,
        "cpu_ms": middle,
        "cpu_ms_low": min(cpu),
        "cpu_ms_high": max(cpu),
        "wall_ms": statistics.median(wall),
        "images_per_cpu_s": 1e3 / middle,
        "cores_for_a_card": CARD * middle / 1e3,
    }


def differences(images: Sequence[bytes]) -> dict[str, dict[str, float]]:
    """How far the bytes of both phases are from those before: the largest difference, and the share that differs."""
    found = {}
    for phase, now, before in (
        ("training", train, train_before),
        ("validation", evaluate, evaluate_before),
    ):
        each = [
            np.abs(now(number, encoded).astype(np.int16) - before(number, encoded))
            for number, encoded in enumerate(images)
        ]
        found[phase] = {"largest": int(np.max(each)), "share": float(np.mean(np.asarray(each) > 0))}
    return found


class Kept:
    """A store of images in memory."""

    def __init__(self, images: Sequence[bytes]):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def read(self, number: int) -> EncodedImage:
        return EncodedImage(self.images[number], 0, "here")


class FreeImages(PhotoReader):
    """Images that cost nothing."""

    def image(self, number: int, epoch: int = 0) -> tuple[NDArray[Any], int]:
        return np.zeros((), np.uint8), 0


def through_workers(reader: PhotoReader, kind: str, epochs: int) -> NDArray[np.float64]:
    """Seconds of the children, of this process, of the clock; page faults of the children."""
    numbers = np.arange(len(reader.store))
    before, cpu, wall = getrusage(RUSAGE_CHILDREN), time.process_time(), time.perf_counter()
    with Workers(reader, 2, kind) as workers:  # type: ignore[arg-type]
        for _ in workers.batches((numbers, np.full_like(numbers, epoch)) for epoch in range(epochs)):
            pass
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = getrusage(RUSAGE_CHILDREN)
    children = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return np.array([children, cpu, wall, after.ru_minflt - before.ru_minflt])


def without_start(reader: PhotoReader, kind: str, epochs: int) -> NDArray[np.float64]:
    """The same for an image: a long run less a short one."""
    short = through_workers(reader, kind, 2)
    return (through_workers(reader, kind, 2 + epochs) - short) / (epochs * len(reader.store))


def in_processes(images: Sequence[bytes], rounds: int) -> dict[str, Any]:
    """Training images by two worker processes: what both cost together, for an image."""
    reader = PhotoReader(Kept(images), training=True)  # type: ignore[arg-type]
    spent = np.array([without_start(reader, "processes", 10) for _ in range(rounds)])
    row = summarise("training, in worker processes", *(1e3 * spent[:, column] for column in (0, 2)))
    return row | {"page_faults": statistics.median(spent[:, 3])}


def hand_over(kind: str, epochs: int) -> dict[str, Any]:
    """Microseconds of the main process for an image."""
    reader = FreeImages(range(256), training=True)  # type: ignore[arg-type]
    return {"way": f"hand-over, {kind}", "cpu_us": 1e6 * without_start(reader, kind, epochs)[1]}


def show(row: Mapping[str, Any]) -> None:
    ends = f"({row['cpu_ms_low']:.2f} to {row['cpu_ms_high']:.2f})"
    rate = (
        f"{row['images_per_cpu_s']:8,.0f} images/s a core, {row['cores_for_a_card']:5.1f} cores for {CARD:,}"
    )
    print(
        f"  {row['way']:32} {row['cpu_ms']:6.2f} ms {ends:16} wall {row['wall_ms']:6.2f} {rate}", flush=True
    )


def main(arguments: list[str]) -> int:
    options, load = parsed(arguments), load_before()
    rows, changed = [], {}
    for name, make in SETS.items():
        images = [make(seed) for seed in range(options.images)]
        size = statistics.mean(map(len, images))
        print(f"{name}, {WIDTH}x{HEIGHT}, {size / 1e3:.0f} KB; {jpeg_rows.name_decoder()}")
        for row in take_turns({**WAYS, **parts(images[0])}, images, options.rounds):
            rows.append({"set": name, "bytes": size, **row})
            show(row)
        changed[name] = differences(images)
        for phase, found in changed[name].items():
            print(
                f"  {phase}: differs from before by {found['largest']} at most, {found['share']:.3%} of values"
            )
        row = in_processes(images, max(1, options.rounds // 2))
        rows.append({"set": name, "bytes": size, **row})
        show(row)
    for kind in ("threads", "processes"):
        row = hand_over(kind, options.images)
        rows.append(row)
        print(f"{row['way']}: {row['cpu_us']:.0f} us of the main process an image")
    if options.json:
        about = {"load_before": f"{load:.2f}", "decoder": jpeg_rows.name_decoder(), "differences": changed}
        save(options.json, about, rows)
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64, help="of each set")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--quick", action="store_true", help="two images, one round: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.images, options.rounds = 2, 1
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

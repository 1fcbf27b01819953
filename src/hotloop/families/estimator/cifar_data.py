"""The example's images: CIFAR-10, its stand-in, or random ones for timing; and how many they would be."""

import numpy as np

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import IMAGE_SETS, Dataset, LabelledImages, read_images
from hotloop.data.load import load as load_set
from hotloop.data.local_files import find_set, is_loadable
from hotloop.engine.progress import Console
from hotloop.families.estimator.cifar_config import Cifar

NAME = "cifar10"
SHAPE, CLASSES = (32, 32, 3), 10


def load(config: Cifar, console: Console) -> Dataset:
    """What is trained and tested on; where it comes from is said."""
    if config.generated_data:
        made = generated(config.seed)
        console.say(f"data: {len(made.train):,} + {len(made.test):,} random images with random labels")
        return made
    with console.progress("loading images"):
        return load_set(NAME, config.dataset_path, console.say, console.progress)


def generated(seed: int) -> Dataset:
    """As many random images and labels as CIFAR-10 has; nothing can be learnt from them."""
    generator = np.random.default_rng(seed)
    train, test = (
        LabelledImages(
            generator.integers(0, 256, (count, *SHAPE), np.uint8),
            generator.integers(0, CLASSES, count, np.int32),
        )
        for count in IMAGE_SETS[NAME]
    )
    return Dataset(name="generated", source="random", classes=CLASSES, train=train, test=test)


def training_images(config: Cifar) -> int:
    """How many there are where the files are here already, else how many CIFAR-10 has: nothing is fetched."""
    known = known_set(NAME)
    found = None if config.generated_data else find_set(known, config.dataset_path)
    if found and is_loadable(known, found):
        return len(read_images(known, found).train)
    return IMAGE_SETS[NAME][0]

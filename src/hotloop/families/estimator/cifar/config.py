"""Three ways to train the example's network, as data: the rule, its rate, the augmentation, the length.

What a recipe says about options of the command line is their default there; the rest is the recipe's alone. The
functions that the words stand for are in `cifar_model` and `cifar_images`. No jax.

The options of `hotloop estimator`, with the old example's names and defaults, and those it had not.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from hotloop.errors import OptionError
from hotloop.options import non_negative, option, positive, validate

Rule = Literal["sgd", "rmsprop", "adam"]
Augmentation = Literal["none", "shift", "crop"]


@dataclass(frozen=True)
class Recipe:
    """One way to train."""

    rule: Rule = "sgd"
    learning_rate: float = 0.01
    batch_size: int = 32
    epochs: Fraction = Fraction(100)
    augmentation: Augmentation = "none"
    smoothing: float = 0.0
    """Of the labels in training; the test loss has none."""
    rate_decay: float = 0.0
    """The rate is divided by 1 + so much for each update before it."""
    peak: float | None = None
    """Share of the run at which the rate, growing from 0, is highest, to fall to 0 at its end; none: it stays."""
    half: bool = False
    """On an accelerator, compute in bfloat16 unless another precision is asked for."""
    expect: str = ""


RECIPES: dict[str, Recipe] = {
    # What the estimator's example always did.
    "reference": Recipe(),
    # Keras' own cifar10_cnn.py, whose page promises the accuracies; its shifts are whole pixels here.
    "keras": Recipe(
        rule="rmsprop",
        learning_rate=1e-4,
        rate_decay=1e-6,
        augmentation="shift",
        expect="test accuracy about 75 % after 25 epochs, 79 % after 50",
    ),
    "fast": Recipe(
        rule="adam",
        learning_rate=2e-3,
        batch_size=512,
        epochs=Fraction(25),
        augmentation="crop",
        smoothing=0.1,
        peak=0.2,
        half=True,
    ),
}
RECIPE_OPTIONS = ("learning_rate", "batch_size", "epochs")
"""What a recipe sets that may also be given on the command line."""
PRESETS: dict[str, dict[str, Any]] = {
    name: {"recipe": name, **{option: getattr(recipe, option) for option in RECIPE_OPTIONS}}
    for name, recipe in RECIPES.items()
}

TRAINING, TESTING, DATA, DEVICES, RECORDS = "Training", "Testing", "Data", "Devices", "Records"
REFERENCE = RECIPES["reference"]


@dataclass(frozen=True)
class CifarTraining:
    """What decides the weights."""

    recipe: Literal["reference", "keras", "fast"] = option(
        "reference",
        "reference: SGD, no augmentation; keras: RMSprop, shifts and flips; fast: Adam in one cycle, crops and flips, "
        "batches of 512, 25 epochs. Sets the next three unless they are given.",
        group=TRAINING,
    )
    batch_size: int = option(
        REFERENCE.batch_size,
        "Images of a weight update, over all replicas and parts.",
        check=positive,
        group=TRAINING,
    )
    epochs: Fraction = option(
        REFERENCE.epochs,
        "Passes over the training images, in all runs of --model-dir; 0.5 or 1/2 is half of one.",
        check=positive,
        group=TRAINING,
    )
    learning_rate: float = option(
        REFERENCE.learning_rate,
        "Step of the recipe's rule; its highest, where it changes.",
        check=positive,
        group=TRAINING,
    )
    batches_per_step: int = option(
        100,
        "Weight updates of one compiled call; raise it until images/s stands still, the result is the same.",
        check=positive,
        group=TRAINING,
    )
    precision: Literal["32.32", "16.32", "16.16"] | None = option(
        None,
        "Bits of the computation and of the weights between updates, 16 being bfloat16; left out, 32.32, and 16.32 "
        "for the fast recipe on an accelerator.",
        group=TRAINING,
    )
    seed: int = option(1, "Seed of weights, order and all draws.", check=non_negative, group=TRAINING)


@dataclass(frozen=True)
class CifarConfig(CifarTraining):
    """All of `hotloop estimator`."""

    test_only: bool = option(False, "Do not train: test the newest checkpoint of --model-dir.", group=TESTING)
    train_only: bool = option(False, "Do not test at the end.", group=TESTING)
    evaluate_every: Fraction | None = option(
        None,
        "Also test and save every so many epochs, and tell when 75 % were reached.",
        metavar="EPOCHS",
        check=positive,
        group=TESTING,
    )
    generated_data: bool = option(
        False, "Random images and labels, 50,000 to train and 10,000 to test with: for timing.", group=DATA
    )
    dataset_path: Path | None = option(
        None,
        "Folder with CIFAR-10's files; left out, they are looked for and fetched.",
        metavar="DIR",
        aliases=("--data-dir",),
        group=DATA,
    )
    replicas: int = option(1, "Devices that share each batch.", check=positive, group=DEVICES)
    gradient_accumulation_count: int = option(
        1,
        "Parts that each replica makes of its share of a batch, one after the other: less memory, the same update.",
        aliases=("--gradient-accumulation",),
        check=positive,
        group=DEVICES,
    )
    model_dir: Path | None = option(
        None,
        "Folder of checkpoints and records; a run goes on with what is there. Left out, a new one in --results-dir.",
        metavar="DIR",
        group=RECORDS,
    )
    results_dir: Path = option(
        Path("results"), "Folder in which runs get theirs where --model-dir is left out.", group=RECORDS
    )
    log_interval: float = option(
        3.0, "Seconds between logs, at most one a call.", check=positive, group=RECORDS
    )
    summary_interval: int | None = option(
        1,
        "Weight updates between TensorBoard summaries, at most one a call; none: no summaries.",
        check=positive,
        group=RECORDS,
    )
    report: Path | None = option(
        None,
        "Write the compiler's report and a profile to this folder, training and evaluation apart.",
        metavar="DIR",
        group=RECORDS,
    )
    plan: bool = option(False, "Say what would run, and stop.", group=RECORDS)

    def __post_init__(self) -> None:
        validate(self)
        if self.test_only and self.train_only:
            raise OptionError("--test-only --train-only: together they leave nothing to do; keep one of them")
        if self.test_only and self.model_dir is None:
            raise OptionError("--test-only: needs --model-dir, the folder of a trained model")
        parts = self.replicas * self.gradient_accumulation_count
        if self.batch_size % parts:
            raise OptionError(
                f"--batch-size {self.batch_size}: does not fall into {self.replicas} replicas x "
                f"{self.gradient_accumulation_count} parts; take a multiple of {parts}"
            )

    @property
    def chosen(self) -> Recipe:
        """The recipe itself."""
        return RECIPES[self.recipe]

    def updates(self, images: int, epochs: Fraction | None = None) -> int:
        """Weight updates of all epochs together, or of so many, rounded down once."""
        return int((self.epochs if epochs is None else epochs) * images / self.batch_size)

    def total_updates(self, images: int) -> int:
        """Weight updates of the run; an OptionError where there would be none, or not even one batch."""
        if self.batch_size > images:
            raise OptionError(f"--batch-size {self.batch_size}: there are only {images:,} training images")
        if not (updates := self.updates(images)):
            raise OptionError(
                f"--epochs {float(self.epochs):g}: of {images:,} images is less than one batch of {self.batch_size}"
            )
        return updates

    def evaluation_period(self, images: int) -> int | None:
        """Weight updates between evaluations; None where there are none before the end."""
        every = self.evaluate_every
        return None if every is None else max(1, self.updates(images, every))

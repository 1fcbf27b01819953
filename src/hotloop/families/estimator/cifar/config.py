"""The options of `hotloop estimator`, by the old example's names, and its recipes: ways to train, as data. A recipe has
defaults of options, and the command line wins over it. No jax."""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hotloop.errors import OptionError
from hotloop.options import Options, non_negative, option, positive


@dataclass(frozen=True)
class Recipe:
    rule: Literal["sgd", "rmsprop", "adam"] = "sgd"
    learning_rate: float = 0.01
    batch_size: int = 32
    epochs: Fraction = Fraction(100)
    augmentation: Literal["none", "shift", "crop"] = "none"
    smoothing: float = 0.0  # of the labels in training; the test loss has none
    rate_decay: float = 0.0  # the rate is divided by 1 + so much for each update before it
    peak: float | None = (
        None  # share of the run at which the rate, growing from 0, is highest; none: it stays
    )
    network: Literal["keras", "tf2"] = "keras"
    half: bool = False  # on an accelerator, compute in bfloat16 unless another precision is asked for
    expect: str = ""


# Layers of each network's list; a cut comes after the first at the earliest and before the last at the latest.
LAYERS = {"keras": 17, "tf2": 18}
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
    # The IPU's later examples (TensorFlow 2), whose test asks for 81 +- 6 %; their network has a convolution more.
    "tf2": Recipe(
        batch_size=16, epochs=Fraction(150), network="tf2", expect="test accuracy between 75 and 87 %"
    ),
}
RECIPE_OPTIONS = ("learning_rate", "batch_size", "epochs")  # that may also be given on the command line
PRESETS: dict[str, dict[str, Any]] = {
    name: {"recipe": name, **{option: getattr(recipe, option) for option in RECIPE_OPTIONS}}
    for name, recipe in RECIPES.items()
}
REFERENCE = RECIPES["reference"]

_training, _testing, _data, _devices, _records = (
    partial(option, group=group) for group in ("Training", "Testing", "Data", "Devices", "Records")
)


@dataclass(frozen=True)
class CifarConfig(Options):
    recipe: Literal["reference", "keras", "fast", "tf2"] = _training(
        "reference",
        "reference: SGD, no augmentation; keras: RMSprop, shifts and flips; fast: Adam in one cycle, crops and flips, "
        "batches of 512, 25 epochs; tf2: as reference, with one more convolution, batches of 16, 150 epochs. Sets the "
        "next three unless they are given.",
    )
    batch_size: int = _training(
        REFERENCE.batch_size, "Images of a weight update, over all replicas and parts.", check=positive
    )
    epochs: Fraction = _training(
        REFERENCE.epochs,
        "Passes over the training images, in all runs of --model-dir; 0.5 or 1/2 is half of one.",
        check=positive,
    )
    learning_rate: float = _training(
        REFERENCE.learning_rate, "Step of the recipe's rule; its highest, where it changes.", check=positive
    )
    batches_per_step: int = _training(
        100,
        "Weight updates of one compiled call; raise it until images/s stands still, the result is the same.",
        check=positive,
    )
    precision: Literal["32.32", "16.32", "16.16"] | None = _training(
        None,
        "Bits of the computation and of the weights between updates, 16 being bfloat16; left out, 32.32, and 16.32 "
        "for the fast recipe on an accelerator.",
    )
    seed: int = _training(1, "Seed of weights, order and all draws.", check=non_negative)
    test_only: bool = _testing(False, "Do not train: test the newest checkpoint of --model-dir.")
    train_only: bool = _testing(False, "Do not test at the end.")
    evaluate_every: Fraction | None = _testing(
        None,
        "Also test and save every so many epochs, and tell when 75 % were reached.",
        metavar="EPOCHS",
        check=positive,
    )
    generated_data: bool = _data(
        False, "Random images and labels, 50,000 to train and 10,000 to test with: for timing."
    )
    dataset_path: Path | None = _data(
        None,
        "Folder with CIFAR-10's files; left out, they are looked for and fetched.",
        metavar="DIR",
        aliases=("--data-dir",),
    )
    replicas: int = _devices(
        1, "Devices, or pairs of them with --model-shard-position, that share each batch.", check=positive
    )
    ipus: int | None = _devices(
        None,
        "Devices in all, as the older scripts count them: so many replicas, or half as many of two stages each with "
        "--model-shard-position. Where there are fewer, the same batches are trained on those.",
        check=positive,
    )
    model_shard_position: int | None = _devices(
        None,
        "Layers in the first of two pipeline stages, a device each; 7 is a cut after the first dropout for tf2 "
        "(1 to 17), 6 for the other recipes (1 to 16). Left out, there is one stage.",
        metavar="N",
        check=positive,
    )
    pipeline_schedule: Literal["Grouped", "Interleaved", "Sequential"] = _devices(
        "Grouped", "Order in which stages take the parts of a batch; the result is the same."
    )
    gradient_accumulation_count: int = _devices(
        1,
        "Parts that each replica makes of its share of a batch, one after the other: less memory, the same update.",
        aliases=("--gradient-accumulation",),
        check=positive,
    )
    model_dir: Path | None = _records(
        None,
        "Folder of checkpoints and records; a run goes on with what is there. Left out, a new one in --results-dir.",
        metavar="DIR",
    )
    results_dir: Path = _records(
        Path("results"), "Folder in which runs get theirs where --model-dir is left out."
    )
    log_interval: float = _records(3.0, "Seconds between logs, at most one a call.", check=positive)
    summary_interval: int | None = _records(
        1,
        "Weight updates between TensorBoard summaries, at most one a call; none: no summaries.",
        check=positive,
    )
    report: Path | None = _records(
        None,
        "Write the compiler's report and a profile to this folder, training and evaluation apart.",
        metavar="DIR",
    )
    plan: bool = _records(False, "Say what would run, and stop.")

    def check(self) -> None:
        if self.test_only and self.train_only:
            raise OptionError("--test-only --train-only: together they leave nothing to do; keep one of them")
        if self.test_only and self.model_dir is None:
            raise OptionError("--test-only: needs --model-dir, the folder of a trained model")
        last = LAYERS[self.chosen.network] - 1
        if self.model_shard_position is not None and self.model_shard_position > last:
            raise OptionError(
                f"--model-shard-position {self.model_shard_position}: the network of --recipe {self.recipe} has "
                f"{last + 1} layers; cut it after one of the first {last}"
            )
        if self.ipus is not None and self.ipus > 1 and self.ipus % self.stages:
            raise OptionError(f"--ipus {self.ipus}: does not fall into pairs for the two stages")
        if self.ipus is not None and self.replicas not in (1, self.asked_replicas):
            raise OptionError(
                f"--ipus {self.ipus} --replicas {self.replicas}: together they mean two numbers of replicas; keep one"
            )
        parts = self.asked_replicas * self.gradient_accumulation_count
        if self.batch_size % parts:
            raise OptionError(
                f"--batch-size {self.batch_size}: does not fall into {self.asked_replicas} replicas x "
                f"{self.gradient_accumulation_count} parts; take a multiple of {parts}"
            )

    @property
    def stages(self) -> int:
        return 1 if self.model_shard_position is None else 2

    @property
    def has_idle_schedule(self) -> bool:
        """Whether a schedule is asked for that is nobody's, as there are no stages."""
        return self.stages == 1 and self.pipeline_schedule != "Grouped"

    @property
    def devices_per_replica(self) -> int:
        return self.stages

    @property
    def asked_replicas(self) -> int:
        """By --ipus where it is given; one device for two stages is a replica whose stages merge."""
        return self.replicas if self.ipus is None else max(1, self.ipus // self.stages)

    @property
    def chosen(self) -> Recipe:
        return RECIPES[self.recipe]

    def total_updates(self, images: int) -> int:
        """Weight updates of the run, rounded down once; OptionError where there would be none, or no whole batch."""
        if self.batch_size > images:
            raise OptionError(f"--batch-size {self.batch_size}: there are only {images:,} training images")
        if not (updates := int(self.epochs * images / self.batch_size)):
            raise OptionError(
                f"--epochs {float(self.epochs):g}: of {images:,} images is less than one batch of {self.batch_size}"
            )
        return updates

"""The options of `hotloop vcd train`, `evaluate` and `samples`, with the old program's names, and the presets.

What a trained state depends on is a `VcdModel`; the rest says how long to train, on what, and what to write.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from hotloop.engine.optim_keys import USUAL_PARAMS, check_optimiser, check_schedule
from hotloop.errors import OptionError
from hotloop.options import Options, Params, argument, between, folder_name, non_negative, option, positive

FAMILY = "vcd"
PIXELS = 784
METHOD, NETWORK, SAMPLER, RATES = "Method", "Networks", "Sampler (HMC)", "Learning rates"
RUN, EVALUATION, RECORDS = "Run", "Evaluation", "Records"

TUNED_RATE = {16: 5e-4, 100: 5e-4, 128: 9e-4, 512: 9e-4, 1024: 1.3e-3}
"""Batch size -> base rate of the decoder and the encoder's mean; its spread gets half."""

# With an epsilon of 1 the scale of a gradient matters, which is why losses are sums and no means.
AUTHORS = {"decay": 0.9, "epsilon": 1.0, "first_square": True}


@dataclass(frozen=True)
class VcdModel:
    """Everything that decides what one update computes."""

    micro_batch_size: int = option(
        100, "Images an update.", check=positive, aliases=("-b", "--batch-size"), group=RUN
    )
    method: Literal["vcd", "vcd-no-cv", "kl", "hoffman"] = option(
        "vcd",
        "vcd: the paper's; vcd-no-cv: without control variate; kl: the usual ELBO; hoffman: ELBO encoder, decoder at "
        "the refined sample.",
        group=METHOD,
    )
    control_variate: Literal["local", "global", "none"] = option(
        "local", "One control variate for each training image, one for all, or none.", group=METHOD
    )
    variate_decay: float = option(
        0.9, "Share of the old control variate kept.", check=between(0, 1), group=METHOD
    )
    shared_updates: int = option(
        3000, "Updates at the start in which local variates move together.", check=non_negative, group=METHOD
    )
    z_dim: int = option(10, "Latent dimensions.", check=positive, group=NETWORK)
    hidden: tuple[int, ...] = option(
        (200, 200),
        "Width of the encoder's hidden layers; the decoder's are the reverse.",
        check=positive,
        group=NETWORK,
    )
    hmc_steps: int = option(8, "HMC iterations an update.", check=positive, group=SAMPLER)
    leapfrog_steps: int = option(5, "Leapfrogs of an iteration.", check=positive, group=SAMPLER)
    step_size: float = option(
        0.05, "Leapfrog step to start with, shared by all chains.", check=positive, group=SAMPLER
    )
    adaptation: Literal["ruiz", "constant"] = option(
        "ruiz", "How the step size follows the acceptance; constant: not at all.", group=SAMPLER
    )
    target_acceptance: float = option(
        0.9, "Acceptance that is aimed at.", check=between(0.01, 1), group=SAMPLER
    )
    adaptation_rate: float = option(
        0.01, "Relative change of the step size an iteration.", check=between(0, 0.99), group=SAMPLER
    )
    decoder_rate: float | None = option(
        5e-4, "Base rate of the decoder; none: tuned for the batch size.", check=positive, group=RATES
    )
    encoder_mean_rate: float | None = option(
        5e-4, "Base rate of the encoder's mean; none: tuned.", check=positive, group=RATES
    )
    encoder_spread_rate: float | None = option(
        2.5e-4,
        "Base rate of the encoder's spread; none: half the tuned one.",
        check=positive,
        aliases=("--encoder-std-rate",),
        group=RATES,
    )
    learning_rate: float | None = option(
        None,
        "Replaces all base rates; the encoder's spread gets half.",
        check=positive,
        aliases=("-l",),
        group=RATES,
    )
    rate_decay: float = option(0.9, "Factor on the rates at each decay.", check=between(0, 1), group=RATES)
    decay_epochs: Fraction = option(
        Fraction(30),
        "Epochs between decays of the rates.",
        check=positive,
        aliases=("--epoch-timescale",),
        group=RATES,
    )
    lr_schedule: Literal["exponential", "const", "cosine", "stepped", "polynomial", "one_cycle"] = option(
        "exponential", "Shape over the run of a factor on all rates.", group=RATES
    )
    lr_schedule_params: Params | None = option(
        None,
        "exponential: decay_rate, decay_epochs (none: --rate-decay, --decay-epochs); cosine and polynomial: "
        "epochs_to_total_decay; polynomial: end_learning_rate_ratio, power; one_cycle: total_epochs, peak_epoch; "
        "stepped: boundaries (epochs) and one more values, factors on the rates.",
        group=RATES,
    )
    optimizer: Literal["rmsprop", "rmsprop_inside", "sgd", "momentum", "lars", "adam", "adamw", "muon"] = (
        option(
            "rmsprop",
            "How gradients become steps; rmsprop is the authors', its epsilon 1 outside the root; momentum is "
            "0.9; with lars the rate is the share of its norm by which a layer moves.",
            group=RATES,
        )
    )
    optimizer_params: Params | None = option(
        None, "Parameters of the optimiser other than its own, as in `hotloop cnn train`.", group=RATES
    )
    precision: Literal["32.32", "16.32", "16.16"] = option(
        "32.32",
        "Bits of the networks' products and of the weights kept between updates; 16 is bfloat16, since float16 "
        "overflows in the first updates.",
        group=NETWORK,
    )
    sampler: Literal["auto", "plain", "fused"] = option(
        "auto",
        "plain: products by the compiler; fused: one GPU kernel a leapfrog; auto: fused where it is faster.",
        group=SAMPLER,
    )

    def rates(self) -> dict[str, float]:
        """Base rates by parameter group: --learning-rate, else the options, else the table."""
        if self.learning_rate is not None:
            return {
                "mean": self.learning_rate,
                "spread": self.learning_rate / 2,
                "decoder": self.learning_rate,
            }
        asked = {
            "mean": (self.encoder_mean_rate, 1.0),
            "spread": (self.encoder_spread_rate, 0.5),
            "decoder": (self.decoder_rate, 1.0),
        }
        tuned = TUNED_RATE.get(self.micro_batch_size, 0.0)
        if not tuned and any(rate is None for rate, _ in asked.values()):
            raise OptionError(
                f"--micro-batch-size {self.micro_batch_size}: no tuned learning rate (there is one for "
                f"{', '.join(map(str, TUNED_RATE))}); give --learning-rate"
            )
        return {name: tuned * share if rate is None else rate for name, (rate, share) in asked.items()}

    def optimiser(self) -> tuple[str, dict[str, Any]]:
        """Its name in `engine.optim`, and its parameters."""
        engines = {"rmsprop": "rmsprop_outside", "rmsprop_inside": "rmsprop"}
        name = engines.get(self.optimizer, self.optimizer)
        usual = AUTHORS if self.optimizer == "rmsprop" else USUAL_PARAMS[name]
        return name, {**usual, **(self.optimizer_params or {})}

    def schedule(self, images: int) -> tuple[dict[str, Any], int | Fraction]:
        """Parameters of the factor on all rates, and updates an epoch, for so many training images."""
        start = {} if self.lr_schedule == "stepped" else {"initial_learning_rate": 1}
        if self.lr_schedule == "exponential" and not self.lr_schedule_params:
            period = self.decay_period(images)  # in whole updates
            return {**start, "decay_rate": self.rate_decay, "decay_epochs": period}, 1
        return {**start, **(self.lr_schedule_params or {})}, Fraction(images, self.micro_batch_size)

    def decay_period(self, images: int) -> int:
        """Updates between decays of the rates, for so many training images."""
        return max(1, int(self.decay_epochs * images / self.micro_batch_size))

    @property
    def variate(self) -> str:
        """The kind of control variate that the method really has."""
        return self.control_variate if self.method == "vcd" else "none"


@dataclass(frozen=True)
class LikelihoodOptions(Options):
    iwae_samples: int = option(
        20_000, "Importance samples for each image and proposal.", check=positive, group=EVALUATION
    )
    burn_in: int = option(
        300, "HMC iterations with adaptation before any is kept.", check=non_negative, group=EVALUATION
    )
    kept: int = option(300, "HMC iterations kept for the proposals.", check=positive, group=EVALUATION)
    test_batch_size: int = option(128, "Images at once.", check=positive, group=EVALUATION)


@dataclass(frozen=True)
class VcdTrain(LikelihoodOptions, VcdModel):
    config_file: str = option(
        "default", "A preset, or a JSON or YAML file.", metavar="NAME", aliases=("-c",), group=RUN
    )
    epochs: int = option(
        800, "Passes over the training images.", check=positive, aliases=("--n-epoch",), group=RUN
    )
    updates: int | None = option(None, "Weight updates, instead of --epochs.", check=positive, group=RUN)
    data: str = option(
        "binarised_mnist",
        "binarised_mnist, mnist, fashion_mnist, digits (drawn here), or a folder with the files of one.",
        group=RUN,
    )
    validation: bool = option(
        False, "Keep images back and evaluate on them at the end.", aliases=("-v",), group=RUN
    )
    testing: bool = option(True, "Evaluate on the test set at the end.", group=RUN)
    test_images: int | None = option(
        None,
        "Only the first so many images in the evaluations at the end, for a quick look.",
        check=positive,
        aliases=("--images",),
        group=EVALUATION,
    )
    seed: int = option(0, "Seed of weights, order and all draws.", check=non_negative, group=RUN)
    repeats: int = option(
        1,
        "Train this many times, with seeds that follow each other.",
        check=positive,
        aliases=("-R",),
        group=RUN,
    )
    resume: bool = option(False, "Go on with the newest run of this name.", group=RUN)
    updates_per_call: int | None = option(
        None,
        "At most so many updates in one compiled call; the result is the same.",
        check=positive,
        aliases=("--n-infeed-batches",),
        group=RUN,
    )
    plan: bool = option(False, "Say what would run, and stop.", group=RUN)
    results_dir: Path = option(
        Path("results"), "Folder in which runs get theirs.", aliases=("-r",), group=RECORDS
    )
    run_name: str | None = option(
        None,
        "Name of the run's folder; else the configuration's.",
        aliases=("-n",),
        check=folder_name,
        group=RECORDS,
    )
    log_every: int = option(1000, "Updates between logs.", check=positive, group=RECORDS)
    save_checkpoints: bool = option(True, "Save twenty times in a run and at its end.", group=RECORDS)
    log_level: Literal["NOTSET", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = option(
        "INFO",
        "WARNING and above keep quiet but for warnings and errors; DEBUG has a line for each checkpoint, too.",
        group=RECORDS,
    )
    report: Path | None = option(
        None, "Write the compiler's report and a profile to this folder.", metavar="DIR", group=RECORDS
    )

    def check(self) -> None:
        self.rates()
        rule, (schedule, _) = self.optimiser(), self.schedule(images=1)  # how many makes no difference here
        if "initial_learning_rate" in (self.lr_schedule_params or {}):
            raise OptionError(
                "--lr-schedule-params: initial_learning_rate: a schedule is a factor on the rates; give --learning-rate"
            )
        check_optimiser(*rule)
        check_schedule(self.lr_schedule, schedule)
        if self.resume and self.repeats > 1:
            raise OptionError(
                "--resume: goes on with one run; leave out --repeats and name the run with --run-name"
            )


_GLOBAL: dict[str, Any] = {"control_variate": "global", "updates_per_call": 10_000}
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "global_cv": _GLOBAL,
    "bs_experiment": {
        **_GLOBAL,
        "micro_batch_size": 16,
        "epochs": 8200,
        "decoder_rate": None,
        "encoder_mean_rate": None,
        "encoder_spread_rate": None,
        "decay_epochs": 307,
    },
    "test": {"epochs": 1, "save_checkpoints": False},
    "benchmark": {**_GLOBAL, "epochs": 200, "testing": False},
    "iwae": {"z_dim": 50, "updates": 100_000},
}


@dataclass(frozen=True, kw_only=True)
class VcdEvaluate(LikelihoodOptions):
    run: Path = argument("Folder of the run.", metavar="RUN")
    split: Literal["test", "validation", "train"] = option("test", "Images to evaluate.", group=EVALUATION)
    images: int | None = option(
        None, "Only the first so many, for a quick look.", check=positive, group=EVALUATION
    )
    step: int | None = option(
        None, "Checkpoint after so many updates; else the newest.", check=non_negative, group=RUN
    )
    data: str | None = option(None, "Another data set or folder than the run's.", group=RUN)
    seed: int = option(0, "Seed of all draws of the evaluation.", check=non_negative, group=RUN)


@dataclass(frozen=True)
class VcdSamples(Options):
    run: Path = argument("Folder of a run, as `hotloop vcd train` named it.")
    rows: int = option(10, "Lines of a grid.", check=positive)
    columns: int = option(
        10, "Images in a line; of reconstructions, which take three each, a third as many.", check=positive
    )
    scale: int = option(2, "Pixels of the file along each side of a pixel.", check=positive)
    hmc_steps: int | None = option(
        None,
        "HMC iterations before the last picture of a reconstruction; none: as in training.",
        check=positive,
    )
    seed: int = option(0, "Seed of all draws and of the choice of test images.", check=non_negative)
    step: int | None = option(None, "Update to take the weights of; none: the newest saved.", check=positive)
    data: str | None = option(None, "Images to reconstruct; none: those the run was trained on.")
    output: Path | None = option(
        None, "Folder for the pictures; none: `samples` in the run's.", metavar="DIR"
    )


def read_run_options(run: Path) -> dict[str, Any]:
    from hotloop.engine.run import read_config  # a bad option has to answer at once

    return read_config(run, FAMILY, {"images": int, "method": str, "data": str})


def evaluation_defaults(run: Path) -> dict[str, Any]:
    """As the run evaluated, or would have."""
    had = read_run_options(run)
    same = ("data", "seed", "iwae_samples", "burn_in", "kept", "test_batch_size")
    # The run's own `images` is how many it trained with.
    return {**{name: had[name] for name in same if name in had}, "images": had.get("test_images")}


def samples_defaults(run: Path) -> dict[str, Any]:
    """The run's images, and as many HMC iterations as it trained with, where it did."""
    had = read_run_options(run)
    return {name: had[name] for name in ("data", "hmc_steps") if had.get(name)}

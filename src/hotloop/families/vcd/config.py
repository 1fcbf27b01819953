"""The options of `hotloop vcd train`, `evaluate` and `samples`, with the old program's names, and the presets.

What a trained state depends on is a `VcdModel`; the rest says how long to train, on what, and what to write.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hotloop.engine.optim_keys import OPTIMISERS, SCHEDULES, USUAL_PARAMS, check_optimiser, check_schedule
from hotloop.errors import OptionError
from hotloop.options import Options, Params, argument, between, folder_name, non_negative, option, positive

FAMILY = "vcd"
PIXELS = 784
# Options of the groups that `--help` shows.
METHOD, NETWORK, SAMPLER, RATES, RUN, EVALUATION, RECORDS = (
    partial(option, group=title)
    for title in ("Method", "Networks", "Sampler (HMC)", "Learning rates", "Run", "Evaluation", "Records")
)

TUNED_RATE = {16: 5e-4, 100: 5e-4, 128: 9e-4, 512: 9e-4, 1024: 1.3e-3}
"""Batch size -> base rate of the decoder and the encoder's mean; its spread gets half."""

# With an epsilon of 1 the scale of a gradient matters, which is why losses are sums and no means.
AUTHORS = {"decay": 0.9, "epsilon": 1.0, "first_square": True}


@dataclass(frozen=True)
class VcdModel:
    """Everything that decides what one update computes."""

    micro_batch_size: int = RUN(100, "Images an update.", check=positive, aliases=("-b", "--batch-size"))
    method: Literal["vcd", "vcd-no-cv", "kl", "hoffman"] = METHOD(
        "vcd",
        "vcd: the paper's; vcd-no-cv: without control variate; kl: the usual ELBO; hoffman: ELBO encoder, decoder at "
        "the refined sample.",
    )
    control_variate: Literal["local", "global", "none"] = METHOD(
        "local", "One control variate for each training image, one for all, or none."
    )
    variate_decay: float = METHOD(0.9, "Share of the old control variate kept.", check=between(0, 1))
    shared_updates: int = METHOD(
        3000, "Updates at the start in which local variates move together.", check=non_negative
    )
    z_dim: int = NETWORK(10, "Latent dimensions.", check=positive)
    hidden: tuple[int, ...] = NETWORK(
        (200, 200), "Width of the encoder's hidden layers; the decoder's are the reverse.", check=positive
    )
    hmc_steps: int = SAMPLER(8, "HMC iterations an update.", check=positive)
    leapfrog_steps: int = SAMPLER(5, "Leapfrogs of an iteration.", check=positive)
    step_size: float = SAMPLER(0.05, "Leapfrog step to start with, shared by all chains.", check=positive)
    adaptation: Literal["ruiz", "constant"] = SAMPLER(
        "ruiz", "How the step size follows the acceptance; constant: not at all."
    )
    target_acceptance: float = SAMPLER(0.9, "Acceptance that is aimed at.", check=between(0.01, 1))
    adaptation_rate: float = SAMPLER(
        0.01, "Relative change of the step size an iteration.", check=between(0, 0.99)
    )
    decoder_rate: float | None = RATES(
        5e-4, "Base rate of the decoder; none: tuned for the batch size.", check=positive
    )
    encoder_mean_rate: float | None = RATES(
        5e-4, "Base rate of the encoder's mean; none: tuned.", check=positive
    )
    encoder_spread_rate: float | None = RATES(
        2.5e-4,
        "Base rate of the encoder's spread; none: half the tuned one.",
        check=positive,
        aliases=("--encoder-std-rate",),
    )
    learning_rate: float | None = RATES(
        None, "Replaces all base rates; the encoder's spread gets half.", check=positive, aliases=("-l",)
    )
    rate_decay: float = RATES(0.9, "Factor on the rates at each decay.", check=between(0, 1))
    decay_epochs: Fraction = RATES(
        Fraction(30), "Epochs between decays of the rates.", check=positive, aliases=("--epoch-timescale",)
    )
    lr_schedule: str = RATES(
        "exponential",
        "Shape over the run of a factor on all rates.",
        choices=tuple(dict.fromkeys(("exponential", *SCHEDULES))),
    )
    lr_schedule_params: Params | None = RATES(
        None,
        "exponential: decay_rate, decay_epochs (none: --rate-decay, --decay-epochs); cosine and polynomial: "
        "epochs_to_total_decay; polynomial: end_learning_rate_ratio, power; one_cycle: total_epochs, peak_epoch; "
        "stepped: boundaries (epochs) and one more values, factors on the rates.",
    )
    optimizer: str = RATES(
        "rmsprop",
        "How gradients become steps; rmsprop is the authors', its epsilon 1 outside the root; momentum is "
        "0.9; with lars the rate is the share of its norm by which a layer moves.",
        choices=("rmsprop", "rmsprop_inside", *(name for name in OPTIMISERS if "rmsprop" not in name)),
    )
    optimizer_params: Params | None = RATES(
        None, "Parameters of the optimiser other than its own, as in `hotloop cnn train`."
    )
    precision: Literal["32.32", "16.32", "16.16"] = NETWORK(
        "32.32",
        "Bits of the networks' products and of the weights kept between updates; 16 is bfloat16, since float16 "
        "overflows in the first updates.",
    )
    sampler: Literal["auto", "plain", "fused", "hopper"] = SAMPLER(
        "auto",
        "plain: products by the compiler; fused: one GPU kernel a leapfrog; hopper: one for an iteration or for all, "
        "weights kept on chip, on NVIDIA's Hopper cards; auto: what was measured to be the fastest.",
    )

    def rates(self) -> dict[str, float]:
        """Base rates by parameter group: --learning-rate, else the options, else the table."""
        if (rate := self.learning_rate) is not None:
            return {"mean": rate, "spread": rate / 2, "decoder": rate}
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
        usual = AUTHORS if self.optimizer == "rmsprop" else USUAL_PARAMS.get(name, {})
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


@dataclass(frozen=True)
class LikelihoodOptions(Options):
    iwae_samples: int = EVALUATION(20_000, "Importance samples for each image and proposal.", check=positive)
    burn_in: int = EVALUATION(300, "HMC iterations with adaptation before any is kept.", check=non_negative)
    kept: int = EVALUATION(300, "HMC iterations kept for the proposals.", check=positive)
    test_batch_size: int = EVALUATION(128, "Images at once.", check=positive)


@dataclass(frozen=True)
class VcdTrain(LikelihoodOptions, VcdModel):
    config_file: str = RUN("default", "A preset, or a JSON or YAML file.", metavar="NAME", aliases=("-c",))
    epochs: int = RUN(800, "Passes over the training images.", check=positive, aliases=("--n-epoch",))
    updates: int | None = RUN(None, "Weight updates, instead of --epochs.", check=positive)
    replicas: int = RUN(
        1,
        "Devices that share the images of each update, which they must divide; the losses are those of one.",
        check=positive,
        aliases=("--num-replicas",),
    )
    data: str = RUN(
        "binarised_mnist",
        "binarised_mnist, mnist, fashion_mnist, digits (drawn here), or a folder with the files of one.",
    )
    validation: bool = RUN(False, "Keep images back and evaluate on them at the end.", aliases=("-v",))
    testing: bool = RUN(True, "Evaluate on the test set at the end.")
    test_images: int | None = EVALUATION(
        None,
        "Only the first so many images in the evaluations at the end, for a quick look.",
        check=positive,
        aliases=("--images",),
    )
    seed: int = RUN(0, "Seed of weights, order and all draws.", check=non_negative)
    repeats: int = RUN(
        1, "Train this many times, with seeds that follow each other.", check=positive, aliases=("-R",)
    )
    resume: bool = RUN(False, "Go on with the newest run of this name.")
    updates_per_call: int | None = RUN(
        None,
        "At most so many updates in one compiled call; the result is the same.",
        check=positive,
        aliases=("--n-infeed-batches",),
    )
    plan: bool = RUN(False, "Say what would run, and stop.")
    results_dir: Path = RECORDS(Path("results"), "Folder in which runs get theirs.", aliases=("-r",))
    run_name: str | None = RECORDS(
        None, "Name of the run's folder; else the configuration's.", aliases=("-n",), check=folder_name
    )
    log_every: int = RECORDS(1000, "Updates between logs.", check=positive)
    save_checkpoints: bool = RECORDS(True, "Save twenty times in a run and at its end.")
    log_level: Literal["NOTSET", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = RECORDS(
        "INFO",
        "WARNING and above keep quiet but for warnings and errors; DEBUG has a line for each checkpoint, too.",
    )
    report: Path | None = RECORDS(
        None, "Write the compiler's report and a profile to this folder.", metavar="DIR"
    )

    def check(self) -> None:
        if self.micro_batch_size % self.replicas:
            raise OptionError(
                f"--replicas {self.replicas}: {self.micro_batch_size} images an update cannot be shared evenly; take a "
                f"--micro-batch-size that is a multiple of {self.replicas}"
            )
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
    split: Literal["test", "validation", "train"] = EVALUATION("test", "Images to evaluate.")
    images: int | None = EVALUATION(None, "Only the first so many, for a quick look.", check=positive)
    step: int | None = RUN(None, "Checkpoint after so many updates; else the newest.", check=non_negative)
    data: str | None = RUN(None, "Another data set or folder than the run's.")
    seed: int = RUN(0, "Seed of all draws of the evaluation.", check=non_negative)
    replicas: int | None = RUN(
        None,
        "Devices that share the images; left out, as many as the run was trained on, if there are so many.",
        check=positive,
        aliases=("--num-replicas",),
    )


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

"""The options of `hotloop recommender train`, with the old program's names and defaults, and its arithmetic: sizes
and batches by the name of the training file, else by its number of ratings; drops and validations on calls. No jax.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hotloop.engine import optim_keys
from hotloop.engine.optim_keys import check_optimiser, check_schedule
from hotloop.errors import OptionError
from hotloop.options import (
    Options,
    Params,
    between,
    finite,
    folder_name,
    non_negative,
    option,
    options_of,
    positive,
)

OLD = "From the old program"
model_option = partial(option, group="Model")
training_option = partial(option, group="Training")
number_option = partial(option, group="Numbers")
data_option = partial(option, group="Data")
run_option = partial(option, group="Run and records")
old_option = partial(option, group=OLD)
# By --size: units of the three encoder layers, which the decoder mirrors, and the dropout of the last.
LAYERS = {128: (128, 256, 256), 256: (256, 256, 512), 512: (512, 512, 1024)}
DROPOUT = {128: 0.65, 256: 0.8, 512: 0.8}
# Stem of the training file before the first underscore -> size, batch.
BY_NAME = {"3m": (128, 64), "6m": (256, 64), "1y": (256, 32), "full": (512, 8)}
# Up to so many training ratings, what is usual for this name, which has 14, 29 or 41 million; beyond, for full.
BY_RATINGS = ((20_000_000, "3m"), (35_000_000, "6m"), (70_000_000, "1y"))
FILES = ("training_data_file", "validation_data_file", "test_data_file")
INPUT_DROPOUT, KL_EPOCHS = 0.5, 50.0  # half of the input is hidden, as in Liang et al. (2018)
KS = (10, 20)  # lengths of the lists that NDCG and recall are measured on
CALL_UPDATES = 250  # as the old program had it
# The engine's name of each optimiser, and what its parameters usually are.
NAMES = {
    "Momentum": "momentum", "SGD": "sgd", "LARS": "lars", "RMSprop": "rmsprop_outside", "RMSpropInside": "rmsprop",
    "Adam": "adam", "AdamW": "adam", "Muon": "muon",
}  # fmt: skip
NAMES |= {
    name.capitalize(): name
    for name in optim_keys.OPTIMISERS
    if name.lower() not in {"rmsprop_outside", *(ours.lower() for ours in NAMES)}
}
OPTIMISERS = {ours: (name, optim_keys.USUAL_PARAMS.get(name, {})) for ours, name in NAMES.items()}
OPTIMISERS["RMSpropInside"] = ("rmsprop", {"momentum": 0, "base_decay_exponent": -10, "epsilon": 1e-7})


@dataclass(frozen=True)
class UpdateOptions:
    """Everything that decides what one update computes."""

    objective: Literal["ratings", "ranking"] = model_option(
        "ratings",
        "What is learnt: ratings, by their squared error; or ranking, which items a user likes, by the multinomial "
        "likelihood over all items (Liang et al. 2018).",
    )
    size: Literal[128, 256, 512] | None = model_option(
        None, "Width: 128, 256 or 512; left out, by the training file's name or ratings (random data: 128)."
    )
    layers: tuple[int, ...] = model_option(
        (), "Units of the encoder's layers, which the decoder mirrors; left out, by --size.", check=positive
    )
    dropout: float | None = model_option(
        None,
        "Dropout of the code layer; left out, 0.65 for size 128, else 0.8; none for ranking.",
        check=between(0, 0.99),
    )
    input_dropout: float = model_option(
        INPUT_DROPOUT,
        "Ranking: the share of a user's items that an update hides from the network.",
        check=between(0, 0.99),
    )
    kl: float = model_option(
        0.0,
        "Ranking: largest weight of the KL divergence of a random code, which makes it Mult-VAE (0.2 is usual); 0 is "
        "Mult-DAE.",
        check=non_negative,
    )
    kl_epochs: float = model_option(
        KL_EPOCHS, "Ranking: epochs in which the weight of --kl grows from 0.", check=positive
    )
    relevant: float = model_option(
        4.0,
        "Rating from which a user likes an item: what ranking learns, and what NDCG and recall look for.",
        check=positive,
    )
    no_selu: bool = model_option(False, "A linear network.")
    no_dropout: bool = model_option(False, "No dropout.")
    tied: bool = model_option(True, "The decoder uses the encoder's weights, transposed.")
    untied: bool = model_option(False, "The same as --no-tied.")
    refeed: Literal["joint", "alternate", "none"] = training_option(
        "joint",
        "Dense re-feeding: joint, in one loss and one step; alternate, in steps of its own on detached outputs; none.",
    )
    no_dense_refeeding: bool = training_option(False, "The same as --refeed none.")
    aug_steps: int = training_option(
        1, "Re-feeding steps after each batch under --refeed alternate.", check=non_negative
    )
    batch_size: int | None = training_option(
        None,
        "Users an update; left out, by the training file's name or ratings (random data: 64).",
        check=positive,
        aliases=("--micro-batch-size",),
    )
    optimizer: str = training_option(
        "Momentum",
        "Momentum 0.9, none, or another rule; RMSprop has its epsilon outside the root, RMSpropInside in it; "
        "AdamW and Muon have the decay beside them.",
        choices=tuple(OPTIMISERS),
    )
    optimizer_params: Params = training_option(
        Params(),
        "What is not as usual. Momentum, SGD: momentum, nesterov; LARS: these, weight_decay, eeta, epsilon; RMSprop: "
        "decay, epsilon; RMSpropInside: momentum, base_decay_exponent, epsilon; Adam, AdamW: b1, b2, eps; Muon: beta.",
    )
    base_learning_rate: float = training_option(
        -16.0, "Exponent of two: the rate is 2^exponent times the batch size.", check=finite
    )
    learning_rate_decay: tuple[float, ...] = training_option(
        (1.0, 0.1, 0.01), "Factors on the rate, one more than drops.", check=positive
    )
    learning_rate_schedule: tuple[float, ...] = training_option(
        (0.5, 0.75), "Where the rate drops, as fractions of the calls.", check=between(0, 1)
    )
    lr_schedule: str = training_option(
        "drops",
        "Shape of the rate over the run; drops is that of --learning-rate-decay and --learning-rate-schedule.",
        choices=("drops", *optim_keys.SCHEDULES),
    )
    lr_schedule_params: Params = training_option(
        Params(),
        "cosine and polynomial: epochs_to_total_decay; polynomial: end_learning_rate_ratio, power; exponential: "
        "decay_rate, decay_epochs; one_cycle: total_epochs, peak_epoch; stepped: boundaries (epochs) and one more "
        "values, rates as they are, where all others begin with, or reach, that of --base-learning-rate.",
    )
    weight_decay: float = training_option(
        1e-4, "Decay of every weight and bias; 0 for none.", check=non_negative
    )
    gradient_clipping: bool = training_option(False, "Clip each gradient to [-1, 1], after decay.")
    loss_scaling: float = number_option(
        1000.0, "The loss is multiplied by it, gradients are divided; 1 for none.", check=positive
    )
    precision: Literal["auto", "32.32", "16.32", "16.16"] = number_option(
        "auto", "Bits of products and of weights; auto is 16.16 on an accelerator, 32.32 on a CPU."
    )
    half: Literal["bfloat16", "float16"] = number_option("float16", "The 16-bit type.")
    no_prng: bool = number_option(False, "Round 16-bit weights to nearest instead of stochastically.")

    @property
    def schedule_params(self) -> dict[str, Any]:
        """Of a schedule by name, as the engine takes them: the rate is for one sample."""
        own = {} if self.lr_schedule == "stepped" else {"initial_learning_rate": 2.0**self.base_learning_rate}
        return {**own, **self.lr_schedule_params}


@dataclass(frozen=True)
class DataOptions:
    training_data_file: Path | None = data_option(
        None,
        "Ratings to train with: user TAB item TAB rating, or with commas or '::'; alone, it is split.",
        metavar="FILE",
    )
    validation_data_file: Path | None = data_option(
        None, "Ratings of the same users to validate with.", metavar="FILE"
    )
    test_data_file: Path | None = data_option(None, "Ratings to test with at the end.", metavar="FILE")
    data: Literal["random", "procedural", "ml-100k"] = data_option(
        "random", "Without files: random ratings of the old shape, drawn tastes, or MovieLens-100K."
    )
    split: Literal["random", "user-time"] = data_option(
        "random", "How --data ml-100k or procedural is split, or a training file alone."
    )
    fractions: tuple[float, ...] = data_option(
        (0.85, 0.05, 0.1), "Training, validation and test share of --split random.", check=between(0, 1)
    )
    seed: int = run_option(0, "Seed of weights, order, dropout and drawn data.", check=non_negative)


@dataclass(frozen=True)
class TrialOptions(Options, DataOptions, UpdateOptions):
    """What a training alone and each trial of a sweep share."""

    epochs: int | None = training_option(
        None, "Passes over the users; left out, 160 (random data: 2).", check=positive
    )
    patience: int | None = training_option(
        None, "Stop after so many validations without a better one.", check=positive
    )
    validation_batch_size: int | None = run_option(
        None,
        "Users at once in validation; left out, the training batch (random data: 128).",
        check=positive,
        aliases=("--validation-micro-batch-size",),
    )
    valid_per_epoch: float = run_option(1.0, "Validations an epoch.", check=positive)
    no_validation: bool = run_option(False, "Do not validate.")
    device_iterations: int | None = run_option(
        None,
        "Updates of a call, after which rates may change; left out, 250, or an epoch where that is shorter.",
        check=positive,
    )
    steps_per_log: int = run_option(1, "Calls between logs.", check=positive)
    results_dir: Path = run_option(Path("results"), "Folder in which runs get theirs.", aliases=("--logdir",))
    run_name: str | None = run_option(
        None, "Name of the run's folder; else made of batch and time.", check=folder_name
    )
    clip: bool = run_option(True, "Clip predictions to the range of the training ratings when evaluating.")
    plan: bool = run_option(False, "Say what would run, and stop.")
    pipeline_num_parallel: int = old_option(32, "No effect: nothing is decoded on the host.", check=positive)


@dataclass(frozen=True)
class TrainOptions(TrialOptions):
    replicas: int = training_option(
        1,
        "Devices that share the users of each batch, which they must divide; the losses are those of one.",
        check=positive,
        aliases=("--num-replicas",),
    )
    multiprocessing: bool = run_option(False, "Validate in a process of its own, beside the training.")
    resume: bool = run_option(False, "Go on with the run of --run-name.")
    build_init: bool = run_option(False, "Save the initial weights and stop.")
    testing_on_checkpoint: Path | None = run_option(
        None, "Only test: RMSE of this run's weights on the validation file.", metavar="DIR"
    )
    report: Path | None = run_option(
        None, "Write the compiler's report and a profile to this folder.", metavar="DIR"
    )
    validation_batches_per_step: int = old_option(250, "No effect, as before.", check=positive)
    select_ipus: str = old_option("AUTO", "No effect: see --device.", aliases=("--select-ipu",))

    def check(self) -> None:
        if self.base_learning_rate > 0:
            raise OptionError(
                f"--base-learning-rate {self.base_learning_rate:g}: the rate would be "
                f"2^{self.base_learning_rate:g} times the batch size; write {-self.base_learning_rate:g}"
            )
        if len(self.learning_rate_decay) <= len(self.learning_rate_schedule):
            raise OptionError(
                f"--learning-rate-decay has {len(self.learning_rate_decay)} factors: it needs one more than "
                f"--learning-rate-schedule has drops ({len(self.learning_rate_schedule)})"
            )
        if self.batch_size is not None:
            self.check_split(self.batch_size)
        name, usual = OPTIMISERS[self.optimizer]
        check_optimiser(name, {**usual, **self.optimizer_params}, global_batch_size=self.batch_size)
        if self.lr_schedule == "drops" and self.lr_schedule_params:
            raise OptionError(
                "--lr-schedule-params: --lr-schedule drops takes none; it has --learning-rate-schedule and "
                "--learning-rate-decay"
            )
        if self.lr_schedule != "drops":
            if (self.learning_rate_decay, self.learning_rate_schedule) != ((1.0, 0.1, 0.01), (0.5, 0.75)):
                drops = "--learning-rate-decay and --learning-rate-schedule are for drops"
                raise OptionError(f"--lr-schedule {self.lr_schedule}: {drops}")
            if "initial_learning_rate" in self.lr_schedule_params:
                here = "initial_learning_rate is 2 to the power of --base-learning-rate here"
                raise OptionError(f"--lr-schedule-params: {here}")
            check_schedule(self.lr_schedule, self.schedule_params)
        self.check_objective()
        if self.resume and not self.run_name:
            raise OptionError("--resume: name the run with --run-name")
        if len(self.fractions) != 3 or abs(sum(self.fractions) - 1) > 1e-6 or not self.fractions[0]:
            raise OptionError(
                f"--fractions {' '.join(map(str, self.fractions))}: three shares that add up to 1"
            )
        others = self.validation_data_file or self.test_data_file
        if others and not (self.training_data_file or self.testing_on_checkpoint):
            raise OptionError(f"{others}: of no use without --training-data-file; give both")
        if self.patience and self.no_validation:
            raise OptionError("--patience: counts validations, and --no-validation makes none; keep one")
        if self.test_data_file and not (self.validation_data_file or self.no_validation):
            raise OptionError(
                "--test-data-file: needs --validation-data-file of the same users, too, or --no-validation"
            )

    def check_objective(self) -> None:
        """An OptionError for options of the one objective that are given for the other."""
        of_ranking = {"input_dropout": INPUT_DROPOUT, "kl": 0.0, "kl_epochs": KL_EPOCHS}
        given = [name for name, usual in of_ranking.items() if getattr(self, name) != usual]
        if self.objective == "ratings" and given:
            option = given[0].replace("_", "-")
            raise OptionError(f"--{option} {getattr(self, given[0]):g}: is for --objective ranking alone")
        if self.kl_epochs != KL_EPOCHS and not self.kl:
            raise OptionError(
                f"--kl-epochs {self.kl_epochs:g}: is for Mult-VAE, and there is no KL without --kl"
            )
        if self.objective == "ranking" and self.refeed == "alternate":
            raise OptionError("--refeed alternate: re-feeding is for --objective ratings alone")
        if self.objective == "ranking" and self.aug_steps != 1:
            raise OptionError(f"--aug-steps {self.aug_steps}: re-feeding is for --objective ratings alone")
        if self.objective == "ranking" and not self.clip:
            raise OptionError("--no-clip: --objective ranking has no predicted ratings to clip")

    def check_split(self, users: int) -> None:
        """An OptionError where the replicas cannot share a batch of so many users evenly."""
        if users % self.replicas:
            raise OptionError(
                f"--replicas {self.replicas}: a batch of {users} users cannot be shared evenly; take a --batch-size "
                f"that is a multiple of {self.replicas}"
            )

    @property
    def named_sizes(self) -> tuple[Any, int] | None:
        """Size and batch by the file's name, or of random data; None where the name says nothing."""
        if self.training_data_file is None:
            return BY_NAME["3m"]
        return BY_NAME.get(self.training_data_file.name.split("_")[0])

    def resolve(self, users: int = 0, ratings: int = 0) -> "TrainOptions":
        """The same with size, batches and epochs filled in: options, else the file's name, else by so many ratings."""
        usual: tuple[Any, int] = BY_NAME[next((name for most, name in BY_RATINGS if ratings <= most), "full")]
        # A batch has at most all users.
        size, batch = self.named_sizes or (usual[0], min(usual[1], users or usual[1]))
        batch = self.batch_size or batch
        is_random = self.training_data_file is None and self.data == "random"
        return replace(
            self,
            size=self.size or size,
            batch_size=batch,
            validation_batch_size=self.validation_batch_size or (128 if is_random else batch),
            epochs=self.epochs or (2 if is_random else 160),
        )


class Schedule(NamedTuple):
    """Calls, updates, drops and validations of a run, as the old program counted them."""

    calls: int
    updates_per_call: int
    updates: int
    drops: tuple[int, ...]  # updates from which each next factor holds
    validate_every: int  # updates between validations


def make_schedule(config: TrainOptions, users: int) -> Schedule:
    """The table of the old program: calls an epoch is a real number, drops take effect a call later.

    Where an epoch is shorter than a call, a call is an epoch, so that small sets train, too.
    """
    assert config.batch_size is not None and config.epochs is not None
    per_epoch = Fraction(users, config.batch_size)
    length = config.device_iterations or min(CALL_UPDATES, max(1, int(per_epoch)))
    calls = max(1, int(config.epochs * per_epoch / length))
    # By their texts: 0.7 is seven tenths here, not the float next to it, which would drop a call too early.
    drops = tuple((int(Fraction(str(at)) * calls) + 1) * length for at in config.learning_rate_schedule)
    every = max(1, int(per_epoch / length / Fraction(str(config.valid_per_epoch))))
    return Schedule(calls, length, calls * length, drops, every * length)


def warn_of_no_effect(config: UpdateOptions, warn: Callable[[str], None]) -> None:
    """One line that names the options of the old program which were given and have no effect."""
    old = [each for each in options_of(type(config)) if each.group == OLD]
    if given := [each.spelling for each in old if getattr(config, each.name) != each.default]:
        warn(f"{', '.join(given)}: no effect here")


PRESETS: dict[str, dict[str, Any]] = {
    # Rate and decay were chosen by the validation part of seed 0. Over four seeds of the random split the test RMSE is
    # 0.918 to 0.928, that of biases 0.930 to 0.937 (docs/results.md).
    "ml-100k": {
        "data": "ml-100k",
        "size": 128,
        "batch_size": 64,
        "epochs": 150,
        "base_learning_rate": -12.0,
        "weight_decay": 6e-3,
        "refeed": "none",
        "precision": "32.32",
        "patience": 60,
    },
    # Mult-DAE with one layer, chosen by NDCG@10 on the validation parts of seeds 0 and 1 (docs/results.md). With
    # --training-data-file it is a good start for other ratings, too.
    "ml-100k-ranking": {
        "data": "ml-100k",
        "objective": "ranking",
        "size": 128,
        "layers": (200,),
        "tied": False,
        "dropout": 0.5,
        "batch_size": 64,
        "epochs": 150,
        "optimizer": "AdamW",
        "base_learning_rate": -16.0,
        "lr_schedule": "const",
        "weight_decay": 1.0,
        "precision": "32.32",
        "patience": 40,
    },
}

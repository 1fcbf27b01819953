"""Every option of `hotloop cnn sweep`: those of `cnn train`, and what is tried, how often and where. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hotloop.errors import OptionError
from hotloop.families.cnn.options import TrainConfig
from hotloop.options import argument, folder_name, option, positive
from hotloop.sweeps.old_runners import REPLICAS, RUNNERS, TARGET, Runner
from hotloop.sweeps.options import (
    check_place_options,
    concurrent_option,
    engine_option,
    ray_address_option,
    sweep_option,
)
from hotloop.sweeps.space import Choices, Range, Space


class Objective(NamedTuple):
    maximise: bool
    meaning: str


OBJECTIVES = {
    "validation_accuracy": Objective(True, "accuracy of the best checkpoint"),
    "epoch_to_target": Objective(False, "epoch of the first checkpoint that reaches --target-accuracy"),
    "optimization_metric": Objective(True, "nearness of the last checkpoint to the target, by its epoch"),
}


@dataclass(frozen=True)
class NamedSweep:
    """A sweep of the old program: what it draws, what it keeps, and the runner that makes options of both."""

    runner: Runner
    objective: str
    method: str
    space: Space
    fixed: Mapping[str, Any]

    @property
    def parameters(self) -> frozenset[str]:
        """The runner's names, of which some are called as options of a training are."""
        return frozenset({*self.space, *self.fixed})


def _log(low: float, high: float) -> Range:
    """Ends as powers of e, as the old sweep's `log_uniform` had them."""
    return Range(exp(low), exp(high), log=True)


_SHARED: Space = {
    "warmup_epochs": Range(0, 10, whole=True),
    "bn_momentum": Range(0.7, 0.99),
    "label_smoothing": Range(0.02, 0.2),
    "opt_momentum": Range(0.7, 0.99),
}
NAMED = {
    "LARS_random": NamedSweep(
        RUNNERS["run_sweep.py"],
        "epoch_to_target",
        "random",
        {
            "l2": Range(1e-7, 1e-4),
            "init_lr": Range(1e-4, 1e-2),
            "end_lr_ratio": Range(1e-7, 1e-5),
            **_SHARED,
            "lars_weight_decay": Range(1e-7, 1e-4),
            "lars_eeta": Range(1e-4, 1e-2),
        },
        {
            "config": "resnet50_mlperf_pod16_lars",
            "num_epochs": 40,
            "num_replicas": REPLICAS,
            "target_accuracy": TARGET,
        },
    ),
    "SGD_random": NamedSweep(
        RUNNERS["run_sweep.py"],
        "epoch_to_target",
        "random",
        {"l2": _log(-6, -3), "init_lr": _log(-12, -4), "end_lr_ratio": _log(-12, -2), **_SHARED},
        {
            "config": "resnet50_mlperf_pod16_bs20",
            "num_epochs": 40,
            "num_replicas": REPLICAS,
            "target_accuracy": TARGET,
        },
    ),
    "MLPerf_LARS": NamedSweep(
        RUNNERS["run_mlperf_sweep.py"],
        "optimization_metric",
        "bayes",
        {
            "init_lr": Range(1e-4, 1e-2),
            "warmup_epochs": Range(0, 15, whole=True),
            "label_smoothing": Choices((0, 0.1)),
            "weight_decay": Range(1e-6, 1e-4),
            "num_epochs": Range(20, 40, whole=True),
            "grad_accum": Range(1, 5, whole=True),
        },
        {
            "config": "resnet50_mlperf_pod16_lars",
            "micro_batch_size": 18,
            "num_replicas": REPLICAS,
            "abs_end_lr": 0.001,
            "optimizer": "lars",
            "target_accuracy": TARGET,
        },
    ),
}
"""Name -> the sweep; its ranges are those of the old program's files."""
OF_ONE_RUN = ("report", "checkpoint_output_dir", "checkpoint_input_dir", "compile_only", "random_weights")
"""Options that mean one run, so that trials cannot share them."""


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """The options of a training and of the sweep; --results-dir, --run-name, --resume and --plan are its own."""

    named: str | None = argument(
        f"A sweep of the old program: {', '.join(NAMED)}; or leave it out and say --over.",
        default=None,
        metavar="NAME",
        choices=tuple(NAMED),
    )
    over: tuple[str, ...] = sweep_option(
        (),
        "What is tried: NAME=1,2,3 a list, NAME=0.1..0.9 a range, NAME=log:1e-4..1e-1 one by its logarithm, "
        "NAME=int:1..9 whole numbers; NAME is an option of the training, or OPTION.KEY such as "
        "lr-schedule-params.initial_learning_rate. May be there several times.",
        metavar="NAME=VALUES",
        repeatable=True,
    )
    trials: int | None = sweep_option(
        None,
        "How many; left out, every combination of lists, or 16 where a range is among them.",
        check=positive,
    )
    objective: Literal["validation_accuracy", "epoch_to_target", "optimization_metric"] | None = sweep_option(
        None,
        "What ranks the trials; left out, validation_accuracy, or what a named sweep has. epoch_to_target is the "
        "one that is to be small.",
    )
    method: Literal["grid", "random", "bayes"] | None = sweep_option(
        None,
        "How values are chosen: each combination of lists in turn; drawn by seed and number of the trial; or by what "
        "the trials before gave (needs hotloop[sweep]). Left out, grid for lists, else random, or a named sweep's own.",
    )
    concurrent: int | None = concurrent_option()
    engine: Literal["local", "ray"] = engine_option()
    ray_address: str | None = ray_address_option()
    retry_failed: bool = sweep_option(False, "With --resume: run the trials that failed once more.")
    results_dir: Path = option(Path("results"), "Folder in which the sweep gets its own.", group="Records")
    run_name: str | None = option(
        None,
        "Name of the sweep's folder; else made of what is tried and the time.",
        check=folder_name,
        group="Records",
    )
    resume: bool = option(False, "Go on with the sweep of this --run-name.", group="Sweep")
    plan: bool = option(
        False, "Say which trials would run and what the first would do, and stop.", group="Sweep"
    )

    def check(self) -> None:
        """What a training would refuse is refused for each trial, with the values that it tries."""
        if not (self.named or self.over):
            raise OptionError(f"cnn sweep: say what to try: one of {', '.join(NAMED)}, or --over NAME=VALUES")
        for name in OF_ONE_RUN:
            if getattr(self, name):
                raise OptionError(f"--{name.replace('_', '-')}: is for one training; leave it out of a sweep")
        for name in ("training", "validation"):
            if not getattr(self, name):
                raise OptionError(f"--{name} False: trials are ranked by their validation; leave it out")
        check_place_options(self)
        if self.resume and self.run_name is None:
            raise OptionError("--resume: say which sweep goes on by --run-name, the name of its folder")
        if self.retry_failed and not self.resume:
            raise OptionError("--retry-failed: only with --resume")

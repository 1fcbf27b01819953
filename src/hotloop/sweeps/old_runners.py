"""What the older image classifier's two runners made of their few parameters: options of `hotloop cnn train`.

`run_sweep.py` and `run_mlperf_sweep.py` were called by a sweep with the values it had drawn. The same arithmetic serves
the named sweeps of `hotloop cnn sweep` and `hotloop compat`, which know each other not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

REPLICAS = 64  # each in a process of its own, which the runners always asked for
TARGET = 0.759
WITHOUT_NEED = ("POPRUN_HOSTS", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PARTITION_ID")
"""Environment variables that the runners refused to start without, and that nothing here asks for."""
Values = Mapping[str, Any]


def _schedule(values: Values, end_ratio: float) -> dict[str, Any]:
    """A quadratic fall after a warm-up that is added in front of it."""
    epochs, warmup = values["num_epochs"], values["warmup_epochs"]
    return {
        "lr_schedule_params": {
            "initial_learning_rate": values["init_lr"],
            "end_learning_rate_ratio": end_ratio,
            "epochs_to_total_decay": epochs - warmup,
            "power": 2,
        },
        "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": warmup},
    }


def _common(values: Values) -> dict[str, Any]:
    found = {
        "config": values["config"],
        "num_epochs": values["num_epochs"],
        "num_replicas": values.get("num_replicas", REPLICAS),
        "strict_devices": False,  # on the devices that there are
        "target_accuracy": values.get("target_accuracy", TARGET),
        "sweep": True,
        "label_smoothing": values["label_smoothing"],
    }
    decay = values.get("l2", values.get("weight_decay"))
    return found if decay is None else {**found, "l2_regularization": decay}


def options_of_sweep(values: Values) -> dict[str, Any]:
    """Of `run_sweep.py`: a checkpoint every epoch; the momentum of batch norm and optimiser are among the values."""
    decay, eeta = values.get("lars_weight_decay"), values.get("lars_eeta")
    return {
        **_common(values),
        "ckpts_per_epoch": 1,
        "first_ckpt_epoch": 0,
        "norm_layer": {"name": "custom_batch_norm", "momentum": values["bn_momentum"]},
        **_schedule(values, values["end_lr_ratio"]),
        "optimizer_params": {
            "momentum": values["opt_momentum"],
            **({} if decay is None else {"weight_decay": decay}),
            **({} if eeta is None else {"eeta": eeta, "epsilon": 0}),
        },
    }


def options_of_mlperf_sweep(values: Values) -> dict[str, Any]:
    """Of `run_mlperf_sweep.py`: a checkpoint every four epochs, the last epoch among them, and an end rate as it is."""
    decay, replicas = values.get("weight_decay"), values["num_replicas"]
    batch = values["micro_batch_size"] * replicas * values["grad_accum"]
    return {
        **_common(values),
        "ckpts_per_epoch": "1/4",
        "first_ckpt_epoch": values["num_epochs"] % 4,
        "micro_batch_size": values[
            "micro_batch_size"
        ],  # by which the runner counted, but which it told nobody
        "global_batch_size": batch,
        **_schedule(values, values["abs_end_lr"] / (values["init_lr"] * batch)),
        "optimizer_params": {
            "momentum": 0.9,
            **({} if decay is None else {"weight_decay": decay}),
            **({"eeta": 0.001, "epsilon": 0} if values.get("optimizer") == "lars" else {}),
        },
    }


@dataclass(frozen=True)
class Runner:
    """A script by its parameters: each with the type that its text has."""

    options: Callable[[Values], dict[str, Any]]
    needed: Mapping[str, type]
    optional: Mapping[str, type]


_RATES = {"config": str, "num_epochs": int, "init_lr": float}
RUNNERS = {
    "run_sweep.py": Runner(
        options_of_sweep,
        {**_RATES, "end_lr_ratio": float, "warmup_epochs": int, "bn_momentum": float, "label_smoothing": float,
         "opt_momentum": float},
        {"l2": float, "lars_weight_decay": float, "lars_eeta": float},
    ),
    "run_mlperf_sweep.py": Runner(
        options_of_mlperf_sweep,
        {**_RATES, "abs_end_lr": float, "warmup_epochs": int, "label_smoothing": float, "micro_batch_size": int,
         "grad_accum": int, "num_replicas": int},
        {"weight_decay": float, "optimizer": str},
    ),
}  # fmt: skip

"""A command shaped like an old image trainer, for the tests: many options of every kind, aliases, presets."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from hotloop.cli.command import Command, Common
from hotloop.cli.parser import Resolved, resolve, scan
from hotloop.errors import OptionError
from hotloop.options import Params, argument, between, non_negative, option, options_of, positive


@dataclass(frozen=True)
class TrainerConfig:
    seed: int | None = option(None, "Seed of everything random.")
    shuffle: bool = option(True, "Shuffle the training samples.")
    ckpts_per_epoch: Fraction = option(Fraction(1), "Checkpoints per epoch.", check=non_negative)
    first_ckpt_epoch: float = option(0.0, "Epochs before the first checkpoint.", check=non_negative)
    dataset: Literal["imagenet", "cifar10", "mnist"] = option("cifar10", "The data.", group="Data")
    dataset_path: Path = option(Path(), "Where the data is.", group="Data")
    model_name: str = option("toy_model", "The model.", aliases=("--model",))
    model_width: int = option(1, "Makes the prefix --model ambiguous but for the alias.")
    training: bool = option(True, "Run the training phase.")
    micro_batch_size: int = option(1, "Samples per replica.", check=positive)
    num_epochs: int = option(1, "Epochs.", check=positive)
    num_replicas: int = option(1, "Copies.", check=positive)
    logs_per_epoch: Fraction = option(Fraction(1), "Logs per epoch.", check=non_negative)
    weight_updates_per_epoch: int = option(-1, "-1 takes what the data gives.")
    gradient_accumulation_count: int | None = option(
        None, "Micro-batches an update.", aliases=("--gradient-accumulation",), check=positive
    )
    gradient_accumulation_mode: str = option("sum", "Makes the prefix ambiguous but for the alias.")
    global_batch_size: int | None = option(None, "Samples an update.", check=positive)
    precision: Literal["16.16", "16.32", "32.32"] = option("16.16", "Compute and update types.")
    pipeline_splits: tuple[str, ...] = option((), "Layers that open a stage.")
    device_mapping: tuple[int, ...] | None = option(None, "Device of each stage.", check=non_negative)
    optimizer: Literal["sgd", "lars", "rmsprop"] = option("sgd", "The optimiser.")
    optimizer_params: Params = option(Params(momentum=0), "Its parameters.")
    loss_scaling: float = option(0.0, "Static loss scale.")
    weight_decay: float = option(0.0, "Decay.")
    stochastic_rounding: Literal["ON", "OFF", "replica-identical"] = option("ON", "Rounding of updates.")
    norm_layer: Params = option(Params(name="custom_batch_norm", momentum=0.97), "The norm.")
    available_memory_proportion: tuple[float, ...] = option((), "Percent.", check=between(0, 100))
    wandb: bool = option(False, "Log to Weights & Biases.")
    wandb_run_name: str | None = option(None, "Its run name.")
    validation: bool = option(True, "Run the validation phase.")
    no_cache: bool = option(False, "A flag whose own name begins with no.")

    def __post_init__(self) -> None:
        if self.gradient_accumulation_count is not None and self.global_batch_size is not None:
            raise OptionError("--global-batch-size and --gradient-accumulation-count exclude each other")


@dataclass(frozen=True)
class PlacedConfig:
    names: tuple[str, ...] = argument("What to fetch.")
    force: bool = option(False, "Fetch again.")


PRESETS: dict[str, dict[str, Any]] = {
    "resnet8_test": {"model": "cifar_resnet8", "micro_batch_size": 8, "optimizer_params": {"momentum": 0.9}},
    "resnet50_gn": {"model-name": "resnet50", "norm_layer": {"name": "group_norm", "num_groups": 32}},
    "broken": {"micro_batch_sise": 8},
}


def say_config(config: TrainerConfig, context: Any) -> dict[str, Any]:
    context.say(f"model {config.model_name}")
    return {"model": config.model_name, "learning_rate": float("nan")}


TRAINER = Command("train", "Train.", TrainerConfig, say_config, presets=PRESETS)
PLACED = Command("fetch", "Fetch.", PlacedConfig, lambda config, context: {"names": config.names})


def given(*words: str, command: Command = TRAINER) -> Resolved:
    """What a command line of the trainer resolves to."""
    return resolve(command, scan(words, (*options_of(command.config), *options_of(Common))))


def config(*words: str) -> TrainerConfig:
    resolved: TrainerConfig = given(*words).config
    return resolved

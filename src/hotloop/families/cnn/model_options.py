"""Options of `hotloop cnn` that decide what one weight update computes: model, numbers, optimiser, rates.

Names and defaults are the old program's, so that its command lines and files mean the same here. Only types and
single values are looked at; what must fit together is the business of `checks`. No jax.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from hotloop.options import Params, between, non_negative, option, positive

MODEL, OPTIMISER, RATE, NUMBERS = "Model", "Optimiser", "Learning rate", "Numbers"
MODELS = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "cifar_resnet8",
    "cifar_resnet20",
    "cifar_resnet32",
    "cifar_resnet44",
    "cifar_resnet56",
    "toy_model",
    "toy_model_bn",
)
"""The names of networks; `network.build` takes these and other cifar_resnets of 6n + 2 layers."""
CIFAR = re.compile(r"cifar_resnet([1-9][0-9]{0,3})")


def known_model(name: Any) -> str | None:
    """The reason why a name is no model's, with all the names that are."""
    sized = CIFAR.fullmatch(name)
    if name in MODELS or (sized and int(sized[1]) >= 8 and int(sized[1]) % 6 == 2):
        return None
    return f"must be one of {', '.join(MODELS)}, or another cifar_resnet of 6n + 2 layers"


@dataclass(frozen=True)
class Model:
    """The network and its loss."""

    model_name: str = option(
        "toy_model",
        "The network: resnet18, 34, 50, 101, 152; cifar_resnet8, 20, 32, 44, 56; toy_model, toy_model_bn.",
        aliases=("--model",),
        metavar="NAME",
        check=known_model,
        group=MODEL,
    )
    norm_layer: Params = option(
        Params(name="custom_batch_norm", momentum=0.97),
        "Normalisation: name batch_norm or custom_batch_norm (the same here) with momentum; or group_norm with "
        "num_groups or channels_per_group.",
        group=MODEL,
    )
    statistics_rule: Literal["spread", "seed"] = option(
        "spread",
        "Running variance of batch norm: spread counts the differences between the means of micro-batches, so that "
        "any split equals the undivided batch; seed leaves them out, as the old program did.",
        group=MODEL,
    )
    dbn_replica_group_size: int = option(
        1, "Replicas that share batch-norm statistics; 1: none.", check=positive, group=MODEL
    )
    label_smoothing: float | None = option(
        None, "Share of each label spread over all classes.", check=between(0, 1), group=MODEL
    )


@dataclass(frozen=True)
class Optimiser:
    """How gradients become a step."""

    optimizer: Literal["sgd", "lars", "rmsprop"] = option("sgd", "The update rule.", group=OPTIMISER)
    optimizer_params: Params = option(
        Params(momentum=0),
        "sgd: momentum, nesterov; lars: momentum, weight_decay, eeta, epsilon; rmsprop: momentum, "
        "base_decay_exponent, epsilon.",
        group=OPTIMISER,
    )
    weight_decay: float = option(
        0.0, "Decay beside the rule: the step is -rate * (rule + X * W).", check=non_negative, group=OPTIMISER
    )
    l2_regularization: float = option(
        0.0,
        "Decay through the rule: X * W is added to the gradient, and so passes the momentum.",
        check=non_negative,
        group=OPTIMISER,
    )
    exclude_norms_and_biases: bool = option(
        False,
        "Leave scales, offsets and biases out of both decays; most recent recipes do.",
        group=OPTIMISER,
    )


@dataclass(frozen=True)
class Rate:
    """The learning rate over the run."""

    lr_schedule: Literal["const", "cosine", "stepped", "polynomial", "one_cycle"] = option(
        "const", "Shape of the rate over the run.", group=RATE
    )
    lr_schedule_params: Params = option(
        Params(initial_learning_rate=0.0001),
        "initial_learning_rate is for one sample and grows with the global batch; cosine and polynomial: "
        "epochs_to_total_decay; polynomial: end_learning_rate_ratio, power; one_cycle: total_epochs, peak_epoch; "
        "stepped: boundaries (epochs) and one more values, taken as they are.",
        group=RATE,
    )
    lr_warmup_params: Params | None = option(
        None,
        "warmup_epochs, and warmup_mode: shift starts the schedule after the warm-up, mask lets it run from the "
        "first update.",
        group=RATE,
    )
    lr_staircase: bool = option(False, "Keep the rate of an epoch's first update all epoch.", group=RATE)


@dataclass(frozen=True)
class Numbers:
    """Types, rounding and loss scaling."""

    precision: Literal["16.16", "16.32", "32.32"] = option(
        "16.16", "Bits of the computation and of the weights kept between updates.", group=NUMBERS
    )
    half: Literal["bfloat16", "float16"] = option(
        "bfloat16",
        "What 16 bits are. bfloat16 has the range of float32, so that no gradient under- or overflows and no loss "
        "scaling is needed; float16 is the old program's, finer and to be used with --loss-scaling.",
        group=NUMBERS,
    )
    half_partials: bool = option(
        False, "Also add up products in 16 bits, where the device can.", group=NUMBERS
    )
    stochastic_rounding: Literal["ON", "OFF", "replica-identical"] = option(
        "ON",
        "Round 16-bit weights up or down at random, so that small steps count on average; replicas always round "
        "alike, and validation never does.",
        group=NUMBERS,
    )
    loss_scaling: float = option(
        0.0,
        "Multiply the loss by this and divide the gradients; 0: not at all.",
        check=non_negative,
        group=NUMBERS,
    )
    auto_loss_scaling: bool = option(
        False,
        "Find the factor during the run; for sgd without momentum and a constant rate.",
        group=NUMBERS,
    )

"""Three ways to train the example's network, as data: the rule, its rate, the augmentation, the length.

What a recipe says about options of the command line is their default there; the rest is the recipe's alone. The
functions that the words stand for are in `cifar_model` and `cifar_images`. No jax.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

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
OPTIONS = ("learning_rate", "batch_size", "epochs")
"""What a recipe sets that may also be given on the command line."""
PRESETS: dict[str, dict[str, Any]] = {
    name: {"recipe": name, **{option: getattr(recipe, option) for option in OPTIONS}}
    for name, recipe in RECIPES.items()
}

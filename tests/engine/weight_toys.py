"""Two problems of one weight whose value after one update is known by hand, whatever the batch is split into."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Toy:
    """y = `slope` x for these x, from `start` on by gradient descent with `rate` on `share` (w x - y)^2."""

    x: tuple[float, ...]
    slope: float
    start: float
    rate: float
    share: float
    result: float

    @property
    def data(self) -> dict[str, "np.ndarray[Any, Any]"]:
        x = np.array(self.x, np.float32)
        return {"x": x, "y": np.float32(self.slope) * x}

    @property
    def samples(self) -> int:
        return len(self.x)

    @property
    def changed(self) -> "list[tuple[Toy, dict[str, np.ndarray[Any, Any]]]]":
        """Controls: the same with the last label one higher, and from another weight, each with its data."""
        relabelled = {**self.data, "y": self.data["y"] + (np.arange(self.samples) == self.samples - 1)}
        other = {name: values.astype(np.float32) for name, values in relabelled.items()}
        return [(self, other), (replace(self, start=self.start + 0.25), self.data)]

    def step(self, data: "dict[str, np.ndarray[Any, Any]]") -> float:
        """The weight after an update with these data, by hand."""
        errors = self.start * data["x"].astype(float) - data["y"]
        return float(self.start - self.rate * self.share * 2 * np.mean(errors * data["x"]))

    def loss(self, w: Any, batch: Any) -> Any:
        return self.share * jnp.mean((w * batch["x"] - batch["y"]) ** 2)


# The old program's: one step of -2 (1 - 2) from 1, and one of twice the mean of x^2 for 16 of them from 0 to 1.
TOYS = {
    "3.0": Toy((1.0,) * 16, slope=2, start=1, rate=1, share=1, result=3.0),
    "0.3111111": Toy(tuple(n / 15 for n in range(16)), slope=0, start=1, rate=1, share=1, result=14 / 45),
}


def stage_tree() -> dict[str, dict[str, "np.ndarray[Any, Any]"]]:
    """Four layers of several types and sizes, no number of which is another's."""
    return {
        f"layer{number}": {
            "kernel": np.arange(1, 6 * (number + 1) + 1, dtype=np.float32).reshape(-1, 3) / (number + 7),
            "half": np.arange(1, 4 + number, dtype=np.float16),
            "count": np.int32(number + 11),
        }
        for number in range(4)
    }

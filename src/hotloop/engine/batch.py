"""Batch arithmetic in whole numbers: micro batches, replicas, gradient accumulation, padded evaluation.

It must not know epochs, host events, devices or jax: `plan.py` builds on it, the command line shows it.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from hotloop.errors import PlanError


def whole(argument: str, value: int, least: int = 1) -> int:
    """`value` itself, or a PlanError that names the argument when it is below `least`."""
    if value < least:
        raise PlanError(f"{argument}={value}: must be at least {least}")
    return value


@dataclass(frozen=True)
class Batch:
    """What one weight update sees: `accumulation` micro batches on each of `replicas` copies of the model."""

    micro: int = 1
    replicas: int = 1
    accumulation: int = 1
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("micro", "replicas", "accumulation"):
            whole(name, getattr(self, name))

    @property
    def global_(self) -> int:
        """Samples in one weight update."""
        return self.micro * self.replicas * self.accumulation

    @classmethod
    def of(
        cls, micro: int, replicas: int = 1, *, accumulation: int | None = None, global_size: int | None = None
    ) -> "Batch":
        """The batch for an accumulation count, or for the global size nearest to the one asked for."""
        if accumulation is not None and global_size is not None:
            raise PlanError(
                f"accumulation={accumulation} and global_size={global_size}: "
                "each follows from the other, give only one"
            )
        if global_size is None:
            return cls(micro, replicas, 1 if accumulation is None else accumulation)
        return _nearest(cls(micro, replicas), whole("global_size", global_size))

    def describe(self) -> str:
        return (
            f"micro batch {self.micro} x replicas {self.replicas} x accumulation {self.accumulation}"
            f" = global batch {self.global_}"
        )

    def as_dict(self) -> dict[str, int]:
        sizes = {"micro": self.micro, "replicas": self.replicas, "accumulation": self.accumulation}
        return {**sizes, "global": self.global_}


def _nearest(unit: Batch, size: int) -> Batch:
    """Accumulate `unit` so that the global size comes nearest to `size`; a half goes to the even count."""
    quotient = Fraction(size, unit.global_)
    count = round(quotient)
    asked = f"global_size={size}: micro batch {unit.micro} x replicas {unit.replicas} = {unit.global_}"
    if count == 0:
        raise PlanError(
            f"{asked} is at least twice as much, so that the accumulation count "
            f"would be 0; ask for at least {unit.global_}, or lower the micro batch or the replicas"
        )
    if count == quotient:
        return Batch(unit.micro, unit.replicas, count)
    warning = (
        f"{asked} goes into it {float(quotient):.4g} times, not a whole number; "
        f"gradient accumulation count is {count} and global batch size {unit.global_ * count} instead"
    )
    return Batch(unit.micro, unit.replicas, count, (warning,))


@dataclass(frozen=True)
class EvaluationBatches:
    """How a whole set is evaluated in batches of one size, each real sample counted once.

    Every process runs `batches` batches of `batch` samples, the same number everywhere; `padded` counts all
    samples of all processes, and the `padding` among them carry weight 0.
    """

    samples: int
    batch: int
    processes: int
    batches: int

    @property
    def padded(self) -> int:
        """Samples that run, padding included."""
        return self.batches * self.batch * self.processes

    @property
    def padding(self) -> int:
        """Samples that run and do not count."""
        return self.padded - self.samples


def plan_evaluation(samples: int, global_size: int, processes: int = 1) -> EvaluationBatches:
    """Batches and padding for `samples` in batches of `global_size`, shared by so many processes."""
    for name, value in (("samples", samples), ("global_size", global_size), ("processes", processes)):
        whole(name, value)
    if global_size % processes:
        raise PlanError(
            f"global_size={global_size} of an evaluation: must be a multiple of the {processes} processes"
        )
    batch = global_size // processes
    largest_share = -(-samples // processes)
    return EvaluationBatches(samples, batch, processes, -(-largest_share // batch))

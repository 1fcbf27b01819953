"""The older scripts, as data: the hotloop command that took each one's place, and what became of its options.

Options that the new command knows, under the same name, need no entry. Nothing is parsed here; `compat.py` applies it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hotloop.options.values import FALSE, TRUE

Values = Sequence[str]
Rewrite = Callable[[Values], list[str]]


@dataclass(frozen=True)
class Script:
    """One script's successor."""

    command: tuple[str, ...]
    rewrites: Mapping[str, Rewrite] = field(default_factory=dict)
    """Option -> the words in its place, from the values after it."""
    dropped: frozenset[str] = frozenset()
    """Options that mean nothing any more."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """Pattern of an older benchmark file whose line is printed no more -> the field of our records that it means."""


def renamed(name: str) -> Rewrite:
    """The same values under another name."""
    return lambda values: [name, *values]


def report(values: Values) -> list[str]:
    """What was a flag takes a folder now."""
    return ["--report", *(values or ["report"])]


def checkpoints(values: Values) -> list[str]:
    """Whether to save became how often."""
    return ["--ckpts-per-epoch", "0"] if values and values[0].lower() in FALSE else []


def momentum(values: Values) -> list[str]:
    """The momentum of batch norm became a part of the norm's own settings."""
    text = values[0] if values else ""
    try:
        number = float(text)
    except ValueError:
        return ["--bn-momentum", *values]  # not a number: the command says what is wrong
    return ["--norm-layer", json.dumps({"name": "custom_batch_norm", "momentum": number})]


def rounding(values: Values) -> list[str]:
    """The flag became a choice of words."""
    word = values[0].lower() if values else "on"
    return ["--stochastic-rounding", *(["OFF"] if word in FALSE else ["ON"] if word in TRUE else values)]


CNN = Script(
    ("cnn", "train"),
    {
        "--checkpoint-dir": renamed("--checkpoint-output-dir"),
        "--checkpoints": checkpoints,
        "--bn-momentum": momentum,
        "--stochastic-rounding": rounding,
    },
    figures={
        r"Average images\/s.:\s*([\d\.]+)": "throughput",
        # The line was no percentage then, and had the accuracy of trainings and validations.
        r"accuracy.:\s*([\d\.]+|nan)": "training_accuracy|validation.validation_accuracy",
        r"loss.:\s*([\d\.]+|nan)": "loss",
    },
)
RECOMMENDER = {"--batches-per-step": renamed("--device-iterations"), "--compiler-report": report}
KERNEL = {"--report": report}

SCRIPTS: Mapping[str, Script] = {
    "train.py": CNN,
    "main.py": Script(
        ("vcd", "train"),
        figures={r"\|\sTime\staken:\s*(.*?)(?:\n|$)": "seconds_per_10000_updates"},
    ),
    "autoencoder_main.py": Script(("recommender", "train"), RECOMMENDER),
    # The sweep writes no report: each trial is a process of its own.
    "autoencoder_benchmark.py": Script(
        ("recommender", "sweep"),
        {"--batches-per-step": renamed("--device-iterations")},
        frozenset({"--compiler-report"}),
        {"Aggregate average throughput over .* IPU devices = (.*) users/sec": "average_throughput"},
    ),
    "dense.py": Script(("kernel", "dense"), KERNEL),
    "grouped_conv.py": Script(("kernel", "grouped-conv"), KERNEL),
    "rnn.py": Script(("kernel", "rnn"), KERNEL),
    "gru.py": Script(("kernel", "gru"), KERNEL),
    "lstm.py": Script(("kernel", "lstm"), KERNEL),
    "lstm_multi.py": Script(("kernel", "lstm-multi"), KERNEL),
    "hmc.py": Script(("kernel", "hmc"), KERNEL),
    "ipu_estimator_cnn.py": Script(("estimator",), {"--profile": report}),
    "dataset_benchmark.py": Script(("cnn", "data-benchmark")),
    "verify_dataset.py": Script(("cnn", "verify")),
}
RUNNER = Script(("bench", "run"), dropped=frozenset({"--examples-location"}))
"""What `python3 -m examples_utils benchmark` was."""

SERVING = ("send_request.py", "export_for_serving.py")
WRAPPERS = ("poprun", "mpirun", "mpiexec")

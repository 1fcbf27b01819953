"""A command line of an older script, as a shell would take it, turned into the hotloop command that replaces it.
Options that the new command knows under the same name need no entry here; unknown ones go through as they are.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from hotloop.bench.compat_estimator import combine_replicas, combine_stages, combine_tf2
from hotloop.bench.compat_runners import RUNNER_SCRIPTS, TIMED, translate_runner
from hotloop.bench.compat_serving import combine_export, combine_request
from hotloop.bench.option_groups import CompatError, OptionGroup, group_options
from hotloop.errors import did_you_mean
from hotloop.options import (
    FALSE,
    TRUE,
)

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
WITH_VALUE = ("-X", "-W")  # of the interpreter
Values = Sequence[str]
Rewrite = Callable[[Values], list[str]]
Combine = Callable[[Sequence[OptionGroup]], tuple[list[OptionGroup], list[str]]]
"""An old script's options -> the options in their place, and notices."""


@dataclass(frozen=True)
class Script:
    command: tuple[str, ...]
    rewrites: Mapping[str, Rewrite] = field(default_factory=dict)
    """Option -> the words in its place, from the values after it."""
    dropped: frozenset[str] = frozenset()  # options that mean nothing any more
    figures: Mapping[str, str] = field(default_factory=dict)
    """Pattern of an older benchmark file whose line is printed no more -> the field of our records that it means."""
    in_processes: bool = False  # whether its command can run as several
    combine: Combine | None = None  # for options that mean something together, before all else


def _word(values: Values) -> str:
    return values[0].lower() if values else ""


def rename_option(name: str, *default: str) -> Rewrite:
    """`default`: what stands for the values of an option that was a flag."""
    return lambda values: [name, *(values or default)]


def rewrite_momentum(values: Values) -> list[str]:
    """The momentum of batch norm became a part of the norm's own settings."""
    try:
        number = float(_word(values))
    except ValueError:
        return ["--bn-momentum", *values]  # not a number: the command says what is wrong
    return ["--norm-layer", json.dumps({"name": "custom_batch_norm", "momentum": number})]


CNN = Script(
    ("cnn", "train"),
    {
        "--checkpoint-dir": rename_option("--checkpoint-output-dir"),
        # Whether to save became how often, and a flag became a choice of words.
        "--checkpoints": lambda values: ["--ckpts-per-epoch", "0"] if _word(values) in FALSE else [],
        "--bn-momentum": rewrite_momentum,
        "--stochastic-rounding": lambda values: [
            "--stochastic-rounding",
            *(["OFF"] if _word(values) in FALSE else ["ON"] if _word(values) in ("", *TRUE) else values),
        ],
    },
    figures={
        r"Average images\/s.:\s*([\d\.]+)": "throughput",
        # The line was no percentage then, and had the accuracy of trainings and validations.
        r"accuracy.:\s*([\d\.]+|nan)": "training_accuracy|validation.validation_accuracy",
        r"loss.:\s*([\d\.]+|nan)": "loss",
    },
    in_processes=True,
)
TF2_ESTIMATOR = Script(("estimator", "--recipe", "tf2"), in_processes=True, combine=combine_tf2)
ITERATIONS = {"--batches-per-step": rename_option("--device-iterations")}
REPORT = rename_option("--report", "report")  # which takes a folder now
KERNEL = {"--report": REPORT}
SCRIPTS: Mapping[str, Script] = {
    "train.py": CNN,
    "main.py": Script(
        ("vcd", "train"),
        figures={r"\|\sTime\staken:\s*(.*?)(?:\n|$)": "seconds_per_10000_updates"},
        in_processes=True,
    ),
    "autoencoder_main.py": Script(
        ("recommender", "train"), {**ITERATIONS, "--compiler-report": REPORT}, in_processes=True
    ),
    # The sweep writes no report: each trial is a process of its own.
    "autoencoder_benchmark.py": Script(
        ("recommender", "sweep"),
        ITERATIONS,
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
    "ipu_estimator_cnn.py": Script(("estimator",), {"--profile": REPORT}, in_processes=True),
    "cifar10_ipu_estimator.py": TF2_ESTIMATOR,
    "cifar10_ipu_estimator_replica.py": replace(TF2_ESTIMATOR, combine=combine_replicas),
    "cifar10_ipu_pipeline_estimator.py": replace(TF2_ESTIMATOR, combine=combine_stages),
    "dataset_benchmark.py": Script(("cnn", "data-benchmark"), in_processes=True),
    "verify_dataset.py": Script(("cnn", "verify")),
    "export_for_serving.py": Script(("export",), combine=combine_export),
    "send_request.py": Script(("request",), combine=combine_request),
}
RUNNER = Script(("bench", "run"), dropped=frozenset({"--examples-location"}))  # was a module
POPRUN = ("--num-instances", "--num-replicas", "--ipus-per-replica")  # which launch has by the same names
LAUNCH_ALONE = ("--strict-devices", "--max-restarts", "--heartbeat", "--stall")  # which no wrapper ever had
COPIES = ("-np", "-n", "-N", "--np")
WRAPPERS = ("poprun", "mpirun", "mpiexec")


@dataclass(frozen=True)
class Translation:
    command: list[str]
    notices: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    """Patterns for lines that the command prints no more -> the fields of its records."""
    before: Sequence[Sequence[str]] = ()
    """Commands that must have ended well before it."""

    def __str__(self) -> str:
        set_before = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        commands = [shlex.join(command) for command in (*self.before, self.command)]
        return " ".join([*set_before, " && ".join(commands)])


def translate(argv: Sequence[str]) -> Translation:
    """The hotloop command for an older script's; a CompatError where there is none."""
    words = list(argv)
    environment = {}
    while words and (variable := ASSIGNMENT.fullmatch(words[0])):
        environment[variable[1]] = variable[2]
        words.pop(0)
    notices: list[str] = []
    wrapper, own = PurePath(words[0]).name if words else "", []
    if wrapper in WRAPPERS:
        programs = [bool(PYTHON.fullmatch(PurePath(word).name)) or word.endswith(".py") for word in words]
        start = programs.index(True) if any(programs) else len(words)
        own, words = words[1:start], words[start:]
    if words and PYTHON.fullmatch(PurePath(words[0]).name):
        del words[: script_place(words)]
    if not words:
        raise CompatError("no script: give the old command, such as `hotloop compat python3 lstm.py --train`")
    if words[0] == "-m":
        script, name, words = RUNNER, " ".join(words[1:3]), words[3:]
        if name != "examples_utils benchmark":
            raise CompatError(f"-m {name}: of modules only `-m examples_utils benchmark` has a command here")
    else:
        name = PurePath(words.pop(0)).name
        if name in RUNNER_SCRIPTS:
            found = translate_runner(name, group_options(words))
            commands = [["hotloop", *command] for command in found.commands]
            notices = translate_wrapper(wrapper, own, name)[1] if wrapper in WRAPPERS else []
            return Translation(
                commands[-1], [*notices, *found.notices], environment, CNN.figures, commands[:-1]
            )
        if name not in SCRIPTS:
            hint = did_you_mean(name, [*SCRIPTS, *RUNNER_SCRIPTS])
            raise CompatError(f"{name}: not one of the older scripts{hint}")
        script = SCRIPTS[name]
    command, groups = script.command, group_options(words)
    if script is SCRIPTS["train.py"]:
        command, groups = choose_cnn_command(groups)
    translated = ["hotloop"]
    if wrapper in WRAPPERS:
        launch, notices = translate_wrapper(wrapper, own, name if not script.in_processes else "")
        translated += launch
    translated += command
    if script.combine is not None:
        groups, combined = script.combine(groups)
        notices += combined
    for group in groups:
        if group.name in script.rewrites:
            translated += script.rewrites[group.name](group.values)
        elif group.name not in script.dropped:
            translated += group.words
    if dropped := dict.fromkeys(group.name for group in groups if group.name in script.dropped):
        notices.append(f"options of {name} that no longer exist are left out: {', '.join(dropped)}")
    return Translation(translated, notices, environment, script.figures)


def translate_wrapper(wrapper: str, own: Sequence[str], alone: str) -> tuple[list[str], list[str]]:
    """The words of `hotloop launch` for those between a wrapper and its program, and a line on what is left out.

    `alone` names a script whose command is one process, or starts several by itself, whatever was asked for.
    """
    launch: list[str] = []
    dropped: list[str] = []
    for group in group_options(own):
        found = [option for option in POPRUN if group.name and option.startswith(group.name)]
        if wrapper != "poprun":
            found = ["--num-instances"] if group.name in COPIES else []
        if len(found) == 1 and group.values and not alone:
            launch += [found[0], group.values[0]]
        elif group.name in LAUNCH_ALONE and not alone:
            launch += group.words
        else:
            dropped.append(group.name or " ".join(group.words))
    notices = []
    if alone:
        what = "starts its processes itself" if alone == TIMED else "runs as one process"
        named = f", so its options are left out: {', '.join(dropped)}" if dropped else ""
        notices.append(f"{wrapper}: {alone} {what}{named}")
    elif dropped:
        notices.append(f"options of {wrapper} that launch has not are left out: {', '.join(dropped)}")
    return (["launch", *launch, "--"] if launch else []), notices


def script_place(words: Sequence[str]) -> int:
    """Where the script, or -m, stands in a Python command: after the interpreter, its options and their values."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 2 if words[at] in WITH_VALUE else 1
    return at


def choose_cnn_command(groups: Sequence[OptionGroup]) -> tuple[tuple[str, ...], list[OptionGroup]]:
    """`cnn train`, or `cnn validate` where the last word on training was no and checkpoints are named.

    The old program removed the checkpoints that it had validated, unless it was told not to: those in a folder that
    was named for both. Without training and checkpoints it validated random weights; so does `cnn train` then.
    """

    def given(option: str, shortest: str) -> bool:
        return any(option.startswith(group.name) and group.name.startswith(shortest) for group in groups)

    if not given("--checkpoint-input-dir", "--checkpoint-i"):
        return ("cnn", "train"), list(groups)
    asked = [group for group in groups if group.name in ("--training", "--no-training")]
    if asked and (asked[-1].name == "--no-training" or _word(asked[-1].values) in FALSE):
        return ("cnn", "validate"), [group for group in groups if group not in asked]
    has_its_word = given("--clean-dir", "--cl") or given("--config-path", "--config-path")
    return ("cnn", "train"), [*groups, *([] if has_its_word else group_options(["--clean-dir", "True"]))]

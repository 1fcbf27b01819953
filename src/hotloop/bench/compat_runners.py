"""The scripts that ran the older image classifier for others: a sweep's trial, and a training that is timed.

Each becomes a training, or a launch of one; what they needed of the old machines is named and left out.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.bench.option_groups import CompatError, OptionGroup
from hotloop.options import to_jsonable
from hotloop.sweeps.old_runners import RUNNERS, WITHOUT_NEED

TIMED = "run_and_time.py"
RUNNER_SCRIPTS = (*RUNNERS, TIMED)
LAUNCH_OPTIONS = ("--num-instances", "--num-replicas", "--ipus-per-replica")
OF_MACHINES = ("--partition", "--vipu-host")
APPLICATION = "--app-args"
WANDB = "--wandb, which it always asked for, is left out: it is an option of the training"
COMPILING = ("--num-epochs", "1", "--ckpts-per-epoch", "0", "--wandb", "False")
"""What made the first of the two runs short: an epoch, its validation, and nothing kept."""


@dataclass(frozen=True)
class RunnerCommands:
    """Commands one after the other, each if the one before ended well; without the word `hotloop`."""

    commands: list[list[str]]
    notices: list[str]


def translate_runner(name: str, groups: Sequence[OptionGroup]) -> RunnerCommands:
    """What a runner's command line asks for; CompatError where it lacks something or has what is no number."""
    return _time_training(groups) if name == TIMED else _train_once(name, groups)


def _find_values(
    name: str, groups: Sequence[OptionGroup], options: Sequence[str]
) -> tuple[dict[str, str], list[OptionGroup]]:
    """The text of each of these options, which may be cut short as before, and what is none of them."""
    found: dict[str, str] = {}
    rest = []
    for group in groups:
        meant = [each for each in options if group.name and each.startswith(group.name)]
        meant = [group.name] if group.name in options else meant
        if len(meant) != 1:
            rest.append(group)
        elif not group.values:
            raise CompatError(f"{name}: {meant[0]} needs a value")
        else:
            found[meant[0]] = " ".join(group.values)
    return found, rest


def _train_once(name: str, groups: Sequence[OptionGroup]) -> RunnerCommands:
    """A sweep's trial: the options that the runner made of its parameters; others go to the training as they are."""
    runner = RUNNERS[name]
    kinds = {
        f"--{each.replace('_', '-')}": kind for each, kind in {**runner.needed, **runner.optional}.items()
    }
    texts, rest = _find_values(name, groups, list(kinds))
    for each in runner.needed:
        if (option := f"--{each.replace('_', '-')}") not in texts:
            raise CompatError(f"{name}: {option} is needed")
    values = {
        option.removeprefix("--").replace("-", "_"): _read(name, option, text, kinds[option])
        for option, text in texts.items()
    }
    command = ["cnn", "train"]
    for option, value in runner.options(values).items():
        command += [f"--{option.replace('_', '-')}", _text(value)]
    for group in rest:
        command += group.words
    needless = f"{', '.join(WITHOUT_NEED)} are not needed"
    devices = "its replicas run on the devices that there are, the rest accumulates"
    return RunnerCommands([command], [f"{name}: {needless}; {devices}; {WANDB}"])


def _read(name: str, option: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise CompatError(f"{name}: {option} {text}: must be {what}") from None


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(to_jsonable(value))
    return repr(value) if isinstance(value, float) else str(value)


def _time_training(groups: Sequence[OptionGroup]) -> RunnerCommands:
    """A run of one epoch that compiles, then the one whose time counts."""
    options = (*LAUNCH_OPTIONS, "--hosts", *OF_MACHINES, APPLICATION)
    texts, rest = _find_values(TIMED, _join_application(groups), options)
    if rest:
        raise CompatError(
            f"{TIMED}: {' '.join(rest[0].words)}: options of the training stand in {APPLICATION}='...'"
        )
    for option in LAUNCH_OPTIONS:
        if option not in texts:
            raise CompatError(f"{TIMED}: {option} is needed")
    launch = ["launch", *(word for option in LAUNCH_OPTIONS for word in (option, texts[option]))]
    hosts = [host for host in texts.get("--hosts", "").replace(",", " ").split() if host != "localhost"]
    if len(hosts) > 1:
        launch += ["--hosts", ",".join(hosts)]
    try:
        given = shlex.split(texts.get(APPLICATION, ""))
    except ValueError as error:
        raise CompatError(f"{TIMED}: {APPLICATION}: {str(error).lower()}") from None
    training = [*launch, "--", "cnn", "train", *given, "--mlperf-logging", "True"]
    dropped = [option for option in ("--hosts", *OF_MACHINES) if option in texts and option not in launch]
    notices = [f"{TIMED}: a run of one epoch that compiles, then the one whose time counts; {WANDB}"]
    if dropped:
        notices.append(f"options of {TIMED} that are not needed are left out: {', '.join(dropped)}")
    return RunnerCommands([[*training, *COMPILING, *_other_name(given)], training], notices)


def _join_application(groups: Sequence[OptionGroup]) -> list[OptionGroup]:
    """A value that begins with a hyphen, which `--app-args='--config x'` has, is one word and opens no option."""
    joined: list[OptionGroup] = []
    for group in groups:
        follows = bool(joined) and joined[-1].name == APPLICATION and not joined[-1].values
        if follows and any(" " in word for word in group.words):
            joined[-1] = joined[-1]._replace(values=group.words)
        else:
            joined.append(group)
    return joined


def _other_name(given: Sequence[str]) -> list[str]:
    """The first run must not take the name that the second is to have."""
    for at, word in enumerate(given):
        if word.startswith("--run-name="):
            return [f"{word}-compiling"]
        if word == "--run-name" and at + 1 < len(given):
            return [word, f"{given[at + 1]}-compiling"]
    return []

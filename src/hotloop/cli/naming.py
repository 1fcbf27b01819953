"""Arguments as options: the engine and the data speak of `replicas=8`, a command says `--replicas 8`.

The rooms below know no command line, and whoever calls them from Python knows no options. So their messages name
arguments, and here those that are options of the command, by the same name or another, are spelled as such.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hotloop.errors import HotloopError

OTHER_NAMES = {
    "accumulation": ("gradient_accumulation_count",),
    "automatic": ("auto_loss_scaling",),
    "data_dir": ("dataset_path", "data"),
    "epochs": ("num_epochs",),
    "global_size": ("global_batch_size",),
    "l2": ("l2_regularization",),
    "micro": ("micro_batch_size",),
    "replicas": ("num_replicas",),
    "scale": ("loss_scaling",),
    "static": ("loss_scaling",),
}
"""Options that give an argument of another name its value."""
PHRASES = {
    "learning_rate: name=": "--lr-schedule ",
    "learning_rate: params:": "--lr-schedule-params:",
    "learning_rate: warmup:": "--lr-warmup-params:",
    "optimizer: name=": "--optimizer ",
    "optimizer: params:": "--optimizer-params:",
}
"""Arguments that are called alike in two functions."""
_ARGUMENT = re.compile(r"(?<![\w.-])([a-z][a-z0-9_]*)=(True\b)?")


def with_options(text: str, options: Collection[str]) -> str:
    """The text, with each `name=value` whose name is (or stands for) one of these options as `--name value`."""

    def spelled(found: re.Match[str]) -> str:
        argument, flag = found.groups()
        name = next((n for n in (argument, *OTHER_NAMES.get(argument, ())) if n in options), None)
        if name is None:
            return found[0]
        return f"--{name.replace('_', '-')}" + ("" if flag else " ")

    for phrase, words in PHRASES.items():
        text = text.replace(phrase, words)
    return _ARGUMENT.sub(spelled, text)


@contextmanager
def errors_with_options(options: Collection[str]) -> Iterator[None]:
    """Spell the arguments in the message of an error, or of a stop, that the block raises."""
    try:
        yield
    except (HotloopError, KeyboardInterrupt) as error:
        error.args = (with_options(str(error), options), *error.args[1:])
        raise

"""Options: the fields of frozen config dataclasses, declared once, read from text, files and Python alike.

A config module says `batch_size: int = option(32, "Samples per update.", check=positive)` and nothing else;
the command line, config files and presets all read the field by that declaration. This package knows no
command and no device, and imports neither jax nor numpy.
"""

from hotloop.options.checks import Check, at_least, between, finite, folder_name, non_negative, positive
from hotloop.options.declare import Option, argument, build, construct, option, options_of, validate
from hotloop.options.params import Params, plain
from hotloop.options.suggest import did_you_mean

__all__ = [
    "Check",
    "Option",
    "Params",
    "argument",
    "at_least",
    "between",
    "build",
    "construct",
    "did_you_mean",
    "finite",
    "folder_name",
    "non_negative",
    "option",
    "options_of",
    "plain",
    "positive",
    "validate",
]

"""Options: the fields of frozen config dataclasses, declared once, read from text, files and Python alike.

A config module says `batch_size: int = option(32, "Samples per update.", check=positive)` and nothing else;
the command line, config files and presets all read the field by that declaration. This package knows no
command and no device, and imports neither jax nor numpy.
"""

from hotloop.errors import did_you_mean
from hotloop.options.declare import (
    Check,
    Option,
    Params,
    argument,
    at_least,
    between,
    build,
    construct,
    finite,
    folder_name,
    non_negative,
    option,
    option_table,
    options_of,
    positive,
    table_option,
    to_jsonable,
    validate,
    values_of,
)

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
    "option_table",
    "options_of",
    "positive",
    "table_option",
    "to_jsonable",
    "validate",
    "values_of",
]

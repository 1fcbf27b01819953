"""Options: the fields of frozen config dataclasses, declared once, read from text, files and Python alike.

A config says `batch_size: int = option(32, "Samples per update.", check=positive)` and nothing else. This package knows
no command and no device, and imports neither jax nor numpy.
"""

from hotloop.errors import did_you_mean as did_you_mean
from hotloop.options.declare import Check as Check
from hotloop.options.declare import Option as Option
from hotloop.options.declare import Options as Options
from hotloop.options.declare import Params as Params
from hotloop.options.declare import argument as argument
from hotloop.options.declare import at_least as at_least
from hotloop.options.declare import between as between
from hotloop.options.declare import build as build
from hotloop.options.declare import construct as construct
from hotloop.options.declare import finite as finite
from hotloop.options.declare import folder_name as folder_name
from hotloop.options.declare import non_negative as non_negative
from hotloop.options.declare import option as option
from hotloop.options.declare import option_table as option_table
from hotloop.options.declare import options_of as options_of
from hotloop.options.declare import positive as positive
from hotloop.options.declare import table_option as table_option
from hotloop.options.declare import to_jsonable as to_jsonable
from hotloop.options.declare import values_of as values_of

"""A command line of `hotloop cnn train` up to its settings, for the tests: no device, no data."""

from hotloop.cli.command import Command, Common
from hotloop.cli.configs import Resolved
from hotloop.cli.configs import resolve as read
from hotloop.cli.console import spell_options_in_errors
from hotloop.cli.parser import scan
from hotloop.families.cnn.job import SAMPLES, Settings, resolve
from hotloop.families.cnn.options import Train
from hotloop.families.cnn.presets import PRESETS
from hotloop.options import options_of

COMMAND = Command("train", "Train.", Train, presets=PRESETS)


def given(*words: str) -> dict[str, object]:
    return scan(words, (*options_of(Train), *options_of(Common)))


def typed(*words: str) -> Resolved:
    """The config that a command line asks for."""
    return read(COMMAND, given(*words))


def settings(*words: str, devices: int = 1) -> Settings:
    """What it means on so many devices."""
    found = typed(*words)
    config, explicit = found.config, frozenset(given(*words))
    with spell_options_in_errors(COMMAND.option_names):
        return resolve(config, SAMPLES[config.dataset], devices, explicit, found.configured)

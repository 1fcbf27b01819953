"""A command line of `hotloop cnn train` up to its job, for the tests: no data, and as many devices as one likes."""

from hotloop.cli.command import Command, Common, spell_options
from hotloop.cli.parser import Resolved, scan
from hotloop.cli.parser import resolve as read
from hotloop.errors import HotloopError
from hotloop.families.cnn.job import Job, resolve
from hotloop.families.cnn.options import DATASET_SIZES, TrainConfig
from hotloop.families.cnn.presets import PRESETS
from hotloop.options import options_of

COMMAND = Command("train", "Train.", TrainConfig, presets=PRESETS)


def given(*words: str) -> dict[str, object]:
    return scan(words, (*options_of(TrainConfig), *options_of(Common)))


def typed(*words: str) -> Resolved:
    """The config that a command line asks for."""
    return read(COMMAND, given(*words))


def job_of(*words: str, devices: int = 1) -> Job:
    """What it means on so many devices."""
    found = typed(*words)
    config, explicit = found.config, frozenset(given(*words))
    try:
        return resolve(config, DATASET_SIZES[config.dataset], devices, explicit, found.configured)
    except HotloopError as error:
        error.args = (spell_options(str(error), COMMAND.option_names),)
        raise


def base_rate(job: Job) -> float:
    """The highest rate of a schedule that grows with the global batch, warm-up aside."""
    return float(job.config.lr_schedule_params["initial_learning_rate"]) * job.batch.global_

"""The options of `hotloop estimator`: the old example's defaults, recipes, and what cannot work."""

from fractions import Fraction
from pathlib import Path

import pytest

from hotloop.cli.main import find_command
from hotloop.cli.parser import resolve, scan
from hotloop.errors import OptionError
from hotloop.families.estimator.cifar.config import RECIPE_OPTIONS, RECIPES, CifarConfig
from hotloop.families.estimator.cifar.program import make_run_config
from hotloop.options import build, options_of


def read(line):
    """The options that a command line means."""
    command, _, words = find_command(["estimator", *line.split()])
    return resolve(command, scan(words, options_of(command.config))).config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        (
            "--batch-size 16 --batches-per-step 500 --learning-rate 0.001",
            {"batch_size": 16, "batches_per_step": 500, "learning_rate": 0.001},
        ),
        ("--test-only --model-dir /path/to/ckpt", {"test_only": True, "model_dir": Path("/path/to/ckpt")}),
        ("--model-dir /path/to/ckpt", {"model_dir": Path("/path/to/ckpt")}),
        ("--generated_data --epochs 0.5", {"generated_data": True, "epochs": "1/2"}),
    ],
)  # fmt: skip
def test_the_old_programs_lines_are_understood(line, expected):
    assert read(line) == build(CifarConfig, expected)


def test_the_defaults_are_those_of_the_old_program():
    config = CifarConfig()
    assert (config.batch_size, config.batches_per_step, config.epochs) == (32, 100, 100)
    assert (config.learning_rate, config.log_interval, config.summary_interval) == (0.01, 3, 1)
    assert (config.model_dir, config.recipe, config.report) == (None, "reference", None)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_what_is_not_given(name):
    config = read(f"--recipe {name}")
    assert config.chosen is RECIPES[name]
    for option in RECIPE_OPTIONS:
        assert getattr(config, option) == getattr(RECIPES[name], option)
    given = read(f"--batch-size 64 --recipe {name} --learning-rate 0.5 --epochs 3")
    assert (given.batch_size, given.learning_rate, given.epochs) == (64, 0.5, 3)
    assert given.recipe == name


def test_the_recipes_are_the_published_ones():
    reference, keras, fast = (read(f"--recipe {name}") for name in ("reference", "keras", "fast"))
    assert (reference.learning_rate, reference.batch_size, reference.epochs) == (0.01, 32, 100)
    assert (keras.learning_rate, keras.batch_size, keras.epochs) == (1e-4, 32, 100)
    assert (fast.batch_size, fast.epochs) == (512, 25)


@pytest.mark.parametrize(
    ("options", "images", "updates"),
    [
        ({}, 50_000, 156_250),
        ({"epochs": 1}, 50_000, 1_562),
        ({"epochs": "0.1"}, 50_000, 156),
        ({"epochs": Fraction(1, 3), "batch_size": 10}, 50_000, 1_666),
        ({"batch_size": 13, "epochs": 1}, 50_000, 3_846),
    ],
)
def test_updates_are_what_the_epochs_hold_rounded_down_once(options, images, updates):
    assert build(CifarConfig, options).total_updates(images) == updates


def test_evaluations_come_every_so_many_epochs_and_never_less_than_an_update_apart():
    def period(**options):
        return make_run_config(build(CifarConfig, options), 50_000).checkpoint_steps

    assert period(evaluate_every="1/2") == 781
    assert period(evaluate_every="1e-9") == 1
    assert period() is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"test_only": True, "train_only": True, "model_dir": "x"}, "--test-only --train-only: together"),
        ({"test_only": True}, "--test-only: needs --model-dir"),
        ({"batch_size": 30, "replicas": 4}, "--batch-size 30: .* take a multiple of 4"),
        ({"gradient_accumulation_count": 64}, "--batch-size 32: .* take a multiple of 64"),
        ({"epochs": 0}, "--epochs 0: must be greater"),
        ({"learning_rate": -1}, "--learning-rate -1"),
        ({"recipe": "slow"}, "--recipe slow: must be one of reference, keras, fast"),
        ({"log_interval": 0}, "--log-interval 0"),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_option(options, reason):
    with pytest.raises(OptionError, match=reason) as caught:
        build(CifarConfig, options)
    assert "\n" not in str(caught.value)


def test_a_run_of_no_update_is_refused():
    with pytest.raises(OptionError, match=r"--epochs 1e-05: of 50,000 images is less than one batch of 32"):
        build(CifarConfig, {"epochs": "0.00001"}).total_updates(50_000)

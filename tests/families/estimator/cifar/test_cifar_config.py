"""The options of `hotloop estimator`: the old example's defaults, recipes, and what cannot work."""

import re
from fractions import Fraction
from pathlib import Path

import jax
import pytest

from hotloop.cli.main import find_command
from hotloop.cli.parser import resolve, scan
from hotloop.errors import OptionError
from hotloop.families.estimator.cifar import program
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
    tf2 = read("--recipe tf2")
    assert (tf2.learning_rate, tf2.batch_size, tf2.epochs) == (0.01, 16, 150)
    assert (tf2.chosen.network, tf2.chosen.rule, tf2.chosen.augmentation) == ("tf2", "sgd", "none")
    assert tf2.total_updates(50_000) == 468_750


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
        ({"recipe": "slow"}, "--recipe slow: must be one of reference, keras, fast, tf2"),
        ({"log_interval": 0}, "--log-interval 0"),
        ({"model_shard_position": 0}, "--model-shard-position 0: must be at least 1"),
        (
            {"model_shard_position": 18, "recipe": "tf2"},
            "--model-shard-position 18: .* after one of the first 17",
        ),
        ({"model_shard_position": 17}, "--model-shard-position 17: .* --recipe reference has 17 layers"),
        ({"model_shard_position": 7, "ipus": 3}, "--ipus 3: does not fall into pairs"),
        ({"ipus": 0}, "--ipus 0: must be at least 1"),
        ({"ipus": 3}, "--batch-size 32: does not fall into 3 replicas"),
        ({"ipus": 4, "replicas": 2}, "--ipus 4 --replicas 2: together"),
        (
            {"pipeline_schedule": "Fast"},
            "--pipeline-schedule Fast: must be one of Grouped, Interleaved, Sequential",
        ),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_option(options, reason):
    with pytest.raises(OptionError, match=reason) as caught:
        build(CifarConfig, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "replicas", "stages"),
    [
        ("", 1, 1),
        ("--ip 4", 4, 1),
        ("--replicas 2", 2, 1),
        ("--ipus 2 --model_shard_position 7", 1, 2),
        ("--ipus 4 --model_shard 7", 2, 2),
        ("--ipus 4 --replicas 2 --model-shard-position 7", 2, 2),
        ("--replicas 2 --model-shard-position 7", 2, 2),
        ("--ipus 1 --model-shard-position 7", 1, 2),
    ],
)
def test_devices_in_all_are_replicas_of_one_or_two_stages(line, replicas, stages):
    config = read(line)
    assert (config.asked_replicas, config.stages) == (replicas, stages)
    assert make_run_config(config, 50_000).replicas == replicas


@pytest.mark.parametrize(
    ("line", "expected"),
    [("--ipus 8", (4, 2)), ("--ipus 16 --gradient-accumulation-count 2", (4, 8)), ("--ipus 2", (2, 1))],
)
def test_ipus_that_are_not_there_become_parts_of_a_batch(line, expected, monkeypatch):
    monkeypatch.setattr(program.jax, "devices", lambda platform: jax.local_devices()[:1] * 4)
    said = []
    placed = program.place_replicas(read(line), said.append)
    assert (placed.asked_replicas, placed.gradient_accumulation_count) == expected
    assert len(said) == (expected[0] * expected[1] > 2)
    if said:
        assert re.fullmatch(
            r"--ipus \d+ on 4 devices: \d+ replicas become 4 with accumulation .* stay", said[0]
        )


def test_of_ipus_that_are_not_there_every_process_has_equally_many(monkeypatch):
    monkeypatch.setattr(program.jax, "devices", lambda platform: ["a device"] * 6)
    monkeypatch.setattr(program.processes, "count", lambda: 2)
    placed = program.place_replicas(read("--batch-size 30 --ipus 10"), lambda text: None)
    assert (placed.asked_replicas, placed.gradient_accumulation_count) == (2, 5)  # 5 are no multiple of 2


def test_a_run_of_no_update_is_refused():
    with pytest.raises(OptionError, match=r"--epochs 1e-05: of 50,000 images is less than one batch of 32"):
        build(CifarConfig, {"epochs": "0.00001"}).total_updates(50_000)

"""Presets and config files: precedence, names, and what a bad one says."""

import json
from fractions import Fraction
from itertools import permutations

import pytest
import yaml
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from trainer_options import TRAINER, TrainerConfig, config, given

from hotloop.cli.parser import print_config
from hotloop.errors import OptionError
from hotloop.options import Params

FILE = """
common: &common {dataset: imagenet, dataset-path: /data}
resnet50:
  <<: *common
  model: resnet50
  micro-batch-size: 16
  precision: 16.32
  stochastic_rounding: OFF
  logs_per_epoch: 1/4
  loss_scaling: 1e-3
  device_mapping: [0, 1]
  optimizer_params: {momentum: 0.9, decay: 1e-5}
  wandb: yes
resnet8: {model: cifar_resnet8}
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="configs.yml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_named_part_of_a_file_goes_through_the_options_own_types(file):
    read = config("--config", "resnet50", "--config-path", file(FILE))
    assert (read.dataset, read.model_name, read.micro_batch_size) == ("imagenet", "resnet50", 16)
    assert (read.precision, read.stochastic_rounding) == ("16.32", "OFF")
    assert (read.logs_per_epoch, read.loss_scaling, read.device_mapping) == (Fraction(1, 4), 1e-3, (0, 1))
    assert read.optimizer_params == Params(momentum=0.9, decay=1e-5)
    assert read.wandb is True


def test_a_file_of_plain_keys_needs_no_name(file):
    read = config("--config-path", file("model: m\nmicro_batch: 4\n"))
    assert (read.model_name, read.micro_batch_size) == ("m", 4)
    assert config("--config-path", file("")) == TrainerConfig()


def test_json_files_too_tabs_and_all(file):
    path = file('{\n\t"model": "m",\n\t"optimizer_params": {"momentum": 0.9},\n\t"wandb": true\n}', "c.json")
    read = config("--config-path", path)
    assert (read.model_name, read.optimizer_params, read.wandb) == ("m", Params(momentum=0.9), True)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_command_line_wins_in_any_order(file, order):
    pieces = [["--config-path", file(FILE)], ["--config=resnet50"], ["--micro-batch-size", "2"]]
    read = given(*(word for i in order for word in pieces[i]))
    assert (read.config.micro_batch_size, read.config.model_name) == (2, "resnet50")
    assert read.sources["micro_batch_size"] == "command line"
    assert read.sources["model_name"].startswith("file ")
    assert read.sources["num_epochs"] == "default"


def test_presets_fill_what_the_command_line_leaves(file):
    read = given("--config", "resnet8_test", "--num-epochs", "3")
    assert (read.config.model_name, read.config.micro_batch_size, read.config.num_epochs) == (
        "cifar_resnet8",
        8,
        3,
    )
    assert read.sources["model_name"] == "preset resnet8_test"
    assert config("--micro-batch-size", "1", "--config", "resnet8_test").micro_batch_size == 1


def test_a_file_may_choose_the_device_but_not_how_results_are_printed(file):
    assert given("--config-path", file("device: cpu")).common.device == "cpu"
    assert given("--config-path", file("device: cpu"), "--device", "gpu").common.device == "gpu"
    with pytest.raises(OptionError, match="unknown key json"):
        given("--config-path", file("json: true"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "resnet8"], "--config resnet8: 'train' has no such preset; did you mean resnet8_test"),
        (
            ["--config", "broken"],
            "preset broken: unknown key micro_batch_sise; did you mean micro-batch-size?",
        ),
        (
            ["--config", "resnet5", "--config-path", "FILE"],
            "has no such configuration; did you mean resnet50",
        ),
        (
            ["--config-path", "FILE"],
            "holds named configurations; choose one with --config: common, resnet50, resnet8",
        ),
        (["--config-path", "missing.yml"], "--config-path missing.yml: no such file or directory"),
        (["--config-path", "."], "--config-path .: is a directory"),
    ],
)
def test_an_unknown_name_or_file_is_one_line(file, words, message):
    path = file(FILE)
    with pytest.raises(OptionError) as error:
        given(*(path if word == "FILE" else word for word in words))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nmicro_bach: 2\n", ", line 2: unknown key micro_bach; did you mean micro-batch-size?"),
        ("num: 2", ", line 1: num could be num-epochs or num-replicas; write more of it"),
        ("micro_batch_size: 0", ", line 1: --micro-batch-size 0: must be at least 1"),
        ("logs_per_epoch: 1/0", ", line 1: --logs-per-epoch 1/0: divides by zero"),
        (
            "dataset: cifar",
            ", line 1: --dataset cifar: must be one of imagenet, cifar10, mnist; did you mean cifar10?",
        ),
        (
            "micro_batch_size: 1\nmicro-batch-size: 2",
            ", line 2: 'micro-batch-size' sets --micro-batch-size a second",
        ),
        ("model: a\nmodel: b", ", line 2: the key 'model' is already in line 1"),
        ("no_shuffle: true", ", line 1: unknown key no_shuffle; write 'shuffle: false'"),
        ("micro_batch_size: [1, 2]", "--micro-batch-size 1 2: takes one value"),
        ("micro_batch_size:", "--micro-batch-size '': must be a whole number"),
        ("- a\n- b", "must hold keys and values"),
        ("model: {", ", line 1: neither YAML nor JSON"),
    ],
)
def test_a_bad_file_is_one_line_with_file_and_line(file, text, message):
    path = file(text)
    with pytest.raises(OptionError) as error:
        given("--config-path", path)
    assert str(error.value).startswith(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "x.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="not a text file"):
        given("--config-path", str(tmp_path / "x.yml"))


def test_a_name_for_a_file_of_plain_keys_says_to_leave_it_out(file):
    with pytest.raises(OptionError, match="this is a value, not a configuration; leave --config out"):
        given("--config", "model", "--config-path", file("model: m"))


def test_printed_values_tell_their_source_and_are_valid_yaml(capsys, file):
    path = file("model: m\n")
    print_config(given("--config-path", path, "--num-epochs", "3", "--loss-scaling", "inf"), "hotloop train")
    text = capsys.readouterr().out
    assert "num_epochs: 3  # command line\n" in text
    assert f'model_name: "m"  # file {path}\n' in text
    assert "shuffle: true  # default\n" in text
    assert yaml.safe_load(text)["optimizer_params"] == {"momentum": 0}


def test_printed_json_holds_values_and_sources(capsys):
    print_config(given("--config", "resnet8_test", "--json", "--no-wandb"), "hotloop train")
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == "hotloop train"
    assert printed["config"]["model_name"] == "cifar_resnet8"
    assert printed["sources"]["model_name"] == "preset resnet8_test"
    assert printed["sources"]["wandb"] == "command line"
    assert printed["config"].keys() == printed["sources"].keys()


@settings(max_examples=40, deadline=None)
@for_all(
    st.lists(
        st.sampled_from(
            [
                ("--model", "a: b # c"),
                ("--logs-per-epoch", "1/3"),
                ("--loss-scaling", "inf"),
                ("--optimizer-params", "{a: {b: [1, null]}, c: 1e-9, d: 'yes'}"),
                ("--wandb-run-name", "007"),
                ("--pipeline-splits", "x", "y"),
                ("--seed", "-3"),
                ("--no-shuffle",),
                ("--config", "resnet50_gn"),
            ]
        )
    )
)
def test_a_printed_config_reads_back_as_the_same_config(tmp_path_factory, choices):
    import contextlib
    import io

    first = given(*(word for choice in choices for word in choice))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_config(first, TRAINER.name)
    path = tmp_path_factory.mktemp("printed") / "c.yml"
    path.write_text(out.getvalue())
    assert given("--config-path", str(path)).config == first.config

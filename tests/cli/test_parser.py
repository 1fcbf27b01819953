"""Command lines as the old programs took them, cut into options and values."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from trainer_options import PLACED, TrainerConfig, config, given

from hotloop.cli.parser import spellings_of
from hotloop.errors import OptionError
from hotloop.options import Params, options_of


def test_an_old_command_line_as_it_stands():
    line = (
        "--model cifar_resnet8 --dataset cifar10 --dataset-path /data --num_epochs 6 --micro-batch-size 8 "
        "--gradient-accumulation 8 --validation False --wandb --logs-per-epoch 1/2 --device-mapping 0 1 1 "
        "--pipeline-splits conv1/relu,conv2/relu --weight-updates-per-epoch -1 --precision 16.16 --ckpts 1/3"
    )
    read = config(*line.split(), "--optimizer-params", '{"momentum": 0.9}')
    assert read == TrainerConfig(
        model_name="cifar_resnet8",
        dataset_path=Path("/data"),
        num_epochs=6,
        micro_batch_size=8,
        gradient_accumulation_count=8,
        validation=False,
        wandb=True,
        logs_per_epoch=Fraction(1, 2),
        ckpts_per_epoch=Fraction(1, 3),
        device_mapping=(0, 1, 1),
        pipeline_splits=("conv1/relu", "conv2/relu"),
        optimizer_params=Params(momentum=0.9),
    )
    assert hash(read) == hash(read)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--validation", True),
        ("--validation False", False),
        ("--validation=f", False),
        ("--validation OFF", False),
        ("--validation 1", True),
        ("--no-validation", False),
        ("--no_validation", False),
        ("--no-valid", False),
        ("--validation False --validation", True),
    ],
)
def test_every_way_to_set_a_flag(words, value):
    assert config(*words.split()).validation is value


def test_a_flag_followed_by_an_option_is_on():
    read = config("--no-shuffle", "--wandb", "--num-epochs", "3")
    assert (read.shuffle, read.wandb, read.num_epochs) == (False, True, 3)


def test_a_flag_whose_own_name_begins_with_no_is_not_negated():
    assert config("--no-cache").no_cache is True
    assert config("--no-no-cache").no_cache is False


def test_beside_positionals_a_flag_takes_only_truth_values():
    assert given("--force", "mnist", "cifar10", command=PLACED).config.names == ("mnist", "cifar10")
    read = given("mnist", "--force", "False", "cifar10", command=PLACED).config
    assert (read.names, read.force) == (("mnist", "cifar10"), False)
    assert given("--", "--odd", command=PLACED).config.names == ("--odd",)


@pytest.mark.parametrize("text", ["-1", "-0.5", "-1e-5", "-.5", "-inf"])
def test_negative_numbers_are_values(text):
    assert config("--loss-scaling", text).loss_scaling == float(text)


@settings(max_examples=40, deadline=None)
@for_all(st.floats(allow_nan=False), st.booleans())
def test_every_float_can_be_typed(value, joined):
    words = [f"--weight-decay={value!r}"] if joined else ["--weight-decay", repr(value)]
    assert config(*words).weight_decay == value


def test_lists_are_several_words_or_commas_and_the_last_one_counts():
    assert config("--available-memory-proportion", "10", "20.5").available_memory_proportion == (10.0, 20.5)
    assert config("--available_memory_proportion=10,20").available_memory_proportion == (10.0, 20.0)
    assert config("--device-mapping", "0", "1", "--device-mapping", "2").device_mapping == (2,)
    assert config("--pipeline-splits").pipeline_splits == ()


def test_explicit_aliases_win_over_ambiguous_prefixes():
    assert config("--model", "m").model_name == "m"
    assert config("--gradient_accumulation", "4").gradient_accumulation_count == 4


def test_an_unambiguous_prefix_is_enough():
    assert config("--micro", "4").micro_batch_size == 4


def test_negated_flags_are_no_candidates_until_the_word_begins_with_no():
    with pytest.raises(OptionError) as error:
        config("--n", "4")
    assert "--norm-layer" in str(error.value)
    assert "--no-shuffle" not in str(error.value)


REFUSED = {
    "--validation perhaps": "--validation perhaps: must be true or false (also yes/no, on/off, 1/0)",
    "extra": "unexpected argument 'extra'; options begin with --",
    "--num-epochs 3 extra": "unexpected argument 'extra'; options begin with --",
    "-5": "unexpected argument '-5'; options begin with --",
    "--num 4": "--num could be --num-epochs or --num-replicas; write more of it",
    "--micro-bach-size 3": "unknown option --micro-bach-size; did you mean --micro-batch-size?",
    "--optimiser 3": "unknown option --optimiser; did you mean --optimizer?",
    "--no-shufle 3": "unknown option --no-shufle; did you mean --no-shuffle?",
    "--num-epochs": "--num-epochs: a value is needed: Epochs.",
    "--num-epochs --wandb": "--num-epochs: a value is needed: Epochs.",
    "--no-wandb=true": "--no-wandb=true: --no-wandb takes no value",
    "--global-batch-size 8 --gradient-accumulation 2": (
        "--global-batch-size and --gradient-accumulation-count exclude each other"
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_cannot_be_understood_is_refused_with_the_reason(line):
    with pytest.raises(OptionError) as error:
        config(*line.split())
    assert str(error.value) == REFUSED[line]


def test_two_options_of_one_name_are_a_defect_of_the_program():
    with pytest.raises(TypeError, match="two options are called --seed"):
        spellings_of([*options_of(TrainerConfig), options_of(TrainerConfig)[0]])


@settings(max_examples=40, deadline=None)
@for_all(
    st.lists(st.sampled_from(["--num-epochs", "--wandb", "--model", "7", "x", "--", "-5", "=", "--no-wandb"]))
)
def test_any_words_give_a_config_or_a_one_line_error(words):
    try:
        config(*words)
    except OptionError as error:
        assert "\n" not in str(error)

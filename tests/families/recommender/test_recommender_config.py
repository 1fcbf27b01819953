"""Options of `hotloop recommender train`: the old program's names and defaults, what follows a file's name, errors."""

from pathlib import Path

import pytest

from hotloop.cli.main import find_command
from hotloop.cli.parser import scan
from hotloop.errors import OptionError
from hotloop.families.recommender.config import PRESETS, TrainOptions, make_schedule
from hotloop.families.recommender.model import Job
from hotloop.options import build, options_of


def read(line):
    """The options that a command line means."""
    return build(TrainOptions, scan(line.split(), options_of(TrainOptions)))


def from_file(name, more=""):
    return read(f"--training-data-file data/{name} --no-validation {more}").resolve()


# The old program's options.

OLD = {
    "training-data-file": None,
    "validation-data-file": None,
    "pipeline-num-parallel": 32,
    "size": None,
    "micro-batch-size": None,
    "validation-micro-batch-size": None,
    "no-selu": False,
    "no-dropout": False,
    "no-dense-refeeding": False,
    "no-prng": False,
    "weight-decay": 1e-4,
    "loss-scaling": 1000,
    "gradient-clipping": False,
    "optimizer": "Momentum",
    "base-learning-rate": -16,
    "learning-rate-decay": (1, 0.1, 0.01),
    "learning-rate-schedule": (0.5, 0.75),
    "epochs": None,
    "select-ipus": "AUTO",
    "valid-per-epoch": 1,
    "validation-batches-per-step": 250,
    "steps-per-log": 1,
    "no-validation": False,
    "multiprocessing": False,
    "build-init": False,
    "device-iterations": None,
    "logdir": Path("results"),  # was "logdir"; all families keep their runs in one folder now
    "testing-on-checkpoint": None,
    "precision": "auto",
}


@pytest.mark.parametrize(("name", "default"), OLD.items())
def test_every_old_option_is_there_with_its_default(name, default):
    found = [each for each in options_of(TrainOptions) if f"--{name}" in (each.spelling, *each.aliases)]
    assert len(found) == 1 and found[0].default == default


def test_what_the_old_program_left_open_is_filled_in_for_random_data():
    config = read("").resolve()
    assert (config.size, config.batch_size, config.validation_batch_size, config.epochs) == (128, 64, 128, 2)
    assert make_schedule(config, 480_000).updates_per_call == 250


def test_an_old_command_line_is_read():
    config = read(
        "--training-data-file data/3m_train.txt --validation-data-file data/3m_valid.txt --size 256 "
        "--micro-batch-size 16 --validation-micro-batch-size 99 --no-selu --no-dropout --no-dense-refeeding "
        "--precision 16.32 --no-prng --weight-decay 0 --loss-scaling 1 --gradient-clipping --optimizer SGD "
        "--base-learning-rate -14 --learning-rate-decay 1,0.5,0.2,0.1 --learning-rate-schedule 0.2,0.5,0.7 "
        "--epochs 3 --valid-per-epoch 2.5 --steps-per-log 10 --multiprocessing --device-iterations 100 "
        "--logdir logs --select-ipus AUTO --pipeline-num-parallel 8 --validation-batches-per-step 5"
    )
    assert (config.size, config.batch_size, config.validation_batch_size) == (256, 16, 99)
    assert config.no_selu and config.no_dense_refeeding and config.no_prng and config.gradient_clipping
    job = Job(config, 1)
    assert job.dropout == 0 and job.refeeding == "none"
    assert (config.precision, config.weight_decay, config.loss_scaling) == ("16.32", 0, 1)
    assert (config.optimizer, config.base_learning_rate, config.epochs) == ("SGD", -14, 3)
    assert config.learning_rate_decay == (1, 0.5, 0.2, 0.1)
    assert config.learning_rate_schedule == (0.2, 0.5, 0.7)
    assert (config.valid_per_epoch, config.steps_per_log, config.device_iterations) == (2.5, 10, 100)
    assert config.multiprocessing and config.results_dir == Path("logs")


@pytest.mark.parametrize(
    "spelling", ["--batch-size", "--micro-batch-size", "--batch_size", "--micro_batch_size"]
)
def test_both_spellings_of_the_batch(spelling):
    assert read(f"{spelling} 7").batch_size == 7
    assert read(f"{spelling.replace('--', '--validation-')} 9").validation_batch_size == 9


def test_untied_weights_by_either_name():
    assert Job(read(""), 1).is_tied
    assert not Job(read("--untied"), 1).is_tied and not Job(read("--no-tied"), 1).is_tied


@pytest.mark.parametrize("mode", ["joint", "alternate", "none"])
def test_each_refeeding_can_be_chosen(mode):
    assert Job(read(f"--refeed {mode} --aug-steps 2"), 1).refeeding == mode
    assert Job(read(f"--refeed {mode} --no-dense-refeeding"), 1).refeeding == "none"


# What follows the file's name.


@pytest.mark.parametrize(
    ("name", "size", "batch"),
    [
        ("3m_train.txt", 128, 64),
        ("6m_train.txt", 256, 64),
        ("1y_train.txt", 256, 32),
        ("full_train.txt", 512, 8),
    ],
)
def test_size_and_batch_follow_the_name_of_the_file(name, size, batch):
    config = from_file(name)
    assert (config.size, config.batch_size, config.validation_batch_size) == (size, batch, batch)
    assert config.epochs == 160
    assert Job(config, 1).dropout == (0.65 if size == 128 else 0.8)


def test_what_is_given_wins_over_the_name():
    config = from_file("full_train.txt", "--size 128 --batch-size 100 --epochs 1")
    assert (config.size, config.batch_size, config.validation_batch_size, config.epochs) == (128, 100, 100, 1)
    assert from_file("full_train.txt", "--size 128").batch_size == 8
    assert from_file("other.txt", "--size 256 --batch-size 3").size == 256


@pytest.mark.parametrize(
    ("ratings", "sizes"),
    [
        (1, (128, 64)),
        (13_675_402, (128, 64)),  # the Netflix Prize's splits have the sizes that their names have
        (29_179_009, (256, 64)),
        (41_451_832, (256, 32)),
        (98_074_901, (512, 8)),
    ],
)
def test_for_another_name_size_and_batch_follow_the_number_of_ratings(ratings, sizes):
    for name in ("random_train.txt", "u.data", "ratings.csv"):
        config = read(f"--training-data-file data/{name}").resolve(480_000, ratings)
        assert (config.size, config.batch_size) == sizes


def test_what_is_given_wins_over_the_number_of_ratings():
    config = read("--training-data-file u.data --size 512").resolve(943, 80_000)
    assert (config.size, config.batch_size) == (512, 64)
    config = read("--training-data-file u.data --batch-size 3").resolve(943, 80_000)
    assert (config.size, config.batch_size) == (128, 3)
    assert read("--training-data-file u.data").resolve(40, 500).batch_size == 40  # all users at once


def test_filling_in_twice_changes_nothing():
    config = from_file("1y_train.txt")
    assert config.resolve() == config and hash(config.resolve()) == hash(config)


# Rates.


@pytest.mark.parametrize("text", ["-16", "-12.5", "-20", "0"])
def test_exponents_may_be_fractions(text):
    assert read(f"--base-learning-rate {text}").base_learning_rate == float(text)


def test_each_drop_needs_a_factor_of_its_own():
    assert read("--learning-rate-decay 1,0.1 --learning-rate-schedule 0.9").learning_rate_decay == (1, 0.1)


SHARES = "needs three shares, for train, valid and test, that add up to 1; the first above 0"
NEGATED = "-16 would be a rate of 2^16 times the batch size: exponents are negated here, so write 16"
ONE_MORE = "it needs one more than --learning-rate-schedule has drops"
REFUSED = {
    "train --size 64": "--size 64: must be one of 128, 256, 512",
    "train --dropout 1": "--dropout 1: must be between 0 and 0.99",
    "train --dropout -0.1": "--dropout -0.1: must be between 0 and 0.99",
    "train --batch-size 0": "--batch-size 0: must be at least 1",
    "train --validation-batch-size 0": "--validation-batch-size 0: must be at least 1",
    "train --epochs 0": "--epochs 0: must be at least 1",
    "train --loss-scaling 0": "--loss-scaling 0: must be greater than 0 and finite",
    "train --loss-scaling nan": "--loss-scaling nan: must be greater than 0 and finite",
    "train --weight-decay -1": "--weight-decay -1: must be at least 0",
    "train --optimizer lion": "--optimizer lion: must be one of Momentum, SGD",
    "train --precision 8.8": "--precision 8.8: must be one of auto, 32.32, 16.32, 16.16",
    "train --precision 16": "--precision 16: must be one of auto, 32.32, 16.32, 16.16",
    "train --half float8": "--half float8: must be one of bfloat16, float16",
    "train --refeed both": "--refeed both: must be one of joint, alternate, none",
    "train --aug-steps -1": "--aug-steps -1: must be at least 0",
    "train --base-learning-rate nan": "--base-learning-rate nan: must be a finite number",
    "train --base-learning-rate fast": "--base-learning-rate fast: must be a number",
    "train --base-learning-rate 16": "--base-learning-rate 16: the rate would be 2^16 times the batch size; write -16",
    "train --base-learning-rate +16": "--base-learning-rate 16: the rate would be 2^16 times the batch size; write -16",
    "train --base-learning-rate 0.5": "--base-learning-rate 0.5: the rate would be 2^0.5 times the batch size",
    "train --learning-rate-decay 1,0,0": "--learning-rate-decay 1 0 0: must be greater than 0",
    "train --learning-rate-decay 1,0.1": f"--learning-rate-decay has 2 factors: {ONE_MORE} (2)",
    "train --learning-rate-schedule 0.1,0.2,0.3": f"--learning-rate-decay has 3 factors: {ONE_MORE} (3)",
    "train --learning-rate-schedule 0.5,1.5": "--learning-rate-schedule 0.5 1.5: must be between 0 and 1",
    "train --lr-schedule linear": "--lr-schedule linear: must be one of drops, const, cosine, stepped, polynomial",
    "train --lr-schedule cosine": "learning_rate: params: epochs_to_total_decay missing",
    "train --lr-schedule-params {power:1}": "--lr-schedule-params: --lr-schedule drops takes none",
    "train --lr-schedule const --lr-schedule-params {initial_learning_rate:1}":
        "--lr-schedule-params: initial_learning_rate is 2 to the power of --base-learning-rate here",
    "train --lr-schedule const --learning-rate-decay 1,0.1,0.1":
        "--lr-schedule const: --learning-rate-decay and --learning-rate-schedule are for drops",
    "train --lr-schedule stepped --lr-schedule-params {boundaries:[1],values:[1]}":
        "learning_rate: params: 1 values and 1 boundaries",
    "train --optimizer-params {beta:1}": "optimizer: params: beta unknown: found momentum, beta; momentum takes",
    "train --optimizer RMSpropInside --batch-size 2048":
        "optimizer: params: rmsprop's base_decay_exponent -10: gives rho -1 with global batch 2048",
    "train --valid-per-epoch 0": "--valid-per-epoch 0: must be greater than 0",
    "train --device-iterations 0": "--device-iterations 0: must be at least 1",
    "train --steps-per-log 0": "--steps-per-log 0: must be at least 1",
    "train --fractions 0.5 0.5": "--fractions 0.5 0.5: three shares that add up to 1",
    "train --fractions 0.5 0.4 0.2": "--fractions 0.5 0.4 0.2: three shares that add up to 1",
    "train --fractions 0 0.5 0.5": "--fractions 0.0 0.5 0.5: three shares that add up to 1",
    "train --fractions 1.5 -0.25 -0.25": "--fractions 1.5 -0.25 -0.25: must be between 0 and 1",
    "train --patience 0": "--patience 0: must be at least 1",
    "train --patience 3 --no-validation": "--patience: counts validations, and --no-validation makes none",
    "train --seed -1": "--seed -1: must be at least 0",
    "train --data netflix": "--data netflix: must be one of random, procedural, ml-100k",
    "train --objective order": "--objective order: must be one of ratings, ranking",
    "train --kl 0.2": "--kl 0.2: is for --objective ranking alone",
    "train --objective ranking --kl-epochs 3": "--kl-epochs 3: is for Mult-VAE, and there is no KL without --kl",
    "train --input-dropout 0.2": "--input-dropout 0.2: is for --objective ranking alone",
    "train --objective ranking --input-dropout 1": "--input-dropout 1: must be between 0 and 0.99",
    "train --objective ranking --kl -1": "--kl -1: must be at least 0 and finite",
    "train --objective ranking --kl-epochs 0": "--kl-epochs 0: must be greater than 0",
    "train --objective ranking --aug-steps 3": "--aug-steps 3: re-feeding is for --objective ratings alone",
    "train --objective ranking --clip False": "--no-clip: --objective ranking has no predicted ratings to clip",
    "train --objective ranking --refeed alternate": "--refeed alternate: re-feeding is for --objective ratings alone",
    "train --relevant 0": "--relevant 0: must be greater than 0",
    "train --layers 200,0": "--layers 200 0: must be at least 1",
    "train --resume": "--resume: name the run with --run-name",
    "train --run-name a/b": "--run-name a/b: must be the name of one folder",
    "train --validation-data-file v.txt": "v.txt: of no use without --training-data-file; give both",
    "train --training-data-file a --test-data-file b": "--test-data-file: needs --validation-data-file",
    "evaluate": "RUN is needed",
    "evaluate RUN --split test --data-file f": "--split test with --data-file f: choose one of the two",
    "evaluate RUN --k 0": "--k 0: must be at least 1",
    "predict RUN --ratings-file f": "--ratings-file f: name the ratings to predict with --data-file",
    "recommend RUN": "recommend: give --users ID ... or --all",
    "recommend RUN --users 1 --all": "recommend: give --users ID ... or --all, not both",
    "recommend RUN --all --top 0": "--top 0: must be at least 1",
    "baselines --step 3": "--step 3: needs --run",
    "baselines --fractions 0.5 0.5": "--fractions 0.5 0.5: three shares",
    "convert a b": "--split is needed",
    "convert a b --split 2m": "--split 2m: must be one of 3m, 6m",
    "convert a b --split random --fractions 0.5,0.5": f"--fractions 0.5 0.5: {SHARES}",
    "convert a b --split random --fractions 0.5,0.4,0.2": f"--fractions 0.5 0.4 0.2: {SHARES}",
    "convert a b --split random --fractions 0,0.5,0.5": f"--fractions 0 0.5 0.5: {SHARES}",
    "sweep --num-devices 1 --base-learning-rates -16": f"--base-learning-rates -16: {NEGATED}",
    "sweep --num-devices 1 --base-learning-rates -16..-20": f"--base-learning-rates -16..-20: {NEGATED}",
    "sweep --num-devices 1 --base-learning-rate -16": f"--base-learning-rates -16: {NEGATED}",
    "sweep --num-devices 1 --base-learning-rates 16,17":
        "--base-learning-rates 16,17: 2 rates for 1 trials; write --num-devices 2",
    "sweep --num-devices 1 --base-learning-rates 16,sixteen":
        "--base-learning-rates 16,sixteen: 'sixteen' is not a number",
    "sweep --num-devices 1 --base-learning-rates 16..17,18":
        "--base-learning-rates 16..17,18: must be one range A..B or a list of numbers, not both",
    "sweep --num-devices 1 --base-learning-rates 16...20":
        "--base-learning-rates 16...20: must be two numbers with two dots between them",
    "sweep --num-devices 1 --base-learning-rates 16..nan":
        "--base-learning-rates 16..nan: nan is not a finite number",
    "sweep --num-devices 1 --base-learning-rates=": "--base-learning-rates : must name at least one rate",
    "sweep --num-devices 1 --base-learning-rates 16 --ray-address auto":
        "--ray-address auto: only with --engine ray",
    "sweep --num-devices 1 --base-learning-rates 16 --lr-schedule stepped":
        "--lr-schedule stepped: has its own rates, so that all trials would be the same",
    "sweep --num-devices 1 --base-learning-rates 16 --fractions 1,1,1": "--fractions 1.0 1.0 1.0: three shares",
}  # fmt: skip


@pytest.mark.parametrize(("line", "said"), REFUSED.items())
def test_what_cannot_work_is_refused_in_one_line_that_names_it(line, said):
    command, _, words = find_command(["recommender", *line.split()])
    words = [word.replace(":", ": ") if word.startswith("{") else word for word in words]
    with pytest.raises(OptionError) as caught:
        build(command.config, scan(words, options_of(command.config)))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_shares_of_a_split_may_be_written_with_commas():
    assert read("--fractions 0.9,0,0.1").fractions == (0.9, 0, 0.1)


def test_a_test_file_needs_a_validation_file_or_none_wanted():
    files = "--training-data-file 3m_train.txt --test-data-file 3m_test.txt"
    assert read(f"{files} --validation-data-file 3m_valid.txt").resolve().size == 128
    assert read(f"{files} --no-validation").resolve().size == 128


# All of them.


def test_presets_resolve():
    for values in PRESETS.values():
        config = build(TrainOptions, values).resolve()
        assert config.size and config.batch_size and config.epochs
    assert build(TrainOptions, PRESETS["ml-100k"]).resolve().data == "ml-100k"

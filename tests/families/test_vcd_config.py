"""Options of `hotloop vcd train`: the old program's values, the tuned rates, and run lengths to the update."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.errors import OptionError
from hotloop.families.vcd.config import PRESETS, TUNED_RATE, VcdEvaluate, VcdSamples, VcdTrain
from hotloop.families.vcd.model import make_job
from hotloop.families.vcd.train import make_plan
from hotloop.options import build, options_of

IMAGES = 50_000
DEFAULT = {
    "method": "vcd",
    "control_variate": "local",
    "variate_decay": 0.9,
    "shared_updates": 3000,
    "z_dim": 10,
    "hidden": (200, 200),
    "hmc_steps": 8,
    "leapfrog_steps": 5,
    "step_size": 0.05,
    "adaptation": "ruiz",
    "target_acceptance": 0.9,
    "adaptation_rate": 0.01,
    "decoder_rate": 5e-4,
    "encoder_mean_rate": 5e-4,
    "encoder_spread_rate": 2.5e-4,
    "rate_decay": 0.9,
    "decay_epochs": 30,
    "micro_batch_size": 100,
    "iwae_samples": 20_000,
    "burn_in": 300,
    "kept": 300,
    "test_batch_size": 128,
    "epochs": 800,
    "data": "binarised_mnist",
    "validation": False,
    "testing": True,
    "repeats": 1,
    "updates_per_call": None,
    "results_dir": "results",
    "save_checkpoints": True,
    "log_level": "INFO",
    "learning_rate": None,
    "updates": None,
}
GLOBAL = {"control_variate": "global", "updates_per_call": 10_000}
TUNED = {"decoder_rate": None, "encoder_mean_rate": None, "encoder_spread_rate": None}
BATCHES = {"micro_batch_size": 16, "epochs": 8200, "decay_epochs": 307}
OTHERS = {
    "default": {},
    "global_cv": GLOBAL,
    "bs_experiment": {**GLOBAL, **TUNED, **BATCHES},
    "test": {"epochs": 1, "save_checkpoints": False},
    "benchmark": {**GLOBAL, "epochs": 200, "testing": False},
}


def train(preset="default", **options):
    return build(VcdTrain, {**PRESETS[preset], **options})


def length(config, images):
    return make_plan(config, images).total_updates


# Presets.


@pytest.mark.parametrize("name", OTHERS)
def test_a_preset_has_every_value_of_the_old_file(name):
    config = train(name)
    expected = DEFAULT | OTHERS[name]
    found = {key: getattr(config, key) for key in expected}
    assert found | {"results_dir": str(config.results_dir)} == expected


def test_every_preset_resolves_and_there_are_the_old_five_and_the_iwae_sized_one():
    assert list(PRESETS) == [*OTHERS, "iwae"]
    for name in PRESETS:
        assert isinstance(train(name), VcdTrain)


def test_the_iwae_sized_preset_is_wider_and_a_hundred_thousand_updates_long():
    config = train("iwae")
    assert config.z_dim == 50
    assert length(config, IMAGES) == length(config, 40_000) == 100_000


def test_configs_hash_so_that_a_compiled_update_can_be_kept_by_them():
    assert hash(train()) == hash(train()) and train() == train()
    assert len({train(name) for name in PRESETS}) == len(PRESETS)


# Rates.


def test_the_tuned_table_is_the_old_one():
    assert TUNED_RATE == {16: 5e-4, 100: 5e-4, 128: 9e-4, 512: 9e-4, 1024: 1.3e-3}


@pytest.mark.parametrize(("batch", "rate"), TUNED_RATE.items())
def test_rates_left_open_come_from_the_table_and_the_spreads_is_exactly_half(batch, rate):
    rates = train("bs_experiment", micro_batch_size=batch).rates()
    assert rates == {"mean": rate, "decoder": rate, "spread": rate / 2}


def test_default_rates_are_the_papers_and_the_spreads_is_exactly_half():
    assert train().rates() == {"mean": 5e-4, "decoder": 5e-4, "spread": 5e-4 / 2}


def test_each_rate_that_is_given_wins_over_the_table():
    config = train("bs_experiment", micro_batch_size=1024, decoder_rate=1e-4, encoder_spread_rate=7e-5)
    assert config.rates() == {"mean": 1.3e-3, "decoder": 1e-4, "spread": 7e-5}


@pytest.mark.parametrize("preset", ["default", "bs_experiment"])
@pytest.mark.parametrize("batch", [16, 1024, 77])
def test_the_learning_rate_wins_over_the_configuration_and_the_table(preset, batch):
    rates = train(preset, learning_rate=2e-3, micro_batch_size=batch).rates()
    assert rates == {"mean": 2e-3, "decoder": 2e-3, "spread": 1e-3}


def test_given_rates_do_not_depend_on_the_batch():
    assert train(micro_batch_size=77).rates() == train().rates()


# Run lengths.


@pytest.mark.parametrize(
    ("preset", "batch", "updates", "period"),
    [
        ("default", 100, 400_000, 15_000),
        ("global_cv", 100, 400_000, 15_000),
        ("test", 100, 500, 15_000),
        ("benchmark", 3072, 3_255, 488),
        ("benchmark", 100, 100_000, 15_000),
        ("bs_experiment", 16, 25_625_000, 959_375),
        ("bs_experiment", 128, 3_203_125, 119_921),
        ("bs_experiment", 512, 800_781, 29_980),
        ("bs_experiment", 1024, 400_390, 14_990),
    ],
)
def test_runs_are_as_long_as_their_epochs_to_the_update(preset, batch, updates, period):
    config = train(preset, micro_batch_size=batch)
    assert length(config, IMAGES) == updates
    assert config.decay_period(IMAGES) == period


@pytest.mark.parametrize(
    ("preset", "batch", "updates", "period"),
    [
        ("default", 100, 320_000, 12_000),
        ("test", 100, 400, 12_000),
        ("benchmark", 3072, 2_604, 390),
        ("bs_experiment", 16, 20_500_000, 767_500),
        ("bs_experiment", 1024, 320_312, 11_992),
    ],
)
def test_with_images_kept_back_everything_follows_the_images_that_are_left(preset, batch, updates, period):
    config = train(preset, micro_batch_size=batch, validation=True)
    assert length(config, 40_000) == updates
    assert config.decay_period(40_000) == period


@given(
    st.integers(1, 10_000), st.integers(1, 5_000), st.integers(1, 70_000), st.fractions(Fraction(1, 80), 400)
)
def test_lengths_are_rounded_down_once_and_exactly(epochs, batch, images, timescale):
    config = train(epochs=epochs, micro_batch_size=batch, decay_epochs=timescale)
    if batch <= images:
        updates = length(config, images)
        assert updates * batch <= epochs * images < (updates + 1) * batch
    period = config.decay_period(images)
    assert period == 1 or period * batch <= timescale * images
    assert (period + 1) * batch > timescale * images


def test_a_number_of_updates_replaces_the_epochs_but_not_the_decay():
    config = train(updates=123)
    assert length(config, IMAGES) == 123
    assert config.decay_period(IMAGES) == 15_000


def test_a_period_shorter_than_an_update_is_one_update():
    assert train(micro_batch_size=100, decay_epochs="1/100").decay_period(7) == 1


# Methods.


@pytest.mark.parametrize("method", ["vcd", "vcd-no-cv", "kl", "hoffman"])
@pytest.mark.parametrize("kind", ["local", "global", "none"])
def test_only_the_papers_method_has_a_control_variate(method, kind):
    job = make_job(train(method=method, control_variate=kind), IMAGES)
    assert job.variate == (kind if method == "vcd" else "none")


# Values.


UNTUNED = (
    "--micro-batch-size 256: no tuned learning rate (there is one for 16, 100, 128, 512, 1024); "
    "give --learning-rate"
)
# fmt: off
REFUSED = [
    (VcdTrain, {"epochs": 0}, "--epochs 0: must be at least 1"),
    (VcdTrain, {"epochs": "many"}, "--epochs many: must be a whole number"),
    (VcdTrain, {"updates": 0}, "--updates 0: must be at least 1"),
    (VcdTrain, {"micro_batch_size": 0}, "--micro-batch-size 0: must be at least 1"),
    (VcdTrain, {"micro_batch_size": 1.5}, "--micro-batch-size 1.5: must be a whole number"),
    (VcdTrain, {"z_dim": 0}, "--z-dim 0: must be at least 1"),
    (VcdTrain, {"hidden": (200, 0)}, "--hidden 200 0: must be at least 1"),
    (VcdTrain, {"hmc_steps": 0}, "--hmc-steps 0: must be at least 1"),
    (VcdTrain, {"leapfrog_steps": -1}, "--leapfrog-steps -1: must be at least 1"),
    (VcdTrain, {"step_size": 0.0}, "--step-size 0.0: must be greater than 0 and finite"),
    (VcdTrain, {"step_size": "nan"}, "--step-size nan: must be greater than 0 and finite"),
    (VcdTrain, {"step_size": float("inf")}, "--step-size inf: must be greater than 0 and finite"),
    (VcdTrain, {"adaptation": "exponential"}, "--adaptation exponential: must be one of ruiz, constant"),
    (VcdTrain, {"target_acceptance": 0}, "--target-acceptance 0: must be between 0.01 and 1"),
    (VcdTrain, {"target_acceptance": 1.1}, "--target-acceptance 1.1: must be between 0.01 and 1"),
    (VcdTrain, {"adaptation_rate": 1.0}, "--adaptation-rate 1.0: must be between 0 and 0.99"),
    (VcdTrain, {"variate_decay": 1.5}, "--variate-decay 1.5: must be between 0 and 1"),
    (VcdTrain, {"variate_decay": float("nan")}, "--variate-decay nan: must be between 0 and 1"),
    (VcdTrain, {"shared_updates": -1}, "--shared-updates -1: must be at least 0 and finite"),
    (VcdTrain, {"learning_rate": 0.0}, "--learning-rate 0.0: must be greater than 0 and finite"),
    (VcdTrain, {"learning_rate": -1e-3}, "--learning-rate -0.001: must be greater than 0 and finite"),
    (VcdTrain, {"learning_rate": "fast"}, "--learning-rate fast: must be a number"),
    (VcdTrain, {"decoder_rate": 0}, "--decoder-rate 0: must be greater than 0 and finite"),
    (VcdTrain, {"rate_decay": 2}, "--rate-decay 2: must be between 0 and 1"),
    (VcdTrain, {"decay_epochs": 0}, "--decay-epochs 0: must be greater than 0 and finite"),
    (VcdTrain, {"decay_epochs": "1/0"}, "--decay-epochs 1/0: divides by zero"),
    (VcdTrain, {"precision": "8.8"}, "--precision 8.8: must be one of 32.32, 16.32, 16.16"),
    (VcdTrain, {"control_variate": "both"}, "--control-variate both: must be one of local, global, none"),
    (VcdTrain, {"iwae_samples": 0}, "--iwae-samples 0: must be at least 1"),
    (VcdTrain, {"burn_in": -1}, "--burn-in -1: must be at least 0 and finite"),
    (VcdTrain, {"kept": 0}, "--kept 0: must be at least 1"),
    (VcdTrain, {"test_batch_size": 0}, "--test-batch-size 0: must be at least 1"),
    (VcdTrain, {"updates_per_call": 0}, "--updates-per-call 0: must be at least 1"),
    (VcdTrain, {"repeats": 0}, "--repeats 0: must be at least 1"),
    (VcdTrain, {"seed": -1}, "--seed -1: must be at least 0 and finite"),
    (VcdTrain, {"testing": "perhaps"}, "--testing perhaps: must be true or false (also yes/no, on/off, 1/0)"),
    (VcdTrain, {"log_level": "LOUD"}, "--log-level LOUD: must be one of NOTSET, DEBUG, INFO, WARNING, ERROR, CRITICAL"),
    (VcdTrain, {"method": "elbo"}, "--method elbo: must be one of vcd, vcd-no-cv, kl, hoffman"),
    (VcdTrain, {"method": "hofman"},
     "--method hofman: must be one of vcd, vcd-no-cv, kl, hoffman; did you mean hoffman?"),
    (VcdTrain, {"optimizer": "ftrl"},
     "--optimizer ftrl: must be one of rmsprop, rmsprop_inside, sgd, momentum, lars, adam, adamw, muon"),
    (VcdTrain, {"optimizer": "sgd", "optimizer_params": {"b1": 0.5}},
     "optimizer: params: b1 unknown: found momentum, b1; sgd takes momentum (and may take nesterov)"),
    (VcdTrain, {"optimizer": "momentum", "optimizer_params": {"momentum": 1}},
     "optimizer: params: momentum's momentum 1: must be at least 0 and below 1"),
    (VcdTrain, {"lr_schedule": "linear"},
     "--lr-schedule linear: must be one of exponential, const, cosine, stepped, polynomial, one_cycle"),
    (VcdTrain, {"lr_schedule": "cosine"},
     "learning_rate: params: epochs_to_total_decay missing: found initial_learning_rate; "
     "cosine takes initial_learning_rate, epochs_to_total_decay"),
    (VcdTrain, {"lr_schedule": "const", "lr_schedule_params": {"initial_learning_rate": 1e-3}},
     "--lr-schedule-params: initial_learning_rate: a schedule is a factor on the rates; give --learning-rate"),
    (VcdTrain, {"lr_schedule": "stepped", "lr_schedule_params": {"boundaries": [2], "values": [1]}},
     "learning_rate: params: 1 values and 1 boundaries: stepped takes one value more than boundaries"),
    (VcdTrain, {"resume": True, "repeats": 2},
     "--resume: goes on with one run; leave out --repeats and name the run with --run-name"),
    (VcdTrain, {"micro_batch_size": 256, "decoder_rate": None}, UNTUNED),
    (VcdTrain, {"micro_batch_size": 256, "encoder_mean_rate": None}, UNTUNED),
    (VcdTrain, {"micro_batch_size": 256, "encoder_spread_rate": None}, UNTUNED),
    (VcdEvaluate, {"run": "x", "images": "0"}, "--images 0: must be at least 1"),
    (VcdEvaluate, {"run": "x", "split": "all"}, "--split all: must be one of test, validation, train"),
    (VcdEvaluate, {"run": "x", "step": -1}, "--step -1: must be at least 0 and finite"),
    (VcdEvaluate, {}, "RUN is needed: Folder of the run."),
    (VcdSamples, {"run": "x", "rows": 0}, "--rows 0: must be at least 1"),
    (VcdSamples, {"run": "x", "columns": 0}, "--columns 0: must be at least 1"),
    (VcdSamples, {"run": "x", "scale": 0}, "--scale 0: must be at least 1"),
    (VcdSamples, {"run": "x", "hmc_steps": 0}, "--hmc-steps 0: must be at least 1"),
    (VcdSamples, {"run": "x", "seed": -1}, "--seed -1: must be at least 0 and finite"),
    (VcdSamples, {"run": "x", "step": "x"}, "--step x: must be a whole number"),
    (VcdSamples, {"run": "x", "rows": "many"}, "--rows many: must be a whole number"),
    (VcdSamples, {}, "RUN is needed: Folder of a run, as `hotloop vcd train` named it."),
]
# fmt: on


@pytest.mark.parametrize(("config", "options", "said"), REFUSED)
def test_options_that_cannot_work_are_refused_in_one_line(config, options, said):
    with pytest.raises(OptionError) as caught:
        build(config, options)
    assert str(caught.value) == said and "\n" not in said


def test_a_config_made_in_python_is_checked_as_well():
    with pytest.raises(OptionError, match=r"^--hmc-steps 0: must be at least 1$"):
        VcdTrain(hmc_steps=0)
    with pytest.raises(OptionError, match=r"^--micro-batch-size 256: no tuned learning rate"):
        VcdTrain(micro_batch_size=256, decoder_rate=None)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("-r", "results_dir"),
        ("-R", "repeats"),
        ("-b", "micro_batch_size"),
        ("-n", "run_name"),
        ("-v", "validation"),
        ("-l", "learning_rate"),
        ("-c", "config_file"),
    ],
)
def test_the_old_letters_stand_for_the_same_options(short, name):
    assert [option.name for option in options_of(VcdTrain) if short in option.aliases] == [name]

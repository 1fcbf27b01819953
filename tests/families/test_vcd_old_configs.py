"""The old program's five JSON files, made here from the facts about them, and files that people made of them."""

import json
import subprocess
import sys
from fractions import Fraction

import pytest

from hotloop.errors import OptionError
from hotloop.families.vcd.config import PRESETS, VcdTrain
from hotloop.families.vcd.old_configs import KEYS, translate
from hotloop.options import build
from hotloop.options.document import parse_document

DATA = {
    "formats": {"np": "float32", "tf": "float32"},
    "loading": {
        "dynamic_binarise": False,
        "set": "binarised_mnist",
        "shuffle_each_epoch": True,
        "shuffle_pre_split": False,
    },
    "n_validation": 0,
    "use_tfp_data": False,
}
TESTING = {
    "micro_batch_size_test": 128,
    "iwae_samples_test_micro_batch_size": 50,
    "n_epoch_freq_test": 1000,
    "n_iwae_samples_test": 20000,
    "mcmc": {"use_train_step_size_init": False, "hmc_step_size_init": 0.05, "acceptance_target": 0.9},
}
TRAINING = {
    "base_lr": {"decoder": 5e-4, "encoder": {"mean": 5e-4, "std": 2.5e-4}},
    "control_variate": {
        "decay": 0.9,
        "independent_iterations": 3000,
        "use_control_variate": True,
        "use_local_control_variate": True,
    },
    "lr_kwargs": {"epoch_timescale": 30},
    "mcmc": {
        "acceptance_target": 0.9,
        "hmc_only": False,
        "hmc_step_size_init": 0.05,
        "n_burn_in_steps": 8,
        "n_hmc_steps": 0,
        "n_leapfrog_steps": 5,
        "step_size_adaption_fn": "ruiz",
        "step_size_adaption_rate": 0.01,
    },
    "n_epoch_freq_val": 1000,
    "n_infeed_batches": 10000,
    "n_epoch": 800,
    "optimiser_config": "vcd",
    "use_infeed": False,
}
GLOBAL = {
    "training.use_infeed": True,
    "training.control_variate.use_local_control_variate": False,
}
OLD_FILES = {
    "default": {},
    "global_cv": GLOBAL,
    "bs_experiment": {
        **GLOBAL,
        "micro_batch_size": 16,
        "training.n_epoch": 8200,
        "training.base_lr.decoder": "",
        "training.base_lr.encoder.mean": "",
        "training.base_lr.encoder.std": "",
        "training.lr_kwargs.epoch_timescale": 307,
        "training.n_epoch_freq_val": 10000,
        "testing.n_epoch_freq_test": 10000,
    },
    "test": {"training.n_epoch": 1, "save_checkpoints": False},
    "benchmark": {**GLOBAL, "training.n_epoch": 200, "experiment": {"testing": False}},
}


def old(changes=(), experiment=()):
    """An old file: the default one with values at dotted paths of model[0].args, and of experiment.args, changed."""
    args = {
        "_evaluate": True,
        "micro_batch_size": 100,
        "data": DATA,
        "device": "/device:IPU:0",
        "n_replicas": 1,
        "network": {"decoder": {"name": "vcd"}, "encoder": {"name": "vcd"}, "z_dim": 10},
        "save_checkpoints": True,
        "testing": TESTING,
        "training": TRAINING,
    }
    rest = {"_evaluate": True, "data": DATA, "testing": True, "training": True, "validation": False}
    flags = {"ATTRIBUTE": "X", "MODULE": "Y", "NAME": "Z", "TUNING": False}
    document = json.loads(
        json.dumps({"model": [{"args": args, "flags": flags}], "experiment": {"args": rest}})
    )
    for target, values in (
        (document["model"][0]["args"], changes),
        (document["experiment"]["args"], experiment),
    ):
        for path, value in dict(values).items():
            put(target, path, value)
    return document


def put(target, path, value):
    *parents, last = path.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    if value is GONE:
        del target[last]
    else:
        target[last] = value


GONE = object()


def train(changes=(), experiment=()):
    return build(VcdTrain, translate(old(changes, experiment), "old.json")[0])


def notices(changes=(), experiment=()):
    return translate(old(changes, experiment), "old.json")[1]


def error(document):
    with pytest.raises(OptionError) as caught:
        translate(document, "old.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The five files.


@pytest.mark.parametrize("name", OLD_FILES)
@pytest.mark.parametrize("through_text", [False, True])
def test_an_old_file_is_the_preset_of_its_name(name, through_text):
    changes = dict(OLD_FILES[name])
    document = old(changes, changes.pop("experiment", {}))
    if through_text:
        document = parse_document(json.dumps(document, indent=4), "old.json")
    values, _ = translate(document, "old.json")
    assert build(VcdTrain, values) == build(VcdTrain, PRESETS[name])


@pytest.mark.parametrize("name", OLD_FILES)
def test_an_old_file_gives_one_notice_of_what_has_no_effect(name):
    changes = dict(OLD_FILES[name])
    said = notices(changes, changes.pop("experiment", {}))
    assert said == [
        "old.json: without effect here: testing.iwae_samples_test_micro_batch_size (no result depends on it), "
        "testing.mcmc.hmc_step_size_init (starts with the trained step size)"
    ]


def test_the_files_made_here_hold_every_key_that_is_known_or_optional_ones_alone():
    def paths(branch, path=""):
        for key, value in branch.items():
            yield from paths(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"]

    document = old()
    document["model[0]"] = document.pop("model")[0]
    missing = set(KEYS) - set(paths(document))
    assert {path.removeprefix("model[0].args.") for path in missing} == {
        "network.encoder.kwargs",
        "network.decoder.kwargs",
        "testing.mcmc.n_burn_in_steps",
        "testing.mcmc.n_hmc_steps",
        "testing.mcmc.n_leapfrog_steps",
        "experiment.args.checkpoint_path",
    }


@pytest.mark.parametrize(
    "document", [{}, {"model": []}, {"experiment": {}}, {"epochs": 3}, [], None, "model"]
)
def test_other_files_are_handed_back_as_they_are(document):
    assert translate(document, "other.json") == (document, [])


# Single keys.


@pytest.mark.parametrize(
    ("path", "value", "field", "expected"),
    [
        ("micro_batch_size", 512, "micro_batch_size", 512),
        ("save_checkpoints", False, "save_checkpoints", False),
        ("network.z_dim", 50, "z_dim", 50),
        ("testing.micro_batch_size_test", 16, "test_batch_size", 16),
        ("testing.n_iwae_samples_test", 500, "iwae_samples", 500),
        ("testing.mcmc.n_burn_in_steps", 20, "burn_in", 20),
        ("testing.mcmc.n_hmc_steps", 30, "kept", 30),
        ("training.base_lr.decoder", 1e-3, "decoder_rate", 1e-3),
        ("training.base_lr.encoder.mean", 2e-3, "encoder_mean_rate", 2e-3),
        ("training.base_lr.encoder.std", "", "encoder_spread_rate", None),
        ("training.control_variate.decay", 0.5, "variate_decay", 0.5),
        ("training.control_variate.independent_iterations", 10, "shared_updates", 10),
        ("training.lr_kwargs.epoch_timescale", 2.5, "decay_epochs", Fraction(5, 2)),
        ("training.mcmc.acceptance_target", 0.7, "target_acceptance", 0.7),
        ("training.mcmc.hmc_step_size_init", 0.1, "step_size", 0.1),
        ("training.mcmc.n_leapfrog_steps", 3, "leapfrog_steps", 3),
        ("training.mcmc.step_size_adaption_fn", "constant", "adaptation", "constant"),
        ("training.mcmc.step_size_adaption_rate", 0.02, "adaptation_rate", 0.02),
        ("training.n_epoch", 7, "epochs", 7),
        ("training.mcmc.n_burn_in_steps", 3, "hmc_steps", 3),
        ("training.mcmc.n_hmc_steps", 2, "hmc_steps", 10),
        ("training.control_variate.use_local_control_variate", False, "control_variate", "global"),
    ],
)
def test_a_key_moves_its_field_and_no_other(path, value, field, expected):
    changed, default = train({path: value}), train()
    assert getattr(changed, field) == expected != getattr(default, field)
    others = [name for name in vars(default) if name != field]
    assert [getattr(changed, name) for name in others] == [getattr(default, name) for name in others]


def test_rates_left_to_the_table_are_tuned_for_the_batch():
    tuned = {f"training.base_lr.{key}": "" for key in ("decoder", "encoder.mean", "encoder.std")}
    assert train({**tuned, "micro_batch_size": 1024}).rates() == {
        "mean": 1.3e-3,
        "spread": 6.5e-4,
        "decoder": 1.3e-3,
    }


@pytest.mark.parametrize("absence", ["training.lr_kwargs", "training.lr_kwargs.epoch_timescale"])
def test_a_decay_left_open_scales_with_the_epochs(absence):
    assert train({absence: GONE}).decay_period(50_000) == 15_000
    assert train({absence: GONE, "training.n_epoch": 80}).decay_epochs == 3
    assert train({absence: GONE, "training.n_epoch": 1}).decay_epochs == Fraction(3, 80)


def test_the_device_loop_bounds_a_call_only_where_it_was_on():
    assert train({"training.use_infeed": True, "training.n_infeed_batches": 50}).updates_per_call == 50
    assert train({"training.n_infeed_batches": 50}).updates_per_call is None


def test_without_control_variate_the_method_has_none():
    config = train({"training.control_variate.use_control_variate": False})
    assert (config.method, config.control_variate) == ("vcd-no-cv", "none")


def test_without_hmc_iterations_the_method_is_the_elbo():
    changes = {"training.mcmc.n_burn_in_steps": 0}
    assert train(changes).method == "kl"
    assert notices(changes)[0] == "old.json: no HMC iterations, so the method is kl (the usual ELBO)"
    assert train({**changes, "training.control_variate.use_control_variate": False}).method == "kl"


def test_iterations_that_were_never_burn_in_never_adapt():
    config = train({"training.mcmc.n_burn_in_steps": 0, "training.mcmc.n_hmc_steps": 4})
    assert (config.method, config.hmc_steps, config.adaptation) == ("vcd", 4, "constant")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_set_is_taken_from_where_it_stands(name):
    path = "data.loading.set"
    assert train({path: name}, {path: name}).data == name
    assert train({path: GONE}, {path: name}).data == name
    assert train({path: name}, {"data": GONE}).data == name


def test_validation_is_asked_for_by_the_number_or_the_experiment():
    assert not train().validation
    assert train({"data.n_validation": 10_000}, {"data.n_validation": 10_000}).validation
    assert train({}, {"validation": True}).validation


# What is named in the notice.


@pytest.mark.parametrize(
    ("changes", "experiment"),
    [
        ({"n_replicas": 2}, {}),
        ({"testing.n_epoch_freq_test": 100}, {}),
        ({"training.n_epoch_freq_val": 100}, {"validation": True}),
        ({"data.loading.shuffle_pre_split": True}, {"data.loading.shuffle_pre_split": True}),
        ({"data.n_validation": 5000}, {"data.n_validation": 5000}),
        ({"training.mcmc.n_hmc_steps": 2}, {}),
        ({"testing.mcmc.acceptance_target": 0.6}, {}),
        ({"testing.mcmc.n_leapfrog_steps": 10}, {}),
    ],
)
def test_a_key_that_mattered_and_does_not_is_named_in_the_one_notice(changes, experiment):
    (said,) = notices(changes, experiment)
    (key,) = changes
    assert f"{key} (" in said and f"{key} (" not in notices()[0]


@pytest.mark.parametrize(
    ("changes", "experiment"),
    [
        ({"testing.n_epoch_freq_test": 100}, {"testing": False}),
        ({"training.n_epoch_freq_val": 100}, {}),
        ({"testing.mcmc.n_leapfrog_steps": 5}, {}),
        ({"training.mcmc.hmc_only": True, "_evaluate": False, "device": "/cpu:0"}, {}),
        ({"data.n_validation": 10_000}, {"data.n_validation": 10_000}),
        ({"network.encoder.kwargs": {}, "network.decoder.kwargs": {}}, {"checkpoint_path": ""}),
        ({"data.loading.dynamic_binarise": True, "data.use_tfp_data": True, "data.formats.np": "x"}, {}),
    ],
)
def test_what_had_no_effect_there_is_not_mentioned(changes, experiment):
    assert notices(changes, experiment) == notices()


def test_nothing_is_said_where_nothing_is_lost():
    changes = {
        "testing.iwae_samples_test_micro_batch_size": GONE,
        "testing.mcmc.use_train_step_size_init": True,
    }
    assert notices(changes) == []


# Errors.


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("training.n_epochs", "model[0].args.training.n_epochs: unknown key; did you mean n_epoch?"),
        ("trainin", "model[0].args.trainin: unknown key; did you mean training?"),
        ("training.lr_kwargs.x", "model[0].args.training.lr_kwargs.x: unknown key; known: epoch_timescale"),
    ],
)
def test_an_unknown_key_is_named_with_its_whole_path(path, message):
    assert error(old({path: 3})) == f"old.json: {message}"


def test_unknown_keys_at_the_top_and_in_the_flags_are_errors_too():
    assert error({**old(), "modle": 1}).startswith("old.json: modle: unknown key; did you mean model")
    document = old()
    document["model"][0]["flags"]["NAMES"] = 1
    assert error(document) == "old.json: model[0].flags.NAMES: unknown key; did you mean NAME?"
    assert "experiment.args.test: unknown key; did you mean testing" in error(old({}, {"test": True}))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("training.n_epoch", "many", "many: must be a whole number"),
        ("training.n_epoch", 0, "0: must be at least 1"),
        ("training.n_epoch", 1.5, "1.5: must be a whole number"),
        ("training.n_epoch", True, "True: must be a whole number"),
        ("training.n_epoch", None, "None: a value is needed"),
        ("training.base_lr.decoder", "fast", "fast: must be a number"),
        ("training.base_lr.decoder", -1, "-1: must be greater than 0 and finite"),
        ("training.mcmc.step_size_adaption_fn", "exp", "exp: must be one of ruiz, constant"),
        ("training.mcmc.step_size_adaption_rate", "", "'': must be a number"),
        ("training.mcmc.n_burn_in_steps", -1, "-1: must be at least 0 and finite"),
        ("training.use_infeed", 7, "7: must be true or false (also yes/no, on/off, 1/0)"),
        ("training.optimiser_config", "adam", "adam: must be one of vcd"),
        ("data.loading.set", "cifar", "cifar: must be one of binarised_mnist, mnist, fashion_mnist"),
        ("network.encoder.name", "conv", "conv: must be one of vcd"),
        ("training.mcmc", 3, "3: must hold keys (acceptance_target, hmc_only, "),
        ("testing.mcmc.n_hmc_steps", 0, "0: must be at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_whole_path(path, value, reason):
    assert error(old({path: value})).startswith(f"old.json: model[0].args.{path} {reason}")


def test_widths_of_networks_are_sent_to_their_option():
    said = error(old({"network.encoder.kwargs": {"width": 100}}))
    assert said.startswith("old.json: model[0].args.network.encoder.kwargs {'width': 100}: must be empty")
    assert said.endswith("--hidden")


def test_an_old_checkpoint_is_refused_and_resume_named():
    said = error(old({}, {"checkpoint_path": "results/cp-400"}))
    assert (
        said.startswith("old.json: experiment.args.checkpoint_path results/cp-400: ") and "--resume" in said
    )


def test_a_file_that_only_evaluates_is_sent_to_the_command_that_does():
    said = error(old({}, {"training": False}))
    assert said.startswith("old.json: experiment.args.training False: ") and "hotloop vcd evaluate" in said


def test_data_that_contradict_each_other_are_an_error():
    assert error(old({"data.loading.set": "mnist"})) == (
        "old.json: model[0].args.data.loading.set mnist: experiment.args.data.loading.set is binarised_mnist; "
        "must be the same"
    )


@pytest.mark.parametrize("models", [[], {}, "vcd", [1, 2]])
def test_there_is_one_model(models):
    assert error({**old(), "model": models}) == "old.json: model: must be a list of one model"


def test_a_file_read_as_text_gives_the_line():
    text = json.dumps(old({"training.n_epochs": 3, "training.mcmc": {}}), indent=1)
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "n_epochs" in each)
    assert error(parse_document(text, "old.json")).startswith(
        f"old.json, line {line}: model[0].args.training.n_epochs: "
    )


def test_translating_needs_no_jax():
    code = "import sys, hotloop.families.vcd.old_configs; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

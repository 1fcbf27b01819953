"""Options of `hotloop cnn train`: the old program's names and defaults, and an error for all that cannot work."""

import json
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from cnn_words import base_rate, job_of, typed

from hotloop.engine import precision
from hotloop.engine.optim_keys import OPTIMISERS, SCHEDULES
from hotloop.engine.plan import Batch
from hotloop.engine.precision import AutoScale
from hotloop.errors import DeviceError, HotloopError, OptionError, PlanError
from hotloop.families.cnn.job import resolve
from hotloop.families.cnn.network import NormChoice
from hotloop.families.cnn.network import build as build_network
from hotloop.families.cnn.options import DATASET_SIZES, MODELS, WITHOUT_EFFECT, TrainConfig, check_model
from hotloop.options import Params, build, options_of, to_jsonable, values_of

DEFAULTS = {
    "on_demand": True,
    "compile_only": False,
    "seed": None,
    "shuffle": True,
    "deterministic": False,
    "ckpts_per_epoch": None,  # 1, but on calls that the logs make anyway
    "first_ckpt_epoch": 0,
    "checkpoint_input_dir": None,
    "checkpoint_output_dir": None,
    "ckpt_all_instances": False,
    "clean_dir": None,  # True: all went, and the trained weights with them
    "dataset": "cifar10",
    "dataset_path": ".",
    "model_name": "toy_model",
    "eight_bit_transfer": False,
    "synthetic_data": None,
    "training": True,
    "micro_batch_size": 1,
    "num_epochs": 1,
    "logs_per_epoch": 1,
    "weight_updates_per_epoch": -1,
    "num_replicas": 1,
    "gradient_accumulation_count": None,
    "global_batch_size": None,
    "precision": "16.16",
    "pipeline_splits": (),
    "device_mapping": None,
    "pipeline_schedule": "Grouped",
    "optimizer": "sgd",
    "optimizer_params": {"momentum": 0},
    "loss_scaling": 0,
    "auto_loss_scaling": False,
    "weight_decay": 0,
    "l2_regularization": 0,
    "recomputation": False,
    "accelerator_side_preprocess": False,
    "accelerator_side_reduction": False,
    "stochastic_rounding": "ON",
    "optimizer_state_offloading": True,
    "fp_exceptions": False,
    "nanoo": False,
    "lr_schedule": "const",
    "lr_warmup_params": None,
    "lr_schedule_params": {"initial_learning_rate": 0.0001},
    "lr_staircase": False,
    "dbn_replica_group_size": 1,
    "label_smoothing": None,
    "pipeline_num_parallel": 48,
    "norm_layer": {"name": "custom_batch_norm", "momentum": 0.97},
    "fused_preprocessing": False,
    "half_partials": False,
    "internal_exchange_optimization_target": None,
    "max_cross_replica_buffer_size": 0,
    "max_reduce_many_buffer_size": 0,
    "conv_dithering": False,
    "gather_conv_output": False,
    "min_remote_tensor_size": 128,
    "stable_norm": False,
    "available_memory_proportion": (),
    "scheduling_algorithm": "CHOOSE_BEST",
    "prefetch_depth": 1,
    "mlperf_logging": False,
    "wandb": False,
    "wandb_run_name": None,
    "wandb_tags": None,
    "validation": True,
    "validation_micro_batch_size": None,
    "validation_num_replicas": None,
    "pipeline_validation_model": False,
    "sweep": False,
    "target_accuracy": 0.759,
}
OWN = {
    "image_size": None,
    "resident_mib": 2048,
    "init_from": None,
    "freeze": None,
    "skip_corrupt": False,
    "random_weights": False,
    "half": "bfloat16",
    "exclude_norms_and_biases": False,
    "mixup": 0.0,
    "cutmix": 0.0,
    "trivial_augment": False,
    "random_erasing": 0.0,
    "ema": None,
    "statistics_rule": "spread",
    "strict_devices": False,
    "resume": False,
    "run_name": None,
    "results_dir": "results",
    "plan": False,
    "report": None,
    "top_k": 5,
    "expect": "",
}
DECAY = "{initial_learning_rate: 0.1, epochs_to_total_decay: 3}"
LARS = "{momentum: 0, weight_decay: 0, eeta: 0.001, epsilon: 0}"
AUTO = "--auto-loss-scaling"
PLAIN_SGD = f"{AUTO}: goes with sgd without momentum at a constant rate, not with "
SPLITS = ["conv2_block2_out", "conv3_block1_out", "conv4_block2_out"]


def error(*words, devices=1):
    with pytest.raises(HotloopError) as caught:
        job_of(*words, devices=devices)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Options and how they are written.


def test_every_option_has_the_old_name_and_default():
    assert len(DEFAULTS) == 73 - 2  # --config and --config-path belong to every command
    found = values_of(TrainConfig())
    for name in ("dataset_path", "results_dir"):
        found[name] = str(found[name])
    assert found == DEFAULTS | OWN


def test_a_config_can_be_hashed_and_every_option_says_something():
    assert hash(build(TrainConfig, {"optimizer_params": {"momentum": 0.9}})) != hash(TrainConfig())
    assert all(each.help.endswith(".") and each.group for each in options_of(TrainConfig))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--model", "resnet50"], "model_name", "resnet50"),
        (["--model-n", "cifar_resnet110"], "model_name", "cifar_resnet110"),
        (["--gradient-accumulation", "8"], "gradient_accumulation_count", 8),
        (["--gradient-acc", "8"], "gradient_accumulation_count", 8),
        (["--half-partials", "True"], "half_partials", True),
        (["--half", "float16"], "half", "float16"),
        (["--validation", "False"], "validation", False),
        (["--no-validation"], "validation", False),
        (["--auto-loss-scaling"], "auto_loss_scaling", True),
        (["--synthetic-data", "cpu"], "synthetic_data", "host"),
        (["--synthetic-data", "ipu"], "synthetic_data", "device"),
        (["--synthetic-data", "HOST"], "synthetic_data", "host"),
        (["--synthetic-data", "device"], "synthetic_data", "device"),
        (["--logs-per-epoch", "1/3"], "logs_per_epoch", Fraction(1, 3)),
        (["--ckpts-per-epoch", "0.1"], "ckpts_per_epoch", Fraction(1, 10)),
        (["--first-ckpt-epoch", "2.5"], "first_ckpt_epoch", Fraction(5, 2)),
        (["--weight-updates-per-epoch", "-1"], "weight_updates_per_epoch", -1),
        (["--pipeline-splits", *SPLITS], "pipeline_splits", tuple(SPLITS)),
        (["--device-mapping", "0", "--pipeline-splits"], "device_mapping", (0,)),
        (["--optimizer-params", '{"momentum": 0.9}'], "optimizer_params", Params(momentum=0.9)),
        (["--stochastic-rounding", "off"], "stochastic_rounding", "OFF"),
        (["--wandb-tags", "a", "b"], "wandb_tags", ("a", "b")),
        (["--label-smoothing", "none"], "label_smoothing", None),
        (["--seed", "0"], "seed", 0),
        (["--model", "cifar_resnet26x4"], "model_name", "cifar_resnet26x4"),
        (["--ema", "0.999"], "ema", 0.999),
        (["--mixup", "0.2"], "mixup", 0.2),
        (["--trivial-augment"], "trivial_augment", True),
    ],
)
def test_options_are_read_as_they_used_to_be_typed(words, name, value):
    assert getattr(typed(*words).config, name) == value


def test_old_keys_in_a_file_are_read_prefixes_too(tmp_path):
    path = tmp_path / "own.yml"
    path.write_text("mine: {model: resnet18, dataset: imagenet, micro-batch: 4, precision: 16.32}\n")
    config = typed("--config", "mine", "--config-path", str(path)).config
    assert (config.model_name, config.micro_batch_size, config.precision) == ("resnet18", 4, "16.32")


def test_options_wait_for_no_array_library():
    code = (
        "import sys; from hotloop.families.cnn import command_options, options, presets; options.TrainConfig(); "
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_models_here_are_those_that_can_be_built():
    for name in (*MODELS, "cifar_resnet110", "cifar_resnet1202"):
        assert check_model(name) is None
        assert build_network(name, (32, 32, 3), 10).nodes
    for name in ("cifar_resnet2", "cifar_resnet9", "cifar_resnet08", "resnet51", ""):
        assert "must be one of resnet18" in check_model(name)


# What cannot work.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimiser sgd", "unknown option --optimiser; did you mean --optimizer"),
        ("--config resnet50_16ipu", "--config resnet50_16ipu: 'train' has no such preset; did you mean"),
        ("--model resnet51", "--model-name resnet51: must be one of resnet18, resnet34, resnet50"),
        (
            "--optimizer ftrl",
            "--optimizer ftrl: must be one of sgd, lars, rmsprop, momentum, rmsprop_outside, adam",
        ),
        ("--lr-schedule linear", "--lr-schedule linear: must be one of const, cosine, stepped, polynomial"),
        (
            "--dataset svhn",
            "--dataset svhn: no such folder, and none of the sets imagenet, cifar10, cifar100, mnist",
        ),
        ("--synthetic-data gpu", "--synthetic-data gpu: must be host (or cpu) or device (or ipu)"),
        ("--precision 32.16", "--precision 32.16: must be one of 16.16, 16.32, 32.32"),
        ("--precision half", "--precision half: must be one of"),
        ("--shuffle maybe", "--shuffle maybe: must be true or false"),
        ("--logs-per-epoch 1/2/3", "--logs-per-epoch 1/2/3: must be a number or a fraction such as 1/2"),
        ("--logs-per-epoch often", "--logs-per-epoch often: must be a number or a fraction"),
        ("--ckpts-per-epoch 1/0", "--ckpts-per-epoch 1/0: divides by zero"),
        ("--logs-per-epoch -1", "--logs-per-epoch -1: must be at least 0"),
        ("--ckpts-per-epoch -1/2", "--ckpts-per-epoch -1/2: must be at least 0"),
        ("--first-ckpt-epoch -1", "--first-ckpt-epoch -1: must be at least 0"),
        (
            "--weight-updates-per-epoch 0",
            "--weight-updates-per-epoch 0: must be at least 1, or -1 for as many",
        ),
        ("--weight-updates-per-epoch -2", "--weight-updates-per-epoch -2: must be at least 1, or -1"),
        ("--micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
        ("--num-epochs 0", "--num-epochs 0: must be at least 1"),
        ("--global-batch-size 8 --gradient-acc 8", "--global-batch-size 8: each follows from the other"),
        ("--global-batch-size 4 --micro-batch-size 8", "--global-batch-size 4: micro batch 8 x replicas 1"),
        ("--recomputation", "--recomputation: goes stage by stage, so it needs --pipeline-splits"),
        ("--device-mapping 0 1", "--device-mapping 0 1: has 2 entries for 1 stages"),
        (
            "--pipeline-splits a b --device-mapping 0 2 2",
            "--device-mapping 0 2 2: must use every device from 0 to 2",
        ),
        ("--pipeline-splits a b --device-mapping 1 1 1", "--device-mapping 1 1 1: must use every device"),
        ("--pipeline-splits conv9", "--pipeline-splits conv9: no layer of toy_model"),
        (
            "--pipeline-splits flatten conv2d_1",
            "must be different layers in the model's order: conv2d_1 flatten",
        ),
        ("--pipeline-splits flatten flatten", "must be different layers"),
        ("--pipeline-splits conv2d_0", "--pipeline-splits conv2d_0: the first layer opens the first stage"),
        ("--eight-bit-transfer", "--eight-bit-transfer: needs --accelerator-side-preprocess"),
        ("--fused-preprocessing", "--fused-preprocessing: needs --accelerator-side-preprocess"),
        ("--available-memory-proportion 10 20", "2 values without --pipeline-splits; give one"),
        ("--available-mem 1 2 3 --pipeline-splits flatten", "3 values for 2 stages; give one, or 4"),
        ("--available-mem 101", "--available-memory-proportion 101: must be between 0 and 100"),
        ("--ckpt-all-instances --ckpts-per-epoch 0", "--ckpt-all-instances: --ckpts-per-epoch 0 saves no"),
        ("--dbn-replica-group-size 2", "--dbn-replica-group-size 2: does not divide --num-replicas 1"),
        (
            "--dbn-replica-group-size 2 --num-replicas 2 --pipeline-splits flatten",
            "--dbn-replica-group-size 2: needs one device per replica",
        ),
        ("--norm-layer {name: no_norm}", "--norm-layer: name no_norm: must be one of batch_norm, custom"),
        ("--norm-layer {momentum: 0.9}", "--norm-layer: no name: must be one of batch_norm"),
        (
            "--norm-layer {name: group_norm}",
            "group_norm takes num_groups or channels_per_group, and neither is",
        ),
        (
            "--norm-layer {name: group_norm, num_groups: 2, channels_per_group: 2}",
            "group_norm takes num_groups or channels_per_group, not both",
        ),
        (
            "--norm-layer {name: group_norm, num_groups: 0}",
            "num_groups 0: must be a whole number of at least 1",
        ),
        ("--norm-layer {name: group_norm, momentum: 0.9}", "group_norm takes no momentum"),
        ("--norm-layer {name: batch_norm, momentum: 1}", "momentum 1: must be a number from 0 to below 1"),
        (
            "--norm-layer {name: batch_norm, momentun: 0.9}",
            "batch_norm takes no momentun; did you mean momentum",
        ),
        ("--norm-layer batch_norm", "--norm-layer batch_norm: must be a mapping such as"),
        (
            "--optimizer lars",
            "--optimizer-params: weight_decay, eeta, epsilon missing: found momentum; lars takes",
        ),
        ("--optimizer rmsprop", "--optimizer-params: base_decay_exponent, epsilon missing"),
        (
            "--optimizer adam --optimizer-params {momentum: 0.9}",
            "--optimizer-params: momentum unknown: found momentum",
        ),
        (
            "--optimizer muon --optimizer-params {beta: 2}",
            "--optimizer-params: muon's beta 2: must be at least 0",
        ),
        ("--optimizer-params {}", "--optimizer-params: momentum missing"),
        (
            "--optimizer adamw --optimizer-params {weight_decay: 0.05} --weight-decay 0.01",
            "--weight-decay 0.01: is what adamw's weight_decay in --optimizer-params is; keep one",
        ),
        ("--ema 1", "--ema 1: must lie between 0 and 1, such as 0.999"),
        ("--ema 0", "--ema 0: must lie between 0 and 1, such as 0.999"),
        ("--mixup -1", "--mixup -1: must be at least 0"),
        ("--cutmix x", "--cutmix x: must be a number"),
        ("--random-erasing 2", "--random-erasing 2: must be between 0 and 1"),
        ("--mixup 0.2", "--mixup: a batch of one image has no other one to mix it with"),
        ("--cutmix 1", "--cutmix: a batch of one image has no other one to mix it with"),
        ("--model cifar_resnet20x100", "or another cifar_resnet of 6n + 2 layers, x2 to x99 as wide"),
        ("--model cifar_resnet18x2", "or another cifar_resnet of 6n + 2 layers, x2 to x99 as wide"),
        (
            "--optimizer rmsprop --optimizer-params {momentum: 0, base_decay_exponent: -4, epsilon: 1e-3} "
            "--micro-batch-size 32",
            "--optimizer-params: rmsprop's base_decay_exponent -4: gives rho -1 with global batch 32",
        ),
        (
            "--optimizer rmsprop --optimizer-params {momentum: 0, base_decay_exponent: 3, epsilon: 1e-3} "
            "--micro-batch-size 32",
            "with global batch 32, which must be at least 0 and below 1; -9 gives 0.9375",
        ),
        (
            "--lr-schedule cosine",
            "--lr-schedule-params: epochs_to_total_decay missing: found initial_learning_rate",
        ),
        (
            "--lr-schedule polynomial",
            "--lr-schedule-params: epochs_to_total_decay, end_learning_rate_ratio, power",
        ),
        ("--lr-schedule stepped", "--lr-schedule-params: boundaries, values missing"),
        (
            "--lr-schedule stepped --lr-schedule-params {boundaries: [1, 2], values: [1, 2]}",
            "--lr-schedule-params: 2 values and 2 boundaries: stepped takes one value more",
        ),
        ("--lr-warmup-params {warmup_epochs: 5}", "--lr-warmup-params: warmup_mode missing"),
        ("--lr-warmup-params {warmup_mode: shift}", "--lr-warmup-params: warmup_epochs missing"),
        (
            "--lr-warmup-params {warmup_mode: slide, warmup_epochs: 5}",
            "--lr-warmup-params: a warm-up's warmup_mode slide: must be shift or mask",
        ),
        ("--logs-per-epoch 1/2 --num-epochs 5", "It is not possible to log 2.0 epochs a time for 5 epochs"),
        ("--num-epochs 5 --first-ckpt-epoch 6", "--first-ckpt-epoch 6: the run ends after 5 epochs"),
        ("--micro-batch-size 50001", "50000 samples do not fill one global batch of 50001"),
        ("--top-k 11", "--top-k 11: cifar10 has only 10 classes"),
        ("--label-smoothing 1.5", "--label-smoothing 1.5: must be between 0 and 1"),
        ("--loss-scaling -1", "--loss-scaling -1: must be at least 0"),
        ("--loss-scaling nan", "--loss-scaling nan: must be at least 0 and finite"),
        ("--lr-schedule-params {initial_learning_rate: nan}", "--lr-schedule-params"),
        ("--seed -1", "--seed -1: must be between 0 and"),
        ("--target-accuracy 75.9", "--target-accuracy 75.9: must be between 0 and 1"),
        ("--validation-micro-batch-size 0", "--validation-micro-batch-size 0: must be at least 1"),
        ("--auto-loss-scaling --loss-scaling 128", "--auto-loss-scaling and --loss-scaling 128: only one"),
        (f"{AUTO} --optimizer lars --optimizer-params {LARS}", f"{PLAIN_SGD}--optimizer lars, eeta in"),
        (f"{AUTO} --optimizer-params {{momentum: 0.9}}", f"{PLAIN_SGD}momentum 0.9 in --optimizer-params"),
        (f"{AUTO} --optimizer-params {{momentum: 0, eeta: 1}}", f"{PLAIN_SGD}eeta in --optimizer-params"),
        (
            f"{AUTO} --optimizer-params {{momentum: 0, epsilon: 1}}",
            f"{PLAIN_SGD}epsilon in --optimizer-params",
        ),
        (f"{AUTO} --optimizer-params {{momentum: 0, weight_decay: 1}}", f"{PLAIN_SGD}weight_decay in --opt"),
        (f"{AUTO} --lr-schedule cosine --lr-schedule-params {DECAY}", f"{PLAIN_SGD}--lr-schedule cosine"),
        (f"{AUTO} --lr-schedule-params {DECAY}", f"{PLAIN_SGD}epochs_to_total_decay in --lr-schedule-params"),
        (
            f"{AUTO} --lr-schedule-params {{initial_learning_rate: 1, power: 2}}",
            f"{PLAIN_SGD}power in --lr-schedule-params",
        ),
        (
            f"{AUTO} --lr-warmup-params {{warmup_mode: mask, warmup_epochs: 1}}",
            f"{PLAIN_SGD}--lr-warmup-params",
        ),
        ("--num-replicas 2", "--num-replicas 2: there is 1 device; ask for at most 1, or "),
        (
            "--config resnet50_8k_bn_pipeline --strict-devices",
            "--strict-devices: 4 replicas x 4 devices for 4 stages need 16 devices and there is 1 device",
        ),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_option(words, message):
    assert message in error(*_cut(words))


def _cut(words):
    """Words as a shell would cut them, had each mapping been quoted."""
    pieces, depth = [[]], 0
    for letter in words:
        depth += (letter == "{") - (letter == "}")
        if letter == " " and not depth:
            pieces.append([])
        else:
            pieces[-1].append(letter)
    return ["".join(piece) for piece in pieces]


def test_automatic_loss_scaling_goes_with_the_defaults():
    assert job_of("--auto-loss-scaling").scale == AutoScale()


def test_errors_are_value_errors_that_a_program_can_tell_apart():
    for words, kind in (("--recomputation", OptionError), ("--logs-per-epoch 1/2", PlanError)):
        with pytest.raises(kind) as caught:
            job_of(*words.split())
        assert isinstance(caught.value, ValueError)


# Batches and devices.


def test_an_accumulation_on_the_command_line_replaces_a_configurations_global_batch():
    made = job_of("--config", "resnet50_8k_bn_pipeline", "--gradient-accumulation", "2", devices=4)
    assert made.asked == Batch(16, 4, 2)
    assert "--global-batch-size 8192 of the configuration is replaced" in made.notices


def test_a_global_batch_on_the_command_line_replaces_a_configurations_accumulation():
    made = job_of("--config", "resnet8_test", "--global-batch-size", "64")
    assert (made.asked.accumulation, made.batch.global_) == (8, 64)
    assert "--gradient-accumulation-count 1 of the configuration is replaced" in made.notices


def test_both_in_one_file_are_one_too_many(tmp_path):
    path = tmp_path / "own.yml"
    path.write_text("global_batch_size: 8\ngradient_accumulation_count: 8\n")
    assert "each follows from the other" in error("--config-path", str(path))


def test_missing_replicas_become_accumulation_and_stages_merge_in_one_notice():
    words = ("--config", "resnet50_16ipus_8k_bn_pipeline")
    made = job_of(*words, devices=1)
    assert made.batch == Batch(16, 1, 512)
    assert (made.asked.replicas, base_rate(made), made.plan.updates_per_epoch) == (4, 1.0, 156)
    said = [notice for notice in made.notices if "stages merge" in notice]
    assert said == [
        "4 replicas x 4 devices for 4 stages on 1 device: 4 stages merge into one; 4 replicas become 1 with "
        "accumulation 512 instead of 128; the global batch 8192 and the learning rate stay"
    ]
    assert job_of(*words, devices=3).batch.replicas == 2
    assert job_of(*words, devices=16).batch == made.asked


def test_a_configuration_that_fits_says_nothing():
    made = job_of("--config", "cifar_resnet20", devices=8)
    assert (made.notices, made.warnings, made.batch) == ((), (), made.asked)


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 7, 8, 16, 64])
@pytest.mark.parametrize("name", ["resnet50_mlperf", "resnet8_bn", "resnet50_mlperf_lars"])
def test_the_global_batch_stays_on_any_number_of_devices(name, devices):
    made = job_of("--config", name, devices=devices)
    assert made.batch.global_ == made.asked.global_
    assert made.batch.replicas <= min(devices, made.asked.replicas)


def test_strict_devices_stops_what_would_be_merged():
    words = ("--config", "resnet50_8k_bn_pipeline", "--strict-devices")
    assert "--strict-devices: 4 replicas x 4 devices for 4 stages need 16 devices and there are 2" in error(
        *words, devices=2
    )
    assert job_of(*words, devices=16).batch.replicas == 4
    with pytest.raises(DeviceError):
        job_of("--config", "resnet8_bn", "--strict-devices", devices=15)
    assert job_of("--config", "resnet8_bn", "--strict-devices", devices=16).batch.replicas == 16


def test_replicas_asked_for_on_the_command_line_must_be_there():
    assert "there are 3 devices" in error("--config", "resnet8_bn", "--num-replicas", "4", devices=3)
    assert job_of("--num-replicas", "2", devices=2).batch.replicas == 2
    assert resolve(TrainConfig(num_replicas=2), DATASET_SIZES["cifar10"], 1).batch.accumulation == 2


def test_replicas_become_accumulation_where_the_command_line_says_that_devices_need_not_suffice():
    made = job_of("--num-replicas", "16", "--strict-devices", "False", "--micro-batch-size", "8")
    assert made.batch == Batch(8, 1, 16)
    assert "16 replicas become 1 with accumulation 16 instead of 1" in made.notices[0]


def test_a_global_batch_that_does_not_divide_is_rounded_with_a_warning():
    made = job_of("--micro-batch-size", "3", "--num-replicas", "2", "--global-batch-size", "10", devices=2)
    assert (made.batch.accumulation, made.batch.global_) == (2, 12)
    assert [warning for warning in made.warnings if "global_size=10" in warning] == [made.warnings[0]]


# Host events, warnings, notices.

README = ("--model", "cifar_resnet8", "--num-epochs", "6", "--precision", "16.16", "--micro-batch-size", "8")
README += (
    "--validation",
    "False",
    "--half-partials",
    "True",
    "--gradient-accumulation",
    "8",
    "--logs-per-epoch",
)


@pytest.mark.parametrize(
    ("logs", "calls", "updates", "lines", "warned"),
    [
        ("1", 6, 781, 6, ""),
        ("2", 6, 781, 6, "logs_per_epoch=2 would interrupt a weight update"),
        ("10", 66, 71, 66, "adjusted to 11 an epoch"),
        ("1/2", 3, 1562, 3, ""),
        ("1/3", 2, 2343, 2, ""),
        ("0", 1, 4686, 0, "the entire run of 4686 weight updates is one call"),
    ],
)
def test_the_old_programs_examples_make_the_calls_they_promise(logs, calls, updates, lines, warned):
    plan = job_of(*README, logs).plan
    assert (plan.calls, plan.updates_per_call, len(plan.updates("log"))) == (calls, updates, lines)
    assert len(plan.warnings) == bool(warned) and all(warned in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("words", "saved"),
    [
        ("--num-epochs 5 --ckpts-per-epoch 1/3 --first-ckpt-epoch 2", [2, 5]),
        ("--num-epochs 6 --ckpts-per-epoch 1 --first-ckpt-epoch 2", [2, 3, 4, 5, 6]),
        ("--num-epochs 38 --ckpts-per-epoch 1/4 --first-ckpt-epoch 2", list(range(2, 39, 4))),
        ("--num-epochs 5 --ckpts-per-epoch 1/3 --first-ckpt-epoch 5", [5]),
        ("--num-epochs 5 --ckpts-per-epoch 0", []),
        ("--num-epochs 49 --ckpts-per-epoch 1/49 --logs-per-epoch 1/49", [49]),
        ("--num-epochs 3", [1, 2, 3]),
    ],
)
def test_checkpoints_fall_where_they_are_asked_for(words, saved):
    plan = job_of(*words.split(), "--micro-batch-size", "1000").plan
    assert [update / plan.updates_per_epoch for update in plan.updates("checkpoint")] == saved


def test_updates_an_epoch_can_be_replaced():
    words = "--config resnet50_16ipus_8k_bn_pipeline --synthetic-data ipu --num-epochs 1 --validation False"
    made = job_of(*words.split(), "--weight-updates-per-epoch", "2")
    assert (made.plan.total_updates, made.plan.updates_per_call, made.validation) == (2, 2, None)


def test_without_training_there_is_no_plan_and_no_training_sample_needed():
    empty = DATASET_SIZES["cifar10"]._replace(train=0)
    assert resolve(TrainConfig(training=False), empty, 1).plan is None
    with pytest.raises(PlanError):
        resolve(TrainConfig(), empty, 1)


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        ("--deterministic", "--deterministic: turns --shuffle off"),
        ("--pipeline-validation-model", "there are no --pipeline-splits, so it is off"),
        ("--ckpt-all-instances", "this is the only process, so it is off"),
        (
            "--optimizer muon --optimizer-params {} --l2-regularization 0.1",
            "--l2-regularization 0.1: muon scales it away with the gradient; --weight-decay is its decay",
        ),
        (
            '--optimizer adamw --lr-schedule-params {"initial_learning_rate":0.001} --micro-batch-size 512',
            "initial_learning_rate 0.001 is for one sample, and times the global batch 512 0.512: much for adamw; "
            "for a rate of 0.001 give 1.953e-06",
        ),
    ],
)
def test_what_is_turned_off_is_a_warning(words, warning):
    (said,) = job_of(*words.split()).warnings
    assert warning in said


def test_deterministic_runs_do_not_shuffle():
    assert job_of().shuffled
    assert not job_of("--deterministic").shuffled
    assert job_of("--deterministic", "--shuffle", "False").warnings == ()


def test_pipelined_validation_without_stages_is_as_if_not_asked_for():
    assert job_of("--pipeline-validation-model").validation == job_of().validation


def test_options_without_effect_are_named_in_one_notice():
    words = "--conv-dithering --prefetch-depth 3 --min-remote-tensor-size 128 --seed 1"
    assert job_of(*words.split()).notices == (
        "without effect here: --conv-dithering, --min-remote-tensor-size, --prefetch-depth",
    )
    assert job_of("--stable-norm", "False").notices == ("without effect here: --stable-norm",)
    assert job_of("--seed", "1").notices == ()
    assert len(WITHOUT_EFFECT) == 16


@pytest.mark.parametrize("on_demand", ["true", "false"])
def test_what_a_configuration_has_is_named_even_where_it_is_the_default(on_demand, tmp_path):
    file = tmp_path / "own.yml"
    file.write_text(f"on_demand: {on_demand}\nstable_norm: true\nseed: 1\n")
    (notice,) = job_of("--config-path", str(file)).notices
    assert notice == "without effect here: --on-demand, --stable-norm"


@pytest.mark.parametrize("words", ["--pipeline-schedule Grouped", "--pipeline-schedule Sequential"])
def test_an_order_of_stages_without_stages_is_a_warning(words):
    made = job_of(*words.split())
    assert made.warnings == ("--pipeline-schedule: there are no --pipeline-splits, so it changes nothing",)
    assert made.notices == ()
    assert not [line for line in job_of("--config", "resnet50_mlperf").warnings if "schedule" in line]


def test_jobs_can_be_hashed_and_options_without_effect_do_not_make_a_difference():
    assert job_of("--conv-dithering") == job_of() and hash(job_of("--conv-dithering")) == hash(job_of())
    assert hash(job_of("--config", "resnet50_mlperf_lars")) != hash(job_of("--config", "resnet50_mlperf"))


def test_options_without_effect_are_checked_and_written_back_like_others():
    given = {"available_memory_proportion": [10], "nanoo": "true", "prefetch_depth": 1, "seed": 3}
    config = build(TrainConfig, given)
    assert config.without_effect == {"available_memory_proportion": (10.0,), "nanoo": True}
    found = values_of(config)
    assert [found[name] for name in ("available_memory_proportion", "nanoo", "prefetch_depth", "seed")] == [
        (10.0,), True, 1, 3,
    ]  # fmt: skip
    assert build(TrainConfig, to_jsonable(found)) == config
    assert TrainConfig(without_effect={"nanoo": "yes"}).without_effect == {"nanoo": True}
    with pytest.raises(OptionError, match="prefetch_dept: no such option; did you mean prefetch_depth"):
        TrainConfig(without_effect={"prefetch_dept": 2})
    with pytest.raises(OptionError, match="--prefetch-depth 0: must be at least 1"):
        TrainConfig(without_effect={"prefetch_depth": 0})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{name: batch_norm}", NormChoice("batch", 0.99)),
        ("{name: batch_norm, momentum: 0.9}", NormChoice("batch", 0.9)),
        ("{name: custom_batch_norm}", NormChoice("batch", 0.97)),
        ("{name: custom_batch_norm, momentum: 0}", NormChoice("batch", 0.0)),
        ("{name: group_norm, num_groups: 32}", NormChoice("group", groups=32)),
        ("{name: group_norm, channels_per_group: 4}", NormChoice("group", channels_per_group=4)),
    ],
)
def test_the_norm_keeps_the_momentum_it_is_given(text, expected):
    assert job_of("--norm-layer", text).network.norm == expected


def test_every_optimiser_and_schedule_of_the_engine_can_be_asked_for_by_its_name():
    choices = {each.name: each.kind.choices for each in options_of(TrainConfig)}
    assert {*choices["optimizer"]} == {*OPTIMISERS}
    assert {*choices["lr_schedule"]} == {*SCHEDULES}


def test_an_exponential_rate_falls_after_every_so_many_epochs():
    rate = {"initial_learning_rate": 0.25, "decay_rate": 0.5, "decay_epochs": 2}
    words = ("--weight-updates-per-epoch", "10", "--num-epochs", "5", "--micro-batch-size", "4")
    job = job_of(*words, "--lr-schedule", "exponential", "--lr-schedule-params", json.dumps(rate))
    assert job.rate(np.array([0, 19, 20, 40])).tolist() == [1, 1, 0.5, 0.25]


def test_numbers_reach_the_job():
    words = "--loss-scaling 128 --stochastic-rounding replica-identical --half-partials"
    made = job_of(*words.split())
    assert made.scale == 128.0
    assert made.policy == precision.parse("16.16", stochastic_rounding=True, half_partials=True)
    made = job_of("--stochastic-rounding", "OFF", "--half", "float16")
    assert made.scale == 1.0
    assert made.policy == precision.parse("16.16", "float16", stochastic_rounding=False)


def test_stepped_rates_do_not_grow_with_the_batch():
    steps = ("--lr-schedule", "stepped", "--lr-schedule-params", "{boundaries: [1], values: [0.1, 0.01]}")
    assert float(job_of(*steps, "--micro-batch-size", "8").rate(0)) == pytest.approx(0.1)

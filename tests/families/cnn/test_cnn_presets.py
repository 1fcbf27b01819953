"""The named configurations of `hotloop cnn`: the old file's table, number for number, under old and new names."""

from fractions import Fraction

import pytest
from cnn_words import settings, typed

from hotloop.errors import OptionError
from hotloop.families.cnn.job import count_stages, devices_per_replica
from hotloop.families.cnn.norms import NormChoice
from hotloop.families.cnn.options import Train
from hotloop.families.cnn.presets import PRESETS, expectation
from hotloop.options import Params, options_of

BASE = {each.name: each.default for each in options_of(Train)}
IMAGENET = {"dataset": "imagenet", "dataset_path": "/localdata/datasets/imagenet-data"}
CIFAR = {"dataset": "cifar10", "dataset_path": "/localdata/datasets"}

# name: model, micro batch, global batch, replicas, stages, devices a replica, epochs, accumulation, updates, left, rate
TABLE = {
    "resnet8_test": ("cifar_resnet8", 8, 8, 1, 1, 1, 1, 1, 6250, 0, "0.0008"),
    "resnet8_test_lars": ("cifar_resnet8", 8, 8, 1, 1, 1, 50, 1, 6250, 0, "0.001"),
    "resnet8_16ipus_bn": ("cifar_resnet8", 25, 2000, 16, 1, 1, 70, 5, 25, 0, "0.24414"),
    "resnet50_16ipus_16k_bn_pipeline": ("resnet50", 16, 16384, 4, 4, 4, 100, 256, 78, 3215, "2"),
    "resnet50_16ipus_8k_bn_pipeline": ("resnet50", 16, 8192, 4, 4, 4, 100, 128, 156, 3215, "1"),
    "resnet56_16ipus_8k_bn_pipeline": ("cifar_resnet56", 16, 8192, 4, 4, 4, 100, 128, 156, 3215, "1"),
    "resnet50_16ipus_8k_gn_pipeline": ("resnet50", 16, 8192, 4, 4, 4, 100, 128, 156, 3215, "1"),
    "resnet50_mlperf_bs16": ("resnet50", 16, 2304, 16, 4, 1, 44, 9, 556, 143, "4.588"),
    "resnet50_mlperf_pod16_bs20": ("resnet50", 20, 1920, 16, 7, 1, 40, 6, 667, 527, "3.82333"),
    "resnet50_mlperf_pod4_bs20": ("resnet50", 20, 480, 4, 7, 1, 40, 6, 2669, 47, "0.955833"),
    "resnet50_mlperf_pod16_lars": ("resnet50", 18, 3456, 16, 7, 1, 38, 12, 370, 2447, "10.52509"),
    "resnet50_infer_bs1": ("resnet50", 1, 1, 1, 1, 1, 1, 1, 1281167, 0, "0.00199132"),
    "resnet50_infer_test": ("resnet50", 1, 1, 1, 1, 1, 1, 1, 1281167, 0, "0.00199132"),
    "resnet50_infer_bs16": ("resnet50", 16, 16, 1, 1, 1, 1, 1, 80072, 15, "0.0318611"),
    "resnet50_infer_bs32": ("resnet50", 32, 32, 1, 1, 1, 1, 1, 40036, 15, "0.0637222"),
}
RENAMED = {
    "resnet8_16ipus_bn": "resnet8_bn",
    "resnet50_16ipus_16k_bn_pipeline": "resnet50_16k_bn_pipeline",
    "resnet50_16ipus_8k_bn_pipeline": "resnet50_8k_bn_pipeline",
    "resnet56_16ipus_8k_bn_pipeline": "resnet56_8k_bn_pipeline",
    "resnet50_16ipus_8k_gn_pipeline": "resnet50_8k_gn_pipeline",
    "resnet50_mlperf_bs16": "resnet50_mlperf",
    "resnet50_mlperf_pod16_bs20": "resnet50_mlperf_bs20",
    "resnet50_mlperf_pod4_bs20": "resnet50_mlperf_bs20_4replicas",
    "resnet50_mlperf_pod16_lars": "resnet50_mlperf_lars",
}
RECIPES = (
    "mnist_toy",
    "mnist_resnet8",
    "cifar_resnet8",
    "cifar_resnet20",
    "cifar10_modern",
    "imagenet_modern",
)

# The values beside those of the table: every key that a configuration sets, and no other.
EIGHT_BIT = {"eight_bit_transfer": True, "accelerator_side_preprocess": True}
LR = 0.0001220703125
COSINE = {
    "lr_schedule": "cosine",
    "lr_schedule_params": {"initial_learning_rate": LR, "epochs_to_total_decay": 65},
}
K16 = {
    **IMAGENET,
    **EIGHT_BIT,
    "precision": "16.32",
    "half_partials": True,
    "recomputation": True,
    "optimizer_params": {"momentum": 0.9},
    "pipeline_splits": ("conv2_block2_out", "conv3_block1_out", "conv4_block2_out"),
    "available_memory_proportion": (15,),
    "loss_scaling": 128,
    "l2_regularization": 1e-4,
    "lr_schedule": "cosine",
    "lr_schedule_params": {"initial_learning_rate": LR, "epochs_to_total_decay": 95},
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5},
    "lr_staircase": True,
    "global_batch_size": 16384,
}
K8 = {
    **K16,
    "precision": "16.16",
    "stable_norm": True,
    "optimizer_state_offloading": False,
    "lr_schedule_params": {"initial_learning_rate": LR, "epochs_to_total_decay": 100},
    "lr_warmup_params": {"warmup_mode": "mask", "warmup_epochs": 5},
    "global_batch_size": 8192,
}
INFER = {
    **EIGHT_BIT,
    "optimizer_params": {"momentum": 0.9},
    "l2_regularization": 2.5e-5,
    "lr_schedule": "polynomial",
    "lr_schedule_params": {
        "initial_learning_rate": 0.001991319444444,
        "epochs_to_total_decay": 39,
        "end_learning_rate_ratio": 2.18e-5,
        "power": 2,
    },
    "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5},
    "norm_layer": {"name": "custom_batch_norm", "momentum": 0.9},
    "label_smoothing": 0.1,
    "half_partials": True,
    "optimizer_state_offloading": False,
    "available_memory_proportion": (20,),
    "fused_preprocessing": True,
    "internal_exchange_optimization_target": "memory",
}
MLPERF = {
    **INFER,
    **IMAGENET,
    "loss_scaling": 128,
    "pipeline_schedule": "Sequential",
    "pipeline_splits": ("conv2_block1_out", "conv2_block3_out", "conv3_block4_out"),
    "device_mapping": (0,) * 4,
    "recomputation": True,
    "max_cross_replica_buffer_size": 52428800,
    "dbn_replica_group_size": 2,
    "ckpts_per_epoch": Fraction(1, 4),
    "validation_micro_batch_size": 108,
    "global_batch_size": 2304,
}
SIX = {
    "pipeline_splits": (
        "conv2_block1_out",
        "conv2_block3_out",
        "conv3_block1_out",
        "conv3_block3_out",
        "conv4_block1_out",
        "conv4_block4_out",
    ),
    "device_mapping": (0,) * 7,
    "available_memory_proportion": (15,),
}
BS20 = {
    **MLPERF,
    **SIX,
    "gather_conv_output": True,
    "validation_micro_batch_size": 115,
    "global_batch_size": 1920,
}
REMAINING = {
    "resnet8_test": {**CIFAR, "validation": False, "gradient_accumulation_count": 1},
    "resnet8_test_lars": {
        **CIFAR,
        "gradient_accumulation_count": 1,
        "precision": "32.32",
        "l2_regularization": 1e-5,
        "optimizer": "lars",
        "optimizer_params": {"eeta": 0.001, "momentum": 0.9, "epsilon": 0, "weight_decay": 2.5e-6},
        "lr_schedule_params": {"initial_learning_rate": 0.000125},
    },
    "resnet8_16ipus_bn": {
        **CIFAR,
        **EIGHT_BIT,
        **COSINE,
        "half_partials": True,
        "norm_layer": {"name": "batch_norm"},
        "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5},
        "l2_regularization": 1e-4,
        "global_batch_size": 2000,
    },
    "resnet50_16ipus_16k_bn_pipeline": K16,
    "resnet50_16ipus_8k_bn_pipeline": K8,
    "resnet56_16ipus_8k_bn_pipeline": {
        **K8,
        "available_memory_proportion": (13.5,),
        "pipeline_validation_model": True,
        "pipeline_splits": (
            "conv2_block4_post_addition_relu",
            "conv2_block7_post_addition_relu",
            "conv3_block4_post_addition_relu",
        ),
    },
    "resnet50_16ipus_8k_gn_pipeline": {**K8, "norm_layer": {"name": "group_norm", "num_groups": 32}},
    "resnet50_mlperf_bs16": MLPERF,
    "resnet50_mlperf_pod16_bs20": BS20,
    "resnet50_mlperf_pod4_bs20": {**BS20, "global_batch_size": 480},
    "resnet50_mlperf_pod16_lars": {
        **MLPERF,
        **SIX,
        "optimizer": "lars",
        "optimizer_params": {"momentum": 0.9, "weight_decay": 5e-5, "eeta": 0.001, "epsilon": 0},
        "l2_regularization": 5e-5,
        "lr_schedule_params": {
            "initial_learning_rate": 0.003045455,
            "epochs_to_total_decay": 36,
            "end_learning_rate_ratio": 9.32836e-6,
            "power": 2,
        },
        "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 2},
        "first_ckpt_epoch": 2,
        "max_reduce_many_buffer_size": 216,
        "global_batch_size": 3520,
    },
    "resnet50_infer_base": {**INFER, "global_batch_size": 1, "model_name": "resnet50"},
    "resnet50_infer_bs1": {**INFER, **IMAGENET, "global_batch_size": 1},
    "resnet50_infer_test": {**INFER, **IMAGENET, "global_batch_size": 1},
    "resnet50_infer_bs16": {**INFER, **IMAGENET, "global_batch_size": 16},
    "resnet50_infer_bs32": {**INFER, **IMAGENET, "global_batch_size": 32},
}


def config(name):
    return typed("--config", name).config


def values(name):
    """Every option but for the words about it, with paths as text."""
    made = config(name)
    found = {each: getattr(made, each) for each in BASE if each != "expect"}
    return found | {"dataset_path": str(found["dataset_path"])}


@pytest.mark.parametrize("name", TABLE)
def test_batches_updates_and_rates_are_those_of_the_table(name):
    model, micro, global_size, replicas, cuts, spread, epochs, accumulation, updates, left, rate = TABLE[name]
    made, asked = settings("--config", name, devices=16), config(name)
    assert (made.model, made.asked.as_dict()) == (
        model,
        {"micro": micro, "replicas": replicas, "accumulation": accumulation, "global": global_size},
    )
    assert (count_stages(asked), devices_per_replica(asked), made.epochs) == (cuts, spread, epochs)
    assert made.plan.updates_per_epoch == updates
    assert made.samples.train - updates * global_size == left
    assert f"{made.base_rate:.{len(rate.partition('.')[2])}f}" == rate  # as it is printed there


@pytest.mark.parametrize("name", REMAINING)
def test_a_configuration_has_every_value_of_the_old_one_and_no_other(name):
    expected = BASE | {"dataset_path": "."} | REMAINING[name]
    if name in TABLE:
        expected |= dict(
            zip(
                ("model_name", "micro_batch_size", "num_replicas", "num_epochs"), _of_table(name), strict=True
            )
        )
    expected = {
        key: Params(value) if isinstance(value, dict) else value
        for key, value in expected.items()
        if key != "expect"
    }
    assert values(name) == expected


def _of_table(name):
    model, micro, _, replicas, _, _, epochs, *_ = TABLE[name]
    return model, micro, replicas, epochs


@pytest.mark.parametrize("old", RENAMED)
def test_the_new_name_means_the_same_without_a_strangers_folder(old):
    assert values(RENAMED[old]) == values(old) | {"dataset_path": "."}
    assert expectation(old) == expectation(RENAMED[old])


def test_nothing_is_named_that_these_tests_do_not_know():
    known = {*TABLE, *REMAINING, *RENAMED.values(), *RECIPES, "imagenet_config", "cifar10_config"}
    assert set(PRESETS) == known


@pytest.mark.parametrize(("name", "expected"), [("imagenet_config", IMAGENET), ("cifar10_config", CIFAR)])
def test_fragments_name_data_and_nothing_else(name, expected):
    assert values(name) == {key: value for key, value in BASE.items() if key != "expect"} | expected


def test_a_global_batch_that_did_not_divide_warns_as_it_did():
    (warning,) = settings("--config", "resnet50_mlperf_pod16_lars", devices=16).warnings
    assert "global_size=3520" in warning
    assert "count is 12 and global batch size 3456" in warning


@pytest.mark.parametrize(
    ("name", "size", "padded"),
    [
        ("resnet50_8k_bn_pipeline", 256, 50176),
        ("resnet50_16k_bn_pipeline", 256, 50176),
        ("resnet50_8k_gn_pipeline", 256, 50176),
        ("resnet56_8k_bn_pipeline", 512, 50176),
        ("resnet50_mlperf", 1728, 50112),
        ("resnet50_mlperf_lars", 1728, 50112),
        ("resnet50_mlperf_bs20", 1840, 51520),
        ("resnet50_mlperf_bs20_4replicas", 460, 50140),
        ("resnet50_infer_bs32", 32, 50016),
    ],
)
def test_validation_pads_as_it_did_and_counts_every_sample(name, size, padded):
    found = settings("--config", name).validation
    assert (found.batch, found.padded, found.padding) == (size, padded, padded - 50_000)


def test_lars_saves_every_fourth_epoch_from_the_second():
    plan = settings("--config", "resnet50_mlperf_pod16_lars").plan
    assert [update // 370 for update in plan.updates("checkpoint")] == list(range(2, 39, 4))


def test_norms_of_the_configurations():
    norms = {name: settings("--config", name).norm for name in ("resnet8_bn", "resnet50_8k_gn_pipeline")}
    assert norms == {
        "resnet8_bn": NormChoice("batch", 0.99),
        "resnet50_8k_gn_pipeline": NormChoice("group", groups=32),
    }


@pytest.mark.parametrize("name", [*RECIPES, *RENAMED.values()])
def test_a_configuration_says_what_to_expect(name):
    assert expectation(name).endswith(".")
    assert config(name).expect == expectation(name)


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(OptionError, match="did you mean cifar_resnet20"):
        expectation("cifar_resnet2")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_on_one_device_without_a_word_and_its_rate_ends_with_the_run(name):
    made = settings("--config", name)
    assert (made.warnings, made.notices) == ((), ())
    length = made.schedule_params.get("epochs_to_total_decay") or made.schedule_params["total_epochs"]
    warmup = made.warmup["warmup_epochs"] if made.warmup else 0
    assert length + warmup == made.epochs
    assert made.plan.updates("checkpoint")[-1] == made.plan.total_updates


def test_the_classic_recipe_has_the_papers_batch_rate_and_decay():
    made = settings("--config", "cifar_resnet20")
    assert (made.model, made.batch.global_, made.base_rate, made.l2) == ("cifar_resnet20", 128, 0.1, 1e-4)
    assert made.optimizer_params == Params(momentum=0.9)


@pytest.mark.parametrize("name", ["cifar10_modern", "imagenet_modern"])
def test_the_modern_recipes_are_modern(name):
    made = settings("--config", name)
    assert made.optimizer_params["nesterov"] is True
    assert made.exclude_norms_and_biases
    assert made.smoothing
    assert (made.precision, made.half) == ("16.32", "bfloat16")

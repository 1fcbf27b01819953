"""The named configurations of `hotloop cnn`: the old file's table, number for number, under old and new names."""

import pytest
from cnn_words import base_rate, job_of, typed

from hotloop.engine.plan import Batch
from hotloop.families.cnn.network import NormChoice
from hotloop.families.cnn.presets import PRESETS
from hotloop.options import values_of

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
    "cifar10_wide",
    "imagenet_modern",
)


def config(name):
    return typed("--config", name).config


def values(name):
    """Every option but for the words about it, with paths as text."""
    found = values_of(config(name))
    del found["expect"]
    return found | {"dataset_path": str(found["dataset_path"])}


@pytest.mark.parametrize("name", TABLE)
def test_batches_updates_and_rates_are_those_of_the_table(name):
    model, micro, global_size, replicas, cuts, spread, epochs, accumulation, updates, left, rate = TABLE[name]
    made, asked = job_of("--config", name, devices=16), config(name)
    assert (made.config.model_name, made.asked) == (model, Batch(micro, replicas, accumulation))
    assert made.asked.global_ == global_size
    assert (asked.stages, asked.devices_per_replica, asked.num_epochs) == (cuts, spread, epochs)
    assert made.plan.updates_per_epoch == updates
    assert made.size.train - updates * global_size == left
    assert f"{base_rate(made):.{len(rate.partition('.')[2])}f}" == rate  # as it is printed there


@pytest.mark.parametrize("old", RENAMED)
def test_the_new_name_means_the_same_without_a_strangers_folder(old):
    assert values(RENAMED[old]) == values(old) | {"dataset_path": "."}
    assert PRESETS[old]["expect"] == PRESETS[RENAMED[old]]["expect"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_configuration_can_run(name):
    made = job_of("--config", name, devices=16)
    assert made.plan.total_updates > 0 and made.network.nodes


def test_a_global_batch_that_did_not_divide_warns_as_it_did():
    (warning,) = job_of("--config", "resnet50_mlperf_pod16_lars", devices=16).warnings
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
    found = job_of("--config", name).validation
    assert (found.batch, found.batches * size, found.padding) == (size, padded, padded - 50_000)


def test_lars_saves_every_fourth_epoch_from_the_second():
    plan = job_of("--config", "resnet50_mlperf_pod16_lars").plan
    assert [update // 370 for update in plan.updates("checkpoint")] == list(range(2, 39, 4))


def test_norms_of_the_configurations():
    norms = {
        name: job_of("--config", name).network.norm for name in ("resnet8_bn", "resnet50_8k_gn_pipeline")
    }
    assert norms == {
        "resnet8_bn": NormChoice("batch", 0.99),
        "resnet50_8k_gn_pipeline": NormChoice("group", groups=32),
    }


@pytest.mark.parametrize("name", [*RECIPES, *RENAMED.values()])
def test_a_configuration_says_what_to_expect(name):
    assert config(name).expect == PRESETS[name]["expect"] and PRESETS[name]["expect"].endswith(".")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_on_one_device_without_a_word_and_its_rate_ends_with_the_run(name):
    made = job_of("--config", name)
    assert (made.warnings, made.notices) == ((), ())
    schedule, warmup = made.config.lr_schedule_params, made.config.lr_warmup_params or {}
    length = schedule.get("epochs_to_total_decay") or schedule["total_epochs"]
    assert length + warmup.get("warmup_epochs", 0) == made.config.num_epochs
    assert made.plan.updates("checkpoint")[-1] == made.plan.total_updates


def test_the_classic_recipe_has_the_papers_batch_and_rate():
    made = job_of("--config", "cifar_resnet20")
    assert (made.batch.global_, base_rate(made)) == (128, 0.1)

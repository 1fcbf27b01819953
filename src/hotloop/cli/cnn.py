"""`hotloop cnn ...`: train, validate, predict, describe, import, and the data commands. jax waits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotloop.cli.command import Command, Context
from hotloop.errors import OptionError
from hotloop.families.cnn.command_options import (
    BenchmarkConfig,
    BuildConfig,
    DescribeConfig,
    ImportConfig,
    PredictConfig,
    VerifyConfig,
)
from hotloop.families.cnn.options import TrainConfig, ValidateConfig
from hotloop.families.cnn.presets import PRESETS, values_of_run

FAMILY = "hotloop.families.cnn"
DETERMINISTIC = {"deterministic": "--xla_gpu_deterministic_ops=true"}
EPILOG = """Examples:
  hotloop cnn train --config cifar_resnet20            a recipe, then the validation of its checkpoints
  hotloop cnn train --model cifar_resnet8 --micro-batch-size 8 --gradient-accumulation 8 --num-epochs 6
  hotloop cnn train --config resnet50_8k_bn_pipeline --synthetic-data device --validation False
  hotloop cnn train --config cifar_resnet20 --plan     what would run

docs/cnn.md tells what is computed, and what each configuration is for."""


def run_train(config: TrainConfig, context: Context) -> Mapping[str, Any]:
    """Train and validate, or with --plan say what would be done."""
    from hotloop.families.cnn import train

    if config.plan:
        from hotloop.cli.plan import show_plan
        from hotloop.families.cnn.description import describe_plan

        job, text = describe_plan(config, context.given, context.configured)
        context.say(text)
        for line in (*job.warnings, *job.notices):
            context.warn(line)
        return {} if job.plan is None else show_plan(replace(job.plan, warnings=()), context)
    command = " ".join(["hotloop", *context.argv])
    return train.run(config, context, command, context.given, context.configured)


def run_validate(config: ValidateConfig, context: Context) -> Mapping[str, Any]:
    """Only validate; random weights only where that is asked for."""
    if config.checkpoint_input_dir is None and not config.random_weights:
        raise OptionError(
            "RUN is needed: the folder of a run or of its checkpoints (--checkpoint-input-dir names one, too), "
            "or --random-weights"
        )
    context.open_device()
    return run_train(replace(config, training=False), context)


def run_describe(config: DescribeConfig, context: Context) -> Mapping[str, Any]:
    """A table of layers; nothing is computed."""
    from hotloop.families.cnn.description import describe_model

    text, facts = describe_model(config)
    context.say(text)
    return facts


COMMAND = Command(
    "cnn",
    "Train, validate and use ResNets on ImageNet, CIFAR and MNIST.",
    children=(
        Command(
            "train",
            "Train, then validate every checkpoint.",
            TrainConfig,
            run_train,
            on_device=True,
            xla_flags=DETERMINISTIC,
            presets=PRESETS,
            epilog=EPILOG,
        ),
        Command(
            "validate",
            "Validate the checkpoints of a run with the run's own options.",
            ValidateConfig,
            run_validate,
            xla_flags=DETERMINISTIC,
            presets=PRESETS,
            run_values=values_of_run,
            run_option="checkpoint_input_dir",
        ),
        Command(
            "predict",
            "Classes of image files by a checkpoint.",
            PredictConfig,
            f"{FAMILY}.prediction:run",
            on_device=True,
        ),
        Command(
            "describe", "Layers, shapes, parameters, FLOPs and split points.", DescribeConfig, run_describe
        ),
        Command(
            "import",
            "Take over the weights of a torchvision or timm ResNet.",
            ImportConfig,
            f"{FAMILY}.torch_weights:run",
            on_device=True,
        ),
        Command(
            "build-records",
            "TFRecord shards from folders of images.",
            BuildConfig,
            f"{FAMILY}.data_commands:run_build",
        ),
        Command("verify", "Count and check a data set.", VerifyConfig, f"{FAMILY}.data_commands:run_verify"),
        Command(
            "data-benchmark",
            "Images a second of the input pipeline alone.",
            BenchmarkConfig,
            f"{FAMILY}.data_commands:run_benchmark",
            on_device=True,
        ),
    ),
)

"""`hotloop vcd ...`: train, evaluate, samples. Options live in the family's configs; jax waits."""

from collections.abc import Mapping
from typing import Any

from hotloop.cli.command import Command, Context, on_device
from hotloop.families.vcd import old_configs
from hotloop.families.vcd.config import (
    PRESETS,
    VcdEvaluate,
    VcdSamples,
    VcdTrain,
    evaluation_defaults,
    samples_defaults,
)

FAMILY = "hotloop.families.vcd"
EPILOG = """Examples:
  hotloop vcd train -c test                        one epoch, then the test log-likelihood
  hotloop vcd train -c global_cv -r results -n first
  hotloop vcd train --method kl --epochs 10 --iwae-samples 500
  hotloop vcd train --resume -n first              go on where it stopped

docs/vcd.md tells what is computed and where it follows the paper's authors."""


def run_train(config: VcdTrain, context: Context) -> Mapping[str, Any]:
    """Train, or with --plan say what would be done."""
    device = context.open_device()
    from hotloop.families.vcd import train

    if config.plan:
        from hotloop.cli.plan import show_plan

        train.check_sampler(config)
        data = train.load_data(config, context)
        context.say(train.describe(config, len(data.train), device.platform))
        return show_plan(train.make_plan(config, len(data.train)), context)
    return train.run(config, context, " ".join(["hotloop", *context.argv]))


def translate_old(document: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], list[str]]:
    """A file of the old program in our words; any other file as it is."""
    return old_configs.translate(document, where) if old_configs.is_old(document) else (document, [])


COMMAND = Command(
    "vcd",
    "Train, evaluate and sample a VAE with the Variational Contrastive Divergence.",
    children=(
        Command(
            "train",
            "Train, then estimate the test log-likelihood.",
            VcdTrain,
            run_train,
            presets=PRESETS,
            epilog=EPILOG,
            config_option="config_file",
            translate=translate_old,
        ),
        Command(
            "evaluate",
            "The log-likelihood of a run by three proposals.",
            VcdEvaluate,
            on_device(f"{FAMILY}.evaluation"),
            run_values=evaluation_defaults,
        ),
        Command(
            "samples",
            "Pictures: prior samples, reconstructions before and after HMC.",
            VcdSamples,
            on_device(f"{FAMILY}.samples"),
            run_values=samples_defaults,
        ),
    ),
)

"""`hotloop vcd ...`: train, evaluate, samples. Options live in the family's configs; jax waits."""

from collections.abc import Mapping
from typing import Any

from hotloop.cli.command import Command, Context
from hotloop.families.vcd import config as options
from hotloop.families.vcd import old_configs

FAMILY = "hotloop.families.vcd"
EPILOG = """Examples:
  hotloop vcd train -c test                        one epoch, then the test log-likelihood
  hotloop vcd train -c global_cv -r results -n first
  hotloop vcd train --method kl --epochs 10 --iwae-samples 500
  hotloop vcd train --resume -n first              go on where it stopped

docs/vcd.md tells what is computed and where it follows the paper's authors."""


def run_train(config: options.VcdTrain, context: Context) -> Mapping[str, Any]:
    """Train, or with --plan say what would be done."""
    from hotloop.families.vcd import train

    if config.plan:
        from hotloop.cli.plan import show_plan

        return show_plan(train.plan(config, context), context)
    return train.run(config, context, " ".join(["hotloop", *context.argv]))


COMMAND = Command(
    "vcd",
    "Train, evaluate and sample a VAE with the Variational Contrastive Divergence.",
    children=(
        Command(
            "train",
            "Train, then estimate the test log-likelihood.",
            options.VcdTrain,
            run_train,
            on_device=True,
            presets=options.PRESETS,
            epilog=EPILOG,
            config_option="config_file",
            translate=old_configs.translate,
        ),
        Command(
            "evaluate",
            "The log-likelihood of a run by three proposals.",
            options.VcdEvaluate,
            f"{FAMILY}.evaluation:run",
            on_device=True,
            run_values=options.evaluation_defaults,
        ),
        Command(
            "samples",
            "Pictures: prior samples, reconstructions before and after HMC.",
            options.VcdSamples,
            f"{FAMILY}.samples:run",
            on_device=True,
            run_values=options.samples_defaults,
        ),
    ),
)

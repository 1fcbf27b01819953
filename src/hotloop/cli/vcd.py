"""`hotloop vcd ...`: train, evaluate, samples. Options live in the family's configs; jax waits."""

from hotloop.cli.command import Command, Context, Result, computing_command
from hotloop.families.vcd import config as options
from hotloop.families.vcd import old_configs

EPILOG = """Examples:
  hotloop vcd train -c test                        one epoch, then the test log-likelihood
  hotloop vcd train -c global_cv -r results -n first
  hotloop vcd train --method kl --epochs 10 --iwae-samples 500
  hotloop vcd train --resume -n first              go on where it stopped

docs/vcd.md tells what is computed and where it follows the paper's authors."""


def run_train(config: options.VcdTrain, context: Context) -> Result:
    """Train, or with --plan say what would be done."""
    from hotloop.families.vcd import train

    if config.plan:
        return context.show_plan(train.plan(config, context))
    return train.run(config, context, " ".join(["hotloop", *context.argv]))


COMMAND = Command(
    children=(
        computing_command(
            "train",
            "Train, then estimate the test log-likelihood.",
            options.VcdTrain,
            run_train,
            presets=options.PRESETS,
            epilog=EPILOG,
            config_option="config_file",
            translate=old_configs.translate,
        ),
        computing_command(
            "evaluate",
            "The log-likelihood of a run by three proposals.",
            options.VcdEvaluate,
            "vcd.evaluation:run",
            run_values=options.evaluation_defaults,
        ),
        computing_command(
            "samples",
            "Pictures: prior samples, reconstructions before and after HMC.",
            options.VcdSamples,
            "vcd.samples:run",
            run_values=options.samples_defaults,
        ),
    ),
)

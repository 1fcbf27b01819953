"""`hotloop estimator`: the Estimator's example, a small CNN on CIFAR-10. Options live in its config; jax waits."""

from hotloop.cli.command import Context, Result, computing_command
from hotloop.families.estimator.cifar.config import PRESETS, CifarConfig

EPILOG = """Examples:
  hotloop estimator                                    100 epochs, then the test accuracy
  hotloop estimator --batch-size 16 --batches-per-step 500 --learning-rate 0.001
  hotloop estimator --recipe fast --evaluate-every 1   other ways to train; when were 75 % reached?
  hotloop estimator --test-only --model-dir DIR        test what was trained before
  hotloop estimator --model-dir DIR --report DIR/report

docs/estimator.md tells how to write such a program with your own model."""


def run(config: CifarConfig, context: Context) -> Result:
    """Train and test, or with --plan say what would be done."""
    from hotloop.families.estimator.cifar import program

    if config.plan:
        line, plan = program.plan_run(config)
        context.say(line)
        return context.show_plan(plan)
    return program.run(config, context, context.given)


COMMAND = computing_command(
    config=CifarConfig, run=run, presets=PRESETS, epilog=EPILOG, config_option="recipe"
)

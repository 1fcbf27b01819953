"""`hotloop estimator`: the Estimator's example, a small CNN on CIFAR-10. Options live in its config; jax waits."""

from collections.abc import Mapping
from typing import Any

from hotloop.cli.command import Command, Context
from hotloop.families.estimator.cifar.config import PRESETS, CifarConfig

EPILOG = """Examples:
  hotloop estimator                                    100 epochs, then the test accuracy
  hotloop estimator --batch-size 16 --batches-per-step 500 --learning-rate 0.001
  hotloop estimator --recipe fast --evaluate-every 1   other ways to train; when were 75 % reached?
  hotloop estimator --test-only --model-dir DIR        test what was trained before
  hotloop estimator --model-dir DIR --report DIR/report

docs/estimator.md tells how to write such a program with your own model."""


def run(config: CifarConfig, context: Context) -> Mapping[str, Any]:
    """Train and test, or with --plan say what would be done."""
    if config.plan:
        from hotloop.cli.plan import show_plan
        from hotloop.families.estimator.cifar.program import plan_run

        line, plan = plan_run(config)
        context.say(line)
        return show_plan(plan, context)
    from hotloop.families.estimator.cifar import program

    return program.run(config, context, context.given)


COMMAND = Command(
    "estimator",
    "Train and test a small CNN on CIFAR-10 with the Estimator.",
    CifarConfig,
    run,
    on_device=True,
    presets=PRESETS,
    epilog=EPILOG,
    config_option="recipe",
)

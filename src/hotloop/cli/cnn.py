"""`hotloop cnn ...`: train, sweep, speedrun, validate, predict, describe, import, and the data commands. jax waits."""

from collections.abc import Sequence
from dataclasses import replace

from hotloop import rehearsal
from hotloop.cli.command import Command, Context, Elsewhere, Result, computing_command
from hotloop.errors import OptionError
from hotloop.families.cnn import command_options as configs
from hotloop.families.cnn.options import TrainConfig, ValidateConfig
from hotloop.families.cnn.presets import PRESETS, SPEEDRUN_PRESETS, values_of_run
from hotloop.families.cnn.speedrun.config import SpeedrunConfig
from hotloop.families.cnn.sweep_options import SweepConfig

DATA = "cnn.data_commands"
DETERMINISTIC = {"deterministic": "--xla_gpu_deterministic_ops=true"}
EPILOG = """Examples:
  hotloop cnn train --config cifar_resnet20            a recipe, then the validation of its checkpoints
  hotloop cnn train --model cifar_resnet8 --micro-batch-size 8 --gradient-accumulation 8 --num-epochs 6
  hotloop cnn train --config resnet50_8k_bn_pipeline --synthetic-data device --validation False
  hotloop cnn train --config cifar_resnet20 --plan     what would run
  hotloop cnn train --config cifar10_94                CIFAR-10 to 94 % in one compiled call, as cnn speedrun

docs/cnn.md tells what is computed, and what each configuration is for."""

SWEEP_EPILOG = """Examples:
  hotloop cnn sweep --config cifar_resnet8 --num-epochs 5 --over optimizer-params.momentum=0.8,0.9,0.95
  hotloop cnn sweep --config cifar_resnet8 --trials 20 --over lr-schedule-params.initial_learning_rate=log:1e-4..1e-2
  hotloop cnn sweep MLPerf_LARS --dataset-path DIR --trials 30
  hotloop cnn sweep ... --resume --run-name NAME       go on with one that was stopped

docs/cnn.md has what a sweep writes, and how its trials are chosen."""

SPEEDRUN_EPILOG = """Examples:
  hotloop cnn speedrun                                 one run; about a second on a large GPU, after compilation
  hotloop cnn speedrun --repeats 50                    50 seeds of the same program: mean accuracy, seconds each

A run is one call of the device and has no checkpoints: there is nothing to resume, and one takes seconds to repeat.
docs/cnn.md has the network and the recipe."""


def run_train(config: TrainConfig, context: Context) -> Result:
    """Train and validate, or with --plan say what would be done."""
    from hotloop.families.cnn import train

    if config.plan:
        from hotloop.families.cnn.description import describe_plan

        job, text = describe_plan(config, context.given, context.configured)
        context.say(text)
        for line in (*job.warnings, *job.notices):
            context.warn(line)
        return {} if job.plan is None else context.show_plan(replace(job.plan, warnings=()))
    command = " ".join(["hotloop", *context.argv])
    return train.run(config, context, command, context.given, context.configured)


def run_validate(config: ValidateConfig, context: Context) -> Result:
    """Only validate; random weights only where that is asked for."""
    if config.checkpoint_input_dir is None and not config.random_weights:
        raise OptionError(
            "RUN is needed: the folder of a run or of its checkpoints (--checkpoint-input-dir names one, too), "
            "or --random-weights"
        )
    config = replace(config, training=False)

    def check() -> None:
        from hotloop.families.cnn.job import check_before_devices

        check_before_devices(config, context.given)

    context.open_device(check)
    return run_train(config, context)


def run_sweep(config: SweepConfig, context: Context) -> Result:
    """Trials in processes of their own, which need the device: it is opened here for a plan alone."""
    from hotloop.cli.parser import Resolved, resolve, scan
    from hotloop.families.cnn import sweep, sweep_plan

    def read(words: Sequence[str]) -> Resolved:
        return resolve(TRAIN, scan(words, TRAIN.options))

    plan = sweep_plan.plan_sweep(config, context, lambda words: read(words).config)
    if config.plan or rehearsal.is_on():
        for line in sweep.describe(plan):
            context.say(line)
        trials = {number: plan.choose(number) for number in range(1, plan.count + 1)}
        if plan.method == "bayes":
            context.say(
                f"{plan.count} trials, whose values are chosen when they begin; the first, were it drawn:"
            )
        else:
            context.table(
                ("trial", *plan.space), [(number, *each.values()) for number, each in trials.items()]
            )
        context.open_device()
        # The first trial's plan, and with it all that a trial would refuse.
        words = plan.trial_words(1, trials[1])
        first, given = read(words), frozenset(scan(words, TRAIN.options))
        training = replace(context, given=given, configured=first.configured)
        planned = run_train(replace(first.config, plan=True), training)
        if config.plan:
            return {**planned, "objective": plan.objective, "method": plan.method, "trials": trials}
    return sweep.run(config, plan, context)


def run_speedrun(config: SpeedrunConfig, context: Context) -> Result:
    """Train and test for each seed, or with --plan say what would be done."""
    from hotloop.families.cnn.speedrun import train

    if config.plan:
        planned = train.plan(config)
        context.say(f"runs of one program: {config.repeats}, with seeds from {config.seed}; each:")
        return {"repeats": config.repeats, "seed": config.seed, **context.show_plan(planned)}
    return train.run(config, context, " ".join(["hotloop", *context.argv]))


def run_describe(config: configs.DescribeConfig, context: Context) -> Result:
    """A table of layers, and with --stages where to cut them; nothing is computed unless layers are timed."""
    from hotloop.families.cnn.description import describe_model

    text, facts = describe_model(config, context.open_device)
    context.say(text)
    return facts


SPEEDRUN = computing_command(
    "speedrun",
    "CIFAR-10 to 94 % in one compiled call.",
    SpeedrunConfig,
    run_speedrun,
    presets=SPEEDRUN_PRESETS,
    epilog=SPEEDRUN_EPILOG,
)
SPEEDRUN_OPTIONS = {
    **{name: name for name in ("plan", "seed", "dataset_path", "results_dir", "run_name")},
    "num_epochs": "epochs",
}
TRAIN = computing_command(
    "train",
    "Train, then validate every checkpoint.",
    TrainConfig,
    run_train,
    check="cnn.job:check_before_devices",
    xla_flags=DETERMINISTIC,
    presets=PRESETS,
    epilog=EPILOG,
    elsewhere=Elsewhere(SPEEDRUN, "hotloop cnn speedrun", SPEEDRUN_OPTIONS),
)
COMMAND = Command(
    children=(
        TRAIN,
        Command(
            "sweep",
            "Try values of options, a process and a device each, and rank them.",
            SweepConfig,
            run_sweep,
            presets=PRESETS,
            epilog=SWEEP_EPILOG,
        ),
        SPEEDRUN,
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
        computing_command(
            "predict", "Classes of image files by a checkpoint.", configs.PredictConfig, "cnn.prediction:run"
        ),
        Command(
            "describe",
            "Layers, shapes, parameters, FLOPs, and where to cut it into stages.",
            configs.DescribeConfig,
            run_describe,
        ),
        computing_command(
            "import",
            "Take over the weights of a torchvision or timm ResNet.",
            configs.ImportConfig,
            "cnn.torch_weights:run",
        ),
        Command(
            "build-records",
            "TFRecord shards from folders of images.",
            configs.BuildConfig,
            f"{DATA}:run_build",
        ),
        Command("verify", "Count and check a data set.", configs.VerifyConfig, f"{DATA}:run_verify"),
        computing_command(
            "data-benchmark",
            "Images a second of the input pipeline alone.",
            configs.BenchmarkConfig,
            f"{DATA}:run_benchmark",
        ),
    ),
)

"""The runners of the older image classifier: the trial of a sweep, and the training that is timed."""

import shlex

import pytest

from hotloop.bench.compat import CompatError, translate
from hotloop.cli.cnn import TRAIN
from hotloop.cli.parser import resolve, scan

SWEEP = (
    "python3 run_sweep.py --config resnet50_mlperf_pod16_lars --num_epochs 40 --init_lr 0.003 --end_lr_ratio 1e-6 "
    "--warmup_epochs 4 --bn_momentum 0.9 --label_smoothing 0.1 --opt_momentum 0.85"
)
MLPERF = (
    "run_mlperf_sweep.py --config=resnet50_mlperf_pod16_lars --num_epochs=38 --init_lr=0.002 --abs_end_lr=0.001 "
    "--warmup_epochs=2 --label_smoothing=0.1 --micro_batch_size=18 --grad_accum=3 --num_replicas=64"
)
TIMED = (
    "python3 run_and_time.py --num-replicas 16 --ipus-per-replica 1 --num-instances 8 --hosts pod1,pod2 "
    "--partition p --vipu-host h --app-args='--config resnet50_mlperf_pod16_bs20 --dataset-path /data'"
)


def translated(line):
    return translate(shlex.split(line))


def training(words):
    assert words[:3] == ["hotloop", "cnn", "train"]
    return resolve(TRAIN, scan(words[3:], TRAIN.options)).config


def test_a_trial_of_a_sweep_is_a_training_with_what_the_runner_made_of_it():
    found = translated(f"{SWEEP} --l2 2e-5 --lars_weight_decay 5e-5 --lars_eeta 0.001")
    config = training(found.command)
    assert config.lr_schedule_params == {
        "initial_learning_rate": 0.003, "end_learning_rate_ratio": 1e-6, "epochs_to_total_decay": 36, "power": 2,
    }  # fmt: skip
    assert config.lr_warmup_params == {"warmup_mode": "shift", "warmup_epochs": 4}
    assert config.optimizer_params == {"momentum": 0.85, "weight_decay": 5e-5, "eeta": 0.001, "epsilon": 0}
    assert config.norm_layer == {"name": "custom_batch_norm", "momentum": 0.9}
    assert (config.l2_regularization, config.label_smoothing, config.num_epochs) == (2e-5, 0.1, 40)
    assert (config.sweep, config.target_accuracy, config.num_replicas) == (True, 0.759, 64)
    assert (config.ckpts_per_epoch, config.first_ckpt_epoch, config.wandb) == (1, 0, False)
    assert (list(found.before), found.environment) == ([], {})
    for name in ("POPRUN_HOSTS", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PARTITION_ID", "--wandb"):
        assert name in found.notices[0]


def test_the_mlperf_runner_counts_its_end_rate_and_its_checkpoints():
    config = training(translated(f"{MLPERF} --weight_decay=5e-5 --optimizer=lars").command)
    batch = 18 * 64 * 3
    assert config.global_batch_size == batch
    ratio = config.lr_schedule_params["end_learning_rate_ratio"]
    assert ratio * 0.002 * batch == pytest.approx(0.001, rel=1e-12)
    assert (float(config.ckpts_per_epoch), config.first_ckpt_epoch) == (0.25, 2.0)
    assert config.optimizer_params == {"momentum": 0.9, "weight_decay": 5e-5, "eeta": 0.001, "epsilon": 0}
    plain = training(translated(MLPERF.replace("pod16_lars", "pod16_bs20")).command)
    assert (
        plain.optimizer_params == {"momentum": 0.9} and plain.l2_regularization == 2.5e-5
    )  # its configuration's


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (SWEEP, "run_sweep.py runs as one process"),
        (MLPERF, "run_mlperf_sweep.py runs as one process"),
        (TIMED, "run_and_time.py starts its processes itself"),
    ],
)
def test_options_of_a_wrapper_before_a_runner_are_named_as_left_out(line, why):
    plain = translated(line)
    for wrapper, options in (("poprun", "--num-instances 4 -v"), ("mpirun", "-np 4 --bind-to core")):
        found = translated(f"{wrapper} {options} {line}")
        names = ", ".join(word for word in options.split() if word.startswith("-"))
        assert found.notices == [f"{wrapper}: {why}, so its options are left out: {names}", *plain.notices]
        assert (found.command, found.before) == (plain.command, plain.before)


def test_what_is_no_parameter_goes_to_the_training():
    sgd = SWEEP.replace("pod16_lars", "pod16_bs20")
    config = training(translated(f"{sgd} --synthetic-data host --weight-updates-per-epoch 2").command)
    assert (config.synthetic_data, config.weight_updates_per_epoch) == ("host", 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (SWEEP.replace("--init_lr 0.003", ""), "run_sweep.py: --init-lr is needed"),
        (SWEEP.replace("0.003", "fast"), "run_sweep.py: --init-lr fast: must be a number"),
        (SWEEP.replace("--num_epochs 40", "--num_epochs 4.5"), "--num-epochs 4.5: must be a whole number"),
        (MLPERF.replace("--grad_accum=3", ""), "run_mlperf_sweep.py: --grad-accum is needed"),
        (TIMED.replace("--num-instances 8", ""), "run_and_time.py: --num-instances is needed"),
        (f"{TIMED} --config x", "options of the training stand in --app-args"),
        ("run_sweeps.py", "did you mean run_sweep.py"),
    ],
)
def test_what_a_runner_lacks_is_named(line, reason):
    with pytest.raises(CompatError, match=reason):
        translated(line)


def test_the_training_that_is_timed_comes_after_one_that_compiles():
    found = translated(TIMED)
    launch = "hotloop launch --num-instances 8 --num-replicas 16 --ipus-per-replica 1 --hosts pod1,pod2 -- cnn train"
    real = f"{launch} --config resnet50_mlperf_pod16_bs20 --dataset-path /data --mlperf-logging True"
    assert shlex.join(found.command) == real
    compiling = f"{real} --num-epochs 1 --ckpts-per-epoch 0 --wandb False"
    assert [shlex.join(command) for command in found.before] == [compiling]
    assert str(found) == f"{compiling} && {real}"
    assert "--partition, --vipu-host" in found.notices[1]
    alone = translated(
        TIMED.replace("pod1,pod2", "localhost").replace("--dataset-path /data", "--run-name x")
    )
    assert "--hosts" not in alone.command and alone.before[0][-2:] == ["--run-name", "x-compiling"]
    assert translated(TIMED.replace("--app-args=", "--app-args ")).command == found.command

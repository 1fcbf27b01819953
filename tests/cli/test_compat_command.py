"""`hotloop compat`: every command line of the old manuals is accepted by the new command, shown, and run."""

import json
import os
import shlex
import subprocess
import sys

import jax
import pytest

from hotloop.bench.compat import translate
from hotloop.cli import compat as module
from hotloop.cli.command import Common
from hotloop.cli.main import find_command, main
from hotloop.cli.parser import resolve, scan
from hotloop.data.stand_ins import draw_random_sets
from hotloop.families.recommender import rating_sets
from hotloop.options import options_of, values_of

RATINGS = "--training-data-file netflix_data/{0}_train.txt --validation-data-file netflix_data/{0}_valid.txt"
EVENTS = (
    "python3 train.py --model cifar_resnet8 --num-epochs {} --precision 16.16 --micro-batch-size 8 --validation False "
    "--half-partials True --gradient-accumulation 8 --logs-per-epoch {}"
)
SWEEP = "python3 autoencoder_benchmark.py --training-data-file netflix_data/3m_train.txt"
OLD_COMMANDS = [
    "python3 -m examples_utils benchmark --spec benchmarks.yml",
    "python3 -m examples_utils benchmark --spec benchmarks.yml --benchmark tf1_mcmc_vae_synth_pod4",
    "python3 main.py -r where/to/store_results/",
    "python3 main.py -c configs/default_config.json",
    "python3 main.py -c configs/global_cv_config.json",
    "python3 main.py -c configs/bs_experiment_config.json --micro_batch_size 512 --learning_rate 0.0009",
    "python3 main.py -c configs/test_config.json",
    "python3 main.py -c configs/benchmark_config.json --no-testing -b 3072",
    "python3 main.py --config-file=configs/benchmark_config.json --no-testing -b 3072",
    "python3 autoencoder_main.py",
    f"python3 autoencoder_main.py {RATINGS.format('3m')} --size 128",
    f"python3 autoencoder_main.py {RATINGS.format('6m')} --size 256",
    f"python3 autoencoder_main.py {RATINGS.format('1y')} --size 256 --batch-size 32 --validation-batch-size 32",
    f"python3 autoencoder_main.py {RATINGS.format('full')} --size 512 --batch-size 8 --validation-batch-size 8",
    "python3 autoencoder_main.py --precision 16.32 --multiprocessing --base-learning-rate -17 --no-prng",
    f"{SWEEP} --num-ipus 1 --base-learning-rates '16'",
    f"{SWEEP} --num-ipus 2 --base-learning-rates '16,17'",
    SWEEP,
    "python3 autoencoder_benchmark.py --size 128 --num-ipus 2 --base-learning-rates 16..17 --epochs 10",
    *(f"python3 {name}.py" for name in ("dense", "grouped_conv", "rnn", "gru", "lstm", "lstm_multi", "hmc")),
    *(f"python3 {name}.py --steps 5" for name in ("dense", "grouped_conv", "rnn", "gru", "lstm", "hmc")),
    "python3 dense.py --replicas 2 --use-zero-values --matmul-options '{\"partialsType\": \"half\"}' --report",
    "poprun --num-instances 16 --num-replicas 16 python3 train.py",
    "poprun --num-instance 2 --num-replicas 2 --ipus-per-replica 2 python3 train.py --model cifar_resnet8 "
    "--pipeline-splits conv2_block1_post_addition_relu --pipeline-validation-model",
    *(EVENTS.format(6, logs) for logs in ("1", "2", "10", "1/2", "1/3", "0")),
    EVENTS.format(5, "1/2"),
    "python3 train.py --synthetic-data cpu",
    "python3 train.py --synthetic-data ipu",
    "python3 train.py --weight-decay 0.1",
    "python3 train.py --l2-regularization 0.1",
    "python3 train.py --auto-loss-scaling",
    "python3 train.py --config resnet50_16ipus_8k_bn_pipeline",
    "python3 train.py --training False --checkpoint-input-dir d",
    "python3 train.py --bn-momentum 0.9 --stochastic-rounding False --checkpoints False --checkpoint-dir d",
    "python3 train.py --config resnet50_mlperf_pod16_bs20 --dataset-path d/imagenet-data --checkpoint-output-dir "
    "./checkpoints --checkpoint-input-dir ./checkpoints --clean-dir False",
    "python ipu_estimator_cnn.py",
    "python ipu_estimator_cnn.py --batch-size 16 --batches-per-step 500 --learning-rate 0.001",
    "python ipu_estimator_cnn.py --test-only --model-dir /path/to/ckpt",
    "POPLAR_ENGINE_OPTIONS='{\"autoReport.all\":\"true\"}' python ipu_estimator_cnn.py --model-dir /path/to/ckpt",
    "python ipu_estimator_cnn.py --profile --generated-data --train-only --epochs 0.5",
]  # fmt: skip


def config_of(words):
    command, path, rest = find_command(words)
    return path, resolve(command, scan(rest, (*options_of(command.config), *options_of(Common)))).config


@pytest.mark.parametrize("old", OLD_COMMANDS)
def test_the_new_command_accepts_what_the_old_manuals_show(old):
    words = translate(shlex.split(old)).command[1:]
    path, config = config_of(words)
    assert path.split()[1:] == words[: len(path.split()) - 1]
    assert config is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("python3 dense.py --batch-size 32 --size 1024", "kernel dense --batch-size 32 --size 1024"),
        ("python3 lstm.py --popnn --train", "kernel lstm --fused --train"),
        ("python3 lstm_multi.py --num-layers 2 --use-generated-data", "kernel lstm_multi --num-layers 2 --use-gen"),
        ("python3 main.py -r results/ -c configs/global_cv_config.json", "vcd train -r results/ -c global_cv"),
        ("python3 main.py -c configs/bs_experiment_config.json --micro_batch_size 512",
         "vcd train -c bs_experiment -b 512"),
        (f"python3 autoencoder_main.py {RATINGS.format('3m')}", f"recommender train {RATINGS.format('3m')}"),
        ("python3 autoencoder_benchmark.py --base-learning-rates 16..20 --num-ipus 5",
         "recommender sweep --base-learning-rates 16..20 --num-devices 5"),
        ("python3 train.py --training False --checkpoint-input-dir DIR", "cnn validate --checkpoint-input-dir DIR"),
        ("python3 train.py --synthetic-data cpu", "cnn train --synthetic-data host"),
        ("poprun --num-replicas 4 python3 train.py", "launch --num-replicas 4 -- cnn train"),
        ("python ipu_estimator_cnn.py --test-only --model-dir DIR", "estimator --test-only --model-dir DIR"),
    ],
)  # fmt: skip
def test_old_and_new_commands_of_the_readme_mean_the_same(old, new):
    (old_path, before), (new_path, after) = (
        config_of(words) for words in (translate(shlex.split(old)).command[1:], new.split())
    )
    assert old_path == new_path
    differing = {option.name for option in options_of(type(after)) if option.name != "config_file"}
    before, after = values_of(before), values_of(after)
    assert {n: before[n] for n in differing} == {n: after[n] for n in differing}


REFUSED = {
    "--spec benchmarks.yml": "benchmarks.yml: cannot be read: No such file",
    "netflix_data/": "_train.txt: cannot be read (No such file or directory)",
    EVENTS.format(5, "1/2"): "It is not possible to log 2.0 epochs a time for 5 epochs",
    "--config resnet50_16ipus_8k_bn_pipeline": "/localdata/datasets/imagenet-data: no such folder",
    "--dataset-path d/imagenet-data": "d/imagenet-data: no such folder",
    "--training False --checkpoint-input-dir d": "d: no such folder",
    "--test-only --model-dir /path/to/ckpt": "--model-dir /path/to/ckpt: holds no checkpoint",
}
"""Old commands that cannot run here, where there are no data, and why."""


@pytest.fixture
def nowhere(tmp_path, tmp_path_factory, monkeypatch):
    """An empty folder to be in, no data, and ratings that are quickly drawn."""
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path_factory.mktemp("none")))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "")  # an old command may set it
    monkeypatch.setattr(
        rating_sets, "draw_random_sets", lambda seed: draw_random_sets(200, 50, 4000, 400, seed)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("old", OLD_COMMANDS)
def test_a_dry_run_of_every_old_command_ends_before_its_work_or_with_the_commands_own_error(
    old, nowhere, capsys
):
    if "dense.py --replicas 2" in old and len(jax.devices("cpu")) < 2:
        pytest.skip("one CPU device beside an accelerator")
    status = main(["compat", "--device=cpu", "--dry-run", *shlex.split(old)])
    out, err = capsys.readouterr()
    expected = [said for part, said in REFUSED.items() if part in old]
    if expected:
        assert (status, [said in err for said in expected]) == (2, [True]), err
        assert err.splitlines()[-1].startswith("hotloop: error: ")
    else:
        assert status == 0, err
        assert out.splitlines()[-1].startswith("checked, up to ")
    assert list(nowhere.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("lstm.py --only-ipu", "--only-accelerator: only a CPU was found"),
        ("lstm.py --report {file}/x", "--report {file}/x: cannot write there (Not a directory)"),
        ("train.py --synthetic-data ipu --results-dir {file}", "{file}/"),
        ("train.py --synthetic-data ipu --resume --run-name x", "nothing to resume: "),
        ("train.py --results-dir {file}", "cannot make the run folder {file}/"),
        ("train.py --resume --run-name x", "nothing to resume: "),
        ("train.py --checkpoint-output-dir {file}", "cannot make --checkpoint-output-dir {file}: Not a directory"),
        ("train.py --report {file}", "--report {file}: cannot write there (Not a directory)"),
        ("main.py -r {file}", "cannot make the run folder {file}/"),
        ("main.py --report {file}", "--report {file}: cannot write there (Not a directory)"),
        ("ipu_estimator_cnn.py --model-dir {file}", "cannot make the run folder {file}: Not a directory"),
        ("ipu_estimator_cnn.py --generated-data --batch-size 60000", "--batch-size 60000: there are only 50,000 "),
        ("main.py --sampler fused", "--sampler fused: a GPU kernel, and this is a cpu"),
        ("main.py --data {file}", "--data {file}: must be the folder that holds the files"),
        ("autoencoder_benchmark.py --only-ipu", "--only-accelerator: only a CPU was found"),
        ("autoencoder_main.py --logdir {file}", "cannot make the run folder {file}/"),
        ("autoencoder_benchmark.py --logdir {file}", "cannot be made (Not a directory); choose another --results-dir"),
        ("ipu_estimator_cnn.py --replicas 64 --batch-size 64", "--replicas 64: only "),
        ("dense.py --replicas 64 --batch-size 64", "--replicas 64: only "),
        ("verify_dataset.py --dataset mnist", "mnist: not on this machine"),
        ("main.py -c path/to/config.json", "path/to/config.json"),
        ("python3 send_request.py --config resnet50_infer_bs17 --port 8502", "resnet50_infer_bs17"),
        ("python3 send_request.py --num-threads 3", "URL is needed"),
    ],
)  # fmt: skip
def test_a_dry_run_finds_what_the_command_would_fail_with_before_its_work(old, said, nowhere, capsys):
    (nowhere / "file").touch()
    file = str(nowhere / "file")
    assert main(["compat", "--device=cpu", "--dry-run", *old.format(file=file).split()]) == 2
    assert said.format(file=file) in capsys.readouterr().err
    assert list(nowhere.iterdir()) == [nowhere / "file"]


def test_a_dry_run_of_a_benchmark_file_shows_what_would_run_and_fails_where_that_cannot(nowhere, capsys):
    (nowhere / "b.yml").write_text("good:\n  cmd: python3 dense.py\nbad:\n  cmd: x | y\n")
    words = ["python3", "-m", "examples_utils", "benchmark", "--spec", "b.yml"]
    assert main(["compat", "--dry-run", *words, "--benchmark", "good"]) == 0
    assert "-> hotloop kernel dense --json" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        main(["compat", "--dry-run", *words])
    assert "cannot run: '|' in the cmd needs a shell" in capsys.readouterr().out


def test_a_dry_run_shows_the_command_and_checks_its_options(nowhere, capsys):
    assert main(["compat", "--dry-run", "python3", "lstm.py", "--steps", "3", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "hotloop kernel lstm --steps 3 --json\nchecked, up to compiling the layer\n"
    assert main(["compat", "--dry-run", "python3", "lstm.py", "--stepz", "3"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "hotloop kernel lstm --stepz 3\n"
    assert "unknown option --stepz" in shown.err


def test_a_dry_run_gives_json_when_asked_before_the_script(nowhere, capsys):
    words = [
        "--json",
        "--dry-run",
        "A=b",
        "poprun",
        "-v",
        "--num-r",
        "2",
        "ipu_estimator_cnn.py",
        "--epochs",
        "5",
    ]
    assert main(["compat", *words]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["command"] == [
        "hotloop",
        "launch",
        "--num-replicas",
        "2",
        "--",
        "estimator",
        "--epochs",
        "5",
    ]
    assert result["checked_until"] == "fetching cifar10"
    assert result["environment"] == {"A": "b"}
    assert len(result["notices"]) == 1
    assert "warning: options of poprun that launch has not are left out: -v\n" in shown.err


@pytest.fixture
def called(monkeypatch):
    calls = []

    def fake(words):
        calls.append((words, os.environ.get("COMPAT_TEST")))
        return 7

    monkeypatch.setattr("hotloop.cli.main.main", fake)
    monkeypatch.setenv("COMPAT_TEST", "outside")
    return calls


def run_compat(*words):
    command, _, rest = find_command(["compat", "--", *words])
    context = module.Context(json=True, device="cpu")
    module.run(resolve(command, scan(rest, options_of(command.config))).config, context)


def test_the_new_command_runs_with_its_variables_and_its_status_is_passed_on(called, capsys):
    with pytest.raises(SystemExit) as caught:
        run_compat("COMPAT_TEST=inside", "python3", "dense.py", "--size", "8,9")
    assert caught.value.code == 7
    assert called == [(["kernel", "dense", "--size", "8,9", "--device", "cpu", "--json"], "inside")]
    assert capsys.readouterr().out == ""


def test_an_option_of_compat_may_have_its_value_as_a_word_of_its_own(called):
    with pytest.raises(SystemExit):
        main(["compat", "--device", "cpu", "--json", "dense.py", "--size", "8"])
    assert called[0][0] == ["kernel", "dense", "--size", "8", "--device", "cpu", "--json"]


def test_options_of_the_old_command_win_over_those_of_compat(called):
    with pytest.raises(SystemExit):
        run_compat("dense.py", "--device", "gpu", "--json")
    assert called[0][0] == ["kernel", "dense", "--device", "gpu", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped_conv", "rnn", "gru", "lstm", "hmc"])
def test_the_cheap_commands_of_the_old_manuals_really_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["compat", "--device", "cpu", "--json", "python3", f"{name}.py", "--steps", "5"])
    assert caught.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["items_per_second"] > 0 and result["checked"]


PROGRAM = """
import sys
from hotloop.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
assert "jax" not in sys.modules
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["send_request.py", "--help"], 0, "usage: hotloop request"),
        (["python3", "lstm.py", "--help"], 0, "usage: hotloop kernel lstm"),
        (["--help"], 0, "usage: hotloop compat"),
        (["--", "lstm.py", "--print-config"], 0, "# hotloop kernel lstm"),
        ([], 2, "SCRIPT"),
        (["lstm.py", "--stepz"], 2, "unknown option --stepz"),
    ],
)
def test_words_reach_the_command_that_they_are_meant_for(words, status, said):
    """As a process: its status is what counts, and jax stays out of it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, "compat", *words], capture_output=True, text=True)
    assert said in done.stdout + done.stderr
    assert done.returncode == status

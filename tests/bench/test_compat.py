"""Command lines of the older scripts become hotloop commands: words before the script, options, and what is no more."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.bench.compat import SCRIPTS, CompatError, Translation, translate
from hotloop.errors import OptionError

EVENTS = (
    "--model cifar_resnet8 --num-epochs 6 --precision 16.16 --micro-batch-size 8 --validation False "
    "--half-partials True --gradient-accumulation 8 --logs-per-epoch"
)
DATA = "--training-data-file netflix_data/3m_train.txt --validation-data-file netflix_data/3m_valid.txt --size 128"


def translated(line):
    return translate(shlex.split(line))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("python3 main.py -r where/to/store_results/", "vcd train -r where/to/store_results/"),
        ("python3 main.py -c path/to/config.json", "vcd train -c path/to/config.json"),
        (f"python3 autoencoder_main.py {DATA}", f"recommender train {DATA}"),
        (
            "python3 autoencoder_benchmark.py --num-ipus 2 --base-learning-rates '16,17'",
            "recommender sweep --num-ipus 2 --base-learning-rates 16,17",
        ),
        ("python3 dense.py --size 1024", "kernel dense --size 1024"),
        ("python3 grouped_conv.py --group-dim 8", "kernel grouped-conv --group-dim 8"),
        ("python3 rnn.py", "kernel rnn"),
        ("python3 gru.py --popnn", "kernel gru --popnn"),
        ("python3 lstm.py --popnn --train", "kernel lstm --popnn --train"),
        ("python3 lstm_multi.py --num-layers 2", "kernel lstm-multi --num-layers 2"),
        ("python3 hmc.py --hmc-steps 100", "kernel hmc --hmc-steps 100"),
        (f"python3 train.py {EVENTS} 1/2", f"cnn train {EVENTS} 1/2"),
        ("python3 train.py --auto-loss-scaling", "cnn train --auto-loss-scaling"),
        ("python ipu_estimator_cnn.py --test-only --model-dir d", "estimator --test-only --model-dir d"),
        ("python3 -m examples_utils benchmark --spec a.yml --benchmark b", "bench run --spec a.yml --benchmark b"),
        ("-m examples_utils benchmark", "bench run"),
        ("python3 scripts/dataset_benchmark.py --split test", "cnn data-benchmark --split test"),
        ("python3 verify_dataset.py --dataset mnist", "cnn verify --dataset mnist"),
    ],
)  # fmt: skip
def test_every_script_has_its_command(old, new):
    assert str(translated(old)) == f"hotloop {new}"
    assert translated(old).notices == []


@pytest.mark.parametrize(
    "before",
    ["", "python ", "/usr/bin/python3.6 ", "python3 -u -X dev -W error ", "python3 ../a/b/", "./", "/opt/x/"],
)
def test_what_stands_before_the_script_does_not_matter(before):
    assert translated(f"{before}lstm.py --train").command == ["hotloop", "kernel", "lstm", "--train"]


def test_variables_go_before_the_new_command_too():
    found = translated("""POPLAR_ENGINE_OPTIONS='{"autoReport.all":"true"}' A= python ipu_estimator_cnn.py""")
    assert found.environment == {"POPLAR_ENGINE_OPTIONS": '{"autoReport.all":"true"}', "A": ""}
    assert str(found) == """POPLAR_ENGINE_OPTIONS='{"autoReport.all":"true"}' A='' hotloop estimator"""
    assert found.command == ["hotloop", "estimator"]


@pytest.mark.parametrize(
    ("old", "new", "dropped"),
    [
        ("poprun --num-instances 16 --num-replicas 16 python3 train.py --seed 1",
         "launch --num-instances 16 --num-replicas 16 -- cnn train --seed 1", ""),
        ("poprun --num-instance 2 --num-replicas=4 --ipus 2 python3 train.py --pipeline-splits a",
         "launch --num-instances 2 --num-replicas 4 --ipus-per-replica 2 -- cnn train --pipeline-splits a", ""),
        ("poprun -vv --num_instances 2 --vipu-partition=p --host a,b python3 train.py",
         "launch --num-instances 2 -- cnn train", "-vv, --vipu-partition, --host"),
        ("mpirun -np 4 --tag-output -x PATH python3 main.py -b 16",
         "launch --num-instances 4 -- vcd train -b 16", "--tag-output, -x"),
        ("mpiexec -n 2 python3 autoencoder_main.py", "launch --num-instances 2 -- recommender train", ""),
        ("mpirun -N 2 python3 ipu_estimator_cnn.py", "launch --num-instances 2 -- estimator", ""),
        ("/opt/bin/mpirun --np=2 dataset_benchmark.py", "launch --num-instances 2 -- cnn data-benchmark", ""),
        ("mpirun --num-instances 2 python3 train.py", "cnn train", "--num-instances"),
        ("poprun --num 2 python3 train.py", "cnn train", "--num"),
        ("poprun --num-instances 2 --strict-devices --stall 9 python3 train.py",
         "launch --num-instances 2 --strict-devices --stall 9 -- cnn train", ""),
        ("poprun -np 2 python3 train.py", "cnn train", "-np"),
        ("poprun --num-instances 2 python3 train.py --training False --checkpoint-input-dir d",
         "launch --num-instances 2 -- cnn validate --checkpoint-input-dir d", ""),
    ],
)  # fmt: skip
def test_several_processes_are_a_launch_and_what_it_has_not_is_named_in_one_line(old, new, dropped):
    found = translated(old)
    assert str(found) == f"hotloop {new}"
    wrapper = old.split()[0].rpartition("/")[2]
    expected = f"options of {wrapper} that launch has not are left out: {dropped}"
    assert found.notices == ([expected] if dropped else [])


def test_a_script_that_is_one_process_says_so():
    found = translated("poprun --num-instances 2 --num-replicas=2 dense.py")
    assert found.command == ["hotloop", "kernel", "dense"]
    assert found.notices == [
        "poprun: dense.py runs as one process, so its options are left out: --num-instances, --num-replicas"
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--training False --checkpoint-input-dir d", "validate --checkpoint-input-dir d"),
        ("--training False --checkpoint-input d", "validate --checkpoint-input d"),
        ("--no-training --checkpoint_input_dir d", "validate --checkpoint_input_dir d"),
        ("--seed 1 --training=no", "train --seed 1 --training=no"),
        ("--no-training --seed 1", "train --no-training --seed 1"),
        ("--training False --training True", "train --training False --training True"),
        ("--training", "train --training"),
        ("--validation False", "train --validation False"),
    ],
)
def test_a_cnn_that_does_not_train_validates_the_checkpoints_that_are_named_or_random_weights(old, new):
    assert str(translated(f"train.py {old}")) == f"hotloop cnn {new}"


@pytest.mark.parametrize(
    ("old", "added"),
    [
        ("--checkpoint-output-dir d --checkpoint-input-dir d", " --clean-dir True"),
        ("--checkpoint-input-dir d --clean-dir False", ""),
        ("--checkpoint-input-dir d --clean no", ""),
        ("--checkpoint-input-dir d --config-path own.yml", ""),
        ("--checkpoint-output-dir d", ""),
    ],
)
def test_checkpoints_that_the_old_program_validated_are_removed_as_it_removed_them(old, added):
    assert str(translated(f"train.py {old}")) == f"hotloop cnn train {old}{added}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("autoencoder_main.py --batches_per_step 9", "recommender train --device-iterations 9"),
        ("autoencoder_main.py --compiler-report", "recommender train --report report"),
        ("lstm.py --report --train", "kernel lstm --report report --train"),
        ("hmc.py --report here", "kernel hmc --report here"),
        ("ipu_estimator_cnn.py --profile", "estimator --report report"),
        ("train.py --checkpoint-dir=d", "cnn train --checkpoint-output-dir d"),
        ("train.py --checkpoints False", "cnn train --ckpts-per-epoch 0"),
        ("train.py --checkpoints", "cnn train"),
        ("train.py --stochastic-rounding", "cnn train --stochastic-rounding ON"),
        ("train.py --stochastic-rounding false", "cnn train --stochastic-rounding OFF"),
        ("train.py --stochastic-rounding replica-identical", "cnn train --stochastic-rounding replica-identical"),
        ("train.py --bn-momentum x", "cnn train --bn-momentum x"),
    ],
)  # fmt: skip
def test_options_that_changed_get_their_new_words(old, new):
    assert str(translated(old)) == f"hotloop {new}"


def test_the_momentum_of_batch_norm_is_a_setting_of_the_norm():
    command = translated("train.py --bn-momentum 0.9").command
    assert command[3:] == ["--norm-layer", '{"name": "custom_batch_norm", "momentum": 0.9}']


def test_options_that_are_no_more_are_left_out_with_one_notice():
    found = translated("autoencoder_benchmark.py --compiler-report --size 128 --compiler_report")
    assert found.command == ["hotloop", "recommender", "sweep", "--size", "128"]
    assert found.notices == [
        "options of autoencoder_benchmark.py that no longer exist are left out: --compiler-report"
    ]
    found = translated("python3 -m examples_utils benchmark --examples-location x --spec a.yml")
    assert found.command == ["hotloop", "bench", "run", "--spec", "a.yml"]
    assert "--examples-location" in found.notices[0]


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("", "no script"),
        ("python3", "no script"),
        ("A=1", "no script"),
        ("poprun --num-replicas 2", "no script"),
        ("python3 trian.py", "did you mean train.py"),
        ("export_for_serving.py --checkpoint-input-path", "needs a folder of checkpoints"),
        ("python3 -m pytest x", "-m pytest x"),
        ("python3 -m examples_utils platform_assessment", "only `-m examples_utils benchmark`"),
        ("python3 -c 'print(1)'", "not one of the older scripts"),
    ],
)
def test_what_has_no_command_is_refused_in_one_line(old, said):
    with pytest.raises(CompatError) as caught:
        translated(old)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, OptionError)


@given(st.sampled_from(sorted(SCRIPTS)), st.lists(st.text(max_size=8), max_size=6))
def test_any_words_after_a_script_give_a_command(script, words):
    found = translate(["python3", script, *words])
    assert isinstance(found, Translation)
    assert found.command[0] == "hotloop"


@given(st.lists(st.text(alphabet="ab-=./ '\"{}", max_size=6), max_size=6))
def test_words_that_no_rule_names_are_kept_as_they_are(words):
    assert translate(["dense.py", *words]).command == ["hotloop", "kernel", "dense", *words]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("estimator.py", "--batch-size 16 --epochs 150", ()),
        ("estimator.py --ep 3 --batch 8 --seed 2", "--batch-size 8 --epochs 3 --seed 2", ()),
        (
            "estimator_replica.py",
            "--batch-size 32 --epochs 150 --ipus 2",
            ("--batch-size 16 was each replica's", "32 is that of all 2"),
        ),
        (
            "estimator_replica.py --epochs 3 --ip 4 --batch_size=8",
            "--batch-size 32 --epochs 3 --ipus 4",
            ("--batch-size 8 was each",),
        ),
        (
            "pipeline_estimator.py",
            "--batch-size 128 --epochs 150 --ipus 2 --gradient-accumulation-count 8 --model-shard-position 7 "
            "--learning-rate 0.08",
            ("16 was that of one of 8 parts", "--learning-rate 0.08"),
        ),
        (
            "pipeline_estimator.py --model_shard_position 12 --grad 4 --batch-size 10 --epochs 1",
            "--batch-size 40 --epochs 1 --ipus 2 --gradient-accumulation-count 4 --model-shard-position 12 "
            "--learning-rate 0.04",
            ("10 was that of one of 4 parts",),
        ),
    ],
)  # fmt: skip
def test_the_later_estimators_batches_are_those_of_an_update(old, new, words):
    found = translated(f"python3 cifar10_ipu_{old}")
    assert str(found) == f"hotloop estimator --recipe tf2 {new}"
    assert len(found.notices) == bool(words)
    assert all(word in found.notices[0] for word in words)


def test_a_number_of_the_later_estimators_that_is_none_is_named():
    with pytest.raises(OptionError, match="--batch-size x: must be a whole number"):
        translated("cifar10_ipu_estimator_replica.py --batch x")


@pytest.mark.parametrize(
    ("old", "new", "dropped"),
    [
        (
            "--config resnet50_infer_bs1 --batch-size 1 --port 8502 --use-async --num-threads 16 "
            "--use-serving-api --serving-bin-path /opt/server --dataset-path /data",
            "--config resnet50_infer_bs1 --batch-size 1 --port 8502 --use-async --num-threads 16 --dataset-path /data",
            "--use-serving-api, --serving-bin-path",
        ),
        ("--num_images 7", "--num_images 7", ""),
        ("--config x --num-t 3 --po 1", "--config x --num-t 3 --po 1", ""),
        ("--config x", "--config x --num-threads 2 --port 8500", ""),
        ("--model x", "--model x --num-threads 2 --port 8500", ""),
        ("--config x --config-path f.yml", "--config x --config-path f.yml", ""),
        (
            "--model-name toy_model --host 0.0.0.0 --verbose --pytest True --iter 3",
            "--model-name toy_model --host 0.0.0.0 --verbose --num-threads 2 --port 8500",
            "--pytest, --iterations",
        ),
    ],
)
def test_the_older_client_is_hotloop_request_with_the_older_defaults(old, new, dropped):
    found = translate(["python3", "send_request.py", *old.split()])
    assert found.command == ["hotloop", "request", *new.split()]
    said = f"options of send_request.py that no longer exist are left out: {dropped}"
    assert found.notices == ([said] if dropped else [])

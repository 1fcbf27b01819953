"""The files of the older runner, and our own: they load and say what they should."""

from pathlib import Path

import pytest

from hotloop.bench.benchmark import Benchmark
from hotloop.bench.metrics import extract
from hotloop.bench.spec import load_benchmarks
from old_benchmarks import FILES

FIXTURES = Path(__file__).parent / "fixtures"
OWN = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def old() -> dict[str, Benchmark]:
    return load_benchmarks(sorted(FIXTURES.glob("*.yml")))


def test_the_old_files_have_these_entries_and_variants(old: dict[str, Benchmark]) -> None:
    assert {name: [variant.name for variant in one.variants] for name, one in old.items()} == {
        "tf1_autoencoder_train_gen_2ipu": ["tf1_autoencoder_train_gen_2ipu"],
        "tf2_resnet50_train_real_pod4": ["tf2_resnet50_train_real_pod4"],
        "tf2_resnet50_train_real_pod16": ["tf2_resnet50_train_real_pod16"],
        "tf2_resnet50_train_real_pod16_conv": ["tf2_resnet50_train_real_pod16_conv"],
        "tf2_resnet50_serving_throughput": [
            "tf2_resnet50_serving_throughput_batchsize_1",
            "tf2_resnet50_serving_throughput_batchsize_32",
        ],
        "tf2_resnet50_serving_latency": ["tf2_resnet50_serving_latency"],
        "tf1_mcmc_vae_synth_pod4": ["tf1_mcmc_vae_synth_pod4"],
    }


def test_the_old_files_parameters_are_filled_in(old: dict[str, Benchmark]) -> None:
    _, last = old["tf2_resnet50_serving_throughput"].variants
    assert "--config resnet50_infer_bs32 --batch-size 32 --port 8502" in last.cmd
    (convergence,) = old["tf2_resnet50_train_real_pod16_conv"].variants
    assert convergence.cmd.endswith("--wandb --wandb-run-name tf2_resnet50_train_real_pod16_conv")


def test_the_old_files_say_what_is_skipped_what_converges_and_what_needs_data(
    old: dict[str, Benchmark],
) -> None:
    assert not any(one.skip for one in old.values())
    assert [name for name, one in old.items() if one.kind == "convergence"] == [
        "tf2_resnet50_train_real_pod16_conv"
    ]
    assert {name for name, one in old.items() if one.needs_dataset} == {
        name for name in old if "resnet50" in name
    }


def test_the_old_files_defaults_arrive_in_the_entries(old: dict[str, Benchmark]) -> None:
    training = old["tf2_resnet50_train_real_pod4"]
    assert [(one.name, one.reduction, one.skip, one.unit) for one in training.metrics] == [
        ("throughput", "mean", 2, "samples/sec"),
        ("accuracy", "final", 1, ""),
        ("loss", "final", 1, ""),
    ]
    assert training.requirements_file and training.requirements_file.name == "requirements.txt"
    (latency,) = old["tf2_resnet50_serving_latency"].metrics
    assert (latency.skip, latency.unit) == (20, "ms")
    assert [one.skip for one in old["tf2_resnet50_serving_throughput"].metrics] == [0]


def test_the_old_patterns_read_what_our_console_prints(old: dict[str, Benchmark]) -> None:
    place = "update 8, epoch 1.00: learning rate: 0.0016"
    printed = [
        f"{place}, loss: {2 - n / 4}, accuracy: {5 * n} %, throughput: {n}.5 samples/sec, Time taken: {n}.25, x"
        for n in range(1, 5)
    ]
    assert extract(old["tf2_resnet50_train_real_pod4"], [], printed).results == {
        "throughput": 4.0,
        "accuracy": 20.0,
        "loss": 1.0,
    }
    vcd = extract(old["tf1_mcmc_vae_synth_pod4"], [], printed)
    assert vcd.results == {"time_per_iters": 2.75, "throughput": 3.0, "est_time_to_train": 110.0}


MEANT = {
    r"Time taken: *(.*?),": "seconds_per_10000_updates",
    r"\|\sTime\staken:\s*(.*?)(?:\n|$)": "seconds_per_10000_updates",
    r"throughput: *(.*?) samples\/sec": "throughput of a log, average_throughput of a sweep",
    r"Aggregate average throughput over .* IPU devices = (.*) users/sec": "average_throughput of a sweep",
    r"Average images\/s.:\s*([\d\.]+)": "throughput of a log",
    r"accuracy: *(.*?) \%": "100 * training_accuracy, then 100 * validation_accuracy",
    r"accuracy.:\s*([\d\.]+|nan)": "training_accuracy, then validation_accuracy",
    r"loss: *(\d*\.\d*)": "loss of a log",
    r"loss.:\s*([\d\.]+|nan)": "loss of a log",
    r"loss: *(\d*?)": "loss of the best trial: the pattern itself reads nothing",
    r"Latency for batch: *(.*?) ms": "skipped: serving",
}
"""What each pattern of an old file reads here; the tests of `vcd`, `cnn` and `recommender sweep` hold them to it."""


def test_no_pattern_of_an_old_file_is_without_a_meaning() -> None:
    entries = [one for file in FILES for one in load_benchmarks([file]).values()]
    assert {metric.regexp for one in entries for metric in one.metrics} == set(MEANT)


def test_the_old_lazy_loss_pattern_is_a_problem_of_the_loss_alone(old: dict[str, Benchmark]) -> None:
    found = extract(old["tf1_autoencoder_train_gen_2ipu"], ["loss: 0.5, throughput: 7 samples/sec"], [])
    assert found.results == {"throughput": 7.0}
    assert "ends in a lazy group" in found.problems["loss"]


@pytest.fixture(scope="module")
def own() -> dict[str, Benchmark]:
    return load_benchmarks(sorted(OWN.glob("*.yml")))


def test_our_own_files_have_quick_and_full_entries_for_every_family(own: dict[str, Benchmark]) -> None:
    for family in ("kernel", "vcd", "recommender", "cnn", "estimator"):
        tags = {tag for one in own.values() if one.cmd.startswith(f"hotloop {family}") for tag in one.tags}
        assert {"smoke", "full"} <= tags, family


def test_our_own_entries_are_complete_and_ask_for_json(own: dict[str, Benchmark]) -> None:
    for name, one in own.items():
        assert one.notices == () and one.skip is None and one.description, name
        assert one.cmd.startswith("hotloop ") and one.cmd.split()[-1] == "--json", name
        assert one.metrics and all(metric.regexp is None for metric in one.metrics), name
        assert ("smoke" in one.tags) != ("full" in one.tags), name
        assert one.timeout, name


@pytest.mark.parametrize(
    "variant",
    [v for one in load_benchmarks(sorted(OWN.glob("*.yml"))).values() for v in one.variants],
    ids=lambda variant: variant.name,
)
def test_our_own_commands_have_only_options_that_exist(variant, capsys) -> None:
    import shlex

    from hotloop.cli.main import main

    words = shlex.split(variant.cmd)[1:]
    assert main([*words, "--print-config"]) == 0, capsys.readouterr().err

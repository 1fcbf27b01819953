"""Whole trainings on the speed page: every kind of file is read, with mean, range and errors of its runs."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import speed_cells  # noqa: E402
import speed_sources  # noqa: E402
import speed_whole  # noqa: E402

ENVIRONMENT = {"platform": "cpu", "device_kinds": ["cpu"], "commit": "a" * 40, "dirty": False}


def write(folder, name, results, **more):
    document = {"environment": ENVIRONMENT, "results": results, **more}
    (folder / name).write_text(json.dumps(document))


def a_run(seed=1, **more):
    return {
        "case": "mnist", "data": "MNIST", "command": f"hotloop cnn train --config mnist_resnet8 --seed {seed}",
        "seed": seed, "cache": "full", "figure": "validation_accuracy", "target": 0.99, "value": 0.994,
        "standard_error": None, "update": 4680, "updates": 4680, "training_seconds": 100.0, "target_seconds": 30.0,
        "result_seconds": 100.0,
        "seconds": 130.0, "samples_per_second": 6000.0, "unit": "images/s", "memory_bytes": 2**29, **more,
    }  # fmt: skip


def cells(folder):
    (whole,) = speed_whole.whole_runs(folder)
    return whole.cells


def test_a_training_by_seeds_has_its_mean_its_range_and_the_time_to_its_target(tmp_path):
    runs = [a_run(), a_run(2, value=0.992, training_seconds=110.0, target_seconds=40.0, seconds=120.0)]
    runs += [a_run(3, value=0.996, training_seconds=120.0, seconds=124.0, memory_bytes=2**30)]
    write(tmp_path, "2026-01-01_results_cpu.json", runs)
    assert list(cells(tmp_path)) == [
        "MNIST by `hotloop cnn train --config mnist_resnet8`",
        "CPU",
        "99.40 % (99.20 to 99.60, 3 runs) after 4,680 updates",
        "110 s (100 to 120, 3 runs); 99 % after 33.3 s (30.0 to 40.0, 3 runs)",
        "2.17 min, then 2.03 min",  # 130 s, and the mean of the others
        "6,000 images/s (6,000 to 6,000, 3 runs)",
        "1.00 GiB",
    ]


def test_a_target_that_not_all_runs_reach_is_said_so(tmp_path):
    write(tmp_path, "2026-01-01_results_cpu.json", [a_run(), a_run(2, target_seconds=None)])
    assert cells(tmp_path)[3] == "100 s (100 to 100, 2 runs); 99 % after 30.0 s in 1 of 2 runs"
    write(tmp_path, "2026-01-02_results_cpu.json", [a_run(target_seconds=None)])
    assert cells(tmp_path)[3] == "100 s"


@pytest.mark.parametrize(
    ("figure", "value", "error", "said"),
    [
        ("log_likelihood", -101.254, 0.291, "-101.25 ± 0.29 nats"),
        ("rmse", 0.92214, None, "RMSE 0.9221"),
        ("ndcg@10", 0.28521, 0.00843, "NDCG@10 0.2852 ± 0.0084"),
        ("accuracy", 0.7512, None, "75.12 %"),
    ],
)
def test_a_result_is_said_as_people_say_it_with_its_own_standard_error(tmp_path, figure, value, error, said):
    # The best weights are of an earlier update than the last, so that their number says nothing of the training's.
    run = a_run(figure=figure, value=value, standard_error=error, update=10, target=None, target_seconds=None)
    write(tmp_path, "2026-01-01_results_cpu.json", [run])
    assert cells(tmp_path)[2] == f"{said}, seed 1"


def test_a_run_that_went_on_after_its_best_says_when_that_was(tmp_path):
    run = a_run(
        update=1596, updates=2198, training_seconds=5.71, result_seconds=4.2, target=None, target_seconds=None
    )
    write(tmp_path, "2026-01-01_results_cpu.json", [run])
    assert cells(tmp_path)[3] == "5.71 s; the best after 4.20 s"
    runs = [run, {**run, "seed": 2, "result_seconds": 4.4}]
    write(tmp_path, "2026-01-02_results_cpu.json", runs)
    assert cells(tmp_path)[3] == "5.7 s (5.7 to 5.7, 2 runs); the best after 4.3 s (4.2 to 4.4, 2 runs)"


def test_the_one_seed_of_a_recipe_is_named(tmp_path):
    run = {"recipe": "keras", "updates": 10, "training_seconds": 26.7, "seconds_to_75": 15.7, "seconds": 63.6}
    run |= {"images_per_second": 1000.0, "test_accuracy": 0.7807}
    write(tmp_path, "2026-01-01_estimator_h200.json", [run])
    assert cells(tmp_path)[2] == "78.07 % after 10 updates, seed 1"
    write(tmp_path, "2026-01-01_estimator_h200.json", [run, run])
    assert "seed" not in cells(tmp_path)[2]


def test_a_training_is_of_its_commands_family_and_another_programs_of_none():
    source = speed_sources.read_source(Path("2026-01-01_x_cpu.json"), {})
    whats = (
        "CIFAR-10 by `hotloop cnn speedrun`, 8 epochs",
        "CIFAR-10 by hiverge cifar10-speedrun, beside ours",
    )
    assert [speed_whole.Whole(source, what, "1 %").family for what in whats] == ["cnn", ""]


def test_of_a_training_on_a_machine_the_newest_file_counts(tmp_path):
    write(tmp_path, "2026-01-02_results_cpu.json", [a_run(value=0.5)])
    write(tmp_path, "2026-01-01_results_cpu.json", [a_run(value=0.4)])
    assert cells(tmp_path)[2].startswith("50.00 %")


def test_whole_trainings_of_several_seeds_have_their_mean_and_range(tmp_path):
    def run(accuracy, seconds):
        best = {"epoch": 60.0, "ema_accuracy": accuracy, "validation_accuracy": 0.1}
        return {"best": best, "time_to_train_seconds": seconds, "images_per_second": 1000.0}

    write(
        tmp_path,
        "2026-01-01_cifar10_wide_h200.json",
        [run(0.95, 100.0), run(0.97, 120.0)],
        command="hotloop cnn train --config cifar10_wide --dataset-path CIFAR --seed SEED",
    )
    what, machine, result, _, in_all, rate, memory = cells(tmp_path)
    assert (what, machine) == ("CIFAR-10 by `hotloop cnn train --config cifar10_wide`", "H200")
    assert result == "96.00 % (95.00 to 97.00, 2 runs) after 60 epochs"
    assert in_all == "100 s, then 2.00 min" and rate.startswith("1,000 images/s") and memory == ""


def test_every_kind_of_file_that_is_there_is_read():
    found = {whole.source.file: whole for whole in speed_whole.whole_runs(ROOT / "benchmarks" / "results")}
    kinds = (
        "speedrun_h200",
        "speedrun_beside_h200",
        "cnn_h200_accuracy",
        "cifar10_wide_h200",
        "estimator_h200",
    )
    for kind in (*kinds, "vcd_h200"):
        assert any(kind in file for file in found), kind
    for whole in found.values():
        assert whole.result and (whole.updates or whole.in_all)


def test_a_comparison_with_peers_is_no_whole_training_whatever_its_file_is_called(tmp_path):
    rows = [{"side": "ours", "updates_per_second": 2.0, "batch_size": 100, "ratio": 1.0}]
    for name in ("2026-01-01_vcd_h200.json", "2026-01-01_estimator_h200.json"):
        write(tmp_path, name, rows)
    assert speed_whole.whole_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [([2.0], "2.00 s"), ([150.0], "2.50 min"), ([0.88, 0.9], "0.890 s (0.880 to 0.900, 2 runs)"),
     ([20.0, 30.0], "25.0 s (20.0 to 30.0, 2 runs)"), ([150.0, 250.0], "200 s (150 to 250, 2 runs)")],
)  # fmt: skip
def test_seconds_of_runs(values, said):
    assert speed_whole.in_seconds(values) == said


def test_numbers_in_names_are_sorted_as_numbers():
    names = ["x, batch 512", "x, batch 64", "20,000 users", "311,315 users", "x, batch 64, y"]
    assert sorted(names, key=speed_cells.natural) == [
        "20,000 users", "311,315 users", "x, batch 64", "x, batch 64, y", "x, batch 512",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (None, ""),
        (700 * 2**10, "700 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (64 * 2**20, "64 MiB"),
        (700 * 2**20, "700 MiB"),
        (2**30, "1.00 GiB"),
    ],
)
def test_memory_has_the_unit_that_people_take(count, said):
    assert speed_cells.gibibytes(count) == said

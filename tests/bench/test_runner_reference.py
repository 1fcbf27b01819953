"""The files of the older runner, run to the end by hotloop: their own commands and patterns, on small data."""

import json
from pathlib import Path

import pytest
from fake_programs import Listener

from hotloop.bench.benchmark import select
from hotloop.bench.launch import RunnerOptions
from hotloop.bench.runner import run
from hotloop.bench.spec import load_benchmarks
from hotloop.engine.run import read_events

FIXTURES = Path(__file__).parent / "fixtures"
SMALL_VCD = (
    "-b 50 --data digits --updates 40 --log-every 20 --hidden 16 16 --hmc-steps 2 --no-save-checkpoints"
)
SMALL_CNN = """--synthetic-data device --model-name cifar_resnet8 --dataset cifar10 --pipeline-splits
    --recomputation false --device-mapping 0 --micro-batch-size 8 --global-batch-size 128
    --weight-updates-per-epoch 2 --num-epochs 5"""


def run_small(tmp_path, monkeypatch, file, old, new, names="*"):
    """The records of those entries of a file, in which one option has given way to those of a small run."""
    text = (FIXTURES / file).read_text()
    assert old in text
    (tmp_path / "small.yml").write_text(text.replace(old, new))
    monkeypatch.setenv("DATASETS_DIR", str(tmp_path))
    found = select(load_benchmarks([tmp_path / "small.yml"]), [names])
    selected = [one for one in found if one.skip is None]
    listener = Listener()
    run(selected, RunnerOptions(tmp_path / "log", timeout=300), listener)
    print("\n".join(listener.said))
    records = map(json.loads, (tmp_path / "log" / "results.jsonl").read_text().splitlines())
    return {record["variant"]: record for record in records}


def logs(run):
    return [event for event in read_events(run) if event["event"] == "log"]


@pytest.mark.slow
def test_the_vae_entry_gives_its_times_its_throughput_and_what_follows_from_them(tmp_path, monkeypatch):
    (record,) = run_small(tmp_path, monkeypatch, "vcd.yml", "-b 3072", SMALL_VCD).values()
    assert record["status"] == "passed"
    assert record["hotloop_command"].startswith("hotloop vcd train -c configs/benchmark_config.json")
    metrics = record["metrics"]
    speeds = [log["throughput"] for log in logs(tmp_path / "results" / "benchmark_config")]
    assert len(speeds) == 2
    assert metrics["throughput"]["value"] == pytest.approx(sum(speeds) / 2, rel=1e-4)
    assert metrics["throughput"]["unit"] == "samples/sec"
    seconds = sum(10_000 * 50 / speed for speed in speeds) / 2  # of 10,000 updates, though 20 are a log
    assert metrics["time_per_iters"]["value"] == pytest.approx(seconds, rel=1e-4)
    assert metrics["est_time_to_train"]["value"] == pytest.approx(40 * seconds, rel=1e-4)


@pytest.mark.slow
def test_the_older_vae_entry_gives_the_same_times_from_the_records(tmp_path, monkeypatch):
    (record,) = run_small(tmp_path, monkeypatch, "older/vcd.yml", "-b 3072", SMALL_VCD).values()
    assert record["status"] == "passed", record["reason"]
    speeds = [log["throughput"] for log in logs(tmp_path / "results" / "benchmark_config")]
    assert record["metrics"]["time_per_iters"]["values"] == pytest.approx(
        [10_000 * 50 / speed for speed in speeds]
    )


@pytest.mark.slow
def test_both_resnet_training_entries_give_throughput_accuracy_and_loss(tmp_path, monkeypatch):
    found = run_small(tmp_path, monkeypatch, "cnns.yml", "--num-epochs 5", SMALL_CNN, "*_train_*")
    assert list(found) == ["tf2_resnet50_train_real_pod4", "tf2_resnet50_train_real_pod16"]
    for record in found.values():
        assert record["status"] == "passed", record["reason"]
        assert {name: len(one["values"]) for name, one in record["metrics"].items()} == {
            "throughput": 5,
            "accuracy": 5,
            "loss": 5,
        }


@pytest.mark.slow
def test_the_autoencoder_entry_gives_throughput_and_a_loss_that_its_broken_pattern_cannot(
    tmp_path, monkeypatch
):
    (record,) = run_small(
        tmp_path, monkeypatch, "autoencoder.yml", "--epochs 10", "--epochs 1 --data procedural"
    ).values()
    assert record["status"] == "passed", record["reason"]
    assert record["metrics"]["throughput"]["value"] > 0
    assert 5 < record["metrics"]["loss"]["value"] < 20  # from the result's JSON, not by the lazy group

"""What a run says about speed and time: images a second, the share of the peak, time to train over processes."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from cnn_words import job_of

from hotloop.engine import processes
from hotloop.engine.loop import copy_state
from hotloop.engine.run import Run, read_events
from hotloop.families.cnn import model, speed
from hotloop.families.cnn.train import TrainingClock, _remove_empty, seconds_of_processes, time_in_words


def records(*pairs):
    return [{"event": event, "elapsed": elapsed} for event, elapsed in pairs]


def test_a_process_counts_from_its_clock_to_its_last_record():
    first = records(("start", 0.0), ("compile", 7.0), ("training", 8.0), ("log", 20.0), ("end", 25.0))
    killed = records(("start", 0.0), ("training", 1.0), ("log", 4.5))
    no_training = records(("start", 0.0), ("compile", 3.0), ("end", 9.0))
    last = records(("start", 0.0), ("training", 2.0))
    assert seconds_of_processes([*first, *killed, *no_training, *last]) == [17.0, 3.5, 0.0]


def test_the_clock_goes_on_where_earlier_processes_left_it(tmp_path):
    with Run(tmp_path / "run", {}, command="", environment={}):
        pass
    with (tmp_path / "run" / "events.jsonl").open("a") as lines:
        for event, elapsed in (("start", 0.0), ("training", 10.0), ("log", 3610.0)):
            print(json.dumps({"event": event, "update": 0, "epoch": 0.0, "elapsed": elapsed}), file=lines)
    with Run(tmp_path / "run", {}, command="", environment={}, resume=True) as record:
        figures = TrainingClock(record).stop(18, 3.0)
    assert 3600 <= figures["time_to_train_seconds"] < 3630 and figures["time_to_train_processes"] == 2
    (event,) = [each for each in read_events(tmp_path / "run") if each["event"] == "time_to_train"]
    assert (event["processes"], event["update"]) == (2, 18)
    assert event["seconds"] == figures["time_to_train_seconds"]


@pytest.mark.parametrize(
    ("seconds", "processes", "text"),
    [(59.6, 1, "time to train: 0:01:00"), (7325.0, 3, "time to train: 2:02:05, in 3 processes")],
)
def test_the_time_is_told_in_hours_and_how_many_processes(seconds, processes, text):
    assert time_in_words({"time_to_train_seconds": seconds, "time_to_train_processes": processes}) == text


# The toy for digits by hand: 26 x 26 x 4 outputs of 9 products, 5 x 5 x 8 of 4, and 8 x 10, two operations each.
TOY_FLOPS = 2 * (26 * 26 * 4 * 9 + 5 * 5 * 8 * 4 + 8 * 10)


@pytest.fixture
def throughput():
    """Of the toy on two replicas, on a device that makes 0.5 TFLOP/s in float32 and 4 in bfloat16."""
    limits = SimpleNamespace(matmul_tflops={"float32": 0.5, "bfloat16": 4.0})
    words = ("--dataset", "mnist", "--precision", "32.32", "--num-replicas", "2")
    return speed.Throughput(job_of(*words, devices=2), limits)


def test_the_share_of_the_peak_counts_a_forward_and_two_backward_products_of_every_image(throughput):
    found = throughput.on_log(None, {"throughput": 2e6})
    assert found["mfu"] == pytest.approx(2e6 * 3 * TOY_FLOPS / (2 * 0.5e12))
    assert 0 < found["memory_gib"] < 1000


def test_the_peak_is_that_of_the_devices_of_all_stages():
    limits = SimpleNamespace(matmul_tflops={"float32": 0.5})
    words = ("--dataset", "mnist", "--precision", "32.32", "--num-replicas", "2")
    job = replace(job_of(*words, devices=2), splits=("flatten", "dense"))
    found = speed.Throughput(job, limits).on_log(None, {"throughput": 2e6})
    assert found["mfu"] == pytest.approx(2e6 * 3 * TOY_FLOPS / (2 * 3 * 0.5e12))


def test_memory_is_the_sum_of_a_machines_processes_and_that_of_the_fullest_device(monkeypatch):
    assert speed.sum_of_fullest([("a", 5), ("b", 11), ("a", 7)]) == 12
    alone = speed.peak_memory()
    monkeypatch.setattr(processes, "gathered", lambda value: [value, ["elsewhere", 1], [value[0], 2**30]])
    assert 2**30 + alone <= speed.peak_memory() < 2**30 + 2 * alone
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"peak_bytes_in_use": 5})
    fuller = SimpleNamespace(platform="gpu", memory_stats=lambda: {"peak_bytes_in_use": 8})
    monkeypatch.setattr(speed.jax, "local_devices", lambda backend: [device, fuller])
    monkeypatch.setattr(processes, "gathered", lambda value: [value, 7])
    assert speed.peak_memory() == 8
    monkeypatch.setattr(processes, "gathered", lambda value: [value, 9])
    assert speed.peak_memory() == 9


def test_a_run_has_the_median_speed_of_its_logs_and_the_share_that_belongs_to_it(throughput):
    for each in (900.0, 100.0, 300.0):
        throughput.on_log(None, {"throughput": each})
    result = throughput.result(SimpleNamespace(lower_seconds=1.0, compile_seconds=2.0))
    assert result["images_per_second"] == 300
    assert result["mfu"] == pytest.approx(300 * 3 * TOY_FLOPS / (2 * 0.5e12))
    assert (result["lower_seconds"], result["compile_seconds"]) == (1, 2)


def test_limits_that_are_measured_after_the_run_give_its_share_as_well():
    job = job_of("--dataset", "mnist", "--precision", "32.32")
    throughput = speed.Throughput(job, None)
    throughput.on_log(None, {"throughput": 300.0})
    limits = SimpleNamespace(matmul_tflops={"float32": 0.5})
    assert throughput.share_of(limits) == pytest.approx(300 * 3 * TOY_FLOPS / 0.5e12)


def test_without_a_log_or_a_known_device_there_is_neither_speed_nor_share():
    throughput = speed.Throughput(job_of("--dataset", "mnist"), None)
    result = throughput.result(SimpleNamespace(lower_seconds=1.0, compile_seconds=2.0))
    assert (result["images_per_second"], result["mfu"]) == (None, None)
    assert "mfu" not in throughput.on_log(None, {"throughput": 100.0})


def test_what_is_left_of_cleaned_checkpoints_goes_with_the_last_of_all_processes_steps(tmp_path):
    other = tmp_path / "rank1" / "00000004"
    for folder in (tmp_path / "rank0", other):
        folder.mkdir(parents=True)
    (tmp_path / "network.json").write_text("{}")
    _remove_empty(tmp_path, tmp_path / "rank0", is_ours=True)
    assert not (tmp_path / "rank0").exists() and (tmp_path / "network.json").exists() and other.exists()
    other.rmdir()
    _remove_empty(tmp_path, tmp_path / "rank1", is_ours=False)
    assert tmp_path.exists() and not list(tmp_path.iterdir())
    _remove_empty(tmp_path, tmp_path, is_ours=True)
    assert not tmp_path.exists()


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        "--precision 32.32",
        "--precision 16.16 --ema 0.9 --auto-loss-scaling",
        "--precision 16.32 --optimizer adam",
    ],
)
def test_the_forms_that_a_program_is_traced_from_are_those_of_the_state_that_is_drawn(words, is_given):
    job = job_of("--dataset", "mnist", "--model", "toy_model_bn", *words.split())
    key = jax.random.key(3)
    weights = job.network.init_on_host(key) if is_given else None
    forms = jax.eval_shape(partial(model.start, job), key, weights)
    state = copy_state(model.start(job, key, weights))

    def describe(leaf):
        return leaf.shape, leaf.dtype, leaf.weak_type

    assert jax.tree.structure(forms) == jax.tree.structure(state)
    assert [*map(describe, jax.tree.leaves(forms))] == [*map(describe, jax.tree.leaves(state))]

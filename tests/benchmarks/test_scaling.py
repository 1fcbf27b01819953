"""docs/scaling.md: its tables are the script's, the model's counts are those of compiled programs and of the table."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import NamedSharding

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scaling  # noqa: E402

from hotloop.engine.device import device_mesh  # noqa: E402
from hotloop.engine.feed import Resident  # noqa: E402
from hotloop.engine.keys import seed_key  # noqa: E402
from hotloop.engine.loop import Program  # noqa: E402
from hotloop.engine.pipeline_table import SCHEDULES, make_table  # noqa: E402
from hotloop.engine.precision import SPLIT  # noqa: E402
from hotloop.engine.processes import place  # noqa: E402
from hotloop.families.cnn import model  # noqa: E402
from hotloop.families.cnn.job import resolve  # noqa: E402
from hotloop.families.cnn.options import DatasetSize, TrainConfig  # noqa: E402

PAGE = (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("title", scaling.TABLES)
def test_the_page_shows_what_the_script_prints(title):
    assert scaling.TABLES[title]() in PAGE


def test_the_speeds_are_those_on_record():
    results = (ROOT / "docs" / "results.md").read_text()
    for speed in scaling.MEASURED.values():
        assert f"at {speed:,} images/s" in results
    for batch, speed in scaling.MEASURED.items():
        assert batch / scaling.compute_seconds(batch) == pytest.approx(speed, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ticks_and_busy_share_are_the_pages_formulas(schedule):
    for stages in range(1, 9):
        for count in range(1, 34):
            found = make_table(schedule, stages, count)
            assert found.ticks == scaling.expected_ticks(schedule, stages, count)
            assert found.busy_share == pytest.approx(
                scaling.expected_busy(schedule, stages, count), rel=1e-12
            )


def test_the_last_of_the_old_stages_has_most_of_the_weights():
    network = scaling.resnet50()
    last = scaling.cut(network, scaling.OLD_SPLITS)[-1]
    held = sum(node.weights for node in network.nodes[last.start : last.stop])
    assert held / scaling.parameters(network) == pytest.approx(0.84, abs=0.005)
    assert scaling.parameters(network) == 25_557_032 and scaling.statistics(network) == 53_120


def test_images_of_a_replica_lie_on_the_device_of_every_stage():
    """As a batch is placed that training in stages takes; the page's column counts them for each."""
    network = scaling.resnet50()
    small = replace(network, shape=(2, 2, 3))
    images = np.zeros((2 * scaling.MICRO, *small.shape), np.uint8)
    placed = place(images, NamedSharding(device_mesh(1, 2), SPLIT))
    assert {shard.data.nbytes for shard in placed.addressable_shards} == {scaling.image_bytes(small, 2)}
    assert len(placed.addressable_shards) == 2
    assert scaling.image_bytes(network, scaling.MICRO_BATCHES) == 294 * 2**20


def test_a_ring_sends_twice_what_the_others_have():
    assert scaling.ring_bytes(1, 100.0) == 0 and scaling.ring_bytes(2, 100.0) == 100
    assert scaling.ring_bytes(4096, 100.0) == pytest.approx(200, rel=1e-3)


def test_more_gpus_are_never_faster_than_as_many_times_one():
    payload = scaling.reduced_bytes(scaling.resnet50())
    shares = [scaling.efficiency(gpus, 256, payload) for gpus in scaling.GPUS]
    assert shares[0] == pytest.approx(1, rel=1e-12) and shares == sorted(shares, reverse=True)


def test_a_tick_lasts_as_long_as_its_slowest_stage():
    # One stage: forward and backward in one tick. Two: the first goes forward, then both at once, then it comes back.
    assert scaling.pipeline_time("Interleaved", [2.0], 3) == 3 * 6.0
    assert scaling.pipeline_time("Sequential", [1.0, 2.0], 1) == 1 + 6 + 3
    assert scaling.pipeline_time("Interleaved", [1.0, 1.0], 2) == 1 + 3 + 3 + 3


def compiled(splits, replicas, micro=2, count=3):
    size = DatasetSize(micro * count * replicas, 8, (32, 32, 3), 10)
    config = TrainConfig(
        model_name="toy_model_bn",
        dataset="cifar10",
        precision="32.32",
        micro_batch_size=micro,
        gradient_accumulation_count=count,
        num_replicas=replicas,
        pipeline_splits=splits,
        pipeline_schedule="Interleaved",
        validation=False,
    )
    job = replace(resolve(config, size, 4), size=size)
    draws = np.random.default_rng(0)
    data = {
        "image": draws.integers(0, 256, (size.train, *size.shape)).astype(np.uint8),
        "label": draws.integers(0, 10, size.train).astype(np.int32),
    }
    feed = Resident(data, job.batch.global_, seed=0, shuffled=False, sharding=job.sharding)
    program = Program(model.update(job), feed, 1, seed_key(1))
    program.compile(model.spread(job, model.init(job, seed_key(1))))
    return job, scaling.moved_bytes(program.compiled.as_text())


def test_a_compiled_update_of_replicas_sums_the_bytes_of_the_model():
    job, moved = compiled((), 4)
    figures = 2 * scaling.FLOAT32  # loss and accuracy
    assert job.batch.replicas == 4
    assert moved == {"all-reduce": scaling.reduced_bytes(job.network) + figures, "collective-permute": 0}


def test_a_compiled_update_in_stages_passes_on_what_crosses():
    job, moved = compiled(("conv2d_1",), 2)
    network, place = job.network, [node.name for node in job.network.nodes].index("conv2d_1")
    crossing = 2 * scaling.FLOAT32 * scaling.crossing_values(network, place)  # of two images
    assert moved["collective-permute"] == 2 * crossing  # each way, every tick
    # Rows are as long as the longest stage's: of gradients once, of batch norm's numbers twice.
    halves = [network.nodes[:place], network.nodes[place:]]
    weights = max(sum(node.weights for node in nodes) for nodes in halves)
    kept = max(
        sum(2 * node.shape[-1] for node in nodes if node.kind == scaling.BATCH_NORM) for nodes in halves
    )
    figures = 2 * 2  # summed over stages, then over replicas
    assert moved["all-reduce"] == scaling.FLOAT32 * (weights + 2 * kept + figures)

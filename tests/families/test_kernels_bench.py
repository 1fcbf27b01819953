"""A whole benchmark: what it says, what it returns, and how seconds become figures."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hotloop.cli.command import Context
from hotloop.engine.measure import Ceilings
from hotloop.errors import DeviceError, OptionError
from hotloop.families.kernels import bench, hmc, pool, timing
from hotloop.families.kernels import config as configs
from hotloop.families.kernels.catalogue import Cost
from hotloop.families.kernels.config import explain_idle_options
from hotloop.families.kernels.model import Job
from hotloop.options import Params, to_jsonable
from listener import Listener

KNOWN = Ceilings("test", {"float32": 0.1, "float16": 0.2, "bfloat16": 0.2}, "float32", 10.0, "", "")
DENSE = configs.Dense(size=16, batch_size=4, batches_per_step=3, steps=2, dtype="float32")


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    monkeypatch.setattr(timing, "ceilings", lambda device: KNOWN)


def run(config, capsys):
    result = bench.run(config, jax.devices()[0], Context())
    return result, capsys.readouterr().out


def test_inference_says_the_old_lines_and_returns_every_figure(capsys):
    result, said = run(replace(DENSE, repeat=2), capsys)
    assert said.startswith("Dense layer\nInference\nBatch size: 4, batches per step: 3, steps: 2\nSize 16")
    assert len(re.findall(r"^\d+\.\d+ sec/itr\. \d+\.\d+ items/sec$", said, re.MULTILINE)) == 4
    seconds = result["seconds"]
    assert result["seconds_per_step"] == seconds["median"] and 0 < result["roofline"] < 10
    assert len(seconds["all"]) == 4 and seconds["p10"] <= seconds["median"] <= seconds["p90"]
    assert result["items_per_second"] == pytest.approx(12 / seconds["median"])
    assert result["tflops"] == pytest.approx(3 * result["cost"]["flops"] / seconds["median"] / 1e12)
    assert result["gbps"] == pytest.approx(3 * result["cost"]["bytes"] / seconds["median"] / 1e9)
    assert len(result["repeats"]) == 2
    assert result["config"]["size"] == 16 and result["environment"]["jax"] == jax.__version__
    assert result["checked"]["rows"] == 4 and result["compile_seconds"] > 0
    assert "loss_first" not in result
    json.dumps(to_jsonable(result), allow_nan=False)


@pytest.mark.parametrize(("module", "config"), [(bench, DENSE), (hmc, configs.Hmc(steps=1, hmc_steps=10))])
def test_a_bar_is_shown_while_the_device_is_measured(module, config, monkeypatch):
    listener, bars = Listener(), []
    monkeypatch.setattr(timing, "ceilings", lambda device: bars.append(list(listener.bars)) or KNOWN)
    module.run(config, jax.devices()[0], listener)
    assert bars == [["measuring the device"]] and listener.bars == []


def test_training_reports_the_losses_of_the_whole_run(capsys):
    result, said = run(replace(DENSE, train=True, learning_rate=1.0, batches_per_step=20), capsys)
    assert result["loss_last"] < 0.9 * result["loss_first"]
    assert f"loss: first {result['loss_first']:.6g}, last {result['loss_last']:.6g}" in said


def test_only_the_timed_steps_are_counted_after_one_warm_up(monkeypatch, capsys):
    calls = []
    step = bench.LayerBenchmark.step
    monkeypatch.setattr(bench.LayerBenchmark, "step", lambda self: (calls.append(1), step(self))[1])
    result, _ = run(DENSE, capsys)
    assert len(calls) == 3 and len(result["seconds"]["all"]) == 2


@pytest.mark.slow
def test_the_stack_of_lstms_has_measured_latencies(capsys):
    config = configs.LstmMulti(timesteps=3, hidden_size=8, input_size=4, batches_per_step=2, steps=1)
    result, said = run(config, capsys)
    latency = result["latency_ms"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert latency["calls"] == 199 and "latency of one batch: p50" in said


def test_a_run_on_batches_apart_has_the_same_figures_and_a_latency(monkeypatch, capsys):
    monkeypatch.setattr(bench, "make_feed", lambda job, count: pool.BatchesApart(job, 2))
    config = configs.LstmMulti(
        timesteps=3, hidden_size=8, input_size=4, batches_per_step=4, steps=1, train=True, dtype="float32"
    )
    result, said = run(config, capsys)
    assert result["latency_ms"]["calls"] > 1
    assert result["microseconds_per_iteration"] == pytest.approx(result["seconds_per_step"] / 4 * 1e6)
    assert f"loss: first {result['loss_first']:.6g}, last {result['loss_last']:.6g}" in said


def test_a_latency_is_in_milliseconds_and_leaves_the_first_call_out(monkeypatch):
    calls = iter([0.5, *(1e-5 * number for number in range(1, 200))])
    monkeypatch.setattr(bench.timing, "time_step", lambda step: (next(calls), None))
    for name in ("_compile", "PoolOnDevice", "copy_state"):
        monkeypatch.setattr(bench, name, lambda *_: SimpleNamespace(call=None))
    found = bench.measure_latency(SimpleNamespace(job=None, state=None))
    assert found == pytest.approx({"p50": 1.0, "p90": 1.792, "p99": 1.9702, "calls": 199})


def test_report_and_graph_are_written_where_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, said = run(replace(DENSE, report=tmp_path / "report", save_graph=True), capsys)
    assert (tmp_path / "report/inference/summary.json").exists()
    assert list((tmp_path / "report/inference/trace").rglob("*.gz"))
    (folder,) = re.findall(r"^program text: (results/kernel-\S+)$", said, re.MULTILINE)
    assert "stablehlo.dot_general" in (tmp_path / folder / "program.stablehlo.txt").read_text()
    assert "HloModule" in (tmp_path / folder / "program.optimised.hlo.txt").read_text()


def test_a_report_asked_for_by_the_environment_is_written(capsys, tmp_path, monkeypatch):
    options = json.dumps({"autoReport.all": "true", "autoReport.directory": str(tmp_path / "there")})
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", options)
    run(replace(DENSE, train=True), capsys)
    assert (tmp_path / "there/training/program.hlo.txt").exists()


def test_options_of_the_old_programs_are_explained(capsys):
    options = Params({"availableMemoryProportion": 0.1})
    config = replace(DENSE, convolution_options=options, matmul_options=options, report_hw_cycle_count=True)
    _, said = run(config, capsys)
    for name in ("--convolution-options", "--matmul-options", "--report-hw-cycle-count"):
        (line,) = [line for line in said.splitlines() if line.startswith(name)]
        assert "no effect" in line
    assert explain_idle_options(DENSE) == []


@pytest.mark.slow
def test_regrouped_blocks_are_announced(capsys):
    config = configs.GroupedConv(
        filter_in=8, filter_out=4, input_size=6, block_repeats=2, batches_per_step=2, steps=1
    )
    _, said = run(config, capsys)
    assert "blocks after the first have 2 groups instead of 4" in said
    assert "Grouped convolution\nInference\n" in said


def test_auto_is_float32_on_a_cpu_and_says_so(capsys):
    result, said = run(replace(DENSE, dtype="auto"), capsys)
    if jax.devices()[0].platform == "cpu":
        assert result["dtype"] == "float32" and "float32 (auto on cpu)" in said


def test_half_partials_sum_in_sixteen_bits_and_are_less_exact(capsys, tmp_path, monkeypatch):
    def run_in(name, config):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        result, _ = run(config, capsys)
        (text,) = Path().rglob("*.stablehlo.txt")
        return result["checked"]["bounds"]["output"], "accumulation_type = f16" in text.read_text()

    half = replace(DENSE, dtype="float16", size=512, save_graph=True)
    whole = run_in("whole", half)
    try:
        partial = run_in("partial", replace(half, enable_half_partials=True))
    except OptionError as refused:
        assert jax.default_backend() != "cpu"
        assert str(refused).startswith("--enable-half-partials: this device cannot sum in 16 bits")
        return
    assert partial[0] > whole[0]
    assert (whole[1], partial[1]) == (False, True)


def test_a_device_without_half_partials_says_so(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("The precision 'F16_F16_F16' is not supported by dot_general on this device")

    monkeypatch.setattr(bench.Program, "compile", refuse)
    with pytest.raises(OptionError, match="--enable-half-partials: this device cannot"):
        bench.prepare(Job(DENSE, "float16"))


def test_half_partials_need_sixteen_bits():
    if jax.devices()[0].platform == "cpu":
        with pytest.raises(OptionError, match="--enable-half-partials: needs 16-bit numbers"):
            bench.run(replace(DENSE, dtype="auto", enable_half_partials=True), jax.devices()[0], Context())


def test_too_many_replicas_compile_nothing(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(DeviceError, match="replicas=99: only"):
        bench.run(replace(DENSE, replicas=99), jax.devices()[0], Context())


def test_items_count_every_replica(capsys):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    result, said = run(replace(DENSE, replicas=2, train=True), capsys)
    assert result["items_per_second"] == pytest.approx(24 / result["seconds_per_step"])
    assert "2 replicas" in said


def work(flops, moved, dtype="float32", serial=1):
    return timing.TimedWork(
        "Dense", "inference", "items/sec", 10, 40, Cost(flops, moved, moved, 0, serial), 1, dtype
    )


def test_the_roofline_is_the_lower_of_peak_and_bandwidth_times_intensity():
    bound_by_products = timing.roofline(work(1e9, 1e6), 0.02, KNOWN)
    limits = bound_by_products["limits"]
    assert (limits["bound"], bound_by_products["roofline"]) == ("compute", pytest.approx(0.5))
    assert limits["attainable_tflops"] == pytest.approx(0.1)
    bound_by_memory = timing.roofline(work(1e6, 1e7), 0.004, KNOWN)
    limits = bound_by_memory["limits"]
    assert (limits["bound"], bound_by_memory["roofline"]) == ("memory", pytest.approx(0.25))
    assert limits["attainable_tflops"] == pytest.approx(1e6 / 1e-3 / 1e12)


@pytest.mark.parametrize(
    ("ideal_us", "took_us", "bound"),
    [
        (1, 10, "latency"),
        (19, 39, "latency"),
        (21, 43, "compute"),  # beyond 20 us of work a launch does not decide
        (19, 37, "compute"),  # more than half of the time is work
        (1, 1.5, "compute"),
    ],
)
def test_work_of_under_20_us_that_takes_more_than_twice_as_long_is_called_latency_bound(
    ideal_us, took_us, bound
):
    found = timing.roofline(work(ideal_us * 1e-6 * 0.1e12, 1, serial=5), took_us * 1e-6, KNOWN)["limits"]
    assert found["ideal_microseconds"] == pytest.approx(ideal_us)
    assert found["bound"] == bound
    assert ("5 at least" in found["note"]) == (bound == "latency")


@pytest.mark.parametrize(("seconds", "bound"), [(4e-6, "latency"), (1.5e-6, "compute")])
def test_the_label_and_its_note_are_printed_as_they_were_found(seconds, bound):
    found = timing.figures([[10 * seconds]], work(1e5, 1e3, serial=7), KNOWN)
    lines = timing.figure_lines(found, "items/sec")
    assert f" % of the roofline, {bound}-bound: " in lines[3]
    note = (
        "1 us of work an iteration: what counts is the latency of its dependent steps (7 at least), not the"
    )
    assert lines[4:] == ([f"{note} roofline"] if bound == "latency" else [])


def test_operations_and_bytes_a_second_are_those_of_all_replicas():
    found = timing.figures([[2.0]], replace(work(1e9, 1e6), replicas=3), KNOWN)
    assert found["tflops"] == pytest.approx(3 * 10 * 1e9 / 2.0 / 1e12)
    assert found["gbps"] == pytest.approx(3 * 10 * 1e6 / 2.0 / 1e9)
    limits = found["limits"]
    assert (limits["attainable_tflops"], limits["peak_tflops"]) == (
        pytest.approx(3 * 0.1),
        pytest.approx(3 * 0.1),
    )
    assert limits["copy_gbps"] == pytest.approx(3 * KNOWN.copy_gbps)
    assert found["roofline"] == pytest.approx(0.01 / 0.2)


def test_exact_float32_is_held_against_exact_float32():
    exact = replace(KNOWN, matmul_tflops={"float32": 0.4, "float32_highest": 0.05})
    assert timing.roofline(work(1e9, 1), 1.0, exact)["limits"]["peak_tflops"] == pytest.approx(0.05)


def test_percentiles_are_those_of_all_steps():
    found = timing.figures([[1.0, 2.0, 3.0], list(np.arange(4.0, 12.0))], work(1e9, 1), KNOWN)
    assert {name: found["seconds"][name] for name in ("median", "p10", "p90")} == {
        "median": 6.0,
        "p10": 2.0,
        "p90": 10.0,
    }
    assert found["repeats"] == [20.0, 40 / 7.5]

"""benchmarks/peers/kernels.py: which layers are held to which floors, how long turns are, and that both compute the
same."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def peers_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))


def floors(*names):
    import kernels

    found = {case.name: case.floor for case in kernels.cpu_cases()}
    return {mode: {found[f"{name} {mode}"] for name in names} for mode in ("inference", "training")}


def test_single_rows_are_held_to_eight_and_five_times_torch():
    names = ("rnn B1 T5 H128", "gru B1 T5 H128", "gru B1 T5 H128, reset after", "lstm B1 T5 H128")
    assert floors(*names) == {"inference": {8}, "training": {5}}


def test_every_larger_layer_is_held_to_torchs_speed():
    shapes = ("B64 T25 H512", "B256 T100 H512")
    recurrent = [
        f"{layer} {shape}{form}"
        for shape in shapes
        for layer, form in (("rnn", ""), ("gru", ", reset after"), ("lstm", ""))
    ]
    others = (
        "lstm-multi B1 T200 I16 H256 L2",
        "grouped-conv 1x56x56x64, 64 groups, 10 blocks",
        "grouped-conv 4x56x56x128, 32 groups",
        "dense B32 N1024",
        "gru B64 T25 H512, reset before",
    )
    assert floors(*recurrent, *others) == {"inference": {1}, "training": {1}}


def test_a_case_has_the_shape_that_its_name_says():
    import kernels

    for case in kernels.cpu_cases():
        config = case.config
        assert config.train == case.name.endswith("training")
        if hasattr(config, "timesteps") and "multi" not in case.name:
            assert f" B{config.batch_size} T{config.timesteps} H{config.hidden_size}" in case.name
            assert getattr(config, "input_size", config.hidden_size) == config.hidden_size
        if "reset" in case.name:
            assert config.reset_after == ("reset after" in case.name)


@given(st.floats(0, 1e4), st.floats(1e-3, 1e3), st.integers(1, 50))
def test_rounds_are_as_many_as_fit_but_three_at_least(limit, a_round, rounds):
    import common

    found = common.rounds_within(limit, a_round, rounds)
    assert min(rounds, 3) <= found <= rounds
    assert found * a_round <= limit or found <= 3
    assert found == rounds or (found + 1) * a_round > limit * (1 - 1e-9)


def test_calls_of_the_native_package_are_counted_in_a_programs_text():
    import common

    text = """a = custom-call(b), custom_call_target="hotloop_conv_forward"
    c = custom-call(d), custom_call_target="__onednn$matmul"
    e = custom-call(f), custom_call_target="hotloop_conv_kernel_gradient" """
    assert common.count_native_calls(text) == 2


def test_a_trial_that_is_long_enough_is_what_is_timed(monkeypatch):
    import kernels

    made = []
    job = SimpleNamespace(config=kernels.configs.Dense(batches_per_step=2))
    trial = SimpleNamespace(job=job, step=lambda: None)
    monkeypatch.setattr(kernels, "replace", lambda some, **to: SimpleNamespace(**vars(some) | to))
    monkeypatch.setattr(
        kernels, "prepare", lambda job: made.append(job) or SimpleNamespace(job=job, step=lambda: None)
    )
    monkeypatch.setattr(kernels, "seconds", lambda step: 4.0)
    assert kernels.of_length(trial, target=0.3) is trial  # two iterations of 2 s each
    assert made == []


def test_what_a_call_costs_does_not_make_the_timed_ones_short(monkeypatch):
    """A call of n iterations takes 9 ms and a millisecond for each."""
    import kernels

    made = []
    job = SimpleNamespace(config=kernels.configs.Dense(batches_per_step=2))

    def bench(job):
        return SimpleNamespace(job=job, step=lambda: 0.009 + 0.001 * job.config.batches_per_step)

    monkeypatch.setattr(kernels, "replace", lambda some, **to: SimpleNamespace(**vars(some) | to))
    monkeypatch.setattr(kernels, "prepare", lambda job: made.append(job) or bench(job))
    monkeypatch.setattr(kernels, "seconds", lambda step: step())
    found = kernels.of_length(bench(job), target=0.3)
    assert [each.config.batches_per_step for each in made] == [
        60,
        264,
    ]  # 300 / 5.5, then 300 * 60 / 69, in twelves
    assert found.job is made[-1]
    assert kernels.of_length(found, target=0.3) is found


def test_cases_are_chosen_by_words():
    import kernels

    found = [case.name for case in kernels.chosen(kernels.cpu_cases(), ["B256 T100", "dense"])]
    assert len(found) == 8
    assert all("B256 T100" in name or "dense" in name for name in found)


@pytest.mark.slow
def test_a_comparison_checks_and_times_both(monkeypatch, tmp_path, capsys):
    import kernels

    small = kernels.configs.Gru(
        fused=True, reset_after=True, batch_size=4, timesteps=3, hidden_size=16, input_size=16
    )
    cases = [kernels.Case("small", small, 1e9), kernels.Case("train", replace(small, train=True), None)]
    monkeypatch.setattr(kernels, "cpu_cases", lambda: cases)
    file = tmp_path / "found.json"
    assert kernels.main(["--quick", "--save", str(file)]) == 1
    first, second = json.loads(file.read_text())["results"]
    assert (first["rounds"], second["rounds"]) == (3, 3)
    assert first["difference_from_torch"] < 1e-5
    assert max(first["error_against_float64"], second["error_against_float64"]) < 1e-5
    assert first["ratio_low"] <= first["ratio"] <= first["ratio_high"]
    weights = 4 * 3 * 16 * (16 + 16 + 2)
    for found in (first, second):
        assert weights < found["memory_bytes"]["ours"] < 100 * weights
        assert found["memory_bytes"]["torch"] is None  # on a CPU
    assert capsys.readouterr().out.count("MISSED") == 1

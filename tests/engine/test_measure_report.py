"""Reports say what the compiler made and how it ran, wherever they were asked for."""

import gzip
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hotloop.engine import measure
from hotloop.errors import OptionError

POPLAR = "POPLAR_ENGINE_OPTIONS"


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    for name in ("HOTLOOP_REPORT", POPLAR):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((64, 64))).compile()


def asked(option=None):
    said = []
    folder = measure.find_report_folder(option, Path("a/run"), said.append)
    return (None if folder is None else str(folder)), said


def test_the_option_comes_before_our_variable_before_poplars(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert asked() == (None, [])
    monkeypatch.setenv(POPLAR, '{"autoReport.all":"true", "autoReport.directory":"./x"}')
    assert asked() == ("x", [])
    monkeypatch.setenv("HOTLOOP_REPORT", "ours")
    assert asked() == ("ours", [])
    assert asked("option") == ("option", [])
    monkeypatch.setenv("HOTLOOP_REPORT", "")
    assert asked() == ("x", [])


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ('{"autoReport.all":"true"}', "a/run/report"),
        ('{"autoReport.all":true, "autoReport.directory":"y"}', "y"),
        ('{"autoReport.all":"True"}', "a/run/report"),
        ('{"autoReport.all":"true", "autoReport.directory":"."}', "."),
        ('{"autoReport.all":"false", "autoReport.directory":"y"}', None),
        ('{"autoReport.directory":"y"}', None),
        ('{"target.syncReplicasIndependently":"true"}', None),
        ("  ", None),
    ],
)
def test_poplar_options_are_understood(monkeypatch, tmp_path, text, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(POPLAR, text)
    assert asked() == (folder, [])
    assert not (tmp_path / "a").exists()  # the run's own folder comes with the run, or not at all


@pytest.mark.parametrize("text", ["{autoReport.all: true}", "[1]", "3", '{"autoReport.all"'])
def test_malformed_poplar_options_are_a_warning(monkeypatch, text):
    monkeypatch.setenv(POPLAR, text)
    folder, (warning,) = asked()
    assert folder is None
    assert warning.startswith(POPLAR)
    assert "ignored" in warning


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=f"report={bad}: cannot write there"):
            measure.check_report_folder(bad)
    assert measure.check_report_folder(tmp_path / "new" / "deep").is_dir()
    assert list((tmp_path / "new" / "deep").iterdir()) == []


def test_somebody_elses_folder_is_refused_and_our_own_is_written_again(tmp_path, compiled):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "photo.png").write_text("mine")
    with pytest.raises(OptionError, match="training holds other files"):
        measure.check_report_folder(tmp_path)
    with pytest.raises(OptionError, match="training holds other files"):
        measure.write_program_report(tmp_path, compiled, 1.0, "training")
    for _ in range(2):
        measure.write_program_report(tmp_path, compiled, 1.0, "evaluation")


def test_a_report_holds_cost_memory_and_the_program(tmp_path, compiled):
    facts = measure.write_program_report(tmp_path, compiled, 1.5, "training")
    folder = tmp_path / "training"
    assert json.loads((folder / "summary.json").read_text()) == facts
    assert facts["compile_seconds"] == 1.5
    assert facts["cost"]["flops"] >= 2 * 64**3
    assert facts["memory"]["argument"] == 4 * 64 * 64
    assert facts["memory"]["peak"] >= 2 * 4 * 64 * 64
    assert "HloModule" in (folder / "program.hlo.txt").read_text()
    text = (folder / "summary.txt").read_text()
    assert "compile time: 1.500 s" in text
    assert "peak memory: 0." in text
    assert set(json.loads((folder / "index.json").read_text())) == {
        "summary.txt",
        "summary.json",
        "program.hlo.txt",
    }
    assert "program.hlo.txt: the optimised program" in (folder / "README.txt").read_text()


def test_a_backend_without_analyses_still_gets_a_report(tmp_path):
    def refuses():
        raise NotImplementedError

    silent = types.SimpleNamespace(cost_analysis=refuses, memory_analysis=lambda: None, as_text=lambda: None)
    facts = measure.write_program_report(tmp_path, silent, 0.5, "training")
    assert facts["cost"] is None
    assert facts["memory"] is None
    text = (tmp_path / "training" / "summary.txt").read_text()
    assert "cost analysis: this backend has none" in text
    assert "memory analysis: this backend has none" in text
    assert not (tmp_path / "training" / "program.hlo.txt").exists()


def test_older_and_other_shapes_of_the_analyses_are_read(tmp_path):
    sizes = {"argument": 100, "output": 60, "alias": 50, "temp": 7, "generated_code": 1}
    stats = types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    listed = types.SimpleNamespace(
        cost_analysis=lambda: [{"flops": 8}], memory_analysis=lambda: stats, as_text=lambda: None
    )
    facts = measure.write_program_report(tmp_path, listed, 0.5, "training")
    assert facts["cost"] == {"flops": 8.0}
    assert facts["memory"] == {**sizes, "total": 118, "peak": 118}


def test_work_that_xla_does_not_count_is_said(tmp_path):
    text = 'y = call(x), custom_call_target="hotloop_conv_forward"\nz = call(y), custom_call_target="TopK"'
    program = types.SimpleNamespace(
        cost_analysis=lambda: {"flops": 8}, memory_analysis=lambda: None, as_text=lambda: text
    )
    facts = measure.write_program_report(tmp_path, program, 0.5, "training")
    assert facts["uncounted_calls"] == 1
    assert (
        "flops: 8 (without 1 calls of hotloop-native" in (tmp_path / "training" / "summary.txt").read_text()
    )


def test_a_device_that_counts_its_memory_is_in_the_summary(tmp_path, monkeypatch, compiled):
    counted = {"gpu:0": {"peak_bytes_in_use": 3 * 2**20}, "gpu:1": None}
    monkeypatch.setattr(measure, "device_memory", lambda: counted)
    measure.write_program_report(tmp_path, compiled, 0.5, "training")
    text = (tmp_path / "training" / "summary.txt").read_text()
    assert "peak memory of gpu:0: 3.000 MiB" in text
    assert "gpu:1" not in text


def test_a_trace_opens_in_tensorboard_and_perfetto(tmp_path, compiled):
    with measure.trace_program(tmp_path, "evaluation") as folder:
        compiled(jnp.ones((64, 64))).block_until_ready()
    assert folder == tmp_path / "evaluation" / "trace"
    (plane,) = folder.glob("plugins/profile/*/*.xplane.pb")
    (perfetto,) = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
    assert plane.stat().st_size > 0
    assert json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    assert set(json.loads((tmp_path / "evaluation" / "device_memory.json").read_text())) == set(
        map(str, jax.devices())
    )
    assert "ui.perfetto.dev" in (tmp_path / "evaluation" / "README.txt").read_text()


def test_a_trace_ends_with_what_it_traced(tmp_path):
    with pytest.raises(ZeroDivisionError), measure.trace_program(tmp_path, "training"):
        raise ZeroDivisionError
    with measure.trace_program(tmp_path, "training"):
        jnp.ones(3).block_until_ready()

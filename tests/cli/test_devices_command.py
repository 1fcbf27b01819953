"""`hotloop devices`: the table, the JSON, and what an absent device says."""

import json
import os
import re
from dataclasses import replace
from platform import node

import jax
import pytest

from hotloop.cli.main import main
from hotloop.engine import measure as ceilings_module
from hotloop.engine import processes
from hotloop.engine.measure import Ceilings
from hotloop.layers import native
from hotloop.layers.kernel_table import Table, Times

LIMITS = Ceilings(
    "a device", {"float32": 1.5, "bfloat16": 3.0}, "float32", 20.0, "2026-01-01T00:00:00+00:00", "0.10"
)


@pytest.fixture
def asked(monkeypatch):
    calls = []

    def measured(device, calibrate=False):
        calls.append(calibrate)
        return replace(LIMITS, float32_uses="tf32")

    monkeypatch.setattr(ceilings_module, "ceilings", measured)
    return calls


def test_json_holds_devices_ceilings_and_environment(capsys, asked):
    assert main(["devices", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in result["devices"]] == [device.id for device in jax.devices()]
    assert result["devices"][0]["memory_bytes"] > 2**20
    assert result["ceilings"]["matmul_tflops"] == {"float32": 1.5, "bfloat16": 3.0}
    assert result["environment"]["platform"] == jax.default_backend()
    assert asked == [False]
    assert {each["process"] for each in result["devices"]} == {0}
    (owner,) = result["processes"]
    assert owner == {"process": 0, "host": node(), "devices": [device.id for device in jax.devices()]}


def test_of_several_processes_each_names_its_own_devices(capsys, asked, monkeypatch):
    """As process 0 sees it, whose peer has told of one device more."""
    other = {"id": 8, "platform": "cpu", "kind": "other", "memory_bytes": None, "process": 1}
    monkeypatch.setattr(
        processes, "gathered", lambda mine: [mine, {"process": 1, "host": "b", "devices": [other]}]
    )
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"id +platform +kind +memory +process +host", out)
    assert re.search(r"8 +cpu +other +unknown +1 +b\n", out)
    assert main(["devices", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["devices"][-1] == other
    assert result["processes"][1] == {"process": 1, "host": "b", "devices": [8]}
    monkeypatch.setattr(processes, "is_writer", lambda: False)
    assert main(["devices"]) == 0
    assert capsys.readouterr().out == ""
    assert asked == [False, False]


def test_people_see_a_table_the_date_and_what_float32_means(capsys, asked):
    assert main(["devices", "--calibrate"]) == 0
    out = capsys.readouterr().out
    assert "measured 2026-01-01T00:00:00+00:00 with jax 0.10" in out
    assert re.search(r"float32 product +1\.5  TFLOP/s", out)
    assert re.search(r"copy \(read \+ write\) +20  GB/s", out)
    assert "float32 products use tf32" in out
    assert asked == [True]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a machine without an accelerator")
@pytest.mark.parametrize(
    ("words", "text"),
    [(["--only-ipu"], "--only-accelerator: only a CPU was found"), (["--device", "gpu"], "--device gpu: ")],
)
def test_a_device_that_is_not_there_is_one_line(capsys, asked, words, text):
    assert main(["devices", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
    assert asked == []


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a machine without an accelerator")
@pytest.mark.parametrize(
    "command", ["vcd train", "recommender train", "cnn train", "estimator", "kernel lstm"]
)
def test_only_an_accelerator_is_asked_of_every_command_that_computes(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "--only-accelerator"]) == 2
    assert "error: --only-accelerator: only a CPU was found" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_kernels_says_where_the_package_is_missing(capsys, asked, monkeypatch):
    monkeypatch.setattr(native, "find_package", lambda: None)
    assert main(["devices", "--kernels", "--json"]) == 0
    said = capsys.readouterr()
    assert "not installed" in said.err and "pip install 'hotloop[native]'" in said.err
    assert json.loads(said.out) == {"installed": False, "kernels": []}
    assert asked == []


def test_kernels_shows_both_times_and_what_is_taken(capsys, monkeypatch, tmp_path):
    table = Table(tmp_path / "t.json", {})
    monkeypatch.setattr(native, "find_package", lambda: object())
    monkeypatch.setattr(native, "table", lambda: table)
    assert main(["devices", "--kernels"]) == 0
    assert "no shape was measured yet" in capsys.readouterr().out
    table.find_times("conv forward: 8x4x4x3 stride=1", lambda: Times(2.0, 1.0))
    table.find_times("conv kernel gradient: 8x4x4x3 stride=1", lambda: Times(1.0, 1.0))
    table.find_times("norm forward: 8x4x4x3 relu=True", lambda: Times(0.8, 1.0, margin=0.75))
    assert main(["devices", "--kernels", "--no-native"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "switched off" in lines[0]
    assert [re.split(r"\s{2,}", line) for line in lines[1:5]] == [
        ["operation", "shapes", "plain ms", "native ms", "chosen"],
        ["conv forward", "8x4x4x3 stride=1", "2.000", "1.000", "native"],
        ["conv kernel gradient", "8x4x4x3 stride=1", "1.000", "1.000", "plain"],
        ["norm forward", "8x4x4x3 relu=True", "0.800", "1.000", "native"],
    ]
    assert str(table.path) in lines[5]


def test_no_native_also_holds_for_processes_that_the_command_starts(capsys, asked, monkeypatch):
    monkeypatch.setenv("HOTLOOP_NATIVE", "1")
    assert main(["devices"]) == 0
    assert os.environ["HOTLOOP_NATIVE"] == "1"
    assert main(["devices", "--no-native"]) == 0
    assert os.environ["HOTLOOP_NATIVE"] == "0"

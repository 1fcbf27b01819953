"""`hotloop kernel ...` from the command line: every name, every old option, one JSON object, one-line errors."""

import json

import pytest

from hotloop.cli import kernel
from hotloop.cli.main import find_command, main
from hotloop.cli.parser import scan
from hotloop.engine.measure import Ceilings
from hotloop.families.kernels import config as configs
from hotloop.options import build, options_of

KNOWN = Ceilings("test", {"float32": 0.1, "float16": 0.2, "bfloat16": 0.2}, "float32", 10.0, "", "")
SMALL = ["--size", "16", "--batch-size", "4", "--batches-per-step", "3", "--steps", "2", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    monkeypatch.setattr("hotloop.families.kernels.timing.ceilings", lambda device: KNOWN)


def read(line):
    command, _, words = find_command(["kernel", *line.split()])
    return build(command.config, scan(words, options_of(command.config)))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dense --train --include-activation --size 256 --batch-size 128",
         configs.Dense(train=True, include_activation=True, size=256, batch_size=128)),
        ("grouped_conv --batch-size 8 --use-generated-data",
         configs.GroupedConv(batch_size=8, use_generated_data=True)),
        ("grouped-conv --train --input-size 112 --stride 3 --filter-in 32 --filter-out 16",
         configs.GroupedConv(train=True, input_size=112, stride=3, filter_in=32, filter_out=16)),
        ("gru --batch-size 256 --timesteps 25 --hidden-size 1024 --use-generated-data --popnn",
         configs.Gru(batch_size=256, timesteps=25, hidden_size=1024, use_generated_data=True, fused=True)),
        ("lstm --hidden-size 2048 --steps 6 --popnn --no-train",
         configs.Lstm(hidden_size=2048, steps=6, fused=True)),
        ("rnn --batch_size 1024 --timesteps 150 --hidden_size 256 --use-zero-values",
         configs.Rnn(batch_size=1024, timesteps=150, hidden_size=256, use_zero_values=True)),
        ("lstm_multi --num-layers 2 --input-size 16 --batch-size 64 --train",
         configs.LstmMulti(batch_size=64, train=True)),
        ("hmc --steps 200 --hmc-steps 10000 --leapfrog-steps 10",
         configs.Hmc(steps=200, leapfrog_steps=10)),
    ],
)  # fmt: skip
def test_the_old_programs_lines_are_understood(line, expected):
    assert read(line) == expected


def test_one_json_object_has_the_whole_result(capsys):
    assert main(["kernel", "dense", *SMALL, "--train", "--json"]) == 0
    out, said = capsys.readouterr()
    (line,) = out.splitlines()
    result = json.loads(line)
    names = {
        "items_per_second", "seconds_per_step", "tflops", "gbps", "roofline", "compile_seconds",
        "loss_first", "loss_last", "checked", "device", "environment", "config", "dtype",
    }  # fmt: skip
    assert names <= result.keys()
    assert "items/sec" in said and "checked against float64" in said


def test_hmc_reports_its_acceptance(capsys):
    words = ["--steps", "4", "--hmc-steps", "500", "--leapfrog-steps", "1", "--json"]
    assert main(["kernel", "hmc", *words]) == 0
    out, said = capsys.readouterr()
    result = json.loads(out)
    assert result["acceptance"] == pytest.approx(0.7837, abs=4 * result["acceptance_error"])
    assert "hmc steps/sec" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dense", "--size", "0"], "--size 0: must be at least 1"),
        (["dense", "--batch-size", "-4"], "--batch-size -4: must be at least 1"),
        (["dense", "--shards", "2"], "--shards 2: "),
        (["dense", "--dtype", "float8"], "--dtype float8: must be one of"),
        (["dense", "--replicas", "64"], "--replicas 64: only"),
        (["dense", "--device-id", "64"], "--device-id 64: "),
        (["grouped-conv", "--group-dim", "5"], "--group-dim 5: must divide --filter-out 64"),
        (["grouped_conv", "--filter-in", "65"], "--filter-in 65: not divisible by the 64 groups"),
        (["lstm", "--matmul-options", "half"], "--matmul-options half: must be a mapping"),
        (["hmc", "--leapfrog-steps", "0"], "--leapfrog-steps 0: must be at least 1"),
        (["hmc", "--step-size", "-1"], "--step-size -1: must be greater than 0"),
        (["conv"], "has no command 'conv'"),
    ],
)
def test_bad_input_is_one_line_and_compiles_nothing(capsys, monkeypatch, words, said):
    monkeypatch.setattr("jax.jit", lambda *_, **__: pytest.fail("compiled"))
    assert main(["kernel", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and said in error and error.count("\n") == 1


def test_a_report_folder_that_cannot_be_written_is_refused_first(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["kernel", "dense", *SMALL, "--report", str(tmp_path / "file")]) == 2
    assert "--report" in capsys.readouterr().err


def test_a_wrong_kernel_exits_with_status_two(capsys, monkeypatch):
    monkeypatch.setattr(
        "hotloop.families.kernels.reference.dense", lambda params, x: x @ params["kernel"] + 1
    )
    assert main(["kernel", "dense", *SMALL]) == 2
    out, error = capsys.readouterr()
    assert "wrong result, not timed" in error and "sec/itr" not in out


def test_all_runs_every_kernel_with_its_defaults_and_prints_one_table(capsys, monkeypatch):
    seen = []
    fake = {
        "mode": "inference", "dtype": "float32", "items_per_second": 1234.56, "tflops": 0.012345,
        "microseconds_per_iteration": 3.21, "gbps": 1.5, "roofline": 0.25, "limits": {"bound": "memory"},
    }  # fmt: skip
    monkeypatch.setattr(kernel, "run_kernel", lambda config, context: (seen.append(config), fake)[1])
    assert main(["kernel", "all", "--steps", "3", "--json"]) == 0
    out, said = capsys.readouterr()
    assert list(json.loads(out)["results"]) == [*kernel.LAYERS, "hmc"]
    assert seen == [config(steps=3) for config, _ in kernel.LAYERS.values()] + [configs.Hmc(steps=3)]
    table = said.strip().splitlines()[-8:]
    assert table[0].split() == [word for column in kernel.COLUMNS for word in column.split()]
    assert [line.split()[0] for line in table[1:]] == [*kernel.LAYERS, "hmc"]
    assert "25.0" in table[1]


@pytest.mark.parametrize("name", ["dense", "grouped-conv", "rnn", "gru", "lstm", "lstm-multi", "hmc", "all"])
def test_every_command_has_help_with_its_defaults(capsys, name):
    assert main(["kernel", name, "--help"]) == 0
    assert "(default: " in capsys.readouterr().out


def test_several_processes_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(kernel.processes, "count", lambda: 2)
    assert main(["kernel", "dense"]) == 2
    assert "kernel: times the devices of one process" in capsys.readouterr().err

"""Messages name arguments to whoever calls from Python, and options to whoever types a command."""

import re
from pathlib import Path

import pytest

import hotloop
from hotloop.cli.console import spell_options, spell_options_in_errors
from hotloop.cli.main import main
from hotloop.engine.batch import Batch
from hotloop.engine.interrupt import Stopped
from hotloop.errors import HotloopError, PlanError

OPTIONS = {"num_replicas", "micro_batch_size", "resume", "logs_per_epoch", "data"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("replicas=8: only 4 here", "--num-replicas 8: only 4 here"),
        ("micro=0 and replicas=0", "--micro-batch-size 0 and --num-replicas 0"),
        ("(logs_per_epoch=2/3); logs_per_epoch=1 would fit", "(--logs-per-epoch 2/3); --logs-per-epoch 1 would fit"),
        ("continue it with resume=True, or not", "continue it with --resume, or not"),
        ("data_dir=/a b: no such folder", "--data /a b: no such folder"),
        ("learning_rate: name=cosin: must be", "--lr-schedule cosin: must be"),
        ("HOTLOOP_DATA=/x, other=1, x.replicas=2", "HOTLOOP_DATA=/x, other=1, x.replicas=2"),
    ],
)  # fmt: skip
def test_arguments_that_are_options_are_spelled_as_options(text, told):
    assert spell_options(text, OPTIONS) == told


def test_an_error_keeps_its_kind_and_place():
    wanted = pytest.raises(PlanError, match=r"^--micro-batch-size 0: must be at least 1$")
    with wanted as caught, spell_options_in_errors(OPTIONS):
        Batch(0)
    assert caught.traceback[-1].name == "whole"


def test_a_stop_says_how_to_go_on_in_options():
    with pytest.raises(Stopped) as caught, spell_options_in_errors({"model_dir"}):
        raise Stopped("interrupted; to resume: train again with model_dir=results/a", 15)
    assert str(caught.value) == "interrupted; to resume: train again with --model-dir results/a"
    assert caught.value.exit_status == 143


def test_a_command_names_options_where_the_engine_names_arguments(capsys):
    asked = ["--samples", "100", "--micro-batch-size", "8", "--global-batch-size", "3"]
    assert main(["plan", *asked]) == 2
    assert "error: --global-batch-size 3: micro batch 8" in capsys.readouterr().err
    assert main(["plan", "--samples", "781", "--num-epochs", "6", "--logs-per-epoch", "7"]) == 0
    assert "warning: --logs-per-epoch 7 would interrupt a weight update" in capsys.readouterr().err
    with pytest.raises(HotloopError, match=r"^global_size=3: micro batch 8"):
        Batch.of(8, global_size=3)


def test_the_rooms_below_the_commands_name_no_options_in_errors():
    """But for the engine's advice to give a command again, which is the default of an argument."""
    root = Path(hotloop.__file__).parent
    rooms = [path for room in ("engine", "layers", "mcmc", "data") for path in (root / room).glob("*.py")]
    raised = re.compile(r"raise \w*Error\((?:[^()]|\([^()]*\))*\)")
    found = [
        (path.name, text)
        for path in rooms
        for text in raised.findall(path.read_text())
        if re.search(r"""["' (]--[a-z]""", text)
    ]
    assert rooms and found == []

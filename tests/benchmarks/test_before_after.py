"""The comparison of two checkouts: its ratio, its refusals, and a run of the real commands."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import before_after  # noqa: E402


@pytest.fixture
def compare(monkeypatch, tmp_path, capsys):
    """Run it with invented speeds (a list a version, one for each counted round) and losses."""
    other = tmp_path / "other"
    (other / "src" / "hotloop").mkdir(parents=True)

    def start(before, after, losses=(1.0, 1.0)):
        speeds = {other: iter(before), before_after.HERE: iter(after)}
        loss = dict(zip(speeds, losses, strict=True))
        monkeypatch.setattr(
            before_after, "run", lambda side, *_: {"speed": next(speeds[side]), "loss": loss[side]}
        )
        words = [str(other), "--rounds", str(len(before)), "--cases", "resnet8"]
        monkeypatch.setattr(sys, "argv", ["before_after.py", *words])
        before_after.main()
        return capsys.readouterr().out.splitlines()[-1]

    return start


def test_the_ratio_is_after_over_before_with_the_range_of_the_rounds(compare):
    line = compare(before=[100, 200, 400], after=[110, 210, 396])
    assert line.split() == ["cnn", "resnet8", "b64", "200", "210", "1.050", "(0.990", "to", "1.100)"]


def test_more_than_two_percent_slower_is_a_failure(compare):
    with pytest.raises(SystemExit, match="more than 2 % slower: cnn resnet8 b64"):
        compare(before=[100, 100, 100], after=[97, 97.9, 120])
    compare(before=[100, 100, 100], after=[97, 98.1, 120])


def test_another_loss_is_other_work(compare):
    with pytest.raises(SystemExit, match="not the same work"):
        compare(before=[1], after=[1], losses=(2.0, 2.01))


@pytest.mark.parametrize(
    "words, message",
    [
        (["{here}"], "has no src/hotloop"),
        ([str(ROOT), "--rounds", "0"], "at least 1"),
        ([str(ROOT), "--cases", "transformer"], "no command of"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["before_after.py", *(each.format(here=tmp_path) for each in words)])
    with pytest.raises(SystemExit) as status:
        before_after.main()
    assert status.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "kernel dense --train --batch-size 4 --size 8 --steps 2",
        "cnn train --model-name cifar_resnet8 --dataset cifar10 --synthetic-data device --micro-batch-size 4 "
        "--weight-updates-per-epoch 2 --num-epochs 1 --seed 1 --no-validation",
    ],
)
def test_a_run_gives_its_speed_and_its_first_loss(words):
    first, again = (before_after.run(ROOT, words, "cpu") for _ in range(2))
    assert first["speed"] > 0
    assert first["loss"] == again["loss"] != 0

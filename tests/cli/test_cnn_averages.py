"""`hotloop cnn train --ema` with every augmentation: both weights validated, kept, resumed to the bit, exported."""

import json

import numpy as np
import pytest
from test_cnn_command import TOY, called, digits, events, stopped, weights  # noqa: F401 (digits is a fixture)

from hotloop.engine.checkpoint_folder import read_leaves, read_whole
from hotloop.engine.drive import Interrupted
from hotloop.families.cnn import export
from hotloop.families.cnn.sweep import read_figures

pytestmark = pytest.mark.usefixtures("signals_heard")
AVERAGED = [
    *TOY, "--seed", "5", "--run-name", "run", "--clean-dir", "False", "--ema", "0.95", "--mixup", "0.2",
    "--cutmix", "1", "--trivial-augment", "--random-erasing", "0.25", "--optimizer", "adamw",
    "--optimizer-params", "{}",
]  # fmt: skip


@pytest.fixture(scope="module")
def averaged(digits, tmp_path_factory):  # noqa: F811
    """A run that nothing disturbed: its result, what it said, its folder."""
    folder = tmp_path_factory.mktemp("runs")
    status, result, said = called(
        "train", *AVERAGED, "--dataset-path", digits, "--results-dir", folder, "--lr-schedule-params",
        "{initial_learning_rate: 0.001}",
    )  # fmt: skip
    assert status == 0, said
    return result, said, folder / "run"


def kept(run, step=18):
    folder = run / "checkpoints" / f"{step:08d}"
    return read_leaves(folder, read_whole(folder, step))


def test_both_weights_are_validated_and_the_averages_choose_the_best(averaged):
    result, said, run = averaged
    rows = result["validation"]
    assert [row["update"] for row in events(run, "validation")] == [6, 12, 18]
    assert all(
        0 <= row["ema_accuracy"] <= 1 and row["ema_loss"] > 0 and row["ema_top_5"] <= 1 for row in rows
    )
    assert all(row["ema_loss"] != row["validation_loss"] for row in rows)
    best = max(rows, key=lambda row: (row["ema_accuracy"], -row["step"]))
    assert result["best"] == best and read_figures(run).validation_accuracy == best["ema_accuracy"]
    assert f"ema accuracy: {100 * rows[-1]['ema_accuracy']:.2f} %" in said
    assert f"ema accuracy {100 * best['ema_accuracy']:.2f} %" in said
    leaves = kept(run)
    for name in [name for name in leaves if name.startswith("ema_")]:
        assert leaves[name].dtype == np.float32 and np.any(leaves[name] != leaves[name.removeprefix("ema_")])


def test_a_stopped_run_goes_on_to_the_same_averages_bit_for_bit(averaged, digits, tmp_path):  # noqa: F811
    _, _, whole = averaged
    words = [*AVERAGED, "--dataset-path", digits, "--results-dir", tmp_path]
    words += ["--lr-schedule-params", "{initial_learning_rate: 0.001}"]
    with pytest.raises(Interrupted):
        stopped(*words)
    status, result, said = called("train", *words, "--resume")
    assert status == 0, said
    found = weights(tmp_path / "run" / "checkpoints")
    assert any(name.startswith("ema_params") for name in found)
    assert any(name.startswith("ema_statistics") for name in found)
    assert found == weights(whole / "checkpoints")
    assert result["validation"] == averaged[0]["validation"]


def test_validating_again_finds_the_same(averaged):
    result, _, run = averaged
    status, again, said = called("validate", run)
    assert status == 0, said
    assert again["validation"] == result["validation"]


def test_averages_are_exported_unless_the_weights_themselves_are_asked_for(averaged):
    _, _, run = averaged
    leaves = kept(run)
    for asked, kind, name in (
        ("auto", "ema", "ema_params"),
        ("ema", "ema", "ema_params"),
        ("raw", "raw", "params"),
    ):
        found = export.from_run(run, weights=asked)
        assert found.source["weights"] == kind
        np.testing.assert_array_equal(
            found.weights["params"]["dense"]["kernel"], leaves[f"{name}/dense/kernel"]
        )
    best = max(events(run, "validation"), key=lambda each: (each["ema_accuracy"], -each["update"]))
    assert export.from_run(run, best=True).source["step"] == best["update"]


def test_predictions_are_of_the_weights_asked_for(averaged, tmp_path):
    pytest.importorskip("PIL")
    from PIL import Image

    Image.fromarray(np.full((28, 28), 99, np.uint8)).save(tmp_path / "grey.png")
    found = {}
    for words in ((), ("--weights", "ema"), ("--weights", "raw")):
        status, result, said = called("predict", averaged[2], tmp_path / "grey.png", *words)
        assert status == 0, said
        found[words] = json.dumps(result["predictions"])
    auto, ema, raw = found.values()
    assert auto == ema != raw


def test_weights_of_sixteen_bits_are_validated_beside_their_wide_averages(digits, tmp_path):  # noqa: F811
    words = [*AVERAGED, "--dataset-path", digits, "--results-dir", tmp_path, "--precision", "16.16"]
    status, result, said = called("train", *words, "--num-epochs", "2")
    assert status == 0, said
    assert [row["step"] for row in result["validation"]] == [6, 12]
    assert all({"validation_accuracy", "ema_accuracy"} <= row.keys() for row in result["validation"])


def test_there_are_no_averages_of_a_run_without_them(averaged, tmp_path):
    status, _, said = called(
        "train", "--synthetic-data", "host", "--dataset", "mnist", "--weight-updates-per-epoch", "1", "--validation",
        "False", "--results-dir", tmp_path, "--run-name", "plain", "--precision", "32.32",
    )  # fmt: skip
    assert status == 0, said
    status, _, said = called("predict", tmp_path / "plain", "none.png", "--weights", "ema")
    assert status == 2 and "--weights ema:" in said and "was trained without --ema" in said

"""What benchmarks/peers/cnn.py does before and after it times: equal programs pass, a wrong term does not."""

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hotloop.engine import optim
from hotloop.families.cnn import model, network
from hotloop.layers import losses, norm

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def peers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "peers"))
    monkeypatch.delitem(sys.modules, "cnn", raising=False)  # a folder of tests has this name, too


def small(train: bool = True):
    import cnn_checks

    return cnn_checks.Case("small", "cifar_resnet8", 4, train, "32.32", 2, side=16)


def test_both_have_all_parameters_in_the_same_places() -> None:
    import cnn_torch

    for name, side in (("cifar_resnet8", 32), ("cifar_resnet20", 32), ("resnet50", 224)):
        ours = network.build(name, (side, side, 3), 10)
        found = [node.parameters for node in ours.nodes if node.parameters]
        theirs = list(cnn_torch.layers(cnn_torch.build(name, 10)))
        assert len(found) == len(theirs)
        for values, layer in zip(found, theirs, strict=True):
            shapes = {n: cnn_torch.to_ours(t).shape for n, t in cnn_torch.leaves(layer) if n in values}
            assert shapes == {n: value.shape for n, value in values.items()}
            assert sum(p.numel() for p in layer.parameters()) == sum(map(np.prod, shapes.values()))


def test_one_update_of_ours_is_as_near_to_float64_as_torchs() -> None:
    import cnn_checks

    errors = cnn_checks.check(small(), "cpu")
    assert set(errors) == {"logits", "gradient", "statistics"}
    assert all(error["ours"] < 1e-4 for error in errors.values())


def test_logits_of_ours_are_as_near_to_float64_as_torchs() -> None:
    import cnn_checks

    assert cnn_checks.check(small(train=False), "cpu")["logits"]["ours"] < 1e-5


def test_torch_with_its_norms_folded_gives_the_same_logits() -> None:
    import cnn_checks
    import cnn_torch

    case = small(train=False)
    trainer = cnn_checks.peer(case, cnn_checks.started(case), "cpu")
    (whole,) = cnn_checks._their_logits(trainer)["logits"]
    trainer.fold_norms()
    assert not any(isinstance(module, cnn_torch.Norm) for module in trainer.model.modules())
    (folded,) = cnn_checks._their_logits(trainer)["logits"]
    np.testing.assert_allclose(folded, whole, rtol=1e-4, atol=1e-5)
    assert np.ptp(whole) > 0.1


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (losses, "cross_entropy", lambda logits, labels, smoothing=None: RIGHT_LOSS(logits, labels, 0.11)),
        (norm, "gradient_sums", lambda dy, x, mean, axes: (dy.sum(axes, keepdims=True), 0 * mean)),
        (model, "move_statistics", lambda moving, merged, momentum, counts: moving),
        (
            optim,
            "make",
            lambda name, params, **rest: RIGHT_OPTIMISER(name, params, **rest | {"l2": 0.0}),
        ),
    ],
    ids=["smoothing", "batch norm", "statistics", "L2"],
)
@pytest.mark.slow
def test_a_wrong_term_in_ours_is_refused(module: object, name: str, wrong: object) -> None:
    import cnn_checks

    with mock.patch.object(module, name, wrong), pytest.raises(SystemExit, match="not timed"):
        cnn_checks.check(small(), "cpu")


RIGHT_LOSS, RIGHT_OPTIMISER = losses.cross_entropy, optim.make


def test_a_comparison_reports_both_sides_and_a_missed_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import cnn

    file = tmp_path / "rows.json"
    arguments = ["--rounds", "2", "--seconds", "0.001", "--json", str(file)]
    impossible = cnn.replace(small(train=False), ratio_floor=1e9)
    with (
        mock.patch.dict(cnn.CASES, cpu=(impossible,)),
        mock.patch.object(cnn.cnn_checks, "check", lambda case, device: {}),
    ):
        assert cnn.main(arguments) == 1
    rows = {row["side"]: row for row in json.loads(file.read_text())["results"]}
    assert set(rows) == {"ours", "torch", "torch folded"}
    assert rows["ours"]["ratio"] == 1
    assert [side for side, row in rows.items() if row["missed"]] == ["torch"]
    assert rows["ours"]["native_calls"] is not None
    assert rows["ours"]["memory_bytes"] > 4 * 78_000
    for row in rows.values():
        assert row["images_per_second"] == pytest.approx(4e3 / row["milliseconds"])
    assert "MISSED" in capsys.readouterr().out


def test_unknown_cases_are_refused_by_name() -> None:
    import cnn

    with pytest.raises(SystemExit, match="no resnet9; there are resnet8-b8"):
        cnn.main(["--cases", "resnet9"])


@pytest.mark.slow
def test_the_cases_of_a_gpu_run_in_small_each_in_its_process() -> None:
    import cnn

    names = "resnet50-infer-b256,resnet8-b64"
    arguments = ["--tiny", "--no-compile", "--rounds", "1", "--seconds", "0.01"]
    cases = cnn.chosen(cnn.parsed([*arguments, "--cases", names]))
    rows = cnn.in_processes(cases, arguments)
    assert [(row["case"], row["side"]) for row in rows] == [
        *(("resnet50-infer-b256", side) for side in ("ours", "torch", "torch folded")),
        *(("resnet8-b64", side) for side in ("ours", "torch")),
    ]

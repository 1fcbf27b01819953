"""The demo's own course, with the measuring replaced: `make demo` runs the whole of it."""

import json
from contextlib import contextmanager

import pytest

from demo_results import RESULTS
from hotloop.cli import demo
from hotloop.cli.command import Context
from hotloop.cli.main import main
from hotloop.families.cnn import demo as cnn
from hotloop.families.estimator.cifar import program as estimator
from hotloop.families.kernels import bench, hmc
from hotloop.families.recommender import demo as recommender
from hotloop.families.vcd import demo as vcd

PARTS = ("kernels", "hot_loop", "losses", "hmc", "histogram", "vcd", "recommender", "cnn", "estimator")


def test_the_demo_writes_a_page_and_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "measure", lambda device, context: {key: RESULTS[key] for key in PARTS})
    assert main(["demo", "--output", str(tmp_path / "out"), "--json"]) == 0
    page = tmp_path / "out" / "index.html"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["page"] == str(page)
    assert "lstm training" in page.read_text()
    assert json.loads((tmp_path / "out" / "results.json").read_text())["losses"] == [4.0, 3.0, 2.0]


def test_an_unwritable_folder_is_found_out_before_the_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "measure", lambda device, context: 1 / 0)
    assert main(["demo", "--output", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch):
    """The figures of every part, made up."""
    of_hmc = {**RESULTS["hmc"], "acceptance": 0.78}
    monkeypatch.setattr(bench, "run", lambda config, device, console: RESULTS["kernels"]["dense"])
    monkeypatch.setattr(hmc, "run", lambda config, device, console: of_hmc)
    monkeypatch.setattr(demo, "loss_curve", lambda device: RESULTS["losses"])
    monkeypatch.setattr(demo, "sample_histogram", lambda device: RESULTS["histogram"])
    for name, family in {"vcd": vcd, "recommender": recommender, "cnn": cnn, "estimator": estimator}.items():
        monkeypatch.setattr(family, "demo_run", lambda *console, name=name: RESULTS[name])


def test_every_part_is_measured_and_told_while_the_bar_reaches_its_end(measured, monkeypatch, capsys):
    steps = []

    @contextmanager
    def progress(self, description, total=None):
        steps.append(total)
        yield type("Bar", (), {"update": lambda *_: None, "advance": lambda *_: steps.append(1)})()

    monkeypatch.setattr(Context, "progress", progress)
    results = demo.measure(None, Context())
    assert list(results) == list(PARTS)
    assert sum(steps[1:]) == steps[0]
    out = capsys.readouterr().out
    assert "lstm-multi training           1,000 items/s       10.0 us   25.0 % of the roofline\n" in out
    assert "RNN training: 1,000 updates/s one a call, 1,000 1000 a call\n" in out
    assert (
        "RNN training: loss 4.000 -> 2.000, means of the first and the last of 3 rounds of its batches\n"
        in out
    )
    assert "vcd on drawn digits: ELBO -500 -> -200 nats; log p(x, z) -205 at" in out
    assert "RMSE 2.80 -> 0.900 stars (biases 0.930), 9,000 users/s\n" in out
    assert "accuracy 20 % -> 87 % on digits not seen, 400 images/s\n" in out
    assert "accuracy 41 % after 120 updates (chance 10 %), 500 images/s\n" in out

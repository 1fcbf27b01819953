"""The demo's own course, with the measuring replaced: `make demo` runs the whole of it."""

import json

from demo_results import RESULTS
from hotloop.cli import demo
from hotloop.cli.main import main


def test_the_demo_writes_a_page_and_says_where(tmp_path, monkeypatch, capsys):
    parts = {
        key: RESULTS[key]
        for key in (
            "kernels",
            "hot_loop",
            "losses",
            "hmc",
            "histogram",
            "vcd",
            "recommender",
            "cnn",
            "estimator",
        )
    }
    monkeypatch.setattr(demo, "measure", lambda device, context: parts)
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

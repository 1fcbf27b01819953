"""`hotloop bench peers` with programs that only pretend to compare: table, file, floors, and what can be missing."""

import json
import re

import pytest

from hotloop.bench import peers
from hotloop.bench.report import gather_sources
from hotloop.cli.bench import ALL
from hotloop.cli.main import main

FAKE = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("said by the program", json.dumps(options))
rows = json.loads({rows!r})
document = {{"date": "2026-01-02", "environment": {{"platform": "cpu", "cores": 2}}, "torch": "2.6", "results": rows}}
with open(options[{save!r}], "w") as file:
    json.dump(document | {more!r}, file)
sys.exit({status})
"""
OURS = {"case": "a", "side": "ours", "milliseconds": 2.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
THEIRS = {
    "case": "a",
    "side": "torch",
    "milliseconds": 3.0,
    "ratio": 1.5,
    "ratio_low": 1.25,
    "ratio_high": 1.75,
}
KERNEL = {"case": "lstm", "ours_us": 1.0, "torch_us": 3.0, "ratio": 3.0, "ratio_low": 2.0, "ratio_high": 4.0}


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """A source tree without programs, and the folder to work in."""
    folder = tmp_path / "peers"
    folder.mkdir()
    monkeypatch.setattr(peers, "FOLDER", folder)
    monkeypatch.setattr(peers, "PACKAGES", dict.fromkeys(peers.PACKAGES, ("json",)))
    monkeypatch.setattr(peers, "measure_load", lambda: 0.1)
    monkeypatch.chdir(tmp_path)
    return folder


def program(folder, family, rows, status=0, **more):
    save = peers.SAVE.get(family, "--json")
    text = FAKE.format(rows=json.dumps(rows), save=save, status=status, more=more)
    (folder / f"{family}.py").write_text(text)


def compared(*words):
    """The status, whichever way it ends."""
    try:
        return main(["bench", "peers", "--device", "cpu", *words])
    except SystemExit as end:
        return end.code


def saved(folder):
    (file,) = folder.glob("*_peers_cpu*.json")
    return file, json.loads(file.read_text())


def test_all_families_come_to_one_table_and_one_dated_file(tree, capfd, tmp_path):
    program(tree, "kernels", [KERNEL | {"floor": 2.5}], load_before="0.10")
    program(
        tree, "vcd", [OURS, THEIRS | {"floor": None, "missed": False}], blackjax="1.2", load_before="0.20"
    )
    assert compared("--family", "kernels", "vcd") == 0
    shown = capfd.readouterr().out
    assert "said by the program" in shown
    assert re.search(r"kernels +lstm +torch +3\.00 +2\.00 to 4\.00 +2\.5\n", shown)
    assert re.search(r"vcd +a +torch +1\.50 +1\.25 to 1\.75 +-\n", shown)
    file, document = saved(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_peers_cpu\.json", file.name)
    assert [row["family"] for row in document["results"]] == ["kernels", "vcd", "vcd"]
    assert document["torch"] == "2.6"
    assert document["blackjax"] == "1.2"
    assert document["load_before"] == {"kernels": "0.10", "vcd": "0.20"}
    assert document["environment"]["cores"] == 2


def test_the_report_reads_the_file(tree, tmp_path):
    program(tree, "vcd", [OURS, THEIRS])
    program(tree, "kernels", [KERNEL])
    compared("--family", "vcd,kernels", "-o", "here.json")
    assert {(row.family, row.case, row.theirs) for row in gather_sources([tmp_path / "here.json"]).peers} == {
        ("vcd", "a", 3.0),
        ("kernels", "lstm", 3.0),
    }


def test_options_reach_the_programs_under_their_own_names(tree, capfd):
    program(tree, "kernels", [KERNEL])
    program(tree, "cnn", [OURS, THEIRS])
    assert compared("--family", "kernels", "cnn", "--rounds", "3", "--seconds", "0.5") == 0
    said = re.findall(r"said by the program (.*)", capfd.readouterr().out)
    for line, save in zip(said, ("--save", "--json"), strict=True):
        options = json.loads(line)
        assert options.pop(save).endswith(".json")
        assert options == {"--device": "cpu", "--rounds": "3", "--seconds": "0.5"}


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("kernels", [KERNEL | {"floor": 3.1}]),
        ("vcd", [OURS, THEIRS | {"floor": 1.6, "missed": True}]),
        ("cnn", [OURS | {"floor": 7000, "missed": True}, THEIRS | {"floor": None, "missed": False}]),
    ],
)
def test_a_missed_floor_is_shown_and_gives_status_1(tree, capfd, family, rows):
    program(tree, family, rows, status=1)
    assert compared("--family", family) == 1
    shown = capfd.readouterr().out
    assert shown.count("MISSED") == 1
    assert "floors missed: 1, families failed: 0" in shown


def test_a_floor_of_our_own_speed_is_not_shown_as_a_ratio(tree, capfd):
    program(tree, "cnn", [OURS | {"floor": 7000, "missed": False}, THEIRS])
    assert compared("--family", "cnn") == 0
    assert re.search(r"cnn +a +ours +- +- +7000 a second\n", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit('they do not compute the same')", "left no results (status 1)"),
        ("import os; os.kill(os.getpid(), 9)", "left no results (status -9)"),
        ("import sys; open(sys.argv[-1], 'w').write('{\"results\": [')", "left no results (status 0)"),
        ("import sys; open(sys.argv[-1], 'w').write('[]')", "left no results (status 0)"),
    ],
)
def test_a_program_that_fails_is_told_and_the_others_still_run(tree, capfd, tmp_path, text, said):
    (tree / "kernels.py").write_text(text)
    program(tree, "vcd", [OURS, THEIRS])
    assert compared("--family", "kernels", "vcd") == 1
    shown = capfd.readouterr()
    assert f"kernels: {said}" in shown.err
    assert "vcd" in shown.out
    document = saved(tmp_path)[1]
    assert document["failed"] == {"kernels": said}
    assert len(document["results"]) == 2


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        ([OURS, THEIRS | {"floor": 1.0, "missed": False}], 3, "status 3, and not for a floor"),
        ([OURS, THEIRS, THEIRS | {"ratio": float("nan")}], 0, "not a number"),
    ],
)
def test_results_that_cannot_be_trusted_fail_their_family(tree, capfd, rows, status, said):
    program(tree, "estimator", rows, status)
    assert compared("--family", "estimator") == 1
    assert said in capfd.readouterr().err


def test_json_leaves_standard_output_to_the_result(tree, capfd):
    program(tree, "kernels", [KERNEL | {"floor": 3.1}], status=1)
    assert compared("--family", "kernels", "--json") == 1
    shown = capfd.readouterr()
    result = json.loads(shown.out)
    assert result["missed"] == 1
    assert result["rows"][0]["case"] == "lstm"
    assert "said by the program" in shown.err


def test_a_second_file_of_a_day_does_not_replace_the_first(tree, tmp_path):
    program(tree, "kernels", [KERNEL])
    compared("--family", "kernels")
    compared("--family", "kernels")
    assert len(list(tmp_path.glob("*_peers_cpu*.json"))) == 2


def test_a_busy_machine_is_told_and_recorded(tree, capfd, monkeypatch, tmp_path):
    program(tree, "kernels", [KERNEL])
    monkeypatch.setattr(peers, "measure_load", lambda: 1.5)
    assert compared("--family", "kernels") == 0
    assert "1.5 cores" in capfd.readouterr().err
    assert saved(tmp_path)[1]["load_at_start"] == 1.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--family", "vcd"], "vcd.py: not there"),
        (["--only-accelerator", "--family", "kernels"], "only a CPU"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(tree, capfd, words, said):
    program(tree, "kernels", [KERNEL])
    assert compared(*words) == 2
    shown = capfd.readouterr()
    assert said in shown.err
    assert "said by the program" not in shown.out


def test_a_missing_package_names_the_extra(tree, capfd, monkeypatch):
    monkeypatch.setattr(peers, "PACKAGES", {"kernels": ("no_such_package",)})
    assert compared("--family", "kernels") == 2
    assert (
        "the comparison of kernels needs no_such_package: pip install 'hotloop[peers]'"
        in capfd.readouterr().err
    )


def test_an_installation_without_the_source_tree_is_told_so_in_one_line(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "FOLDER", tmp_path / "none")
    assert compared() == 2
    shown = capfd.readouterr().err
    assert "benchmarks/peers" in shown
    assert shown.count("\n") == 1


def test_every_program_of_the_tree_is_known_and_has_the_options_that_it_is_given():
    programs = {path.stem for path in peers.FOLDER.glob("*.py") if "__main__" in path.read_text()}
    # The other sides of benchmarks/serving_peers.py and serving_load.py, which start them.
    programs -= {"serving_servers", "serving_raw"}
    programs -= {"hmc"}  # samples, not seconds, are its measure, and its peers take half an hour
    assert programs == set(peers.PACKAGES) == set(ALL)
    for family in ALL:
        text = (peers.FOLDER / f"{family}.py").read_text()
        for option in ("--device", "--rounds", "--seconds", peers.SAVE.get(family, "--json")):
            assert f'"{option}"' in text


@pytest.mark.parametrize(
    ("said", "device"), [("cpu", "cpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("tpu", "cpu")]
)
def test_the_device_is_what_jax_says_in_a_process_of_its_own(monkeypatch, said, device):
    monkeypatch.setattr(peers, "ASK", f"print('a warning'); print({said!r})")
    assert peers.find_device() == device


def test_the_load_is_of_this_moment(monkeypatch, tmp_path):
    ticks = iter((100, 200))
    monkeypatch.setattr(peers, "Path", lambda _: tmp_path / "stat")
    monkeypatch.setattr(peers, "LOOK", 0.0)
    clock = iter((0.0, 0.5))
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(clock))

    def read_text(_):
        return f"cpu {next(ticks)} 0 0 900 7 0 0 0 0 0\ncpu0 1\n"

    monkeypatch.setattr(type(tmp_path), "read_text", read_text)
    assert peers.measure_load() == 100 / peers.os.sysconf("SC_CLK_TCK") / 0.5

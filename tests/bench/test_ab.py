"""`hotloop bench compare --ab`: two programs, or two commits, in turns."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from fake_programs import RATE, code

from hotloop.bench.ab import match_pairs
from hotloop.bench.benchmark import select
from hotloop.bench.report import build_report, gather_sources
from hotloop.bench.spec import load_benchmarks
from hotloop.cli.bench_compare import COMMAND
from hotloop.cli.main import execute
from hotloop.engine.interrupt import Stopped
from hotloop.errors import OptionError, RunError


@pytest.fixture(autouse=True)
def no_readings(monkeypatch):
    monkeypatch.setattr("hotloop.bench.measure.read_paces", lambda: [1.0])


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def go(*words):
        status = 0
        try:
            execute(COMMAND, "hotloop bench compare", [*map(str, words), "--json"])
        except SystemExit as leaving:
            status = leaving.code
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return go


def spec(file, **entries):
    made = {
        name: one if isinstance(one, dict) else {"cmd": one, "data": RATE} for name, one in entries.items()
    }
    file.write_text(yaml.safe_dump(made, sort_keys=False))
    return file


def prints(rate, name=""):
    return code(f"open('order', 'a').write('{name}'); print('rate {rate}')")


def words(found):
    return {(row["variant"], row["metric"]): row["word"] for row in found["rows"]}


def test_the_verdict_comes_from_pairs_and_slow_can_be_a_status(run, tmp_path):
    a, b = spec(tmp_path / "a.yml", x=prints(100)), spec(tmp_path / "b.yml", x=prints(90))
    status, found = run("--ab", a, b, "--repeats", 4, "--log-dir", "log", "--fail-on", "slow")
    assert status == 1
    assert words(found) == {("x", "throughput"): "SLOW"}
    verdict = found["rows"][0]["verdict"]
    assert (verdict["pairs"], verdict["ratio"]) == (4, pytest.approx(0.9))
    assert found["log"] == str(tmp_path / "log")
    status, again = run(tmp_path / "log/A", tmp_path / "log/B")
    assert (status, again["rows"]) == (0, found["rows"])


def test_each_pair_runs_one_after_the_other_in_an_order_drawn_by_lot(run, tmp_path):
    file = spec(tmp_path / "f.yml", one=prints(1, "A"), other=prints(1, "B"))
    orders = []
    for place, seed in enumerate((0, 0, 1)):
        run(
            "--ab",
            f"{file}:one",
            f"{file}:other",
            "--repeats",
            5,
            "--warm-up",
            1,
            "--seed",
            seed,
            "--log-dir",
            place,
        )
        orders.append((tmp_path / "order").read_text())
        (tmp_path / "order").unlink()
    pairs = {order[place : place + 2] for order in orders for place in range(0, 12, 2)}
    assert pairs == {"AB", "BA"}
    assert orders[0] == orders[1] != orders[2]
    assert len(orders[0]) == 12


def test_a_page_shows_the_verdicts_of_a_session(run, tmp_path):
    file = spec(tmp_path / "f.yml", one=prints(1), other=prints(2))
    run("--ab", f"{file}:one", f"{file}:other", "--repeats", 3, "--warm-up", 0, "--log-dir", "log")
    html = build_report(gather_sources([tmp_path / "log"])).render()
    assert "In turns" in html
    assert "one → other" in html
    assert "FAST" in html


def variants(folder, name, **entries):
    return select(load_benchmarks([spec(folder / name, **entries)]))


def entry(**parameters):
    return {"cmd": "echo rate 1", "data": RATE, "parameters": parameters} if parameters else "echo rate 1"


def test_variants_are_matched_by_name_and_those_of_two_benchmarks_by_parameters(tmp_path):
    def names(a, b):
        return [tuple(one.variant.name for one in pair) for pair in match_pairs(a, b)]

    two = variants(tmp_path, "a.yml", x=entry(), y=entry())
    assert names(two, variants(tmp_path, "b.yml", y=entry(), x=entry())) == [("x", "x"), ("y", "y")]
    old, new = (variants(tmp_path, f"{name}.yml", **{name: entry(n=[1, 2])}) for name in ("old", "new"))
    assert names(old, new) == [("old_n_1", "new_n_1"), ("old_n_2", "new_n_2")]
    with pytest.raises(OptionError, match="only A has y"):
        match_pairs(two, variants(tmp_path, "c.yml", x=entry(), z=entry()))
    with pytest.raises(OptionError, match="no variant of B can run"):
        match_pairs(two, variants(tmp_path, "d.yml", x={"cmd": "echo", "data": RATE, "kind": "convergence"}))


def test_a_variant_that_fails_is_told_and_the_others_are_compared(run, tmp_path, capsys):
    broken = code("import sys; sys.exit(3)")
    a, b = (spec(tmp_path / f"{name}.yml", x=x, y=prints(1)) for name, x in (("a", prints(1)), ("b", broken)))
    status, found = run("--ab", a, b, "--repeats", 3, "--warm-up", 0, "--log-dir", "log")
    assert status == 1
    assert words(found)["y", "throughput"] == "SAME"
    assert found["broken"] == {"x": "B failed: ended with status 3"}
    with pytest.raises(RunError, match="nothing to compare: x: B failed: ended with status 3"):
        run("--ab", f"{a}:x", f"{b}:x", "--warm-up", 1, "--log-dir", "other")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits of a package whose rate is 100 and then 80; the benchmark file is in neither."""
    for name, text in {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}.items():
        monkeypatch.setenv(name, text)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "n")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "n@example.org")
    top = tmp_path / "repository"
    (top / "src").mkdir(parents=True)
    git(top, "init", "--quiet")
    for rate in (100, 80):
        (top / "src/fast.py").write_text(f"RATE = {rate}\n")
        git(top, "add", ".")
        git(top, "commit", "--quiet", "-m", f"{rate}")
    (top / "src/fast.py").write_text("RATE = 1\n")  # what is not committed does not count
    (top / "benchmarks").mkdir()
    spec(top / "benchmarks/b.yml", x=code("import fast; print('rate', fast.RATE)"))
    return top


def git(top, *words):
    done = subprocess.run(["git", "-C", str(top), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_two_commits_run_in_work_trees_of_their_own_that_are_gone_afterwards(
    run, repository, tmp_path, monkeypatch
):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    before = git(repository, "status", "--porcelain")
    file = repository / "benchmarks/b.yml"
    status, found = run(
        "--ab", "HEAD~1", "HEAD", "--spec", file, "--repeats", 4, "--warm-up", 0, "--log-dir", "log"
    )
    assert (status, words(found)) == (0, {("x", "throughput"): "SLOW"})
    assert found["rows"][0]["verdict"]["ratio"] == pytest.approx(0.8)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "status", "--porcelain") == before
    commits = [
        next(iter(json.loads((tmp_path / "log" / side / "provenance.json").read_text()).values()))["commit"]
        for side in ("A", "B")
    ]
    assert commits == [git(repository, "rev-parse", name) for name in ("HEAD~1", "HEAD")]


@pytest.mark.parametrize(
    ("commits", "more", "said"),
    [
        (("HEAD", "none"), (), "--ab none: is no commit"),
        (("HEAD~1", "HEAD"), ("--benchmark", "z"), "matches nothing"),
    ],
)
def test_work_trees_are_gone_after_an_error_too(run, repository, tmp_path, monkeypatch, commits, more, said):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.raises(OptionError, match=said):
        run("--ab", *commits, "--spec", repository / "benchmarks/b.yml", *more)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not list(Path().glob("ab_*"))


def test_a_request_to_end_leaves_the_results_so_far_and_no_work_tree(run, repository, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    ask = "import os, signal; print('rate 1'); os.path.exists('second') and os.kill(os.getppid(), signal.SIGTERM)"
    file = spec(repository / "benchmarks/b.yml", x=code(f"{ask}; open('second', 'w')"))
    with pytest.raises(Stopped):
        run("--ab", "HEAD", "HEAD", "--spec", file, "--warm-up", 0, "--log-dir", "log")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    lines = [(tmp_path / "log" / side / "results.jsonl").read_text().splitlines() for side in "AB"]
    assert [len(each) for each in lines] in ([1, 1], [2, 1], [1, 2])
    assert all((tmp_path / "log" / side / "benchmark_results.json").exists() for side in "AB")

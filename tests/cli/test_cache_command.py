"""`hotloop cache`: shows, limits and clears."""

import json

import pytest

from hotloop.cli.main import main
from hotloop.engine.device import ProgramStore


@pytest.fixture
def programs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    monkeypatch.delenv("HOTLOOP_CACHE_LIMIT", raising=False)
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in "abc":
        ProgramStore(folder, None).put(name, bytes(1000))
    return folder


def answer(capsys, *words):
    assert main(["cache", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_shows_folder_entries_size_and_limit(capsys, programs):
    size = sum(path.stat().st_size for path in programs.iterdir())
    shown = answer(capsys)
    assert shown == {"folder": str(programs.parent), "entries": 3, "bytes": size, "limit": 4_000_000_000}
    assert main(["cache"]) == 0
    assert "programs  3, 3.1 kB\nlimit     4.0 GB\n" in capsys.readouterr().out


def test_a_limit_is_remembered_and_evicts_at_once(capsys, programs):
    assert answer(capsys, "limit", "2100")["entries"] == 2
    assert answer(capsys)["limit"] == 2100
    assert answer(capsys, "limit", "none")["limit"] is None


@pytest.mark.parametrize("size", ["2XB", "-1", "", "two"])
def test_a_size_that_is_none_is_refused(capsys, programs, size):
    assert main(["cache", "limit", size]) == 2
    assert "must be a size such as 500MB or 2GB" in capsys.readouterr().err


def test_clear_deletes_programs_alone_and_says_what_it_freed(capsys, programs):
    (programs / "mine.txt").write_text("not a program")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "deleted 3 programs, freed 3.1 kB\n"
    assert [path.name for path in programs.iterdir()] == ["mine.txt"]


def test_off_means_no_cache(capsys, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE", "off")
    assert answer(capsys)["folder"] is None
    assert answer(capsys, "clear")["freed"] == 0
    assert main(["cache", "limit", "1GB"]) == 2

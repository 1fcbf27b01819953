"""`hotloop data`: tables for people, one JSON object for programs, one line and status 2 for what is wrong."""

import hashlib
import io
import json
import subprocess
import sys
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hotloop.cli.main import main
from hotloop.data import catalogue
from hotloop.data.catalogue import Download, KnownFile, KnownSet

DATA = b"1\t2\t3\t4\n" * 50
FILE = "u.data"


def checksum(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A catalogue of one small set on a server of this machine, and one that cannot be fetched."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(f"toy/{FILE}", DATA)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "toy.zip").write_bytes(archive.getvalue())
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *args: Quiet(*args, directory=str(tmp_path / "web"))
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    mirrors = (f"http://127.0.0.1:{server.server_port}/",)
    item = Download("toy.zip", mirrors, len(archive.getvalue()), checksum(archive.getvalue()))
    file = KnownFile(FILE, len(DATA), checksum(DATA), item, member=f"toy/{FILE}")
    known = KnownSet("toy", "toy ratings", "none", ("toy",), (file,))
    secret = KnownSet("secret", "a secret", "private terms", ("secret",), expected="secret.bin")
    monkeypatch.setattr(catalogue, "SETS", {"toy": known, "secret": secret})
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    for name in ("HOTLOOP_DATA", "HOTLOOP_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


def run(capsys, *words) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys, *words) -> tuple[int, dict, str]:
    status, out, err = run(capsys, *words, "--json")
    assert len(out.splitlines()) == 1
    return status, json.loads(out), err


def test_list_shows_each_set_where_it_is_and_what_to_do_about_the_others(toy, capsys):
    status, out, _ = run(capsys, "data", "list")
    assert status == 0
    header, first, second = out.splitlines()
    assert header.split() == ["name", "size", "where", "verified", "what", "licence"]
    assert first.split("  ")[0] == "toy"
    assert "not here" in first
    assert "toy ratings" in first
    assert "not fetched: licence; give a path" in second
    assert "private terms" in second
    run(capsys, "data", "fetch", "toy")
    _, out, _ = run(capsys, "data", "list")
    assert f"{toy / 'home/hotloop/toy'}  yes" in out


def test_list_as_json_gives_objects(toy, capsys):
    status, result, err = run_json(capsys, "data", "list")
    assert status == 0
    assert [entry["name"] for entry in result["sets"]] == ["toy", "secret"]
    assert result["sets"][0] == {
        "name": "toy",
        "what": "toy ratings",
        "bytes": len(DATA),
        "where": None,
        "verified": None,
        "licence": "none",
        "expected": [FILE],
    }
    assert result["sets"][1]["expected"] == "secret.bin"
    assert "toy ratings" in err


def test_list_counts_what_is_bad_or_missing(toy, capsys):
    (toy / "mine/toy").mkdir(parents=True)
    (toy / "mine/toy" / FILE).write_bytes(b"no")
    _, result, _ = run_json(capsys, "data", "list", "--data-dir", toy / "mine")
    assert result["sets"][0]["verified"] == "1 BAD"


def test_fetch_brings_the_set_and_then_says_that_it_is_there(toy, capsys):
    status, out, _ = run(capsys, "data", "fetch", "toy", "--data-dir", toy / "new")
    assert (status, out) == (0, f"toy: fetched to {toy / 'new/toy'}, verified\n")
    assert (toy / "new/toy" / FILE).read_bytes() == DATA
    status, result, _ = run_json(capsys, "data", "fetch", "toy", "--data-dir", toy / "new")
    assert (status, result["fetched"], result["where"]) == (0, False, str(toy / "new/toy"))
    assert result["files"][0]["status"] == "OK"


def test_verify_shows_size_and_checksum_of_each_file(toy, capsys):
    run(capsys, "data", "fetch", "toy")
    status, out, _ = run(capsys, "data", "verify", "toy")
    assert status == 0
    assert out.splitlines()[1].split() == [
        str(toy / "home/hotloop/toy" / FILE),
        str(len(DATA)),
        "OK",
        checksum(DATA),
    ]
    status, result, _ = run_json(capsys, "data", "verify", "toy")
    assert (status, result["files"][0]["checksum"]) == (0, checksum(DATA))


def one_error(status: int, err: str) -> str:
    assert status == 2
    lines = [line for line in err.splitlines() if line.startswith("hotloop: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0]


def test_verify_of_a_bad_or_missing_set_is_status_2(toy, capsys):
    status, _, err = run(capsys, "data", "verify", "toy")
    assert "toy: not on this machine; `hotloop data fetch toy` brings it" in one_error(status, err)
    run(capsys, "data", "fetch", "toy")
    (toy / "home/hotloop/toy" / FILE).write_bytes(DATA[:-1] + b"?")
    status, out, err = run(capsys, "data", "verify", "toy")
    assert "1 BAD; first u.data (sha256:" in one_error(status, err)
    assert " BAD " in out
    status, result, _ = run_json(capsys, "data", "verify", "toy")
    assert (status, list(result)) == (2, ["error"])


def test_fetch_without_network_is_one_line_and_status_2(toy, capsys, monkeypatch):
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    status, _, err = run(capsys, "data", "fetch", "toy")
    assert f"put toy.zip into {toy / 'home/hotloop/toy'} by hand" in one_error(status, err)
    assert not (toy / "home").exists()


def test_fetch_of_a_wrong_file_is_one_line_and_leaves_nothing(toy, capsys):
    archive = toy / "web/toy.zip"
    archive.write_bytes(archive.read_bytes()[:-1] + b"?")
    status, _, err = run(capsys, "data", "fetch", "toy")
    assert "wrong checksum, file deleted" in one_error(status, err)
    assert list((toy / "home/hotloop/toy").iterdir()) == []


def test_fetch_of_a_set_with_a_licence_says_what_to_bring(toy, capsys):
    status, _, err = run(capsys, "data", "fetch", "secret")
    assert "secret: not fetched (private terms)" in one_error(status, err)
    status, _, err = run(capsys, "data", "verify", "secret")
    assert "secret: has no published checksums" in one_error(status, err)


@pytest.mark.parametrize("command", [["list"], ["verify", "toy"]])
def test_a_folder_that_is_missing_or_a_file_or_closed_is_one_line(toy, capsys, monkeypatch, command):
    status, _, err = run(capsys, "data", *command, "--data-dir", toy / "none")
    assert "none: no such folder" in one_error(status, err)
    status, _, err = run(capsys, "data", *command, "--data-dir", toy / "web/toy.zip")
    assert "toy.zip: is a file, not a folder" in one_error(status, err)

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)  # chmod would not stop root
    status, _, err = run(capsys, "data", *command, "--data-dir", toy)
    assert "permission denied" in one_error(status, err)


def test_an_unknown_name_suggests_the_right_one(toy, capsys):
    status, _, err = run(capsys, "data", "fetch", "toys")
    assert "toys: no such data set; did you mean toy?" in one_error(status, err)


def test_help_needs_neither_numpy_nor_jax():
    code = (
        "import sys; from hotloop.cli.main import main; main(['data', 'fetch', '--help']);"
        "sys.exit(bool({'numpy', 'jax'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
    )

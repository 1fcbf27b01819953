"""Fetching: from a server on this machine, with every way in which a server and an archive can be bad."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
import time
import zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hotloop.data import fetch as downloads
from hotloop.data.catalogue import Download, KnownFile, KnownSet
from hotloop.data.fetch import FetchError, download, fetch, probe_mirrors, unpack
from hotloop.errors import DataError

CONTENT = bytes(range(256)) * 4000
NAME = "numbers.bin"


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


ITEM = Download(NAME, (), len(CONTENT), sha256(CONTENT))


class Handler(BaseHTTPRequestHandler):
    """The first part of a path is how the server behaves."""

    def do_GET(self):
        how = self.path.split("/")[1]
        self.server.asked[how] += 1
        self.server.ranges.append(self.headers.get("Range"))
        getattr(self, f"serve_{how}")(self.server.content)

    def send(self, data, status=200, claimed=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if claimed is None else claimed))
        self.end_headers()
        self.wfile.write(data)

    def serve_good(self, content):
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            self.send_error(416)
        else:
            self.send(content[start:], 206 if start else 200)

    def serve_plain(self, content):
        self.send(content)

    def serve_wrong(self, content):
        self.send(content[:-1] + b"?")

    def serve_missing(self, content):
        self.send_error(404)

    def serve_cut(self, content):
        """Breaks off in the middle, the first time only."""
        if self.server.asked["cut"] > 1:
            self.serve_good(content)
        else:
            self.send(content[: len(content) // 2], claimed=len(content))

    def serve_cuts(self, content):
        self.send(content[: len(content) // 2], claimed=len(content))

    def serve_endless(self, content):
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(200):
                self.wfile.write(content)
        except OSError:
            self.server.stopped.set()

    def serve_silent(self, content):
        self.server.released.wait(20)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.content, server.asked, server.ranges = CONTENT, Counter(), []
    server.released, server.stopped = threading.Event(), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_data_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    for name in ("HOTLOOP_DATA", "HOTLOOP_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def get(server, target, *behaviours):
    seen = []
    download(ITEM, target, [f"{server.url}/{how}/" for how in behaviours], seen.append)
    return seen


def test_a_download_has_its_name_only_when_it_is_whole_and_right(server, tmp_path):
    seen = get(server, tmp_path / NAME, "good")
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert names(tmp_path) == [NAME]
    assert sum(seen) == len(CONTENT)
    assert min(seen) >= 0


def test_wrong_checksum_is_deleted_and_said_in_one_line(server, tmp_path):
    with pytest.raises(FetchError) as caught:
        get(server, tmp_path / NAME, "wrong")
    text = str(caught.value)
    assert "\n" not in text
    assert f"{server.url}/wrong/{NAME}: wrong checksum, file deleted" in text
    assert ITEM.checksum in text
    assert names(tmp_path) == []
    assert server.asked["wrong"] == 1


def test_the_next_mirror_is_asked_when_one_fails(server, tmp_path):
    get(server, tmp_path / NAME, "missing", "wrong", "good")
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked == {"missing": 1, "wrong": 1, "good": 1}


def test_a_missing_file_is_said_with_its_address(server, tmp_path):
    with pytest.raises(FetchError, match=f"/missing/{NAME}: the server answers 404 Not Found"):
        get(server, tmp_path / NAME, "missing")
    assert names(tmp_path) == []


def test_a_download_that_breaks_off_is_taken_up_where_it_broke(server, tmp_path):
    get(server, tmp_path / NAME, "cut")
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_download_that_always_breaks_off_keeps_its_part_for_the_next_run(server, tmp_path):
    with pytest.raises(FetchError, match="the connection ended after 512,000 of 1,024,000 bytes"):
        get(server, tmp_path / NAME, "cuts")
    assert names(tmp_path) == [f".{NAME}.part"]
    get(server, tmp_path / NAME, "good")
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=512000-"


@pytest.mark.parametrize("left", [b"rubbish", b"x" * len(CONTENT), b"x" * (len(CONTENT) + 5)])
@pytest.mark.parametrize("how", ["good", "plain"])
def test_a_wrong_part_from_an_earlier_run_is_replaced(server, tmp_path, left, how):
    (tmp_path / f".{NAME}.part").write_bytes(left)
    get(server, tmp_path / NAME, how)
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_server_that_sends_too_much_is_cut_short(server, tmp_path):
    with pytest.raises(FetchError, match="wrong checksum"):
        get(server, tmp_path / NAME, "endless")
    assert names(tmp_path) == []
    assert server.stopped.wait(5)


def test_a_silent_server_is_left_after_the_time_limit(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "READ_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(FetchError, match=r"no answer for 0\.2 s"):
        get(server, tmp_path / NAME, "silent")
    assert time.monotonic() - started < 10


needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@needs_full_device
def test_a_full_disk_is_not_mistaken_for_a_bad_network(server, tmp_path):
    (tmp_path / f".{NAME}.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be written .*No space left") as caught:
        get(server, tmp_path / NAME, "plain")
    assert not isinstance(caught.value, FetchError)


def test_only_hosts_that_answer_are_reachable(server):
    closed = "http://127.0.0.1:9/"
    unknown = "https://no-such-host.invalid/"
    assert probe_mirrors([closed, unknown, server.url]) == {server.url}


def test_a_host_that_hangs_costs_no_more_than_the_time_limit(monkeypatch):
    monkeypatch.setattr(downloads, "CONNECT_SECONDS", 0.2)
    released = threading.Event()

    def hang(*_):
        released.wait(10)
        raise TimeoutError

    monkeypatch.setattr(downloads.socket, "create_connection", hang)
    started = time.monotonic()
    assert probe_mirrors([f"http://host{n}/" for n in range(20)]) == set()
    assert time.monotonic() - started < 2
    released.set()


def test_behind_a_proxy_the_proxy_is_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    assert probe_mirrors(["http://no-such-host.invalid/"]) == {"http://no-such-host.invalid/"}


FILES = {"one.bin": b"first" * 100, "two.bin": b"second" * 100}


def tar_of(members: dict[str, bytes], link: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    return buffer.getvalue()


def known_from(archive: bytes, name: str, mirrors: tuple[str, ...]) -> KnownSet:
    item = Download(name, mirrors, len(archive), sha256(archive))
    files = tuple(
        KnownFile(file, len(data), sha256(data), item, member=f"top/{file}") for file, data in FILES.items()
    )
    return KnownSet("toy", "a toy", "none", ("toy",), files)


MEMBERS = {f"top/{name}": data for name, data in FILES.items()}
EVIL = {"../evil": b"x", "/tmp/evil": b"x", "top/../../evil": b"x", "top/other": b"x"}


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_only_the_named_members_leave_an_archive(tmp_path, kind):
    pack = zip_of if kind == "zip" else tar_of
    archive = tmp_path / "in" / f"toy.{kind}"
    archive.parent.mkdir()
    archive.write_bytes(pack({**EVIL, **MEMBERS}))
    folder = tmp_path / "in" / "out"
    folder.mkdir()
    unpack(archive, known_from(b"", archive.name, ()).files, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [archive.name, *FILES]
    )


def test_a_link_in_place_of_a_member_is_refused(tmp_path):
    archive = tmp_path / "toy.tar.gz"
    archive.write_bytes(tar_of({"top/one.bin": FILES["one.bin"]}, link="top/two.bin"))
    with pytest.raises(DataError, match=r"no regular file top/two.bin"):
        unpack(archive, known_from(b"", archive.name, ()).files, tmp_path)
    assert not (tmp_path / "two.bin").exists()


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_wrong_or_endless_content_in_an_archive_leaves_nothing(tmp_path, kind):
    pack = zip_of if kind == "zip" else tar_of
    archive = tmp_path / f"toy.{kind}"
    archive.write_bytes(pack({"top/one.bin": bytes(10_000_000), "top/two.bin": FILES["two.bin"]}))
    read = sha256(bytes(len(FILES["one.bin"]) + 1))  # no further than it takes to know
    with pytest.raises(DataError, match=rf"one\.bin: wrong content in the archive \({read}"):
        unpack(archive, known_from(b"", archive.name, ()).files, tmp_path)
    assert names(tmp_path) == [archive.name]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_a_damaged_archive_is_said_in_one_line(tmp_path, kind):
    archive = tmp_path / f"toy.{kind}"
    archive.write_bytes((zip_of if kind == "zip" else tar_of)(MEMBERS)[:60])
    with pytest.raises(DataError, match=r"damaged archive"):
        unpack(archive, known_from(b"", archive.name, ()).files, tmp_path)


@pytest.fixture
def toy(server):
    server.content = tar_of(MEMBERS)
    return known_from(server.content, "toy.tar.gz", (f"{server.url}/good/",))


def test_a_set_is_fetched_once_and_then_found(server, toy, tmp_path):
    first = fetch(toy, tmp_path)
    assert (first.new, first.folder) == (True, tmp_path / "toy")
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == FILES
    second = fetch(toy, tmp_path)
    assert (second.new, second.folder) == (False, tmp_path / "toy")
    assert [file.status for file in second.files] == ["OK", "OK"]
    assert server.asked["good"] == 1


def test_only_the_missing_files_of_a_set_are_written(toy, tmp_path):
    fetch(toy, tmp_path)
    kept = (tmp_path / "toy" / "one.bin").stat().st_mtime_ns
    (tmp_path / "toy" / "two.bin").unlink()
    assert fetch(toy, tmp_path).new
    assert (tmp_path / "toy" / "one.bin").stat().st_mtime_ns == kept
    assert (tmp_path / "toy" / "two.bin").read_bytes() == FILES["two.bin"]


def test_a_wrong_file_of_the_user_is_named_and_left_alone(server, toy, tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "one.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"one\.bin: is there but wrong .*move it away"):
        fetch(toy, tmp_path)
    assert (tmp_path / "toy" / "one.bin").read_bytes() == b"mine"
    assert not server.asked


def test_an_archive_that_the_user_brought_is_used_without_network_and_kept(
    server, toy, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.tar.gz").write_bytes(server.content)
    assert fetch(toy, tmp_path).new
    assert names(tmp_path / "toy") == sorted([*FILES, "toy.tar.gz"])
    assert not server.asked


def test_a_wrong_archive_that_the_user_brought_is_refused(server, toy, tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.tar.gz").write_bytes(server.content[:-1])
    with pytest.raises(DataError, match=r"toy\.tar\.gz: is there but wrong"):
        fetch(toy, tmp_path)
    assert names(tmp_path / "toy") == ["toy.tar.gz"]


@pytest.mark.parametrize("offline", [True, False], ids=["switched off", "unreachable"])
def test_without_network_the_error_says_what_to_put_where_and_nothing_is_made(tmp_path, monkeypatch, offline):
    if offline:
        monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    toy = known_from(b"", "toy.tar.gz", ("http://127.0.0.1:9/there/",))
    with pytest.raises(FetchError) as caught:
        fetch(toy, tmp_path / "new")
    text = str(caught.value)
    assert f"put toy.tar.gz into {tmp_path / 'new' / 'toy'} by hand, from http://127.0.0.1:9/there/" in text
    assert ("HOTLOOP_OFFLINE is set" if offline else "no network") in text
    assert "\n" not in text
    assert not (tmp_path / "new").exists()


def test_offline_never_asks_the_network(toy, server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    with pytest.raises(FetchError):
        fetch(toy, tmp_path)
    assert not server.asked


def test_two_fetches_at_once_download_once(server, toy, tmp_path):
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetch(toy, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert server.asked["good"] == 1


def test_a_gzipped_file_is_kept_as_published(server, tmp_path):
    content = b"numbers" * 1000
    server.content = gzip.compress(content)
    item = Download("n.gz", (f"{server.url}/good/",), len(server.content), sha256(server.content))
    known = KnownSet("n", "numbers", "none", ("n",), (KnownFile("n", len(content), sha256(content), item),))
    fetched = fetch(known, tmp_path)
    assert [file.status for file in fetched.files] == ["OK"]
    assert (tmp_path / "n" / "n.gz").read_bytes() == server.content


def test_a_set_that_cannot_be_fetched_says_what_to_bring():
    known = KnownSet("secret", "a secret", "private terms", ("secret",), expected="a.bin and b.bin")
    with pytest.raises(
        DataError, match=r"not fetched \(private terms\); bring the files .* a\.bin and b\.bin"
    ):
        fetch(known)


def test_a_folder_that_cannot_be_made_is_one_line(toy, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file.*: is a file, not a folder"):
        fetch(toy, tmp_path / "file")
    with pytest.raises(DataError, match=r"is a file|cannot be written"):
        fetch(toy, tmp_path / "file" / "inside")


@needs_full_device
def test_a_disk_that_fills_while_unpacking_is_one_line(toy, tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / f".one.bin.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be written .*No space left"):
        fetch(toy, tmp_path)

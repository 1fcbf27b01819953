"""Where sets are looked for, in which order, what the catalogue holds, and what a checksum says of a file."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from hotloop.data.catalogue import SETS, Download, KnownFile, KnownSet, known_set
from hotloop.data.local_files import (
    check_file,
    check_named_folders,
    data_home,
    find_set,
    look_in,
    user_folder,
    verify_set,
)
from hotloop.errors import DataError

DATA = b"some numbers"
ITEM = Download("a.gz", ("https://example.org/",), 1, "sha256:0")
A = KnownFile("a", len(DATA), f"sha256:{hashlib.sha256(DATA).hexdigest()}", ITEM)
B = KnownFile("b", len(DATA), f"md5:{hashlib.md5(DATA).hexdigest()}", ITEM, needed=False)
TOY = KnownSet("toy", "a toy", "none", ("toy", "toy-subset"), (A, B))


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """A folder for each place that is looked at, none of them there yet."""
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(gzip.compress(DATA) if name.endswith(".gz") else DATA)
    return folder


def test_the_given_folder_comes_before_the_shared_one_and_the_users(places):
    users = put(places / "home/hotloop/toy", "a")
    assert find_set(TOY, places / "given").folder == users
    shared = put(places / "shared/toy", "a")
    assert find_set(TOY, places / "given").folder == shared
    inside = put(places / "given/toy-subset", "a")
    assert find_set(TOY, places / "given").folder == inside
    better = put(places / "given/toy", "a.gz")
    assert find_set(TOY, places / "given").folder == better
    directly = put(places / "given", "a")
    assert find_set(TOY, places / "given").folder == directly
    assert find_set(TOY).folder == shared


def test_a_folder_that_can_be_loaded_comes_before_one_with_a_part(places):
    part = put(places / "shared/toy", "b")
    found = find_set(TOY)
    assert (found.folder, set(found.files)) == (part, {"b"})
    assert not found.loadable
    whole = put(places / "home/hotloop/toy", "a")
    found = find_set(TOY)
    assert (found.folder, set(found.files)) == (whole, {"a"})
    assert found.loadable


def test_files_of_a_set_never_lie_directly_in_a_folder_that_was_not_given_for_it(places):
    put(places / "shared", "a", "b")
    assert find_set(TOY) is None


def test_a_plain_file_comes_before_its_gzipped_copy(places):
    folder = put(places / "x", "a", "a.gz", "b.gz")
    assert {name: path.name for name, path in look_in(TOY, folder).files.items()} == {"a": "a", "b": "b.gz"}


def test_a_set_without_known_files_is_found_by_its_folder(places):
    brought = KnownSet("brought", "", "", ("brought",), expected="what you have")
    assert find_set(brought, put(places / "given", "x")) is None
    assert find_set(brought, put(places / "given/brought", "x").parent).folder == places / "given/brought"


def test_a_folder_that_was_named_and_is_not_there_is_an_error(places):
    with pytest.raises(DataError, match=r"HOTLOOP_DATA=.*shared: no such folder"):
        check_named_folders(None)
    put(places / "shared")
    check_named_folders(None)
    with pytest.raises(DataError, match=r"data_dir=.*none: no such folder"):
        check_named_folders(places / "none")


def test_a_file_in_place_of_a_folder_is_an_error_that_names_it(places):
    (places / "shared").write_bytes(b"")
    text = re.escape(f"data folder {places / 'shared'}: is a file, not a folder")
    with pytest.raises(DataError, match=text):
        check_named_folders(None)
    with pytest.raises(DataError, match=text):
        find_set(TOY)


def test_a_folder_without_permission_is_an_error(places, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    put(places / "shared")
    monkeypatch.setattr(Path, "iterdir", refuse)  # chmod would not stop root
    with pytest.raises(DataError, match=r"data folder .*: permission denied; make it readable"):
        check_named_folders(None)


def test_a_fetch_writes_to_the_given_folder_then_the_shared_one_then_the_users(places):
    assert data_home(places / "given") == places / "given"
    assert data_home(None) == places / "shared"
    put(places / "shared")
    assert data_home(None) == places / "shared"


def test_a_shared_folder_without_write_bits_is_not_written_to_even_by_root(places):
    shared = put(places / "shared")
    shared.chmod(0o555)
    assert data_home(None) == user_folder() == places / "home/hotloop"
    shared.chmod(0o755)


def test_the_users_folder_follows_xdg_and_else_lies_in_the_home(monkeypatch):
    monkeypatch.delenv("XDG_DATA_HOME")
    assert user_folder() == Path.home() / ".local/share/hotloop"


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_a_right_file_is_ok_plain_or_gzipped(places, name):
    verdict = check_file(A, put(places / "x", name) / name)
    assert (verdict.status, verdict.size, verdict.checksum, verdict.reason) == (
        "OK",
        len(DATA),
        A.checksum,
        "",
    )


def test_md5_is_taken_where_only_that_is_published(places):
    assert check_file(B, put(places / "x", "b") / "b").status == "OK"


def test_wrong_size_wrong_content_and_damage_are_bad_with_a_reason(places):
    path = put(places / "x", "a") / "a"
    path.write_bytes(DATA[:-1])
    assert check_file(A, path).reason == "11 bytes of content, expected 12"
    path.write_bytes(DATA[:-1] + b"?")
    assert check_file(A, path).status == "BAD"
    assert A.checksum in check_file(A, path).reason
    path.write_bytes(gzip.compress(DATA)[:-4])
    assert (check_file(A, path).status, "damaged gzip file" in check_file(A, path).reason) == ("BAD", True)


def test_missing_files_are_missing(places):
    assert [verdict.status for verdict in verify_set(TOY, None)] == ["missing", "missing"]
    found = look_in(TOY, put(places / "x", "a"))
    assert [verdict.status for verdict in verify_set(TOY, found)] == ["OK", "missing"]


def test_every_known_set_is_complete():
    for known in SETS.values():
        assert known.what
        assert known.licence
        assert known.folders
        assert bool(known.files) != bool(known.expected)
        names = [file.name for file in known.files]
        assert len(set(names)) == len(names)
        for file in known.files:
            assert re.fullmatch("sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", file.checksum)
            assert re.fullmatch("sha256:[0-9a-f]{64}", file.download.checksum)
            assert file.download.mirrors
            assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in file.download.mirrors)
            assert file.download.mirrors[0].startswith("https://")
            assert "/" not in file.name
            assert file.stored_as in (file.name, f"{file.name}.gz")


def test_a_set_is_known_by_either_spelling_and_a_wrong_name_suggests_the_right_one():
    assert known_set("fashion-mnist").name == "fashion_mnist"
    assert known_set("movielens_100k").name == "movielens-100k"
    assert known_set("binarized_mnist").name == "binarised_mnist"
    with pytest.raises(DataError, match=r"cifar01: no such data set.*cifar10"):
        known_set("cifar01")

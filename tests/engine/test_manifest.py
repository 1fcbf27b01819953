"""A manifest is read as it was written, or not at all."""

import json

import pytest

from hotloop.engine import manifest as manifests
from hotloop.engine.manifest import Damaged, Manifest
from hotloop.engine.snapshot import Leaf


@pytest.fixture
def step(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "data").write_bytes(b"x" * 5_000_000)
    (tmp_path / "state" / "meta").write_bytes(b"")
    leaves = {"w": Leaf("bfloat16", (2, 3), "0badcafe")}
    made = Manifest(
        4, leaves, manifests.stored_files(tmp_path), {"update": 4}, {"loss": 0.5}, "kernels", "abc", 1.5
    )
    (tmp_path / "manifest.json").write_text(manifests.to_text(made))
    return tmp_path, made


def test_a_manifest_reads_back_equal(step):
    folder, made = step
    assert manifests.read(folder) == made
    manifests.check_contents(folder, made)


def test_any_change_of_the_manifest_itself_is_found(step):
    folder, _ = step
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    for key in body:
        other = {name: value for name, value in body.items() if name != key}
        path.write_text(json.dumps(other))
        with pytest.raises(Damaged, match=r"manifest\.json"):
            manifests.read(folder)
    path.write_text(json.dumps({**body, "step": 5}))
    with pytest.raises(Damaged, match="does not match its own checksum"):
        manifests.read(folder)


def test_a_layout_of_the_text_that_means_the_same_is_accepted(step):
    folder, made = step
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=8))
    assert manifests.read(folder) == made


def test_a_later_format_says_so(step, monkeypatch):
    folder, made = step
    monkeypatch.setattr(manifests, "FORMAT", 2)
    (folder / "manifest.json").write_text(manifests.to_text(made))
    monkeypatch.undo()
    with pytest.raises(Damaged, match="has format 2, this hotloop reads 1"):
        manifests.read(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"program": "other"}', "\x00", "{"])
def test_another_programs_file_is_one_line(step, text):
    folder, _ = step
    (folder / "manifest.json").write_text(text)
    with pytest.raises(Damaged) as caught:
        manifests.read(folder)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quick_look_sees_sizes_and_a_full_look_sees_contents(step):
    folder, made = step
    (folder / "state" / "data").write_bytes(b"x" * 4_999_999 + b"y")
    manifests.check_sizes(folder, made)
    with pytest.raises(Damaged, match="state/data does not match its checksum"):
        manifests.check_contents(folder, made)
    (folder / "state" / "data").write_bytes(b"x")
    with pytest.raises(Damaged, match="state/data has 1 bytes, 5000000 were written"):
        manifests.check_sizes(folder, made)


def test_a_folder_with_one_more_file_is_not_ours_alone(step):
    folder, _ = step
    assert manifests.is_ours_alone(folder)
    (folder / "state" / "mine").write_text("")
    assert not manifests.is_ours_alone(folder)


def test_equal_configs_have_equal_hashes_whatever_their_order():
    assert manifests.config_hash({"a": 1, "b": (2, 3)}) == manifests.config_hash({"b": (2, 3), "a": 1})
    assert manifests.config_hash({"a": 1}) != manifests.config_hash({"a": 2})

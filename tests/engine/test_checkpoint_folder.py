"""A manifest is read as it was written, or not at all."""

import json
from dataclasses import replace

import pytest

from hotloop.engine import checkpoint_folder as manifests
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import DamagedStep, Manifest, StoredFile, StoredLeaf


@pytest.fixture
def step(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "data").write_bytes(b"x" * 5_000_000)
    (tmp_path / "state" / "meta").write_bytes(b"")
    leaves = {"w": StoredLeaf("bfloat16", (2, 3), "0badcafe")}
    files = {"state/data": StoredFile(5_000_000, "74c50e46"), "state/meta": StoredFile(0, "00000000")}
    made = Manifest(4, leaves, files, {"update": 4}, {"loss": 0.5}, "kernels", "abc", 1.5)
    (tmp_path / "manifest.json").write_text(manifests.format_manifest(made))
    return tmp_path, made


def test_a_manifest_reads_back_equal(step):
    folder, made = step
    assert manifests.read_manifest(folder) == made
    manifests.read_whole(folder, 4, contents=True)


def test_any_change_of_the_manifest_itself_is_found(step):
    folder, _ = step
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    for key in body:
        other = {name: value for name, value in body.items() if name != key}
        path.write_text(json.dumps(other))
        with pytest.raises(DamagedStep, match=r"manifest\.json"):
            manifests.read_manifest(folder)
    path.write_text(json.dumps({**body, "step": 5}))
    with pytest.raises(DamagedStep, match="does not match its own checksum"):
        manifests.read_manifest(folder)


def test_a_layout_of_the_text_that_means_the_same_is_accepted(step):
    folder, made = step
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=8))
    assert manifests.read_manifest(folder) == made


def test_a_later_format_says_so(step):
    folder, made = step
    (folder / "manifest.json").write_text(manifests.format_manifest(replace(made, format=3)))
    with pytest.raises(DamagedStep, match="has format 3, this hotloop reads 2"):
        manifests.read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"program": "other"}', "\x00", "{"])
def test_another_programs_file_is_one_line(step, text):
    folder, _ = step
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedStep) as caught:
        manifests.read_manifest(folder)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quick_look_sees_sizes_and_a_full_look_sees_contents(step):
    folder, _ = step
    (folder / "state" / "data").write_bytes(b"x" * 4_999_999 + b"y")
    manifests.read_whole(folder, 4)
    with pytest.raises(DamagedStep, match="state/data does not match its checksum"):
        manifests.read_whole(folder, 4, contents=True)
    (folder / "state" / "data").write_bytes(b"x")
    with pytest.raises(DamagedStep, match="state/data has 1 bytes, 5000000 were written"):
        manifests.read_whole(folder, 4)


def test_a_step_with_one_more_file_is_not_deleted(step):
    folder = step[0].rename(step[0].with_name("00000004"))
    (folder / "state" / "mine").write_text("")
    manifests.remove_step(folder)
    assert (folder / "state" / "mine").exists()
    (folder / "state" / "mine").unlink()
    manifests.remove_step(folder)
    assert not folder.exists()


def test_equal_configs_have_equal_hashes_whatever_their_order(tmp_path):
    def digest(config):
        with Checkpoints(tmp_path, config=config) as checkpoints:
            return checkpoints._blank.config

    assert digest({"a": 1, "b": (2, 3)}) == digest({"b": (2, 3), "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, "[" * 200_000 + "]" * 200_000, "9" * 5_000]
)
def test_brackets_without_end_and_numbers_without_end_are_damage(step, text):
    folder, _ = step
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedStep, match=r"manifest\.json"):
        manifests.read_manifest(folder)


WRONG = {
    "step": [-1, "4", 4.0, True, None, [4]],
    "leaves": [None, [], "w", {"w": None}, {"w": {}}, {"w": {"dtype": "x", "shape": [2]}}, 3,
               {"w": {"dtype": 1, "shape": [2], "checksum": "a"}}, {"w": {"dtype": "x", "shape": 2, "checksum": "a"}},
               {"w": {"dtype": "x", "shape": [-2], "checksum": "a"}},
               {"w": {"dtype": "x", "shape": ["2"], "checksum": "a"}},
               {"w": {"dtype": "x", "shape": [2], "checksum": "a", "more": 1}}],
    "files": [None, [], {"state/data": 5}, {"state/data": {"size": 5}}, {"state/data": {"size": "5", "checksum": "a"}},
              {"state/data": {"size": 5, "checksum": None}}, {"state/data": {"size": 5, "checksum": "a", "x": 1}}],
    "position": [None, [], "x", {"float": "one"}, {"a": {"float": []}}],
    "metrics": [None, 3, []],
    "family": [None, 3],
    "config": [None, {}],
}  # fmt: skip
"""What no manifest says, whatever its checksum."""


def forge(folder, **changes):
    """Change a manifest so that its checksum is right."""
    path = folder / "manifest.json"
    body = {**json.loads(path.read_text()), **changes}
    body = {key: value for key, value in body.items() if key != "checksum" and value is not ...}
    path.write_text(json.dumps({**body, "checksum": manifests._self_checksum(body)}))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]])
def test_a_right_checksum_over_wrong_content_is_damage(step, key, value):
    folder, _ = step
    forge(folder, **{key: value})
    with pytest.raises(
        DamagedStep, match=r"manifest\.json has a right checksum, and does not say what"
    ) as caught:
        manifests.read_manifest(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"leaves": ...}, {"files": ...}, {"step": ...}, {"more": 1}])
def test_a_manifest_with_too_little_or_too_much_is_damage(step, changes):
    folder, _ = step
    forge(folder, **changes)
    with pytest.raises(DamagedStep, match="has a right checksum, and does not say what"):
        manifests.read_manifest(folder)


def test_a_size_beyond_any_number_is_damage(step):
    folder, _ = step
    forge(folder, files={"state/data": {"size": 10**400, "checksum": "a"}})
    with pytest.raises(DamagedStep, match="state/data"):
        manifests.read_whole(folder, 4)

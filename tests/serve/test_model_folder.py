"""Model folders: whole or not there, the next free version, and refused where a byte is wrong."""

import errno
import json
import os
import shutil
import subprocess
from datetime import date
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from small_models import LADDER, small, without_comparing, write_uncompared

from hotloop.engine import exported_program, model_folder, model_place
from hotloop.engine.model_folder import make_ladder, write_model
from hotloop.engine.model_place import check_place, put_in_place, staged
from hotloop.engine.weights_file import parse_weights
from hotloop.errors import ModelError, OptionError
from hotloop.serve.artefact import Artefact


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model's folder, whole."""
    return write_uncompared(tmp_path_factory.mktemp("models"), small())[0]


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written, tmp_path / "small" / "1")


def test_a_folder_has_a_program_weights_examples_and_their_checksums(written):
    about = json.loads((written / "model.json").read_text())
    assert written.parts[-2:] == ("small", "1")
    assert {file.name for file in written.iterdir()} == {*about["files"], "model.json"}
    assert set(about["files"]) == {"program.bin", "weights.safetensors", "examples.npz"}
    assert about["ladder"] == [1, 2, 4] and about["platforms"] == ["cpu", "cuda", "tpu"]
    assert about["signature"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert f"jax {about['environment']['jax']}, and" in about["readable_by"]
    assert about["readable_by"].endswith(f"none released after {about['readable_until']}")
    left = date.fromisoformat(about["readable_until"]) - date.fromisoformat(about["exported"][:10])
    assert left.days == 184  # the longest six months, from a day when that jax was there already


def test_versions_are_the_next_free_number_and_never_replaced(tmp_path, monkeypatch):
    without_comparing(monkeypatch)
    for version, wanted in ((None, "1"), (7, "7"), (None, "8"), (3, "3"), (None, "9")):
        assert write_model(small(), tmp_path, version=version, ladder=LADDER)[0].name == wanted
    with pytest.raises(OptionError, match=r"version=7: .* has it already \(there: 1, 3, 7, 8, 9\)"):
        write_model(small(), tmp_path, version=7, ladder=LADDER)
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == ["1", "3", "7", "8", "9"]


def test_a_version_that_somebody_else_writes_meanwhile_stays(tmp_path, monkeypatch):
    def other(folder):
        (folder.parent / "1").mkdir()
        (folder.parent / "1" / "model.json").write_text("theirs")

    monkeypatch.setattr(model_folder, "compare_in_fresh_process", other)
    assert write_model(small(), tmp_path, ladder=LADDER)[0].name == "2"
    assert (tmp_path / "small" / "1" / "model.json").read_text() == "theirs"


@pytest.mark.parametrize("version", [None, 1])
def test_a_version_that_comes_in_the_last_moment_stays_too(version, tmp_path, monkeypatch):
    """Between the look at what is there and the renaming."""
    part, theirs = tmp_path / ".1.part", tmp_path / "1" / "model.json"
    part.mkdir(), theirs.parent.mkdir()
    theirs.write_text("theirs")
    look, first_look = model_place._entries, [[]]
    monkeypatch.setattr(
        model_place, "_entries", lambda folder: first_look.pop() if first_look else look(folder)
    )
    if version is None:
        assert put_in_place(part, None) == tmp_path / "2"
    else:
        with pytest.raises(OptionError, match="has come meanwhile"):
            put_in_place(part, 1)
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("error", [ModelError("wrong answers"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_nothing_behind(error, tmp_path, monkeypatch):
    def fail(folder):
        raise error

    monkeypatch.setattr(model_folder, "compare_in_fresh_process", fail)
    with pytest.raises(type(error)):
        write_model(small(), tmp_path / "new" / "models", ladder=LADDER)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_another_one_alone(tmp_path):
    """Of two machines with one folder, processes may have one number."""
    with staged(tmp_path / "small") as part:
        (part / "theirs").touch()
        with pytest.raises(ModelError), staged(tmp_path / "small") as other:
            raise ModelError(f"wrong answers in {other}")
        assert (part / "theirs").exists()


def test_what_a_killed_export_has_left_goes_with_the_next_and_hinders_none(tmp_path):
    left, others = tmp_path / "small" / ".123-0123456789abcdef.part", tmp_path / "small" / ".notes.part"
    left.mkdir(parents=True), others.mkdir()
    (left / "program.bin").touch()
    check_place(tmp_path, "small", None)
    check_place(tmp_path, "another", None)
    with staged(tmp_path / "small") as part:
        assert sorted(part.parent.iterdir()) == sorted([part, others])


def test_weights_that_have_diverged_are_not_exported(tmp_path, monkeypatch):
    without_comparing(monkeypatch)
    model = small()
    model.weights["w"] = model.weights["w"].at[0, 0].set(np.nan)
    with pytest.raises(ModelError, match=r"answered with NaN or infinity \(shares\)"):
        write_model(model, tmp_path / "models", ladder=LADDER)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tolerance", "is_precise"), [(1e-5, True), (1e-2, False)])
def test_products_of_32_bits_are_computed_in_32_on_every_platform(tolerance, is_precise):
    model = small(tolerance=tolerance)
    traced = str(jax.make_jaxpr(model.compute)(model.weights, model.examples))
    assert ("HIGHEST" in traced) is is_precise


def test_a_disk_that_fills_up_at_any_file_leaves_nothing_behind(written, tmp_path, monkeypatch):
    """The disk takes what fits, and then no more: in the middle of each file, and between them."""
    shutil.copytree(written.parent, tmp_path / "small")
    model = small()
    programs = exported_program.export_programs(model, LADDER)
    whole, room = os.write, 0

    def write(descriptor, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = whole(descriptor, data[:room])
        room -= taken
        return taken

    without_comparing(monkeypatch)
    monkeypatch.setattr(model_folder, "export_programs", lambda *_: programs)
    monkeypatch.setattr(os, "write", write)
    sizes = [
        (written / name).stat().st_size for name in ("program.bin", "weights.safetensors", "examples.npz")
    ]
    needed = sum(sizes) + 1000  # and some of model.json
    for room_at_first in (0, sizes[0] // 2, sizes[0], sum(sizes[:2]) - 1, sum(sizes) - 1, needed):
        room = room_at_first
        with pytest.raises(OSError, match="No space left"):
            write_model(model, tmp_path, ladder=LADDER)
        assert [path.name for path in (tmp_path / "small").iterdir()] == ["1"]
    room = 10 * needed
    assert write_model(model, tmp_path, ladder=LADDER)[0].name == "2"
    for version in ("1", "2"):
        Artefact.open(tmp_path / "small" / version)


def fake_process(monkeypatch, *answers):
    """What is given to processes that are started; each answers by a status and a last line, or an error."""
    started, left = [], list(answers)

    def start(command, **settings):
        started.append({"command": command, **settings})
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(returncode=answer[0], stderr=f"some noise\n{answer[1]}\n")

    monkeypatch.setattr(model_folder.subprocess, "run", start)
    return started


def test_the_fresh_process_is_alone_whatever_this_one_belongs_to(tmp_path, monkeypatch):
    started = fake_process(monkeypatch, (1, "the reason"))
    monkeypatch.setenv("HOTLOOP_PROCESSES", "2")
    monkeypatch.setenv("HOTLOOP_NOTES", str(tmp_path))
    with pytest.raises(ModelError, match="in a fresh process, fails: the reason"):
        model_folder.compare_in_fresh_process(tmp_path)
    (only,) = started
    assert only["env"]["HOTLOOP_PROCESSES"] == "1" and "HOTLOOP_NOTES" not in only["env"]
    assert only["command"][1:4] == ["-m", "hotloop.serve.check", str(tmp_path)]


def test_where_a_second_process_cannot_have_the_device_it_compares_on_the_cpu_and_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(model_folder, "platform", lambda: "tpu")
    started = fake_process(monkeypatch, (model_folder.NO_DEVICE, "it is in use"), (0, ""))
    notice = model_folder.compare_in_fresh_process(tmp_path)
    assert "compared on the CPU" in notice and "the tpu beside this one: it is in use" in notice
    assert [each["command"][-1] for each in started] == ["tpu", "cpu"]
    fake_process(monkeypatch, (model_folder.NO_DEVICE, "it is in use"), (1, "wrong"))
    with pytest.raises(ModelError, match="fails: wrong"):
        model_folder.compare_in_fresh_process(tmp_path)


def test_a_fresh_process_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    limit = model_folder.COMPARING_SECONDS
    started = fake_process(monkeypatch, subprocess.TimeoutExpired("check", limit))
    with pytest.raises(ModelError, match="no answer within 900 seconds"):
        model_folder.compare_in_fresh_process(tmp_path)
    assert started[0]["timeout"] == limit


def refused(tmp_path, said, name="small", version=None):
    with pytest.raises(OptionError) as caught:
        check_place(tmp_path, name, version)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_places_that_are_not_for_models_are_refused(written, tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path, "is not empty and holds no model")
    refused(tmp_path / "file", "is a file")
    refused(written.parent, f"is the folder of one model; give the one above it, {written.parent.parent}")
    refused(written.parent.parent, "version=1: ", version=1)
    refused(written.parent.parent, "of at most 18 digits", version=10**18)
    for name in ("..", "a/b", "", ".hidden", "x" * 200, "a\0b", "%2e"):
        refused(tmp_path / "new", "must begin with a letter or digit", name=name)
    refused(tmp_path / "new", "is an address of the server's own", name="stats")
    (written.parent.parent / "other").mkdir()
    (written.parent.parent / "other" / "notes").touch()
    refused(written.parent.parent, "holds no model; give another name", name="other")
    with (
        pytest.raises(OptionError, match="file: cannot be written"),
        staged(tmp_path / "file" / "x"),
    ):
        pass
    check_place(written.parent.parent, "third", None)
    check_place(tmp_path / "new" / "deep", "small", 5)


FILES = ("program.bin", "weights.safetensors", "examples.npz", "model.json")


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_cut_flipped_emptied_or_gone_is_named(file, copy):
    whole = (copy / file).read_bytes()
    middle = len(whole) // 2
    flipped = bytearray(whole)
    flipped[middle] ^= 1
    for damaged in (whole[:-2], bytes(flipped), b"", whole + b"\0"):
        (copy / file).write_bytes(damaged)
        with pytest.raises(ModelError) as caught:
            Artefact.open(copy)
        assert file in str(caught.value) and "\n" not in str(caught.value)
        if file != "model.json" and len(damaged) != len(whole):
            assert f"has {len(damaged)} bytes, {len(whole)} were written" in str(caught.value)
    (copy / file).unlink()
    with pytest.raises(ModelError, match=file):
        Artefact.open(copy)


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_model_is_refused(file, copy, tmp_path):
    other = write_uncompared(tmp_path / "others", small(seed=1), ladder=(1, 2))[0]
    if file == "program.bin":  # which is the same for both: only the weights differ
        (other / file).write_bytes((other / file).read_bytes()[::-1])
    shutil.copy(other / file, copy / file)
    with pytest.raises(ModelError):
        Artefact.open(copy)


def rewrite(folder, **changes):
    """model.json with other contents and a checksum that fits them."""
    about = json.loads((folder / "model.json").read_text()) | changes
    about["sha256"] = model_folder.self_digest(about)
    (folder / "model.json").write_text(json.dumps(about))


def test_a_description_that_was_altered_is_refused_though_it_is_sound(copy):
    text = (copy / "model.json").read_text()
    (copy / "model.json").write_text(text.replace('"tolerance": 1e-05', '"tolerance": 9.0'))
    with pytest.raises(ModelError, match=r"model\.json: does not match its own checksum"):
        Artefact.open(copy)
    (copy / "model.json").write_text(text)
    assert Artefact.open(copy).tolerance == 1e-5


def test_another_format_platform_or_name_is_said(copy):
    here = exported_program.platform_here()
    others = [each for each in ("cpu", "cuda", "tpu") if each != here]
    rewrite(copy, platforms=others)
    with pytest.raises(ModelError, match=f"was exported for {', '.join(others)}, and here is {here}"):
        Artefact.open(copy)
    rewrite(copy, platforms=["cpu", "cuda", "tpu"], name="another")
    with pytest.raises(ModelError, match="holds the model another"):
        Artefact.open(copy)
    rewrite(copy, format=model_folder.FORMAT + 1)
    with pytest.raises(ModelError, match=r"its format is 2, and this hotloop reads up to 1: upgrade hotloop"):
        Artefact.open(copy)


@pytest.mark.parametrize(
    "changes", [{"ladder": "x"}, {"signature": None}, {"files": {}}, {"programs": 3}, {"kind": []}]
)
def test_a_description_that_makes_no_sense_is_one_line(changes, copy):
    rewrite(copy, **changes)
    if changes == {"kind": []}:
        assert Artefact.open(copy).kind == "[]"
        return
    with pytest.raises(ModelError, match=r"model\.json cannot be read"):
        Artefact.open(copy)


def test_a_program_that_jax_cannot_read_names_the_command_that_makes_a_new_one(copy):
    about = json.loads((copy / "model.json").read_text())
    data = b"\x01" * 64
    (copy / "program.bin").write_bytes(data)
    files = about["files"] | {"program.bin": {"bytes": len(data), "sha256": model_folder._digest(data)}}
    rewrite(copy, files=files)
    with pytest.raises(ModelError, match=rf"hotloop export --refresh {copy}"):
        Artefact.open(copy).load()


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (json.dumps({"a": ENTRY}), bytes(7)),
        (json.dumps({"a": ENTRY}), bytes(9)),
        (json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}), bytes(12)),
        (json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}), bytes(20)),
        (json.dumps({"a": {**ENTRY, "shape": [3]}}), bytes(8)),
        (json.dumps({"a": {**ENTRY, "dtype": "F8_E4M3", "shape": [8]}}), bytes(8)),
        (json.dumps({"a": {**ENTRY, "more": 1}}), bytes(8)),
        (f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}', bytes(8)),
        ("[" * 100_000, b""),
        ("{", b""),
    ],
)
def test_weights_are_read_strictly(header, data):
    def file(text):
        return len(text).to_bytes(8, "little") + text.encode() + data

    with pytest.raises(ModelError, match=r"weights\.safetensors: cannot be read"):
        parse_weights(file(header))
    if len(data) == 8:
        np.testing.assert_array_equal(parse_weights(file(json.dumps({"a": ENTRY})))["a"], [0, 0])


def test_ladders_double_up_to_the_largest():
    assert make_ladder(1) == (1,)
    assert make_ladder(64) == (1, 2, 4, 8, 16, 32, 64)
    assert make_ladder(48) == (1, 2, 4, 8, 16, 32, 48)
    assert make_ladder(3) == (1, 2, 3)


def test_nothing_in_a_folder_is_pickled(written):
    with np.load(written / "examples.npz", allow_pickle=False) as arrays:
        assert {array.dtype.kind for array in arrays.values()} <= set("fiu")

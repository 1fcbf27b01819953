"""Where results come from: commits, versions, devices, and no secrets."""

import json
import os
import subprocess
import time

from hotloop import __version__
from hotloop.bench import provenance
from hotloop.engine import device


def git(folder, *words):
    subprocess.run(["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e", *words], check=True)


def test_a_commit_is_named_and_a_change_makes_it_dirty(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    clean = device.read_commit(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("b")
    assert device.read_commit(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_outside_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert device.read_commit(tmp_path) == {"commit": None, "dirty": None}


def test_a_program_that_is_missing_fails_or_hangs_answers_nothing(monkeypatch):
    monkeypatch.setattr(device, "QUERY_SECONDS", 0.2)
    assert device.run_query(["no-such-program"]) is None
    assert device.run_query(["false"]) is None
    begin = time.monotonic()
    assert device.run_query(["sleep", "30"]) is None
    assert time.monotonic() - begin < 5


def test_variables_that_matter_are_kept_and_secrets_never(tmp_path, monkeypatch):
    given = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "-x",
        "HOTLOOP_TOKEN": "s",
        "HOME": "/h",
        "CUDA_API_KEY": "k",
    }
    monkeypatch.setattr(provenance.os, "environ", {})
    found = provenance.collect_provenance({}, tmp_path, given)
    assert found["environment"] == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "-x"}


def test_a_gpu_is_the_device_unless_it_is_hidden(monkeypatch, tmp_path):
    lines = "NVIDIA H200, 570.1, 143771 MiB, GPU-1, 700.00 W, 1980 MHz\n" * 2
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "run_query", lambda argv: lines.strip())
        gpus = provenance.list_gpus.__wrapped__()  # what it finds is remembered
    monkeypatch.setattr(provenance, "list_gpus", lambda: gpus)
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert provenance.collect_provenance({}, tmp_path)["device"] == {
        "kind": "gpu",
        "name": "NVIDIA H200",
        "count": 2,
        "driver": "570.1",
    }
    hidden = provenance.collect_provenance({}, tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden["device"]["kind"] == "cpu"


def test_programs_that_are_sent_to_the_processor_have_not_been_on_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "list_gpus", lambda: [{"name": "GPU", "driver_version": "1"}])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert provenance.collect_provenance({}, tmp_path)["device"]["kind"] == "gpu"
    assert provenance.collect_provenance({}, tmp_path, {"JAX_PLATFORMS": "cpu"})["device"]["kind"] == "cpu"


def test_everything_is_there_and_is_json(tmp_path):
    found = provenance.collect_provenance({"f.yml": "00"}, tmp_path)
    json.dumps(found, allow_nan=False)
    assert found["hotloop"]["version"] == __version__
    assert found["packages"]["PyYAML"]
    assert found["device"]["name"]
    assert found["specs"] == {"f.yml": "00"}


def test_asking_for_the_commit_writes_nothing_in_the_repository(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    os.utime(tmp_path / "file", (1, 1))  # git would note in its index that the content is the same
    before = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(device, "SOURCE", tmp_path)
    assert device.source_commit()["dirty"] is False
    assert device.read_commit(tmp_path)["dirty"] is False
    assert (tmp_path / ".git" / "index").read_bytes() == before

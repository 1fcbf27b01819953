"""The cache of compiled programs: found again by a later process, repaired, limited, turned off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop import machine
from hotloop.engine import device
from hotloop.engine.device import HEAD_BYTES, ProgramStore
from hotloop.errors import OptionError

# Compiles one program and prints how many programs the process compiled rather than found.
PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
from hotloop.engine.device import setup
setup("cpu")
import jax, jax.numpy as jnp
import jax.monitoring
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda x: jnp.tanh(x) * 3)(jnp.float32(1.0)).block_until_ready()
print(*(sum(event.endswith(end) for event in events) for end in ("cache_misses", "cache_hits")))
"""


def compiled_and_found(folder) -> tuple[int, int]:
    environment = {**os.environ, "HOTLOOP_CACHE": str(folder)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    compiled, found = done.stdout.split()
    return int(compiled), int(found)


@pytest.mark.slow
def test_a_later_process_finds_the_programs_and_damage_is_repaired(tmp_path):
    compiled, _ = compiled_and_found(tmp_path)
    assert compiled >= 1
    assert compiled_and_found(tmp_path)[0] == 0
    entries = sorted((tmp_path / "programs").glob("*.program"))
    for number, path in enumerate(entries):
        content = bytearray(path.read_bytes())
        if number % 2:
            content[-1] ^= 1
        path.write_bytes(content if number % 2 else content[: len(content) // 2])
    assert compiled_and_found(tmp_path) == (len(entries), 0)
    assert compiled_and_found(tmp_path) == (0, len(entries))


AUTOTUNING = """
from hotloop.engine.device import setup
setup("cpu")
from jax._src import compiler
options = compiler.get_compile_options(1, 1)  # held: what is asked of it next lies in its memory
print(options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir)
"""


def test_what_a_gpus_compiler_has_measured_is_kept_beside_the_programs(tmp_path):
    """jax asks for that by itself where it has a cache; what it calls the folder is what clearing deletes."""
    environment = {**os.environ, "HOTLOOP_CACHE": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", AUTOTUNING], env=environment, capture_output=True, text=True)
    folder = Path(said.stdout.strip())
    assert folder.parent == tmp_path / "programs" and folder.match("xla_gpu_*")


def test_off_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiled_and_found("off")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HOTLOOP_CACHE", "off")
    assert machine.cache_folder() is None


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE", "/somewhere")
    assert str(machine.cache_folder()) == "/somewhere"
    monkeypatch.delenv("HOTLOOP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(machine.cache_folder()) == "/xdg/hotloop"


def test_a_folder_that_cannot_be_made_is_a_warning_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path / "file"))
    said = []
    device.enable_cache(said.append)
    assert len(said) == 1
    assert "set HOTLOOP_CACHE to another folder" in said[0]
    with pytest.raises(OptionError, match="cannot write here"):
        device.set_cache_limit(1000)


def test_the_least_recently_used_entry_goes_first(tmp_path):
    store = ProgramStore(tmp_path, 3 * (HEAD_BYTES + 100))
    for number, key in enumerate("abc"):
        store.put(key, bytes(100))
        os.utime(store._file(key), (number, number))
    assert store.get("a") == bytes(100)
    store.put("d", bytes(100))
    assert [key for key in "abcd" if store.get(key) is not None] == ["a", "c", "d"]


def test_an_entry_larger_than_the_limit_evicts_nothing(tmp_path):
    store = ProgramStore(tmp_path, HEAD_BYTES + 100)
    store.put("a", bytes(100))
    store.put("b", bytes(101))
    assert store.get("a") is not None
    assert store.get("b") is None


def test_a_folder_that_vanishes_costs_only_the_entry(tmp_path):
    store = ProgramStore(tmp_path / "gone", None)
    store.put("a", b"x")
    assert store.get("a") is None


def test_nothing_half_written_is_left_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    ProgramStore(tmp_path, None).put("a", b"x")
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.data())
def test_any_damage_to_an_entry_is_found(tmp_path_factory, value, data):
    store = ProgramStore(tmp_path_factory.mktemp("store"), None)
    store.put("k", value)
    assert store.get("k") == value
    content = bytearray(store._file("k").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    store._file("k").write_bytes(content)
    assert store.get("k") is None
    assert not store._file("k").exists()


def test_a_program_for_another_machine_is_not_found(tmp_path, monkeypatch):
    ProgramStore(tmp_path, None).put("k", b"x")
    monkeypatch.setattr("hotloop.engine.device.machine", lambda: "other")
    assert ProgramStore(tmp_path, None).get("k") is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("500MB", 500 * 10**6),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("7k", 7000),
        ("none", None),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert device.parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (4 * 10**9, "4.0 GB"), (2 * 10**12, "2.0 TB")],
)
def test_sizes_as_people_read_them(size, text):
    assert device.show_size(size) == text


def test_the_environment_overrides_the_remembered_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    monkeypatch.delenv("HOTLOOP_CACHE_LIMIT", raising=False)
    assert device.cache_limit() == device.DEFAULT_CACHE_LIMIT
    device.set_cache_limit(10**6)
    assert device.cache_limit() == 10**6
    monkeypatch.setenv("HOTLOOP_CACHE_LIMIT", "2MB")
    assert device.cache_limit() == 2 * 10**6
    monkeypatch.setenv("HOTLOOP_CACHE_LIMIT", "much")
    with pytest.raises(OptionError, match="HOTLOOP_CACHE_LIMIT much: must be a size"):
        device.cache_limit()

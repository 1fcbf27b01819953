"""A sampling in a folder: stopped anywhere and resumed it ends with the same bits, and one line says what cannot be."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop import hmc
from hotloop.engine.interrupt import Interrupted, Stopped
from hotloop.engine.run import has_finished, take_folder
from hotloop.errors import CheckpointError, OptionError, RunError
from hotloop.mcmc import sampler, saved_chains, target

KEY = jax.random.key(5)
WARMUP, SAMPLES = 25, 12
OPTIONS: dict[str, Any] = {"chains": 4, "warmup": WARMUP, "samples": SAMPLES, "quiet": True}


def density(position: Any) -> Any:
    return -0.5 * (position["a"] - 1) ** 2 - 2 * (position["b"] ** 2).sum()


def initial(key: jax.Array) -> Any:
    return {"a": jax.random.normal(key), "b": jnp.ones(2)}


@cache
def compiled() -> hmc.Sampler:
    return hmc.Sampler(density, initial, **OPTIONS)


@cache
def straight() -> hmc.Result:
    return compiled().run(KEY)


@pytest.fixture(autouse=True)
def pieces_of_one_iteration(monkeypatch) -> Iterator[None]:
    straight()
    monkeypatch.setattr(compiled(), "_first_piece", None)
    monkeypatch.setattr(sampler, "FIRST_PIECE", 1)
    monkeypatch.setattr(sampler, "PIECE_SECONDS", 1e-9)
    yield


def assert_same_bits(found: hmc.Result) -> None:
    for field in ("samples", "log_density", "acceptance", "diverging", "leapfrogs", "mass"):
        pairs = zip(*(jax.tree.leaves(getattr(each, field)) for each in (found, straight())), strict=True)
        for a, b in pairs:
            np.testing.assert_array_equal(a, b)
    assert (found.step_size, found.trajectory) == (straight().step_size, straight().trajectory)


def at_piece(number: int, act: Any, monkeypatch) -> None:
    """Do something when so many pieces of the next sampling are done, before anything is saved."""
    real, seen = saved_chains.SavedChains.after_piece, []

    def after_piece(self: Any, *given: Any) -> None:
        seen.append(given)
        if len(seen) == number:
            act(self)
        real(self, *given)

    monkeypatch.setattr(saved_chains.SavedChains, "after_piece", after_piece)


def ask_to_stop(saved: saved_chains.SavedChains) -> None:
    saved.request.number = signal.SIGTERM


def fail(saved: saved_chains.SavedChains) -> None:
    raise ZeroDivisionError


def stop_at(number: int, folder: Path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        at_piece(number, ask_to_stop, patched)
        with pytest.raises(Interrupted):
            compiled().run(KEY, folder=folder)


def on_record(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("config.json", "events.jsonl", "environment.json")}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


@pytest.mark.parametrize("piece", [1, 17, WARMUP, WARMUP + 1, WARMUP + SAMPLES - 1, WARMUP + SAMPLES])
def test_stopped_after_any_piece_and_resumed_it_ends_with_the_same_bits(piece, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        at_piece(piece, ask_to_stop, patched)
        with pytest.raises(
            Interrupted, match=f"interrupted after iteration {piece} of 37, saved in"
        ) as caught:
            compiled().run(KEY, folder=tmp_path / "run")
    assert caught.value.update == piece and caught.value.exit_status == 128 + signal.SIGTERM
    assert str(caught.value).endswith("to resume: call it again with resume=True")
    assert_same_bits(compiled().run(KEY, folder=tmp_path / "run", resume=True))
    assert [each["update"] for each in events(tmp_path / "run", "resume")] == [piece]


def test_stopped_twice_it_ends_with_the_same_bits(tmp_path, monkeypatch) -> None:
    stop_at(10, tmp_path / "run", monkeypatch)
    with monkeypatch.context() as patched:
        at_piece(WARMUP - 10 + 3, ask_to_stop, patched)
        with pytest.raises(Interrupted, match="after iteration 28 of 37"):
            compiled().run(KEY, folder=tmp_path / "run", resume=True)
    assert_same_bits(compiled().run(KEY, folder=tmp_path / "run", resume=True))


def save_each_piece_from(number: int, monkeypatch) -> None:
    at_piece(number, lambda saved: monkeypatch.setattr(saved_chains, "SAVE_SECONDS", 0.0), monkeypatch)


@pytest.mark.parametrize("piece", [1, 9, 31])
def test_what_fails_goes_on_from_what_was_saved_by_the_clock(piece, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        save_each_piece_from(max(1, piece - 4), patched)
        at_piece(piece, fail, patched)
        with pytest.raises(ZeroDivisionError):
            compiled().run(KEY, folder=tmp_path / "run")
    steps = [each.name for each in (tmp_path / "run").glob("checkpoints/*/*")]
    kept = sorted(int(name) for name in steps if name.isdigit())
    assert kept == [piece - 2, piece - 1] * (piece > 1), "of each phase the last two stay"
    assert_same_bits(compiled().run(KEY, folder=tmp_path / "run", resume=True))
    assert [each["update"] for each in events(tmp_path / "run", "resume")] == [piece - 1] * (piece > 1)


def test_a_finished_one_is_read_back_and_nothing_is_drawn(tmp_path, monkeypatch) -> None:
    assert_same_bits(compiled().run(KEY, folder=tmp_path / "run"))
    assert not (tmp_path / "run/checkpoints/warmup").exists(), "half a minute was not over"
    for name in ("_warm", "_draw"):
        monkeypatch.setattr(compiled(), name, fail)
    assert_same_bits(compiled().run(KEY, folder=tmp_path / "run", resume=True))


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiled().run(KEY)
    assert not [*tmp_path.iterdir()]


def damage(folder: Path) -> None:
    """One byte of the newest step's arrays."""
    step = sorted((folder / "checkpoints/draws").iterdir())[-1]
    files = (path for path in step.rglob("*") if path.is_file() and path.name != "manifest.json")
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_what_is_damaged_is_skipped_with_a_line_and_only_damage_is_an_error(
    tmp_path, monkeypatch, capfd
) -> None:
    with monkeypatch.context() as patched:
        save_each_piece_from(28, patched)
        stop_at(30, tmp_path / "run", patched)
    shutil.copytree(tmp_path / "run", tmp_path / "all")
    damage(tmp_path / "run")
    assert_same_bits(compiled().run(KEY, folder=tmp_path / "run", resume=True))
    assert [each["update"] for each in events(tmp_path / "run", "resume")] == [29]
    assert re.search(r"^warning: skipped step 30: .*checksum", capfd.readouterr().err, re.MULTILINE)
    for step in (tmp_path / "all/checkpoints/draws").iterdir():
        (step / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no complete checkpoint in") as caught:
        compiled().run(KEY, folder=tmp_path / "all", resume=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": jax.random.key(6)}, "cannot resume with another config: key: [0, 5] -> [0, 6]"),
        ({"key": jax.random.key(5, impl="rbg")}, "key: [0, 5] -> [0, 5, 0, 5]"),
        ({"samples": 13}, "samples: 12 -> 13"),
        ({"warmup": 26}, "warmup: 25 -> 26"),
        ({"chains": 5}, "chains: 4 -> 5"),
        ({"step_size": 0.1}, "step_size: None -> 0.1"),
        ({"initial": {"a": jnp.zeros(()), "b": jnp.zeros(3)}}, "['b', 'float32[2]']] -> [['a'"),
        ({"initial": {"a": jnp.zeros(()), "b": jnp.zeros(2)}}, "with another start: initial is 0 there on"),
        ({"log_density": lambda p: 3 + density(p)}, "with another start: log_density is"),
        ({"log_density": lambda p: density(p) - p["a"]}, "with another start: "),
        ({"resume": False}, "already holds a run (config.json): continue it with resume=True"),
    ],
)  # fmt: skip
def test_what_is_another_sampling_is_one_line(changed, message, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "run"
    stop_at(2, folder, monkeypatch)
    given = {"log_density": density, "initial": initial, "key": KEY, "resume": True, **OPTIONS, **changed}
    before = on_record(folder)
    with pytest.raises(RunError, match=re.escape(message)) as caught:
        hmc.sample(folder=folder, **given)
    assert "\n" not in str(caught.value)
    assert on_record(folder) == before
    assert_same_bits(compiled().run(KEY, folder=folder, resume=True))


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": 13},
        {"log_density": lambda p: 3 + density(p)},
        {"log_density": lambda p: density(p) - 5 * (p["b"] ** 2).sum()},
    ],
    ids=["config", "start", "log density"],
)
def test_after_a_refusal_a_finished_one_is_still_finished(changed, tmp_path) -> None:
    """Other devices alone would be let through, and be written down."""
    folder, start = tmp_path / "run", {"a": jnp.zeros(()), "b": jnp.zeros(2)}
    hmc.sample(density, start, key=KEY, folder=folder, **OPTIONS)
    before = on_record(folder)
    given = {"log_density": density, **OPTIONS, "devices": min(2, len(jax.devices())), **changed}
    with pytest.raises(RunError, match="cannot resume with another"):
        hmc.sample(initial=start, key=KEY, folder=folder, resume=True, **given)
    assert on_record(folder) == before and has_finished(folder)


def test_a_density_whose_values_are_alike_is_told_by_its_gradient(tmp_path, monkeypatch) -> None:
    def far_below(p: Any) -> Any:
        return density(p) - 1e4

    start = {"a": jnp.zeros(()), "b": jnp.zeros(2)}
    given = {"initial": start, "key": KEY, "folder": tmp_path / "run", **OPTIONS}
    with monkeypatch.context() as patched:
        at_piece(10, ask_to_stop, patched)
        with pytest.raises(Interrupted):
            hmc.sample(far_below, **given)
    with pytest.raises(RunError, match="another log density: its gradient times the step is"):
        hmc.sample(lambda p: density(p) + 0.1 * p["a"] - 1e4, resume=True, **given)


@pytest.mark.parametrize("when", ["while the last piece is saved", "while draws are arranged"])
def test_a_stop_after_the_last_piece_says_that_all_is_saved(when, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        stop_after_the_last_piece(when, patched)
        with pytest.raises(
            Stopped, match=r"after iteration 37 of 37, saved in .* with resume=True$"
        ) as caught:
            compiled().run(KEY, folder=tmp_path / "run")
    assert isinstance(caught.value, Interrupted) and caught.value.update == 37
    assert caught.value.exit_status == 128 + signal.SIGTERM
    assert [each["status"] for each in events(tmp_path / "run", "end")] == ["interrupted"]
    monkeypatch.setattr(compiled(), "_draw", fail)
    assert_same_bits(compiled().run(KEY, folder=tmp_path / "run", resume=True))


def stop_after_the_last_piece(when: str, monkeypatch) -> None:
    held: list[saved_chains.SavedChains] = []
    at_piece(WARMUP + SAMPLES, held.append, monkeypatch)
    real_save, real_arranged = saved_chains.SavedChains._save, compiled()._arranged

    def save(self: Any, phase: str, done: int, state: Any) -> None:
        real_save(self, phase, done, state)
        if when == "while the last piece is saved" and done == WARMUP + SAMPLES:
            ask_to_stop(self)

    def arranged(draws: Any) -> Any:
        if when == "while draws are arranged":
            ask_to_stop(held[0])
        return real_arranged(draws)

    monkeypatch.setattr(saved_chains.SavedChains, "_save", save)
    monkeypatch.setattr(compiled(), "_arranged", arranged)


def test_a_folder_that_another_process_holds_is_not_gone_on_in(tmp_path) -> None:
    compiled().run(KEY, folder=tmp_path / "run")
    before = on_record(tmp_path / "run")
    lock = take_folder(tmp_path / "run", resume=True)
    try:
        with pytest.raises(RunError, match=f"is in use by process {os.getpid()}: wait for it"):
            compiled().run(KEY, folder=tmp_path / "run", resume=True)
    finally:
        os.close(lock)
    assert on_record(tmp_path / "run") == before


def test_a_folder_that_has_leaves_by_their_names_goes_on(tmp_path, monkeypatch) -> None:
    """As config.json had them until two names could read alike."""
    real = target.Layout.describe
    with monkeypatch.context() as patched:
        patched.setattr(target.Layout, "describe", lambda self: dict(real(self)))
        stop_at(30, tmp_path / "run", patched)
    assert json.loads((tmp_path / "run/config.json").read_text())["position"] == {
        "a": "float32[]",
        "b": "float32[2]",
    }
    for _ in range(2):
        assert_same_bits(compiled().run(KEY, folder=tmp_path / "run", resume=True))
    other = {"a": jnp.zeros(()), "b": jnp.zeros(3)}
    with pytest.raises(RunError, match="cannot resume with another config: position: "):
        hmc.sample(density, other, key=KEY, folder=tmp_path / "run", resume=True, **OPTIONS)


def test_shapes_of_leaves_whose_names_read_alike_are_compared(tmp_path, monkeypatch) -> None:
    def alike(p: Any) -> Any:
        return -0.5 * ((p["a.b"] ** 2).sum() + (p["a"]["b"] ** 2).sum())

    def start(*shape: int) -> Any:
        return {"a.b": jnp.zeros(2), "a": {"b": jnp.zeros(shape)}}

    options = {"key": KEY, "folder": tmp_path / "run", **OPTIONS}
    hmc.sample(alike, start(6), **options)
    message = (
        "position: [['a.b', 'float32[6]'], ['a.b', 'float32[2]']] -> [['a.b', 'float32[2, 3]'], ['a.b', "
    )
    with pytest.raises(RunError, match=re.escape(message)):
        hmc.sample(alike, start(2, 3), resume=True, **options)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("piece", [2, WARMUP + 3])
def test_a_density_that_is_the_same_where_the_chains_start_alone_is_another(
    piece, devices, tmp_path, monkeypatch
) -> None:
    if devices > len(jax.devices()):
        pytest.skip(f"{devices} devices")
    start = {"a": jnp.zeros(()), "b": jnp.zeros(2)}
    options = {**OPTIONS, "key": KEY, "folder": tmp_path / "run", "devices": devices}
    with monkeypatch.context() as patched:
        at_piece(piece, ask_to_stop, patched)
        with pytest.raises(Interrupted):
            hmc.sample(density, start, **options)
    with pytest.raises(RunError, match="cannot resume with another log density: log_density is") as caught:
        hmc.sample(lambda p: density(p) - 5 * (p["b"] ** 2).sum(), start, resume=True, **options)
    assert "\n" not in str(caught.value)
    straight = hmc.sample(density, start, **{**options, "folder": None})
    resumed = hmc.sample(density, start, resume=True, **options)
    for found, expected in zip(*map(jax.tree.leaves, (resumed.samples, straight.samples)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_folders_that_cannot_be_are_one_line_before_anything_is_compiled(tmp_path) -> None:
    def untouched(position: Any) -> Any:
        raise AssertionError

    given = {"log_density": untouched, "initial": 0.0, "key": KEY, **OPTIONS}
    with pytest.raises(OptionError, match=r"^resume is True without a folder"):
        hmc.sample(resume=True, **given)
    with pytest.raises(RunError, match=r"^nothing to resume: .* leave out resume=True"):
        hmc.sample(folder=tmp_path / "none", resume=True, **given)
    for wrong in ("", 3, True, b"chains"):
        with pytest.raises(OptionError, match=re.escape(f"folder is {wrong!r}: a path is needed")):
            saved_chains.check_folder(wrong, resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Not a directory"):
        hmc.sample(folder=tmp_path / "file", **given)


def test_steps_of_another_sampling_are_refused_and_one_that_never_saved_starts_over(
    tmp_path, monkeypatch
) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    with monkeypatch.context() as patched:
        at_piece(1, fail, patched)
        with pytest.raises(ZeroDivisionError):
            compiled().run(KEY, folder=ours)
    compiled().run(jax.random.key(6), folder=other)
    shutil.copytree(other / "checkpoints", ours / "checkpoints", dirs_exist_ok=True)
    with pytest.raises(RunError, match="step 37 is of another sampling; choose another folder"):
        compiled().run(KEY, folder=ours, resume=True)
    shutil.rmtree(ours / "checkpoints")
    assert_same_bits(compiled().run(KEY, folder=ours, resume=True))


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_saved_chains as these
from hotloop import hmc
from hotloop.mcmc import sampler, saved_chains

sampler.FIRST_PIECE, sampler.PIECE_SECONDS = 1, 1e-9
real, folder = saved_chains.SavedChains.after_piece, Path({folder!r})


def slowly(*given):
    (folder / "moves").touch()
    time.sleep(0.2)
    real(*given)


saved_chains.SavedChains.after_piece = slowly
try:
    hmc.sample(these.density, these.initial, key=these.KEY, folder=folder, **these.OPTIONS)
except KeyboardInterrupt as error:
    print(error)
    raise SystemExit(error.exit_status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_saves_and_stops(number, tmp_path) -> None:
    folder = tmp_path / "run"
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(folder))
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        limit = time.monotonic() + 90
        while not (folder / "moves").exists():
            assert child.poll() is None and time.monotonic() < limit, child.communicate()
            time.sleep(0.02)
        child.send_signal(number)
        out, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 128 + number, errors
    assert re.search(r"^interrupted after iteration \d+ of 37, saved in .* resume=True$", out.strip())
    assert "finishing the running piece, then saving" in errors and "Traceback" not in errors
    assert_same_bits(compiled().run(KEY, folder=folder, resume=True))

"""The table of measured times: kept for the next process, shared with others, made anew when damaged."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_fakes import install, make_operation, marked_product

from hotloop.layers import kernel_table, native
from hotloop.layers.kernel_table import Table, Times
from hotloop.layers.paths import Rival, is_rival_faster

MACHINE = {"cpu": "a processor"}


def never() -> Any:
    raise AssertionError("measured again")


def test_what_was_measured_is_kept_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "kernels" / "t.json"
    assert Table(path, MACHINE).find_times("a", lambda: Times(2.0, 1.0)) == Times(2.0, 1.0)
    assert Table(path, MACHINE).find_times("b", lambda: Times(1.0, 2.0)) == Times(1.0, 2.0)
    again = Table(path, MACHINE)
    assert again.find_times("a", never).is_native_faster
    assert not again.find_times("b", never).is_native_faster
    assert json.loads(path.read_text())["machine"] == MACHINE


def test_the_margin_is_kept_with_the_times_and_decides(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    slower = Times(0.8, 1.0, margin=0.75)
    Table(path, MACHINE).find_times("a", lambda: slower)
    found = Table(path, MACHINE).find_times("a", never)
    assert found == slower and found.is_native_faster
    assert not Times(0.74, 1.0, margin=0.75).is_native_faster
    assert not Times(0.8, 1.0).is_native_faster


def test_a_row_without_a_margin_has_the_usual_one(tmp_path: Path, caplog) -> None:
    path = tmp_path / "t.json"
    kernels = {"a": {"plain_ms": 1.05, "native_ms": 1.0}, "b": {"plain_ms": 1.2, "native_ms": 1.0}}
    path.write_text(json.dumps({"machine": MACHINE, "fault": "", "kernels": kernels}))
    table = Table(path, MACHINE)
    assert [table.find_times(key, never).is_native_faster for key in "ab"] == [False, True]
    assert table.kernels["a"].margin == kernel_table.MARGIN
    assert caplog.messages == []


@pytest.mark.parametrize(("margin", "wins"), [(0.75, True), (1.1, False)])
def test_a_rivals_own_margin_is_that_of_its_measured_times(
    monkeypatch, tmp_path: Path, margin: float, wins: bool
) -> None:
    """With real pairs of calls, of a clock that says what they take."""
    install(monkeypatch, tmp_path)
    monkeypatch.setattr(
        kernel_table,
        "time_both",
        lambda plain, rival, forms, margin, prepare: kernel_table.compare_calls(
            lambda _: 0.8, lambda _: 1.0, margin
        ),
    )
    operation = make_operation(margin=margin)
    forms = [jax.ShapeDtypeStruct((2, 2), jnp.float32)] * 2
    assert is_rival_faster(operation, "own", (("by", 1.0),), forms) == wins
    table = native.table()
    assert table is not None
    assert [times.margin for times in table.kernels.values()] == [margin]


def test_two_tables_of_one_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    one, other = Table(path, MACHINE), Table(path, MACHINE)
    one.find_times("a", lambda: Times(2.0, 1.0))
    other.find_times("b", lambda: Times(1.0, 2.0))
    assert one.find_times("b", never) == Times(1.0, 2.0)
    assert other.find_times("a", never) == Times(2.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"fault": null, "kernels": {"a": {"plain_ms": "x", "native_ms": 1}}}',
        '{"fault": null, "kernels": {"a": {"plain_ms": 1}}}',
        '{"fault": 3, "kernels": {}}',
        '{"fault": null, "kernels": [1]}',
    ],
)
def test_a_damaged_table_is_measured_anew_with_one_line(tmp_path: Path, caplog, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    table = Table(path, MACHINE)
    assert table.find_times("a", lambda: Times(2.0, 1.0)) == Times(2.0, 1.0)
    assert caplog.messages == [f"{path}: damaged, so the kernels of this machine are measured anew"]
    assert Table(path, MACHINE).find_times("a", never) == Times(2.0, 1.0)


def test_without_a_cache_it_lives_as_long_as_the_process(monkeypatch) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", "off")
    table = kernel_table.table_for("some version")
    assert table.path is None
    table.find_times("a", lambda: Times(2.0, 1.0))
    assert kernel_table.table_for("some version").find_times("a", never) == Times(2.0, 1.0)


def test_a_folder_that_cannot_be_written_costs_the_next_process_its_time_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = Table(tmp_path / "file" / "t.json", MACHINE)
    assert table.find_times("a", lambda: Times(2.0, 1.0)) == Times(2.0, 1.0)


def test_each_kind_of_machine_and_version_has_its_own_table(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    paths = {kernel_table.table_for("1").path, kernel_table.table_for("2").path}
    for name, value in (("cpu_model", lambda: "another"), ("usable_cores", lambda: 77)):
        with monkeypatch.context() as patch:
            patch.setattr(kernel_table, name, value)
            paths.add(kernel_table.table_for("1").path)
    monkeypatch.setenv("XLA_FLAGS", "--another")
    paths.add(kernel_table.table_for("1").path)
    assert len(paths) == 5


def test_of_processes_that_start_together_one_measures(tmp_path: Path) -> None:
    """Each thread opens the file by itself, as a process does."""
    measured: list[str] = []

    def measure() -> Times:
        measured.append("once")
        time.sleep(0.1)
        return Times(2.0, 1.0)

    tables = [Table(tmp_path / "t.json", MACHINE) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda table: table.find_times("a", measure), tables))
    assert found == [Times(2.0, 1.0)] * 3
    assert measured == ["once"]


def test_a_line_tells_of_long_measuring_and_then_more_and_more_rarely(
    tmp_path: Path, caplog, monkeypatch
) -> None:
    clock = iter(range(0, 10**6, 2))
    monkeypatch.setattr(kernel_table.time, "perf_counter", lambda: float(next(clock)))
    table = Table(tmp_path / "t.json", MACHINE)
    for i in range(20):
        table.find_times(str(i), lambda: Times(2.0, 1.0))
    assert [line.split(";")[0].split(": ")[1] for line in caplog.messages] == [
        "2 measured, 4 s so far",
        "8 measured, 16 s so far",
    ]


def test_a_fault_for_good_is_kept_and_another_found_again(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert Table(path, MACHINE).find_fault(lambda: ("no library", False)) == "no library"
    assert Table(path, MACHINE).find_fault(lambda: ("signal 4", True)) == "signal 4"
    assert Table(path, MACHINE).find_fault(never) == "signal 4"


@pytest.mark.parametrize(
    ("code", "fault", "for_good"),
    [
        ("pass", "", True),
        ("import os; os.kill(os.getpid(), 4)", "it ends by signal 4 on this CPU", True),
        ("import os; os.kill(os.getpid(), 11)", "it ends by signal 11 on this CPU", True),
        ("raise SystemExit('no such library')", "no such library", False),
    ],
)
def test_a_child_process_finds_what_the_cpu_faults_on(code: str, fault: str, for_good: bool) -> None:
    assert native.find_fault([sys.executable, "-S", "-c", code]) == (fault, for_good)


def test_a_child_that_hangs_is_no_verdict_for_good(monkeypatch) -> None:
    monkeypatch.setattr(native, "PROBE_SECONDS", 0.2)
    fault, for_good = native.find_fault([sys.executable, "-S", "-c", "import time; time.sleep(9)"])
    assert "could not be tried out" in fault
    assert not for_good


class Machine:
    """Two paths whose turns take as many milliseconds as said, times what `slowness(path, now)` says."""

    def __init__(self, plain_ms: float, native_ms: float, slowness: Any) -> None:
        self.now, self._slowness = 0.0, slowness
        self._ms = (plain_ms, native_ms)

    def call(self, path: int) -> Any:
        def timed(turns: int) -> float:
            ms = self._ms[path] * self._slowness(path, self.now)
            self.now += 1e-3 * turns * ms
            return ms

        return timed

    def compare(self) -> Times:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_table.time, "perf_counter", lambda: self.now)
            return kernel_table.compare_calls(self.call(0), self.call(1))


PACES = [(2.6, 1.3), (1.3, 1.3), (1.3, 2.6), (0.26, 0.2), (0.2, 0.2), (60.0, 40.0), (40.0, 40.0)]
"""Milliseconds of both paths: short and long ones, with the native one much faster, as fast, or slower."""


@pytest.mark.parametrize("paces", PACES)
def test_a_quiet_machine_has_the_times_of_both_paths(paces: tuple[float, float]) -> None:
    machine = Machine(*paces, lambda path, now: 1.0)
    assert machine.compare() == Times(*paces)
    assert machine.now < 0.53 + 10 * sum(paces) / 1e3


@settings(max_examples=40)
@given(st.sampled_from(PACES), st.integers(0, 1), st.floats(0, 0.5), st.floats(1.5, 5.0))
def test_a_moment_that_slows_one_path_does_not_change_the_choice(
    paces: tuple[float, float], disturbed: int, start: float, factor: float
) -> None:
    """For 0.3 seconds, right after the compiler or later: more than a third of the time where all is clear."""
    wanted = Machine(*paces, lambda path, now: 1.0).compare().is_native_faster

    def slowness(path: int, now: float) -> float:
        return factor if path == disturbed and start <= now < start + 0.3 else 1.0

    machine = Machine(*paces, slowness)
    assert machine.compare().is_native_faster == wanted
    assert machine.now < 1.5 + 10 * sum(paces) / 1e3


@settings(max_examples=40)
@given(st.sampled_from(PACES), st.floats(0, 0.6), st.floats(0.0, 0.5), st.booleans())
def test_a_clock_that_gets_half_or_twice_as_fast_does_not_change_the_choice(
    paces: tuple[float, float], start: float, lasting: float, faster: bool
) -> None:
    """At once, or little by little for as long as both are compared."""

    def slowness(path: int, now: float) -> float:
        passed = min(1.0, max(0.0, (now - start) / lasting)) if lasting else float(now >= start)
        return 2.0 - passed if faster else 1.0 + passed

    wanted = Machine(*paces, lambda path, now: 1.0).compare().is_native_faster
    assert Machine(*paces, slowness).compare().is_native_faster == wanted


def test_what_lies_near_the_limit_is_compared_for_longer() -> None:
    clear, near = (Machine(ms, 1.0, lambda path, now: 1.0) for ms in (1.3, 1.12))
    assert clear.compare().is_native_faster and near.compare().is_native_faster
    assert clear.now < 0.6 < 1.0 <= near.now < 1.1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for the CPU")
def test_every_turn_of_the_timed_loop_does_the_work() -> None:
    x = jnp.ones((8, 8))
    compiled = kernel_table.compile_loop(lambda x, w: jnp.sin(x) @ w, (x, x))
    assert compiled(3, (x, x))[0].shape == (8, 8)
    entry = compiled.as_text().split("ENTRY")[1]
    # XLA's own way would be to compute it before the loop, in the entry.
    assert "sine" not in entry
    assert "dot" not in entry
    hoisted = jax.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(x) @ x, x))
    assert "dot" in hoisted.lower(3, x).compile().as_text().split("ENTRY")[1]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for the CPU")
def test_the_path_with_more_work_takes_longer_even_inside_a_trace() -> None:
    found = []

    def measure(x: Any) -> Any:
        def many(x: Any) -> Any:
            for _ in range(40):
                x = jnp.sin(x)
            return x

        found.append(kernel_table.time_both(many, jnp.sin, [jax.ShapeDtypeStruct((64, 64), jnp.float32)]))
        return x

    jax.jit(measure)(jnp.ones(()))
    assert found[0].plain_ms > 5 * found[0].native_ms > 0


@pytest.mark.parametrize(("rows", "margin"), [(2, 1.1), (10**6, 1.02)], ids=["few numbers", "many"])
def test_large_arrays_may_have_a_margin_of_their_own(rows: int, margin: float) -> None:
    rival = Rival("product", "fake_product", marked_product, margin_of_large=1.02)
    assert rival.margin_for([jax.ShapeDtypeStruct((rows, 2), jnp.float32)]) == margin
    assert Rival("product", "fake_product", marked_product).margin_for(
        [jax.ShapeDtypeStruct((rows, 2), jnp.float32)]
    ) == pytest.approx(kernel_table.MARGIN)

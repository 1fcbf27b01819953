"""The measured limits of a device: plausible, kept, and made of work that really runs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine import measure as module
from hotloop.engine.measure import (
    Ceilings,
    Sizes,
    ceilings,
    copy_gbps,
    known_ceilings,
    matmul_tflops,
    measure_ceilings,
    noise,
    seconds_a_call,
)

DTYPES = ("float32", "bfloat16", "float16")
SMALL = Sizes(dict.fromkeys(DTYPES, (128, 1)), 2**22)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "ON_CPU", SMALL)
    monkeypatch.setattr(module, "ON_ACCELERATOR", SMALL)
    return tmp_path


def test_every_limit_is_a_positive_number():
    found = measure_ceilings(jax.devices()[0], SMALL)
    assert set(DTYPES) <= found.matmul_tflops.keys()
    assert all(0 < rate < 1e5 for rate in found.matmul_tflops.values())
    assert 0.01 < found.copy_gbps < 1e5
    if jax.default_backend() == "cpu":
        assert found.float32_uses == "float32"


def test_limits_are_kept_and_measured_again_when_asked(own_cache):
    device = jax.devices()[0]
    assert known_ceilings(device) is None  # it only looks
    first = ceilings(device)
    assert known_ceilings(device) == first
    assert ceilings(device) == first
    assert ceilings(device, calibrate=True) != first
    (path,) = (own_cache / "ceilings").iterdir()
    path.write_text("{damaged")
    assert ceilings(device).matmul_tflops.keys() == first.matmul_tflops.keys()


def test_without_a_cache_they_are_measured_each_time(own_cache, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE", "off")
    assert ceilings(jax.devices()[0]).copy_gbps > 0
    assert list(own_cache.iterdir()) == []


def test_the_roofline_is_the_slower_of_products_and_bytes():
    limits = Ceilings("d", {"float32": 2.0}, "float32", 10.0, "", "")
    assert limits.seconds(4e12, 1e9, "float32") == 2.0
    assert limits.seconds(4e9, 50e9, "float32") == 5.0


def test_the_timed_products_cannot_be_dropped_or_merged(monkeypatch):
    programs = []

    def compiled(loop, state, with_):
        programs.append(jax.jit(loop, donate_argnums=0).lower(state, with_).compile())
        return 1.0

    monkeypatch.setattr(module, "seconds_a_call", compiled)
    assert matmul_tflops("float32", 64, 5) == pytest.approx(5 * 2 * 2 * 64**3 / 1e12)
    text = programs[0].as_text()
    assert text.count(" dot(") + text.count("custom-call(") >= 2
    assert "while(" in text


def test_a_copy_counts_what_every_pass_reads_and_what_it_writes(monkeypatch):
    monkeypatch.setattr(module, "seconds_a_call", lambda loop, state, with_: 0.5)
    assert copy_gbps(4000) == pytest.approx(2 * (4000 + 4000) / 0.5 / 1e9)


def test_a_figure_is_the_median_of_the_calls_after_the_first(monkeypatch):
    clock = iter(
        [0, 1, 10, 15, 20, 22]
    )  # calls of 1, 5 and 2 seconds; the one that compiles is not looked at
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert seconds_a_call(lambda state, with_: state + with_, jnp.zeros(3), jnp.ones(3)) == 2


def test_memory_is_given_back():
    device = jax.devices()[0]
    before = len(jax.live_arrays())
    measure_ceilings(device, SMALL)
    assert len(jax.live_arrays()) == before


def test_the_noise_has_mean_0_variance_1_and_no_pattern():
    x = np.asarray(noise((512, 512)), np.float64)
    assert abs(x.mean()) < 4 / 512
    assert abs(x.var() - 1) < 4 * 0.9 / 512
    assert abs(np.corrcoef(x[0], x[1])[0, 1]) < 4 / 512**0.5
    assert jnp.isfinite(noise((3,))).all()

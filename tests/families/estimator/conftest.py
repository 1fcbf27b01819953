"""The estimator's tests compile the same few programs again and again: they share a compilation cache."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory: Any) -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.getbasetemp() / "programs"))
    jax.config.update(names[1], 0.05)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

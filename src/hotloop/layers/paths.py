"""How an operation picks its implementation: a table of paths, chosen when the program is lowered for a platform.

An `Operation` has a default, which serves every platform, and may have one better path for a named platform. The
choice is made at lowering (`lax.platform_dependent`), so that one traced program is right on whatever device it is
compiled for. A later path (another library's kernels, say) is registered from its own file and no caller changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax

Implementation = Callable[..., Any]

# Part of jit's cache key, so that a forced path is traced anew.
_FORCED: Any = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]


class Operation:
    """One operation and its paths; called like its default, arrays in place and static settings by keyword.

    `platforms` are the paths of the platforms that have one, (name, implementation) each: `cpu=("canonical", fast)`.
    """

    def __init__(self, default: Implementation, **platforms: tuple[str, Implementation]):
        self._paths: dict[str, Implementation] = {"default": default, **dict(platforms.values())}
        self._by_platform = {platform: path for platform, (path, _) in platforms.items()}

    def register(self, path: str, platform: str, implementation: Implementation) -> None:
        """Make `implementation` the path for `platform` (cpu, cuda, rocm, tpu); the latest registered wins."""
        self._paths[path] = implementation
        self._by_platform[platform] = path

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def __call__(self, *arrays: Any, **settings: Any) -> Any:
        def bound(path: str) -> Implementation:
            implementation = self._paths[path]
            return lambda *operands: implementation(*operands, **settings)

        forced_path = _FORCED.value
        if forced_path in self._paths:
            return bound(forced_path)(*arrays)
        if not self._by_platform:
            return bound("default")(*arrays)
        chosen = {platform: bound(path) for platform, path in self._by_platform.items()}
        return lax.platform_dependent(*arrays, **chosen, default=bound("default"))


@contextmanager
def force_path(path: str) -> Iterator[None]:
    """Within it, every operation that has a path of this name takes it, whatever the platform."""
    with _FORCED(path):
        yield


def materialise(arrays: Any) -> Any:
    """The same arrays, written out: behind a barrier that no fusion crosses, so that no reader works them out again."""
    return lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]


# For code that all platforms share: a GPU would pay for the barrier with another kernel.
materialise_on_cpu = Operation(lambda arrays: arrays, cpu=("barrier", materialise))

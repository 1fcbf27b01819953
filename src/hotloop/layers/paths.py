"""How an operation picks its implementation: a table of paths, chosen when the program is lowered for a platform.

An `Operation` has a default, which serves every platform, and may have one better path for a named platform. The
choice is made at lowering (`lax.platform_dependent`), so that one traced program is right on whatever device it is
compiled for. A later path (another library's kernels, say) is registered from its own file and no caller changes.

On the CPU an operation may have a `Rival` besides, a kernel of `hotloop-native`: it is taken for the shapes for which
it was measured to be faster than the path that it would replace, and never in an exported program.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from hotloop import rehearsal
from hotloop.layers import kernel_table, native

Implementation = Callable[..., Any]

# Part of jit's cache key, so that a forced path is traced anew.
_FORCED: Any = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]
NATIVE = "native"


@dataclass(frozen=True)
class Rival:
    """A kernel of `hotloop-native` for an operation on float32 arrays."""

    name: str
    """What the operation is called in the table of times."""
    target: str
    """The handler that it needs."""
    implementation: Implementation
    """Called like the operation's other paths, on arrays that are not empty."""
    stacked: tuple[int, ...] = ()
    """The arrays whose rows have nothing to do with each other, as those of the results: where these and no others are
    mapped by `jax.vmap`, one call takes the rows of all."""
    margin: float = kernel_table.MARGIN
    """How many times as fast as the operation's own path it must be to be taken."""
    is_slow: Implementation = lambda *arrays, **settings: False
    """Whether the operation's own path is known to be slow, called like the implementation."""

    def suits(self, arrays: tuple[Any, ...]) -> bool:
        return all(array.dtype == jnp.float32 and 0 not in array.shape for array in arrays)


class Operation:
    """One operation and its paths; called like its default, arrays in place and static settings by keyword.

    `platforms` are the paths of the platforms that have one, (name, implementation) each: `cpu=("canonical", fast)`.
    """

    def __init__(
        self, default: Implementation, rival: Rival | None = None, **platforms: tuple[str, Implementation]
    ):
        self._paths: dict[str, Implementation] = {"default": default, **dict(platforms.values())}
        self._by_platform = {platform: path for platform, (path, _) in platforms.items()}
        self.rival = rival
        if rival is not None:
            self._paths[NATIVE] = rival.implementation

    def register(self, path: str, platform: str | None, implementation: Implementation) -> None:
        """Make `implementation` the path for `platform` (cpu, cuda, rocm, tpu); the latest registered wins. With None
        it is taken where it is forced, and nowhere else."""
        self._paths[path] = implementation
        if platform is not None:
            self._by_platform[platform] = path

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def bind(self, path: str, settings: Any) -> Implementation:
        """A path with these settings, to be called with the arrays."""
        return partial(self._paths[path], **dict(settings))

    def __call__(self, *arrays: Any, **settings: Any) -> Any:
        forced_path = _FORCED.value
        if forced_path in self._paths:
            return self.bind(forced_path, settings)(*arrays)
        chosen = {platform: self.bind(path, settings) for platform, path in self._by_platform.items()}
        if self.may_be_native(*arrays):
            chosen["cpu"] = partial(_call_faster, self, settings)
        elif self._is_missed(arrays, settings):
            _name_package()
        if not chosen:
            return self.bind("default", settings)(*arrays)
        return lax.platform_dependent(*arrays, **chosen, default=self.bind("default", settings))

    def may_be_native(self, *arrays: Any) -> bool:
        """Whether a call with these arrays would take the rival, or have it among its paths."""
        if _FORCED.value in self._paths:
            return bool(_FORCED.value == NATIVE)
        return self._is_for(arrays) and self.rival is not None and native.has_target(self.rival.target)

    def _is_missed(self, arrays: tuple[Any, ...], settings: dict[str, Any]) -> bool:
        """Whether it is felt that the package is not there."""
        return self.rival is not None and self._is_for(arrays) and self.rival.is_slow(*arrays, **settings)

    def _is_for(self, arrays: tuple[Any, ...]) -> bool:
        return self.rival is not None and native.is_wanted() and self.rival.suits(arrays)

    @property
    def path_on_cpu(self) -> str:
        return self._by_platform.get("cpu", "default")


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


# The choice between an operation's own path and its rival is a primitive, because only its lowering knows whether the
# program is for this machine or for export. Whatever else is done with it is done with the operation's own path.
_faster: Any = Primitive("faster_path")
_faster.multiple_results = True


def _call_faster(operation: Operation, settings: dict[str, Any], *arrays: Any) -> Any:
    path = operation.path_on_cpu
    structure = jax.tree.structure(jax.eval_shape(operation.bind(path, settings), *arrays))
    frozen = tuple(sorted(settings.items()))
    return jax.tree.unflatten(
        structure, _faster.bind(*arrays, operation=operation, path=path, settings=frozen)
    )


def _leaves_of(operation: Operation, path: str, settings: Any) -> Implementation:
    return lambda *arrays: jax.tree.leaves(operation.bind(path, settings)(*arrays))


def _run(*arrays: Any, **choice: Any) -> Any:
    return _leaves_of(**choice)(*arrays)


def _results(*arrays: Any, **choice: Any) -> Any:
    return jax.make_jaxpr(_leaves_of(**choice))(*arrays).out_avals


def _differentiate(primals: Any, tangents: Any, **choice: Any) -> Any:
    exact = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)  # type: ignore[no-untyped-call]
    return jax.jvp(_leaves_of(**choice), tuple(primals), exact)


def _map_rows(arrays: Any, axes: Any, **choice: Any) -> Any:
    """One call for the rows of all where they have nothing to do with each other, else the operation's own path."""
    stacked = choice["operation"].rival.stacked
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    if any(axis is not None and i not in stacked for i, axis in enumerate(axes)):
        found = jax.vmap(_leaves_of(**choice), tuple(axes))(*arrays)
        return found, [0] * len(found)

    def join(array: Any, axis: int | None) -> Any:
        rows = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
        return rows.reshape(-1, *rows.shape[2:])

    joined = [join(arrays[i], axes[i]) if i in stacked else arrays[i] for i in range(len(arrays))]
    found = _faster.bind(*joined, **choice)
    return [each.reshape(size, -1, *each.shape[1:]) for each in found], [0] * len(found)


def _lower(
    context: mlir.LoweringRuleContext, *values: Any, operation: Operation, path: str, settings: Any
) -> Any:
    arrays: Any = context.avals_in
    rival_wins = _is_for_this_cpu(context) and is_rival_faster(operation, path, settings, arrays)
    leaves = _leaves_of(operation, NATIVE if rival_wins else path, settings)
    return mlir.lower_fun(leaves, multiple_results=True)(context, *values)


_faster.def_impl(_run)
_faster.def_abstract_eval(_results)
ad.primitive_jvps[_faster] = _differentiate
batching.primitive_batchers[_faster] = _map_rows
mlir.register_lowering(_faster, _lower)


def _is_for_this_cpu(context: mlir.LoweringRuleContext) -> bool:
    """Whether the program is compiled here and now, for one CPU device or for each device's own part.

    A call of another library is a stranger to XLA's partitioner: given arrays that are spread over devices it would
    have all of them gathered, and computed, on each.
    """
    module = context.module_context
    if tuple(module.platforms) != ("cpu",) or module.lowering_parameters.for_export or rehearsal.is_on():
        return False
    devices: Any = module.axis_context
    if mesh := getattr(devices, "mesh", None):
        return set(mesh.axis_names) == set(devices.manual_axes)
    return getattr(devices, "num_devices", None) == 1


def is_rival_faster(operation: Operation, path: str, settings: Any, arrays: Sequence[Any]) -> bool:
    """Whether the package works here, and its kernel was measured to beat the path that it would replace."""
    rival, table = operation.rival, native.table()
    if rival is None or table is None:
        return False
    shapes = ["x".join(map(str, array.shape)) for array in arrays]
    key = " ".join([f"{rival.name}:", *shapes, *(f"{name}={value}" for name, value in settings)])

    def alone(path: str) -> Implementation:
        def traced(*arrays: Any) -> Any:
            with native.use_native(False):
                return operation.bind(path, settings)(*arrays)

        return traced

    def measure() -> kernel_table.Times:
        return kernel_table.time_both(alone(path), alone(NATIVE), arrays, rival.margin)

    return table.find_times(key.replace(", ", ","), measure).is_native_faster


def _name_package() -> None:
    """Where the CPU computes: what would make a slow case faster."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if str(getattr(device, "platform", device) or jax.default_backend()) == "cpu":
        native.warn_once(
            f"some convolutions of this program are slow on a CPU; for faster ones: {native.INSTALL}"
        )

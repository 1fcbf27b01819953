"""How an operation picks its implementation: a table of paths, chosen when the program is lowered for a platform.

An `Operation` has a default, which serves every platform, and may have one better path for a named platform. The
choice is made at lowering (`lax.platform_dependent`), so that one traced program is right on whatever device it is
compiled for; where that is known before (`traced_platform`) no other path is traced. A later path (another library's
kernels, say) is registered from its own file and no caller changes.

On the CPU an operation may have a `Rival` besides, a kernel of `hotloop-native`: it is taken for the shapes for which
it was measured to be faster than the path that it would replace, and never in an exported program. On an NVIDIA card
it may have a `CardKernel`, taken for the shapes of that kernel's own table where all of its blocks fit on the card.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from hotloop import rehearsal
from hotloop.layers import kernel_table, native
from hotloop.machine import is_switched_off
from hotloop.traced_platform import find_traced_platform

Implementation = Callable[..., Any]

# Part of jit's cache key, so that a forced path is traced anew.
_FORCED: Any = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]
NATIVE = "native"
PERSISTENT = "persistent"
LARGE = 5 * 10**5
"""Numbers of a call's first array, its inputs, from which on what lies around the call no longer matters."""
CARD = "9.0"
"""The compute capability that card kernels are built for: their instructions are Hopper's alone."""
CARD_SWITCH = "HOTLOOP_PERSISTENT"
"""Set to 0 it switches card kernels off."""
CARD_JAX = (0, 11, 2)
"""The oldest jax with which they were tried."""
SHARING = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
"""Set for programs that share a card by NVIDIA's Multi-Process Service."""
OLD_JAX = f"it needs jax 0.11.2 or later, and this is {jax.__version__}"


@dataclass(frozen=True)
class Rival:
    """A kernel of `hotloop-native` for an operation on float32 arrays."""

    name: str
    """What the operation is called in the table of times."""
    target: str
    """The handler that it needs."""
    implementation: Implementation
    """Called like the operation's other paths, on arrays that are not empty."""
    prepare: Implementation | None = None
    """Called the same way: the arrays that the implementation is given instead, weights in another order among them. It
    is left out of the times, as a loop that does not change the weights does it once."""
    stacked: tuple[int, ...] = ()
    """The arrays whose rows have nothing to do with each other, as those of the results: where these and no others are
    mapped by `jax.vmap`, one call takes the rows of all."""
    margin: float = kernel_table.MARGIN
    """How many times as fast as the operation's own path it must be to be taken."""
    margin_of_large: float | None = None
    """The same where the first array has `LARGE` numbers or more, if it is another."""
    is_slow: Implementation = lambda *arrays, **settings: False
    """Whether the operation's own path is known to be slow, called like the implementation."""

    def run(self, *arrays: Any, **settings: Any) -> Any:
        return self.implementation(*self.prepared(*arrays, **settings), **settings)

    def prepared(self, *arrays: Any, **settings: Any) -> Sequence[Any]:
        return arrays if self.prepare is None else self.prepare(*arrays, **settings)

    def margin_for(self, arrays: Sequence[Any]) -> float:
        is_large = arrays[0].size >= LARGE
        return self.margin_of_large if is_large and self.margin_of_large is not None else self.margin

    def suits(self, arrays: tuple[Any, ...]) -> bool:
        return all(array.dtype == jnp.float32 and 0 not in array.shape for array in arrays)


@dataclass(frozen=True)
class CardKernel:
    """A kernel for NVIDIA's Hopper cards, whose blocks may wait for each other."""

    implementation: Implementation
    """Called like the operation's other paths."""
    blocks: Implementation
    """Called like the implementation: how many blocks must be on the card together, 1 where none waits; None where it
    is not for these arrays."""


class Operation:
    """One operation and its paths; called like its default, arrays in place and static settings by keyword.

    `platforms` are the paths of the platforms that have one, (name, implementation) each: `cpu=("canonical", fast)`.
    """

    def __init__(
        self,
        default: Implementation,
        rival: Rival | None = None,
        card_kernel: CardKernel | None = None,
        **platforms: tuple[str, Implementation],
    ):
        self._paths: dict[str, Implementation] = {"default": default, **dict(platforms.values())}
        self._by_platform = {platform: path for platform, (path, _) in platforms.items()}
        self.rival = rival
        if rival is not None:
            self._paths[NATIVE] = rival.run
        self.card_kernel = card_kernel
        if card_kernel is not None:
            self._paths[PERSISTENT] = card_kernel.implementation

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
        if self.may_be_persistent(*arrays, **settings):
            chosen["cuda"] = partial(_call_faster, self, "cuda", settings)
        if self.may_be_native(*arrays):
            chosen["cpu"] = partial(_call_faster, self, "cpu", settings)
        elif self._is_missed(arrays, settings):
            _name_package()
        default = self.bind("default", settings)
        if not chosen:
            return default(*arrays)
        if (platform := find_traced_platform()) is not None:
            return chosen.get(platform, default)(*arrays)
        return lax.platform_dependent(*arrays, **chosen, default=default)

    def may_be_native(self, *arrays: Any) -> bool:
        """Whether a call with these arrays would take the rival, or have it among its paths."""
        if _FORCED.value in self._paths:
            return bool(_FORCED.value == NATIVE)
        return self._is_for(arrays) and self.rival is not None and native.has_target(self.rival.target)

    def may_be_persistent(self, *arrays: Any, **settings: Any) -> bool:
        """Whether a call with these arrays would take the card kernel, or have it among its paths."""
        if _FORCED.value in self._paths:
            return bool(_FORCED.value == PERSISTENT)
        if self.card_kernel is None or not _are_card_kernels_wanted():
            return False
        return self.card_kernel.blocks(*arrays, **settings) is not None

    def _is_missed(self, arrays: tuple[Any, ...], settings: dict[str, Any]) -> bool:
        """Whether it is felt that the package is not there."""
        return self.rival is not None and self._is_for(arrays) and self.rival.is_slow(*arrays, **settings)

    def _is_for(self, arrays: tuple[Any, ...]) -> bool:
        return self.rival is not None and native.is_wanted() and self.rival.suits(arrays)

    def path_on(self, platform: str) -> str:
        return self._by_platform.get(platform, "default")


@contextmanager
def force_path(path: str) -> Iterator[None]:
    """Within it, every operation that has a path of this name takes it, whatever the platform."""
    with _FORCED(path):
        yield


def materialise(arrays: Any) -> Any:
    """The same arrays, written out: behind a barrier that no fusion crosses, so that no reader works them out again."""
    return lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """The same arrays, all different on each device of a `shard_map` where one of them is: what a gradient written by
    hand gives is each device's own, and jax then sums it for those that all devices share."""
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    wanted = frozenset[Any]().union(*axes)
    return tuple(
        lax.pcast(array, tuple(wanted - own), to="varying") if wanted - own else array
        for array, own in zip(arrays, axes, strict=True)
    )


# For code that all platforms share: a GPU would pay for the barrier with another kernel.
materialise_on_cpu = Operation(lambda arrays: arrays, cpu=("barrier", materialise))


# The choice between an operation's own path and a faster one is a primitive, as only its lowering knows whether the
# program is for this machine or for export. Whatever else is done with it is done with the operation's own path.
_faster: Any = Primitive("faster_path")
_faster.multiple_results = True


def _call_faster(operation: Operation, platform: str, settings: dict[str, Any], *arrays: Any) -> Any:
    path = operation.path_on(platform)
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
    rival = choice["operation"].rival
    stacked = () if rival is None else rival.stacked
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    if size == 0 or any(axis is not None and i not in stacked for i, axis in enumerate(axes)):
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
    faster = _find_faster(context, operation, path, settings)
    return mlir.lower_fun(_leaves_of(operation, faster, settings), multiple_results=True)(context, *values)


def _find_faster(context: mlir.LoweringRuleContext, operation: Operation, path: str, settings: Any) -> str:
    """The path to take on the platform that the program is lowered for."""
    arrays: Any = context.avals_in
    if _is_for_this(context, "cpu") and is_rival_faster(operation, path, settings, arrays):
        return NATIVE
    if _is_for_this(context, "cuda") and does_card_hold(operation, settings, arrays):
        return PERSISTENT
    return path


_faster.def_impl(_run)
_faster.def_abstract_eval(_results)
ad.primitive_jvps[_faster] = _differentiate
batching.primitive_batchers[_faster] = _map_rows
mlir.register_lowering(_faster, _lower)


def _is_for_this(context: mlir.LoweringRuleContext, platform: str) -> bool:
    """Whether the program is compiled here and now, for one device of the platform or for each device's own part.

    A call of another library is a stranger to XLA's partitioner: given arrays that are spread over devices it would
    have all of them gathered, and computed, on each.
    """
    module = context.module_context
    if tuple(module.platforms) != (platform,) or module.lowering_parameters.for_export or rehearsal.is_on():
        return False
    devices: Any = module.axis_context
    if mesh := getattr(devices, "mesh", None):
        # Collectives, too, are kernels whose blocks wait: beside one a card kernel might never find room.
        alone = platform == "cpu" or mesh.size == 1
        return alone and set(mesh.axis_names) == set(devices.manual_axes)
    return getattr(devices, "num_devices", None) == 1


def is_rival_faster(operation: Operation, path: str, settings: Any, arrays: Sequence[Any]) -> bool:
    """Whether the package works here, and its kernel was measured to beat the path that it would replace."""
    rival, table = operation.rival, native.table()
    if rival is None or table is None:
        return False
    shapes = ["x".join(map(str, array.shape)) for array in arrays]
    key = " ".join([f"{rival.name}:", *shapes, *(f"{name}={value}" for name, value in settings)])

    def alone(function: Implementation) -> Implementation:
        def traced(*arrays: Any) -> Any:
            with native.use_native(False):
                return function(*arrays, **dict(settings))

        return traced

    def measure() -> kernel_table.Times:
        plain, rivals = alone(operation.bind(path, ())), alone(rival.implementation)
        prepare = alone(rival.prepared)
        return kernel_table.time_both(plain, rivals, arrays, rival.margin_for(arrays), prepare)

    return table.find_times(key.replace(", ", ","), measure).is_native_faster


def does_card_hold(operation: Operation, settings: Any, arrays: Sequence[Any]) -> bool:
    """Whether the card kernel runs on this card, all of its blocks at once: one that waits for a block which has no
    room would wait for ever."""
    card_kernel = operation.card_kernel
    if card_kernel is None or not _are_card_kernels_wanted():
        return False
    blocks = card_kernel.blocks(*arrays, **dict(settings))
    return blocks is not None and has_card_for(blocks, "some layers of this program")


def has_card_for(blocks: int, work: str) -> bool:
    """Whether a card kernel of so many blocks may run here; `work` names what an older jax leaves slow."""
    obstacle = find_card_obstacle(blocks)
    if obstacle == OLD_JAX:
        native.warn_once(f"{work} would be faster on this card with jax 0.11.2 or later")
    return obstacle is None


def find_card_obstacle(blocks: int) -> str | None:
    """What keeps a card kernel from running here, all of its blocks at once, in a few words."""
    cards = _local_cards()
    if not _are_card_kernels_wanted():
        return f"{CARD_SWITCH} switches such kernels off"
    if not cards or any(card.compute_capability != CARD for card in cards):
        return (
            f"it needs an NVIDIA card of compute capability {CARD}, and all cards of the machine to be such"
        )
    if (room := min(card.core_count for card in cards)) < blocks:
        return f"it needs {blocks} multiprocessors, and the card has {room}"
    if _may_overlap():
        return "XLA_FLAGS may have kernels run side by side"
    if shared := [name for name in SHARING if os.environ.get(name)]:
        return f"{shared[0]} says that other programs may hold multiprocessors of the card"
    return OLD_JAX if jax.__version_info__ < CARD_JAX else None


def _are_card_kernels_wanted() -> bool:
    return not is_switched_off(CARD_SWITCH)


def _may_overlap() -> bool:
    """Whether XLA was told to run independent kernels side by side, or may have been by a file: two of those whose
    blocks wait for each other could keep one another from ever finding room."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    return "concurrent" in flags.lower() or (bool(flags) and not flags.startswith("-"))


def _local_cards() -> list[Any]:
    """None where a program for a card is lowered on a machine without one."""
    try:
        return list(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return []


def _name_package() -> None:
    """Where the CPU computes: what would make a slow case faster."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if str(getattr(device, "platform", device) or jax.default_backend()) == "cpu":
        native.warn_once(
            f"some convolutions of this program are slow on a CPU; for faster ones: {native.INSTALL}"
        )

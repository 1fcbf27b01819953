"""The package `hotloop-native`, which has other libraries' kernels for the CPU: found, tried out, loaded, called.

It is never needed. Where it is not installed, is switched off (`--no-native`, `HOTLOOP_NATIVE=0`, `use_native(False)`)
or does not work on this CPU, operations keep their own paths; `paths.py` chooses, and this file knows no operation.
"""

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import jax

from hotloop.layers import kernel_table
from hotloop.machine import is_switched_off, run_child

PACKAGE = "hotloop_native"
INSTALL = "pip install 'hotloop[native]', or the wheel that `make native` builds"
UNLESS_SLOWER = 0.75
"""The margin of kernels that stand between others of the package: one is taken unless it takes a third longer.
Its threads are not XLA's, and to change between them costs what no path shows alone. ResNet-50 at batch 8, with the
faster path of each convolution and with the package's alone: 385 and 319 ms in inference, 1,195 and 1,123 an update."""
PROBE = "hotloop.layers.native_probe"
PROBE_SECONDS = 120.0
SWITCH = "HOTLOOP_NATIVE"
log = logging.getLogger("hotloop.native")

# Part of jit's cache key, so that what is switched is traced anew.
_SWITCHED: Any = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]


def is_wanted() -> bool:
    """Whether nobody has switched the package off, be it installed or not."""
    switched = _SWITCHED.value
    if switched is None:
        return not is_switched_off(SWITCH)
    return bool(switched)


@contextmanager
def use_native(wanted: bool) -> Iterator[None]:
    """Within it programs are traced with the package's kernels among the paths, or without, whatever HOTLOOP_NATIVE
    says."""
    with _SWITCHED(wanted):
        yield


@cache
def find_package() -> ModuleType | None:
    """The package, not yet loaded; None where it is not installed or cannot be imported, which a line tells."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != PACKAGE:
            warn_once(f"hotloop-native is not used: {error}")
        return None


def has_target(name: str) -> bool:
    """Whether the installed package has a handler of this name."""
    package = find_package()
    return package is not None and name in package.TARGETS


@cache
def warn_once(text: str) -> None:
    log.warning("%s", text)


def table() -> kernel_table.Table | None:
    """This machine's table of times for the installed package, ready to be called; None, and a line, where it does not
    work here. The first call on a machine tries it out in a process of its own."""
    package = find_package()
    if package is None:
        return None
    found = kernel_table.table_for(package.VERSION)
    if fault := found.find_fault(find_fault):
        warn_once(f"hotloop-native is not used: {fault}")
        return None
    return found if is_loaded() else None


@cache
def is_loaded() -> bool:
    """Load the package's library and make its handlers known to XLA, once; False, and a line, where that fails."""
    package = find_package()
    if package is None:
        return False
    try:
        library = package.load()
        for name in package.TARGETS:
            handler = jax.ffi.pycapsule(getattr(library, name))  # type: ignore[no-untyped-call]
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except (OSError, ImportError, AttributeError) as error:
        warn_once(f"hotloop-native is not used: {error}")
        return False
    return True


def call(target: str, results: Any, *arrays: Any, **attributes: Any) -> Any:
    """The handler on these arrays; `results` is a ShapeDtypeStruct, or a sequence of them."""
    is_loaded()
    handler: Any = jax.ffi.ffi_call(target, results)
    return handler(*arrays, **attributes)


def like(array: Any) -> jax.ShapeDtypeStruct:
    """A result of this array's shape and type."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def empty() -> jax.Array:
    """Stands for an operand that there is none of."""
    return jax.numpy.zeros(0, jax.numpy.float32)


def find_fault(command: Sequence[str] = (sys.executable, "-m", PROBE)) -> tuple[str, bool]:
    """Try every kind of kernel in a process of its own, which may die of it: what went wrong, in words ('' for
    nothing), and whether that is for good: a CPU that reports instructions which it faults on will do so again."""
    # One of several processes must not be met by the child, and a device that is no CPU not be taken by it.
    unwanted = ("HOTLOOP_NOTES", "HOTLOOP_COORDINATOR", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"JAX_PLATFORMS": "cpu", "HOTLOOP_PROCESSES": "1"}
    try:
        status, said = run_child(command, environment, PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be tried out ({error})", False
    if status < 0:
        return f"it ends by signal {-status} on this CPU", True
    return (said, False) if status else ("", True)

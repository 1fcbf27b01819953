"""The device to compute on, chosen before any other jax work, with its cache of compiled programs; devices as a mesh;
what a result owes to the machine. Nothing here imports jax at its top: `setup` quiets jax first.

`HOTLOOP_CACHE` names the cache's folder or turns it off, `HOTLOOP_CACHE_LIMIT` or `hotloop cache limit` bounds it.
"""

import contextlib
import importlib.util
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, python_version, system
from typing import TYPE_CHECKING, Any, NamedTuple

from hotloop import rehearsal
from hotloop.engine import processes
from hotloop.engine.malloc import keep_freed
from hotloop.errors import DeviceError, OptionError, first_line
from hotloop.machine import cache_folder, cpu_model, search_file, usable_cores
from hotloop.version import VERSION as __version__

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh


QUERY_SECONDS = 10.0  # for another program to say what the machine is
SUFFIX, PARTIAL = ".program", ".partial"
MARK = b"hotloop1"
HEAD_BYTES = len(MARK) + 16
DEFAULT_CACHE_LIMIT = 4 * 10**9
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LONGEST_NUMBER = 18  # digits of a size; more are no size that a disk has
INSTALL = {"gpu": "hotloop[cuda]", "tpu": "hotloop[tpu]"}
REPLICA, STAGE = "replica", "stage"
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
VIRTUAL_DEVICES = "xla_force_host_platform_device_count"
CPU_PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
GPU_MEMORY = (
    PREALLOCATE,
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
"""The variables by which a user tells jax how to take a GPU's memory."""
SOURCE = Path(__file__).resolve().parents[3]


def setup(
    device: str = "auto",
    *,
    only_accelerator: bool = False,
    warn: Callable[[str], None] = warnings.warn,
    check: Callable[[], None] = lambda: None,
) -> "jax.Device":
    """The first device of the platform asked for (auto: accelerators before the CPU), made jax's default.

    Compiled programs are kept in the cache from here on. `check` is called when the processes have met, and can be
    counted, and no device is open yet.
    """
    # Errors of XLA and jax come to us as exceptions; their log lines only confuse.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("jax").setLevel(logging.ERROR)
    is_surely_cpu = device == "cpu" or (device == "auto" and not may_have_accelerator())
    if not is_surely_cpu:
        take_memory_as_needed(os.environ)
    import jax

    processes.start()
    check()
    enable_cache(warn)
    if is_surely_cpu:
        keep_freed()
    if device != "auto":
        # Where other backends are up already this changes nothing; the lookup below is by platform all the same.
        configure(jax_platforms="cpu" if device == "cpu" else None)
    try:
        with _patient_collectives():
            chosen = jax.local_devices(backend=None if device == "auto" else device)[0]
    except RuntimeError as error:
        reason = first_line(error)
        if device != "auto":
            fix = f"pip install '{INSTALL[device]}', or " if device in INSTALL else ""
            reason = "jax knows none here" if "Unknown backend" in str(error) else reason
            raise DeviceError(f"device={device}: {reason}; {fix}use device=auto") from error
        configure(jax_platforms="cpu")
        warn(f"the accelerator cannot be used, so the CPU is: {reason}")
        chosen = jax.local_devices()[0]
    else:
        unused = device == "auto" and chosen.platform == "cpu" and nvidia_present()
        if unused and os.environ.get("JAX_PLATFORMS") != "cpu":
            warn(
                "an NVIDIA GPU is here but jax cannot use it, so the CPU is used: pip install 'hotloop[cuda]'"
            )
    if only_accelerator and chosen.platform == "cpu":
        raise DeviceError(
            "only_accelerator=True: only a CPU was found; leave it out to compute there, or install "
            "'hotloop[cuda]' or 'hotloop[tpu]' for the accelerator"
        )
    if chosen.platform != jax.default_backend():
        configure(jax_default_device=chosen)
    if chosen.platform == "cpu":
        keep_freed()
    processes.greet(chosen.platform)
    return chosen


@contextlib.contextmanager
def _patient_collectives() -> Iterator[None]:
    """While backends are opened, and XLA reads its flags: devices that share cores may be long in coming to a
    collective on the CPU, and XLA would abort the process after 40 seconds."""
    before = os.environ.get("XLA_FLAGS", "")
    several = processes.count() > 1 or VIRTUAL_DEVICES in before
    if not several or CPU_PATIENCE in before:
        yield
        return
    os.environ["XLA_FLAGS"] = f"{before} --{CPU_PATIENCE}=600".strip()
    try:
        yield
    finally:  # what is on record, and part of the cache's keys, is what the user gave
        os.environ["XLA_FLAGS"] = before
        if not before:
            del os.environ["XLA_FLAGS"]


def take_memory_as_needed(variables: MutableMapping[str, str]) -> None:
    """Have jax, which reads these variables when it opens a GPU, not take most of the card's memory in advance, unless
    they say how it should: that takes 1.4 s for the 104 GiB of an H200."""
    if not any(variables.get(name) for name in GPU_MEMORY):
        variables[PREALLOCATE] = "false"


def nvidia_present() -> bool:
    """Whether the system shows an NVIDIA GPU, whatever jax makes of it."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/dxg"))


def may_have_accelerator() -> bool:
    """Whether jax might open a GPU or TPU where it is free to choose."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    # Where jax looks for plug-ins: of other makers' GPUs, or of one that a container shows under another number.
    return nvidia_present() or any(map(importlib.util.find_spec, ("libtpu", "jax_plugins")))


def platform() -> str:
    """cpu, gpu or tpu: that of the default device, which need not be the default backend's."""
    import jax

    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return str(getattr(chosen, "platform", chosen) or jax.default_backend())


def device_mesh(replicas: int, stages: int = 1, platform: str | None = None) -> "Mesh":
    """Devices of a platform (None: the default one) along the axes `replica` and `stage`.

    Every process gives equally many, the first of its own, so that none is left without work; the stages of a replica
    lie side by side, in one process where they fit.
    """
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    devices = jax.devices(platform)
    owned: dict[int, list[jax.Device]] = {}
    for each in devices:
        owned.setdefault(each.process_index, []).append(each)
    asked = f"replicas={replicas}" + f", stages={stages}" * (stages > 1)
    count, odd = divmod(replicas * stages, len(owned))
    if odd:
        raise DeviceError(f"{asked}: the {len(owned)} processes cannot take equally many devices each")
    if count > (most := min(map(len, owned.values()))):
        here = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}"
        apart = f", of which each process must give equally many: at most {most}" * (len(owned) > 1)
        raise DeviceError(f"{asked}: only {here} here{apart}; use at most {most * len(owned)}")
    used = [each for process in sorted(owned) for each in owned[process][:count]]
    places = np.array(used, dtype=object).reshape(replicas, stages)
    return Mesh(places, (REPLICA, STAGE), axis_types=(AxisType.Auto,) * 2)


def mesh_of_replicas(replicas: int) -> "Mesh | None":
    """The mesh of a run of so many replicas without stages, on the platform in use; None for one in one process."""
    several = replicas > 1 or processes.count() > 1
    return device_mesh(replicas, platform=platform()) if several else None


def replicas_that_fit(wanted: int) -> int:
    """As many of so many replicas as there are devices for, equally many in every process and at least one in each."""
    import jax

    devices, each = len(jax.devices(platform())), processes.count()
    return max(each, min(wanted, devices) // each * each)


def pick_device(number: int, platform: str | None = None) -> "jax.Device":
    """The device of a platform with this number, counted from 0; -1 is the first."""
    import jax

    devices = jax.devices(platform)
    if number >= len(devices):
        raise DeviceError(f"device_id={number}: the devices here are 0 to {len(devices) - 1}")
    return devices[max(number, 0)]


def describe_environment() -> dict[str, Any]:
    """The record that goes with every result, without a host name; devices are those of the platform in use."""
    import jax

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    devices = jax.devices()
    driver = search_file(r"\s([0-9]+\.[0-9.]+)\s", "/proc/driver/nvidia/version")
    return {
        "hotloop": __version__,
        "python": python_version(),
        **{package: installed(package) for package in PACKAGES},
        "platform": devices[0].platform,
        "device_kinds": sorted({device.device_kind for device in devices}),
        "device_count": len(devices),
        "driver": driver if devices[0].platform == "gpu" else None,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{system()} {machine()}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **source_commit(),
    }


def source_commit() -> dict[str, Any]:
    """The source tree's `read_commit`; None for an installed package, which may lie in somebody else's tree."""
    return read_commit(SOURCE) if (SOURCE / ".git").exists() else {"commit": None, "dirty": None}


def read_commit(folder: Path) -> dict[str, Any]:
    """The commit of a folder, and whether tracked files differ from it; None where git does not say."""
    # Without optional locks: a kill of ours must not leave the repository locked.
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    commit = run_query([*git, "rev-parse", "HEAD"])
    changes = run_query([*git, "status", "--porcelain", "--untracked-files=no"]) if commit else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def run_query(argv: Sequence[str]) -> str | None:
    """What another program says, or None if it is not there, fails or takes too long."""
    none, most = subprocess.DEVNULL, QUERY_SECONDS
    try:
        said = subprocess.check_output(
            argv, stdin=none, stderr=none, timeout=most, text=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip()


def peak_bytes() -> int:
    """The most memory that this process has had.

    By the kernel's own mark where there is one: `ru_maxrss` begins with that of the process which started this one.
    """
    if mark := search_file(r"VmHWM:\s*(\d+) kB", "/proc/self/status"):
        return 1024 * int(mark)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def configure(**settings: Any) -> None:
    """Set jax's options by name: jax's own `config.update` carries no types."""
    import jax

    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


class ProgramStore:
    """Entries under `path` that together take at most `most` bytes (None: no limit): whole or not there, the least
    recently used evicted first.

    By hand, because jax's own file cache (as of jax 0.10.2) writes in place, never repairs a damaged entry and fails to
    evict after a killed process; this can go with the version of jax that renames entries into place and checks them.
    Here an entry is checked by a digest when it is read (a damaged one is deleted, so that the program is compiled and
    kept again), and its file time is that of its last use.
    """

    def __init__(self, path: Path, most: int | None):
        self._path = path  # the name that jax knows
        self.most = most
        # Part of an entry's name: a program for another CPU's instructions must not be loaded here.
        text = machine() + (search_file(r"(?m)^((?:flags|Features)\s*:.*)$", "/proc/cpuinfo") or "")
        self.machine = blake2b(text.encode(), digest_size=4).hexdigest()

    def _file(self, key: str) -> Path:
        return self._path / f"{self.machine}-{key}{SUFFIX}"

    def get(self, key: str) -> bytes | None:
        """The entry, now the most recently used one; None where there is none or it was damaged."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        whole = content[:HEAD_BYTES] == entry_head(content[HEAD_BYTES:])
        with contextlib.suppress(OSError):  # a folder that may only be read still serves
            os.utime(path) if whole else path.unlink()
        return content[HEAD_BYTES:] if whole else None

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry, in one step, so that another process never sees half of it."""
        if self.most is not None and HEAD_BYTES + len(value) > self.most:
            return
        # A full disk or a folder without permission costs the next run its time, never this run its result.
        with contextlib.suppress(OSError):
            self.evict(HEAD_BYTES + len(value))
            with tempfile.NamedTemporaryFile(dir=self._path, suffix=PARTIAL, delete=False) as file:
                partial = Path(file.name)
                try:
                    file.write(entry_head(value) + value)
                    file.close()
                    partial.replace(self._file(key))
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise

    def evict(self, coming: int = 0) -> None:
        """Delete the least recently used entries until `coming` more bytes fit under the limit."""
        if self.most is None:
            return
        entries = []
        for path in self._path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process may evict at the same time
                entries.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        entries.sort()
        total = sum(size for _, size, _ in entries) + coming
        for _, size, path in entries:
            if total <= self.most:
                break
            path.unlink(missing_ok=True)
            total -= size


def entry_head(value: bytes) -> bytes:
    """What stands before an entry in its file: the format's mark and the entry's digest."""
    return MARK + blake2b(value, digest_size=HEAD_BYTES - len(MARK)).digest()


def parse_size(text: str) -> int | None:
    """Bytes from `2GB`, `500 MB`, `1.5GiB`; None for `none`, which is no limit."""
    if text.strip().lower() in ("none", "unlimited"):
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in UNITS or len(match[1]) > LONGEST_NUMBER:
        raise ValueError("must be a size such as 500MB or 2GB, or none for no limit")
    return int(float(match[1]) * UNITS[match[2]])


def show_size(size: int) -> str:
    """Bytes for people: `1.5 GB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def cache_limit() -> int | None:
    """The most bytes that programs may take: `HOTLOOP_CACHE_LIMIT`, else what was set, else 4 GB."""
    origin, text, root = "HOTLOOP_CACHE_LIMIT", os.environ.get("HOTLOOP_CACHE_LIMIT") or None, cache_folder()
    if text is None and root is not None:
        origin = str(root / "limit")
        with contextlib.suppress(OSError):
            text = (root / "limit").read_text()
    if text is None:
        return DEFAULT_CACHE_LIMIT
    try:
        return parse_size(text)
    except ValueError as error:
        raise OptionError(f"{origin} {text.strip()}: {error}") from error


def set_cache_limit(size: int | None) -> None:
    """Remember a limit for this cache folder and evict what is over it."""
    root = cache_folder()
    if root is None:
        raise OptionError("HOTLOOP_CACHE=off: there is no cache to limit")
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "limit").write_text("none" if size is None else str(size))
    except OSError as error:
        raise OptionError(
            f"{root}: cannot write here ({error.strerror}); set HOTLOOP_CACHE to a folder of yours"
        ) from error
    if size is not None:
        ProgramStore(root / "programs", size).evict()


class CacheUsage(NamedTuple):
    entries: int
    bytes: int


def cache_usage() -> CacheUsage:
    """The number of cached programs, and the bytes that they and XLA's notes beside them take."""
    root = cache_folder()
    sizes: dict[Path, int] = {}
    for path in (root / "programs").rglob("*") if root else ():
        with contextlib.suppress(OSError):  # another process may evict at the same time
            sizes[path] = path.stat().st_size if path.is_file() else 0
    return CacheUsage(sum(path.suffix == SUFFIX for path in sizes), sum(sizes.values()))


def clear_cache() -> CacheUsage:
    """Delete the compiled programs (and nothing that hotloop or XLA did not put there); what was freed."""
    freed = cache_usage()
    root = cache_folder()
    if root is None or not freed.bytes:
        return freed
    programs = root / "programs"
    try:
        for path in (*programs.glob(f"*{SUFFIX}"), *programs.glob(f"*{PARTIAL}")):
            path.unlink(missing_ok=True)
        for path in programs.glob("xla_gpu_*"):
            shutil.rmtree(path)
    except OSError as error:
        raise OptionError(f"{error.filename}: cannot delete it ({error.strerror})") from error
    left = cache_usage()
    return CacheUsage(freed.entries - left.entries, freed.bytes - left.bytes)


def enable_cache(warn: Callable[[str], None] = warnings.warn) -> None:
    """Let jax keep every compiled program of this process here; call it before the first compilation."""
    root = cache_folder()
    if root is None or rehearsal.is_on():  # in a rehearsal nothing is compiled, and no folder made
        configure(jax_enable_compilation_cache=False)
        return
    programs = root / "programs"
    try:
        programs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"{programs}: programs are not kept ({error.strerror}); set HOTLOOP_CACHE to another folder")
        return
    store = ProgramStore(programs, cache_limit())
    # There is no public way to say how entries are kept; a test holds jax to the name replaced here.
    from jax._src import compilation_cache

    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = lambda path: (store, path)  # type: ignore[assignment,return-value]
    configure(
        jax_enable_compilation_cache=True,
        jax_compilation_cache_dir=str(programs),
        jax_persistent_cache_min_compile_time_secs=0.0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    )

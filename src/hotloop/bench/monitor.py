"""How busy the machine is while a program runs: its GPUs, and the processor and memory of the program itself.

A thread takes a sample once a second; the record gets mean and maximum. Whatever cannot be read is left out: watching
must never make a run fail.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from hotloop.bench.provenance import ask

PERIOD = 1.0
SMI_FIELDS = {
    "utilization.gpu": "gpu_utilisation_percent",
    "memory.used": "gpu_memory_mib",
    "power.draw": "gpu_power_watt",
    "temperature.gpu": "gpu_temperature_celsius",
    "clocks.sm": "gpu_clock_mhz",
}
Sample = dict[str, float]


class Monitor:
    """Samples from `watch` to `stop`."""

    def __init__(self, period: float | None = None):
        self.period = PERIOD if period is None else period
        self.samples: list[Sample] = []
        self._gpu = gpu_reader()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        """Begin to watch the program that has just been started, with all it starts."""
        self._thread = threading.Thread(target=self._run, args=(Host(pid),), daemon=True)
        self._thread.start()

    def _run(self, host: "Host") -> None:
        while not self._done.wait(self.period):
            with suppress(Exception):  # a driver that answers nonsense is no reason to fail
                self.samples.append({**self._gpu(), **host.read()})

    def stop(self) -> dict[str, Any]:
        """End it; mean and maximum of each reading, and how many samples there were."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        return summary(self.samples)


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Mean and maximum of each reading."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    found: dict[str, Any] = {"samples": len(samples)}
    for name in names:
        values = [sample[name] for sample in samples if name in sample]
        found[name] = {"mean": sum(values) / len(values), "max": max(values)}
    return found


class Host:
    """Processor and memory of a session's processes; `psutil` where it is installed, else /proc."""

    def __init__(self, pid: int):
        self.pid = pid
        try:
            psutil = import_module("psutil")
            self._read: Callable[[], tuple[float, float]] = lambda: _by_psutil(psutil, pid)
        except ImportError:
            self._read = lambda: _by_proc(pid)
        self._before = (time.monotonic(), 0.0)

    def read(self) -> Sample:
        """Percent of one core since the last reading, and resident memory now."""
        seconds, memory = self._read()
        now, (then, before) = time.monotonic(), self._before
        self._before = (now, seconds)
        # A process that has ended takes its seconds along: then there is nothing to say.
        busy = max(0.0, seconds - before) / max(now - then, 1e-9)
        return {"host_cpu_percent": 100 * busy, "host_memory_mib": memory / 2**20}


def _by_psutil(psutil: Any, pid: int) -> tuple[float, float]:
    """CPU seconds and resident bytes of a process and its descendants."""
    leader = psutil.Process(pid)
    seconds = memory = 0.0
    for process in (leader, *leader.children(recursive=True)):
        with suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            seconds += times.user + times.system
            memory += process.memory_info().rss
    return seconds, memory


def _by_proc(session: int) -> tuple[float, float]:
    """The same for a session, where Linux shows its processes as files."""
    ticks, pages = 0, 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The program's name stands in brackets and may hold anything.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if len(fields) > 21 and fields[3] == str(session):
            ticks += int(fields[11]) + int(fields[12])
            pages += int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * float(os.sysconf("SC_PAGE_SIZE"))


def gpu_reader() -> Callable[[], Sample]:
    """How to read the GPUs: NVML, else nvidia-smi, else not at all."""
    try:
        pynvml = import_module("pynvml")
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return lambda: combined([_nvml(pynvml, handle) for handle in handles])
    except Exception:  # no package, no library, no driver: pynvml has an error for each
        return _by_smi if smi() else dict


def _nvml(pynvml: Any, handle: Any) -> Sample:
    readings: dict[str, Callable[[], float]] = {
        "gpu_utilisation_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "gpu_memory_mib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20,
        "gpu_power_watt": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu_temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "gpu_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    }
    found: Sample = {}
    for name, read in readings.items():
        with suppress(pynvml.NVMLError):
            found[name] = float(read())
    return found


def smi() -> list[Sample]:
    """The readings of each GPU as nvidia-smi prints them."""
    said = ask(["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"])
    found = []
    for line in (said or "").splitlines():
        one: Sample = {}
        for name, text in zip(SMI_FIELDS.values(), line.split(","), strict=False):
            with suppress(ValueError):  # [N/A]
                one[name] = float(text)
        found.append(one)
    return found


def _by_smi() -> Sample:
    return combined(smi())


def combined(gpus: list[Sample]) -> Sample:
    """All GPUs as one: memory and power add up, of the rest the highest, since a program may use one of many."""
    found: Sample = {}
    for name in dict.fromkeys(name for gpu in gpus for name in gpu):
        values = [gpu[name] for gpu in gpus if name in gpu]
        found[name] = sum(values) if name.endswith(("_mib", "_watt")) else max(values)
    return found

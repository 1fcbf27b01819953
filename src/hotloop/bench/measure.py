"""One run of one variant: the program is started and watched, its numbers are read, and what came of it is judged.
Beside it stand the machine's own pace and, with --monitor, its load; watching must never make a run fail.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hotloop.bench.benchmark import Derived, Metric, Selected
from hotloop.bench.launch import Launch, RunnerOptions
from hotloop.bench.metrics import extract, use_record_fields
from hotloop.bench.process import read_output_lines, run_program
from hotloop.engine.device import run_query

READINGS = 8  # of the pace, before a run and after it; a single one is too noisy to tell anything
PACE_TURNS, PACE_WORK = 3, 20_000
MOST_VALUES = 1000  # kept of each metric
MONITOR_PERIOD = 1.0  # seconds
SMI_FIELDS = {
    "utilization.gpu": "gpu_utilisation_percent",
    "memory.used": "gpu_memory_mib",
    "power.draw": "gpu_power_watt",
    "temperature.gpu": "gpu_temperature_celsius",
    "clocks.sm": "gpu_clock_mhz",
}
SIGNALS = {one.value: one.name for one in signal.Signals}
Reading = dict[str, float]


def measure(one: Selected, launch: Launch, folder: Path, options: RunnerOptions) -> dict[str, Any]:
    """Run it: the parts of a record that only running can tell. The logs are in `folder`."""
    limits = (options.timeout, one.benchmark.timeout)
    timeout = min((limit for limit in limits if limit is not None), default=None)
    monitor = Monitor() if options.monitor else None
    before = read_paces()
    try:
        ended = run_program(
            launch.argv,
            launch.folder,
            launch.env,
            timeout,
            folder / "stdout",
            folder / "stderr",
            options.max_log_bytes,
            grace=options.grace,
            started=monitor.watch if monitor else lambda pid: None,
            tick=lambda seconds: _sign_of_life(one.variant.name, seconds),
            period=options.progress_trace_period,
        )
    finally:
        readings = monitor.stop() if monitor else {}
    paces = [*before, *read_paces()]
    result: Mapping[str, Any]
    if ended.timed_out:
        result = {"status": "timeout", "reason": f"still running after {timeout:g} seconds"}
    elif ended.exitcode:
        why = f"ended with status {ended.exitcode}"
        if ended.exitcode < 0:
            why = f"killed by {SIGNALS.get(-ended.exitcode, f'signal {-ended.exitcode}')}"
        result = {"status": "failed", "reason": ended.reason or why}
    else:  # a program that only compiles has no metrics
        result = {"status": "passed"} if options.compile_only else _read_metrics(one, launch, folder)
    times: dict[str, Any] = {"exitcode": ended.exitcode}
    if not ended.reason:
        times |= {"seconds": ended.seconds, "start": ended.start, "end": ended.end}
    if ended.left_out:
        times["left_out_bytes"] = ended.left_out
    return {**result, **times, "monitor": readings, "paces": paces}


def _read_metrics(one: Selected, launch: Launch, folder: Path) -> Mapping[str, Any]:
    """The metrics; one that is missing fails the run, and is named."""
    # What ran decides how many copies printed: a hotloop command is one process, whatever stood before the script.
    ran = replace(one.variant, cmd=launch.hotloop_command or launch.command)
    benchmark = use_record_fields(one.benchmark, launch.figures)
    stdout, stderr = (read_output_lines(folder / name) for name in ("stdout", "stderr"))
    found = extract(benchmark, stdout, stderr, ran)
    labels = {name: label for label, name in reversed(benchmark.output)}  # the first of two counts
    said: list[Metric | Derived] = [*benchmark.metrics, *(one.variant.derived or benchmark.derived)]
    metrics = {
        metric.name: {
            "value": found.results[metric.name],
            "reduction": metric.reduction,
            "unit": metric.unit or labels.get(metric.name, ""),
            "values": found.values[metric.name][:MOST_VALUES],
        }
        for metric in said
        if metric.name in found.results
    }
    if not found.problems:
        return {"status": "passed", "metrics": metrics}
    reason = "; ".join(f"{name}: {why}" for name, why in found.problems.items())
    return {"status": "failed", "reason": reason, "metrics": metrics, "problems": found.problems}


def _sign_of_life(name: str, seconds: float) -> None:
    """A line that is overwritten, and only on a terminal."""
    if sys.stderr.isatty():
        clock = time.strftime("%H:%M:%S", time.gmtime(seconds))
        print(f"\r\033[K{name}  {clock}\r", end="", file=sys.stderr, flush=True)


def read_paces() -> list[float]:
    """Turns of a small fixed loop a second, several times; takes some twenty-five milliseconds."""
    # The readings follow each other without a rest: a machine that is busy lets a short burst through and makes a
    # longer one wait its turn, as it does with programs. A turn that was interrupted counts as long as it took.
    readings = []
    for _ in range(READINGS):
        began = time.perf_counter()
        for _ in range(PACE_TURNS):
            sum(number * number for number in range(PACE_WORK))
        readings.append(PACE_TURNS / (time.perf_counter() - began))
    return readings


class Monitor:
    def __init__(self) -> None:
        self.samples: list[Reading] = []
        self._gpu = find_gpu_reader()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        """Begin to watch the program that has just been started, with all it starts."""
        host = ProcessUsage(pid)

        def sample() -> None:
            while not self._done.wait(MONITOR_PERIOD):
                with suppress(Exception):  # a driver that answers nonsense is no reason to fail
                    self.samples.append({**self._gpu(), **host.read()})

        self._thread = threading.Thread(target=sample, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """End it; mean and maximum of each reading, and how many samples there were."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        columns = _values_by_name(self.samples).items()
        found = {name: {"mean": sum(values) / len(values), "max": max(values)} for name, values in columns}
        return {"samples": len(self.samples), **found}


def _values_by_name(readings: Sequence[Reading]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for reading in readings:
        for name, value in reading.items():
            found.setdefault(name, []).append(value)
    return found


class ProcessUsage:
    """Processor and memory of a session's processes; `psutil` where it is installed, else /proc."""

    def __init__(self, pid: int):
        self.pid, self._before = pid, (time.monotonic(), 0.0)
        try:
            self._psutil: Any = import_module("psutil")
        except ImportError:
            self._psutil = None

    def read(self) -> Reading:
        """Percent of one core since the last reading, and resident memory now."""
        seconds, memory = _by_psutil(self._psutil, self.pid) if self._psutil else _by_proc(self.pid)
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


def find_gpu_reader() -> Callable[[], Reading]:
    """How to read the GPUs: NVML, else nvidia-smi, else not at all."""
    try:
        pynvml = import_module("pynvml")
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no library, no driver: pynvml has an error for each
        return (lambda: combine_gpus(query_smi())) if query_smi() else dict
    core = pynvml.NVML_TEMPERATURE_GPU
    ways: dict[str, Callable[[Any], float]] = {
        "gpu_utilisation_percent": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "gpu_memory_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**20,
        "gpu_power_watt": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "gpu_temperature_celsius": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, core),
        "gpu_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    }

    def read() -> Reading:
        gpus: list[Reading] = [{} for _ in handles]
        for gpu, found in zip(handles, gpus, strict=True):
            for name, way in ways.items():
                with suppress(pynvml.NVMLError):
                    found[name] = float(way(gpu))
        return combine_gpus(gpus)

    return read


def query_smi() -> list[Reading]:
    said = run_query(["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"])
    found = []
    for line in (said or "").splitlines():
        one: Reading = {}
        for name, text in zip(SMI_FIELDS.values(), line.split(","), strict=False):
            with suppress(ValueError):  # [N/A]
                one[name] = float(text)
        found.append(one)
    return found


def combine_gpus(gpus: Sequence[Reading]) -> Reading:
    """All GPUs as one: memory and power add up, of the rest the highest, since a program may use one of many."""
    return {
        name: sum(values) if name.endswith(("_mib", "_watt")) else max(values)
        for name, values in _values_by_name(gpus).items()
    }

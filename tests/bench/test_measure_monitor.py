"""Watching a program: its processor time and memory with its children's, GPUs by whichever way there is."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fake_programs import RATE, code, run_spec

from hotloop.bench import measure
from hotloop.bench.measure import Monitor, ProcessUsage, combine_gpus

BUSY = """
import subprocess, sys, time
{child}
kept = bytearray(50_000_000)
end = time.monotonic() + 60
while time.monotonic() < end: pass
"""
CHILD = "import time; kept = bytearray(90_000_000); time.sleep(60)"


@pytest.fixture
def busy():
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", BUSY.format(child="")], start_new_session=True, stdin=subprocess.DEVNULL
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("way", ["psutil", "proc"])
def test_processor_and_memory_of_a_program_are_read_either_way(busy, monkeypatch, way):
    if way == "psutil":
        pytest.importorskip("psutil")
    else:
        monkeypatch.setitem(sys.modules, "psutil", None)
    host = ProcessUsage(busy.pid)
    time.sleep(0.4)
    host.read()
    time.sleep(0.4)
    read = host.read()
    assert 5 < read["host_cpu_percent"] < 150
    assert read["host_memory_mib"] > 45


def test_children_count(tmp_path):
    child = f"subprocess.Popen([sys.executable, '-S', '-c', '{CHILD}'])"
    process = subprocess.Popen([sys.executable, "-S", "-c", BUSY.format(child=child)], start_new_session=True)
    try:
        host, end = ProcessUsage(process.pid), time.monotonic() + 10
        while host.read()["host_memory_mib"] < 130:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_a_record_has_means_and_maxima(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "find_gpu_reader", lambda: lambda: {"gpu_power_watt": 300.0})
    monkeypatch.setattr(measure, "MONITOR_PERIOD", 0.05)
    cmd = code("import time; time.sleep(0.5); print('rate 1')")
    _, records, _ = run_spec(tmp_path, {"a": {"cmd": cmd, "data": RATE}}, monitor=True)
    found = records["a", 1]["monitor"]
    assert found["samples"] >= 3
    assert found["gpu_power_watt"] == {"mean": 300.0, "max": 300.0}
    assert found["host_memory_mib"]["max"] > 1


def test_a_reader_that_fails_fails_nothing(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(measure, "find_gpu_reader", lambda: broken)
    monkeypatch.setattr(measure, "MONITOR_PERIOD", 0.01)
    watched = Monitor()
    watched.watch(os.getpid())
    time.sleep(0.05)
    assert watched.stop() == {"samples": 0}


def test_mean_and_maximum_are_over_the_samples_that_have_the_reading():
    monitor = Monitor()
    monitor.samples += [{"a": 1.0, "b": 5.0}, {"a": 3.0}]
    assert monitor.stop() == {"samples": 2, "a": {"mean": 2.0, "max": 3.0}, "b": {"mean": 5.0, "max": 5.0}}


def test_gpus_together_add_memory_and_power_and_show_the_busiest():
    one = {"gpu_utilisation_percent": 90.0, "gpu_memory_mib": 10.0, "gpu_power_watt": 100.0}
    two = {"gpu_utilisation_percent": 0.0, "gpu_memory_mib": 1.0, "gpu_power_watt": 50.0}
    assert combine_gpus([one, two]) == {
        "gpu_utilisation_percent": 90.0,
        "gpu_memory_mib": 11.0,
        "gpu_power_watt": 150.0,
    }


def test_nvidia_smi_is_read_where_nvml_is_missing_and_what_it_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(measure, "run_query", lambda argv: "97, 1024, [N/A], 61, 1980")
    assert measure.find_gpu_reader()() == {
        "gpu_utilisation_percent": 97.0,
        "gpu_memory_mib": 1024.0,
        "gpu_temperature_celsius": 61.0,
        "gpu_clock_mhz": 1980.0,
    }
    monkeypatch.setattr(measure, "run_query", lambda argv: None)
    assert measure.find_gpu_reader()() == {}


def test_nvml_is_read_where_it_is_installed_less_what_the_device_refuses(monkeypatch):
    class NVMLError(Exception):
        pass

    def refuse(*_):
        raise NVMLError

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=2**30),
        nvmlDeviceGetPowerUsage=lambda handle: 250_000,
        nvmlDeviceGetTemperature=refuse,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert measure.find_gpu_reader()() == {
        "gpu_utilisation_percent": 50.0,
        "gpu_memory_mib": 1024.0,
        "gpu_power_watt": 250.0,
        "gpu_clock_mhz": 1500.0,
    }

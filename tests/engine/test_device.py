"""Choosing the device, and the record of the environment."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

from hotloop.engine.device import describe_environment, setup
from hotloop.errors import DeviceError

needs_cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs no accelerator")

# No plug-in of this machine's own, and if asked for one that cannot start, as CUDA's beside a broken driver.
BROKEN = """
import sys
from jax._src import xla_bridge
def factory():
    raise RuntimeError("no driver\\nmore text")
xla_bridge.discover_pjrt_plugins = lambda: None
if sys.argv[2] == "plugin":
    xla_bridge.register_backend_factory("cuda", factory, priority=500, fail_quietly=False)
    xla_bridge.hardware_utils.has_visible_nvidia_gpu = lambda: True
from hotloop.engine import device
device.nvidia_present = lambda: True
from hotloop.errors import DeviceError
said = []
try:
    print(device.setup(sys.argv[1], warn=said.append).platform)
except DeviceError as error:
    print("error", error)
print(said)
"""


def start(device, plugin, **environment):
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"} | environment
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, device, plugin], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_broken_accelerator_falls_back_with_a_spoken_warning():
    platform, said = start("auto", "plugin")
    assert platform == "cpu"
    assert "the accelerator cannot be used, so the CPU is" in said
    assert "no driver" in said


def test_a_broken_accelerator_that_was_asked_for_is_one_line():
    (line, _) = start("gpu", "plugin")
    assert line.startswith("error device=gpu: ")
    assert "no driver" in line
    assert "hotloop[cuda]" in line


def test_a_card_without_its_plug_in_is_pointed_out_unless_the_cpu_was_chosen():
    assert "pip install 'hotloop[cuda]'" in start("auto", "none")[1]
    assert start("auto", "none", JAX_PLATFORMS="cpu") == ["cpu", "[]"]
    assert start("cpu", "none") == ["cpu", "[]"]


@needs_cpu_only
def test_a_platform_that_is_not_there_names_the_extra():
    with pytest.raises(DeviceError, match=r"device=gpu: .*pip install 'hotloop\[cuda\]', or use device=auto"):
        setup("gpu")
    with pytest.raises(DeviceError, match=r"device=tpu: .*hotloop\[tpu\]"):
        setup("tpu")


@needs_cpu_only
def test_only_accelerator_refuses_a_cpu():
    assert setup().platform == "cpu"
    with pytest.raises(DeviceError, match="only_accelerator=True: only a CPU was found"):
        setup("auto", only_accelerator=True)


def test_the_environment_is_json_and_names_no_host():
    record = describe_environment()
    text = json.dumps(record)
    assert record["jax"] == jax.__version__
    assert record["device_count"] == jax.device_count()
    assert record["platform"] == jax.default_backend()
    assert record["cores"] >= 1
    assert {
        "hotloop",
        "python",
        "jaxlib",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "cpu",
        "driver",
    } <= record.keys()
    assert {"xla_flags", "commit", "dirty", "device_kinds"} <= record.keys()
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)


def test_outside_a_source_tree_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr("hotloop.engine.device.SOURCE", tmp_path)
    record = describe_environment()
    assert (record["commit"], record["dirty"]) == (None, None)

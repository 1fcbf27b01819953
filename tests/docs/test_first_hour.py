"""The first hour of somebody new: commands of the README and of the how-to pages, run by a shell as they are typed.

What a page leaves to its reader (a YAML file, a folder of photographs, a port that is free) is there before. `make
demo`, `make test`, `make docs`, which runs the tutorials, and `make package` are steps of the CI, and not run here.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT = 600.0

pytestmark = pytest.mark.slow


def blocks(page, language=""):
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def commands(page):
    """Every command of a page's blocks, with the lines that follow a backslash; a prompt is not typed."""
    text = re.sub(r"\\\n\s*", "", "".join(blocks(page)))
    lines = (line.removeprefix("$ ") for line in text.splitlines())
    return [line for line in lines if re.match(r"(?:[A-Z_]+=\S+ )*hotloop ", line)]


def typed(folder):
    """The environment of a shell that has just installed hotloop: no network, nothing of the tests' own settings."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ours = {"XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "HOTLOOP_NATIVE"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {"cwd": folder, "env": {**kept, "PATH": path, "HOTLOOP_OFFLINE": "1"}}


def run(command, folder):
    """What it says."""
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=LIMIT, **typed(folder)
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_the_kernel_of_the_readme_is_checked_and_timed(tmp_path):
    (command,) = (line for line in commands(ROOT / "README.md") if "kernel lstm" in line)
    said = run(command, tmp_path)
    assert "items/s" in said and "roofline" in said


def test_a_model_is_trained_exported_served_and_asked(tmp_path):
    train, export, serve, request = commands(HOW_TO / "serve.md")
    port = free_port()
    run(train, tmp_path)
    run(export, tmp_path)
    assert (tmp_path / "models" / "toy_model_bn" / "1" / "model.json").is_file()
    server = subprocess.Popen(
        [*shlex.split(serve), "--port", str(port), "--grpc-port", "none"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **typed(tmp_path),
    )
    try:
        wait_until_ready(server, port)
        said = run(request.replace(":8000", f":{port}"), tmp_path)
        assert "p50" in said and "p99" in said
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def wait_until_ready(server, port):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        assert server.poll() is None, server.stderr.read()
        try:
            with urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=10):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("never ready")


def test_a_run_that_is_interrupted_goes_on_to_the_same_weights(tmp_path):
    first, resumed = commands(HOW_TO / "resume.md")
    training = subprocess.Popen(shlex.split(first), stderr=subprocess.PIPE, text=True, **typed(tmp_path))
    events = tmp_path / "results" / "first" / "events.jsonl"
    end = time.monotonic() + LIMIT
    while not (events.exists() and '"event": "log"' in events.read_text()):
        assert training.poll() is None and time.monotonic() < end, training.stderr.read()
        time.sleep(0.05)
    training.send_signal(signal.SIGINT)
    _, said = training.communicate(timeout=LIMIT)
    assert training.returncode == 130 and "to resume: the same command with --resume" in said
    run(resumed, tmp_path)
    assert '"update": 2000' in events.read_text()


def test_two_benchmarks_are_compared_also_in_turns_and_shown_on_a_page(tmp_path):
    page = HOW_TO / "compare.md"
    (text,) = blocks(page, "yaml")
    for name in ("mine.yml", "theirs.yml"):
        (tmp_path / name).write_text(text)
    for command in commands(page):
        if "main HEAD" in command:  # two commits of the reader's repository
            continue
        said = run(re.sub(r"--repeats \d+", "--repeats 2", command), tmp_path)
        if "bench compare" in command:
            assert re.search("FAST|SLOW|SAME|AMBIGUOUS", said)
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_run_is_profiled(tmp_path):
    for command in commands(HOW_TO / "profile.md"):
        run(command, tmp_path)
        folder = tmp_path / re.search(r"--report (\S+)", command)[1] / "training"
        assert {"summary.txt", "program.hlo.txt", "trace"} <= {path.name for path in folder.iterdir()}


def test_several_devices_and_processes_train(tmp_path):
    for command in commands(HOW_TO / "devices.md"):
        said = run(command, tmp_path)
        assert said.strip()
    assert len(list((tmp_path / "results").glob("toy_model_bn*/events.jsonl"))) == 2


def test_own_photographs_are_verified_and_trained_on(tmp_path):
    from PIL import Image

    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number in range(40):
                pixels = draw.integers(0, 255, (40, 30, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{number}.jpeg")
    verify, plan = (line for line in commands(HOW_TO / "own-data.md") if "photos" in line)
    assert "80 + 80 images of 2 classes" in run(verify, tmp_path)
    assert "updates" in run(plan, tmp_path)
    train = plan.removesuffix(" --plan").replace("--num-epochs 10", "--num-epochs 1")
    run(train, tmp_path)
    (network,) = (tmp_path / "results").glob("*/checkpoints/network.json")
    assert '"cat"' in network.read_text() and '"dog"' in network.read_text()

"""Versions that come, are damaged in every way, go and come again while clients send; and what they leave in memory."""

import http.client
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from served_process import ServedProcess
from small_models import classify, small, write_uncompared

from hotloop.engine.exportable import Exportable, Signature, Tensor
from hotloop.engine.model_folder import self_digest
from hotloop.serve.artefact import Artefact

FILES = ("program.bin", "weights.safetensors", "examples.npz", "model.json")
CLIENTS = 8
RELOADS, WARM_UP = 30, 40  # jax's own caches of programs are full after some dozens
LARGE = 1 << 22  # numbers, of four bytes


def classify_otherwise(weights, inputs):
    return classify(weights, {"x": -inputs["x"]})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two versions of `small`, and one of `other`, out of sight of a server."""
    folder = tmp_path_factory.mktemp("store")
    write_uncompared(folder, small(seed=0), small(seed=1), small(classify_otherwise, seed=2, name="other"))
    return folder


def rewrite_about(folder, change):
    """Alter model.json, with a checksum of itself that fits."""
    about = json.loads((folder / "model.json").read_bytes())
    change(about)
    (folder / "model.json").write_text(json.dumps({**about, "sha256": self_digest(about)}))


def cut(folder, file):
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: len(data) // 2])


def flip(folder, file):
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / file).write_bytes(data)


def give_wrong_checksum(folder, file):
    if file == "model.json":
        about = json.loads((folder / file).read_bytes())
        (folder / file).write_text(json.dumps({**about, "sha256": "0" * 64}))
    else:
        rewrite_about(folder, lambda about: about["files"][file].update(sha256="0" * 64))


def take_from_other(folder, file):
    """The file is another model's, with checksums that fit."""
    other = folder.parents[2] / "store" / "other" / "1"
    shutil.copy(other / file, folder / file)
    if file != "model.json":
        entry = json.loads((other / "model.json").read_bytes())["files"][file]
        rewrite_about(folder, lambda about: about["files"].update({file: entry}))


class Place:
    """A model's folder that a server watches; everything appears in it at once, as an export does."""

    def __init__(self, root, store):
        self._store, self.folder = store, root / "served" / "small"
        shutil.copytree(store, root / "store")
        self.put(1, 1)

    def put(self, number, source, damage=lambda folder: None):
        part = self.folder / ".part"
        shutil.copytree(self._store / "small" / str(source), part)
        damage(part)
        self.remove(number)
        part.rename(self.folder / str(number))

    def remove(self, number):
        if (self.folder / str(number)).exists():
            (self.folder / str(number)).rename(self.folder / ".gone")
            shutil.rmtree(self.folder / ".gone")


@contextmanager
def senders(port, path, wanted, outcomes):
    """Clients that send until the block ends; `outcomes` counts statuses, and 200s whose answer is none of `wanted`."""
    is_over = threading.Event()
    inputs = small().examples["x"][:2].tolist()

    def send():
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            while not is_over.is_set():
                connection.request("POST", path, json.dumps({"instances": inputs}))
                answer = connection.getresponse()
                body = json.loads(answer.read())
                found = answer.status
                if found == 200:
                    shares = np.array([each["shares"] for each in body["predictions"]])
                    if not any(np.allclose(shares, each, atol=1e-5) for each in wanted):
                        found = "another model's answer"
                outcomes[found] += 1

    threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.slow
def test_no_request_fails_whatever_becomes_of_versions(store, tmp_path):
    place, outcomes = Place(tmp_path, store), Counter()
    rows = {"x": small().examples["x"][:2]}
    wanted = [Artefact.open(store / "small" / each).load()(rows)["shares"] for each in "12"]
    assert not np.allclose(*wanted, atol=1e-2)
    with ServedProcess(place.folder.parent, "--watch", "0.2") as served:
        with senders(served.port, "/v1/models/small:predict", wanted, outcomes):
            for damage in (cut, flip, give_wrong_checksum, take_from_other):
                for file in FILES:
                    place.put(2, 2, lambda part, damage=damage, file=file: damage(part, file))
                    line = served.wait_for("refused ")
                    assert "small/2" in line, (damage, file, line)
            place.put(2, 2)
            served.wait_for("loaded small version 2")
            for damage in (cut, flip, give_wrong_checksum, take_from_other):
                damage(place.folder / "2", "weights.safetensors")  # of the one that answers, where it lies
                served.wait_for("refused ")
                place.put(2, 2)
                served.wait_for("loaded small version 2")
            for number in (1, 2, 1):  # the same number, another model of that name
                place.put(2, number)
                served.wait_for("loaded small version 2")
            place.remove(1)
            served.wait_for("removed small version 1")
            place.put(2, 2)  # the only one is replaced
            served.wait_for("loaded small version 2")
            place.remove(2)
            served.wait_for("nothing is changed: ")  # the last one of all stays
            place.put(3, 2)
            served.wait_for("removed small version 2")
            before = outcomes.total()
        assert served.stop() == (0, "")
    assert set(outcomes) == {200}, outcomes
    assert before > 500


def write_large(folder):
    """A model of 16 megabytes, so that one that stays is seen."""
    large = Exportable(
        family="none",
        name="large",
        function=lambda weights, inputs: {"y": inputs["x"] * jnp.mean(weights["w"])},
        weights={"w": jnp.ones(LARGE, np.float32)},
        signature=Signature((Tensor.of("x", np.float32, 2),), (Tensor.of("y", np.float32, 2),)),
        examples={"x": np.ones((1, 2), np.float32)},
        tolerance=1e-5,
        preprocessing="none",
    )
    return write_uncompared(folder, large, ladder=(1, 2))[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read a process's memory from")
def test_versions_that_are_replaced_leave_nothing_in_memory(tmp_path):
    words = [Path(__file__).with_name("reloading.py"), write_large(tmp_path), WARM_UP + RELOADS, LARGE]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    memory = found["memory"]
    assert found["loaded"] == 1 + WARM_UP + RELOADS
    assert max(found["alive"]) <= 2  # one that answers, and one on its way out
    # The least of ten, and room for one version: a look may come before an old one's memory has been given back.
    then, now, one = min(memory[WARM_UP - 10 : WARM_UP]), min(memory[-10:]), 4 * LARGE
    assert now <= 1.05 * then + one, memory  # 30 that stayed would be 480 MB
    assert now <= memory[0] + 8 * one, memory  # the compiler's own is some of it
    assert found["left"] == 0

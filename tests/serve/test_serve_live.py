"""A real server in a child process: a client that nobody here wrote, signals under load, and versions that come."""

import asyncio
import base64
import http.client
import io
import json
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import closing
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import raw_client
from PIL import Image
from raw_client import write_request
from served_process import ServedProcess
from small_models import small, small_image, small_pair, write_uncompared

from hotloop.serve import tf_rest, v2
from hotloop.serve.artefact import Artefact, find_disagreement, in_rungs


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two versions of `small` that answer differently."""
    folder = tmp_path_factory.mktemp("served") / "models"
    write_uncompared(folder, small(seed=0), small(seed=1))
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Two versions of another model."""
    folder = tmp_path_factory.mktemp("others") / "models"
    write_uncompared(folder, small(seed=2), small(seed=3), name="other")
    return folder


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """A model of images and one of two inputs."""
    folder = tmp_path_factory.mktemp("forms") / "models"
    write_uncompared(folder, small_image(), small_pair())
    return folder


@pytest.fixture(scope="module")
def server(models, others, forms):
    with ServedProcess(models, others, forms) as served:
        yield served


def rows(count, seed=0):
    return {"x": np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)}


@cache
def load(folder):
    return Artefact.open(folder).load()


def local(models, version, inputs):
    return in_rungs(load(models / "small" / str(version)), (1, 2, 4), inputs)


def connect(port):
    return closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20))


def ask(connection, inputs, signature, version=None):
    """Status, and the outputs or the error."""
    pieces, headers = v2.write_request(inputs, signature)
    where = "/v2/models/small" + (f"/versions/{version}" if version else "")
    connection.request("POST", f"{where}/infer", b"".join(pieces), headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        return answer.status, body
    return 200, v2.read_answer(body, answer.headers[v2.HEADER], signature)


def test_tritonclient_unmodified(server, models):
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("small", "1")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["name"] == "hotloop"
    assert client.get_model_metadata("small")["versions"] == ["1", "2"]
    assert client.get_inference_statistics("small")["model_stats"] is not None
    assert {each["version"] for each in client.get_model_repository_index()} == {"1", "2"}
    inputs = rows(5)
    for version, is_binary in (("1", True), ("2", True), ("2", False)):
        given = triton.InferInput("x", [5, 4], "FP32")
        given.set_data_from_numpy(inputs["x"], binary_data=is_binary)
        outputs = [triton.InferRequestedOutput(name, is_binary) for name in ("shares", "classes", "scores")]
        for wanted in (outputs, None):
            answer = client.infer("small", [given], version, outputs=wanted, request_id="7")
            found = {name: answer.as_numpy(name) for name in ("shares", "classes", "scores")}
            assert find_disagreement(local(models, version, inputs), found, 1e-5) is None
            assert answer.get_response()["id"] == "7"
    given = triton.InferInput("x", [1, 5], "FP32")
    given.set_data_from_numpy(np.zeros((1, 5), np.float32))
    with pytest.raises(triton.InferenceServerException, match=r"shape \[1, 5\] does not fit"):
        client.infer("small", [given])
    client.close()


def test_tritonclient_mixes_binary_and_json_and_sends_images(server, forms):
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    inputs = {"a": rows(5)["x"], "b": np.arange(20, dtype=np.int32).reshape(5, 4)}
    wanted = in_rungs(load(forms / "pair" / "1"), (1, 2, 4), inputs)
    for binary_inputs, binary_outputs in product(({"a"}, {"b"}), ({"sum"}, {"product"})):
        given = [triton.InferInput(name, [5, 4], kind) for name, kind in (("a", "FP32"), ("b", "INT32"))]
        for each in given:
            each.set_data_from_numpy(inputs[each.name()], binary_data=each.name() in binary_inputs)
        outputs = [triton.InferRequestedOutput(name, name in binary_outputs) for name in ("product", "sum")]
        answer = client.infer("pair", given, outputs=outputs)
        found = {name: answer.as_numpy(name) for name in ("sum", "product")}
        assert find_disagreement(wanted, found, 1e-5) is None
        assert {
            each["name"] for each in answer.get_response()["outputs"] if "data" not in each
        } == binary_outputs
    images = random_images(3)
    given = triton.InferInput("image", [3], "BYTES")
    given.set_data_from_numpy(np.array([as_png(each) for each in images], object))
    answer = client.infer("shade", [given])
    wanted = in_rungs(load(forms / "shade" / "1"), (1, 2, 4), {"image": images})
    assert find_disagreement(wanted, {"probabilities": answer.as_numpy("probabilities")}, 1e-5) is None
    client.close()


def random_images(count):
    return np.random.default_rng(count).integers(0, 256, (count, 8, 8, 3), np.uint8)


def as_png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def documented_requests(server):
    """The words of each line of `curl` in docs/serving.md that asks as TensorFlow Serving is asked."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    section = text.partition("**As TensorFlow Serving is asked.**")[2].partition("**Batches.**")[0]
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
        ("flowers", "small"),
        ("photos", "shade"),
    ):
        section = section.replace(old, new)
    lines = [line.strip() for line in section.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("curl ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_documented_requests_of_tensorflow_serving_by_curl(server, models, forms, tmp_path):
    image = random_images(1)
    picture = base64.b64encode(as_png(image[0])).decode()
    (tmp_path / "cat.json").write_text(json.dumps({"instances": [{"b64": picture}]}))

    def curl(*words):
        command = [*words, "--silent", "--max-time", "20", "--write-out", "\n%{http_code}"]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        body, _, status = said.rpartition("\n")
        return int(status), json.loads(body)

    requests = documented_requests(server)
    answers = [curl(*words) for words in requests]
    assert [status for status, _ in answers] == [200] * 7
    states, state, about, by_row, named, by_column, shaded = (body for _, body in answers)
    found = [(each["version"], each["state"]) for each in states["model_version_status"]]
    assert found == [("2", "AVAILABLE"), ("1", "AVAILABLE")]
    assert state["model_version_status"] == states["model_version_status"][1:]
    assert set(about["metadata"]["signature_def"]["signature_def"]["serving_default"]["outputs"]) == {
        "shares", "classes", "scores"
    }  # fmt: skip

    def columns(predictions):
        return {name: np.array([row[name] for row in predictions]) for name in predictions[0]}

    x = np.array([[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]], np.float32)
    for version, inputs, answer in (
        (2, x, columns(by_row["predictions"])),
        (1, x[:1], columns(named["predictions"])),
        (2, x[:1], {name: np.array(column) for name, column in by_column["outputs"].items()}),
    ):
        wanted = local(models, version, {"x": inputs})
        assert find_disagreement(wanted, answer, 1e-5) is None
    wanted = in_rungs(load(forms / "shade" / "1"), (1, 2, 4), {"image": image})
    answer = {"probabilities": np.array(shaded["predictions"])}
    assert find_disagreement(wanted, answer, 1e-5) is None

    address = f"http://127.0.0.1:{server.port}/v1/models"
    for words, status, sentence in (
        ((f"{address}/small/labels/stable",), 404, "the model small has no labels; ask for /versions/V"),
        ((f"{address}/small/versions/9",), 404, "version"),
        (
            ("-d", '{"instances": [[1, 2]]}', f"{address}/small:predict"),
            400,
            "shape [1, 2] does not fit [-1, 4]",
        ),
    ):
        found, body = curl("curl", *words)
        assert found == status and set(body) == {"error"} and sentence in body["error"]


CLIENTS = 64


def write_case(form, folder, inputs):
    """The bytes of a request in one of three forms, how to read what comes back, and what it should be."""
    name, version, signature = folder.parent.name, folder.name, Artefact.open(folder).signature
    wanted = in_rungs(load(folder), (1, 2, 4), inputs)
    if form == "tf":
        request = write_request(
            f"/v1/models/{name}/versions/{version}:predict", tf_rest.write_instances(inputs)
        )
        return request, lambda headers, body: tf_rest.read_predictions(body, signature), wanted
    pieces, headers = v2.write_request(inputs, signature, binary=form == "binary")
    request = write_request(f"/v2/models/{name}/versions/{version}/infer", b"".join(pieces), headers)
    return (
        request,
        lambda headers, body: v2.read_answer(body, headers.get(v2.HEADER.lower()), signature),
        wanted,
    )


@pytest.mark.parametrize("requests", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mixed_load_gets_its_own_answers(server, models, others, requests):
    """64 clients, random numbers of rows, two models of two versions, in all forms: each answer is that of its rows."""
    folders = [models / "small" / "1", models / "small" / "2", others / "other" / "1", others / "other" / "2"]
    sizes = [rows(count, seed=count) for count in range(1, 10)]  # the largest rung is 4
    cases = [write_case(*each) for each in product(("binary", "json", "tf"), folders, sizes)]
    wrong, asked = [], Counter()

    async def send(number):
        generator = random.Random(number)
        async with raw_client.connect(server.port) as client:
            for _ in range(number, requests, CLIENTS):
                picked = generator.randrange(len(cases))
                request, read, wanted = cases[picked]
                status, headers, body = await client.ask(request)
                asked[picked] += 1
                if status != 200 or (body := find_disagreement(wanted, read(headers, body), 1e-5)):
                    wrong.append((picked, status, body))

    async def send_all():
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(send(number))

    asyncio.run(send_all())
    assert wrong == []
    assert asked.total() == requests and len(asked) == len(cases)


def test_a_chunked_body_over_the_limit_is_not_read_on(models):
    with (
        ServedProcess(models, "--max-bytes", "100k") as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as raw,
    ):
        raw.sendall(b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
        sent = 0
        try:
            while sent < 20_000_000:
                raw.sendall(chunk)
                sent += len(chunk)
            raise AssertionError("it reads for ever")
        except OSError:
            pass  # closed by the server: what its buffers took is all that was sent
        assert sent < 20_000_000
        assert served.stop() == (0, "")


def test_sigterm_under_load_loses_no_accepted_request(models):
    signature = Artefact.open(models / "small" / "1").signature
    answered, failures = [], []

    def send(port, seed):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        while True:
            try:
                connection.connect()
            except OSError:  # no new connection: as it should be
                return
            try:
                while True:
                    pieces, headers = v2.write_request(rows(3, seed), signature)
                    connection.request("POST", "/v2/models/small/infer", b"".join(pieces), headers)
                    answer = connection.getresponse()
                    answer.read()
                    answered.append(answer.status)
                    if answer.will_close:
                        break
            except (http.client.HTTPException, OSError) as error:
                failures.append(repr(error))
                return
            connection.close()

    with ServedProcess(models) as served:
        threads = [threading.Thread(target=send, args=(served.port, each)) for each in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        status, errors = served.stop()
        for thread in threads:
            thread.join()
    assert (status, errors) == (0, "")
    assert set(answered) == {200} and len(answered) > 50
    assert failures == []


def test_versions_come_are_damaged_and_go_while_clients_send(models, tmp_path):
    shutil.copytree(models / "small" / "1", tmp_path / "models" / "small" / "1")
    signature = Artefact.open(models / "small" / "1").signature
    statuses, is_over = [], threading.Event()
    inputs = rows(2)

    def send(port):
        with connect(port) as connection:
            while not is_over.is_set():
                statuses.append(ask(connection, inputs, signature)[0])

    with ServedProcess(tmp_path / "models", "--watch", "0.05") as served:
        threads = [threading.Thread(target=send, args=(served.port,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        place = tmp_path / "models" / "small"
        shutil.copytree(models / "small" / "2", place / ".part")
        (place / ".part").rename(place / "2")
        served.wait_for("loaded small version 2")
        shutil.copytree(models / "small" / "1", place / ".part")
        program = bytearray((place / ".part" / "program.bin").read_bytes())
        program[100] ^= 1
        (place / ".part" / "program.bin").write_bytes(program)
        (place / ".part").rename(place / "3")
        refused = served.wait_for("refused ")
        assert "small/3" in refused and "program.bin" in refused
        shutil.rmtree(place / "1")
        served.wait_for("removed small version 1")
        with connect(served.port) as connection:
            assert ask(connection, inputs, signature, 1)[0] == 404
            found = ask(connection, inputs, signature)[1]
        assert find_disagreement(local(models, 2, inputs), found, 1e-5) is None
        is_over.set()
        for thread in threads:
            thread.join()
        assert served.stop()[0] == 0
    assert set(statuses) == {200} and len(statuses) > 20


def test_what_cannot_be_served_is_one_line_before_anything_is_loaded(models, tmp_path, capsys):
    from hotloop.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = tmp_path / "other"
        shutil.copytree(models / "small", other / "small")
        shutil.copytree(models / "small", tmp_path / "newer" / "small")
        about = tmp_path / "newer" / "small" / "1" / "model.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 2}))
        secret = tmp_path / "token"
        secret.write_text("word\n")
        secret.chmod(0o644)
        for words, sentence in (
            ([models, "--port", port, "--grpc-port", "none"], f"--port {port}: cannot listen"),
            (
                [models, "--port", 0, "--grpc-port", port],
                f"--grpc-port {port}: cannot listen on 127.0.0.1 (Address already in use); choose another, 0 for a",
            ),
            ([tmp_path / "none"], "no such folder"),
            ([models, "--titles", secret], "no '|', '::', TAB or comma; expected an id and a title"),
            ([tmp_path / "other" / "small" / "1"], "no model is in it"),
            ([models, "--port", 65001, "--grpc-port", 65001], "--grpc-port 65001: is the --port of HTTP"),
            ([models, other], "the model small is also in"),
            ([tmp_path / "newer"], "its format is 2, and this hotloop reads up to 1"),
            ([models, "--token-file", secret], "others may read it; chmod 600"),
            ([models, "--host", "nowhere.invalid"], "no address of this machine"),
            ([models, "--max-bytes", "none"], "--max-bytes none"),
            ([models, "--ssl-keyfile", secret], "give both"),
            (
                [models, "--ssl-certfile", secret, "--ssl-keyfile", secret],
                "cannot be used with --ssl-keyfile",
            ),
        ):
            assert main(["serve", *map(str, words)]) == 2, words
            out, err = capsys.readouterr()
            said = err.splitlines()
            assert not out and len(said) == 1 and sentence in said[0], (out, said)


def test_not_ready_comes_first_and_requests_are_answered_during_the_drain_delay(models):
    signature = Artefact.open(models / "small" / "1").signature
    with ServedProcess(models, "--drain-delay", "1.5") as served:
        served.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 10
        status = 200
        while status == 200 and time.monotonic() < end:
            with connect(served.port) as connection:
                connection.request("GET", "/v2/health/ready")
                status = connection.getresponse().status
        assert status == 400
        with connect(served.port) as connection:  # a new one
            assert ask(connection, rows(1), signature)[0] == 200
        assert served.process.wait(20) == 0
        with pytest.raises(OSError), connect(served.port) as connection:
            connection.connect()


def test_a_body_that_has_not_come_when_the_grace_ends_is_refused_and_no_lost_request(models):
    with (
        ServedProcess(models, "--grace", "0.5") as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as raw,
    ):
        raw.sendall(b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        assert served.stop() == (0, "")
        answer = raw.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"the server is ending" in answer


def test_the_program_of_the_page_about_serving_asks_a_server(tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "serve.md").read_text()
    [program] = re.findall("```python\n(.*?)```", page, re.DOTALL)
    folder = tmp_path / "models"
    write_uncompared(folder, small_image())
    with ServedProcess(folder) as served:
        images = np.zeros((2, 8, 8, 3), np.uint8)
        exec(program.replace(":8000", f":{served.port}"), {"images": images})  # noqa: S102
    assert "image" in capsys.readouterr().out

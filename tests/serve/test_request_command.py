"""`hotloop request` against a real server: figures, comparison with local inference, refusals, and bad input."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fake_models
import numpy as np
import pytest
from served_process import ServedProcess
from small_models import small, write_uncompared

from hotloop.cli.main import main
from hotloop.cli.own_server import OwnModels
from hotloop.cli.request import data_of_run
from hotloop.errors import HotloopError
from hotloop.serve.address import Address
from hotloop.serve.client import Client, RemoteModel, Reply, ServerError
from hotloop.serve.load import Load, Outcome, Sender, make_batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("requested") / "models"
    return write_uncompared(place, small())[0]


@pytest.fixture(scope="module")
def address(folder):
    with ServedProcess(folder.parent) as served:
        yield f"http://127.0.0.1:{served.port}"


def result_of(words, capsys):
    status = main(["request", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("protocol", ["v2", "v2-json", "tf"])
def test_every_answer_is_compared_and_counted(address, folder, protocol, capsys):
    words = (address, "--folder", folder, "--check", "--protocol", protocol)
    status, found = result_of(
        (*words, "--num-threads", 3, "--batch-size", 3, "--num-images", 10, "--use-async"), capsys
    )
    assert status == 0
    # 10 rows are 4 requests of 3, of each of 3 clients.
    assert (found["sent"], found["answered"], found["failures"], found["wrong"]) == (36, 36, 0, 0)
    assert found["throughput"] == pytest.approx(36 / found["seconds"])
    for phase in ("total", "queue", "compute", "rest"):
        spread = found["latency_ms"][phase]
        assert spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]


def test_lines_for_people_and_for_benchmark_files(address, capsys):
    assert main(["request", address, "--num-images", "2", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert said.count("-- Latency for batch: ") == 2
    assert "sent 2, answered 2, failures 0" in said and "Average throughput: " in said


def test_another_models_answers_are_found_out(address, tmp_path, capsys):
    other = write_uncompared(tmp_path / "other", small(seed=5))[0]
    status, found = result_of((address, "--folder", other, "--check", "--num-images", 3), capsys)
    assert status == 2 and "3 answers are not those of local inference" in found["error"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "URL is needed"),
        (("http://127.0.0.1:1",), "Connection refused"),
        (("ftp://127.0.0.1",), "must be http://HOST:PORT"),
        (("http://127.0.0.1:1/v2",), "without a path"),
        (("http://127.0.0.1:99999",), "must be http://HOST:PORT"),
        (("http://127.0.0.1:1", "--check"), "--check: needs --folder"),
        (("http://127.0.0.1:1", "--port", "3"), "the URL has them already"),
        (("http://127.0.0.1:1", "--run", "x"), "URL and --run: give one"),
        (("http://127.0.0.1:1", "--dataset", "mnist"), "--dataset: the server has its own network"),
        (("--port", "1", "--dataset", "mnist"), "--dataset: the server has its own network"),
        (("--run", "x", "--folder", "y"), "--folder: the model is exported for this command alone"),
        (("--run", "no-such-run"), "no-such-run"),
        (("http://127.0.0.1:1", "--best"), "--best and --step choose a checkpoint: they need --run"),
        (("http://127.0.0.1:1", "--ca-file", "x"), "--ca-file: is for a URL that begins with https://"),
        (("https://127.0.0.1:1", "--ca-file", "no-such-file"), "--ca-file no-such-file: cannot be used"),
        (("--port", "0"), "URL is needed"),
        (("--config", "resnet8_test", "--dataset-path", "no-such-folder"), "no-such-folder: no such folder"),
        (("--config", "resnet50_infer_bs1", "--dataset-path", "gone"), "gone: no such folder"),
    ],
)
def test_bad_input_is_one_line(words, sentence, capsys):
    assert main(["request", *words]) == 2
    out, err = capsys.readouterr()
    said = err.splitlines()
    assert not out and len(said) == 1 and sentence in said[0], (out, said)


def test_a_run_that_cannot_be_exported_is_one_line(tmp_path, capsys, monkeypatch):
    def refuse(self, words):
        raise HotloopError("hotloop export: has no checkpoint")

    monkeypatch.setattr(OwnModels, "export", refuse)
    (tmp_path / "config.json").write_text(json.dumps({"model_name": "toy_model", "dataset": "mnist"}))
    assert main(["request", "--run", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err == "hotloop: error: hotloop export: has no checkpoint\n"


@pytest.mark.parametrize(
    ("package", "words", "sentence"),
    [
        ("starlette", ("--config", "resnet8_test"), "needs starlette: pip install 'hotloop[serve]'"),
        ("flatbuffers", ("--run", "x"), "needs flatbuffers: pip install 'hotloop[serve]'"),
        ("safetensors", ("http://127.0.0.1:1", "--folder", "x", "--check"), "--folder needs safetensors"),
        ("grpc", ("http://127.0.0.1:1", "--protocol", "grpc"), "--protocol grpc needs grpc: pip install"),
        ("grpc", ("--config", "resnet8_test", "--protocol", "grpc"), "--protocol grpc needs grpc"),
    ],
)
def test_what_is_not_installed_is_named_before_anything_is_exported(
    package, words, sentence, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["request", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and sentence in err


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"images": 1, "method": "vcd", "data": "binarised_mnist"}, ("mnist", None)),
        ({"images": 1, "method": "vcd", "data": "/d/mnist"}, ("mnist", Path("/d/mnist"))),
        ({"images": 1, "method": "vcd", "data": "/d/fashion"}, ("fashion_mnist", Path("/d/fashion"))),
        ({"model_fn": "model_fn", "params": {"dataset_path": "/d/cifar"}}, ("cifar10", Path("/d/cifar"))),
        ({"model_fn": "model_fn", "params": {"generated_data": True}}, (None, None)),
        ({"model_name": "m", "dataset": "mnist", "dataset_path": "/d"}, ("mnist", Path("/d"))),
    ],
)
def test_images_are_those_that_a_run_was_trained_with(config, found, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert data_of_run(tmp_path) == found


def test_a_server_at_the_port_is_asked_in_place_of_one_of_its_own(address, capsys):
    port = address.rpartition(":")[2]
    words = ["request", "--model-name", "toy_model", "--dataset", "mnist", "--synthetic-data", "host"]
    words += ["--host", "0.0.0.0", "--port", port, "--num-images", "3"]
    assert main([*words, "--name", "small"]) == 0
    said = capsys.readouterr().out
    assert f"http://127.0.0.1:{port}: a server runs there and is asked; nothing is exported" in said
    assert "sent 3, answered 3, failures 0" in said
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"--port {port}: who listens there has no such model" in said and "'toy_model'" in said


def test_failures_have_the_figures_beside_them(address, capsys, monkeypatch):
    infer, asked = Client.infer, []

    def fail_once(self, *words):
        asked.append(1)
        if len(asked) == 3:
            raise ServerError("gone")
        return infer(self, *words)

    monkeypatch.setattr(Client, "infer", fail_once)
    status, found = result_of((address, "--num-images", 4), capsys)
    assert status == 2 and found["error"] == "1 requests failed; the first: gone"
    assert (found["sent"], found["answered"], found["failures"]) == (4, 3, 1)
    assert found["reasons"] == {"gone": 1} and found["latency_ms"]["total"]["p50"] > 0


@pytest.mark.usefixtures("signals_heard")
def test_ctrl_c_leaves_with_the_figures_so_far(address, capsys):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    status, found = result_of((address, "--num-images", 1_000_000), capsys)
    timer.join()
    assert status == 130 and "error" in found
    assert 0 < found["answered"] <= found["sent"] < 1_000_000 and found["failures"] == 0
    assert found["throughput"] == pytest.approx(found["answered"] / found["seconds"])


def test_a_name_that_is_not_there(address, capsys):
    assert main(["request", address, "--name", "large"]) == 2
    assert "there is no model 'large'" in capsys.readouterr().err


@pytest.fixture
def stubborn():
    """A server that says 429 to every other request, answers one wrongly, and hangs up on another."""
    counted = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            counted.append(1)
            if len(counted) == 6:
                self.close_connection = True
                return
            full = len(counted) % 2 == 0
            text = b'{"error": "full"}' if full else b'{"predictions": [[2.0]]}'
            self.send_response(429 if full else 200)
            if full:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def test_refusals_are_tried_again_and_counted_and_lost_answers_are_failures(stubborn, monkeypatch):
    from fake_models import Signature, Tensor

    monkeypatch.setattr("hotloop.serve.load.LONGEST_PAUSE", 0.01)
    signature = Signature((Tensor("x", "FP32", (-1, 1)),), (Tensor("y", "FP32", (-1, 1)),))
    batches = [{"x": np.ones((1, 1), np.float32)}]
    expected = [{"y": np.full((1, 1), 2, np.float32)}]
    sender = Sender(
        lambda: Client(Address("http", "127.0.0.1", stubborn), timeout=5.0),
        RemoteModel("m", None, signature),
        Load(images=4, protocol="tf"),
        batches,
        expected,
    )
    outcome = sender.run()
    # 1 warms up; 2 and 4 are refused, 3 and 5 answered, 6 hung up on, 7 answered.
    assert (outcome.sent, outcome.answered, outcome.retries) == (4, 3, 2)
    assert len(outcome.failures) == 1 and "no answer" in outcome.failures[0]
    assert outcome.wrong == []


def test_an_answer_that_is_none_is_a_failure_and_the_rest_is_sent():
    outcome = send_scripted(Load(images=4), 1, 1, KeyError("y"), 1)
    assert (outcome.sent, outcome.answered, outcome.failures) == (4, 3, ["KeyError: 'y'"])


def wait_until_answering(url):
    """Until a server has answered some rows."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{url}/v2/models/small/stats") as answer:
            if any(each["inference_count"] > 20 for each in json.load(answer)["model_stats"]):
                return
        time.sleep(0.05)
    raise AssertionError("nobody asks it")


class Scripted:
    """A client whose answers are numbers, and errors that it raises; the last one again and again."""

    def __init__(self, *answers):
        self._answers = list(answers)

    def infer(self, model, inputs, protocol):
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return Reply({"y": inputs["x"]}, answer, {})


def send_scripted(load, *answers):
    client, model = nullcontext(Scripted(*answers)), RemoteModel("m", None, fake_models.ROWS)
    return Sender(lambda: client, model, load, [{"x": np.ones((1, 3), np.float32)}]).run()


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_load_ends_where_nobody_answers_and_not_where_one_request_is_hung_up_on(rate):
    hung_up, gone = ServerError("closed"), ServerError("refused", is_silent=True)
    load = Load(images=1_000_000, rate=rate)
    outcome = send_scripted(load, 1, 1, hung_up, 1, ServerError("full", 503), 1, gone)
    assert (outcome.sent, outcome.answered, outcome.silence) == (6, 3, "refused")
    assert outcome.failures == ["closed", "full", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_hangs_is_one_line_within_the_timeout(number, folder):
    with ServedProcess(folder.parent) as served:
        url = f"http://127.0.0.1:{served.port}"
        words = ("request", url, "--num-threads", "4", "--num-images", "10000000", "--timeout", "3", "--json")
        client = subprocess.Popen(
            [sys.executable, "-m", "hotloop", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until_answering(url)
            served.process.send_signal(number)
            at = time.monotonic()
            said, errors = client.communicate(timeout=20)
        finally:
            client.kill()
        assert time.monotonic() - at < 3 + 3  # its own end takes a while on a busy machine
    assert client.returncode == 2
    assert "Traceback" not in errors
    (line,) = [each for each in errors.splitlines() if "error:" in each]
    assert "the server answers no more" in line and url in line
    found = json.loads(said.splitlines()[-1])
    # Of each client the one under way, and those that were refused before another's last answer was noted.
    assert 0 < found["answered"] <= found["sent"] <= found["answered"] + 16
    assert found["latency_ms"]["total"]["p50"] > 0


def serve_once(status, text, *, reads=True):
    """The port of a server that answers one request with this."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listening, listening.accept()[0] as connection:
            if reads:
                connection.recv(1 << 16)
            head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + text)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    threading.Thread(target=answer, daemon=True).start()
    return listening.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"outputs": [{"name": "z"}]}', "its answer cannot be read"),
        (b'{"outputs": []}', "its answer cannot be read"),
        (b"<html>", "its answer cannot be read"),
    ],
)
def test_what_is_no_answer_is_an_error_of_the_server(text, sentence):
    with Client(Address("http", "127.0.0.1", serve_once(200, text)), timeout=5.0) as client:
        with pytest.raises(ServerError, match=sentence) as failed:
            client.infer(RemoteModel("m", None, fake_models.ROWS), {"x": np.ones((1, 3), np.float32)})
        assert failed.value.status == 200


@pytest.mark.parametrize("tensor", [{"datatype": "BYTES"}, {"shape": [-1, -1]}, {"shape": []}])
def test_a_model_that_this_client_cannot_ask_is_named(tensor):
    good = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
    about = json.dumps({"inputs": [{**good, **tensor}], "outputs": [good]}).encode()
    with (
        Client(Address("http", "127.0.0.1", serve_once(200, about)), timeout=5.0) as client,
        pytest.raises(ServerError, match="m: x "),
    ):
        client.describe("m")


def test_addresses_of_ip_6_have_brackets():
    assert str(Address.parse("http://[::1]:80")) == "http://[::1]:80"


def test_a_server_that_is_silent_is_given_up_within_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(Address("http", "127.0.0.1", silent.getsockname()[1]), timeout=0.1)
        with pytest.raises(ServerError, match=r"no answer within 0\.1 s"):
            client.describe("m")


def test_percentiles_and_throughput_are_those_of_the_answers():
    outcome = Outcome(
        sent=8, answered=6, seconds=2.0, latencies={"total": [0.001 * n for n in range(1, 102)]}
    )
    assert outcome.throughput == 3.0
    assert outcome.percentiles()["total"] == pytest.approx({"p50": 51, "p90": 91, "p99": 100, "max": 101})
    assert Outcome(sent=5, seconds=1.0).throughput == 0.0 and Outcome().percentiles() == {}


def test_inputs_of_one_row_belong_together():
    signature = small().signature
    examples = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}
    batches = make_batches(signature, 5, examples)
    assert all(row.tolist() in examples["x"].tolist() for batch in batches for row in batch["x"])
    assert len({batch["x"].tobytes() for batch in batches}) > 1

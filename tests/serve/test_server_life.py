"""A server's life in this process, without signals: it loads, answers over both ports, and ends when it is asked to."""

import gc
import ssl
import sys
import threading
import time
import urllib.request
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from small_models import small, write_uncompared

from hotloop.cli import serve as serve_command
from hotloop.cli.command import Context
from hotloop.cli.parser import resolve, scan
from hotloop.engine.interrupt import StopRequest
from hotloop.errors import MissingExtra, ModelError, OptionError
from hotloop.serve.access_log import open_log, write_lines
from hotloop.serve.address import Address
from hotloop.serve.artefact import Artefact, in_rungs
from hotloop.serve.client import ServerError
from hotloop.serve.load import Load, Sender, make_batches
from hotloop.serve.server import Service, bind, serve


@pytest.fixture
def folder(tmp_path):
    write_uncompared(tmp_path, small(), ladder=(1,))
    return tmp_path


class Lines(list):
    """What is said, as it is said; `wait_for` the next that begins so."""

    def wait_for(self, beginning):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for line in self:
                if line.startswith(beginning):
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no line '{beginning}': {self}")


def check_load_over_grpc(where, model):
    """Our own client gets the answers of local inference, told how long they took."""
    from hotloop.serve.grpc_client import GrpcClient

    artefact = Artefact.open(model)
    batches = make_batches(artefact.signature, 3, artefact.examples()[0])
    expected = [in_rungs(artefact.load(), artefact.ladder, batches[0])]
    connect = partial(GrpcClient, Address.parse(where), timeout=5.0)
    with connect() as client:
        remote = client.describe("small")
        assert remote.signature == artefact.signature
        with pytest.raises(ServerError, match="NOT_FOUND: there is no model 'smal'") as refused:
            client.describe("smal")
        assert refused.value.status == 404
    outcome = Sender(connect, remote, Load(3, 2, 6, protocol="grpc"), batches[:1], expected).run()
    assert (outcome.sent, outcome.answered, outcome.failures, outcome.wrong) == (12, 12, [], [])
    assert set(outcome.latencies) == {"total", "queue", "compute", "rest"}


def test_both_ports_answer_until_it_is_asked_to_end(folder):
    grpc = pytest.importorskip("grpc", reason="the extra grpc is not installed")
    protocol = pytest.importorskip("open_inference.grpc.protocol", reason="the extra grpc is not installed")
    service = pytest.importorskip("open_inference.grpc.service", reason="the extra grpc is not installed")
    stop, said = StopRequest(), Lines()
    listening = bind("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(
        target=serve, args=(Service([folder], grpc_port=0), listening, stop, said.append)
    )
    thread.start()
    try:
        said.wait_for("ready:")
        assert urllib.request.urlopen(f"{address}/v2/health/ready", timeout=5).status == 200
        with grpc.insecure_channel(said.wait_for("listening for gRPC").split()[-1]) as channel:
            request = protocol.ModelInferRequest(model_name="small")
            request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
            request.raw_input_contents.append(np.ones((2, 4), np.float32).tobytes())
            answer = service.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=5)
        assert [list(each.shape) for each in answer.outputs] == [[2, 3], [2, 2], [2, 2]]
        check_load_over_grpc(said.wait_for("listening for gRPC").split()[-1], folder / "small" / "1")
    finally:
        stop.number = 15
        thread.join(20)
    assert not thread.is_alive() and said[-1] == "ended: every request was answered"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{address}/v2/health/live", timeout=5)


def test_the_socket_is_closed_where_nothing_begins(folder):
    listening = bind("127.0.0.1", 0)
    with pytest.raises(OptionError, match=r"--access-log .*: cannot be written"):
        serve(Service([folder], access_log=folder), listening, StopRequest(), lambda text: None)
    assert listening.fileno() == -1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_access_log_on_a_full_disk_is_said_once(tmp_path):
    said = []
    with open_log(Path("/dev/full"), said.append) as write:
        for _ in range(3):
            write("{}")
    assert said == ["--access-log /dev/full: lines are lost, it cannot be written (No space left on device)"]


def test_the_access_log_goes_on_when_there_is_space_again(tmp_path):
    class Disk(StringIO):
        is_full = True

        def flush(self):
            if self.is_full:
                raise OSError(28, "No space left on device")

    disk, said = Disk(), []
    write = write_lines(tmp_path, disk, said.append)
    write('{"half": ')
    disk.is_full = False
    write("{}")
    write("{}")
    assert disk.getvalue().endswith("\n\n{}\n{}\n") and len(said) == 1
    with open_log(tmp_path / "log", said.append) as write:
        write("{}")
        assert (tmp_path / "log").read_text() == "{}\n"


def test_what_uvicorn_cannot_start_with_is_what_is_raised(folder, tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    service = Service([folder], certificate=wrong, key=wrong)
    with pytest.raises(ssl.SSLError):
        serve(service, bind("127.0.0.1", 0), StopRequest(), lambda text: None)


def test_python_lets_the_device_thread_in_sooner_and_collects_no_modules_while_it_serves(folder):
    before, during, stop = sys.getswitchinterval(), [], StopRequest()
    frozen = []

    def say(text):
        during.append(sys.getswitchinterval())
        frozen.append(gc.get_freeze_count())
        if text.startswith("ready"):
            stop.number = 15

    serve(Service([folder]), bind("127.0.0.1", 0), stop, say)
    assert max(during) < before / 5 and sys.getswitchinterval() == before
    assert min(frozen) > 10_000 and gc.get_freeze_count() == 0


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(folder):
    program = folder / "small" / "1" / "program.bin"
    program.write_bytes(program.read_bytes()[:-1])
    said = []
    with pytest.raises(ModelError, match=r"program\.bin"):
        serve(Service([folder]), bind("127.0.0.1", 0), StopRequest(), said.append)
    assert not any(line.startswith("ended") for line in said)


def test_a_grpc_port_in_use_ends_it_before_anything_is_loaded(folder):
    pytest.importorskip("open_inference.grpc.protocol", reason="the extra grpc is not installed")
    said = []
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"--grpc-port {port}: cannot listen"):
            serve(Service([folder], grpc_port=port), bind("127.0.0.1", 0), StopRequest(), said.append)
    assert not any(line.startswith("loaded") for line in said)


def choose(*words, missing=()):
    """The port for gRPC that a command line leads to, and what is said of it."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_command, "find_spec", lambda name: None if name in missing else name)
        patch.setattr(Context, "say", lambda self, text: said.append(text))
        given = scan(["models", *words], serve_command.COMMAND.options)
        config = resolve(serve_command.COMMAND, given).config
        return serve_command.choose_grpc_port(config, Context(given=frozenset(given))), said


def test_grpc_is_on_where_it_is_installed_and_not_told_otherwise():
    assert choose() == (8001, [])
    assert choose("--port", "0") == (0, [])  # many servers on free ports do not meet on this one
    assert choose("--port", "0", "--grpc-port", "8001") == (8001, [])
    assert choose("--grpc-port", "none") == (None, [])
    port, (line,) = choose(missing=("open_inference",))
    assert port is None and "hotloop[grpc]" in line
    assert choose("--grpc-port", "none", missing=("grpc",)) == (None, [])
    with pytest.raises(MissingExtra, match=r"hotloop\[grpc\]"):
        choose("--grpc-port", "8001", missing=("grpc",))

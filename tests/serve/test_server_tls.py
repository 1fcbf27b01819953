"""A server with a certificate of its own, over both ports, and who trusts it."""

import json
import shutil
import subprocess
import threading
import time

import pytest
from small_models import small, write_uncompared

from hotloop.cli.main import main
from hotloop.engine.interrupt import StopRequest
from hotloop.serve.address import Address
from hotloop.serve.client import Client, ServerError
from hotloop.serve.server import Service, bind, serve

CERTIFICATE = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=hotloop"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Certificate and key of 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(["openssl", *CERTIFICATE.split(), *more], check=True, capture_output=True)
    return files


@pytest.fixture(scope="module")
def served(certificate, tmp_path_factory):
    """The addresses of HTTPS and of gRPC."""
    pytest.importorskip("open_inference.grpc.protocol", reason="the extra grpc is not installed")
    folder = tmp_path_factory.mktemp("served")
    write_uncompared(folder, small(), ladder=(1,))
    stop, said, listening = StopRequest(), [], bind("127.0.0.1", 0)
    service = Service([folder], certificate=certificate[0], key=certificate[1], grpc_port=0)
    thread = threading.Thread(target=serve, args=(service, listening, stop, said.append))
    thread.start()
    try:
        end = time.monotonic() + 20
        while not any(line.startswith("ready: https://") for line in said) and time.monotonic() < end:
            time.sleep(0.01)
        other = next(line.split()[-1] for line in said if line.startswith("listening for gRPC"))
        yield f"https://127.0.0.1:{listening.getsockname()[1]}", f"https://{other}"
    finally:
        stop.number = 15
        thread.join(20)
    assert said[-1] == "ended: every request was answered"


@pytest.mark.parametrize("protocol", ["v2", "grpc"])
def test_our_client_trusts_the_certificate_that_it_is_given(served, certificate, protocol, capsys):
    url = served[protocol == "grpc"]
    words = ["request", url, "--protocol", protocol, "--name", "small", "--num-images", "3", "--json"]
    assert main([*words, "--ca-file", str(certificate[0])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sent"], found["answered"], found["failures"]) == (3, 3, 0)
    assert main([*words, "--timeout", "2"]) == 2  # whom it does not know it does not ask


def test_a_certificate_that_nobody_vouches_for_is_named_with_what_to_do(served):
    with Client(Address.parse(served[0])) as client, pytest.raises(ServerError, match="give --ca-file"):
        client.describe("small")


def test_only_tls_is_spoken(served, certificate):
    plain = Address.parse(served[0].replace("https", "http"))
    with Client(plain, timeout=5) as client, pytest.raises(ServerError, match="no answer"):
        client.describe("small")
    with Client(Address.parse(served[0]), ca_file=certificate[0], timeout=5) as client:
        assert client.is_ready()

"""The protocol over gRPC, by fake devices in the same process and by the published stubs."""

import asyncio
import json
import sys
from importlib.util import find_spec

import fake_models
import numpy as np
import pytest

from hotloop.errors import OptionError
from hotloop.serve.app import Application, Limits

MISSING = "the extra grpc is not installed"
grpc = pytest.importorskip("grpc", reason=MISSING)
protocol = pytest.importorskip("open_inference.grpc.protocol", reason=MISSING)
service = pytest.importorskip("open_inference.grpc.service", reason=MISSING)
health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2", reason=MISSING)
health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc", reason=MISSING)
grpc_service = pytest.importorskip("hotloop.serve.grpc_service", reason=MISSING)
start = grpc_service.start
X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def asked(raw=None, **changes):
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 3], **changes}
    request = protocol.ModelInferRequest(model_name="rows", id="7")
    request.inputs.add(**tensor)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


def with_outputs(*names):
    request = asked(X.tobytes())
    for name in names:
        request.outputs.add(name=name)
    return request


def many_inputs(count):
    """Empty tensors, two bytes each."""
    request = protocol.ModelInferRequest(model_name="rows")
    request.MergeFromString(b"\x2a\x00" * count)
    return request


def classified():
    request = with_outputs("y")
    request.outputs[0].parameters["classification"].int64_param = 3
    return request


def run(act, **limits):
    """What `act` gives, called with a stub, the channel and the models of a server."""

    async def main():
        models, devices = fake_models.make_models()
        server, port = await start(Application(models, models.figures, Limits(**limits)), "127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await act(service.GRPCInferenceServiceStub(channel), channel, models, devices)
        finally:
            await server.stop(0)

    return asyncio.run(main())


def outputs_of(answer):
    return {
        each.name: np.frombuffer(raw, {"FP32": np.float32, "INT32": np.int32}[each.datatype]).reshape(
            each.shape
        )
        for each, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


def test_raw_and_typed_tensors_get_the_same_answer():
    async def act(stub, channel, models, devices):
        raw = await stub.ModelInfer(asked(X.tobytes()))
        typed = await stub.ModelInfer(asked(contents={"fp32_contents": X.ravel().tolist()}))
        old = asked(X.tobytes())
        old.model_version = "1"
        return raw, typed, await stub.ModelInfer(old), models.figures.of("rows", 2).answered

    raw, typed, old, answered = run(act)
    assert (raw.model_name, raw.model_version, raw.id) == ("rows", "2", "7")
    np.testing.assert_array_equal(outputs_of(raw)["y"], 4 * X)
    np.testing.assert_array_equal(outputs_of(typed)["y"], 4 * X)
    np.testing.assert_array_equal(outputs_of(old)["y"], 2 * X)
    assert answered == 2


def test_health_and_metadata():
    async def act(stub, channel, models, devices):
        health = health_pb2_grpc.HealthStub(channel)
        about = await stub.ModelMetadata(protocol.ModelMetadataRequest(name="rows"))
        assert list(about.versions) == ["1", "2"] and about.inputs[0].name == "x"
        assert list(about.inputs[0].shape) == [-1, 3] and about.outputs[0].datatype == "FP32"
        assert (await stub.ServerMetadata(protocol.ServerMetadataRequest())).name == "hotloop"
        assert (await stub.ServerLive(protocol.ServerLiveRequest())).live
        assert (await stub.ServerReady(protocol.ServerReadyRequest())).ready
        assert (await stub.ModelReady(protocol.ModelReadyRequest(name="rows", version="1"))).ready
        for name in ("", "rows"):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == 1
        models.is_ending = True
        assert not (await stub.ServerReady(protocol.ServerReadyRequest())).ready
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 2

    run(act)


@pytest.mark.parametrize(
    ("request_", "code", "sentence"),
    [
        (asked(X.tobytes(), shape=[2, 4]), "INVALID_ARGUMENT", "does not fit"),
        (asked(X.tobytes()[:-1]), "INVALID_ARGUMENT", "23 bytes, and shape"),
        (asked(X.tobytes(), datatype="FP16"), "INVALID_ARGUMENT", "datatype must be FP32"),
        (asked(X.tobytes(), name="z"), "INVALID_ARGUMENT", "there is no input 'z'"),
        (asked(np.full((2, 3), np.nan, np.float32).tobytes()), "INVALID_ARGUMENT", "row 0 is not finite"),
        (asked(contents={"fp32_contents": [1.0]}), "INVALID_ARGUMENT", "1 numbers, and shape [2, 3]"),
        (asked(), "INVALID_ARGUMENT", "no numbers"),
        (asked(X.tobytes(), contents={"fp32_contents": [1.0]}), "INVALID_ARGUMENT", "give one of them"),
        (with_outputs("y", "y"), "INVALID_ARGUMENT", "2 outputs, and the model has 1"),
        (with_outputs("z"), "INVALID_ARGUMENT", "there is no output 'z'"),
        (classified(), "INVALID_ARGUMENT", "classification is not offered"),
        (
            asked(contents={"fp32_contents": [1.0] * 65_537}),
            "INVALID_ARGUMENT",
            "go as raw_input_contents only",
        ),
        (asked(contents={"bytes_contents": [b"x" * (1 << 20)]}), "INVALID_ARGUMENT", "send tensors raw"),
        (many_inputs(1_000_000), "INVALID_ARGUMENT", "at most 1,000 fields"),
        (protocol.ModelInferRequest(model_name="rows"), "INVALID_ARGUMENT", "the input x is missing"),
        (protocol.ModelInferRequest(model_name="nobody"), "NOT_FOUND", "there is no model 'nobody'"),
    ],
)
def test_what_is_wrong_is_a_status_with_one_sentence(request_, code, sentence):
    async def act(stub, channel, models, devices):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(request_)
        return refused.value

    refused = run(act)
    assert refused.code().name == code and sentence in refused.details()


def test_a_device_call_that_raises_is_internal_and_the_next_one_works():
    async def act(stub, channel, models, devices):
        devices["rows2"].error = RuntimeError("out of memory")
        with pytest.raises(grpc.aio.AioRpcError, match="out of memory") as failed:
            await stub.ModelInfer(asked(X.tobytes()))
        assert failed.value.code().name == "INTERNAL"
        await stub.ModelInfer(asked(X.tobytes()))

    run(act)


def test_the_token_is_needed_for_all_but_health():
    async def act(stub, channel, models, devices):
        assert (await stub.ServerReady(protocol.ServerReadyRequest())).ready
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        for call in (
            stub.ModelInfer(asked(X.tobytes())),
            stub.ModelInfer(asked(X.tobytes()), metadata=(("authorization", "Bearer secre"),)),
            stub.ServerMetadata(protocol.ServerMetadataRequest()),
            stub.ModelReady(protocol.ModelReadyRequest(name="rows")),
            health.Check(health_pb2.HealthCheckRequest(service="rows")),  # health is open, names are not
            health.Check(health_pb2.HealthCheckRequest(service="nobody")),
            health.Watch(health_pb2.HealthCheckRequest(service="rows")).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code().name == "UNAUTHENTICATED"
        own = (("authorization", "Bearer secret"),)
        await stub.ModelInfer(asked(X.tobytes()), metadata=own)
        assert (await health.Check(health_pb2.HealthCheckRequest(service="rows"), metadata=own)).status == 1
        return models.figures.as_text().decode()

    assert 'hotloop_requests_total{model="",status="401",version=""} 4.0' in run(act, token=b"secret")


def test_without_the_token_no_message_is_read(monkeypatch):
    """Who has no token gets its answer before it has sent anything; who has it is waited for, for a while."""
    monkeypatch.setattr(grpc_service, "BODY_SECONDS", 0.05)

    async def act(stub, channel, models, devices):
        open_call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        codes = []
        for metadata in ((), (("authorization", "Bearer secret"),)):
            call = open_call(metadata=metadata, timeout=5)  # nothing is written
            codes.append((await call.code()).name)
        return codes

    assert run(act, token=b"secret") == ["UNAUTHENTICATED", "DEADLINE_EXCEEDED"]


def test_calls_beyond_the_limit_are_told_to_come_back(monkeypatch):
    monkeypatch.setattr(grpc_service, "MOST_CALLS", 1)

    async def act(stub, channel, models, devices):
        devices["rows2"].busy = asyncio.Event()
        first = stub.ModelInfer(asked(X.tobytes()))
        while not devices["rows2"].rungs:
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError, match="more than 1 calls") as refused:
            await stub.ModelInfer(asked(X.tobytes()), timeout=5)
        devices["rows2"].busy.set()
        await first
        await stub.ModelInfer(asked(X.tobytes()))
        return dict(refused.value.trailing_metadata())

    assert run(act)["retry-after"] == "1"


def test_health_is_watched_until_the_server_ends(monkeypatch):
    monkeypatch.setattr(grpc_service, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(grpc_service, "MOST_WATCHERS", 2)

    async def act(stub, channel, models, devices):
        health = health_pb2_grpc.HealthStub(channel)
        whole, model = (health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "later"))
        assert [(await each.read()).status for each in (whole, model)] == [1, 3]  # SERVING, SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError, match="more than 2 clients watch"):
            await health.Watch(health_pb2.HealthCheckRequest()).read()
        fake_models.load_fake(models, fake_models.make_artefact("later"))
        assert (await model.read()).status == 1
        models.is_ending = True
        assert [(await each.read()).status for each in (whole, model)] == [2, 2]
        assert [await each.read() for each in (whole, model)] == [grpc.aio.EOF] * 2

    run(act)


TRITON = """
import sys
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("rows", "1")
assert client.get_server_metadata().name == "hotloop"
assert list(client.get_model_metadata("rows").versions) == ["1", "2"]
x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
given = triton.InferInput("x", [2, 3], "FP32")
given.set_data_from_numpy(x)
for outputs in (None, [triton.InferRequestedOutput("y")]):
    found = client.infer("rows", [given], "1", outputs=outputs, request_id="7")
    assert (found.as_numpy("y") == 2 * x).all() and found.get_response().id == "7"
given = triton.InferInput("x", [1, 4], "FP32")
given.set_data_from_numpy(np.zeros((1, 4), np.float32))
try:
    client.infer("rows", [given])
except InferenceServerException as error:
    print(error.status(), error.message())
"""


@pytest.mark.skipif(
    find_spec("tritonclient") is None or find_spec("tritonclient.grpc") is None,
    reason="tritonclient[grpc] is not installed",
)
def test_tritonclient_unmodified():
    """In a process of its own: its messages have the names of ours."""

    async def main():
        models, _ = fake_models.make_models()
        server, port = await start(Application(models, models.figures, Limits()), "127.0.0.1", 0)
        try:
            words = (sys.executable, "-c", TRITON, f"127.0.0.1:{port}")
            process = await asyncio.create_subprocess_exec(
                *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            said, _ = await process.communicate()
            return process.returncode, said.decode()
        finally:
            await server.stop(0)

    status, said = asyncio.run(main())
    assert status == 0, said
    assert said.strip() == "StatusCode.INVALID_ARGUMENT x: shape [1, 4] does not fit [-1, 3]"


def test_a_model_that_is_being_loaded_is_not_ready():
    async def act(stub, channel, models, devices):
        models.expect({("later", 1)})
        assert not (await stub.ModelReady(protocol.ModelReadyRequest(name="later"))).ready
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelReady(protocol.ModelReadyRequest(name="never"))
        assert refused.value.code().name == "NOT_FOUND"

    run(act)


def test_a_call_that_its_client_cancels_is_no_failure_of_the_server():
    async def act(stub, channel, models, devices):
        devices["rows2"].busy = asyncio.Event()
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
            await stub.ModelInfer(asked(X.tobytes()), timeout=0.1)
        for _ in range(100):
            if models.figures.of("rows", 2).failed:
                break
            await asyncio.sleep(0.01)
        devices["rows2"].busy.set()
        return models.figures.as_text().decode()

    assert 'hotloop_requests_total{model="rows",status="499",version="2"} 1.0' in run(act)


def test_each_call_is_a_line_of_json_as_over_http():
    lines = []

    async def main():
        models, _ = fake_models.make_models()
        application = Application(models, models.figures, Limits(token=b"secret"))
        application.build(lines.append)
        server, port = await start(application, "127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = service.GRPCInferenceServiceStub(channel)
                await stub.ModelInfer(asked(X.tobytes()), metadata=(("authorization", "Bearer secret"),))
        finally:
            await server.stop(0)

    asyncio.run(main())
    (line,) = map(json.loads, lines)
    assert (line["model"], line["version"], line["status"]) == ("rows", 2, 200)
    assert line["path"].endswith("/ModelInfer") and "secret" not in lines[0]


def test_a_message_over_the_limit_is_not_sent_again_and_again():
    from hotloop.serve.address import Address
    from hotloop.serve.client import RemoteModel, ServerError
    from hotloop.serve.grpc_client import GrpcClient

    def ask(port):
        with GrpcClient(Address("http", "127.0.0.1", port), timeout=5.0) as client:
            with pytest.raises(ServerError) as refused:
                client.infer(
                    RemoteModel("rows", None, fake_models.ROWS), {"x": np.zeros((1000, 3), np.float32)}
                )
            return refused.value.status

    async def main():
        models, _ = fake_models.make_models()
        server, port = await start(
            Application(models, models.figures, Limits(max_bytes=1000)), "127.0.0.1", 0
        )
        try:
            return await asyncio.to_thread(ask, port)
        finally:
            await server.stop(0)

    assert asyncio.run(main()) == 413


def test_a_message_over_the_limit_is_refused():
    async def act(stub, channel, models, devices):
        rows = np.zeros((1000, 3), np.float32)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(asked(rows.tobytes(), shape=[1000, 3]))
        return refused.value.code().name

    assert run(act, max_bytes=1000) == "RESOURCE_EXHAUSTED"


def test_a_port_in_use_is_one_line():
    async def main():
        models, _ = fake_models.make_models()
        application = Application(models, models.figures, Limits())
        server, port = await start(application, "127.0.0.1", 0)
        try:
            with pytest.raises(OptionError, match=f"--grpc-port {port}: cannot listen"):
                await start(application, "127.0.0.1", port)
        finally:
            await server.stop(0)

    asyncio.run(main())

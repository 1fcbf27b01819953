"""Requests that lie, to the application as a whole: an answer or one sentence, and never a defect."""

import json
from urllib.parse import quote

import fake_models
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from hotloop.serve import v2
from hotloop.serve.app import Application, Limits
from hotloop.serve.images import decode_rows
from hotloop.serve.models import LoadedVersion
from hotloop.serve.refusal import BadRequest

X = np.arange(6, dtype=np.float32).reshape(2, 3)
PIECES, HEADERS = v2.write_request({"x": X}, fake_models.ROWS)
GOOD = b"".join(PIECES)
VERSIONS = {
    name: LoadedVersion(fake_models.make_artefact(name, signature=signature), None, lambda: None)
    for name, signature in (
        ("rows", fake_models.ROWS),
        ("image", fake_models.IMAGE),
        ("two", fake_models.TWO),
    )
}
CALM = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def client():
    models, _ = fake_models.make_models()
    app = Application(models, models.figures, Limits(max_bytes=100_000)).build()
    with TestClient(app) as found:  # which raises whatever a handler did not expect
        yield found


def is_one_sentence(answer):
    if answer.status_code == 200:
        return True
    error = answer.json()["error"]
    return 400 <= answer.status_code < 500 and error and "\n" not in error


@CALM
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=4), st.integers(0, 4), st.integers(-3, 3))
def test_a_good_body_that_is_changed_somewhere(client, at, inserted, removed, shift):
    body = GOOD[:at] + inserted + GOOD[at + removed :]
    header = str(int(HEADERS[v2.HEADER]) + shift)
    answer = client.post("/v2/models/rows/infer", content=body, headers={v2.HEADER: header})
    assert is_one_sentence(answer)


@CALM
@given(
    st.sampled_from([
        "content-type", "content-encoding", "content-length-x", v2.HEADER, "authorization", "transfer-x", "accept",
    ]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
    st.sampled_from(["/v2/models/rows/infer", "/v2/models/image/infer", "/v1/models/rows:predict"]),
)  # fmt: skip
def test_any_header(client, name, value, address):
    assert is_one_sentence(client.post(address, content=GOOD, headers={name: value}))


@CALM
@given(
    st.text(max_size=30),
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
    st.sampled_from(["v1", "v2"]),
)
def test_any_address(client, text, method, root):
    assert is_one_sentence(client.request(method, f"/{root}/models/{quote(text)}", follow_redirects=False))


MODELS = st.sampled_from(["rows", "image", "two"])


@CALM
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "b64", "y"]), inner)
        ),
        max_leaves=8,
    ),
    st.sampled_from(["instances", "inputs"]),
    MODELS,
)
def test_any_json_for_tensorflow_servings_api(client, value, form, name):
    answer = client.post(f"/v1/models/{name}:predict", content=json.dumps({form: value}))
    assert is_one_sentence(answer)


@CALM
@given(st.binary(max_size=200), st.sampled_from(["image/png", "image/jpeg", "image/webp", "image/bmp"]))
def test_any_bytes_for_an_image(client, data, kind):
    starts = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff", "image/bmp": b"BM"}
    for body in (data, starts.get(kind, b"RIFF") + data):
        answer = client.post("/v2/models/image/infer", content=body, headers={"content-type": kind})
        assert is_one_sentence(answer)


NAMES = st.sampled_from(["x", "image", "items", "ratings", "y"])
NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4, 24, 48, 2**31 - 1, 2**31, 2**63, 10**30, True, 1.0])
SHAPES = st.lists(NUMBERS, max_size=5) | st.sampled_from([[2, 3], [1, 4, 4, 3], [1], [2, 1], "2,3", None])
TYPES = st.sampled_from(["FP32", "UINT8", "INT32", "BYTES", "FP16", "FP7", "", None, 3])
SECTIONS = st.binary(max_size=60) | st.sampled_from([X.tobytes(), bytes(48), b"\xff" * 48, b"\1\0\0\0x"])


@settings(CALM, max_examples=150)
@given(
    MODELS,
    st.lists(
        st.tuples(NAMES, TYPES, SHAPES, st.none() | NUMBERS),
        max_size=3,
    ),
    SECTIONS,
    st.integers(-40, 40),
)
def test_sizes_shapes_and_types_that_lie_before_bytes(client, model, tensors, section, shift):
    inputs = [
        {
            "name": name,
            "datatype": datatype,
            "shape": shape,
            "parameters": {} if size is None else {"binary_data_size": size},
        }
        for name, datatype, shape, size in tensors
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    for length in (len(text), max(0, len(text) + shift)):
        answer = client.post(
            f"/v2/models/{model}/infer", content=text + section, headers={v2.HEADER: str(length)}
        )
        assert is_one_sentence(answer)


@settings(CALM, max_examples=150)
@given(
    MODELS,
    st.lists(
        st.tuples(
            NAMES,
            st.sampled_from(["FP32", "UINT8", "INT32", "BYTES", "FP16", "FP7", ""]),
            st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4, 2**31, 2**63 - 1]), max_size=4),
            st.dictionaries(
                st.sampled_from(["fp32_contents", "uint_contents", "int_contents"]),
                st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=6),
                max_size=2,
            ),
        ),
        max_size=3,
    ),
    st.lists(SECTIONS, max_size=3),
)
def test_messages_of_grpc_that_lie(model, tensors, sections):
    protocol = pytest.importorskip("open_inference.grpc.protocol", reason="the extra grpc is not installed")
    service = pytest.importorskip("hotloop.serve.grpc_service", reason="the extra grpc is not installed")
    message = protocol.ModelInferRequest(model_name=model, raw_input_contents=sections)
    for name, datatype, shape, contents in tensors:
        message.inputs.add(name=name, datatype=datatype, shape=shape, contents=contents or None)
    version = VERSIONS[model]
    try:
        asked = service.read_request(message, version)
        rows = decode_rows(asked.arrays, asked.encoded, version.artefact, 100_000)
    except BadRequest as refused:
        assert "\n" not in str(refused) and len(str(refused)) <= 1300
    else:
        assert len({len(each) for each in rows.values()}) == 1

"""The application in process: protocols, limits, and what is counted, by fake devices."""

import asyncio
import base64
import io
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import anyio
import fake_models
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from hotloop.engine.exportable import Signature, Tensor
from hotloop.serve import images, v2
from hotloop.serve.app import Application, Limits
from hotloop.serve.gate import BodyBytes
from hotloop.serve.refusal import QueueFull

X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
LARGE_IMAGE = (Tensor("image", "UINT8", (-1, 20, 20, 3)),)
INFER = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3], "data": X.tolist()}]}


class Served:
    def __init__(self, **limits):
        self.models, self.devices = fake_models.make_models()
        self.lines = []
        app = Application(self.models, self.models.figures, Limits(**limits)).build(self.lines.append)
        self.client = TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def served():
    found = Served()
    with found.client:
        yield found


@pytest.fixture
def client(served):
    return served.client


def encode(pixels, form="PNG"):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def test_json_in_json_out_by_the_newest_version_and_by_its_number(client):
    answer = client.post("/v2/models/rows/infer", json={**INFER, "id": "7"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "model_name": "rows",
        "model_version": "2",
        "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 3], "data": (4 * X).ravel().tolist()}],
    }
    older = client.post("/v2/models/rows/versions/1/infer", json=INFER).json()
    assert older["model_version"] == "1" and older["outputs"][0]["data"] == (2 * X).ravel().tolist()


def ask_in_bytes(client, rows):
    """What comes back for these rows."""
    pieces, headers = v2.write_request({"x": rows}, fake_models.ROWS)
    answer = client.post("/v2/models/rows/infer", content=b"".join(pieces), headers=headers)
    assert answer.headers["content-type"] == "application/octet-stream"
    return v2.read_answer(answer.content, answer.headers[v2.HEADER], fake_models.ROWS)["y"]


@pytest.mark.parametrize("count", [2, 10_000])  # the answer to the larger one is written by another thread
def test_binary_in_binary_out(client, count):
    rows = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    np.testing.assert_array_equal(ask_in_bytes(client, rows), 4 * rows)


def test_an_answer_says_what_it_waited_for(client):
    timing = client.post("/v2/models/rows/infer", json=INFER).headers["server-timing"]
    phases = dict(part.strip().split(";dur=") for part in timing.split(","))
    assert set(phases) == {"queue", "compute", "decode"} and all(
        float(value) >= 0 for value in phases.values()
    )


def test_more_rows_than_the_largest_rung_come_back_in_order(served, client):
    rows = np.arange(33, dtype=np.float32).reshape(11, 3)
    np.testing.assert_array_equal(ask_in_bytes(client, rows), 4 * rows)
    assert served.devices["rows2"].rungs == [4, 4, 4]


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_image_is_a_body(client, form):
    white = encode(np.full((9, 5, 3), 255, np.uint8), form)
    headers = {"content-type": f"image/{form.lower()}; charset=binary"}
    answer = client.post("/v2/models/image/infer", content=white, headers=headers)
    assert answer.status_code == 200
    outputs = {each["name"]: each for each in answer.json()["outputs"]}
    assert outputs["probabilities"]["data"] == [1.0, 0.0] and outputs["classes"]["data"] == [0]


def test_images_are_elements_of_a_bytes_tensor(client):
    images = [encode(np.full((4, 4, 3), value, np.uint8)) for value in (0, 255)]
    data = b"".join(len(each).to_bytes(4, "little") + each for each in images)
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [2],
        "parameters": {"binary_data_size": len(data)},
    }
    text = json.dumps({"inputs": [tensor], "outputs": [{"name": "classes"}]}).encode()
    answer = client.post("/v2/models/image/infer", content=text + data, headers={v2.HEADER: str(len(text))})
    assert [each["data"] for each in answer.json()["outputs"]] == [[1, 0]]


def test_health_needs_nothing_and_says_when_it_is_over(served, client):
    assert client.get("/v2/health/live").json() == {"live": True}
    ready = client.get("/v2/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"live": True, "ready": True})
    served.models.expect({("rows", 3)})
    assert client.get("/v2/health/ready").status_code == 400
    assert client.post("/v2/models/rows/versions/3/infer", json=INFER).status_code == 503
    assert client.post("/v2/models/rows/infer", json=INFER).status_code == 200
    loading = client.get("/v1/models/rows/versions/3")
    assert loading.status_code == 200
    fine = {"error_code": "OK", "error_message": ""}
    assert loading.json()["model_version_status"] == [{"version": "3", "state": "LOADING", "status": fine}]
    assert (
        client.post("/v1/models/rows/versions/3:predict", json={"instances": [[1, 2, 3]]}).status_code == 503
    )
    assert client.get("/v1/models/rows/versions/3/metadata").status_code == 503
    served.models.refuse(("rows", 3), "rows/3/program.bin: is damaged")
    states = {each["version"]: each for each in client.get("/v1/models/rows").json()["model_version_status"]}
    assert [states[number]["state"] for number in "123"] == ["AVAILABLE", "AVAILABLE", "END"]
    assert states["3"]["status"]["error_message"] == "rows/3/program.bin: is damaged"
    assert (
        client.post("/v1/models/rows/versions/3:predict", json={"instances": [[1, 2, 3]]}).status_code == 404
    )
    refused = {"name": "rows", "version": "3", "state": "UNAVAILABLE"}
    reason = {"reason": "rows/3/program.bin: is damaged"}
    index = client.post("/v2/repository/index").json()
    assert len(index) == 5 and refused | reason in index
    assert client.get("/v2/health/ready").status_code == 200
    served.models.is_ending = True
    ready = client.get("/v2/health/ready")
    assert (ready.status_code, ready.headers["connection"]) == (400, "close")
    assert ready.json() == {"live": False, "ready": False, "error": "the server is loading, or ending"}
    model = client.get("/v2/models/rows/ready")
    assert model.status_code == 400 and model.json()["error"]


def test_metadata(client):
    assert client.get("/v2").json()["name"] == "hotloop"
    assert client.get("/v2/models/rows").json() == {
        "name": "rows",
        "versions": ["1", "2"],
        "platform": "hotloop_stablehlo",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    assert client.get("/v2/models/image/versions/1").json()["parameters"] == {
        "classes": ["cat", "dog"],
        "kind": "image",
    }
    assert client.get("/v2/models/rows/versions/1/ready").json() == {"name": "rows", "ready": True}
    assert len(client.post("/v2/repository/index").json()) == 4


REFUSED = [
    ("POST", "/v2/models/row/infer", 404, "there is no model 'row'; did you mean rows?"),
    ("POST", "/v2/models/rows/versions/9/infer", 404, "has no version 9; there: 1, 2"),
    ("GET", "/v2/models/rows/versions/0", 404, "versions are whole numbers from 1"),
    ("GET", "/v2/models/rows/versions/1e0", 404, "versions are whole numbers from 1"),
    ("GET", "/v2/models/..%2f..%2fetc%2fpasswd", 404, "nothing at this address"),
    ("GET", "/v2/models/%2e%2e", 404, "there is no model '..'"),
    ("GET", "/v2/models/%00", 404, "there is no model"),
    ("GET", "/v2/models/rows/ready/ready", 404, "nothing at this address"),
    ("GET", "/nothing", 404, "nothing at this address"),
    ("GET", "/v2/models/rows/infer", 405, "Method Not Allowed"),
    ("GET", "/v1/models/nobody", 404, "there is no model 'nobody'"),
    ("GET", "/v1/models/rows/labels/stable", 404, "has no labels"),
    ("POST", "/v1/models/rows:classify", 400, ":classify is not offered"),
    ("POST", "/v1/models/rows", 405, "POST is for :predict"),
    ("GET", "/v1/models/rows:predict", 405, "is for POST"),
]


@pytest.mark.parametrize(("method", "address", "status", "sentence"), REFUSED)
def test_addresses_that_lead_nowhere(client, method, address, status, sentence):
    answer = client.request(method, address, json=INFER if method == "POST" else None)
    assert answer.status_code == status
    assert sentence in answer.json()["error"]


def test_what_is_wrong_in_a_request_is_a_400_of_one_sentence(client):
    wrong = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1] * 8}]}
    answer = client.post("/v2/models/rows/infer", json=wrong)
    assert (answer.status_code, answer.json()) == (400, {"error": "x: shape [2, 4] does not fit [-1, 3]"})


def test_an_image_for_another_model_or_of_another_kind_or_broken(client):
    picture = encode(np.zeros((4, 4, 3), np.uint8))
    headers = {"content-type": "image/png"}
    assert client.post("/v2/models/rows/infer", content=picture, headers=headers).status_code == 415
    svg = {"content-type": "image/svg+xml"}
    assert client.post("/v2/models/image/infer", content=picture, headers=svg).status_code == 415
    cut = client.post("/v2/models/image/infer", content=picture[:40], headers=headers)
    assert cut.status_code == 400 and "image 0: not a whole image" in cut.json()["error"]
    zipped = client.post(
        "/v2/models/image/infer", content=picture, headers={**headers, "content-encoding": "gzip"}
    )
    assert zipped.status_code == 415


def test_an_image_that_claims_a_gigapixel_is_not_decoded(client):
    small = bytearray(encode(np.zeros((4, 4, 3), np.uint8)))
    small[16:24] = (60_000).to_bytes(4, "big") * 2
    small[29:33] = zlib.crc32(bytes(small[12:29])).to_bytes(4, "big")
    answer = client.post(
        "/v2/models/image/infer", content=bytes(small), headers={"content-type": "image/png"}
    )
    assert answer.status_code == 400 and "too large" in answer.json()["error"]


def test_an_image_of_too_many_pixels_or_of_another_format_is_not_decoded(client, monkeypatch):
    monkeypatch.setattr("hotloop.serve.images.load_rgb", lambda image: pytest.fail("decoded"))
    monkeypatch.setattr("hotloop.serve.images.MOST_PIXELS", 15)
    for form, sentence in (
        ("PNG", "may have 15 pixels"),
        ("BMP", "not a JPEG or PNG"),
        ("WEBP", "not a JPEG or PNG"),
    ):
        picture = encode(np.zeros((4, 4, 3), np.uint8), form)
        answer = client.post("/v2/models/image/infer", content=picture, headers={"content-type": "image/png"})
        assert answer.status_code == 400 and sentence in answer.json()["error"]


def test_an_image_is_never_decoded_by_the_event_loop(served, client, monkeypatch):
    from hotloop.serve import app

    threads = []

    def decode(*arguments):
        threads.append(threading.current_thread().name)
        return images.decode_rows(*arguments)

    monkeypatch.setattr(app, "decode_rows", decode)
    picture = encode(np.zeros((4, 4, 3), np.uint8))
    assert len(picture) < 1000
    client.post("/v2/models/image/infer", content=picture, headers={"content-type": "image/png"})
    b64 = {"instances": [{"b64": base64.b64encode(picture).decode()}]}
    assert client.post("/v1/models/image:predict", json=b64).status_code == 200
    assert len(threads) == 2 and all(name.startswith("hotloop-decode") for name in threads)


def test_long_bodies_do_not_wait_for_images(client, monkeypatch):
    from hotloop.serve import app

    is_over = threading.Event()

    def decode(arrays, encoded, *arguments):
        assert not encoded or is_over.wait(10)
        return images.decode_rows(arrays, encoded, *arguments)

    monkeypatch.setattr(app, "decode_rows", decode)
    picture, about = encode(np.zeros((4, 4, 3), np.uint8)), {"content-type": "image/png"}
    body = json.dumps(INFER).encode() + b" " * app.LARGE
    with ThreadPoolExecutor(app.usable_cores() + 1) as senders:
        send = lambda _: client.post("/v2/models/image/infer", content=picture, headers=about).status_code  # noqa: E731
        busy = [senders.submit(send, each) for each in range(app.usable_cores())]
        try:
            long = senders.submit(client.post, "/v2/models/rows/infer", content=body)
            assert long.result(timeout=5).status_code == 200 and not any(each.done() for each in busy)
        finally:
            is_over.set()
    assert [each.result() for each in busy] == [200] * app.usable_cores()


def test_small_images_that_become_more_than_a_body_may_have_are_refused():
    served = Served(max_bytes=50_000)
    picture = {"b64": base64.b64encode(encode(np.zeros((1, 1, 3), np.uint8))).decode()}
    with served.client as client:
        signature = Signature(LARGE_IMAGE, fake_models.IMAGE.outputs)
        artefact = replace(fake_models.make_artefact("large", signature=signature), kind="image")
        device = fake_models.load_fake(served.models, artefact)
        answer = client.post("/v1/models/large:predict", json={"instances": [picture] * 50})
    assert answer.status_code == 400 and device.rungs == []
    assert answer.json()["error"] == "50 images have 60,000 bytes decoded; the limit is 50,000"


def test_pixels_of_all_images_of_a_request_are_limited(client, monkeypatch):
    monkeypatch.setattr("hotloop.serve.images.MOST_TOGETHER", 40)
    picture = {"b64": base64.b64encode(encode(np.zeros((4, 4, 3), np.uint8))).decode()}
    send = lambda count: client.post("/v1/models/image:predict", json={"instances": [picture] * count})  # noqa: E731
    assert send(2).status_code == 200
    refused = send(3)
    assert refused.status_code == 400 and "image 2" in refused.json()["error"]


def test_an_answer_much_larger_than_any_body_is_refused_before_it_is_computed():
    served = Served(max_bytes=1000)
    signature = Signature((Tensor("user", "INT32", (-1,)),), (Tensor("y", "FP32", (-1, 100)),))
    with served.client as client:
        device = fake_models.load_fake(served.models, fake_models.make_artefact("users", signature=signature))
        body = np.zeros(21, np.int32).tobytes()
        answer = client.post("/v2/models/users/infer", content=body, headers={v2.HEADER: "0"})
    assert answer.status_code == 400 and device.rungs == []
    assert answer.json()["error"].startswith("the answer to 21 rows has 8,400 bytes, over the limit of 8,000")


def test_half_a_character_in_a_name_is_a_400(client):
    for body in (
        b'{"inputs": [{"name": "\\ud800\\n"}]}',
        b'{"inputs": [{"name": "x", "datatype": "\\udfff", "shape": [1, 3]}]}',
    ):
        answer = client.post("/v2/models/rows/infer", content=body)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]
    answer = client.post("/v1/models/rows:predict", content=b'{"inputs": 1, "signature_name": "\\ud800"}')
    assert answer.status_code == 400
    assert client.post("/v1/models/rows:a%01b").json()["error"] == r":a\x01b is not offered; use :predict"


def test_an_image_is_answered_in_bytes_where_json_has_no_such_type(client, served):
    outputs = (Tensor("half", "BF16", (-1, 2)),)
    artefact = fake_models.make_artefact("half", signature=Signature(fake_models.IMAGE.inputs, outputs))
    request = v2.InferRequest({})
    (text, data), headers = v2.write_answer(
        request, "half", 1, artefact.signature, {"half": np.ones((1, 2), outputs[0].dtype)}
    )
    assert len(data) == 4 and headers[v2.HEADER] == str(len(text))


def test_a_row_that_is_not_finite_is_refused(client):
    pieces, headers = v2.write_request(
        {"x": np.array([[1, 2, 3], [1, np.nan, 3]], np.float32)}, fake_models.ROWS
    )
    answer = client.post("/v2/models/rows/infer", content=b"".join(pieces), headers=headers)
    assert (answer.status_code, answer.json()) == (400, {"error": "x: row 1 is not finite"})
    pieces, headers = v2.write_request({"x": np.full((1, 3), 3e38, np.float32)}, fake_models.ROWS)
    answer = client.post("/v2/models/rows/infer", content=b"".join(pieces), headers=headers)
    assert (answer.status_code, answer.json()) == (400, {"error": "y: row 0 is not finite"})


def test_a_device_call_that_raises_is_a_500_and_the_next_one_works(served, client):
    served.devices["rows2"].error = RuntimeError("RESOURCE_EXHAUSTED: out of memory\nstack")
    failed = client.post("/v2/models/rows/infer", json=INFER)
    assert (failed.status_code, failed.json()["error"].count("\n")) == (500, 0)
    assert "out of memory" in failed.json()["error"]
    assert client.post("/v2/models/rows/infer", json=INFER).status_code == 200


def test_a_body_over_the_limit_is_refused_by_its_length_and_by_its_bytes():
    served = Served(max_bytes=1000)

    def chunks():  # without a length
        for _ in range(11):
            yield b"x" * 100

    with served.client as client:
        told = client.post("/v2/models/rows/infer", content=b"x" * 1001)
        assert (told.status_code, told.headers["connection"]) == (413, "close")
        assert told.json() == {"error": "the body is over the limit of 1,000 bytes"}
        chunked = client.post("/v2/models/rows/infer", content=chunks())
        assert (chunked.status_code, chunked.headers["connection"]) == (413, "close")
        assert client.post("/v2/models/rows/infer", json=INFER).status_code == 200


def test_a_full_queue_is_a_429_with_the_time_to_come_back():
    served = Served(max_bytes=1000)
    device = fake_models.load_fake(served.models, fake_models.make_artefact("slow", ladder=(1,)), queue=1)
    with served.client as client, ThreadPoolExecutor(3) as threads:
        device.busy = client.portal.call(anyio.Event)
        send = lambda: client.post("/v2/models/slow/infer", json=INFER)  # noqa: E731
        running = threads.submit(send)
        batcher = served.models.find("slow").batcher
        while not device.rungs:
            pass
        waiting = threads.submit(send)
        while not batcher.waiting:
            pass
        refused = send()
        unread = client.post("/v2/models/slow/infer", content=b"x" * 1001)
        client.portal.call(device.busy.set)
        assert [running.result().status_code, waiting.result().status_code] == [200, 200]
    assert unread.status_code == 429  # not 413: nobody sends a body for nothing
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1


def test_the_page_is_made_of_its_own_files_and_no_other_is_given(client):
    for name, kind in (("", "text/html"), ("page/page.css", "text/css"), ("page/main.js", "text/javascript")):
        answer = client.get(f"/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        assert "unsafe" not in answer.headers["content-security-policy"]
    for name in ("app.py", "%2e%2e%2fapp.py", "__init__.py", "page"):
        assert client.get(f"/page/{name}").status_code == 404
    assert client.get("/page/titles.json").json() == {}


def test_without_the_token_all_but_health_is_a_401():
    served = Served(token=b"secret")
    with served.client as client:
        assert client.get("/v2/health/live").status_code == client.get("/v2/health/ready").status_code == 200
        for address in (
            "/",
            "/page/main.js",
            "/page/titles.json",
            "/v2",
            "/metrics",
            "/v2/models/rows",
            "/v1/models/rows",
            "/openapi.json",
            "/nothing",
        ):
            refused = client.get(address)
            assert refused.status_code == 401 and "token" in refused.json()["error"]
            assert "Bearer" in refused.headers["www-authenticate"]
        assert client.get("/v2", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/v2", headers={"authorization": "Bearer secre"}).status_code == 401
        assert client.get("/v2", headers={"authorization": "secret"}).status_code == 401
        assert client.get("/v2", auth=("anybody", "secret")).status_code == 200
        assert client.get("/v2", auth=("secret", "")).status_code == 401
        text = client.get("/metrics", auth=("anybody", "secret")).text
    assert 'hotloop_requests_total{model="",status="401",version=""} 12.0' in text
    assert not any("secret" in line for line in served.lines)


def test_each_request_is_a_line_of_json(served, client):
    client.post("/v2/models/rows/versions/1/infer", json=INFER)
    client.get("/v2/models/nobody")
    first, second = map(json.loads, served.lines)
    assert (first["model"], first["version"], first["status"], first["method"]) == ("rows", 1, 200, "POST")
    assert (second["model"], second["version"], second["status"]) == (None, None, 404)
    assert second["path"] == "/v2/models/nobody" and first["seconds"] > 0


def test_figures_for_prometheus_and_for_stats(client):
    for _ in range(3):
        client.post(
            "/v2/models/rows/versions/1/infer", json={"inputs": [{**INFER["inputs"][0], "shape": [1, 6]}]}
        )
    rows = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 3], "data": [0] * 9}]}
    client.post("/v2/models/rows/versions/1/infer", json=rows)
    client.post("/v2/models/" + "x" * 50 + "/infer", json=rows)
    client.get("/v2/models/rows/versions/1")  # no inference
    text = client.get("/metrics").text
    own = '{model="rows",version="1"}'
    for line in (
        'hotloop_requests_total{model="rows",status="400",version="1"} 3.0',
        'hotloop_requests_total{model="rows",status="200",version="1"} 1.0',
        'hotloop_requests_total{model="",status="404",version=""} 1.0',
        f"nv_inference_request_success{own} 1.0",
        f"nv_inference_count{own} 3.0",
        f"nv_inference_exec_count{own} 1.0",
        f"hotloop_padded_rows{own} 1.0",
        f"nv_inference_compute_infer_duration_us{own} 1000.0",
        f"nv_inference_request_failure{own} 3.0",
        f"hotloop_compilations_after_ready{own} 0.0",
        f"nv_inference_pending_request_count{own} 0.0",
        'hotloop_batch_rows_bucket{le="4.0",model="rows",version="1"} 1.0',
        f"hotloop_decode_seconds_count{own} 1.0",
    ):
        assert line in text, line
    assert "xxx" not in text
    (stats,) = client.get("/v2/models/rows/versions/1/stats").json()["model_stats"]
    assert (stats["inference_count"], stats["execution_count"], stats["padded_rows"]) == (3, 1, 1)
    assert (
        stats["inference_stats"]["success"]["count"] == 1 and stats["inference_stats"]["fail"]["count"] == 3
    )
    nothing = {"count": 1, "ns": 0}
    assert stats["batch_stats"] == [
        {
            "batch_size": 4,
            "compute_input": nothing,
            "compute_infer": {"count": 1, "ns": 1_000_000},
            "compute_output": nothing,
        }
    ]
    assert len(client.get("/v2/models/stats").json()["model_stats"]) >= 1


def test_the_api_describes_every_route(served, client):
    described = client.get("/openapi.json").json()["paths"]
    app = Application(served.models, served.models.figures, Limits())
    routes = {(route.path, method.lower()) for route in app._routes() for method in route.methods - {"HEAD"}}
    plain = {(path, method) for path, method in routes if not path.startswith("/v1")}
    assert plain == {(p, m) for p, each in described.items() for m in each if not p.startswith("/v1")}
    assert {p for p in described if p.startswith("/v1")} >= {"/v1/models/{name}:predict", "/v1/models/{name}"}


def ask_raw(app, messages):
    """What an application sends to a client that sends these messages, and the last one again and again."""
    sent = []

    async def main():
        left = list(messages)

        async def receive():
            message = left.pop(0) if len(left) > 1 else left[0]
            await asyncio.sleep(message.get("after", 0))
            return message

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v2/models/rows/infer", "raw_path": b"", "headers": [],
            "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("y", 2),
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(main())
    return sent


def test_who_has_gone_takes_no_row_of_a_batch(monkeypatch):
    served = Served()
    device = served.devices["rows2"]
    app = Application(served.models, served.models.figures, Limits()).build(served.lines.append)
    monkeypatch.setattr("hotloop.serve.app.PATIENCE", 0.01)
    batcher = served.models.find("rows").batcher

    async def never():
        await asyncio.sleep(30)

    device.busy = type("Busy", (), {"wait": staticmethod(never)})()
    body = json.dumps(INFER).encode()
    gone = {"type": "http.disconnect", "after": 0.02}
    ask_raw(app, [{"type": "http.request", "body": body, "more_body": False}, gone])
    assert json.loads(served.lines[-1])["status"] == 499
    assert (batcher.held, batcher.waiting) == (0, 0)


def test_a_body_that_does_not_come_is_a_408(monkeypatch):
    served = Served()
    app = Application(served.models, served.models.figures, Limits()).build()
    monkeypatch.setattr("hotloop.serve.gate.BODY_SECONDS", 0.02)
    sent = ask_raw(
        app, [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "none", "after": 30}]
    )
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]


def test_a_client_that_leaves_while_it_sends_is_no_defect():
    served = Served()
    app = Application(served.models, served.models.figures, Limits()).build(served.lines.append)
    ask_raw(app, [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    assert json.loads(served.lines[-1])["status"] == 499


def test_many_large_bodies_at_once_are_too_many():
    bodies = BodyBytes(100)
    with bodies.lend() as first, bodies.lend() as second:
        first(60)
        second(30)
        with pytest.raises(QueueFull, match="more than 100 bytes of requests are under way"):
            second(11)
        first(10)
    assert bodies.held == 0


def test_bytes_are_given_back_whatever_becomes_of_a_request(served):
    app = Application(served.models, served.models.figures, Limits(max_bytes=1000))
    with TestClient(app.build(), raise_server_exceptions=False) as client:
        for body, status in ((json.dumps(INFER), 200), ("{", 400), ("x" * 1001, 413)):
            assert client.post("/v2/models/rows/infer", content=body).status_code == status
            assert app.bodies.held == 0

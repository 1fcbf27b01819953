"""TensorFlow Serving's REST API as functions, and by the application."""

import base64
import io
import json

import fake_models
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from hotloop.serve import tf_rest
from hotloop.serve.app import Application, Limits
from hotloop.serve.refusal import BadRequest, NotFound
from hotloop.serve.tensors import check_rows

X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


@pytest.fixture
def client():
    models, _ = fake_models.make_models()
    with TestClient(Application(models, models.figures, Limits()).build()) as found:
        yield found


def predict(client, document, name="rows/versions/1"):
    return client.post(f"/v1/models/{name}:predict", content=json.dumps(document))


@pytest.mark.parametrize("rows", [X.tolist(), [{"x": row} for row in X.tolist()]], ids=["unnamed", "named"])
def test_rows_are_answered_by_predictions(client, rows):
    answer = predict(client, {"instances": rows})
    assert (answer.status_code, answer.json()) == (200, {"predictions": (2 * X).tolist()})


@pytest.mark.parametrize("inputs", [X.tolist(), {"x": X.tolist()}], ids=["unnamed", "named"])
def test_columns_are_answered_by_outputs(client, inputs):
    answer = predict(client, {"signature_name": "serving_default", "inputs": inputs})
    assert (answer.status_code, answer.json()) == (200, {"outputs": (2 * X).tolist()})


def test_several_inputs_in_both_forms(client):
    rows = [{"items": [1, 2], "ratings": [1, 1.0]}, {"items": [3, 4], "ratings": [2, 3]}]
    assert predict(client, {"instances": rows}, "two").json() == {"predictions": [[2, 3], [5, 7]]}
    columns = {"items": [[1, 2], [3, 4]], "ratings": [[1, 1], [2, 3]]}
    assert predict(client, {"inputs": columns}, "two").json() == {"outputs": [[2, 3], [5, 7]]}


def test_several_outputs_are_named_and_images_may_be_base64(client):
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), 255, np.uint8)).save(out, "PNG")
    picture = {"b64": base64.b64encode(out.getvalue()).decode()}
    for rows in ([picture], [{"image": picture}]):
        answer = predict(client, {"instances": rows}, "image").json()
        assert answer == {"predictions": [{"probabilities": [1.0, 0.0], "classes": [0]}]}
    for inputs in (picture, {"image": [picture]}):
        answer = predict(client, {"inputs": inputs}, "image").json()
        assert answer == {"outputs": {"probabilities": [[1.0, 0.0]], "classes": [[0]]}}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({}, "either instances or inputs"),
        ({"instances": [], "inputs": []}, "either instances or inputs"),
        ({"instances": []}, "at least one row"),
        ({"instances": [[1, 2]]}, "does not fit"),
        ({"instances": [[1, 2, 3], [1]]}, "unequal lengths"),
        ({"instances": [[1, 2, None]]}, "must be FP32 numbers"),
        ({"instances": [[1, 2, float("nan")]]}, "row 0 is not finite"),
        ({"instances": [{"y": [1, 2, 3]}]}, "row 0 must be an object with x"),
        ({"instances": [{"x": [1, 2, 3]}, [1, 2, 3]]}, "row 1 must be an object with x"),
        ({"inputs": {"y": [[1, 2, 3]]}}, "there is no input 'y'"),
        ({"inputs": {}}, "the input x is missing"),
        ({"inputs": "text"}, "data must be a list, not a string"),
        ({"instances": [[1, 2, 3]], "signature_name": "other"}, "one signature, serving_default"),
        ({"instances": [{"b64": "AAAA"}]}, "must be FP32 numbers"),
    ],
)
def test_what_is_wrong_is_a_400_of_one_sentence(client, document, sentence):
    answer = predict(client, document)
    assert answer.status_code == 400 and set(answer.json()) == {"error"}
    assert sentence in answer.json()["error"]


def test_an_input_missing_in_a_row_is_named():
    rows = [{"items": [1, 2], "ratings": [1, 1]}, {"items": [3, 4]}]
    with pytest.raises(BadRequest, match="row 1 must be an object with items, ratings"):
        tf_rest.read_predict(json.dumps({"instances": rows}).encode(), fake_models.TWO)


def test_base64_that_is_none(client):
    answer = predict(client, {"instances": [{"b64": "%%%"}]}, "image")
    assert (answer.status_code, answer.json()) == (400, {"error": "image: b64 must be a string in base64"})


def test_status_and_metadata(client):
    ok = {"error_code": "OK", "error_message": ""}
    assert client.get("/v1/models/rows").json() == {
        "model_version_status": [
            {"version": "2", "state": "AVAILABLE", "status": ok},
            {"version": "1", "state": "AVAILABLE", "status": ok},
        ]
    }
    assert len(client.get("/v1/models/rows/versions/1").json()["model_version_status"]) == 1
    about = client.get("/v1/models/rows/versions/1/metadata").json()
    assert about["model_spec"] == {"name": "rows", "signature_name": "", "version": "1"}
    signature = about["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert [each["size"] for each in signature["inputs"]["x"]["tensor_shape"]["dim"]] == ["-1", "3"]
    assert signature["method_name"] == "tensorflow/serving/predict"


def test_paths_are_taken_apart():
    assert tf_rest.read_path("m") == tf_rest.Path("m")
    assert tf_rest.read_path("m:predict") == tf_rest.Path("m", verb="predict")
    assert tf_rest.read_path("m/versions/3:predict") == tf_rest.Path("m", "3", "predict")
    assert tf_rest.read_path("m/metadata") == tf_rest.Path("m", metadata=True)
    assert tf_rest.read_path("m/versions/3/metadata") == tf_rest.Path("m", "3", metadata=True)
    for odd in ("", "m/", "m/versions", "m/version/3", "m/versions/3/metadata/x", "../m", "m/labels/stable"):
        with pytest.raises(NotFound):
            tf_rest.read_path(odd)


@pytest.mark.parametrize("signature", [fake_models.ROWS, fake_models.TWO])
def test_what_our_client_writes_is_what_the_server_reads(signature):
    generator = np.random.default_rng(0)
    inputs = {
        each.name: generator.normal(size=(3, *each.row)).astype(each.dtype) for each in signature.inputs
    }
    request = tf_rest.read_predict(tf_rest.write_instances(inputs), signature)
    for name, rows in check_rows(signature, request.arrays).items():
        np.testing.assert_array_equal(rows, inputs[name])
    outputs = {
        each.name: generator.normal(size=(3, *each.row)).astype(each.dtype) for each in signature.outputs
    }
    found = tf_rest.read_predictions(tf_rest.write_predict(request, signature, outputs), signature)
    for name, rows in outputs.items():
        np.testing.assert_array_equal(found[name], rows)

"""The Open Inference Protocol as functions: what goes in comes out, and what lies is refused in one sentence."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine.exportable import DATATYPES, Signature, Tensor
from hotloop.serve import v2
from hotloop.serve.refusal import BadRequest
from hotloop.serve.tensors import check_rows

IMAGE = Signature((Tensor("image", "UINT8", (-1, 2, 3)),), (Tensor("p", "FP32", (-1, 4)),))
TWO = Signature(
    (Tensor("items", "INT32", (-1, 2)), Tensor("ratings", "FP32", (-1, 2))),
    (Tensor("items", "INT32", (-1, 1)), Tensor("half", "FP16", (-1, 1))),
)
PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


def body(document, *binary):
    text = json.dumps(document).encode()
    return text + b"".join(binary), str(len(text))


def image(**changes):
    return {"name": "image", "datatype": "UINT8", "shape": [2, 2, 3], **changes}


def binary_image(size, **changes):
    return {"inputs": [image(parameters={"binary_data_size": size}, **changes)]}


@pytest.mark.parametrize("data", [PIXELS.tolist(), PIXELS.ravel().tolist()], ids=["nested", "flat"])
def test_json_data_may_be_nested_or_flat(data):
    request = v2.read_request(body({"inputs": [image(data=data)], "id": "a"})[0], None, IMAGE)
    np.testing.assert_array_equal(request.arrays["image"], PIXELS)
    assert request.arrays["image"].dtype == np.uint8
    assert (request.id, request.outputs) == ("a", (("p", False),))


def test_json_and_binary_inputs_mix_in_any_order():
    items, ratings = np.array([[1, 2], [3, -1]], np.int32), np.array([[1, 2], [0.5, 0]], np.float32)
    document = {
        "inputs": [
            {"name": "ratings", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}},
            {"name": "items", "datatype": "INT32", "shape": [2, 2], "data": items.tolist()},
        ],
        "outputs": [{"name": "half", "parameters": {"binary_data": True}}, {"name": "items"}],
    }
    request = v2.read_request(*body(document, ratings.tobytes()), TWO)
    rows = check_rows(TWO, request.arrays)
    assert list(rows) == ["items", "ratings"]
    np.testing.assert_array_equal(rows["items"], items)
    np.testing.assert_array_equal(rows["ratings"], ratings)
    assert request.outputs == (("half", True), ("items", False))


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_type_comes_back_as_it_went(datatype):
    tensor = Tensor("x", datatype, (-1, 3))
    signature = Signature((tensor,), (tensor,))
    values = {"x": np.array([[0, 1, 1], [1, 0, 1]]).astype(tensor.dtype)}
    pieces, headers = v2.write_request(values, signature)
    request = v2.read_request(b"".join(pieces), headers[v2.HEADER], signature)
    assert request.outputs == (("x", True),)
    np.testing.assert_array_equal(request.arrays["x"], values["x"])
    pieces, headers = v2.write_answer(request, "m", 1, signature, values)
    found = v2.read_answer(b"".join(pieces), headers[v2.HEADER], signature)
    np.testing.assert_array_equal(found["x"], values["x"])
    assert found["x"].dtype == tensor.dtype


def test_an_answer_in_json_and_one_in_bytes():
    outputs = {"items": np.array([[7]], np.int32), "half": np.array([[0.5]], np.float16)}
    request = v2.InferRequest({}, outputs=(("items", False), ("half", True)), id="q")
    (text, half), headers = v2.write_answer(request, "m", 3, TWO, outputs)
    assert json.loads(text) == {
        "model_name": "m",
        "model_version": "3",
        "id": "q",
        "outputs": [
            {"name": "items", "datatype": "INT32", "shape": [1, 1], "data": [7]},
            {"name": "half", "datatype": "FP16", "shape": [1, 1], "parameters": {"binary_data_size": 2}},
        ],
    }
    assert half == b"\x00\x38" and headers == {
        "Content-Type": "application/octet-stream",
        v2.HEADER: str(len(text)),
    }
    (text,), headers = v2.write_answer(v2.InferRequest({}), "m", 3, IMAGE, {"p": np.ones((1, 4), np.float32)})
    assert headers == {"Content-Type": "application/json"} and b'"data":[1.0,1.0,1.0,1.0]' in text


def test_a_header_of_zero_is_one_raw_input():
    request = v2.read_request(PIXELS.tobytes(), "0", IMAGE)
    np.testing.assert_array_equal(request.arrays["image"], PIXELS)
    assert request.outputs == (("p", True),)


def test_encoded_images_are_elements_of_a_bytes_tensor():
    data = b"".join(struct.pack("<I", len(each)) + each for each in (b"one", b"", b"three"))
    document = binary_image(len(data), datatype="BYTES", shape=[3, 1])
    request = v2.read_request(*body(document, data), IMAGE, takes_images=True)
    assert request.encoded == {"image": (b"one", b"", b"three")} and not request.arrays
    with pytest.raises(BadRequest, match="datatype must be UINT8, not BYTES"):
        v2.read_request(*body(document, data), IMAGE)


LIES = [
    (b"", None, "the body is empty"),
    (b"{", None, "no JSON"),
    (b"\xff\xfe\xff", None, "no JSON"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b'{"inputs": ' + b"9" * 5000 + b"}", None, "no JSON"),
    (b'{"a": NaN}', None, "NaN is no JSON"),
    (b"[]", None, "must be a JSON object, not a list"),
    (b"{}", None, "inputs must be a list"),
    (b"{}", "3", "Inference-Header-Content-Length: 3, and the body has 2 bytes"),
    (b"{}", "-1", "must be a whole number"),
    (b"{}", "1_0", "must be a whole number"),
    (b"{}", "9" * 400, "must be a whole number"),
    (b"12345", "0", "are not whole rows of 6"),
    (b"", "0", "are not whole rows of 6"),
    ({"inputs": []}, None, "inputs must be a list"),
    ({"inputs": [{}] * 900}, None, "900 inputs, and the model has 1"),
    ({"inputs": [{}] * 1_000_000}, None, "1,000,001 objects in the JSON"),
    ({"inputs": [3]}, None, "a list of objects"),
    ({"inputs": [{}]}, None, "an input needs a name"),
    ({"inputs": [image(name="imaeg")]}, None, "did you mean image"),
    ({"inputs": [image(name=["image"])]}, None, "an input needs a name"),
    ({"inputs": [image(datatype="FP32")]}, None, "datatype must be UINT8, not FP32"),
    ({"inputs": [image(datatype=["UINT8"])]}, None, "datatype must be UINT8"),
    ({"inputs": [image(shape=[2, 2])]}, None, "does not fit"),
    ({"inputs": [image(shape=[-2, 2, 3])]}, None, "at least one row"),
    ({"inputs": [image(shape=[0, 2, 3])]}, None, "at least one row"),
    ({"inputs": [image(shape=[10**30, 2, 3])]}, None, "at least one row"),
    ({"inputs": [image(shape=[2.0, 2, 3])]}, None, "whole numbers"),
    ({"inputs": [image(shape=[True, 2, 3])]}, None, "whole numbers"),
    ({"inputs": [image(shape="2,2,3")]}, None, "whole numbers"),
    ({"inputs": [image(shape=[2**31 - 1, 2, 3], data=[1])]}, None, "and shape says"),
    ({"inputs": [image()]}, None, "data must be a list, not null"),
    ({"inputs": [image(data=[[1, 2], [3]])]}, None, "unequal lengths"),
    ({"inputs": [image(data=[256] * 12)]}, None, "UINT8 goes from 0 to 255"),
    ({"inputs": [image(data=[-1] * 12)]}, None, "UINT8 goes from 0 to 255"),
    ({"inputs": [image(data=[10**40] * 12)]}, None, "UINT8 goes from 0 to 255"),
    ({"inputs": [image(data=[1, True] * 6)]}, None, "must be UINT8 numbers"),
    ({"inputs": [image(data=["a" * 100_000] + [""] * 100_000)]}, None, "must be UINT8 numbers"),
    ({"inputs": [image(data=[{}] * 12)]}, None, "must be UINT8 numbers"),
    ({"inputs": [image(shape=[1] * 1_000_000)]}, None, "does not fit"),
    ({"inputs": [image(data=[1.5] * 12)]}, None, "must be UINT8 numbers"),
    ({"inputs": [image(data=["a"] * 12)]}, None, "must be UINT8 numbers"),
    ({"inputs": [image(data=[None] * 12)]}, None, "must be UINT8 numbers"),
    ({"inputs": [image(data=[True] * 12)]}, None, "must be UINT8 numbers"),
    ({"inputs": [image(data=[])]}, None, "no numbers"),
    ({"inputs": [image(data=PIXELS.reshape(3, 2, 2).tolist())]}, None, "data of shape [3, 2, 2]"),
    ({"inputs": [image(data=PIXELS.tolist(), parameters=[])]}, None, "parameters must be an object"),
    ({"inputs": [image(data=PIXELS.tolist(), parameters={"binary_data_size": 0})]}, None, "has both data and"),
    ({"inputs": [image(data=PIXELS.tolist())], "outputs": [{"name": "q"}]}, None, "there is no output 'q'"),
    ({"inputs": [image(data=PIXELS.tolist())], "id": 3}, None, "id must be a string"),
    (
        {"inputs": [image(data=PIXELS.tolist())], "parameters": {"binary_data_output": "yes"}},
        None,
        "binary_data_output must be true or false",
    ),
    (
        {
            "inputs": [image(data=PIXELS.tolist())],
            "outputs": [{"name": "p", "parameters": {"classification": 3}}],
        },
        None,
        "classification is not offered",
    ),
    (binary_image(12), None, "binary_data_size 12, and 0 bytes are left"),
    (binary_image(-1), None, "binary_data_size must be a whole number from 0"),
    (binary_image(10**40), None, "and 0 bytes are left"),
    (binary_image(True), None, "binary_data_size must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "header", "sentence"), LIES, ids=lambda value: str(value)[-40:])
def test_what_lies_is_refused(document, header, sentence):
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(BadRequest) as refused:
        v2.read_request(raw, header, IMAGE)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("size", "sentence"), [(11, "11 bytes, and shape"), (13, "13 bytes, and shape")])
def test_bytes_that_do_not_fit_the_shape_are_refused(size, sentence):
    with pytest.raises(BadRequest, match=sentence):
        v2.read_request(*body(binary_image(size), bytes(size)), IMAGE)


def test_bytes_of_nobody_are_refused():
    with pytest.raises(BadRequest, match="1 bytes after the JSON belong to no input"):
        v2.read_request(*body(binary_image(12), bytes(13)), IMAGE)


def test_numbers_of_64_bits_stay_whole():
    signature = Signature((Tensor("x", "UINT64", (-1,)),), IMAGE.outputs)
    document = {"inputs": [{"name": "x", "datatype": "UINT64", "shape": [2], "data": [2**64 - 1, 1]}]}
    found = v2.read_request(body(document)[0], None, signature).arrays["x"]
    assert found.tolist() == [2**64 - 1, 1] and found.dtype == np.uint64


def test_a_whole_number_that_no_float_can_be():
    signature = Signature((Tensor("x", "FP32", (-1,)),), IMAGE.outputs)
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [10**400]}]}
    with pytest.raises(BadRequest, match="x: a number is too large for FP32"):
        v2.read_request(body(document)[0], None, signature)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_a_request_in_json_has_bytes_only_where_json_has_no_such_type(datatype):
    tensor = Tensor("x", datatype, (-1, 2))
    signature = Signature((tensor,), (tensor, Tensor("p", "FP32", (-1, 4))))
    values = {"x": np.array([[0, 1]]).astype(tensor.dtype), "p": np.ones((1, 4), np.float32)}
    pieces, headers = v2.write_request(values, signature, binary=False)
    request = v2.read_request(b"".join(pieces), headers.get(v2.HEADER), signature)
    is_binary = datatype in ("FP16", "BF16")
    assert dict(request.outputs) == {"x": is_binary, "p": False} and len(pieces) == 1 + is_binary
    pieces, headers = v2.write_answer(request, "m", 1, signature, values)
    found = v2.read_answer(b"".join(pieces), headers.get(v2.HEADER), signature)
    np.testing.assert_array_equal(found["x"], values["x"])


def test_an_answer_without_one_of_the_outputs_is_none():
    request = v2.InferRequest({}, outputs=(("items", True),))
    pieces, headers = v2.write_answer(request, "m", 1, TWO, {"items": np.ones((1, 1), np.int32)})
    with pytest.raises(BadRequest, match="the output half is missing"):
        v2.read_answer(b"".join(pieces), headers[v2.HEADER], TWO)


def test_half_precision_goes_as_bytes_only():
    document = {"inputs": [{"name": "items", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}]}
    with pytest.raises(BadRequest, match="half: FP16 goes as binary data only"):
        v2.read_request(body(document)[0], None, TWO)


def test_inputs_must_all_be_there_with_the_same_rows_and_finite():
    items, ratings = np.zeros((2, 2), np.int32), np.zeros((3, 2), np.float32)
    with pytest.raises(BadRequest, match="the input ratings is missing"):
        check_rows(TWO, {"items": items})
    with pytest.raises(BadRequest, match="items has 2 rows and ratings 3"):
        check_rows(TWO, {"items": items, "ratings": ratings})
    ratings = ratings[:2].copy()
    ratings[1, 0] = np.nan
    with pytest.raises(BadRequest, match="ratings: row 1 is not finite"):
        check_rows(TWO, {"items": items, "ratings": ratings})


def test_a_number_too_large_for_its_type_is_not_finite():
    signature = Signature((Tensor("x", "FP32", (-1,)),), IMAGE.outputs)
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 1e300]}]}
    with pytest.raises(BadRequest, match="x: row 1 is not finite"):
        check_rows(signature, v2.read_request(body(document)[0], None, signature).arrays)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.just("image"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "inputs",
                    "name",
                    "datatype",
                    "shape",
                    "data",
                    "parameters",
                    "binary_data_size",
                    "outputs",
                    "x",
                ]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(
    values,
    st.binary(max_size=40),
    st.none() | st.integers(-5, 100).map(str) | st.text(max_size=4),
    st.booleans(),
)
def test_no_body_leads_to_anything_but_a_request_or_one_sentence(document, binary, header, is_input):
    if is_input:
        document = {
            "inputs": [document if isinstance(document, dict) else {"name": "image", "shape": document}]
        }
    raw = json.dumps(document).encode() + binary
    for signature in (IMAGE, TWO):
        try:
            request = v2.read_request(raw, header, signature, takes_images=True)
            check_rows(signature, request.arrays)
        except BadRequest as refused:
            assert "\n" not in str(refused) and len(str(refused)) <= 1300


@given(st.binary(max_size=30))
def test_elements_of_bytes_never_lead_past_the_end(data):
    try:
        elements = v2.split_elements("x", memoryview(data))
    except BadRequest:
        return
    assert b"".join(struct.pack("<I", len(each)) + each for each in elements) == data

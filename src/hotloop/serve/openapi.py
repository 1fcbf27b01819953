"""The server's addresses as an OpenAPI document: for people's tools, and for those that try to break it."""

from typing import Any

from hotloop.engine.exportable import DATATYPES
from hotloop.serve.models import Models
from hotloop.serve.v2 import HEADER
from hotloop.version import VERSION

OBJECT: dict[str, Any] = {"type": "object"}
TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
ERRORS = {
    "400": "What is wrong in the request, in one sentence.",
    "401": "No token, or a wrong one.",
    "404": "No such model or version.",
    "405": "Not with this method.",
    "408": "The body has not come in time.",
    "413": "The body is over the limit.",
    "415": "A content type that the model does not take.",
    "429": "Too many requests wait; Retry-After says when to come back.",
    "431": "The address and headers are over the limit.",
    "500": "The device call failed.",
    "503": "The model is loading, or the server is ending.",
}
TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"enum": [*DATATYPES, "BYTES"]},
        "parameters": OBJECT,
        "data": {"type": "array", "items": {}},
    },
}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _record(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has all of these, and may have more."""
    return {"type": "object", "required": list(properties), "properties": properties}


ABOUT = _list(_record(name=TEXT, datatype=TEXT, shape=_list({"type": "integer"})))
"""Of a model's inputs, or its outputs."""
SCHEMAS = {
    "Error": _record(error=TEXT),
    "Server": _record(name=TEXT, version=TEXT, extensions=_list(TEXT)),
    "Live": _record(live=FLAG),
    "Ready": _record(ready=FLAG),
    "Stats": _record(
        model_stats=_list(_record(name=TEXT, version=TEXT, inference_count={"type": "integer"}))
    ),
    "Index": _list(_record(name=TEXT, version=TEXT, state=TEXT)),
    "Model": _record(name=TEXT, versions=_list(TEXT), platform=TEXT, inputs=ABOUT, outputs=ABOUT),
    "Answer": _record(model_name=TEXT, model_version=TEXT, outputs=_list(TENSOR)),
    "Status": _record(model_version_status=_list(_record(version=TEXT, state=TEXT, status=OBJECT))),
    "Metadata": _record(model_spec=OBJECT, metadata=OBJECT),
    "Predictions": {"oneOf": [_record(predictions=_list({})), _record(outputs={})]},
    "Infer": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": OBJECT,
            "inputs": {"type": "array", "items": TENSOR},
            "outputs": {"type": "array", "items": OBJECT},
        },
    },
    "Predict": {
        "type": "object",
        "properties": {
            "signature_name": {"type": "string"},
            "instances": {"type": "array", "items": {}},
            "inputs": {},
        },
    },
}


def describe_api(models: Models) -> dict[str, Any]:
    """The document; the names of models that are loaded are its examples."""
    names = models.names()
    name = _parameter("name", names[0] if names else "model")
    version = _parameter("version", str(models.versions(names[0])[-1]) if names else "1")
    binary = {"schema": {"type": "string", "format": "binary"}}
    infer_body = {"application/json": _reference("Infer"), "application/octet-stream": binary}
    infer_body |= {"image/jpeg": binary, "image/png": binary}
    header = {"name": HEADER, "in": "header", "schema": {"type": "integer", "minimum": 0}}
    header["description"] = "Bytes of the JSON, where tensors follow it; 0: the body is the one input."
    paths: dict[str, Any] = {
        "/": {"get": _operation("A page for people.", kind="text/html")},
        "/page/{file}": {
            "get": _operation(
                "A style or script of the page.", None, [_parameter("file", "page.css")], kind="text/css"
            )
        },
        "/page/titles.json": {"get": _operation("Titles of items by their ids, for the page.")},
        "/metrics": {"get": _operation("Figures in Prometheus's format.", kind="text/plain")},
        "/openapi.json": {"get": _operation("This document.")},
        "/v2": {"get": _operation("The server.", "Server")},
        "/v2/health/live": {"get": _operation("Whether it lives.", "Live")},
        "/v2/health/ready": {"get": _operation("Whether all models answer.", "Ready")},
        "/v2/models/stats": {"get": _operation("Figures of all models.", "Stats")},
        "/v2/repository/index": {"post": _operation("The models.", "Index")},
    }
    styles = paths["/page/{file}"]["get"]["responses"]["200"]["content"]
    styles["text/javascript"] = styles["text/css"]
    for prefix, own in (
        ("/v2/models/{name}", [name]),
        ("/v2/models/{name}/versions/{version}", [name, version]),
    ):
        paths |= {
            prefix: {"get": _operation("Inputs and outputs.", "Model", own)},
            f"{prefix}/ready": {"get": _operation("Whether it answers.", "Ready", own)},
            f"{prefix}/stats": {"get": _operation("Its figures.", "Stats", own)},
            f"{prefix}/infer": {
                "post": _operation("Outputs for rows of inputs.", "Answer", [*own, header], infer_body)
            },
        }
    for prefix, own in (
        ("/v1/models/{name}", [name]),
        ("/v1/models/{name}/versions/{version}", [name, version]),
    ):
        predict_body = {"application/json": _reference("Predict")}
        paths |= {
            prefix: {"get": _operation("State of its versions.", "Status", own)},
            f"{prefix}/metadata": {"get": _operation("Its signature.", "Metadata", own)},
            f"{prefix}:predict": {"post": _operation("Predictions.", "Predictions", own, predict_body)},
        }
    return {
        "openapi": "3.0.3",
        "info": {"title": "hotloop serve", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _reference(schema: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{schema}"}}


def _parameter(name: str, example: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": example}


def _operation(
    summary: str,
    answer: str | None = None,
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
    kind: str = "application/json",
) -> dict[str, Any]:
    """One method of one address; `answer` is the name of its schema, None: any shape. An error is always an Error."""
    schema = {"schema": {}} if answer is None else _reference(answer)
    answers: dict[str, Any] = {"200": {"description": summary, "content": {kind: schema}}}
    if body is not None and "application/octet-stream" in body:
        answers["200"]["content"]["application/octet-stream"] = body["application/octet-stream"]
    for status, text in ERRORS.items():
        answers[status] = {"description": text, "content": {"application/json": _reference("Error")}}
    found: dict[str, Any] = {"summary": summary, "responses": answers}
    if parameters:
        found["parameters"] = parameters
    if body is not None:
        found["requestBody"] = {"required": True, "content": body}
    return found

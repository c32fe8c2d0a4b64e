"""The description of the API, as an OpenAPI 3.1 document.

It is made of the endpoints and of the types of their answers, so it cannot lag behind them. The
tests compare real answers with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from daemon.http import api, java_paths  # noqa: F401  # they define endpoints
from daemon.http.endpoints import ENDPOINTS, Endpoint, Kind, Shared
from daemon.http.metrics import package_version
from daemon.http.records import ErrorRecord

REFERENCE = "#/components/schemas/{name}"
ABOUT = (
    "Reads the state of the recovery of a BookKeeper cluster, and gives orders. Answers are at "
    "most some seconds old. Keys that end in _ms are wall-clock milliseconds since 1970, keys that "
    "end in _s are seconds; null means unknown or not applicable."
)
ERRORS: Mapping[int, str] = {
    400: "The request is wrong",
    401: "The token or the certificate is missing, or the token is wrong",
    403: "Not allowed; the error says what to set",
    404: "Unknown path or bookie",
    409: "The state of the cluster forbids it",
    413: "The body is too large",
    500: "A defect, or damaged data in ZooKeeper; the log has more",
    503: "ZooKeeper does not answer, or too much is asked at a time",
}


@Endpoint("GET /api/v1/openapi.json", "This description", dict)
async def openapi(shared: Shared, request: web.Request) -> bytes:
    return document()


@cache
def document() -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(describe())


def describe() -> dict[str, Any]:
    types = [
        kind
        for each in ENDPOINTS
        for kind in (*each.answers.values(), each.body)
        if _is_record(kind)
    ]
    types = [*dict.fromkeys([*types, ErrorRecord])]
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "bookmender", "version": package_version(), "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "certificate": {"type": "mutualTLS"},
            },
        },
    }


def _is_record(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, msgspec.Struct)


def _operation(it: Endpoint, by_type: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": it.name,
        "summary": it.about,
        "tags": [it.kind.value],
        "responses": {
            **{
                str(code): {
                    "description": "Success" if code == 200 else "No success",
                    "content": _content(kind, by_type, it),
                }
                for code, kind in it.answers.items()
            },
            **_errors(it, by_type),
        },
    }
    if it.parameters:
        operation["parameters"] = it.parameters
    if it.body is not None:
        if is_record := _is_record(it.body):
            is_required = any(key.required for key in msgspec.structs.fields(it.body))
        else:
            is_required = bool(it.body.get("required"))
        schema = by_type[it.body] if is_record else it.body
        operation["requestBody"] = {
            "required": is_required,
            "content": {"application/json": {"schema": schema}},
        }
    if it.changes:
        operation["security"] = [{"token": []}, {"certificate": []}]
    elif it.is_limited:
        operation["security"] = [{}, {"token": []}, {"certificate": []}]
    return operation


def _content(kind: Any, by_type: Mapping[Any, Any], it: Endpoint) -> dict[str, Any]:
    if kind is str:
        text = {"schema": {"type": "string"}}
        if it.kind is Kind.METRICS:
            return {"text/plain": text, "application/openmetrics-text": text}
        return {"text/plain": text}
    if kind is dict:
        return {"application/json": {"schema": {"type": "object"}}}
    return {"application/json": {"schema": by_type[kind] if _is_record(kind) else kind}}


def _errors(it: Endpoint, by_type: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the errors that an endpoint may answer besides its own answers."""
    if not it.is_limited:
        codes = {403, 500}
    else:
        codes = set(ERRORS)
        if not it.changes:
            codes -= {409, 413}
    schema = {"application/json": {"schema": by_type[ErrorRecord]}}
    return {
        str(code): {"description": ERRORS[code], "content": schema}
        for code in sorted(codes - set(it.answers))
    }

"""The description of the API, as an OpenAPI 3.1 document.

It is made of ``endpoints`` and of the types in ``records``, so it cannot lag behind them. The tests
compare real answers with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from daemon.http.endpoints import ENDPOINTS, Endpoint, Kind
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


@cache
def document() -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(describe())


def describe() -> dict[str, Any]:
    types = [
        kind
        for endpoint in ENDPOINTS
        for kind in (*endpoint.answers.values(), endpoint.body)
        if _is_record(kind)
    ]
    types = [*dict.fromkeys([*types, ErrorRecord])]
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, by_type)
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


def _operation(endpoint: Endpoint, by_type: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.about,
        "tags": [endpoint.kind.value],
        "responses": {
            **{
                str(code): {
                    "description": "Success" if code == 200 else "No success",
                    "content": _content(kind, by_type, endpoint),
                }
                for code, kind in endpoint.answers.items()
            },
            **_errors(endpoint, by_type),
        },
    }
    if endpoint.parameters:
        operation["parameters"] = [
            {
                "name": each.name,
                "in": "path" if each.in_path else "query",
                "description": each.about,
                "required": each.is_required,
                "schema": each.schema,
            }
            for each in endpoint.parameters
        ]
    if endpoint.body is not None:
        schema = by_type[endpoint.body] if _is_record(endpoint.body) else endpoint.body
        operation["requestBody"] = {
            "required": endpoint.is_body_required,
            "content": {"application/json": {"schema": schema}},
        }
    if endpoint.changes:
        operation["security"] = [{"token": []}, {"certificate": []}]
    elif endpoint.kind in (Kind.API, Kind.JAVA):
        operation["security"] = [{}, {"token": []}, {"certificate": []}]
    return operation


def _content(kind: Any, by_type: Mapping[Any, Any], endpoint: Endpoint) -> dict[str, Any]:
    if kind is str:
        text = {"schema": {"type": "string"}}
        if endpoint.kind is Kind.METRICS:
            return {"text/plain": text, "application/openmetrics-text": text}
        return {"text/plain": text}
    if kind is dict:
        return {"application/json": {"schema": {"type": "object"}}}
    return {"application/json": {"schema": by_type[kind] if _is_record(kind) else kind}}


def _errors(endpoint: Endpoint, by_type: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the errors that an endpoint may answer besides its own answers."""
    if endpoint.kind in (Kind.METRICS, Kind.HEALTH):
        codes = {403, 500}
    else:
        codes = set(ERRORS)
        if not endpoint.changes:
            codes -= {409, 413}
    schema = {"application/json": {"schema": by_type[ErrorRecord]}}
    return {
        str(code): {"description": ERRORS[code], "content": schema}
        for code in sorted(codes - set(endpoint.answers))
    }

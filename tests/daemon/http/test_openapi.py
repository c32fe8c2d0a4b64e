"""The OpenAPI document is valid. ``make lint`` runs these tests."""

import json
from collections.abc import Iterator
from typing import Any

import schemathesis
from jsonschema import Draft202012Validator

from daemon.http.endpoints import ENDPOINTS
from daemon.http.openapi import document


def test_the_document_is_valid_openapi() -> None:
    schemathesis.openapi.from_dict(json.loads(document())).validate()


def test_every_schema_is_valid_and_every_reference_leads_to_one() -> None:
    described = json.loads(document())
    names = {part.split('"')[0] for part in document().decode().split("#/components/schemas/")[1:]}

    assert names <= set(described["components"]["schemas"])
    for schema in (*described["components"]["schemas"].values(), *schemas_in(described["paths"])):
        Draft202012Validator.check_schema(schema)


def schemas_in(value: Any) -> Iterator[Any]:
    """Yield the schemas of parameters, bodies and answers."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from [inner] if key == "schema" else schemas_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from schemas_in(inner)


def test_every_change_needs_the_token_and_no_read_does() -> None:
    for endpoint in ENDPOINTS:
        assert endpoint.changes is (endpoint.method != "GET")

"""Writes the tables of docs/http.md from the endpoints."""

import re
from collections.abc import Iterator, Mapping

import msgspec

from daemon.http import openapi as _  # noqa: F401  # with it, all endpoints are defined
from daemon.http.endpoints import ENDPOINTS, Endpoint, Kind

HEAD = "| request | answer or effect | takes |\n| --- | --- | --- |\n"
TABLE = re.compile(r"(<!-- (\w+) -->\n\n)(?:\|.*\n)+")
"""The table after a comment that says which endpoints it has."""


def with_tables(page: str) -> str:
    """Return the page with its tables as the code declares them."""
    return TABLE.sub(lambda found: found[1] + HEAD + "".join(map(_row, chosen(found[2]))), page)


def chosen(name: str) -> Iterator[Endpoint]:
    """Yield the endpoints of a table: ``reads``, ``changes`` or ``java``."""
    for each in ENDPOINTS:
        is_java = each.kind is Kind.JAVA
        if is_java if name == "java" else not is_java and each.changes is (name == "changes"):
            yield each


def _row(it: Endpoint) -> str:
    request = f"{it.method} {it.path.replace('{bookie}', 'ID')}"
    takes = [f"`{each['name']}`" for each in it.parameters if each["in"] == "query"]
    if isinstance(it.body, Mapping):
        takes += [f"`{key}` (JSON)" for key in it.body["properties"]]
    elif it.body is not None:
        takes += [f"`{key.name}` (JSON)" for key in msgspec.structs.fields(it.body)]
    return f"| `{request}` | {it.about} | {', '.join(takes)} |\n"

"""The base of all answers: what a command prints as JSON, and what the HTTP API sends.

The module of an operation defines the answers of its questions. Keys that end in ``_ms`` are
wall-clock milliseconds since 1970, keys that end in ``_s`` are seconds. ``null`` means unknown or
not applicable.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all answers: they have exactly these keys."""


def as_json(answer: Answer | Mapping[str, Any]) -> str:
    """Return the answer as the JSON that commands print: ASCII, indented by two spaces."""
    return json.dumps(msgspec.to_builtins(answer), indent=2)

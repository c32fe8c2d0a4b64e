"""Decodes JSON, MessagePack and plain values as typed objects, from any thread.

When msgspec meets a type for the first time, it gathers facts about it and runs Python code
meanwhile. Another thread that meets the type in that moment gets half of them, and the process
crashes (msgspec 0.22). So here only one thread at a time meets a new type. A decoder that a module
makes when it is imported is safe, too.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_meeting = threading.Lock()


@cache
def _meet(kind: Any) -> msgspec.json.Decoder[Any]:
    with _meeting:
        return msgspec.json.Decoder(kind)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Raises ValueError if the bytes are no JSON, or no object of this type."""
    return cast(T, _meet(cast(Hashable, kind)).decode(data))


def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """Raises ValueError as ``decode_json``."""
    _meet(cast(Hashable, kind))
    return msgspec.msgpack.decode(data, type=kind)


def convert(value: object, kind: Any, **options: Any) -> Any:
    """Return ``msgspec.convert`` of the value. Raises ValueError."""
    _meet(kind)
    return msgspec.convert(value, kind, **options)

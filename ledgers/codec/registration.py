"""Parses what bookies store in ZooKeeper about themselves. Bytes in, values out."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ledgers.codec.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from ledgers.codec.protobuf import decoded, parse_binary
from ledgers.errors import CorruptionError, UnavailableError
from ledgers.model import BookieId

_BOOKIE_ID = re.compile(r"[A-Za-z0-9:-_.\-]+")
HOST_CHARS_MAX = 255
"""Limit of host names in DNS (RFC 1035)."""
_HOST_AND_PORT = re.compile(r"(.+):([0-9]{1,5})")


@lru_cache(maxsize=65_536)
def parse_bookie_id(text: str) -> BookieId:
    """Return the text as a bookie id. Raises CorruptionError if it is not valid
    (BookieId.validate). Because of the cache, equal ids are one object: a million ledgers name few
    bookies."""
    if not _BOOKIE_ID.fullmatch(decoded(text)) or text.lower() == "readonly":
        raise CorruptionError("not a bookie id", text=text[:200])
    return BookieId(text)


class Address(NamedTuple):
    """The address of a bookie's protocol port. ``host``: an unresolved name, or an IP address."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``host:port`` as in a bookie ID, because error messages show addresses."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Resolve = Callable[[BookieId], Address]
"""Returns the address of a bookie. Raises UnavailableError if none is known to be its own."""


def parse_address(bookie_id: str) -> Address | None:
    """Return the address in a bookie id of the form ``host:port``; None for any other id."""
    match = _HOST_AND_PORT.fullmatch(bookie_id)
    if match is None or not 0 < int(match[2]) < 65_536:
        return None
    return Address(host=match[1].strip("[]"), port=int(match[2]))


def spelled_address(bookie: BookieId) -> Address:
    """Return the address in the bookie's id. Raises UnavailableError if there is none."""
    address = parse_address(bookie)
    if address is None:
        raise UnavailableError("no known address", bookie=bookie)
    return address


def registered_address(bookie_id: str, data: bytes) -> Address | None:
    """Return the address in a registration; None if it has none. Old bookies register without data,
    and their id is the address. Raises CorruptionError."""
    if not data:
        return parse_address(bookie_id)
    for endpoint in parse_binary(data, BookieServiceInfoFormat).endpoints:
        if endpoint.protocol == "bookie-rpc":
            return _address(decoded(endpoint.host), endpoint.port)
    return None


def _address(host: str, port: int) -> Address:
    if not 0 < len(host) <= HOST_CHARS_MAX or not host.isprintable() or not 0 < port < 65_536:
        raise CorruptionError(
            "a bookie registered an impossible address", host=host[:HOST_CHARS_MAX], port=port
        )
    return Address(host=host, port=port)

"""SASL mechanisms of a client, as functions of bytes: bookies and ZooKeeper use the same ones.

A ``Mechanism`` serves one connection: ``first`` returns the first token, and ``answer`` returns the
answer to each token of the peer. ``DigestMd5`` (RFC 2831) is what BookKeeper's SASL plugin and
ZooKeeper offer besides Kerberos. It proves to each side that the other side knows the password, and
protects nothing that is sent afterwards. ``Plain`` (RFC 4616) sends the password itself, for
plugins of operators; the settings allow it only inside TLS.

There is no library for this on purpose: the one that kazoo can use had no release since 2019.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ledgers.errors import UnauthorizedError
from ledgers.secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    user: str
    password: Secret[str]


class Mechanism(Protocol):
    """One exchange with one peer."""

    def first(self) -> bytes:
        """Return the first token, which may be empty."""

    def answer(self, token: bytes) -> bytes | None:
        """Return the answer to a token of the peer; None: the exchange is complete. Raises
        UnauthorizedError if the peer's token is not acceptable."""


class Plain:
    """Sends the user and the password."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def first(self) -> bytes:
        return f"\0{self._credentials.user}\0{self._credentials.password.reveal()}".encode()

    def answer(self, token: bytes) -> None:
        return None


class DigestMd5:
    """Proves that this side knows the password, and checks that the peer does. ``service``,
    ``server``: fixed names: ``zookeeper``, ``zk-sasl-md5``; at bookies ``bookkeeper`` twice."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        service: str,
        server: str,
        make_nonce: Callable[[], str] = lambda: secrets.token_urlsafe(24),
    ) -> None:
        self._credentials = credentials
        self._uri = f"{service}/{server}"
        self._make_nonce = make_nonce
        self._expected_proof: bytes | None = None
        """What only a peer that knows the password can send. None before our own answer."""

    def first(self) -> bytes:
        return b""

    def answer(self, token: bytes) -> bytes | None:
        fields = _fields(token)
        if self._expected_proof is None:
            return self._respond(fields)
        if not hmac.compare_digest(fields.get("rspauth", "").encode(), self._expected_proof):
            raise UnauthorizedError("the server does not prove that it knows the password")
        return None

    def _respond(self, challenge: dict[str, str]) -> bytes:
        nonce, realm = challenge.get("nonce", ""), challenge.get("realm", "")
        qualities = challenge.get("qop", "auth").split(",")
        is_known = challenge.get("algorithm") == "md5-sess"
        if not nonce or not is_known or "auth" not in map(str.strip, qualities):
            raise UnauthorizedError("the server offers no DIGEST-MD5 authentication")
        user, client_nonce = self._credentials.user, self._make_nonce()
        password = self._credentials.password.reveal()
        secret = _md5(b":".join(map(_encoded, (user, realm, password))))
        session = secret + f":{nonce}:{client_nonce}".encode()

        def digest(method: str) -> str:
            key, action = _md5(session).hex(), _md5(f"{method}:{self._uri}".encode()).hex()
            return _md5(f"{key}:{nonce}:00000001:{client_nonce}:auth:{action}".encode()).hex()

        self._expected_proof = digest("").encode()
        return ",".join(
            (
                "charset=utf-8",
                f"username={_quoted(user)}",
                f"realm={_quoted(realm)}",
                f"nonce={_quoted(nonce)}",
                "nc=00000001",
                f"cnonce={_quoted(client_nonce)}",
                f"digest-uri={_quoted(self._uri)}",
                f"response={digest('AUTHENTICATE')}",
                "qop=auth",
            )
        ).encode()


CHALLENGE_BYTES_MAX = 2_048
"""Limit of RFC 2831 for everything that a server sends."""
_FIELD = re.compile(
    r'[\s,]*+([\w-]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^,\s"]*+))\s*+(?=,|\Z)', re.DOTALL
)
"""One field, after its separators. Possessive quantifiers, so that the time is linear."""


def _fields(token: bytes) -> dict[str, str]:
    """Return the fields of a challenge. Of several realms the first is taken."""
    if len(token) > CHALLENGE_BYTES_MAX:
        raise UnauthorizedError(f"the server's challenge exceeds {CHALLENGE_BYTES_MAX:,} bytes")
    try:
        text = token.decode().rstrip(" \t\r\n,")
    except UnicodeDecodeError as error:
        raise UnauthorizedError("the server's challenge is no text") from error
    fields: dict[str, str] = {}
    position = 0
    while position < len(text):
        found = _FIELD.match(text, position)
        if found is None:
            raise UnauthorizedError("the server's challenge cannot be parsed")
        name, quoted, bare = found.groups(default="")
        value = re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL) if quoted else bare
        fields.setdefault(name.lower(), value)
        position = found.end()
    return fields


def _quoted(value: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _encoded(value: str) -> bytes:
    """Return what is hashed: ISO 8859-1 if that has all characters, else UTF-8 (RFC 2831)."""
    try:
        return value.encode("iso-8859-1")
    except UnicodeEncodeError:
        return value.encode()


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()  # the mechanism prescribes it

"""Decides who may read and who may change something.

Metrics and health are open to everybody who reaches the port. Reading the API is open to this host
(``is_from_this_host``), and needs the token otherwise (``http.open_reads``). Changing something
always needs the token. A client certificate (``http.client_ca_file``) counts as the token. But
browsers send it with requests that another web page makes, so a browser's request may not change
anything with it.

This host is who connects over loopback, whatever the address that the server listens on: so the
page can be read by ``ssh -L`` and ``kubectl port-forward``. The ``Host`` header must name this
host: else a web page in a browser on this host could read the API under the name of its own server
(DNS rebinding). A request that a proxy forwards is from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.http.tls import has_certificate
from daemon.settings import HttpSettings
from ledgers.errors import SettingsError
from ledgers.secret import Secret
from ledgers.tasks import in_daemon_thread

if TYPE_CHECKING:  # commands use ``read_token``, and need not load aiohttp
    from aiohttp import web

TOKEN_LENGTH_MIN = 16
TOKEN_BYTES_MAX = 4_096
SCHEME = "bearer "
HEADERS_OF_BROWSERS = ("Origin", "Sec-Fetch-Site")
"""Browsers send one of them with each request that changes something."""
PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})
"""Headers that proxies add, in lower case, beside X-Forwarded-For and its kin."""


class Refusal(Exception):
    """The request is refused. ``status``: 401 if a token is missing or wrong, else 403."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Access:
    """Checks requests by the settings."""

    def __init__(self, settings: HttpSettings, *, observes: bool) -> None:
        """``observes``: the node is in observe mode, and changes nothing."""
        self._settings = settings
        self._observes = observes
        self._token: Secret[str] | SettingsError | None = None
        """As it was read last, or why it is unusable."""
        self._reading: asyncio.Future[None] | None = None

    async def refresh(self, authorization: str) -> None:
        """Read the token, so that it can be replaced. Requests that come meanwhile share the
        thread, because the disk may hang. ``authorization``: the header of the request."""
        if not (authorization and self._settings.token_file):
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(in_daemon_thread(self.read))
        await asyncio.shield(self._reading)

    def read(self) -> None:
        """Read the token. Blocks."""
        try:
            self._token = read_token(self._settings.token_file)
        except SettingsError as error:
            self._token = error

    def check_host(self, host: str) -> None:
        """Check the ``Host`` header. Raises Refusal."""
        if self._settings.is_loopback and not is_this_host(host):
            raise Refusal(
                403,
                f"the Host header names another host ({host!r}). Use the address 127.0.0.1 or "
                "localhost, or set http.address for access from elsewhere.",
            )

    def check_read(
        self, authorization: str, *, has_certificate: bool = False, is_here: bool = False
    ) -> None:
        """Check a request that reads the API. ``is_here``: as ``is_from_this_host``. Raises
        Refusal."""
        if is_here or self._settings.open_reads or has_certificate:
            return
        if not (self._settings.token_file or self._settings.client_ca_file):
            raise Refusal(
                403,
                "the API may be read only on this host, at http://127.0.0.1 or localhost and not "
                "through a proxy. Set http.open_reads = true, or http.token_file and send the "
                "token.",
            )
        self._check_token(authorization)

    def check_change(
        self, authorization: str, *, has_certificate: bool = False, is_of_browser: bool = False
    ) -> None:
        """Check a request that changes something. Raises Refusal.

        ``is_of_browser``: it has a header that only browsers send.
        """
        if self._observes:
            raise Refusal(403, 'this node only observes (node.mode = "observe").')
        if has_certificate and not authorization:
            if is_of_browser:
                raise Refusal(403, "a browser may not change anything with a client certificate.")
            return
        if not (self._settings.token_file or self._settings.client_ca_file):
            raise Refusal(
                403,
                "changes over HTTP are off. Set http.token_file to a file with a token of at least "
                f"{TOKEN_LENGTH_MIN} characters, and send it as: Authorization: Bearer TOKEN",
            )
        self._check_token(authorization)

    def _check_token(self, authorization: str) -> None:
        if not self._settings.token_file:
            raise Refusal(401, "this request needs a client certificate (http.client_ca_file).")
        if not authorization.lower().startswith(SCHEME):
            other = ", or a client certificate" if self._settings.client_ca_file else ""
            raise Refusal(
                401,
                "this request needs the token, which is in the file that http.token_file names: "
                f"Authorization: Bearer TOKEN{other}",
            )
        if isinstance(self._token, SettingsError):
            raise Refusal(403, str(self._token)) from self._token
        # aiohttp decodes bytes that are not UTF-8 to surrogates, which plain UTF-8 cannot encode.
        given = authorization[len(SCHEME) :].strip().encode(errors="surrogateescape")
        if not self._token or not hmac.compare_digest(given, self._token.reveal().encode()):
            raise Refusal(401, "the token is wrong. It is in the file that http.token_file names.")


async def check_request(access: Access, request: web.Request, *, changes: bool) -> None:
    """Check a request to the API. Raises Refusal."""
    authorization, is_known = request.headers.get("Authorization", ""), has_certificate(request)
    if not changes:
        authorization = password_as_token(authorization)
    await access.refresh(authorization)
    if changes:
        is_of_browser = not request.headers.keys().isdisjoint(HEADERS_OF_BROWSERS)
        access.check_change(authorization, has_certificate=is_known, is_of_browser=is_of_browser)
    else:
        access.check_read(
            authorization,
            has_certificate=is_known,
            is_here=is_from_this_host(request.remote or "", request.headers),
        )


def read_token(file: str) -> Secret[str]:
    """Return the token in this file. Raises SettingsError."""
    try:
        with Path(file).open("rb") as opened:
            token = opened.read(TOKEN_BYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        step = f"Write a token of at least {TOKEN_LENGTH_MIN} characters there."
        if isinstance(error, PermissionError):
            step = "Grant the service user read access."
        message = f"the token cannot be read: {why} (http.token_file={file}). {step}"
        raise SettingsError(message, setting="http.token_file") from error
    if len(token) < TOKEN_LENGTH_MIN:
        raise SettingsError(
            f"the token has fewer than {TOKEN_LENGTH_MIN} characters (http.token_file={file}). "
            "Write a longer one.",
            setting="http.token_file",
        )
    return Secret(token)


def is_from_this_host(peer: str, headers: Mapping[str, str]) -> bool:
    """Return True if a request comes from this host itself. ``peer``: the address of the client.

    A reverse proxy on this host connects over loopback as well. So a request with a header of a
    proxy is not from this host.
    """
    names = {name.lower() for name in headers}
    is_forwarded = not names.isdisjoint(PROXY_HEADERS) or any(
        name.startswith("x-forwarded-") for name in names
    )
    return not is_forwarded and is_loopback(peer) and is_this_host(headers.get("Host", ""))


def is_this_host(host: str) -> bool:
    """Return True if the ``Host`` header names this host by a loopback address or as localhost. An
    empty one is from a client of HTTP/1.0."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    return name in ("", "localhost", "localhost.") or is_loopback(name)


def is_loopback(address: str) -> bool:
    try:
        given = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(given, "ipv4_mapped", None) or given).is_loopback


def password_as_token(authorization: str) -> str:
    """Return the header that ``Access`` expects. Browsers send a password, which is the token.

    Only reading accepts a password: browsers also send it with requests that another page makes, so
    it must not allow changes.
    """
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        return f"Bearer {base64.b64decode(given.strip(), validate=True).decode().partition(':')[2]}"
    except ValueError:  # neither base64 nor text
        return ""

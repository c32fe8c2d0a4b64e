"""TLS of the HTTP server: its certificate, and the CAs of client certificates.

The files are read again after they changed (``FromFiles``). New connections use the new content;
established connections stay as they are.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from daemon.settings import HttpSettings
from ledgers.security import FromFiles, load_authorities, load_certificate

if TYPE_CHECKING:  # ``bookmender config check`` uses ServerTls, and need not load aiohttp
    from aiohttp import web


class ServerTls:
    """The TLS context of the settings. Reading the files may block on a disk."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._context = FromFiles(
            "http_tls",
            [settings.certificate_file, settings.key_file, settings.client_ca_file],
            lambda: _server_context(settings),
        )

    def context(self) -> ssl.SSLContext | None:
        """Return the context for new connections; None: no TLS. Raises SettingsError if a file is
        unusable and no earlier content is known."""
        return self._context.get() if self._settings.certificate_file else None


def _server_context(settings: HttpSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, settings.certificate_file, settings.key_file, section="http")
    if settings.client_ca_file:
        load_authorities(context, "http.client_ca_file", settings.client_ca_file)
        # A client without a certificate may use the token. A wrong certificate ends the handshake.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def has_certificate(request: web.Request) -> bool:
    """Return True if the client has shown a certificate that a CA of ``client_ca_file`` signed."""
    # Without a CA no certificate is asked for, and none is here.
    return bool(request.get_extra_info("peercert"))

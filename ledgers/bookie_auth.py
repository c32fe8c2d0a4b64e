"""Opens connections to bookies that use TLS or authentication, for both kinds of our connections.

``bookie_connector`` returns the function that ``connection`` and ``bulk`` open connections with:
``host_names.connect`` itself if the settings ask for neither. Otherwise a new connection passes
these steps before its protocol sees it:

1. START_TLS is sent in clear text, and a bookie with TLS agrees.
2. The TLS handshake follows on the same connection. It verifies the bookie's certificate.
3. AUTH messages are exchanged until the bookie's plugin is satisfied. Without a user of ours one
   AUTH message is still sent: its reply proves that the bookie accepted our certificate, because in
   TLS 1.3 the handshake of a client ends before the server has verified the client.

There is no way back to clear text: if a step fails, the connection is closed. All steps use V3
packets; bookies accept V2 packets after them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar, cast

import structlog

from ledgers.codec.registration import Address
from ledgers.errors import (
    AuthenticationRequiredError,
    CorruptionError,
    SecureConnectionError,
    SettingsError,
    UnauthorizedError,
)
from ledgers.host_names import Connector, connect
from ledgers.security import Security, SecuritySettings, security_for, tls_failure
from ledgers.tasks import in_daemon_thread
from ledgers.wire import v3
from ledgers.wire.framing import FrameReader, frame
from ledgers.wire.messages import Status
from ledgers.wire.sasl import Credentials, DigestMd5, Mechanism, Plain

log = structlog.get_logger()

P = TypeVar("P", bound=asyncio.BaseProtocol)

NO_PLUGIN = "AuthDisabledPlugin"
"""The name of the plugin of a bookie, or a client, without authentication."""
REPLY_TIMEOUT_S = 2.0
"""Timeout of each step. Shorter than the timeouts of connections, so that the error names the step.
BookKeeper's SASL plugin does not answer wrong credentials at all."""
ROUNDS_MAX = 10
"""Largest number of AUTH messages. DIGEST-MD5 needs two."""
FRAME_BYTES_MAX = 256 * 1024
"""Largest frame of a bookie that has not authenticated itself yet."""


def bookie_connector(settings: SecuritySettings) -> Connector:
    """Return the function that opens connections to bookies with these settings."""
    if not settings.bookie_tls and not settings.bookie_user:
        return connect
    return SecureConnector(security_for(settings)).connect


class SecureConnector:
    """Opens connections that are secured before they are handed over. Belongs to one event loop."""

    def __init__(self, security: Security, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        self._security, self._settings = security, security.settings
        self._reply_timeout_s = reply_timeout_s
        # Held while a thread reads the files: a thousand connections at once need one thread.
        self._reading = asyncio.Lock()

    async def connect(
        self, factory: Callable[[], P], address: Address
    ) -> tuple[asyncio.Transport, P]:
        """Connect, secure the connection and give it to a new protocol. Raises what ``connect``
        raises, and SecureConnectionError. A bookie that sends nothing at all is only an OSError."""
        try:
            async with self._reading:
                tls, credentials = await in_daemon_thread(
                    lambda: (self._security.bookie_tls(), self._security.bookie_credentials())
                )
        except SettingsError as error:
            raise SecureConnectionError(str(error), address=address) from error
        transport, exchange = await connect(_Exchange, address)
        is_established = False
        try:
            if tls is not None:
                transport = await self._start_tls(exchange, transport, tls, address)
                is_established = True
            await self._authenticate(exchange, credentials, address)
            exchange.check_idle()
        except (OSError, CorruptionError) as error:
            transport.abort()
            if not exchange.has_received:
                raise
            if isinstance(error, CorruptionError):
                text = "the bookie violates the protocol of authentication"
            elif self._settings.bookie_tls:
                text = self._tls_text(error, address, is_established=is_established)
            else:
                text = (
                    "the bookie closed the connection during authentication: check "
                    "security.bookie_user, security.bookie_password_file and security.bookie_plugin"
                )
            raise SecureConnectionError(text, address=address) from error
        except BaseException:
            transport.abort()
            raise
        protocol = factory()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return transport, protocol

    # --- TLS -----------------------------------------------------------------------------------

    async def _start_tls(
        self,
        exchange: _Exchange,
        transport: asyncio.Transport,
        tls: ssl.SSLContext,
        address: Address,
    ) -> asyncio.Transport:
        reply = await self._ask(exchange, v3.StartTls(), address)
        if reply.status is not Status.EOK:
            raise SecureConnectionError(
                "the bookie has no TLS (it refuses START_TLS): set tlsProvider on the bookie, or "
                "turn security.bookie_tls off",
                address=address,
            )
        exchange.check_idle()
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                exchange,
                tls,
                server_hostname=address.host,
                ssl_handshake_timeout=self._reply_timeout_s,
            )
            if secured is None:  # as uvloop and asyncio do if the connection was lost meanwhile
                raise ConnectionResetError
        except (OSError, ssl.CertificateError) as error:
            raise SecureConnectionError(self._tls_text(error, address), address=address) from error
        exchange.transport = secured
        return secured

    def _tls_text(
        self, error: BaseException, address: Address, *, is_established: bool = False
    ) -> str:
        return tls_failure(
            error,
            self._settings,
            server="the bookie",
            host=address.host,
            is_established=is_established,
        )

    # --- Authentication ------------------------------------------------------------------------

    async def _authenticate(
        self, exchange: _Exchange, credentials: Credentials | None, address: Address
    ) -> None:
        """Exchange AUTH messages until both sides are satisfied. A bookie that answers with
        ``NO_PLUGIN`` counts as authenticated, as in Java: so clients may get credentials first."""
        if credentials is None:
            # Does the bookie accept us by our certificate, or does it accept everybody?
            reply = await self._ask(exchange, v3.Auth(plugin=NO_PLUGIN, payload=b""), address)
            if reply.status is not Status.EOK:
                raise AuthenticationRequiredError(
                    "the bookie requires authentication: set security.bookie_user and "
                    "security.bookie_password_file, or check security.certificate_file and the "
                    "roles that the bookie allows (authorizedRoles)",
                    address=address,
                )
            return
        mechanism: Mechanism = Plain(credentials)
        if self._settings.bookie_mechanism != "PLAIN":
            mechanism = DigestMd5(credentials, service="bookkeeper", server="bookkeeper")
        token: bytes | None = mechanism.first()
        for _ in range(ROUNDS_MAX):
            assert token is not None
            request = v3.Auth(plugin=self._settings.bookie_plugin, payload=token)
            reply = await self._ask(exchange, request, address)
            if reply.status is not Status.EOK:
                raise self._refused("refuses", address)
            if reply.plugin == NO_PLUGIN:
                log.debug("bookie.authentication_skipped", host=address.host, port=address.port)
                return
            try:
                token = mechanism.answer(reply.payload)
            except UnauthorizedError as error:
                raise SecureConnectionError(
                    f"authentication failed: {error.args[0]}: check security.bookie_password_file",
                    address=address,
                ) from error
            if token is None:
                return
        raise CorruptionError("authentication does not end", address=address)

    def _refused(self, how: str, address: Address) -> SecureConnectionError:
        return SecureConnectionError(
            f"the bookie {how} our credentials: check security.bookie_user, "
            "security.bookie_password_file and security.bookie_plugin, and that the bookie allows "
            "this user (saslJaasClientAllowedIds)",
            address=address,
        )

    async def _ask(
        self, exchange: _Exchange, request: v3.Handshake, address: Address
    ) -> v3.HandshakeReply:
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                return await exchange.ask(request)
        except TimeoutError as error:
            if not exchange.has_received:
                raise
            if self._settings.bookie_user:
                raise self._refused("does not answer", address) from error
            raise SecureConnectionError(
                "the bookie does not answer AUTH in time", address=address
            ) from error


class _Exchange(asyncio.Protocol):
    """The protocol of a connection that is not secured yet: one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.has_received = False
        """True if the bookie has sent anything."""
        self._error: Exception | None = None
        """Why the connection was lost; None while it is open."""
        self._frames = FrameReader(frame_bytes_max=FRAME_BYTES_MAX)
        self._request_count = 0
        self._has_news = asyncio.Event()

    async def ask(self, request: v3.Handshake) -> v3.HandshakeReply:
        """Send a request and return its reply. Raises OSError, CorruptionError."""
        assert self.transport is not None
        self._request_count += 1
        self.transport.write(frame(v3.encode_handshake(request, self._request_count)))
        while True:
            while (packet := self._frames.next_packet()) is not None:
                reply = v3.decode_handshake(packet)
                if reply.request_id == self._request_count:
                    return reply
                # Else it is the second reply to START_TLS, with which a bookie reports that TLS is
                # established and that it waits for AUTH.
            if self._error is not None:
                raise self._error
            self._has_news.clear()
            await self._has_news.wait()

    def check_idle(self) -> None:
        """Raise CorruptionError if bytes were received that are part of no reply, OSError if the
        connection is lost. Before TLS an attacker could add clear text behind the bookie's
        reply."""
        if self._frames.has_bytes:
            raise CorruptionError("bytes that were not asked for")
        if self._error is not None:
            raise self._error

    # --- Called by the transport ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio.Transport, but have its methods.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        self._frames.feed(data)
        self._has_news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        # An SSLError, which is an OSError, says why the bookie refuses our certificate.
        self._error = exc if isinstance(exc, OSError) else ConnectionResetError("closed")
        self._has_news.set()

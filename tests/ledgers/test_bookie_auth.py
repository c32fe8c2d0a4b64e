"""The steps before a secured connection is used, at bookies that misbehave.

Right and wrong secrets at real bookies: ``tests/cluster/test_secured_connections.py``.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from daemon.local.security import Authority
from ledgers.bookie_auth import NO_PLUGIN, SecureConnector, bookie_connector
from ledgers.bookies import Transfer
from ledgers.client import open_bookies
from ledgers.codec.registration import Address
from ledgers.digest import EntryDigest
from ledgers.errors import BookmenderError, SecureConnectionError
from ledgers.host_names import connect
from ledgers.model import BookieId, DigestType
from ledgers.security import OPEN, Security, SecuritySettings
from ledgers.wire import bookkeeper_wire_pb2 as wire
from ledgers.wire.framing import frame
from tests.certificates import need_openssl
from tests.ledgers.scripted_bookie import in_loop

EOK, EBADREQ, EIO, EUA = 0, 404, 501, 502
PASSWORD = "a secret"
TIMEOUT_S = 0.2


class Peer:
    """The bookie's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> wire.Request:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return wire.Request.FromString(await self.reader.readexactly(size))

    def reply(
        self, request: wire.Request, status: int, *, plugin: str = "", payload: bytes = b""
    ) -> None:
        response = wire.Response(status=status)
        response.header.CopyFrom(request.header)
        if plugin:
            response.authResponse.authPluginName = plugin
            response.authResponse.payload = payload
        self.writer.write(frame(response.SerializeToString()))


Behaviour = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def bookie(behaviour: Behaviour) -> AsyncIterator[tuple[Address, list[Peer]]]:
    """A bookie with this behaviour at each connection, and the connections it has had."""
    peers: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(Peer(reader, writer))
        try:
            await behaviour(peers[-1])
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1]), peers
    finally:
        server.close()


def connector(tmp_path: Path, **given: Any) -> SecureConnector:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    if "bookie_user" in given:
        given["bookie_password_file"] = str(password)
    return SecureConnector(Security(SecuritySettings(**given)), reply_timeout_s=TIMEOUT_S)


async def refused(behaviour: Behaviour, opens: SecureConnector) -> str:
    """What is said of a bookie whose connection is never handed over."""
    handed_over: list[asyncio.Protocol] = []

    def factory() -> asyncio.Protocol:
        handed_over.append(asyncio.Protocol())
        return handed_over[-1]

    async with bookie(behaviour) as (address, _):
        with pytest.raises(SecureConnectionError) as caught:
            await opens.connect(factory, address)
        assert handed_over == []
    assert PASSWORD not in str(caught.value)
    return str(caught.value)


def test_without_settings_connections_are_opened_as_ever() -> None:
    assert bookie_connector(OPEN) is connect
    assert bookie_connector(SecuritySettings(zookeeper_tls=True)) is connect


def test_a_bookie_without_tls_gets_nothing_in_clear_text(tmp_path: Path) -> None:
    rest: list[bytes] = []

    async def refuse_tls(peer: Peer) -> None:
        peer.reply(await peer.request(), EBADREQ)
        rest.append(await peer.reader.read())

    opens = connector(tmp_path, bookie_tls=True, bookie_user="u")

    assert "has no TLS" in asyncio.run(refused(refuse_tls, opens))
    assert rest in ([], [b""])


def test_clear_text_behind_the_reply_to_start_tls_is_refused(tmp_path: Path) -> None:
    async def add_clear_text(peer: Peer) -> None:
        request = await peer.request()
        peer.reply(request, EOK)
        peer.reply(request, EOK, plugin=NO_PLUGIN)
        await peer.reader.read()

    told = asyncio.run(refused(add_clear_text, connector(tmp_path, bookie_tls=True)))

    assert "violates the protocol" in told


async def _silence(peer: Peer) -> None:
    await peer.reader.read()


async def _challenge(peer: Peer) -> None:
    challenge = b'realm="bookkeeper",nonce="n",qop="auth",algorithm=md5-sess,charset=utf-8'
    peer.reply(await peer.request(), EOK, plugin="sasl", payload=challenge)


async def _silence_after_challenge(peer: Peer) -> None:
    await _challenge(peer)
    await peer.reader.read()


async def _no_proof(peer: Peer) -> None:
    while True:
        await _challenge(peer)


async def _hang_up(peer: Peer) -> None:
    await _challenge(peer)
    await peer.request()


async def _reset(peer: Peer) -> None:
    await peer.request()
    peer.writer.transport.abort()


async def _refuse(peer: Peer) -> None:
    peer.reply(await peer.request(), EUA)
    await peer.reader.read()


async def _nonsense(peer: Peer) -> None:
    await peer.request()
    peer.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await peer.reader.read()


async def _flood(peer: Peer) -> None:
    await peer.request()
    peer.writer.write((300 * 1024).to_bytes(4, "big") + bytes(300 * 1024))
    await peer.reader.read()


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        pytest.param(
            _silence_after_challenge,
            "does not answer our credentials: check security.bookie_user",
            id="as Java at a wrong password",
        ),
        pytest.param(_no_proof, "does not prove that it knows the password", id="an imposter"),
        pytest.param(_hang_up, "closed the connection during authentication", id="hangs up"),
        pytest.param(_refuse, "refuses our credentials", id="refuses"),
        pytest.param(_nonsense, "violates the protocol", id="no bookie at all"),
        pytest.param(_flood, "violates the protocol", id="a frame that is too long"),
    ],
)
def test_a_bookie_that_does_not_authenticate_us_gets_no_requests(
    tmp_path: Path, behaviour: Behaviour, told: str
) -> None:
    assert told in asyncio.run(refused(behaviour, connector(tmp_path, bookie_user="u")))


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        pytest.param(_silence, TimeoutError, id="it hangs"),
        pytest.param(_reset, ConnectionResetError, id="it is starting"),
    ],
)
@pytest.mark.parametrize("given", [{"bookie_user": "u"}, {"bookie_tls": True}], ids=str)
@in_loop
async def test_a_bookie_that_sends_nothing_is_not_blamed_on_secrets(
    tmp_path: Path, behaviour: Behaviour, error: type[OSError], given: dict[str, Any]
) -> None:
    async with bookie(behaviour) as (address, _):
        with pytest.raises(error):
            await connector(tmp_path, **given).connect(asyncio.Protocol, address)


def test_a_bookie_that_refuses_is_not_hammered(tmp_path: Path) -> None:
    """Many requests at once lead to few connections, on both paths."""
    settings = SecuritySettings(bookie_user="u", bookie_password_file=str(tmp_path / "password"))
    (tmp_path / "password").write_text(PASSWORD)

    async def run() -> int:
        async with bookie(_refuse) as (address, peers):
            there = BookieId(f"{address.host}:{address.port}")
            digest = EntryDigest(DigestType.CRC32C, b"")
            async with open_bookies(
                reads_in_flight_max=500, connector=bookie_connector(settings)
            ) as client:
                for _ in range(200):
                    with pytest.raises(BookmenderError):
                        await client.room(there)
                    await client.transfer(
                        Transfer(ledger_id=1, digest=digest, reads={there: range(10)})
                    )
            return len(peers)

    assert asyncio.run(run()) < 20


def test_the_password_is_sent_as_it_is_inside_tls_only(tmp_path: Path) -> None:
    need_openssl()
    authority = Authority(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(authority.issue("server").both)
    seen: list[tuple[str, bytes]] = []

    async def with_plugin(peer: Peer) -> None:
        peer.reply(await peer.request(), EOK)
        await peer.writer.drain()
        await peer.writer.start_tls(server)
        request = await peer.request()
        message = request.authRequest
        seen.append((message.authPluginName, message.payload))
        peer.reply(request, EOK, plugin=message.authPluginName)
        peer.writer.write(b"answer to " + await peer.reader.readexactly(8))
        await peer.reader.read()

    class Client(asyncio.Protocol):
        def __init__(self) -> None:
            self.received = asyncio.get_running_loop().create_future()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"question")

        def data_received(self, data: bytes) -> None:
            self.received.set_result(data)

    async def run() -> None:
        opens = connector(
            tmp_path,
            bookie_tls=True,
            ca_file=str(authority.certificate),
            bookie_user="tim",
            bookie_mechanism="PLAIN",
            bookie_plugin="tokens",
        )
        async with bookie(with_plugin) as (address, _):
            transport, protocol = await opens.connect(Client, address)
            assert await protocol.received == b"answer to question"
            transport.abort()

    asyncio.run(run())

    assert seen == [("tokens", f"\0tim\0{PASSWORD}".encode())]


@pytest.mark.parametrize(
    ("issued", "told"),
    [
        pytest.param({"days": -1}, "has expired: renew it on the server", id="expired"),
        pytest.param(
            {"hosts": ["elsewhere.example"]}, "does not name 127.0.0.1", id="another host"
        ),
        pytest.param({}, "is not signed by a CA of security.ca_file", id="another CA"),
    ],
)
def test_a_bookie_with_a_wrong_certificate_is_refused(
    tmp_path: Path, issued: dict[str, Any], told: str
) -> None:
    need_openssl()
    ours = Authority(tmp_path, "ours")
    authority = ours if issued else Authority(tmp_path, "other")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(authority.issue("server", **issued).both)

    async def with_tls(peer: Peer) -> None:
        peer.reply(await peer.request(), EOK)
        await peer.writer.drain()
        await peer.writer.start_tls(server)
        await peer.reader.read()

    opens = connector(tmp_path, bookie_tls=True, ca_file=str(ours.certificate))

    assert told in asyncio.run(refused(with_tls, opens))

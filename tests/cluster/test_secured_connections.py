"""Our connections to ZooKeeper and bookies with TLS and SASL, and what is said of wrong secrets.

Connections to bookies are of two kinds, and run on two event loops: each must do the same.
"""

import asyncio
import os
import random
import re
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from daemon.local.cluster import LocalCluster
from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.security import BOOKIE_SASL, ZOOKEEPER_SASL, Authority, Secrets
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Transfer
from ledgers.client import BookieClient, open_bookies
from ledgers.digest import EntryDigest
from ledgers.errors import (
    AuthenticationRequiredError,
    BookmenderError,
    NoAnswerError,
    SecureConnectionError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId, DigestType
from ledgers.security import OPEN, SecuritySettings
from ledgers.store import ANY_VERSION, Create, MultiFailed, SessionState
from ledgers.zookeeper.store import ZooKeeperStore
from tests.certificates import need_openssl
from tests.secured import BOOKIE_ROLES, PASSWORD
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("no_session_thread_is_left"),
]

LONG = pytest.mark.long(group="secured")
LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (
    asyncio.new_event_loop,
    uvloop.new_event_loop,
)
CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Servers whose TLS asks for a certificate, and that know a user."""

    kind: str
    """The prefix of their settings: ``zookeeper`` or ``bookie``."""
    addresses: tuple[str, ...]
    """Bookie ids; of ZooKeeper, the port with TLS and the one without."""
    secrets: Secrets

    @property
    def login(self) -> dict[str, Any]:
        secrets = self.secrets
        return secrets.bookie_login if self.kind == "bookie" else secrets.zookeeper_login

    @property
    def tls(self) -> dict[str, Any]:
        return {f"{self.kind}_tls": True, **self.secrets.trust, **self.secrets.certificate}

    def refusal(self, settings: SecuritySettings, address: str = "") -> BookmenderError:
        """Return the error of a connection with these settings. It has no secret."""
        refuses = bookie_refuses if self.kind == "bookie" else zookeeper_refuses
        return refuses(address or self.addresses[0], settings)


def bookie_refuses(bookie: str, settings: SecuritySettings) -> BookmenderError:
    async def run() -> NoAnswerError:
        async with connected(settings) as client:
            with pytest.raises(NoAnswerError) as caught:
                await client.room(BookieId(bookie))
            digest = EntryDigest(DigestType.CRC32C, b"key")
            reads = {BookieId(bookie): [0]}
            transfer = Transfer(ledger_id=1, digest=digest, reads=reads, target=BookieId(bookie))
            assert (await client.transfer(transfer)).entry_count == 0
            return caught.value

    first, second = on_each_loop(run)
    assert type(first) is type(second)
    return without_secrets(first)


def zookeeper_refuses(address: str, settings: SecuritySettings) -> BookmenderError:
    async def run() -> BookmenderError:
        with pytest.raises(BookmenderError) as caught:
            await ZooKeeperStore.open(
                address, connect_timeout_s=CONNECT_TIMEOUT_S, security=settings
            )
        return caught.value

    return without_secrets(asyncio.run(run()))


def without_secrets(error: BookmenderError) -> BookmenderError:
    assert PASSWORD not in str(error)
    assert "PRIVATE" not in str(error)
    return error


def on_each_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
    found = []
    for loop in LOOPS:
        with asyncio.Runner(loop_factory=loop) as runner:
            found.append(runner.run(work()))
    return found


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need_openssl()
    secrets = Secrets.make(tmp_path_factory.mktemp("secrets"), hosts=[LOOPBACK], password=PASSWORD)
    (port,) = free_ports(1)
    with running_zookeeper(
        tmp_path_factory.mktemp("zookeeper"),
        heap_mib=256,  # for the large znodes
        flags=secrets.jvm_flags("Server"),
        settings={**secrets.zookeeper_tls(port), **ZOOKEEPER_SASL},
    ) as server:
        addresses = (f"{LOOPBACK}:{port}", server.address)
        yield Server(kind="zookeeper", addresses=addresses, secrets=secrets)


def bookies(
    make_folder: pytest.TempPathFactory, host: str, settings: dict[str, str]
) -> Iterator[Server]:
    need_openssl()
    secrets = Secrets.make(make_folder.mktemp("secrets"), password=PASSWORD, hosts=[host])
    with LocalCluster.start(
        make_folder.mktemp("cluster"),
        bookies=2,
        bookie_settings={**secrets.bookie_tls(), **settings},
        bookie_jvm_flags=secrets.jvm_flags("Bookie"),
    ) as cluster:
        yield Server(kind="bookie", addresses=cluster.bookies, secrets=secrets)


@pytest.fixture(scope="module")
def bookie(_prerequisites: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Bookies that ask for a certificate in TLS and, with TLS or without, for a user (SASL)."""
    yield from bookies(tmp_path_factory, "127.0.0.1", BOOKIE_SASL)


@pytest.fixture(scope="module")
def with_roles(_prerequisites: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Bookies that admit roles in certificates, so that nobody comes in without TLS. Their own
    certificate names another host."""
    yield from bookies(tmp_path_factory, "elsewhere.example", BOOKIE_ROLES)


@pytest.fixture(params=["zookeeper", pytest.param("bookie", marks=LONG)])
def server_of_each_kind(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@asynccontextmanager
async def connected(settings: SecuritySettings) -> AsyncIterator[BookieClient]:
    async with open_bookies(
        reads_in_flight_max=500, connector=bookie_connector(settings)
    ) as client:
        yield client


@asynccontextmanager
async def session(address: str, settings: SecuritySettings = OPEN) -> AsyncIterator[ZooKeeperStore]:
    store = await ZooKeeperStore.open(address, security=settings)
    try:
        yield store
    finally:
        await store.close()


# --- Right secrets --------------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize(
    ("servers", "has_tls", "has_login"),
    [
        pytest.param("bookie", True, True, id="TLS and SASL"),
        pytest.param("bookie", False, True, id="SASL alone"),
        pytest.param("with_roles", True, False, id="a certificate with the right role"),
    ],
)
def test_entries_pass_through(
    request: pytest.FixtureRequest, servers: str, has_tls: bool, has_login: bool
) -> None:
    """They are written with the client (V3, and V2 for the largest), and copied in bulk (V2)."""
    server: Server = request.getfixturevalue(servers)
    source, target = map(BookieId, server.addresses)
    settings = SecuritySettings(
        verify_host_names=servers != "with_roles",
        **(server.tls if has_tls else {}),
        **(server.login if has_login else {}),
    )
    digest = EntryDigest(DigestType.CRC32C, b"key")
    sizes = [0, 1, 100, 70_000, 200_000, 1_000_000, 5_242_700, *range(200)]

    async def run() -> None:
        ledger_id, length, entries = random.randrange(2**40, 2**41), 0, []
        async with connected(settings) as client:
            for entry_id, size in enumerate(sizes):
                length += size
                entries.append(
                    digest.pack(
                        ledger_id=ledger_id,
                        entry_id=entry_id,
                        lac=entry_id - 1,
                        length=length,
                        payload=os.urandom(size),
                    )
                )
                await client.add(source, entries[-1], master_key=digest.master_key)
            assert await client.read(source, ledger_id, 5) == entries[5]
            for reader, writer in ((source, target), (target, None)):
                reads = {reader: range(len(entries))}
                done = await client.transfer(
                    Transfer(ledger_id=ledger_id, digest=digest, reads=reads, target=writer)
                )
                assert (done.entry_count, done.failures) == (len(entries), {})

    on_each_loop(run)


async def use(address: str, settings: SecuritySettings) -> None:
    """Create, read and delete a znode as large as a request may be."""
    async with session(address, settings) as store:
        data = os.urandom(990_000)
        path = await store.create("/large", data)
        assert (await store.get(path))[0] == data
        await asyncio.gather(*(store.get(path) for _ in range(3)))
        await store.delete(path)


@pytest.mark.parametrize(
    ("has_tls", "has_login"),
    [
        pytest.param(True, False, id="TLS with a certificate"),
        pytest.param(False, True, id="SASL"),
        pytest.param(True, True, id="both"),
    ],
)
async def test_znodes_of_a_secured_store_are_only_for_its_identity(
    zookeeper: Server, has_tls: bool, has_login: bool
) -> None:
    identity = {
        **(zookeeper.tls if has_tls else {}),
        **(zookeeper.login if has_login else {}),
    }
    owner = SecuritySettings(zookeeper_acl="creator", **identity)
    root = f"/owned-{has_tls}-{has_login}"
    address, open_address = zookeeper.addresses[0 if has_tls else 1], zookeeper.addresses[1]

    await use(address, owner)
    async with (
        session(address, owner) as ours,
        session(address, SecuritySettings(**identity)) as same,
        session(open_address) as stranger,
    ):
        await ours.create(f"{root}/a", b"data", with_parents=True)

        assert (await same.get(f"{root}/a"))[0] == b"data"
        for call in (
            stranger.get(f"{root}/a"),
            stranger.children(root),
            stranger.set(f"{root}/a", b"", version=ANY_VERSION),
            stranger.delete(f"{root}/a"),
            stranger.create(f"{root}/b"),
        ):
            with pytest.raises(UnauthorizedError, match=f"ACL.*{root}"):
                await call
        with pytest.raises(MultiFailed) as failure:
            await stranger.multi([Create(path="/stranger"), Create(path=f"{root}/b")])
        assert failure.value.index == 1
        assert isinstance(failure.value.cause, UnauthorizedError)
        # BookKeeper leaves these open. Operators' tools and clients rely on that.
        await ours.create(f"{root}/lostBookieRecoveryDelay", b"0")
        await ours.create(f"{root}/idgen-long/HOB-0000000001", with_parents=True)
        await stranger.set(f"{root}/lostBookieRecoveryDelay", b"5", version=0)
        await stranger.create(f"{root}/idgen-long/HOB-0000000001/ID-", is_sequential=True)


async def test_a_broken_connection_is_secured_again(zookeeper: Server) -> None:
    settings = SecuritySettings(zookeeper_acl="creator", **zookeeper.tls, **zookeeper.login)
    proxy = TcpProxy(int(zookeeper.addresses[0].rpartition(":")[2]))

    async with session(await proxy.start(), settings) as store:
        await store.create("/again")
        session_id = store.session_id
        proxy.cut()
        await store.wait_disconnected()
        proxy.restore()
        await store.delete("/again")
        assert (store.state, store.session_id) == (SessionState.CONNECTED, session_id)
    await proxy.close()


@LONG
def test_renewed_files_are_used_without_a_restart(bookie: Server, tmp_path: Path) -> None:
    password, certificate = tmp_path / "password", tmp_path / "certificate.pem"
    bookie.secrets.authority.issue("old", days=-1)
    settings = SecuritySettings(
        bookie_tls=True,
        bookie_user="bookkeeper",
        bookie_password_file=str(password),
        certificate_file=str(certificate),
        **bookie.secrets.trust,
    )

    async def run() -> None:
        password.write_text("the old one")
        shutil.copy(bookie.secrets.folder / "old-both.pem", certificate)
        async with connected(settings) as client:
            target = BookieId(bookie.addresses[0])
            with pytest.raises(SecureConnectionError):
                await client.room(target)
            password.write_text(PASSWORD)
            shutil.copy(bookie.secrets.client.both, certificate)
            client.bookie_returned(target)  # ends the pause after the failure
            assert (await client.room(target)).total_bytes > 0

    on_each_loop(run)


def test_renewed_files_are_used_by_the_next_session(zookeeper: Server, tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    shutil.copy(zookeeper.secrets.authority.issue("old", days=-1).both, certificate)
    settings = SecuritySettings(
        zookeeper_tls=True,
        certificate_file=str(certificate),
        **zookeeper.login,
        **zookeeper.secrets.trust,
    )
    assert isinstance(zookeeper.refusal(settings), SecureConnectionError)

    shutil.copy(zookeeper.secrets.client.both, certificate)

    asyncio.run(use(zookeeper.addresses[0], settings))


@LONG
async def test_a_bookie_without_authentication_accepts_a_user(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """As with Java's client: users can be set before bookies ask for them."""
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    settings = SecuritySettings(bookie_user="bookkeeper", bookie_password_file=str(password))

    async with connected(settings) as client:
        assert (await client.room(cluster.bookies[0])).total_bytes > 0


# --- Wrong secrets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "of_zookeeper", "of_bookie"),
    [
        pytest.param(
            {"KIND_password_file": "wrong"},
            "check security.zookeeper_user and security.zookeeper_password_file",
            "the bookie does not answer our credentials: check security.bookie_user, "
            "security.bookie_password_file",
            id="wrong password",
        ),
        pytest.param(
            {"KIND_user": "other"},
            "check security.zookeeper_user and security.zookeeper_password_file",
            "saslJaasClientAllowedIds",
            id="user unknown or not allowed",
        ),
        pytest.param(
            {"ca_file": "other.pem"},
            "the certificate of ZooKeeper is not signed by a CA of security.ca_file",
            r"not signed by a CA of security.ca_file \(.*other.pem\)",
            id="the server's certificate is not trusted",
        ),
        pytest.param(
            {"certificate_file": "expired-both.pem", "key_file": ""},
            "check that the certificate in security.certificate_file",
            r"TLS handshake.* security.certificate_file \(.*expired.* is valid",
            id="our certificate has expired",
        ),
        pytest.param(
            {"certificate_file": "stranger-both.pem", "key_file": ""},
            "signed by a CA that the server trusts",
            "signed by a CA that the server trusts",
            id="our certificate is not trusted",
        ),
        pytest.param(
            {"certificate_file": "", "key_file": ""},
            "set security.certificate_file",
            "TLS handshake.*set security.certificate_file",
            id="no certificate",
        ),
    ],
)
def test_wrong_secrets_are_named(
    server_of_each_kind: Server, changes: dict[str, str], of_zookeeper: str, of_bookie: str
) -> None:
    server, secrets = server_of_each_kind, server_of_each_kind.secrets
    secrets.file("wrong", "no such password")
    secrets.authority.issue("expired", days=-1)
    Authority(secrets.folder, "other").issue("stranger")
    changed = {
        key.replace("KIND", server.kind): str(secrets.folder / value)
        if key.endswith("_file") and value
        else value
        for key, value in changes.items()
    }
    is_of_login = any("KIND" in key for key in changes)
    is_zookeeper = server.kind == "zookeeper"

    found = [server.refusal(SecuritySettings(**{**server.tls, **server.login, **changed}))]
    if is_zookeeper and is_of_login:
        settings = SecuritySettings(**{**server.login, **changed})
        found.append(server.refusal(settings, server.addresses[1]))

    for error in found:
        expected = UnauthorizedError if is_zookeeper and is_of_login else SecureConnectionError
        assert isinstance(error, expected), error
        assert re.search(of_zookeeper if is_zookeeper else of_bookie, str(error)), error


def test_a_certificate_of_zookeeper_for_another_host_is_refused(zookeeper: Server) -> None:
    """The server's certificate names its address, and the connect string its name."""
    address = zookeeper.addresses[0].replace(LOOPBACK, "localhost")

    error = zookeeper.refusal(SecuritySettings(**zookeeper.tls), address)

    assert isinstance(error, SecureConnectionError)
    assert "does not name localhost" in str(error)
    asyncio.run(use(address, SecuritySettings(**zookeeper.tls, verify_host_names=False)))


@LONG
def test_certificates_for_another_host_or_without_a_role_are_refused(with_roles: Server) -> None:
    nobody = with_roles.secrets.authority.issue("nobody")
    settings = SecuritySettings(
        bookie_tls=True,
        verify_host_names=False,
        certificate_file=str(nobody.both),
        **with_roles.secrets.trust,
    )

    elsewhere = with_roles.refusal(SecuritySettings(**with_roles.tls))
    without_role = with_roles.refusal(settings)

    assert "the certificate of the bookie does not name 127.0.0.1" in str(elsewhere)
    assert "security.verify_host_names" in str(elsewhere)
    assert isinstance(without_role, AuthenticationRequiredError)
    assert "authorizedRoles" in str(without_role)


# --- One side without TLS or SASL -----------------------------------------------------------------


def test_zookeeper_is_never_asked_in_clear_text_instead_of_tls(zookeeper: Server) -> None:
    error = zookeeper.refusal(SecuritySettings(**zookeeper.tls), zookeeper.addresses[1])

    assert isinstance(error, SecureConnectionError)
    assert "secureClientPort" in str(error)
    assert isinstance(zookeeper.refusal(OPEN), UnavailableError)


@LONG
def test_a_bookie_is_never_asked_in_clear_text_instead_of_tls(
    with_roles: Server, bookie: Server, cluster: LocalCluster, tmp_path: Path
) -> None:
    settings = SecuritySettings(bookie_tls=True, ca_file=str(Authority(tmp_path).certificate))

    error = with_roles.refusal(settings, cluster.bookies[0])
    without_tls = with_roles.refusal(OPEN)

    assert isinstance(error, SecureConnectionError)
    assert "the bookie has no TLS" in str(error)
    assert isinstance(without_tls, AuthenticationRequiredError)
    assert "security.bookie_tls" in str(without_tls)
    assert isinstance(bookie.refusal(OPEN), AuthenticationRequiredError)


def test_sasl_at_a_server_without_sasl_is_explained(
    server: ZooKeeperServer, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    settings = SecuritySettings(zookeeper_user="u", zookeeper_password_file=str(password))

    error = zookeeper_refuses(server.address, settings)

    assert isinstance(error, UnauthorizedError)
    assert "offers no DIGEST-MD5 authentication" in str(error)

"""Sessions with a ZooKeeper that has TLS and SASL, and what is said of wrong secrets."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from daemon.local.certificates import Authority
from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.security import ZOOKEEPER_SASL, Secrets
from ledgers.errors import (
    BookmenderError,
    SecureConnectionError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.security import OPEN, SecuritySettings
from ledgers.store import ANY_VERSION, Create, MultiFailed, SessionState
from ledgers.zookeeper.store import ZooKeeperStore
from tests.certificates import need_openssl
from tests.contract.metadata_stores import on_loop
from tests.secured import PASSWORD
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import ZooKeeperServer, opened, running_zookeeper

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("no_session_thread_is_left"),
]

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """A server with both ports, that asks for certificates at its TLS port."""

    server: ZooKeeperServer
    tls_address: str
    secrets: Secrets

    @property
    def tls(self) -> dict[str, Any]:
        return {"zookeeper_tls": True, **self.secrets.trust, **self.secrets.certificate}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    need_openssl()
    secrets = Secrets.make(tmp_path_factory.mktemp("secrets"), hosts=[LOOPBACK], password=PASSWORD)
    (port,) = free_ports(1)
    with running_zookeeper(
        tmp_path_factory.mktemp("zookeeper"),
        heap_mib=256,  # for the large znodes
        flags=secrets.jvm_flags("Server"),
        settings={**secrets.zookeeper_tls(port), **ZOOKEEPER_SASL},
    ) as server:
        yield Secured(server=server, tls_address=f"{LOOPBACK}:{port}", secrets=secrets)


async def _use(address: str, settings: SecuritySettings) -> None:
    """Create, read and delete a znode as large as a request may be."""
    store = await ZooKeeperStore.open(address, security=settings)
    try:
        data = os.urandom(990_000)
        path = await store.create("/large", data)
        assert (await store.get(path))[0] == data
        await asyncio.gather(*(store.get(path) for _ in range(3)))
        await store.delete(path)
    finally:
        await store.close()


@pytest.mark.long(group="secured")
def test_a_session_over_tls_with_a_certificate(secured: Secured) -> None:
    asyncio.run(_use(secured.tls_address, SecuritySettings(**secured.tls)))


@pytest.mark.long(group="secured")
def test_a_session_with_sasl(secured: Secured) -> None:
    settings = SecuritySettings(zookeeper_acl="creator", **secured.secrets.zookeeper_login)

    asyncio.run(_use(secured.server.address, settings))


def test_a_session_with_both(secured: Secured) -> None:
    settings = SecuritySettings(
        zookeeper_acl="creator", **secured.tls, **secured.secrets.zookeeper_login
    )

    asyncio.run(_use(secured.tls_address, settings))


@pytest.mark.long(group="secured")
def test_a_certificate_may_own_znodes(secured: Secured) -> None:
    settings = SecuritySettings(zookeeper_acl="creator", **secured.tls)

    async def run() -> None:
        store = await ZooKeeperStore.open(secured.tls_address, security=settings)
        stranger = await ZooKeeperStore.open(secured.server.address)
        try:
            await store.create("/owned")
            with pytest.raises(UnauthorizedError, match="ACL"):
                await stranger.get("/owned")
            await store.delete("/owned")
        finally:
            await store.close()
            await stranger.close()

    asyncio.run(run())


@on_loop
async def test_znodes_of_a_secured_store_are_only_for_its_identity(secured: Secured) -> None:
    login = secured.secrets.zookeeper_login
    async with (
        opened(secured.server, security=SecuritySettings(zookeeper_acl="creator", **login)) as ours,
        opened(secured.server, security=SecuritySettings(**login)) as same,
        opened(secured.server) as stranger,
    ):
        await ours.create("/secured/a", b"data", with_parents=True)

        assert (await same.get("/secured/a"))[0] == b"data"
        for call in (
            stranger.get("/secured/a"),
            stranger.children("/secured"),
            stranger.set("/secured/a", b"", version=ANY_VERSION),
            stranger.delete("/secured/a"),
            stranger.create("/secured/b"),
        ):
            with pytest.raises(UnauthorizedError, match=r"ACL.*/secured"):
                await call
        with pytest.raises(MultiFailed) as failure:
            await stranger.multi([Create(path="/stranger"), Create(path="/secured/b")])
        assert failure.value.index == 1
        assert isinstance(failure.value.cause, UnauthorizedError)


@pytest.mark.long(group="secured")
@on_loop
async def test_znodes_that_bookkeeper_leaves_open_stay_open(secured: Secured) -> None:
    """Operators' tools and clients rely on these exceptions of zkEnableSecurity."""
    owner = SecuritySettings(zookeeper_acl="creator", **secured.secrets.zookeeper_login)
    async with (
        opened(secured.server, security=owner) as ours,
        opened(secured.server) as stranger,
    ):
        await ours.create("/open/lostBookieRecoveryDelay", b"0", with_parents=True)
        await ours.create("/open/idgen-long/HOB-0000000001", with_parents=True)

        await stranger.set("/open/lostBookieRecoveryDelay", b"5", version=0)
        await stranger.create("/open/idgen-long/HOB-0000000001/ID-", is_sequential=True)


@pytest.mark.long(group="secured")
def test_a_broken_connection_is_secured_again(secured: Secured) -> None:
    settings = SecuritySettings(
        zookeeper_acl="creator", **secured.tls, **secured.secrets.zookeeper_login
    )
    proxy = TcpProxy(int(secured.tls_address.rpartition(":")[2]))

    async def run() -> None:
        store = await ZooKeeperStore.open(await proxy.start(), security=settings)
        try:
            await store.create("/again")
            session_id = store.session_id
            proxy.cut()
            await store.wait_disconnected()
            proxy.restore()
            await store.delete("/again")
            assert (store.state, store.session_id) == (SessionState.CONNECTED, session_id)
        finally:
            await store.close()
            await proxy.close()

    asyncio.run(run())


def told(address: str, settings: SecuritySettings) -> BookmenderError:
    async def run() -> BookmenderError:
        with pytest.raises(BookmenderError) as caught:
            await ZooKeeperStore.open(
                address, connect_timeout_s=CONNECT_TIMEOUT_S, security=settings
            )
        return caught.value

    error = asyncio.run(run())
    assert PASSWORD not in str(error)
    return error


@pytest.mark.parametrize("over_tls", [False, True], ids=["clear", "TLS"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"zookeeper_password_file": "wrong"}, id="wrong password"),
        pytest.param({"zookeeper_user": "stranger"}, id="unknown user"),
    ],
)
def test_refused_credentials_are_an_error_at_once(
    secured: Secured, changes: dict[str, str], over_tls: bool
) -> None:
    secured.secrets.file("wrong", "no such password")
    given = dict(secured.secrets.zookeeper_login)
    for key, value in changes.items():
        given[key] = str(secured.secrets.folder / value) if key.endswith("_file") else value
    settings = SecuritySettings(**given, **(secured.tls if over_tls else {}))
    address = secured.tls_address if over_tls else secured.server.address

    error = told(address, settings)

    assert isinstance(error, UnauthorizedError)
    assert "check security.zookeeper_user and security.zookeeper_password_file" in str(error)


@pytest.mark.long(group="secured")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param(
            {"ca_file": "other.pem"},
            "the certificate of ZooKeeper is not signed by a CA of security.ca_file",
            id="server not trusted",
        ),
        pytest.param(
            {"certificate_file": "expired-both.pem", "key_file": ""},
            "check that the certificate in security.certificate_file",
            id="our certificate has expired",
        ),
        pytest.param(
            {"certificate_file": "", "key_file": ""},
            "set security.certificate_file",
            id="no certificate",
        ),
    ],
)
def test_a_failed_handshake_is_explained(
    secured: Secured, changes: dict[str, str], text: str
) -> None:
    folder = secured.secrets.folder
    Authority(folder, "other")
    secured.secrets.authority.issue("expired", days=-1)
    given = secured.tls | {key: str(folder / v) if v else "" for key, v in changes.items()}

    error = told(secured.tls_address, SecuritySettings(**given))

    assert isinstance(error, SecureConnectionError)
    assert text in str(error)


@pytest.mark.long(group="secured")
def test_a_certificate_for_another_host_is_refused(secured: Secured) -> None:
    """The server's certificate names its address, and the connect string its name."""
    address = secured.tls_address.replace(LOOPBACK, "localhost")

    error = told(address, SecuritySettings(**secured.tls))

    assert isinstance(error, SecureConnectionError)
    assert "does not name localhost" in str(error)
    asyncio.run(_use(address, SecuritySettings(**secured.tls, verify_host_names=False)))


def test_tls_to_a_port_without_tls_does_not_fall_back(secured: Secured) -> None:
    error = told(secured.server.address, SecuritySettings(**secured.tls))

    assert isinstance(error, SecureConnectionError)
    assert "secureClientPort" in str(error)


@pytest.mark.long(group="secured")
def test_clear_text_to_a_port_with_tls_is_not_answered(secured: Secured) -> None:
    error = told(secured.tls_address, OPEN)

    assert isinstance(error, UnavailableError)


@pytest.mark.long(group="secured")
def test_renewed_files_are_used_by_the_next_connection(secured: Secured, tmp_path: Path) -> None:
    password, certificate = tmp_path / "password", tmp_path / "certificate.pem"
    password.write_text(PASSWORD)
    shutil.copy(secured.secrets.authority.issue("old", days=-1).both, certificate)
    settings = SecuritySettings(
        zookeeper_tls=True,
        certificate_file=str(certificate),
        zookeeper_user="bookkeeper",
        zookeeper_password_file=str(password),
        **secured.secrets.trust,
    )
    assert isinstance(told(secured.tls_address, settings), SecureConnectionError)

    shutil.copy(secured.secrets.client.both, certificate)

    asyncio.run(_use(secured.tls_address, settings))


@pytest.mark.long(group="secured")
def test_sasl_at_a_server_without_sasl_is_explained(
    server: ZooKeeperServer, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    settings = SecuritySettings(zookeeper_user="u", zookeeper_password_file=str(password))

    error = told(server.address, settings)

    assert isinstance(error, UnauthorizedError)
    assert "offers no DIGEST-MD5 authentication" in str(error)

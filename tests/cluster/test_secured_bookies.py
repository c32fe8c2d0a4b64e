"""Our connections to bookies with TLS and authentication, of both kinds, and what they say of wrong
secrets."""

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from daemon.local.certificates import Authority
from daemon.local.cluster import LocalCluster
from daemon.local.security import BOOKIE_SASL, Secrets
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Transfer
from ledgers.client import BookieClient, open_bookies
from ledgers.digest import EntryDigest
from ledgers.errors import AuthenticationRequiredError, NoAnswerError, SecureConnectionError
from ledgers.model import BookieId, DigestType
from ledgers.security import OPEN, SecuritySettings
from tests.certificates import need_openssl
from tests.secured import BOOKIE_ROLES, PASSWORD

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="secured"), pytest.mark.timeout(240)]

LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(uvloop.new_event_loop, id="uvloop"),
]
Loop = Callable[[], asyncio.AbstractEventLoop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookies:
    """Running bookies and their secrets."""

    ids: tuple[BookieId, ...]
    secrets: Secrets


def started(
    make_folder: pytest.TempPathFactory, *, host: str, settings: dict[str, str]
) -> Iterator[Bookies]:
    need_openssl()
    secrets = Secrets.make(make_folder.mktemp("secrets"), password=PASSWORD, hosts=[host])
    with LocalCluster.start(
        make_folder.mktemp("cluster"),
        bookies=2,
        bookie_settings={**secrets.bookie_tls(), **settings},
        bookie_jvm_flags=secrets.jvm_flags("Bookie"),
    ) as cluster:
        yield Bookies(ids=cluster.bookies, secrets=secrets)


@pytest.fixture(scope="module")
def with_users(_prerequisites: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that ask for a certificate in TLS and, with TLS or without, for a user (SASL)."""
    yield from started(tmp_path_factory, host="127.0.0.1", settings=BOOKIE_SASL)


@pytest.fixture(scope="module")
def with_roles(_prerequisites: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that admit roles in certificates, so that nobody comes in without TLS. Their own
    certificate names another host."""
    yield from started(tmp_path_factory, host="elsewhere.example", settings=BOOKIE_ROLES)


@asynccontextmanager
async def opened(settings: SecuritySettings) -> AsyncIterator[BookieClient]:
    async with open_bookies(
        reads_in_flight_max=500, connector=bookie_connector(settings)
    ) as client:
        yield client


def run_on(loop: Loop, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(work)


async def copy_and_read(settings: SecuritySettings, bookies: Bookies) -> None:
    """Write entries with the client (V3, and V2 for the largest), copy and check them in bulk
    (V2)."""
    source, target = bookies.ids
    digest, ledger_id = EntryDigest(DigestType.CRC32C, b"key"), random.randrange(2**40, 2**41)
    sizes = [0, 1, 100, 70_000, 200_000, 1_000_000, 5_242_700, *range(200)]
    async with opened(settings) as client:
        length, entries = 0, []
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
        reads = {source: range(len(entries))}
        copied = await client.transfer(
            Transfer(ledger_id=ledger_id, digest=digest, reads=reads, target=target)
        )
        assert copied.entry_count == len(entries), copied
        checked = await client.transfer(
            Transfer(ledger_id=ledger_id, digest=digest, reads={target: range(len(entries))})
        )
        assert (checked.entry_count, checked.failures) == (len(entries), {})


@pytest.mark.parametrize("loop", LOOPS)
def test_entries_pass_through_tls_and_sasl(with_users: Bookies, loop: Loop) -> None:
    secrets = with_users.secrets
    settings = SecuritySettings(
        bookie_tls=True, **secrets.trust, **secrets.certificate, **secrets.bookie_login
    )

    run_on(loop, copy_and_read(settings, with_users))


@pytest.mark.parametrize("loop", LOOPS)
def test_entries_pass_through_sasl_alone(with_users: Bookies, loop: Loop) -> None:
    run_on(loop, copy_and_read(SecuritySettings(**with_users.secrets.bookie_login), with_users))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_certificate_with_the_right_role_is_enough(with_roles: Bookies, loop: Loop) -> None:
    secrets = with_roles.secrets
    settings = SecuritySettings(
        bookie_tls=True, verify_host_names=False, **secrets.trust, **secrets.certificate
    )

    run_on(loop, copy_and_read(settings, with_roles))


def failure(settings: SecuritySettings, bookie: BookieId, loop: Loop) -> NoAnswerError:
    """The error of a request over each kind of connection, which must be alike."""
    digest = EntryDigest(DigestType.CRC32C, b"key")
    found: list[NoAnswerError] = []

    async def run() -> None:
        async with opened(settings) as client:
            with pytest.raises(NoAnswerError) as caught:
                await client.room(bookie)
            found.append(caught.value)
            entry = digest.pack(ledger_id=1, entry_id=0, lac=-1, length=0, payload=b"")
            transfer = Transfer(ledger_id=1, digest=digest, reads={bookie: [0]}, target=bookie)
            result = await client.transfer(transfer)
            assert result.entry_count == 0
            assert entry

    run_on(loop, run())
    text = str(found[0])
    assert PASSWORD not in text
    assert "PRIVATE" not in text
    return found[0]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param(
            {"bookie_password_file": "wrong"},
            "the bookie does not answer our credentials: check security.bookie_user, "
            "security.bookie_password_file",
            id="wrong password",
        ),
        pytest.param({"bookie_user": "other"}, "saslJaasClientAllowedIds", id="user not allowed"),
        pytest.param(
            {"ca_file": "other.pem"},
            r"not signed by a CA of security.ca_file \(.*other.pem\)",
            id="bookie's certificate not trusted",
        ),
        pytest.param(
            {"certificate_file": "expired-both.pem", "key_file": ""},
            r"TLS handshake.* security.certificate_file \(.*expired.* is valid",
            id="our certificate has expired",
        ),
        pytest.param(
            {"certificate_file": "stranger-both.pem", "key_file": ""},
            "signed by a CA that the server trusts",
            id="our certificate not trusted",
        ),
        pytest.param(
            {"certificate_file": "", "key_file": ""},
            "TLS handshake.*set security.certificate_file",
            id="no certificate",
        ),
    ],
)
def test_wrong_secrets_are_named(
    with_users: Bookies, loop: Loop, changes: dict[str, str], told: str
) -> None:
    secrets = with_users.secrets
    secrets.file("wrong", "no such password")
    secrets.authority.issue("expired", days=-1)
    Authority(secrets.folder, "other").issue("stranger")
    given = {**secrets.trust, **secrets.certificate, **secrets.bookie_login}
    for key, value in changes.items():
        given[key] = str(secrets.folder / value) if key.endswith("_file") and value else value

    error = failure(SecuritySettings(bookie_tls=True, **given), with_users.ids[0], loop)

    assert isinstance(error, SecureConnectionError)
    with pytest.raises(SecureConnectionError, match=told):
        raise error


@pytest.mark.parametrize("loop", LOOPS)
def test_a_certificate_for_another_host_is_refused(with_roles: Bookies, loop: Loop) -> None:
    secrets = with_roles.secrets
    settings = SecuritySettings(bookie_tls=True, **secrets.trust, **secrets.certificate)

    error = failure(settings, with_roles.ids[0], loop)

    assert "the certificate of the bookie does not name 127.0.0.1" in str(error)
    assert "security.verify_host_names" in str(error)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_certificate_without_a_role_is_refused(with_roles: Bookies, loop: Loop) -> None:
    secrets = with_roles.secrets
    nobody = secrets.authority.issue("nobody")
    settings = SecuritySettings(
        bookie_tls=True,
        verify_host_names=False,
        certificate_file=str(nobody.both),
        **secrets.trust,
    )

    error = failure(settings, with_roles.ids[0], loop)

    assert isinstance(error, AuthenticationRequiredError)
    assert "authorizedRoles" in str(error)


def test_clear_text_to_a_bookie_that_requires_tls_is_explained(with_roles: Bookies) -> None:
    error = failure(OPEN, with_roles.ids[0], asyncio.new_event_loop)

    assert isinstance(error, AuthenticationRequiredError)
    assert "security.bookie_tls" in str(error)


def test_tls_to_a_bookie_without_tls_does_not_fall_back(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    need_openssl()
    settings = SecuritySettings(bookie_tls=True, ca_file=str(Authority(tmp_path).certificate))

    error = failure(settings, cluster.bookies[0], asyncio.new_event_loop)

    assert isinstance(error, SecureConnectionError)
    assert "the bookie has no TLS" in str(error)


def test_a_bookie_without_authentication_accepts_a_user(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """As with Java's client: users can be set before bookies ask for them."""
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    settings = SecuritySettings(bookie_user="bookkeeper", bookie_password_file=str(password))

    async def run() -> None:
        async with opened(settings) as client:
            assert (await client.room(cluster.bookies[0])).total_bytes > 0

    asyncio.run(run())


@pytest.mark.parametrize("loop", LOOPS)
def test_renewed_files_are_used_without_a_restart(
    with_users: Bookies, tmp_path: Path, loop: Loop
) -> None:
    secrets = with_users.secrets
    password, certificate = tmp_path / "password", tmp_path / "certificate.pem"
    password.write_text("the old one")
    shutil.copy(secrets.authority.issue("old", days=-1).both, certificate)
    settings = SecuritySettings(
        bookie_tls=True,
        bookie_user="bookkeeper",
        bookie_password_file=str(password),
        certificate_file=str(certificate),
        **secrets.trust,
    )

    async def run() -> None:
        async with opened(settings) as client:
            with pytest.raises(SecureConnectionError):
                await client.room(with_users.ids[0])
            password.write_text(PASSWORD)
            shutil.copy(secrets.client.both, certificate)
            client.bookie_returned(with_users.ids[0])  # ends the pause after the failure
            assert (await client.room(with_users.ids[0])).total_bytes > 0

    run_on(loop, run())

"""A node, the commands and fsck on a cluster that is secured throughout.

ZooKeeper has TLS and SASL, bookies have TLS, SASL and ``zkEnableSecurity=true``.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kazoo.protocol.serialization import GetACL

from daemon.local.cluster import LocalCluster
from daemon.local.security import USER, Authority, Secrets
from ledgers.errors import NoNodeError
from ledgers.model import BookieId
from ledgers.security import SecuritySettings
from ledgers.store import MetadataStore
from ledgers.zookeeper.store import ZooKeeperStore
from tests.certificates import need_openssl
from tests.cluster.commands import bookmender
from tests.cluster.steps import (
    NONEXISTENT,
    WORKER_ONLY,
    bench,
    errors,
    events,
    nodes,
    shape,
    wait_for,
)
from tests.daemon.spark_homes import environment_without_spark
from tests.secured import as_environment
from tests.spark_cluster import SMALL, standalone_spark
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SESSION_TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """A cluster, and what a client needs there."""

    cluster: LocalCluster
    secrets: Secrets

    @property
    def uri(self) -> str:
        return self.cluster.metadata_service_uri

    @property
    def security(self) -> SecuritySettings:
        return self.cluster.security

    @property
    def variables(self) -> Mapping[str, str]:
        return as_environment(self.security)


@pytest.fixture(scope="module")
def secured(_prerequisites: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    need_openssl()
    with LocalCluster.start(
        tmp_path_factory.mktemp("secured"),
        bookies=4,
        session_timeout_s=SESSION_TIMEOUT_S,
        is_secured=True,
    ) as cluster:
        assert cluster.secrets is not None
        yield Secured(cluster=cluster, secrets=cluster.secrets)


async def _unregistered(cluster: LocalCluster, bookie: BookieId) -> None:
    await wait_for(
        lambda: bookie not in cluster.writable() | cluster.read_only(), "end of its session"
    )


async def _acls(store: MetadataStore, path: str) -> dict[str, Any]:
    """The ACLs of a znode and of all below it."""
    found: dict[str, Any] = {}
    assert isinstance(store, ZooKeeperStore)
    with suppress(NoNodeError):
        acls, _ = await store.outbox.ask(GetACL(path))
        found[path] = {(acl.perms, acl.id.scheme, acl.id.id) for acl in acls}
        for name in await store.children(path):
            found |= await _acls(store, f"{path}/{name}")
    return found


async def test_a_node_repairs_closed_and_open_ledgers(secured: Secured, tmp_path: Path) -> None:
    victim = secured.cluster.bookies[0]

    try:
        async with bench(secured.uri, security=secured.security) as on:
            written = await on.write(
                *(shape(number) for number in range(12)),
                shape(12, ending=Ending.ABANDONED),
                shape(13, entry_bytes=300_000),
            )
            at_risk = await on.names(written, victim)
            assert at_risk
            secured.cluster.kill(victim)
            await _unregistered(secured.cluster, victim)
            settings = {**secured.variables, "REPLICATION_OPEN_LEDGER_GRACE_S": "0"}
            async with nodes(secured.uri, tmp_path) as start:
                node = start("node", settings=settings)
                await on.wait_repaired(written, victim)
                assert errors(node) == []
                assert events(node, "acl.mismatched") == []
                # A quarantine without a reason means a late answer, here of a busy machine.
                assert not [e for e in events(node, "bookie.quarantined") if "reason" in e]
                acls = await _acls(on.seen.store, "/ledgers")
            await on.assert_whole([w for w in written if w.is_closed])

            # What the local cluster formatted, and what Java creates without access control.
            are_open = {
                *("/ledgers", "/ledgers/available", "/ledgers/available/readonly"),
                *("/ledgers/LAYOUT", "/ledgers/INSTANCEID"),
                "/ledgers/underreplication/lostBookieRecoveryDelay",
            }
            of_java = acls[f"/ledgers/cookies/{victim}"]
            assert of_java == {(31, "sasl", USER)}
            ours = {path for path in acls if path.startswith("/ledgers/underreplication/")}
            assert len(ours) > 10
            assert {path for path, acl in acls.items() if acl != of_java} == are_open
    finally:
        secured.cluster.start_bookies(
            [b for b in secured.cluster.bookies if secured.cluster.pid(b) is None]
        )
    log = (tmp_path / "node.log").read_text()
    assert secured.secrets.password.reveal() not in log
    assert "PRIVATE KEY" not in log


@pytest.mark.long(group="secured")
async def test_commands_are_secured_by_the_settings_file_of_the_cluster(secured: Secured) -> None:
    """The list of bookies with their disk space is answered by every bookie."""
    file = str(secured.cluster.settings_file)

    async def record(*arguments: str) -> Any:
        said = await bookmender(None, *arguments, "-o", "json", "-c", file)
        assert said.err == ""
        assert secured.secrets.password.reveal() not in said.out
        return said.record

    for command in ("status", "plan", "plan --all", "queue", "limits"):
        assert await record(*command.split()) is not None
    bookies = (await record("bookie", "list", "--space"))["bookies"]
    assert len(bookies) == len(secured.cluster.bookies)
    assert all(bookie["disk_space"] for bookie in bookies), bookies


@pytest.mark.long(group="secured")
async def test_a_repair_by_hand_copies_entries(secured: Secured, tmp_path: Path) -> None:
    async with bench(secured.uri, security=secured.security) as on:
        written = await on.write(shape(1))
        await on.lose(written)
        said = await bookmender(
            secured.uri,
            "repair",
            str(written[0].ledger_id),
            state=tmp_path,
            settings={**secured.variables, "REPLICATION_FREE_DISK_SHARE_MIN": "0"},
        )
        assert said.exit_code == 0, said
        await on.assert_whole(written)


@pytest.mark.long(group="secured")
def test_executors_of_a_spark_cluster_read_the_files_of_security_by_themselves(
    secured: Secured, tmp_path: Path
) -> None:
    """Nothing that Spark shows or writes has a secret: command lines and environments of executors,
    the event log, from which the pages of its UI are made, and the logs of its processes."""
    count = asyncio.run(_write_three(secured))
    output, folder, event_log = (tmp_path / name for name in ("output", "spark", "events"))
    for each in (folder, event_log):
        each.mkdir()
    logs = {"enabled": "true", "compress": "false", "dir": str(event_log)}
    shown: set[bytes] = set()

    with (
        standalone_spark(folder) as spark,
        fsck(
            secured,
            output,
            master=spark.master,
            **{f"spark.eventLog.{key}": value for key, value in logs.items()},
        ) as process,
    ):
        while process.poll() is None:
            for pid in _with_children(spark.executors()):
                shown |= _shown_of(pid)
            time.sleep(0.1)
        said, complaint = process.communicate()

    assert process.returncode == 0, complaint
    assert json.loads(said)["ledgers"] >= count, said
    assert shown, "no executor was seen"
    assert not any(secret in text for text in shown for secret in _secrets(secured))
    assert any(b"EnvironmentUpdate" in file.read_bytes() for file in _files(event_log))
    assert [
        path for each in (output, folder, event_log) for path in _secrets_in(each, secured)
    ] == []


DEFAULT_PASSWORD = "of ledgers without metadata"
"""``replication.default_password``, which the driver sends to the executors."""


def _secrets(secured: Secured) -> tuple[bytes, bytes]:
    return secured.secrets.password.reveal().encode(), DEFAULT_PASSWORD.encode()


async def _write_three(secured: Secured) -> int:
    async with bench(secured.uri, security=secured.security) as on:
        return len(await on.write(*(shape(number) for number in range(3))))


def fsck(secured: Secured, output: Path, *, master: str, **spark: str) -> "subprocess.Popen[str]":
    """Start a run."""
    settings = {**SMALL, **spark}
    variables = {**secured.variables, "REPLICATION_DEFAULT_PASSWORD": DEFAULT_PASSWORD}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "daemon", "fsck", "run", "-o", "json"),
            *("--output", str(output), "--level", "full", "--master", master),
            *(
                part
                for key, value in settings.items()
                for part in ("--spark-conf", f"{key}={value}")
            ),
        ],
        env={
            **environment_without_spark(),
            "BOOKMENDER_METADATA_SERVICE_URI": secured.uri,
            **{f"BOOKMENDER_{name}": value for name, value in variables.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _secrets_in(folder: Path, secured: Secured) -> list[Path]:
    """Return the files that contain a secret."""
    return [
        path
        for path in _files(folder)
        if any(secret in path.read_bytes() for secret in _secrets(secured))
    ]


def _with_children(pids: Sequence[int]) -> list[int]:
    """Return these processes and those that they started, such as an executor's Python workers."""
    found = list(pids)
    for pid in found:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _shown_of(pid: int) -> set[bytes]:
    """Return the command line and the environment of a process; nothing if it has ended."""
    with suppress(OSError):
        return {Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")}
    return set()


@pytest.mark.long(group="secured")
async def test_a_wrong_password_for_bookies_quarantines_them(
    secured: Secured, tmp_path: Path
) -> None:
    wrong = secured.secrets.file("wrong", "no such password")
    settings = replace(secured.security, bookie_password_file=str(wrong))
    variables = {**WORKER_ONLY, **as_environment(settings)}

    async with nodes(secured.uri, tmp_path) as start:
        node = start("node", settings=variables)
        await wait_for(
            lambda: len(events(node, "bookie.quarantined")) >= len(secured.cluster.bookies),
            "quarantine of all bookies",
        )
        for event in events(node, "bookie.quarantined"):
            assert "check security.bookie_user, security.bookie_password_file" in event["reason"]
    assert "no such password" not in (tmp_path / "node.log").read_text()


@pytest.mark.long(group="secured")
async def test_javas_worker_repairs_what_we_marked(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java may change and delete our znodes, and we may change and delete Java's."""
    flags = secured.secrets.jvm_flags("Client", "Auditor")
    monkeypatch.setenv("JDK_JAVA_OPTIONS", " ".join(flags))
    settings = {
        "zkEnableSecurity": "true",
        "clientAuthProviderFactoryClass": "org.apache.bookkeeper.sasl.SASLClientProviderFactory",
        "auditorPeriodicCheckInterval": "0",
    }

    async with bench(secured.uri, security=secured.security) as on:
        written = await on.write(*(shape(number) for number in range(3)))
        await on.lose(written)
        java = secured.cluster.start_autorecovery(settings=settings)
        try:
            await on.wait_repaired(written, NONEXISTENT)
        finally:
            await asyncio.to_thread(java.kill)
        await on.assert_whole(written)


@pytest.mark.long(group="secured")
async def test_a_node_warns_if_its_znodes_would_be_open_to_everybody(
    secured: Secured, tmp_path: Path
) -> None:
    settings = replace(secured.security, zookeeper_acl="open")
    variables = {**WORKER_ONLY, **as_environment(settings)}

    async with nodes(secured.uri, tmp_path) as start:
        node = start("node", settings=variables)
        first, *_ = await wait_for(lambda: events(node, "acl.mismatched"), "warning")
        assert 'set security.zookeeper_acl = "creator"' in first["next_step"]


@pytest.mark.long(group="secured")
def test_a_daemon_with_wrong_secrets_ends_and_says_why(secured: Secured, tmp_path: Path) -> None:
    wrong = str(secured.secrets.file("wrong", "no such password"))
    other = str(Authority(tmp_path, "other").certificate)
    for changed, told in (
        ({"zookeeper_password_file": wrong}, "check security.zookeeper_user"),
        ({"ca_file": other}, "ZooKeeper is not signed by a CA of security.ca_file"),
    ):
        paths: dict[str, Any] = changed
        settings = as_environment(replace(secured.security, **paths))

        said = asyncio.run(bookmender(secured.uri, "daemon", state=tmp_path, settings=settings))

        assert said.exit_code == 3
        assert told in said.err
        assert secured.secrets.password.reveal() not in said.out + said.err

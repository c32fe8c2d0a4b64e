"""``bookmender shell`` prints what Java's ``bookkeeper shell`` prints, on the same cluster."""

import asyncio
import re
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from daemon.java_settings import TRANSLATIONS
from daemon.local import jars
from daemon.local.cluster import LocalCluster
from ledgers.errors import NodeExistsError
from ledgers.model import BookieId
from replication.marks import prepare_tree
from replication.znodes import ClusterPaths, Mark, lock_to_bytes, mark_to_bytes, vote_to_bytes
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.conftest import MakeCluster
from tests.cluster.our_client import our_client
from tests.cluster.steps import bench, shape
from tests.java.shell import Shelled, java_shell

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="java"), pytest.mark.timeout(600)]
CLUSTER = {"bookies": 3}

GONE = BookieId("bookie-that-left:3181")
OTHER = BookieId("other:3181")
ON_TWO = (2, 2, 2)
MARKS = {3: (GONE, OTHER), 7: (GONE,), 9: ()}


@asynccontextmanager
async def queue_of_three(uri: str) -> AsyncIterator[ClusterPaths]:
    """Three marks, a lock, a vote and a recovery delay. They end with the context."""
    async with our_client(uri) as client:
        paths = ClusterPaths.below(client.uri.root)
        await prepare_tree(client.store, paths)
        znodes = {
            paths.mark(number): mark_to_bytes(Mark(replicas=replicas, ctime_ms=number))
            for number, replicas in MARKS.items()
        }
        znodes[paths.lock(7)] = lock_to_bytes("host-a")
        znodes[f"{paths.election}/V_0000000001"] = vote_to_bytes("127.0.0.1:3181")
        for path, data in znodes.items():
            await client.store.create(path, data, with_parents=True)
        try:
            await client.store.create(paths.recovery_delay, b"33")
        except NodeExistsError:
            await client.store.set(paths.recovery_delay, b"33", version=-1)
        try:
            yield paths
        finally:
            for path in znodes:
                await client.store.delete(path)


async def both(uri: str, *arguments: str) -> tuple[Shelled, Shelled]:
    """Return what ours and Java's print for the same arguments."""
    java = asyncio.create_task(asyncio.to_thread(java_shell, uri, *arguments))
    ours = await bookmender(uri, "shell", *arguments)
    return Shelled(exit_code=ours.exit_code, lines=ours.out.splitlines()), await java


def blocks(lines: list[str]) -> list[list[str]]:
    """Return the lines of each ledger, sorted, as Java lists the ledgers in random order. Each
    line that is not indented begins a block."""
    parts: list[list[str]] = []
    for line in lines:
        if line.startswith("\t") and parts:
            parts[-1].append(line)
        else:
            parts.append([line])
    return sorted(parts)


READING = [
    ["listunderreplicated"],
    ["listunderreplicated", "-printmissingreplica", "-printreplicationworkerid"],
    ["listunderreplicated", "-missingreplica", GONE, "-excludingmissingreplica", OTHER],
    ["listunderreplicated", "-mr", OTHER, "-c"],
    ["whoisauditor"],
    ["autorecovery"],
    ["lostbookierecoverydelay", "-get"],
]


@pytest.mark.usefixtures("module_cluster")
@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_the_same_lines_are_printed(uri: str, arguments: list[str]) -> None:
    async def compare() -> None:
        async with queue_of_three(uri):
            ours, java = await both(uri, *arguments)

        assert ours.exit_code == java.exit_code == 0
        assert blocks(ours.lines) == blocks(java.lines)

    asyncio.run(compare())


@pytest.mark.usefixtures("module_cluster")
def test_what_one_tool_changes_the_other_shows(uri: str) -> None:
    async def change() -> None:
        async with queue_of_three(uri):
            await bookmender(uri, "shell", "autorecovery", "-disable")
            await bookmender(uri, "shell", "lostbookierecoverydelay", "-set", "44")
            disabled = await asyncio.to_thread(java_shell, uri, "autorecovery")
            delay = await asyncio.to_thread(java_shell, uri, "lostbookierecoverydelay", "-get")
            await asyncio.to_thread(java_shell, uri, "autorecovery", "-enable")
            enabled = await bookmender(uri, "shell", "autorecovery")

        assert disabled.lines == ["Autorecovery is disabled."]
        assert delay.lines == ["LostBookieRecoveryDelay value in ZK: 44"]
        assert enabled.out == "Autorecovery is enabled.\n"

    asyncio.run(change())


def test_java_finds_nothing_left_after_a_recovery(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]

    async def recover() -> None:
        async with bench(uri) as on:
            written = await on.write(*(shape(number, quorums=ON_TWO) for number in range(4)))
            named = await on.names(written, victim)
            assert named
            await prepare_queue(uri)
            refused = await bookmender(uri, "shell", "recover", "-f", victim, state=tmp_path)
            kill_and_expire(module_cluster, victim)
            try:
                done = await bookmender(uri, "shell", "recover", "-f", victim, state=tmp_path)
                queried = await asyncio.to_thread(java_shell, uri, "recover", "-q", "-f", victim)
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)

        assert refused.exit_code == 1
        assert "is registered" in refused.err
        assert done.exit_code == 0, done.err
        assert [line for line in queried.lines if line.startswith("ledger ")] == []

    asyncio.run(recover())


async def prepare_queue(uri: str) -> None:
    """Create the trees of the queue, as the first node does."""
    async with our_client(uri) as client:
        await prepare_tree(client.store, ClusterPaths.below(client.uri.root))


def test_java_forgets_a_decommissioned_bookie(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(bookies=2)
    uri, victim = cluster.metadata_service_uri, cluster.bookies[0]

    async def decommission() -> None:
        await bookmender(uri, "shell", "lostbookierecoverydelay", "-set", "0")
        kill_and_expire(cluster, victim)
        done = await bookmender(uri, "shell", "decommissionbookie", "-bookieid", victim)
        known = await asyncio.to_thread(java_shell, uri, "listbookies", "-all")

        assert (done.exit_code, victim in done.out) == (0, True)
        assert len(known.lines) == 2
        assert victim not in " ".join(known.lines)

    asyncio.run(decommission())


def test_java_knows_each_setting_that_is_translated() -> None:
    """The settings of BookKeeper's own jar. Metrics have settings in other jars."""
    version = jars.BOOKKEEPER_DEFAULT
    with zipfile.ZipFile(jars.jars_folder(version) / f"bookkeeper-server-{version}.jar") as jar:
        classes = [
            name for name in jar.namelist() if re.search("/conf/|/net/|PlacementPolicy", name)
        ]
        strings = b"".join(jar.read(name) for name in classes if name.endswith(".class"))

    unknown = {name for name in TRANSLATIONS if name.encode() not in strings}

    assert unknown == {"prometheusStatsHttpPort"}

"""Java readers after a decommission (BookKeeper #4613): copies move, and their old bookies go."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import unused_port

from checkpoints.chain import RETENTION_DEFAULT_S
from daemon.local import jars
from daemon.local.cluster import LocalCluster
from daemon.local.java import Java
from daemon.operations.feed import disable_feed, enable_feed
from ledgers.clock import SystemClock
from tests.cluster.bookies_in_trouble import make_writable, terminate
from tests.cluster.commands import bookmender
from tests.cluster.steps import bench, errors, nodes, shape, wait_for
from tests.cluster.test_orders_drain import turn_read_only
from tests.java.build import NOTIFICATIONS, find_compiler
from tests.java.tool import JavaReader

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(480),
    pytest.mark.usefixtures("java"),
]
CLUSTER = {"bookies": 6}

NO_BOOKIE = "BKBookieHandleNotAvailableException"
CLOCK = SystemClock()


async def ask(url: str) -> str | None:
    """Return what the server says; None if it is not ready."""
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return await response.text() if response.status == 200 else None
    except aiohttp.ClientError:
        return None


@pytest.mark.long(group="feed")
@pytest.mark.parametrize("version", ["4.16.6", jars.BOOKKEEPER_DEFAULT])
def test_the_client_for_java_programs_is_java_11(version: str, tmp_path: Path) -> None:
    jars.fetch(version)
    command = [str(find_compiler(Java.find())), "--release", "11", "-proc:none", "-nowarn"]
    command += ["-cp", jars.bookkeeper_classpath(version), "-d", str(tmp_path), str(NOTIFICATIONS)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


async def test_a_java_reader_goes_on_when_all_its_bookies_are_gone(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    leaving, port = module_cluster.bookies[:3], unused_port()
    server = f"http://127.0.0.1:{port}"
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        node = start("node")
        await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)
        start("notify", command=("daemon", "notify", "serve"), settings={"NOTIFY_PORT": str(port)})
        await wait_for(lambda: ask(f"{server}/readyz"), "server of notifications")
        written = await on.write(*(shape(number, quorums=(2, 2, 2)) for number in range(40)))
        ids = [
            ledger.ledger_id
            for ledger in written
            if (await on.metadata(ledger)).bookies.issubset(leaving)
        ]
        assert ids
        with (
            await asyncio.to_thread(JavaReader, uri, ids, handles="plain") as plain,
            await asyncio.to_thread(
                JavaReader, uri, ids, handles="notified", notify_server=server
            ) as notified,
        ):
            before = await asyncio.to_thread(plain.read)
            assert [each.error for each in before] == [None] * len(ids)
            assert await asyncio.to_thread(notified.read) == before

            await turn_read_only(module_cluster, *leaving)
            said = await bookmender(uri, "bookie", "drain", *leaving, "--wait")
            assert said.exit_code == 0, said
            for bookie in leaving:
                await asyncio.to_thread(terminate, module_cluster, bookie)

            async def reads_all() -> bool:
                return await asyncio.to_thread(notified.read) == before

            await wait_for(reads_all, "notified reader that reads everything")
            after = await asyncio.to_thread(plain.read)
            assert [each.error for each in after] == [NO_BOOKIE] * len(ids)
            metrics = await ask(f"{server}/metrics")
            assert metrics is not None
            # The server has the registrations that the client counts in its heartbeats.
            assert "bookmender_notify_goodbyes_total{" not in metrics
        assert not errors(node)
        for bookie in leaving:
            await asyncio.to_thread(module_cluster.start_bookie, bookie)
        said = await bookmender(uri, "bookie", "drain", *leaving, "--cancel")
        assert said.exit_code == 0, said
        await disable_feed(on.seen, clock=CLOCK)
    for bookie in leaving:
        await asyncio.to_thread(make_writable, module_cluster, bookie)

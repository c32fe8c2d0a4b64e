"""Clients of real bookies: the leader sees their activity, and repairs continue."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.bulk.flow_control import Activity
from ledgers.clock import SystemClock
from ledgers.model import BookieId
from ledgers.writing import LedgerOptions, LedgerWriter
from replication.client_activity import read_activity
from tests.cluster.commands import bookmender
from tests.cluster.our_client import our_client
from tests.cluster.steps import AUDITOR_ONLY, WORKER_ONLY, Bench, bench, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="repair"), pytest.mark.timeout(360)]
CLUSTER = {"bookies": 4}

WIDE = LedgerOptions(ensemble_size=2, write_quorum=2, ack_quorum=2)


async def of(on: Bench, bookie: BookieId) -> Activity | None:
    said = await read_activity(on.seen.store, on.seen.paths, now_ms=SystemClock().wall_ms())
    return None if said is None else said.of(bookie)


async def wait_until(on: Bench, activity: Activity, *bookies: BookieId) -> None:
    async def is_so() -> bool:
        return all([await of(on, bookie) is activity for bookie in bookies])

    await wait_for(is_so, f"{', '.join(bookies)} {activity.value}")


@asynccontextmanager
async def adding(writer: LedgerWriter) -> AsyncIterator[None]:
    """Add one entry after the other, a hundred a second."""

    async def add() -> None:
        while True:
            await (await writer.send(b"entry"))
            await asyncio.sleep(0.01)

    task = asyncio.create_task(add())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_bookies_are_active_only_while_a_client_writes(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with (
        bench(uri) as on,
        nodes(uri, tmp_path) as start,
        our_client(uri) as client,
        client.create(WIDE) as writer,
    ):
        metadata = (await on.seen.manager.read(writer.ledger_id)).metadata
        members = metadata.segments[-1].ensemble
        others = set(module_cluster.bookies) - set(members)
        start("node", settings=AUDITOR_ONLY)

        await wait_until(on, Activity.QUIET, *module_cluster.bookies)
        async with adding(writer):
            await wait_until(on, Activity.ACTIVE, *members)
            await wait_until(on, Activity.QUIET, *others)
        await wait_until(on, Activity.QUIET, *members)


async def test_repairs_continue_beside_a_client_and_show_their_pace(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    wide = LedgerOptions(ensemble_size=4, write_quorum=2, ack_quorum=2)

    async with (
        bench(uri) as on,
        nodes(uri, tmp_path) as start,
        our_client(uri) as client,
        client.create(wide) as writer,
        adding(writer),
    ):
        written = await on.write(*[shape(number) for number in range(20)])
        start("leader", settings=AUDITOR_ONLY)
        await wait_until(on, Activity.ACTIVE, *module_cluster.bookies)
        await on.lose(written)
        said = json.loads((await bookmender(uri, "status", "-o", "json")).out)
        assert said["copying"]["speed"] == "yielding"
        assert set(said["copying"]["active_bookies"]) == set(module_cluster.bookies)

        start("worker", settings=WORKER_ONLY)
        await wait_for(on.is_idle, "repair beside a client")

        await on.assert_whole(written)

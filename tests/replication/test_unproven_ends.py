"""What is told of ledgers whose end cannot be proven, marked or not, and until when."""

import asyncio
import random

import pytest

from ledgers.model import LedgerState
from replication import ledger_record
from replication.ledger_record import (
    UnprovenEnd,
    read_unproven_end,
    unproven_among,
    unproven_ledger_ids,
)
from replication.worker import TIDY_INTERVAL_S
from tests.replication.cluster import Cluster, in_virtual_time, queue_empty, shut_out, until
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import THREE


async def unproven(cluster: Cluster) -> list[int]:
    return await unproven_ledger_ids(cluster.store, cluster.manager, PATHS)


async def recorded(cluster: Cluster) -> list[str]:
    return sorted(await cluster.store.children(PATHS.unproven_ends))


async def whole_but_unproven() -> Cluster:
    """B1 and B2 came back empty; nobody knows whether they had more of it than B3 has."""
    cluster = await Cluster.start()
    await cluster.write_ledger(
        THREE, last=-1, write_quorum=3, ack_quorum=2, state=LedgerState.IN_RECOVERY
    )
    for entry_id in range(4):
        cluster.put(LEDGER, entry_id, *THREE, lac=-1)
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)
    await cluster.mark()
    return cluster


async def write_ledgers(cluster: Cluster, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        await cluster.write_ledger(THREE, ledger_id=ledger_id, state=LedgerState.IN_RECOVERY)


async def close(cluster: Cluster, ledger_id: int = LEDGER) -> None:
    found = await cluster.manager.read(ledger_id)
    closed = found.metadata.closed(last_entry_id=3, length=40)
    await cluster.manager.write(ledger_id, closed, read_as=found)


@in_virtual_time
async def test_it_is_known_when_the_ledger_has_its_copies_and_its_mark_is_gone() -> None:
    cluster = await whole_but_unproven()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))
        await asyncio.sleep(2 * TIDY_INTERVAL_S)

    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    assert await unproven(cluster) == [LEDGER]
    end = await read_unproven_end(cluster.store, PATHS, LEDGER)
    assert end is not None
    assert "0 to 3 are left, and have their copies again" in end.detail
    assert end.detail.endswith(
        f"; bookmender ledger close {LEDGER} --accept-loss --yes closes it after the last entry that is there"
    ), "all its bookies are there"
    assert await unproven_among(cluster.store, cluster.manager, PATHS, {LEDGER, 99}) == [end]
    assert await unproven_among(cluster.store, cluster.manager, PATHS, {99}) == []


@in_virtual_time
async def test_once_somebody_closed_the_ledger_it_is_told_no_more_and_forgotten() -> None:
    cluster = await whole_but_unproven()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))
        await close(cluster)
        assert await unproven(cluster) == []
        assert await unproven_among(cluster.store, cluster.manager, PATHS, {LEDGER}) == []
        assert await recorded(cluster) == [str(LEDGER)]
        await asyncio.sleep(2 * TIDY_INTERVAL_S)

    assert await recorded(cluster) == []


@in_virtual_time
async def test_what_cannot_be_read_is_told_on_and_what_is_gone_is_not() -> None:
    cluster = await Cluster.start()
    await write_ledgers(cluster, 1, 2, 3)
    async with cluster.node() as node:
        for ledger_id in (1, 2, 3, 4):
            await node.ends.note(ledger_id, "why")
        await close(cluster, 1)
        await cluster.store.set(cluster.manager.path(2), b"nonsense", version=-1)
        shut_out(node.store, cluster.manager.path(3))

        await node.ends.tidy(random.Random(0))

    assert await recorded(cluster) == ["2", "3"]
    assert await unproven(cluster) == [2, 3]


@in_virtual_time
async def test_the_last_try_is_what_is_told_of() -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        await node.ends.note(LEDGER, "one is silent")
        await asyncio.sleep(60)
        await node.ends.note(LEDGER, "all denied it")

    assert await read_unproven_end(cluster.store, PATHS, LEDGER) == UnprovenEnd(
        ledger_id=LEDGER, detail="all denied it", tried_ms=cluster.clock.wall_ms()
    )


@in_virtual_time
async def test_of_very_many_some_are_looked_at_again_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_record, "READ_MAX", 2)
    cluster = await Cluster.start()
    async with cluster.node() as node:
        for ledger_id in range(4):  # of which there is none
            await node.ends.note(ledger_id, "why")
        assert await unproven(cluster) == [2, 3]

        await node.ends.tidy(random.Random(0))
        assert len(await recorded(cluster)) == 2
        await node.ends.tidy(random.Random(0))

    assert await unproven(cluster) == []


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"detail": 5}'])
@in_virtual_time
async def test_a_record_that_cannot_be_read_says_nothing(data: bytes) -> None:
    cluster = await Cluster.start()
    await cluster.store.create(PATHS.unproven_end(LEDGER), data, with_parents=True)

    assert await read_unproven_end(cluster.store, PATHS, LEDGER) is None

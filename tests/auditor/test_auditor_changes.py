"""Ledgers that are created or changed while bookies are lost: the auditor marks these and no
others."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from auditor.auditor import CHANGES_PAUSE_S, RETRY_S
from ledgers.errors import UnavailableError
from ledgers.model import BookieId, LedgerState, Segment
from tests.auditor.auditing import auditing
from tests.auditor.scenes import (
    SOON_S,
    marked_soon,
    replicas,
    with_ledgers,
)
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, ROOT


async def add_segment(
    cluster: Cluster, ledger_id: int, *ensemble: BookieId, first_entry_id: int
) -> None:
    """Append a segment, as a writer does that replaces a bookie and continues."""
    cluster.tree.watcher = lambda *_: None
    versioned = await cluster.manager.read(ledger_id)
    segment = Segment(first_entry_id=first_entry_id, ensemble=ensemble)
    segments = (*versioned.metadata.segments, segment)
    await cluster.manager.write(
        ledger_id, replace(versioned.metadata, segments=segments), read_as=versioned
    )


async def mark_version(cluster: Cluster, ledger_id: int) -> int:
    stat = await cluster.store.exists(PATHS.mark(ledger_id))
    assert stat is not None
    return stat.version


async def test_a_new_ledger_on_a_lost_bookie_is_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await cluster.write_ledger((B1, B3), ledger_id=7)
        assert await marked_soon(cluster) == [0, 7]
        assert await replicas(cluster, 7) == (B1,)


@pytest.mark.compat(
    "AuditorPeriodicBookieCheckTest.testPeriodicBookieCheckInterval",
    verdict="better",
    why="at once, when the ledger appears, instead of at the next periodic check",
)
async def test_a_new_ledger_that_names_an_unknown_bookie_is_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B2, BookieId("never-seen:3181")), ledger_id=7)

        assert await marked_soon(cluster) == [7]


async def test_a_marked_ledger_is_not_marked_again_when_it_grows(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await add_segment(cluster, 0, B3, B2, first_entry_id=10)
        await asyncio.sleep(SOON_S)
        assert await mark_version(cluster, 0) == 0


async def test_a_ledger_marked_at_creation_is_not_marked_again(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)
        assert await marked_soon(cluster) == [0]

        await add_segment(cluster, 0, B3, B2, first_entry_id=10)
        await asyncio.sleep(SOON_S)
        assert await mark_version(cluster, 0) == 0


async def test_a_failed_mark_of_a_new_ledger_is_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B2, B3))
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)

        async def fail(*_: object, **__: object) -> bool:
            raise UnavailableError("no answer")

        monkeypatch.setattr(leader.marker, "mark_stream", fail)
        await cluster.write_ledger((B1, B2), ledger_id=7)
        assert await marked_soon(cluster) == []
        monkeypatch.undo()

        await asyncio.sleep(RETRY_S)
        assert await cluster.marked() == [7]


async def test_partial_repairs_cost_the_leader_only_metadata_reads() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 50)
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1, B2)
        await asyncio.sleep(SOON_S)
        before = leader.store.request_count
        for ledger_id in range(50):  # each is repaired in part
            await add_segment(cluster, ledger_id, B4, B2, B3, first_entry_id=10)
        await asyncio.sleep(SOON_S)

        assert leader.store.request_count - before < 60


async def test_a_repaired_ledger_put_on_the_lost_bookie_is_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        cluster.tree.watcher = lambda *_: None
        for ensemble in ((B3, B2), (B1, B2)):
            await cluster.store.delete(PATHS.mark(0)) if B3 in ensemble else None
            versioned = await cluster.manager.read(0)
            (segment,) = versioned.metadata.segments
            segments = (replace(segment, ensemble=ensemble),)
            await cluster.manager.write(
                0, replace(versioned.metadata, segments=segments), read_as=versioned
            )
            await asyncio.sleep(SOON_S)

        assert await cluster.marked() == [0]


async def test_rule_s6_a_ledger_that_changes_under_a_mark_is_marked() -> None:
    """The new version of the mark tells the worker that has the lease."""
    cluster = await with_ledgers((B2, B3))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.mark(B1, ledger_id=7)  # by Java's auditor
        before = await mark_version(cluster, 7)

        await cluster.write_ledger((B1, B3), ledger_id=7)
        await asyncio.sleep(SOON_S)

        assert await mark_version(cluster, 7) == before + 1
        assert await replicas(cluster, 7) == (B1,)


async def test_changes_are_marked_once_marking_is_possible_again() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B3), ledger_id=7)
        await asyncio.sleep(10 * CHANGES_PAUSE_S)
        assert await cluster.marked() == [0]

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0, 7]


async def test_a_decommissioned_bookie_is_no_longer_lost() -> None:
    cluster = await with_ledgers((B2, B3))
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        assert leader.auditor.losses.lost_since_s.keys() == {B1}

        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await asyncio.sleep(SOON_S)

        assert leader.auditor.losses.lost_since_s == {}
        gauge = "bookmender_unregistered_bookies"
        assert REGISTRY.get_sample_value(gauge, {"state": "lost"}) == 0


async def test_a_bookie_without_cookie_is_lost_while_ledgers_name_it() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")  # decommissioned, too early
        assert await marked_soon(cluster) == [0]

        await cluster.manager.delete(0, version=0)
        await asyncio.sleep(SOON_S)
        assert leader.auditor.tracker.states.absent_since_s == {}

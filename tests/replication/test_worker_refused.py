"""The ReplicationWorker where ZooKeeper refuses a write: a quota is used up, or ACLs deny it."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from ledgers.errors import BookmenderError, QuotaError, UnauthorizedError
from ledgers.model import BookieId, LedgerState
from ledgers.store import Delete, Operation
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.reasons import Blocked, Facts, Reason
from replication.worker import TIDY_INTERVAL_S
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, queue_empty, until, with_lost_b2
from tests.replication.ledger_values import B1, B2, B3, B5
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.refusing import refuse, writes_below
from tests.replication.repairs import lost_b2, open_ledger

LEDGERS = 20
LOCKS_MAX = 5


async def test_a_quota_with_room_for_few_locks_slows_the_work_only() -> None:
    """Each completed ledger frees room: its mark and its lock are deleted."""
    cluster = await with_lost_b2(LEDGERS)
    async with cluster.node() as node:
        refuse_further_locks(node.store, cluster)
        async with working(node):
            await asyncio.sleep(600)

    assert await queue_empty(cluster)
    await cluster.assert_whole(*range(LEDGERS))


def refuse_further_locks(store: MemoryStore, cluster: Cluster) -> None:
    locks = PATHS.locks

    def is_refused(operation: Operation) -> bool:
        parent = cluster.tree.nodes.find(locks)
        held_count = 0 if parent is None else len(parent.names)
        return writes_below(locks)(operation) and held_count >= LOCKS_MAX

    refuse(store, is_refused, QuotaError)


@pytest.mark.parametrize("error", [QuotaError, UnauthorizedError])
async def test_a_note_that_cannot_be_written_stops_no_repair(
    error: type[BookmenderError],
) -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)
    async with cluster.node() as node:
        refuse(node.store, writes_below(PATHS.waiting), error)
        with capture_logs() as logs:
            async with working(node):
                await asyncio.sleep(120)

    assert (await cluster.metadata()).state is LedgerState.CLOSED
    assert await cluster.marked() == []
    assert [each["event"] for each in logs].count("notes.write_failed") == 1


async def test_without_a_note_the_ledger_is_not_tried_all_the_time() -> None:
    cluster = await Cluster.start(B1, B2, B3)  # no bookie can be a target
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B2)
    await cluster.kill(B2)
    async with cluster.node() as node:
        refuse(node.store, writes_below(PATHS.waiting), QuotaError)
        tries: list[int] = []
        repair = node.repairer.repair

        async def counted(*args: object, **options: object) -> object:
            tries.append(1)
            return await repair(*args, **options)  # type: ignore[arg-type]

        node.repairer.repair = counted  # type: ignore[method-assign, assignment]
        async with working(node):
            await asyncio.sleep(600)

    assert 1 < len(tries) < 20


@pytest.mark.parametrize("error", [QuotaError, UnauthorizedError])
async def test_refused_metadata_writes_are_noted_for_all_nodes(
    error: type[BookmenderError],
) -> None:
    """No other node copies in vain."""
    cluster = await lost_b2()
    metadata = cluster.manager.path(LEDGER)
    async with AsyncExitStack() as nodes:
        for name in ("one", "two", "three"):
            node = await nodes.enter_async_context(cluster.node(name))
            refuse(node.store, writes_below(metadata), error)
            await nodes.enter_async_context(working(node))
        await asyncio.sleep(3_600)
        (note,) = await WaitingNotes(cluster.store, PATHS).read_all([LEDGER])

    copies = [transfer for transfer, _ in cluster.bookies.transfers if transfer.target is not None]
    assert note.reason is Reason.WRITE_REFUSED
    assert note.reason.needs_help
    assert "refused" in note.blocked.facts.errors[0]
    assert 1 <= len(copies) < 10
    assert await cluster.marked() == [LEDGER]


async def test_once_the_write_is_allowed_the_ledger_is_repaired() -> None:
    cluster = await lost_b2()
    is_full = True
    metadata = cluster.manager.path(LEDGER)
    async with cluster.node() as node:
        refuse(
            node.store,
            lambda operation: is_full and writes_below(metadata)(operation),
            QuotaError,
        )
        async with working(node):
            await asyncio.sleep(60)
            assert await cluster.marked() == [LEDGER]
            is_full = False
            await cluster.unregister(B5)
            await cluster.register(B5)  # a better world: tried at once

            await until(cluster, lambda: queue_empty(cluster))
    await cluster.assert_whole()


async def test_a_recovery_that_may_not_write_its_end_is_noted_too() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)
    async with cluster.node() as node:
        refuse(node.store, writes_below(cluster.manager.path(LEDGER)), QuotaError)
        async with working(node):
            await asyncio.sleep(120)
        (note,) = await WaitingNotes(cluster.store, PATHS).read_all([LEDGER])

    assert note.reason is Reason.WRITE_REFUSED


@pytest.mark.parametrize("spare", [(), (B5,)], ids=["the lease is returned", "it is repaired"])
async def test_a_lock_that_may_not_be_deleted_does_not_end_the_session(
    spare: tuple[BookieId, ...],
) -> None:
    cluster = await Cluster.start(B1, B2, B3, *spare)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B2)
    await cluster.kill(B2)
    locks = PATHS.locks
    async with cluster.node() as node:
        refuse(
            node.store,
            lambda each: isinstance(each, Delete) and each.path.startswith(locks),
            UnauthorizedError,
        )
        with capture_logs() as logs:
            async with working(node):
                await asyncio.sleep(60)

        assert "lock.release_denied" in {each["event"] for each in logs}
        assert len(await cluster.locked()) == 1
        assert await cluster.marked() == ([] if spare else [LEDGER])


async def test_a_note_that_may_not_be_deleted_stops_no_other() -> None:
    cluster, gone = await Cluster.start(), 50
    async with cluster.node() as node:
        await node.notes.put(
            WaitingNote(
                ledger_id=gone, blocked=Blocked(reason=Reason.NO_COPY), node="node-0", since_ms=0
            )
        )
        await node.note_unproven(gone + 1, Facts(errors=("why",)))
        notes = PATHS.waiting
        refuse(
            node.store,
            lambda each: isinstance(each, Delete) and each.path == PATHS.waiting_note(gone),
            UnauthorizedError,
        )
        async with working(node):
            await asyncio.sleep(TIDY_INTERVAL_S + 5)

    assert await cluster.store.children(notes) == [str(gone)]

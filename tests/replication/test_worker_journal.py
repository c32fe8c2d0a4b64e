"""Ledgers deferred because a host cannot record metadata writes are tried soon after it can."""

import asyncio

from ledgers.errors import JournalError
from replication.backoff import PROBE_INTERVAL_S
from replication.ledger_record import WaitingNotes
from replication.reasons import Facts, Reason
from replication.settings import ReplicationSettings
from tests.replication.cluster import queue_empty, until, with_lost_b2
from tests.replication.nodes import PATHS, working

LEDGERS = 20
PATIENT = ReplicationSettings(retry_min_s=600, retry_max_s=600, idle_wait_s=0.5)


class Journal:
    """A journal that is full until a test changes that."""

    is_full = True
    asked_count = 0

    async def __call__(self, ledger_id: int, before: bytes, after: bytes) -> None:
        self.asked_count += 1
        if self.is_full:
            raise JournalError("/var/lib/x cannot be written to: free disk space there")


async def test_the_first_successful_try_brings_the_others_forward() -> None:
    cluster, journal = await with_lost_b2(LEDGERS), Journal()
    async with cluster.node(journal=journal, settings=PATIENT) as node, working(node):
        await asyncio.sleep(5)
        journal.is_full = False

        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < PROBE_INTERVAL_S + 5
    await cluster.assert_whole(*range(LEDGERS))


async def test_until_then_only_one_of_them_is_tried_at_times() -> None:
    """A try copies first, and in vain."""
    cluster, journal = await with_lost_b2(LEDGERS), Journal()
    async with cluster.node(journal=journal, settings=PATIENT) as node, working(node):
        await asyncio.sleep(5)
        first_count = journal.asked_count
        await asyncio.sleep(10 * PROBE_INTERVAL_S)

    assert first_count == LEDGERS
    assert 8 <= journal.asked_count - first_count <= 10


async def test_each_try_is_noted() -> None:
    cluster = await with_lost_b2(1)
    async with cluster.node(journal=Journal(), settings=PATIENT) as node, working(node):
        await asyncio.sleep(5)
        (first,) = await WaitingNotes(cluster.store, PATHS).read_all([0])
        await asyncio.sleep(PROBE_INTERVAL_S + 5)
        (second,) = await WaitingNotes(cluster.store, PATHS).read_all([0])

    assert (first.reason, second.reason) == (Reason.JOURNAL, Reason.JOURNAL)
    assert (first.tries, second.tries) == (1, 2)
    assert second.since_ms == first.since_ms
    assert second.next_try_ms > first.next_try_ms


async def test_a_note_that_only_keeps_an_unproven_end_hides_no_reason() -> None:
    cluster = await with_lost_b2(1)
    async with cluster.node(journal=Journal(), settings=PATIENT) as node:
        await node.note_unproven(0, Facts(errors=("why",)))
        await node.notes.let_go(0, guards=[])
        async with working(node):
            await asyncio.sleep(5)
        note = await node.notes.read(0)

    assert note is not None
    assert note.reason is Reason.JOURNAL
    assert note.unproven is not None

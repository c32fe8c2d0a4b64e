"""Reports of ledgers whose end cannot be proven, marked or not."""

import asyncio
from dataclasses import replace

import pytest

from ledgers.model import LedgerState
from ledgers.store import Stat
from replication import backoff, ledger_record
from replication.ledger_record import (
    UnprovenEnd,
    WaitingNote,
    read_unproven,
    read_unproven_end,
)
from replication.reasons import Blocked, Facts, Reason
from replication.worker import TIDY_INTERVAL_S
from tests.replication.cluster import Cluster, queue_empty, shut_out, until
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import THREE


async def unproven(cluster: Cluster) -> list[int]:
    ends = await read_unproven(cluster.store, cluster.manager, PATHS)
    return [end.ledger_id for end in ends]


async def recorded(cluster: Cluster) -> list[str]:
    return sorted(await cluster.store.children(PATHS.waiting))


async def whole_but_unproven() -> Cluster:
    """Return a ledger whose B1 and B2 returned reformatted: they may have had more entries than
    B3."""
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


async def test_it_is_recorded_when_the_ledger_is_whole_and_unmarked() -> None:
    cluster = await whole_but_unproven()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))
        await asyncio.sleep(2 * TIDY_INTERVAL_S)

    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    assert await unproven(cluster) == [LEDGER]
    end = (await read_unproven_end(cluster.store, PATHS, LEDGER)).value
    assert end is not None
    assert "0 to 3 remain" in end.facts.errors[0]
    assert end.facts.reformatted == (B1, B2)
    assert not end.facts.unresponsive, "all its bookies are there"
    assert await read_unproven(cluster.store, cluster.manager, PATHS, {LEDGER, 99}) == [end]
    assert await read_unproven(cluster.store, cluster.manager, PATHS, {99}) == []


async def test_a_closed_ledger_is_no_longer_reported() -> None:
    cluster = await whole_but_unproven()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))
        await close(cluster)
        assert await unproven(cluster) == []
        assert await read_unproven(cluster.store, cluster.manager, PATHS, {LEDGER}) == []
        assert await recorded(cluster) == [str(LEDGER)]
        await asyncio.sleep(2 * TIDY_INTERVAL_S)

    assert await recorded(cluster) == []


async def test_unreadable_ledgers_are_reported_but_deleted_ones_not(cluster: Cluster) -> None:
    await write_ledgers(cluster, 1, 2, 3)
    async with cluster.node() as node:
        for ledger_id in (1, 2, 3, 4):
            await node.note_unproven(ledger_id, Facts(errors=("why",)))
        await close(cluster, 1)
        await cluster.store.set(cluster.manager.path(2), b"nonsense", version=-1)
        shut_out(node.store, cluster.manager.path(3))

        await node.worker.waiting.tidy()

    assert await recorded(cluster) == ["2", "3"]
    assert await unproven(cluster) == [2, 3]


async def test_the_last_try_is_reported(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await node.note_unproven(LEDGER, Facts(errors=("one is silent",)))
        await asyncio.sleep(60)
        await node.note_unproven(LEDGER, Facts(errors=("all denied it",)))

    stored = await read_unproven_end(cluster.store, PATHS, LEDGER)
    assert stored.value == UnprovenEnd(
        ledger_id=LEDGER, facts=Facts(errors=("all denied it",)), tried_ms=cluster.clock.wall_ms()
    )


async def test_of_very_many_some_are_checked_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_record, "READ_MAX", 2)
    monkeypatch.setattr(backoff, "NOTES_TIDIED_MAX", 2)
    cluster = await Cluster.start()
    async with cluster.node() as node:
        for ledger_id in range(4):  # of which there is none
            await node.note_unproven(ledger_id, Facts(errors=("why",)))
        assert await unproven(cluster) == [2, 3]

        await node.worker.waiting.tidy()
        assert len(await recorded(cluster)) == 2
        await node.worker.waiting.tidy()

    assert await unproven(cluster) == []


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"facts": 5}'])
async def test_an_unreadable_record_counts_as_none(cluster: Cluster, data: bytes) -> None:
    await cluster.store.create(PATHS.waiting_note(LEDGER), data, with_parents=True)

    stored = await read_unproven_end(cluster.store, PATHS, LEDGER)
    assert stored.value is None
    assert stored.is_unreadable


async def test_no_other_note_and_no_release_loses_why_the_end_is_not_proven() -> None:
    cluster, facts = await Cluster.start(), Facts(errors=("why",))
    other = WaitingNote(
        ledger_id=LEDGER, blocked=Blocked(reason=Reason.NO_TARGET), node="host", since_ms=1
    )

    async def left(node: Node) -> tuple[Reason, Facts | None]:
        note = await node.notes.read(LEDGER)
        assert note is not None
        return note.reason, note.unproven.facts if note.unproven else None

    async with cluster.node() as node:
        await node.note_unproven(LEDGER, facts)
        written = await node.notes.put(other)  # by a worker that knows of no note
        assert await left(node) == (Reason.NO_TARGET, facts)

        await node.notes.put(replace(written, tries=2))
        assert await left(node) == (Reason.NO_TARGET, facts)

        await node.notes.let_go(LEDGER, guards=())
        assert await left(node) == (Reason.LEFT_TO_OTHERS, facts)
        note = await node.notes.read(LEDGER)
        assert note is not None
        assert note.is_released

        await node.notes.put(written)  # whose version is an old one
        await cluster.mark()
        lease = await node.lease()
        await node.queue.read_note(lease)
        assert await node.queue.complete(lease)
        assert await left(node) == (Reason.LEFT_TO_OTHERS, facts)

        await node.notes.let_go(LEDGER, guards=(), is_end_known=True)
        assert await node.notes.read(LEDGER) is None


async def test_a_known_note_is_written_again_and_deleted_without_reading_it(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = WaitingNote(
        ledger_id=LEDGER, blocked=Blocked(reason=Reason.NO_TARGET), node="host", since_ms=1
    )
    async with cluster.node() as node:
        get = node.store.get

        async def get_other(path: str) -> tuple[bytes, Stat]:
            assert path != PATHS.waiting_note(LEDGER)
            return await get(path)

        monkeypatch.setattr(node.store, "get", get_other)
        await cluster.mark()
        lease = await node.lease()
        for _ in range(3):
            await node.queue.write_note(lease, note)
        assert await node.queue.complete(lease)

    assert await recorded(cluster) == []

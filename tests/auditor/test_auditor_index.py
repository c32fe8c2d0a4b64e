"""The auditor and its index: a loss is answered from what is known, and followed from then on."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from auditor import marking
from auditor.auditor import CHANGES_PAUSE_S, RETRY_S
from auditor.losses import SLICE
from auditor.settings import AuditorSettings
from ledgers.errors import UnavailableError
from ledgers.memory.store import MemoryStore
from ledgers.metadata import BookieId, LedgerState, Segment
from ledgers.store import Create, Operation
from replication.queue import payloads
from tests.auditor.auditing import Leader, auditing, leading
from tests.auditor.scenes import SOON_S, delayed, marked_soon, replicas, with_ledgers
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import ROOT, UR

SPARES = [BookieId(f"spare-{number}:3181") for number in range(10)]


async def with_many_ledgers(count: int) -> Cluster:
    """On B1 and B2, in a cluster large enough that the loss of two bookies is an ordinary one."""
    cluster = await Cluster.start()
    for bookie in SPARES:
        await cluster.store.create(f"{ROOT}/cookies/{bookie}")
        await cluster.register(bookie)
    for ledger_id in range(count):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=-1)
    return cluster


async def add_segment(
    cluster: Cluster, ledger_id: int, *ensemble: BookieId, first_entry_id: int
) -> None:
    """As its writer does when it replaces a bookie; it goes on."""
    cluster.tree.watcher = lambda *_: None
    versioned = await cluster.manager.read(ledger_id)
    segment = Segment(first_entry_id=first_entry_id, ensemble=ensemble)
    segments = (*versioned.metadata.segments, segment)
    await cluster.manager.write(
        ledger_id, replace(versioned.metadata, segments=segments), read_as=versioned
    )


async def made(cluster: Cluster, ledger_id: int) -> int:
    """The transaction that made the mark."""
    stat = await cluster.store.exists(payloads.mark_path(UR, ledger_id))
    assert stat is not None
    return stat.czxid


async def mark_version(cluster: Cluster, ledger_id: int) -> int:
    stat = await cluster.store.exists(payloads.mark_path(UR, ledger_id))
    assert stat is not None
    return stat.version


# --- At once, whatever the index is doing ---------------------------------------------------------


@in_virtual_time
async def test_a_loss_is_answered_without_reading_any_metadata() -> None:
    cluster = await with_many_ledgers(300)
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        before = leader.store.request_count
        await cluster.kill(B1)

        assert await marked_soon(cluster) == list(range(300))
        assert leader.store.request_count - before < 100, "of which 12 and a few more are marks"


@in_virtual_time
async def test_the_first_marks_come_long_before_all_ledgers_are_looked_up() -> None:
    cluster = await with_many_ledgers(4 * SLICE)
    looked_up = 0
    looked_up_at_first_mark: list[int] = []
    async with leading(cluster) as leader:
        get = leader.keeper.index.get

        def counted(ledger_id: int) -> object:
            nonlocal looked_up
            looked_up += 1
            return get(ledger_id)

        leader.keeper.index.get = counted  # type: ignore[method-assign, assignment]

        def note(store: MemoryStore, operations: Sequence[Operation]) -> None:
            marks = payloads.marks_path(UR)
            if any(isinstance(each, Create) and each.path.startswith(marks) for each in operations):
                looked_up_at_first_mark.append(looked_up)

        cluster.tree.faults = note
        await cluster.kill(B1)
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(SOON_S)

        assert 0 < looked_up_at_first_mark[0] <= SLICE
        assert await cluster.marked() == list(range(4 * SLICE))
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


def hold_back(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The keeper's reads of metadata wait until the event is set."""
    is_released = asyncio.Event()
    read = leader.keeper._reader.read

    async def slowly(ledger_ids: Sequence[int]) -> Collection[int]:
        await is_released.wait()
        return await read(ledger_ids)

    monkeypatch.setattr(leader.keeper._reader, "read", slowly)
    return is_released


@in_virtual_time
async def test_a_loss_while_the_index_is_read_again_is_answered_at_once_and_completed_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        is_released = hold_back(leader, monkeypatch)
        await cluster.write_ledger((B1, B4), ledger_id=3)
        leader.keeper.rescan()
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0, 1]

        is_released.set()
        assert await marked_soon(cluster) == [0, 1, 3]


@in_virtual_time
async def test_a_loss_while_the_index_is_being_built_is_completed_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with leading(cluster) as leader:
        is_released = hold_back(leader, monkeypatch)
        auditor = asyncio.create_task(leader.auditor.run())
        await cluster.kill(B1)
        assert await marked_soon(cluster) == []

        is_released.set()
        assert await marked_soon(cluster) == [0, 1]
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


@in_virtual_time
async def test_a_bookie_that_came_back_empty_is_not_done_with_before_all_ledgers_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, "node-1", delayed(3600)):
        await asyncio.sleep(SOON_S)
    await cluster.kill(B1)
    await cluster.wipe(B1)
    await cluster.revive(B1)
    async with leading(cluster, "node-2", delayed(3600)) as leader:
        hold_back(leader, monkeypatch)
        auditor = asyncio.create_task(leader.auditor.run())
        assert await marked_soon(cluster) == []
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)

    async with auditing(cluster, "node-3", delayed(3600)):
        assert await marked_soon(cluster) == [0]


@asynccontextmanager
async def marking_slowly(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Leader]:
    """A leader that makes some 40 marks a second."""
    monkeypatch.setattr(marking, "MARKS_PER_MULTI", 1)
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        cluster.tree.latency = lambda: asyncio.sleep(0.05)
        yield leader
        cluster.tree.latency = lambda: asyncio.sleep(0)


@in_virtual_time
async def test_a_graver_loss_overtakes_one_whose_ledgers_are_still_being_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_many_ledgers(1000)
    await cluster.write_ledger((B4, B5), ledger_id=5000)
    async with marking_slowly(cluster, monkeypatch):
        await cluster.kill(B1)
        await asyncio.sleep(5)
        assert 0 < len(await cluster.marked()) < 500

        await cluster.kill(B4, B5)
        await asyncio.sleep(60)

    assert await cluster.marked() == [*range(1000), 5000]
    graver, last = [await made(cluster, ledger_id) for ledger_id in (5000, 999)]
    assert graver < last


@in_virtual_time
async def test_a_bookie_that_comes_back_while_its_ledgers_are_being_marked_ends_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_many_ledgers(1000)
    async with marking_slowly(cluster, monkeypatch):
        await cluster.kill(B1)
        await asyncio.sleep(5)
        await cluster.revive(B1)
        await asyncio.sleep(60)

    assert 0 < len(await cluster.marked()) < 500


# --- Ledgers that change or appear later ----------------------------------------------------------


@in_virtual_time
async def test_a_ledger_that_is_made_on_a_bookie_that_is_lost_already_is_marked() -> None:
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
    why="at once, when the ledger appears, and not at the next periodic check",
)
@in_virtual_time
async def test_a_ledger_that_names_a_bookie_nobody_ever_saw_is_marked_when_it_appears() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B2, BookieId("never-seen:3181")), ledger_id=7)

        assert await marked_soon(cluster) == [7]


@in_virtual_time
async def test_a_marked_ledger_whose_writer_goes_on_is_not_marked_again() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await add_segment(cluster, 0, B3, B2, first_entry_id=10)
        await asyncio.sleep(SOON_S)
        assert await mark_version(cluster, 0) == 0


@in_virtual_time
async def test_a_ledger_that_was_marked_when_it_appeared_is_not_marked_again_as_it_goes_on() -> (
    None
):
    cluster = await Cluster.start()
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B2), ledger_id=0, state=LedgerState.OPEN)
        assert await marked_soon(cluster) == [0]

        await add_segment(cluster, 0, B3, B2, first_entry_id=10)
        await asyncio.sleep(SOON_S)
        assert await mark_version(cluster, 0) == 0


@in_virtual_time
async def test_a_ledger_whose_mark_could_not_be_made_when_it_appeared_is_marked_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B2, B3))
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)

        async def fail(*_: object, **__: object) -> bool:
            raise UnavailableError("no answer")

        monkeypatch.setattr(leader.marker, "mark", fail)
        await cluster.write_ledger((B1, B2), ledger_id=7)
        assert await marked_soon(cluster) == []
        monkeypatch.undo()

        await asyncio.sleep(RETRY_S)
        assert await cluster.marked() == [7]


@in_virtual_time
async def test_repairs_of_marked_ledgers_make_the_leader_ask_for_nothing_but_their_metadata() -> (
    None
):
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


@in_virtual_time
async def test_a_ledger_that_is_repaired_and_then_put_on_the_lost_bookie_again_is_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        cluster.tree.watcher = lambda *_: None
        for ensemble in ((B3, B2), (B1, B2)):
            await cluster.store.delete(payloads.mark_path(UR, 0)) if B3 in ensemble else None
            versioned = await cluster.manager.read(0)
            (segment,) = versioned.metadata.segments
            segments = (replace(segment, ensemble=ensemble),)
            await cluster.manager.write(
                0, replace(versioned.metadata, segments=segments), read_as=versioned
            )
            await asyncio.sleep(SOON_S)

        assert await cluster.marked() == [0]


@in_virtual_time
async def test_rule_s6_a_ledger_that_changes_under_a_mark_is_marked_anew_for_who_has_it_in_hand() -> (
    None
):
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


@in_virtual_time
async def test_what_changes_while_a_mark_cannot_be_made_is_marked_afterwards() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.store.create(payloads.disable_path(UR))
        await asyncio.sleep(SOON_S)
        await cluster.write_ledger((B1, B3), ledger_id=7)
        await asyncio.sleep(10 * CHANGES_PAUSE_S)
        assert await cluster.marked() == [0]

        await cluster.store.delete(payloads.disable_path(UR))
        assert await marked_soon(cluster) == [0, 7]


@in_virtual_time
async def test_a_bookie_without_a_cookie_is_missed_as_long_as_a_ledger_names_it() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await cluster.kill(B1)
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")  # decommissioned, too early
        assert await marked_soon(cluster) == [0]

        await cluster.manager.delete(0, version=0)
        await asyncio.sleep(SOON_S)
        assert leader.auditor._absences.since_s == {}


# --- The bookie check -----------------------------------------------------------------------------


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testDelayedAuditWithPeriodicBookieCheck", verdict="same"
)
@in_virtual_time
async def test_a_periodic_check_does_not_shorten_the_recovery_delay() -> None:
    cluster = await with_ledgers((B1, B2))
    settings = AuditorSettings(bookie_check_interval_s=10, lost_bookie_recovery_delay_s=60)
    async with auditing(cluster, settings=settings):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)

        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [0]


@in_virtual_time
async def test_a_periodic_check_makes_marks_again_that_somebody_took_away() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=AuditorSettings(bookie_check_interval_s=100)):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        await cluster.store.delete(payloads.mark_path(UR, 0))

        await asyncio.sleep(100)
        assert await cluster.marked() == [0]


@in_virtual_time
async def test_a_rolling_restart_of_all_bookies_marks_nothing_whoever_leads() -> None:
    bookies = (B1, B2, B3, B4, B5)
    cluster = await with_ledgers((B1, B2), (B3, B4), (B5, B1))
    async with auditing(cluster, "node-1", settings=delayed(60)):
        for bookie in bookies[:3]:
            await cluster.kill(bookie)
            await asyncio.sleep(45)
            await cluster.revive(bookie)
            await asyncio.sleep(5)
        await cluster.kill(bookies[3])
        await asyncio.sleep(20)
    async with auditing(cluster, "node-2", settings=delayed(60)):
        await asyncio.sleep(20)
        await cluster.revive(bookies[3])
        await cluster.kill(bookies[4])
        await asyncio.sleep(45)
        await cluster.revive(bookies[4])
        await asyncio.sleep(200)

    assert await cluster.marked() == []

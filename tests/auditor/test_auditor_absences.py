"""The leader measures absences across changes of the leader, and rejects lists of bookies that
cannot be right.
"""

import asyncio
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from auditor.absence import COUNTS_WRITE_S, RETRY_S, WRITE_S
from auditor.backlog import UnavailableLedgers
from auditor.marker import Take
from auditor.records import UNSEEN_MAX_MS, StoredAbsences, read_absences
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from replication.orders import MaintenanceWindow, OrderStore, maintenance_znode
from tests.auditor.auditing import auditing
from tests.auditor.checking import HOURLY, HOURS, CountingCheck, checker, running
from tests.auditor.scenes import (
    DELAY,
    SOON_S,
    count_audits,
    delayed,
    marked_soon,
    set_delay,
    with_ledgers,
)
from tests.memory.store import Fault
from tests.metric_changes import changes, sample
from tests.replication.cluster import PAYLOAD_BYTES, Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS, ROOT

scene = partial(with_ledgers, (B1, B2))

ABSENCES = PATHS.absences


async def stored(cluster: Cluster) -> StoredAbsences:
    return await read_absences(cluster.store, PATHS)


# --- Over changes of leader -----------------------------------------------------------------------


async def test_each_bookies_own_delay_continues_under_another_leader() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster, "node-1", delayed(60)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.kill(B2)
        await asyncio.sleep(10)

    async with auditing(cluster, "node-2", delayed(60)):
        await asyncio.sleep(22)
        assert await cluster.marked() == [0]
        await asyncio.sleep(30)
        assert await cluster.marked() == [0, 1]


async def test_a_rolling_restart_of_all_bookies_marks_nothing() -> None:
    """The leader changes in the middle."""
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


async def test_the_delay_of_a_bookie_without_cookie_continues_too(cluster: Cluster) -> None:
    """Only ledgers name this bookie."""
    await cluster.store.delete(f"{ROOT}/cookies/{B1}")
    async with auditing(cluster, "node-1", delayed(60)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(30)

    async with auditing(cluster, "node-2", delayed(60)):  # which has yet to learn what ledgers name
        await asyncio.sleep(28)
        assert await cluster.marked() == []
        await asyncio.sleep(3)
        assert await cluster.marked() == [0]


async def test_the_absence_record_is_updated_and_renewed(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        assert await cluster.store.exists(ABSENCES) is None, "no bookie was absent yet"

        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        first = await stored(cluster)
        await asyncio.sleep(3 * WRITE_S)
        later = await stored(cluster)
        assert first.since_ms.keys() == later.since_ms.keys() == {B1}
        assert first.since_ms[B1] == pytest.approx(later.since_ms[B1], abs=2)
        assert later.seen_ms - first.seen_ms == pytest.approx(3000 * WRITE_S, abs=2000)

        await cluster.revive(B1)
        await asyncio.sleep(SOON_S)
        assert (await stored(cluster)).since_ms == {}
        before = leader.store.request_count
        await asyncio.sleep(3600)
        assert leader.store.request_count == before, "nothing to be renewed"


async def test_the_record_counts_the_ledgers_that_name_absent_bookies() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        first = await stored(cluster)
        await cluster.store.delete(cluster.manager.path(0))
        await asyncio.sleep(COUNTS_WRITE_S + SOON_S)
        second = await stored(cluster)

    assert (first.ledger_counts, first.are_counts_complete) == ({B1: 2}, True)
    assert (second.ledger_counts, second.are_counts_complete) == ({B1: 1}, True)
    assert second.since_ms[B1] == pytest.approx(first.since_ms[B1], abs=2)


async def test_an_absence_that_was_not_watched_for_long_starts_again(cluster: Cluster) -> None:
    async with auditing(cluster, "node-1", delayed(3600)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
    await asyncio.sleep(3600 + UNSEEN_MAX_MS / 1000)  # it may have come back and gone again

    async with auditing(cluster, "node-2", delayed(3600)):
        await asyncio.sleep(3590)
        assert await cluster.marked() == []
        await asyncio.sleep(20)
        assert await cluster.marked() == [0]


async def test_a_leader_that_found_the_record_keeps_writing_it(cluster: Cluster) -> None:
    for name in ("node-1", "node-2", "node-3"):
        async with auditing(cluster, name, delayed(2000)):
            await asyncio.sleep(SOON_S)
            if name == "node-1":
                await cluster.kill(B1)
            await asyncio.sleep(UNSEEN_MAX_MS / 1000 - 10)
            assert await cluster.marked() == []

    async with auditing(cluster, "node-4", delayed(2000)):
        await asyncio.sleep(2000 - 3 * (UNSEEN_MAX_MS / 1000 - 10) + 1)
        assert await cluster.marked() == [0]


async def test_the_record_stays_fresh_during_a_long_audit(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(30)) as leader:
        await asyncio.sleep(SOON_S)
        mark_stream = leader.marker.mark_stream

        async def mark_slowly(take: Take, **options: Any) -> int:
            await asyncio.sleep(3600)
            return await mark_stream(take, **options)

        leader.marker.mark_stream = mark_slowly  # type: ignore[method-assign]
        await cluster.kill(B1)
        await asyncio.sleep(30 + 2 * UNSEEN_MAX_MS / 1000)

        age_ms = cluster.clock.wall_ms() - (await stored(cluster)).seen_ms
        assert age_ms < 1000 * (WRITE_S + 1)


async def test_a_failed_write_of_the_record_needs_no_new_audit(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        audits = count_audits(leader)
        cluster.tree.faults = lambda store, operations: (
            Fault.LOST_REQUEST if any(each.path == ABSENCES for each in operations) else None
        )
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        assert (await stored(cluster)).since_ms == {}

        cluster.tree.faults = None
        await asyncio.sleep(RETRY_S)
        assert (await stored(cluster)).since_ms.keys() == {B1}
        assert audits == []


async def test_an_absence_is_recorded_from_the_end_of_maintenance_on(cluster: Cluster) -> None:
    """status shows from this record when the bookie becomes lost."""
    await cluster.kill(B1)
    await maintain(cluster, B1, for_s=3600)
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(10)
        assert (await stored(cluster)).since_ms == {}
        ended_ms = cluster.clock.wall_ms()
        await end_maintenance(cluster, B1)
        await asyncio.sleep(SOON_S)

        since_ms = (await stored(cluster)).since_ms

    assert since_ms.keys() == {B1}
    assert since_ms[B1] >= ended_ms


@pytest.mark.parametrize(
    ("znode", "source", "delay_s"),
    [
        pytest.param(None, "setting", 60, id="absent"),
        pytest.param(b"30", "lostBookieRecoveryDelay", 30, id="stored"),
        pytest.param(b"soon", "setting", 60, id="unreadable"),
    ],
)
async def test_a_new_leader_logs_its_delay_and_where_it_comes_from(
    cluster: Cluster, znode: bytes | None, source: str, delay_s: int
) -> None:
    if znode is not None:
        await cluster.store.create(DELAY, znode)
    with capture_logs() as logs:
        async with auditing(cluster, settings=delayed(60)):
            await asyncio.sleep(SOON_S)

    (line,) = [each for each in logs if each["event"] == "recovery_delay.read"]
    assert (line["source"], line["delay_s"]) == (source, delay_s)


@pytest.mark.compat("G29", verdict="better", why="the watch stays when the znode is deleted")
async def test_g29_a_deleted_and_recreated_delay_znode_is_obeyed(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await cluster.store.delete(DELAY)
        await asyncio.sleep(10)
        assert await cluster.marked() == [], "a deletion asks for nothing"

        await cluster.store.create(DELAY, b"3600")
        await asyncio.sleep(100)
        assert await cluster.marked() == []
        await set_delay(cluster, 0)
        assert await marked_soon(cluster) == [0]


@pytest.mark.parametrize("name", ["available", "available/readonly"])
async def test_rule_s8_a_failed_listing_of_bookies_marks_nothing(
    cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        children = leader.store.children

        async def break_off(path: str) -> list[str]:
            if path == f"{ROOT}/{name}":
                raise UnavailableError("the listing broke off")
            return await children(path)

        monkeypatch.setattr(leader.store, "children", break_off)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        assert await cluster.marked() == []

        monkeypatch.undo()
        await asyncio.sleep(2)
        assert await cluster.marked() == [0]


async def flap(cluster: Cluster) -> int:
    """Let ``B1`` disappear and return. Return the version of the mark as a worker has read it."""
    await asyncio.sleep(SOON_S)
    await cluster.kill(B1)
    assert await marked_soon(cluster) == [0]
    await cluster.revive(B1)
    await asyncio.sleep(SOON_S)
    return (await cluster.mark_stat(0)).version


async def test_marks_are_renewed_if_a_bookie_disappears_again(cluster: Cluster) -> None:
    """A worker that saw the bookie registered could otherwise delete the old mark (rule S6)."""
    async with auditing(cluster):
        before = await flap(cluster)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)

        assert (await cluster.mark_stat(0)).version == before + 1


async def test_a_new_leader_renews_marks_of_a_bookie_that_had_returned(cluster: Cluster) -> None:
    """It renews them once: the leader after it finds no return and leaves them alone."""
    async with auditing(cluster, "node-1"):
        before = await flap(cluster)
    await cluster.kill(B1)
    for name in ("node-2", "node-3"):
        async with auditing(cluster, name):
            await asyncio.sleep(SOON_S)

    assert (await cluster.mark_stat(0)).version == before + 1


# --- Bookies in maintenance are not lost before their window is over ------------------------------


async def maintain(cluster: Cluster, bookie: BookieId, *, for_s: float) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), maintenance_znode(PATHS, bookie)
    now_ms = cluster.clock.wall_ms()
    window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + int(for_s * 1000))
    await order_store.give(znode, window, over=await order_store.stored(znode))


async def end_maintenance(cluster: Cluster, bookie: BookieId) -> None:
    order_store, znode = OrderStore(cluster.store, PATHS), maintenance_znode(PATHS, bookie)
    stored = await order_store.stored(znode)
    assert stored is not None
    await order_store.withdraw(znode, over=stored)


async def test_a_bookie_back_within_its_window_marks_nothing(cluster: Cluster) -> None:
    async with auditing(cluster):
        await maintain(cluster, B1, for_s=100)
        await cluster.kill(B1)
        await asyncio.sleep(90)
        assert await cluster.marked() == []
        await cluster.revive(B1)
        await asyncio.sleep(100)

        assert await cluster.marked() == []


@pytest.mark.parametrize("delay_s", [0, 60], ids=["without a delay", "with a delay"])
async def test_a_bookie_is_lost_after_its_window_and_the_delay(delay_s: int) -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(delay_s)):
        await maintain(cluster, B1, for_s=100)
        await cluster.kill(B1)

        await asyncio.sleep(99 + delay_s)
        assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert await cluster.marked() == [0]


async def test_a_window_that_is_ended_or_shortened_no_longer_counts() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster):
        for bookie in (B1, B2):
            await maintain(cluster, bookie, for_s=1_000)
            await cluster.kill(bookie)
        assert await marked_soon(cluster) == []

        await end_maintenance(cluster, B1)
        assert await marked_soon(cluster) == [0]
        await maintain(cluster, B2, for_s=1)
        await asyncio.sleep(2)
        assert await cluster.marked() == [0, 1]


async def test_other_lost_bookies_are_marked_as_usual() -> None:
    """Their audit does not mark the bookie in maintenance."""
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster):
        await maintain(cluster, B1, for_s=1_000)
        await cluster.kill(B1, B2)

        assert await marked_soon(cluster) == [1]


async def test_an_audit_on_request_does_not_end_a_window(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(60)):
        await maintain(cluster, B1, for_s=1_000)
        await cluster.kill(B1)
        await asyncio.sleep(1)

        await set_delay(cluster, 60)

        assert await marked_soon(cluster) == []


async def test_a_window_survives_a_change_of_leader(cluster: Cluster) -> None:
    async with auditing(cluster):
        await maintain(cluster, B1, for_s=100)
        await cluster.kill(B1)
        await asyncio.sleep(10)

    async with auditing(cluster, "node-2"):
        await asyncio.sleep(80)
        assert await cluster.marked() == []
        await asyncio.sleep(11)
        assert await cluster.marked() == [0]


async def test_a_window_for_a_lost_bookie_deletes_no_mark(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await maintain(cluster, B1, for_s=100)

        assert await marked_soon(cluster) == [0]


async def test_ledgers_of_bookies_in_maintenance_are_counted() -> None:
    """The record does not name these bookies as absent."""
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster):
        for bookie in (B1, B4):
            await maintain(cluster, bookie, for_s=3600)
            await cluster.kill(bookie)
        await asyncio.sleep(COUNTS_WRITE_S + SOON_S)
        first = await read_absences(cluster.store, PATHS)
        await asyncio.sleep(WRITE_S)
        second = await read_absences(cluster.store, PATHS)

    assert (first.ledger_counts, first.are_counts_complete) == ({B1: 2, B4: 0}, True)
    assert first.since_ms == {}
    assert second.seen_ms > first.seen_ms, "so that readers know that it is not an earlier leader's"


async def test_the_record_names_unavailable_ledgers_soon() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B2), (B2, B3), (B3, B4))
    noted: list[UnavailableLedgers | None] = []
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        for bookie in (B1, B2, B3):
            await maintain(cluster, bookie, for_s=3600)
            await cluster.kill(bookie)
            await asyncio.sleep(SOON_S)
            noted.append((await read_absences(cluster.store, PATHS)).unavailable)
        await cluster.revive(B2)
        await asyncio.sleep(SOON_S)
        noted.append((await read_absences(cluster.store, PATHS)).unavailable)

    assert noted == [
        UnavailableLedgers(count=0),
        UnavailableLedgers(count=2, first=(0, 1), restored_by={B1: 2, B2: 2}),
        UnavailableLedgers(count=3, first=(0, 1, 2), restored_by={B1: 2, B2: 3, B3: 1}),
        UnavailableLedgers(count=0),
    ]


async def test_counts_of_an_empty_ledger_map_are_marked_as_incomplete() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    for bookie in (B1, B2):
        await maintain(cluster, bookie, for_s=3600)
        await cluster.kill(bookie)
    noted: set[int | None] = set()
    async with auditing(cluster):
        for _ in range(100):
            await asyncio.sleep(0.1)
            stored = await read_absences(cluster.store, PATHS)
            if stored.are_counts_complete:
                noted.add(None if stored.unavailable is None else stored.unavailable.count)

    assert noted - {None} == {1}
    assert stored.unavailable == UnavailableLedgers(count=1, first=(0,), restored_by={B1: 1, B2: 1})


# --- The metrics of audits, recovery delays, scans and runs of checks -----------------------------

DELAYS = ("recovery_delays_total", "event", "began", "expired", "cancelled")


async def test_recovery_delays_end_with_the_loss_or_with_the_return_of_the_bookie() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    delays = changes(*DELAYS)

    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await cluster.kill(B2)
        await asyncio.sleep(SOON_S)
        assert delays() == {"began": 2}
        await cluster.revive(B1)
        await asyncio.sleep(SOON_S)
        assert delays() == {"began": 2, "cancelled": 1}
        await asyncio.sleep(60)
        assert delays() == {"began": 2, "cancelled": 1, "expired": 1}


async def test_an_audit_counts_what_lacks_copies() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B1, B3))
    audits = changes("audit_seconds_count", "bookies", "lost", "none")
    found = "audit_underreplicated_ledgers"
    before = sample(f"{found}_sum"), sample("audit_underreplicated_bytes_sum")
    scans = sample("ledger_map_scan_seconds_count")

    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        assert set(audits()) == {"none"}
        assert sample(f"{found}_sum") == before[0]
        audit_count = sample(f"{found}_count")
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0, 2]

    audit_count = sample(f"{found}_count") - audit_count
    assert audits()["lost"] == audit_count == 1
    assert sample(f"{found}_sum") - before[0] == 2
    assert sample("audit_underreplicated_bytes_sum") - before[1] == 2 * 10 * PAYLOAD_BYTES
    assert sample("ledger_map_scan_seconds_count") > scans


async def test_the_duration_of_a_check_is_that_of_its_finished_runs() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 10)
    check = CountingCheck(part_size=2, part_s=10)
    counts = changes("check_run_seconds_count", "check", HOURLY.name)
    sums = changes("check_run_seconds_sum", "check", HOURLY.name)

    async def is_finished() -> bool:
        return check.finished_count == 1

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(25)
        assert counts() == {}
        await until(cluster, is_finished)
        await asyncio.sleep(1)

    assert counts() == {HOURLY.name: 1}
    assert 49 <= sums()[HOURLY.name] <= 51

"""What leader and workers record, seen from another session, and what the leader deletes."""

import asyncio
from collections.abc import Sequence

import pytest

from auditor.history_cleaner import CLEAN_S, KEPT_MS, SEGMENTS_MAX, HistoryCleaner, outdated
from auditor.mark_reasons import LossKind, LossRecord, loss_events
from auditor.settings import ChecksSettings, HoldSettings
from daemon.operations.holds import begin_hold, end_hold
from daemon.operations.maintenance import open_window
from ledgers.model import LedgerState
from ledgers.store import Stat
from replication.history import Cause, Event, Kind, NodeEvent, read_history, record_order
from replication.znodes import Mark, mark_to_bytes
from tests.auditor.auditing import auditing, leading
from tests.auditor.checking import checker, running
from tests.auditor.drains import own_marks
from tests.auditor.scenes import delayed, with_ledgers
from tests.daemon.visits import order_drain, visiting
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import PATHS, working


async def told(cluster: Cluster) -> list[NodeEvent]:
    return list((await read_history(cluster.store, PATHS)).events)


def kinds(events: Sequence[NodeEvent]) -> list[str]:
    return [noted.event.kind for noted in events]


async def test_loss_repair_recovery_and_return_are_told_in_order() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    await cluster.write_ledger((B1, B2, B3), ledger_id=9, state=LedgerState.OPEN, ack_quorum=2)
    async with auditing(cluster, "leader"), cluster.node("worker") as node, working(node):
        await asyncio.sleep(1)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        await cluster.revive(B1)
        await asyncio.sleep(100)

    events = await told(cluster)

    assert [(noted.node, noted.event.kind) for noted in events] == [
        ("leader", Kind.BOOKIE_LOST),
        ("leader", Kind.LEDGERS_MARKED),
        ("worker", Kind.LEDGERS_REPAIRED),
        ("worker", Kind.LEDGER_FENCED),
        ("worker", Kind.LEDGER_RECOVERED),
        ("leader", Kind.BOOKIE_RETURNED),
    ]
    marked = next(each.event for each in events if each.event.kind == Kind.LEDGERS_MARKED)
    assert (marked.bookies, marked.cause, marked.ledger_count) == ((B1,), "lost", 3)
    repaired = [each.event for each in events if each.event.kind == Kind.LEDGERS_REPAIRED]
    assert sum(event.ledger_count for event in repaired) == 3
    assert sum(event.entry_bytes for event in repaired) > 0
    assert {(e.cause, e.bookies) for e in repaired} == {(Cause.LOST, (B1,))}
    fenced = next(each.event for each in events if each.event.kind == Kind.LEDGER_FENCED)
    assert (fenced.ledger_id, fenced.cause, fenced.bookies) == (9, Cause.LOST, (B1,))
    recovered = next(each.event for each in events if each.event.kind == Kind.LEDGER_RECOVERED)
    assert recovered.last_entry_id == (await cluster.metadata(9)).last_entry_id


async def test_another_leader_repeats_no_loss_and_tells_the_return() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, "first"):
        await cluster.kill(B1)
        await asyncio.sleep(10)
    async with auditing(cluster, "second"):
        await asyncio.sleep(10)
        await cluster.revive(B1)
        await asyncio.sleep(10)

    losses = {Kind.BOOKIE_LOST, Kind.BOOKIE_RETURNED}
    assert [(e.node, e.event.kind) for e in await told(cluster) if e.event.kind in losses] == [
        ("first", Kind.BOOKIE_LOST),
        ("second", Kind.BOOKIE_RETURNED),
    ]


async def test_a_lost_bookie_in_maintenance_has_not_returned() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(10)
        await open_window(
            visiting(cluster), B1, duration_s=600, reason="a new disk", clock=cluster.clock
        )
        await asyncio.sleep(10)

    events = await told(cluster)
    by_kind = {noted.event.kind: noted.event for noted in events}
    assert kinds(events)[:2] == [Kind.BOOKIE_LOST, Kind.LEDGERS_MARKED]
    assert by_kind[Kind.LOSS_ENDED].bookies == (B1,)
    assert by_kind[Kind.ORDER].reason == "a new disk"


async def test_marks_of_a_drain_are_told() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with leading(cluster) as leader:
        running = asyncio.create_task(leader.drainer.run())
        await order_drain(cluster, B1)
        await asyncio.sleep(10)
        assert await own_marks(cluster) == [0, 1]
        running.cancel()

    by_kind = {noted.event.kind: noted.event for noted in await told(cluster)}
    order, marked = by_kind[Kind.ORDER], by_kind[Kind.LEDGERS_MARKED]
    assert (order.order, order.bookies) == ("bookie drain", (B1,))
    assert (marked.cause, marked.bookies, marked.ledger_count) == ("drained", (B1,), 2)


async def test_repairs_of_a_drain_a_return_and_a_deletion_are_told_apart() -> None:
    cluster = await with_ledgers((B1, B3), (B1, B3), (B2, B3))
    await cluster.kill(B2)
    await cluster.mark(B2, ledger_id=2)
    await cluster.revive(B2)
    async with leading(cluster) as leader, cluster.node("worker") as node, working(node):
        running = asyncio.create_task(leader.drainer.run())
        await order_drain(cluster, B1)
        await cluster.mark(B3, ledger_id=99)  # there is no such ledger
        await asyncio.sleep(100)
        running.cancel()

    repaired = [e.event for e in await told(cluster) if e.event.kind == Kind.LEDGERS_REPAIRED]
    assert {(e.cause, e.bookies, e.ledger_count) for e in repaired} == {
        (Cause.DRAINED, (B1,), 2),
        (Cause.RETURNED, (B2,), 1),
        (Cause.DELETED, (), 1),
    }


async def test_a_mark_that_outlived_its_drain_is_told_as_cancelled() -> None:
    cluster = await with_ledgers((B1, B2))
    mark = mark_to_bytes(Mark(replicas=(B1,)))
    await cluster.store.create(PATHS.private.mark(0), mark, with_parents=True)
    async with cluster.node("worker") as node, working(node):
        await asyncio.sleep(100)

    (event,) = [noted.event for noted in await told(cluster)]
    assert (event.cause, event.bookies, event.entry_count) == (Cause.CANCELLED, (B1,), 0)


async def test_a_recovery_that_fails_is_told_once(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), ledger_id=9, state=LedgerState.OPEN)
    async with auditing(cluster), cluster.node("worker") as node, working(node):
        await cluster.kill(B1)
        await asyncio.sleep(1_000)
        await cluster.revive(B1)
        await asyncio.sleep(1_000)

    about = [noted for noted in await told(cluster) if noted.event.ledger_id == 9]
    assert kinds(about) == [Kind.LEDGER_FENCED, Kind.RECOVERY_UNFINISHED, Kind.LEDGER_RECOVERED]
    assert "too few bookies" in about[1].event.reason


async def test_findings_and_the_end_of_a_check_are_told() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    cluster.bookie(B1).lose(0, 0)
    async with checker(cluster, settings=ChecksSettings(replicas_interval_s=3_600)) as made:
        made.runs(made.replicas)
        async with running(made):
            await asyncio.sleep(60)

    finding, finished = made.history.events
    assert (finding.kind, finding.ledger_id, finding.bookies) == (Kind.FINDING, 0, (B1,))
    assert (finding.cause, bool(finding.reason)) == ("replicas", True)
    assert (finished.kind, finished.cause) == (Kind.CHECK_FINISHED, "replicas")
    assert (finished.ledger_count, finished.counts["marked"]) == (2, 1)


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        pytest.param("return", "returned", id="the bookies return"),
        pytest.param("wait", "time", id="its time is over"),
        pytest.param("order", "order", id="an operator ends it"),
    ],
)
async def test_a_hold_is_told_with_its_reason_and_its_end(ending: str, cause: str) -> None:
    cluster = await with_ledgers(*zip(BOOKIES, (*BOOKIES[1:], BOOKIES[0]), strict=True))
    failed = (B1, B2, B3)
    async with auditing(cluster, settings=delayed(1), hold=HoldSettings(lasts_s=60)):
        await cluster.kill(*failed)
        await asyncio.sleep(10)
        match ending:
            case "return":
                for bookie in failed:
                    await cluster.revive(bookie)
            case "order":
                assert await end_hold(visiting(cluster), failed, clock=cluster.clock)
        await asyncio.sleep(100)

    holds = (Kind.HOLD_BEGAN, Kind.HOLD_ENDED)
    began, ended = [e.event for e in await told(cluster) if e.event.kind in holds]
    assert began.bookies == failed
    assert "3 of 7 bookies disappeared" in began.reason
    assert ended.cause == cause


async def test_the_beginning_of_an_operators_hold_is_the_order() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await begin_hold(visiting(cluster), duration_s=60, reason="network", clock=cluster.clock)
        await asyncio.sleep(100)

    events = await told(cluster)
    assert kinds(events) == [Kind.ORDER, Kind.HOLD_ENDED]
    assert (events[0].event.reason, events[1].event.cause) == ("network", "time")


LOST = LossRecord(kind=LossKind.LOST, since_ms=1)
ENDED = LossRecord(kind=LossKind.LOST, since_ms=1, ended_ms=2)
REFORMATTED = LossRecord(kind=LossKind.REFORMATTED, since_ms=3)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param(None, LOST, Kind.BOOKIE_LOST, id="lost"),
        pytest.param(LOST, LOST, None, id="still lost"),
        pytest.param(LOST, ENDED, Kind.BOOKIE_RETURNED, id="returned"),
        pytest.param(ENDED, ENDED, None, id="returned before"),
        pytest.param(ENDED, LOST, Kind.BOOKIE_LOST, id="lost again"),
        pytest.param(LOST, REFORMATTED, Kind.BOOKIE_REFORMATTED, id="back with new disks"),
        pytest.param(None, ENDED, None, id="never seen while it was lost"),
    ],
)
def test_changes_of_losses_are_events(
    before: LossRecord | None, after: LossRecord, kind: Kind | None
) -> None:
    known = {} if before is None else {B1: before}

    events = loss_events(known, {B1: after}, registered=[B1])

    assert [event.kind for event in events] == ([] if kind is None else [kind])


NOW_MS = 10 * KEPT_MS


def test_of_too_many_segments_the_oldest_are_outdated() -> None:
    segments = {
        f"s-{age}": Stat(version=1, mtime_ms=NOW_MS - age) for age in range(SEGMENTS_MAX + 2)
    }

    assert outdated(segments, now_ms=NOW_MS) == [f"s-{SEGMENTS_MAX + 1}", f"s-{SEGMENTS_MAX}"]


async def test_the_leader_deletes_old_segments_of_ended_sessions(cluster: Cluster) -> None:
    event = Event(kind=Kind.ORDER, order="enable")
    await record_order(cluster.store, PATHS, node="old", events=[event])
    await asyncio.sleep(KEPT_MS / 1000)
    await record_order(cluster.store, PATHS, node="new", events=[event])
    async with leading(cluster) as leader:
        cleaner = HistoryCleaner(leader.store, leader.batcher, PATHS, cluster.clock)
        running = asyncio.create_task(cleaner.run())
        await asyncio.sleep(CLEAN_S + 1)
        running.cancel()

    assert [noted.node for noted in await told(cluster)] == ["new"]

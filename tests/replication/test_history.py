"""The history: what is kept of many events, how it is written, and how it is read."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from ledgers.errors import UnauthorizedError
from ledgers.model import BookieId
from ledgers.store import Operation
from replication.history import (
    BOOKIES_MAX,
    LEDGERS_TOLD_MAX,
    RETRY_S,
    SEGMENT_FULL_BYTES,
    SEGMENTS_KEPT,
    SUM_PAUSE_MS,
    SUM_WRITE_S,
    WRITE_S,
    Cause,
    CausedBy,
    Event,
    HistoryWriter,
    Kind,
    Segment,
    SegmentBuffer,
    cause_at,
    order_events,
    read_history,
    record_order,
)
from replication.znodes import ACL_HINT
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, working
from tests.replication.refusing import refuse, writes_below

START_MS = 1_700_000_000_000


def repaired(count: int, *, after_s: float = 0) -> Event:
    at_ms = START_MS + int(after_s * 1000)
    return Event(kind=Kind.LEDGERS_REPAIRED, at_ms=at_ms, ledger_count=count, entry_count=2 * count)


def recovered(ledger_id: int) -> Event:
    return Event(kind=Kind.LEDGER_RECOVERED, at_ms=START_MS, ledger_id=ledger_id, last_entry_id=9)


def told(events: Sequence[Event]) -> list[tuple[str, int]]:
    return [(event.kind, event.ledger_count or event.event_count) for event in events]


# --- What is kept of many events ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second_s", "counts"),
    [
        pytest.param(1, [3], id="soon after: one sum"),
        pytest.param(SUM_PAUSE_MS / 1000 - 0.001, [3], id="after a short pause"),
        pytest.param(SUM_PAUSE_MS / 1000, [1, 2], id="after a long pause: another sum"),
    ],
)
def test_repairs_are_summed_up(second_s: float, counts: list[int]) -> None:
    buffer = SegmentBuffer()

    buffer.add(repaired(1))
    buffer.add(repaired(2, after_s=second_s))

    events = buffer.events
    assert [event.ledger_count for event in events] == counts
    assert events[0].at_ms == START_MS
    assert events[-1].until_ms == START_MS + int(second_s * 1000)


def test_a_sum_that_always_grows_ends_too() -> None:
    buffer = SegmentBuffer()

    for half_minute in range(21):
        buffer.add(repaired(1, after_s=30 * half_minute))

    assert [event.ledger_count for event in buffer.events] == [20, 1]


def test_repairs_are_summed_up_by_cause_and_name_all_bookies() -> None:
    buffer = SegmentBuffer()

    for cause, bookie in ((Cause.LOST, B1), (Cause.DRAINED, B1), (Cause.LOST, B2)):
        buffer.add(replace(repaired(1), cause=cause, bookies=(bookie,)))

    found = [(e.cause, e.bookies, e.ledger_count) for e in buffer.events]
    assert found == [(Cause.LOST, (B1, B2), 2), (Cause.DRAINED, (B1,), 1)]


def test_repairs_for_very_many_bookies_stay_within_the_bounds() -> None:
    buffer = SegmentBuffer()

    for number in range(1_000):
        bookie = BookieId(f"10.0.0.{number}:3181")
        buffer.add(replace(repaired(1), cause=Cause.LOST, bookies=(bookie,)))

    (event,) = buffer.events
    assert (len(event.bookies), event.ledger_count) == (BOOKIES_MAX, 1_000)


ALL = frozenset({B1, B2, B3})
NONE: frozenset[BookieId] = frozenset()


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        pytest.param({}, None, id="all copies are there"),
        pytest.param(
            {"registered": ALL - {B1}, "draining": {B2}},
            CausedBy(Cause.LOST, (B1,)),
            id="a lost bookie matters more than a draining one",
        ),
        pytest.param(
            {"reformatted": {B1, B2}}, CausedBy(Cause.REFORMATTED, (B1, B2)), id="reformatted"
        ),
        pytest.param(
            {"found_bad": {B2}, "draining": {B2}},
            CausedBy(Cause.FOUND, (B2,)),
            id="damaged copies on a draining bookie",
        ),
        pytest.param({"draining": {B2, B3}}, CausedBy(Cause.DRAINED, (B2,)), id="drained"),
    ],
)
def test_the_gravest_cause_is_told(facts: dict[str, Any], cause: CausedBy | None) -> None:
    known = {"registered": ALL, "reformatted": NONE, "draining": NONE, "found_bad": NONE}

    assert cause_at(frozenset({B1, B2}), **known | facts) == cause


def test_events_beyond_the_bound_are_counted() -> None:
    buffer = SegmentBuffer()

    for ledger_id in range(100_000):
        buffer.add(recovered(ledger_id))
    buffer.add(Event(kind=Kind.LEADER_ELECTED, at_ms=START_MS))

    events = buffer.events
    assert len(Segment(node="a", events=events).to_json()) < 64 * 1024
    kept = sum(event.kind == Kind.LEDGER_RECOVERED for event in events)
    assert told(events[kept:]) == [(Kind.LEADER_ELECTED, 0), (Kind.NOT_RECORDED, 100_000 - kept)]


def test_nothing_grows_while_no_write_succeeds() -> None:
    buffer = SegmentBuffer()

    for hour in range(10_000):  # each begins another sum while there is room
        buffer.add(repaired(1, after_s=3600 * hour))

    events = buffer.events
    assert sum(event.ledger_count for event in events) == 10_000
    assert len(Segment(node="a", events=events).to_json()) < 64 * 1024


def test_long_texts_and_lists_are_cut() -> None:
    bookies = tuple(BookieId(f"b-{number}:3181") for number in range(1_000))
    buffer = SegmentBuffer()

    buffer.add(Event(kind=Kind.HOLD_BEGAN, bookies=bookies, reason="x" * 100_000))

    assert len(Segment(node="a", events=buffer.events).to_json()) < 2_000


@pytest.mark.parametrize(
    ("count", "event_count"),
    [
        pytest.param(0, 1, id="about no ledger"),
        pytest.param(LEDGERS_TOLD_MAX, LEDGERS_TOLD_MAX, id="an event for each"),
        pytest.param(LEDGERS_TOLD_MAX + 1, 1, id="only their number"),
    ],
)
def test_an_order_names_its_ledgers_if_they_are_few(count: int, event_count: int) -> None:
    events = order_events(Event(kind=Kind.ORDER, order="repair"), range(count))

    assert len(events) == event_count
    assert sum(e.ledger_count or (e.ledger_id is not None) for e in events) == count


# --- Writing --------------------------------------------------------------------------------------


@asynccontextmanager
async def writing(cluster: Cluster, name: str = "node-1") -> AsyncIterator[HistoryWriter]:
    async with cluster.node(name) as node:
        yield node.history


async def recorded(cluster: Cluster) -> list[tuple[str, int]]:
    return told([noted.event for noted in (await read_history(cluster.store, PATHS)).events])


def writes_of(cluster: Cluster) -> list[int]:
    """Collect the sizes of all requests that write to the history from now on."""
    sizes: list[int] = []

    def count(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        if any(each.path.startswith(f"{PATHS.history}/") for each in operations):
            sizes.append(len(operations))
        return None

    cluster.tree.faults = count
    return sizes


async def test_many_events_are_one_write_a_few_seconds_later(cluster: Cluster) -> None:
    async with writing(cluster) as history:
        writes = writes_of(cluster)
        for ledger_id in range(50):
            history.record(recovered(ledger_id))
        history.record(repaired(50))

        await asyncio.sleep(WRITE_S - 0.1)
        assert await recorded(cluster) == []
        await asyncio.sleep(0.2)
        assert len(await recorded(cluster)) == 51
        await asyncio.sleep(SUM_WRITE_S + 3600)
        assert len(writes) == 2  # the attempt to replace the first segment, and its creation


async def test_sums_that_only_grow_are_written_rarely(cluster: Cluster) -> None:
    async with writing(cluster) as history:
        history.record(repaired(1))
        await asyncio.sleep(WRITE_S + 0.1)
        assert await recorded(cluster) == [(Kind.LEDGERS_REPAIRED, 1)]

        for _ in range(4):
            history.record(repaired(1))
            await asyncio.sleep(SUM_WRITE_S / 4 - 0.1)
        assert await recorded(cluster) == [(Kind.LEDGERS_REPAIRED, 1)]
        await asyncio.sleep(1)
        assert await recorded(cluster) == [(Kind.LEDGERS_REPAIRED, 5)]


async def test_what_is_left_is_written_when_the_session_ends(cluster: Cluster) -> None:

    async with writing(cluster) as history:
        history.record(repaired(1))
        await asyncio.sleep(0)

    assert await recorded(cluster) == [(Kind.LEDGERS_REPAIRED, 1)]


@pytest.mark.parametrize("fault", Fault)
async def test_a_failed_write_is_repeated_and_tells_nothing_twice(fault: Fault) -> None:
    cluster = await Cluster.start()
    async with writing(cluster) as history:
        cluster.tree.faults = lambda store, operations: (
            fault if any("/history/" in each.path for each in operations) else None
        )
        history.record(recovered(1))
        with capture_logs() as logs:
            await asyncio.sleep(WRITE_S + 2 * RETRY_S + 1)
        assert [line["event"] for line in logs] == ["history.write_failed"]

        cluster.tree.faults = None
        history.record(recovered(2))
        await asyncio.sleep(RETRY_S)

    events = (await read_history(cluster.store, PATHS)).events
    assert [noted.event.ledger_id for noted in events] == [1, 2]


async def test_denied_writes_are_told_once_and_delay_nothing(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2))
    async with cluster.node() as node, working(node):
        refuse(node.store, writes_below(PATHS.history), UnauthorizedError)
        with capture_logs() as logs:
            await cluster.kill(B1)
            await cluster.mark(B1)
            await asyncio.sleep(1)
            await cluster.assert_queue_empty()
            await asyncio.sleep(10 * RETRY_S)

    denied = [line for line in logs if line["event"] == "history.write_failed"]
    assert [line["next_step"] for line in denied] == [ACL_HINT]


async def test_a_session_keeps_its_last_segments(cluster: Cluster) -> None:
    async with writing(cluster) as history:
        for start in range(0, 10_000, 100):
            for ledger_id in range(start, start + 100):
                history.record(recovered(ledger_id))
            await asyncio.sleep(WRITE_S + 0.1)

    assert len(await cluster.store.children(PATHS.history)) <= SEGMENTS_KEPT + 1
    events = (await read_history(cluster.store, PATHS)).events
    ledger_ids = [noted.event.ledger_id for noted in events]
    assert ledger_ids == list(range(10_000))[-len(ledger_ids) :]


async def test_a_full_segment_is_followed_by_another_that_repeats_nothing(cluster: Cluster) -> None:
    async with writing(cluster) as history:
        history.record(repaired(1))
        for ledger_id in range(SEGMENT_FULL_BYTES // 80):
            history.record(recovered(ledger_id))
        await asyncio.sleep(WRITE_S + 0.1)
        history.record(repaired(2))
        await asyncio.sleep(WRITE_S + 0.1)

    segments = [
        Segment.parse(data)
        for name in sorted(await cluster.store.children(PATHS.history))
        for data, _ in [await cluster.store.get(f"{PATHS.history}/{name}")]
    ]
    first, second = segments
    assert SEGMENT_FULL_BYTES <= len(first.to_json()) <= 64 * 1024
    assert [e.ledger_id for e in first.events] == [*range(SEGMENT_FULL_BYTES // 80), None]
    assert told(second.events) == [(Kind.LEDGERS_REPAIRED, 2)]


async def test_a_segment_that_somebody_deleted_is_written_again(cluster: Cluster) -> None:
    async with writing(cluster) as history:
        history.record(recovered(1))
        await asyncio.sleep(WRITE_S + 0.1)
        for name in await cluster.store.children(PATHS.history):
            await cluster.store.delete(f"{PATHS.history}/{name}")
        await cluster.store.delete(PATHS.history)

        history.record(recovered(2))
        await asyncio.sleep(WRITE_S + 0.1)

        assert len(await recorded(cluster)) == 2


# --- Reading --------------------------------------------------------------------------------------


async def test_events_of_all_nodes_are_told_in_the_order_of_time(cluster: Cluster) -> None:
    async with writing(cluster, "b") as b, writing(cluster, "a") as a:
        b.record(recovered(1))
        a.record(recovered(2))  # at the same time
        await asyncio.sleep(1)
        b.record(recovered(3))
        await asyncio.sleep(1)
        a.record(recovered(4))
        await asyncio.sleep(WRITE_S)

    events = (await read_history(cluster.store, PATHS)).events
    assert [(noted.node, noted.event.ledger_id) for noted in events] == [
        ("a", 2),
        ("b", 1),
        ("b", 3),
        ("a", 4),
    ]


async def test_only_what_was_not_over_at_the_start_of_the_period_is_told(cluster: Cluster) -> None:
    start_ms = cluster.clock.wall_ms()
    async with writing(cluster) as history:
        history.record(recovered(1))
        history.record(repaired(1))
        await asyncio.sleep(50)
        history.record(repaired(2))
        history.record(recovered(2))

    recent = await read_history(cluster.store, PATHS, start_ms + 50_000)

    assert told([noted.event for noted in recent.events]) == [
        (Kind.LEDGERS_REPAIRED, 3),
        (Kind.LEDGER_RECOVERED, 0),
    ]
    assert (await read_history(cluster.store, PATHS, start_ms + 7_200_000)).events == ()


async def test_znodes_that_cannot_be_read_are_named_and_stop_nothing(cluster: Cluster) -> None:
    await record_order(cluster.store, PATHS, node="host", events=[recovered(1)])
    await cluster.store.create(f"{PATHS.history}/rubbish", b"\xff")
    await cluster.store.create(f"{PATHS.history}/denied", b"")
    shut_out(cluster.store, f"{PATHS.history}/denied")

    for since_ms in (0, 1):
        found = await read_history(cluster.store, PATHS, since_ms)

        assert [noted.event.ledger_id for noted in found.events] == [1]
        assert found.unreadable == (f"{PATHS.history}/denied", f"{PATHS.history}/rubbish")


async def test_a_history_that_cannot_be_listed_is_named(cluster: Cluster) -> None:
    await cluster.store.create(PATHS.history)
    shut_out(cluster.store, PATHS.history)

    assert (await read_history(cluster.store, PATHS)).unreadable == (PATHS.history,)


async def test_an_order_happened_when_its_znode_was_written(cluster: Cluster) -> None:
    await asyncio.sleep(7)

    event = Event(kind=Kind.ORDER, order="disable", by="me@host")
    await record_order(cluster.store, PATHS, node="host", events=[event])

    (noted,) = (await read_history(cluster.store, PATHS)).events
    assert noted.event == replace(event, at_ms=cluster.clock.wall_ms())


async def test_events_of_a_later_release_are_kept(cluster: Cluster) -> None:
    data = b'{"version":1,"node":"n","events":[{"kind":"bookie-sang","at_ms":5,"song":"x"}]}'
    await cluster.store.create(f"{PATHS.history}/x.0", data, with_parents=True)

    (noted,) = (await read_history(cluster.store, PATHS)).events

    assert noted.event == Event(kind="bookie-sang", at_ms=5)

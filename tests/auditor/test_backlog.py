"""How much is left to repair, as a leader measures it for metrics."""

import asyncio
import itertools
import math
import random
from array import array

import pytest
from prometheus_client import REGISTRY

from auditor import backlog
from auditor.backlog import (
    INTERVAL_S,
    NO_TIME,
    SAMPLES_MAX,
    UNREAD,
    Backlog,
    BacklogSize,
    MarkTimes,
    RepairProgress,
    Sample,
    by_label,
    pace,
    with_sample,
)
from ledgers.errors import UnavailableError
from replication.marks import marked_ledger_ids
from tests.auditor.auditing import Leader, auditing
from tests.auditor.drains import order_drain
from tests.auditor.scenes import SOON_S, delayed, with_ledgers
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS

SEED = 7


def backlog_of(leader: Leader, cluster: Cluster) -> Backlog:
    return Backlog(
        paths=PATHS,
        updater=leader.updater,
        losses=lambda: leader.auditor.losses,
        draining=lambda: leader.views.current.orders.draining,
        record=leader.records.write,
    )


async def recorded(cluster: Cluster) -> RepairProgress:
    return RepairProgress.parse((await cluster.store.get(PATHS.progress))[0])


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"bookmender_{name}", labels)


async def test_ledgers_are_counted_by_copies_left_with_the_bytes_of_lost_copies() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B3, B4))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await cluster.kill(B2)
        await asyncio.sleep(SOON_S)
        size = await backlog_of(leader, cluster).run_once()

    assert size.by_copies_left == {"0": 1, "1": 1, "2": 0, "more": 0}
    assert size.marked_count == 2
    assert size.missing_bytes == 300  # 10 entries of 10 bytes: both copies, and one
    assert value("underreplicated_ledgers", copies_left="0") == 1
    assert value("queue_ledgers", queue="shared") == 2
    assert value("missing_copies_bytes") == 300


async def test_during_a_recovery_delay_nothing_is_lost_yet() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(100)) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        size = await backlog_of(leader, cluster).run_once()

        assert value("unregistered_bookies", state="absent") == 1
        assert value("unregistered_bookies", state="lost") == 0

    assert (sum(size.by_copies_left.values()), size.marked_count) == (0, 0)
    assert size.remaining_s == 0.0
    assert value("unregistered_bookies", state="absent") == 0, "this node leads no more"


@pytest.mark.compat(
    "AuditorPlacementPolicyCheckTest.testPlacementPolicyCheckForURLedgersElapsedRecoveryGracePeriod",
    "AuditorPlacementPolicyCheckTest.testPlacementPolicyCheckForURLedgersNotElapsedRecoveryGracePeriod",
    verdict="other",
    why="the age of the oldest mark is a metric, and alert rules set the limit",
)
async def test_the_oldest_mark_counts_and_each_mark_is_read_once() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        now_ms = cluster.clock.wall_ms()
        await cluster.mark(B3, ledger_id=7, ctime_ms=now_ms - 60_000)
        await cluster.mark(B3, ledger_id=8, ctime_ms=now_ms - 5_000)
        await cluster.store.create(PATHS.waiting_note(7), b"{}", with_parents=True)
        ours = backlog_of(leader, cluster)
        first = await ours.run_once()
        before = leader.store.request_count
        await ours.run_once()
        assert leader.store.request_count - before < 12, "no mark is read again"
        assert value("oldest_mark_age_seconds") == pytest.approx(60, abs=1)
        await cluster.store.delete(PATHS.mark(7))
        await cluster.store.delete(PATHS.mark(7).rpartition("/")[0])
        second = await ours.run_once()

    assert (first.oldest_mark_ms, first.marked_count) == (now_ms - 60_000, 2)
    assert first.waiting_count == 1
    assert (second.oldest_mark_ms, second.marked_count) == (now_ms - 5_000, 1)


async def test_of_very_many_new_marks_some_are_read_each_time() -> None:
    cluster = await with_ledgers((B1, B2))
    for ledger_id in range(10, 20):
        await cluster.mark(B3, ledger_id=ledger_id, ctime_ms=1_000 - ledger_id)
    async with auditing(cluster) as leader:
        ours = backlog_of(leader, cluster)
        most, backlog.NEW_MARKS_MAX = backlog.NEW_MARKS_MAX, 4
        try:
            oldest = [(await ours.run_once()).oldest_mark_ms for _ in range(4)]
        finally:
            backlog.NEW_MARKS_MAX = most

    assert oldest == [987, 983, 981, 981]


async def test_the_times_of_marks_are_those_of_a_dictionary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "TIMES_AT_ONCE", 7)
    rng = random.Random(SEED)
    times, expected = MarkTimes(), dict[int, int]()
    for _ in range(200):
        marked = sorted(rng.sample(range(60), rng.randrange(40)))
        await times.keep(array("q", marked))
        expected = {ledger_id: expected.get(ledger_id, UNREAD) for ledger_id in marked}
        unread = [ledger_id for ledger_id, ms in expected.items() if ms == UNREAD]

        assert times.unread(5) == unread[:5]
        for ledger_id in unread[:3]:
            expected[ledger_id] = rng.choice((NO_TIME, rng.randrange(1_000)))
            times.set(ledger_id, expected[ledger_id])
        known = [ms for ms in expected.values() if ms < NO_TIME]
        assert times.oldest_ms() == min(known, default=None)


async def test_a_failed_measurement_is_repeated_and_the_end_clears_the_metrics() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        ours = backlog_of(leader, cluster)
        failures = iter([UnavailableError("gone")])
        measure = ours.run_once

        async def failing() -> BacklogSize:
            for error in failures:
                raise error
            return await measure()

        ours.run_once = failing  # type: ignore[method-assign]
        task = asyncio.create_task(ours.run())
        await asyncio.sleep(2 * INTERVAL_S)
        assert value("underreplicated_ledgers", copies_left="1") == 1
        assert ours.size is not None
        task.cancel()
        await asyncio.wait([task])

    assert ours.size is None
    assert value("underreplicated_ledgers", copies_left="1") == 0
    remaining_s = value("repair_remaining_seconds")
    assert remaining_s is not None
    assert math.isnan(remaining_s)


# --- The estimate ---------------------------------------------------------------------------------


def samples(*rows: tuple[float, int, int]) -> list[Sample]:
    return [Sample(at_ms=round(s * 1000), ledgers=ledgers, bytes=size) for s, ledgers, size in rows]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([(0, 100, 1_000)], (None, None), id="one sample tells nothing"),
        pytest.param([(0, 100, 1_000), (10, 90, 800)], (20, None), id="too early"),
        pytest.param([(0, 100, 1_000), (20, 90, 800)], (10, 80), id="bytes decide"),
        pytest.param([(0, 9, 99), (300, 9, 50), (600, 9, 50)], (0, None), id="the last minutes"),
        pytest.param([(0, 9, 50), (10, 9, 99), (30, 9, 90)], (0.45, 200), id="another loss"),
        pytest.param([(0, 9, 90), (10, 9, 80), (20, 9, 82)], (0.4, 205), id="a ledger was closed"),
        pytest.param([(0, 10, 0), (20, 5, 0)], (0, 20), id="empty ledgers are counted"),
    ],
)
def test_the_time_left_follows_the_bytes_of_the_last_minutes(
    rows: list[tuple[float, int, int]], expected: tuple[float | None, float | None]
) -> None:
    assert pace(samples(*rows)) == pytest.approx(expected)


def test_samples_are_thinned_evenly() -> None:
    kept: tuple[Sample, ...] = ()
    for number in range(5_000):
        kept = with_sample(kept, Sample(at_ms=number * 5_000, ledgers=5_000 - number, bytes=0))
        assert len(kept) <= SAMPLES_MAX
    gaps = [after.at_ms - before.at_ms for before, after in itertools.pairwise(kept)]

    assert (kept[0].at_ms, kept[-1].ledgers) == (0, 1)
    assert len(kept) >= SAMPLES_MAX // 2
    assert max(gaps) <= 2 * kept[-1].at_ms / (SAMPLES_MAX // 2)


async def test_what_is_left_is_recorded_until_the_queue_is_empty() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B3, B4))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await order_drain(cluster, B4)
        await asyncio.sleep(SOON_S)
        await backlog_of(leader, cluster).run_once()
        first = await recorded(cluster)
        await asyncio.sleep(SOON_S)
        await backlog_of(leader, cluster).run_once()  # of the next leader
        second = await recorded(cluster)
        for ledger_id in await marked_ledger_ids(cluster.store, PATHS):
            await cluster.store.delete(PATHS.mark(ledger_id))
            await cluster.store.delete(PATHS.mark(ledger_id).rpartition("/")[0])
        await backlog_of(leader, cluster).run_once()
        last = await recorded(cluster)

    assert first.bytes_left == 200  # a lost copy and a copy to drain, of 10 entries of 10 bytes
    assert [each.ledgers for each in second.samples] == [1, 1]
    assert second.samples[0] == first.samples[0]
    assert last.samples == ()


def test_labels_are_bounded() -> None:
    assert by_label({0: 1, 1: 2, 2: 3, 3: 4, 7: 5}) == {"0": 1, "1": 2, "2": 3, "more": 9}

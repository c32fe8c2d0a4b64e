"""Marks that have stood for too long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from auditor.checks.overdue import OverdueMarks, look_interval_s
from auditor.checks.records import CheckRecords, read_check
from auditor.findings import Finding
from ledgers.model import LedgerState
from replication.transactions import Batcher
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS

JAVA = "AuditorPlacementPolicyCheckTest.testPlacementPolicyCheckForURLedgers"
DAY_S = 86_400


@asynccontextmanager
async def watching(cluster: Cluster, *, after_s: float = DAY_S) -> AsyncIterator[OverdueMarks]:
    batcher = Batcher(cluster.store, ())
    sending = asyncio.create_task(batcher.run())
    yield OverdueMarks(
        store=cluster.store,
        paths=PATHS,
        records=CheckRecords(cluster.store, batcher, PATHS),
        after_s=after_s,
        clock=cluster.clock,
    )
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def two_marked() -> Cluster:
    """A closed ledger, 0, and an open one, 1, both marked now."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), ledger_id=0)
    await cluster.write_ledger((B1, B2), ledger_id=1, state=LedgerState.OPEN)
    for ledger_id in (0, 1):
        await cluster.mark(B1, ledger_id=ledger_id, ctime_ms=cluster.clock.wall_ms())
    return cluster


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        pytest.param(
            DAY_S + 1,
            [0, 1],
            marks=pytest.mark.compat(f"{JAVA}ElapsedRecoveryGracePeriod", verdict="same"),
            id="longer",
        ),
        pytest.param(
            DAY_S - 1,
            [],
            marks=pytest.mark.compat(f"{JAVA}NotElapsedRecoveryGracePeriod", verdict="same"),
            id="shorter",
        ),
    ],
)
@in_virtual_time
async def test_marks_that_stand_for_longer_are_told_open_ledgers_too(
    age_s: float, expected: list[int]
) -> None:
    cluster = await two_marked()
    await asyncio.sleep(age_s)

    async with watching(cluster) as marks:
        found = await marks.run_once()

    assert found == expected
    last = (await read_check(cluster.store, PATHS, "overdue")).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (2, {"overdue": len(expected), "unopened": 0})


@pytest.mark.compat(
    "G27", verdict="better", why="the age of the znode counts, whatever the mark says"
)
@in_virtual_time
async def test_a_mark_whose_time_is_moved_by_a_later_loss_is_as_old_as_it_is() -> None:
    cluster = await two_marked()
    await asyncio.sleep(DAY_S)
    await cluster.mark(B1, B2, ledger_id=0, ctime_ms=cluster.clock.wall_ms())
    await asyncio.sleep(60)

    async with watching(cluster) as marks:
        assert await marks.run_once() == [0, 1]


@in_virtual_time
async def test_a_mark_made_anew_is_as_old_as_the_first_loss_that_it_tells_of() -> None:
    cluster = await two_marked()
    await asyncio.sleep(DAY_S)
    path = PATHS.mark(0)
    data, _ = await cluster.store.get(path)
    await cluster.store.delete(path)
    await cluster.store.create(path, data)
    await asyncio.sleep(60)

    async with watching(cluster) as marks:
        assert 0 in await marks.run_once()


@in_virtual_time
async def test_damage_that_java_does_not_see_is_overdue_too_and_what_is_but_to_be_moved_is_not() -> (
    None
):
    cluster = await two_marked()
    found = Finding(check="fsck", bookies=(B1,), detail="bad", found_ms=1)
    for ledger_id in (1, 2, 3):
        await cluster.store.create(PATHS.private.mark(ledger_id), with_parents=True)
    for ledger_id in (1, 2):
        path = PATHS.finding(ledger_id)
        await cluster.store.create(path, found.to_json(), with_parents=True)
    await asyncio.sleep(DAY_S + 1)

    async with watching(cluster) as marks:
        assert await marks.run_once() == [0, 1, 2]

    last = (await read_check(cluster.store, PATHS, "overdue")).last
    assert last is not None
    assert (last.ledger_count, last.counts["overdue"]) == (3, 3)


@in_virtual_time
async def test_a_mark_that_cannot_be_read_and_one_without_a_time_count_by_the_znode() -> None:
    cluster = await two_marked()
    for ledger_id, data in ((0, b"\xff"), (1, b'replica: "b1:3181"\n')):
        await cluster.store.set(PATHS.mark(ledger_id), data, version=-1)
    await asyncio.sleep(DAY_S + 60)

    async with watching(cluster) as marks:
        assert await marks.run_once() == [0, 1]


@in_virtual_time
async def test_a_mark_that_acls_shut_away_is_told_of_once_and_hides_no_other() -> None:
    cluster = await two_marked()
    shut = shut_out(cluster.store, PATHS.mark(0))
    await asyncio.sleep(DAY_S + 60)

    async with watching(cluster) as marks:
        with capture_logs() as logs:
            found = [await marks.run_once() for _ in range(2)]
            last = (await read_check(cluster.store, PATHS, "overdue")).last
            shut.clear()
            found.append(await marks.run_once())

    assert found == [[1], [1], [0, 1]]
    assert last is not None
    assert last.counts == {"overdue": 1, "unopened": 1}
    told = [each for each in logs if each["event"] == "marks.unopened"]
    assert [(each["count"], each["ledger_ids"]) for each in told] == [(1, [0])]


@in_virtual_time
async def test_a_queue_that_acls_shut_away_is_told_of_and_looked_at_again() -> None:
    cluster = await two_marked()
    shut = shut_out(cluster.store, PATHS.marks)

    async with watching(cluster) as marks:
        with capture_logs() as logs:
            task = asyncio.create_task(marks.run())
            await asyncio.sleep(DAY_S)
            shut.clear()
            await asyncio.sleep(DAY_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    events = [each["event"] for each in logs]
    assert "check.failed" in events
    assert events[-1] == "marks.overdue"


@in_virtual_time
async def test_they_are_told_once_and_again_when_others_come() -> None:
    cluster = await two_marked()

    async with watching(cluster) as marks:
        with capture_logs() as logs:
            task = asyncio.create_task(marks.run())
            await asyncio.sleep(5 * DAY_S)
            told = [entry["ledger_ids"] for entry in logs if entry["event"] == "marks.overdue"]
            await cluster.mark(B1, ledger_id=2, ctime_ms=1)
            await asyncio.sleep(DAY_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    assert told == [[0, 1]]
    assert [e["count"] for e in logs if e["event"] == "marks.overdue"] == [2, 3]


@in_virtual_time
async def test_that_some_of_them_were_repaired_is_no_new_error_and_the_last_one_ends_it() -> None:
    cluster = await two_marked()
    await asyncio.sleep(2 * DAY_S)

    async with watching(cluster) as marks:
        with capture_logs() as logs:
            await marks.run_once()
            for ledger_id in (0, 1):
                await cluster.store.delete(PATHS.mark(ledger_id))
                for _ in range(2):
                    await marks.run_once()

    told = [each for each in logs if "overdue" in each["event"]]
    assert [(e["event"], e["log_level"]) for e in told] == [
        ("marks.overdue", "error"),
        ("marks.overdue_ended", "info"),
    ]


@in_virtual_time
async def test_those_that_are_new_are_named() -> None:
    cluster = await two_marked()
    await asyncio.sleep(2 * DAY_S)

    async with watching(cluster) as marks:
        await marks.run_once()
        with capture_logs() as logs:
            await cluster.mark(B1, ledger_id=2, ctime_ms=1)
            await marks.run_once()

    [told] = [each for each in logs if each["event"] == "marks.overdue"]
    assert (told["count"], told["new_count"], told["ledger_ids"]) == (3, 1, [2])


@in_virtual_time
async def test_where_none_is_ever_overdue_nobody_looks() -> None:
    cluster = await two_marked()

    async with watching(cluster, after_s=0) as marks:
        await marks.run()

    assert (await read_check(cluster.store, PATHS, "overdue")).last is None


@pytest.mark.parametrize(("after_s", "expected_s"), [(60, 60), (DAY_S, 3_600), (6_000, 600)])
def test_the_queue_is_looked_at_ten_times_before_a_mark_is_overdue_within_bounds(
    after_s: float, expected_s: float
) -> None:
    assert look_interval_s(after_s) == expected_s

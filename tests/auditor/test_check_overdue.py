"""Marks that exist for too long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from auditor.checks.overdue import OverdueMarks, look_interval_s
from auditor.checks.records import CheckRecords, read_check
from auditor.mark_reasons import Finding
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
    """Return a cluster with a closed ledger 0 and an open ledger 1, both marked now."""
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
async def test_old_marks_are_reported_of_open_ledgers_too(
    age_s: float, expected: list[int]
) -> None:
    cluster = await two_marked()
    await asyncio.sleep(age_s)

    async with watching(cluster) as marks:
        found = await marks.run_once()

    assert found == expected
    last = (await read_check(cluster.store, PATHS, "overdue")).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (2, {"overdue": len(expected), "unreadable": 0})


@pytest.mark.compat(
    "G27", verdict="better", why="the age of the znode counts, whatever the mark says"
)
@in_virtual_time
async def test_a_later_loss_does_not_make_a_mark_younger() -> None:
    """Java's auditor sets a new time in the mark."""
    cluster = await two_marked()
    await asyncio.sleep(DAY_S)
    await cluster.mark(B1, B2, ledger_id=0, ctime_ms=cluster.clock.wall_ms())
    await asyncio.sleep(60)

    async with watching(cluster) as marks:
        assert await marks.run_once() == [0, 1]


@in_virtual_time
async def test_a_recreated_mark_is_as_old_as_the_first_loss_it_names() -> None:
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
async def test_overdue_marks_include_our_own_queue_except_moves() -> None:
    """Java does not see this damage; a ledger marked only to be moved is not overdue."""
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
async def test_the_age_of_an_unreadable_mark_is_that_of_its_znode() -> None:
    cluster = await two_marked()
    for ledger_id, data in ((0, b"\xff"), (1, b'replica: "b1:3181"\n')):
        await cluster.store.set(PATHS.mark(ledger_id), data, version=-1)
    await asyncio.sleep(DAY_S + 60)

    async with watching(cluster) as marks:
        assert await marks.run_once() == [0, 1]


@in_virtual_time
async def test_denied_access_to_a_mark_hides_no_other() -> None:
    """It is reported once."""
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
    assert last.counts == {"overdue": 1, "unreadable": 1}
    told = [each for each in logs if each["event"] == "marks.read_denied"]
    assert [(each["count"], each["ledger_ids"]) for each in told] == [(1, [0])]


@in_virtual_time
async def test_denied_access_to_a_queue_is_reported_and_retried() -> None:
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
async def test_overdue_marks_are_logged_again_only_when_others_join() -> None:
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
async def test_the_end_of_the_problem_is_logged_with_the_last_repair() -> None:
    """The repair of some of them is no new error."""
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
async def test_newly_overdue_ledgers_are_named() -> None:
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
async def test_the_queue_is_not_read_where_no_mark_is_ever_overdue() -> None:
    cluster = await two_marked()

    async with watching(cluster, after_s=0) as marks:
        await marks.run()

    assert (await read_check(cluster.store, PATHS, "overdue")).last is None


@pytest.mark.parametrize(("after_s", "expected_s"), [(60, 60), (DAY_S, 3_600), (6_000, 600)])
def test_the_queue_is_read_ten_times_per_bound(after_s: float, expected_s: float) -> None:
    """Ten times until a mark is overdue, within a shortest and a longest interval."""
    assert look_interval_s(after_s) == expected_s

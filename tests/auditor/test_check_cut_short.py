"""Periodic checks that are interrupted: by the end of a leader, by ZooKeeper, or by a defect of
ours."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from auditor.checks.runner import RETRY_S
from ledgers.errors import SessionLostError, UnavailableError
from tests.auditor.checking import (
    HOUR_S,
    HOURLY,
    HOURS,
    CountingCheck,
    checked_at_ms,
    checker,
    record,
    running,
    store_time,
    ten_ledgers,
)
from tests.replication.nodes import PATHS


@pytest.mark.compat("G6", verdict="better")
async def test_another_leader_continues_where_the_first_one_died() -> None:
    cluster = await ten_ledgers()
    first, second = CountingCheck(part_s=10), CountingCheck()
    async with checker(cluster, first, name="node-1", settings=HOURS) as made, running(made):
        await asyncio.sleep(25)
    assert await checked_at_ms(cluster) is None

    async with checker(cluster, second, name="node-2", settings=HOURS) as made, running(made):
        await asyncio.sleep(20)

    assert second.started_at == [4]
    assert first.looked_at + second.looked_at == list(range(10))
    last = (await record(cluster)).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (10, {"even": 5})


async def test_another_leader_continues_a_check_requested_early() -> None:
    cluster = await ten_ledgers()
    await store_time(cluster, cluster.clock.wall_ms())
    monthly = replace(HOURS, all_ledgers_interval_s=30 * 86_400)
    first, second = CountingCheck(part_s=10), CountingCheck()
    async with checker(cluster, first, settings=monthly) as made, running(made):
        await asyncio.sleep(1)
        await store_time(cluster, cluster.clock.wall_ms() - 21 * 86_400_000)
        await asyncio.sleep(25)

    async with checker(cluster, second, settings=monthly) as made, running(made):
        await asyncio.sleep(20)

    assert second.started_at == [4]


async def test_a_run_overtaken_by_javas_auditor_is_not_continued() -> None:
    cluster = await ten_ledgers()
    first, second = CountingCheck(part_s=10), CountingCheck()
    async with checker(cluster, first, settings=HOURS) as made, running(made):
        await asyncio.sleep(25)
    await asyncio.sleep(60)
    await store_time(cluster, cluster.clock.wall_ms())

    async with checker(cluster, second, settings=HOURS) as made, running(made):
        await asyncio.sleep(60)
        assert second.started_at == [], "it is not due"
        await asyncio.sleep(HOUR_S)

    assert second.started_at == [0]


async def test_an_unreadable_record_restarts_the_run() -> None:
    cluster = await ten_ledgers()
    await cluster.store.create(PATHS.check(HOURLY.name), b'{"version": 9}', with_parents=True)
    check = CountingCheck()

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(10)

    assert check.looked_at == list(range(10))


async def test_a_part_cut_short_is_repeated_and_counted_once() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()
    failures = iter([UnavailableError("gone for a moment")] * 2)

    async def fail(ledger_id: int) -> None:
        if ledger_id == 4 and (error := next(failures, None)):
            raise error

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(2 * RETRY_S + 10)

    last = (await record(cluster)).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (10, {"even": 5})


async def test_a_defect_of_ours_skips_one_ledger() -> None:
    """Neither the other ledgers nor the leadership suffer."""
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=5)

    async def fail(ledger_id: int) -> None:
        assert ledger_id != 3, "a defect"

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(30)

    assert sorted(check.looked_at) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    last = (await record(cluster)).last
    assert last is not None
    assert last.counts == {"even": 5, "failed": 1}


async def test_a_lost_session_ends_the_check() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()

    async def fail(ledger_id: int) -> None:
        raise SessionLostError("over")

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made:
        with pytest.raises(SessionLostError):
            await made.runner.run_once()
    assert await checked_at_ms(cluster) is None


async def test_a_former_leader_stores_nothing() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_s=10)

    async with checker(cluster, check, settings=HOURS) as made:
        task = asyncio.create_task(made.runner.run())
        await asyncio.sleep(25)
        before = await record(cluster)
        vote = (await cluster.store.children(PATHS.election))[0]
        await cluster.store.delete(f"{PATHS.election}/{vote}")
        with suppress(BaseExceptionGroup):
            await task

    assert task.done()
    assert await record(cluster) == before
    assert await checked_at_ms(cluster) is None

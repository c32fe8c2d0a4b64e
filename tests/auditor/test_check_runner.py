"""Periodic checks run by the time of the last run, one at a time, and on request."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from structlog.testing import capture_logs

from auditor.checks.records import ALL_LEDGERS, REPLICAS, CheckKind
from auditor.checks.runner import FORCED_MS
from replication import znodes
from tests.auditor.checking import (
    HOUR_S,
    HOURS,
    JAVAS_CHECKS,
    NEVER,
    CountingCheck,
    checked_at_ms,
    checker,
    running,
    store_time,
    ten_ledgers,
)
from tests.auditor.scenes import with_ledgers
from tests.replication.cluster import shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.compat(f"AuditorPeriodicCheckTest.{test}", verdict="same"),
            id=kind.name,
        )
        for kind, test in JAVAS_CHECKS.items()
    ],
)
@pytest.mark.parametrize(
    ("age_s", "wait_s"),
    [
        pytest.param(None, 0, id="never run: at once"),
        pytest.param(HOUR_S - 60, 60, id="nearly due: after the time that is left"),
        pytest.param(HOUR_S + 60, 0, id="overdue: at once"),
        pytest.param(-HOUR_S, HOUR_S, id="in the future: after the whole interval"),
    ],
)
async def test_the_first_run_is_due_by_the_last_run_under_any_leader(
    kind: CheckKind, age_s: int | None, wait_s: int
) -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(kind, part_size=10, part_s=0)
    assert kind.audit is not None
    if age_s is not None:
        await store_time(cluster, cluster.clock.wall_ms() - age_s * 1000, kind.audit)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(max(1, wait_s - 1))
        before = list(check.looked_at)
        await asyncio.sleep(2)

    assert before == ([] if wait_s else list(range(10)))
    assert check.looked_at == list(range(10))
    stored_ms = await checked_at_ms(cluster, kind)
    assert stored_ms is not None
    assert cluster.clock.wall_ms() - stored_ms <= 3_000


async def test_the_next_run_is_due_an_interval_after_the_last_end() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=10, part_s=100)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(100 + HOUR_S - 1)
        once = check.started_at.copy()
        await asyncio.sleep(2)

    assert once == [0]
    assert check.started_at == [0, 0]


async def test_a_disabled_check_never_runs() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(100 * HOUR_S)

    assert check.started_at == []


@pytest.mark.parametrize("what", ["its record", "the time of its last run"])
async def test_denied_access_to_a_checks_znodes_delays_only_this_check(
    what: str,
) -> None:
    """It runs when access is granted."""
    cluster = await ten_ledgers()
    shut_check, other = CountingCheck(ALL_LEDGERS), CountingCheck(REPLICAS)
    async with checker(cluster, shut_check, other, settings=HOURS) as made:
        async with running(made):  # once, so that they are there
            await asyncio.sleep(60)
        shut = shut_out(
            made.store,
            PATHS.check(ALL_LEDGERS.name)
            if what == "its record"
            else PATHS.audit_time(znodes.Audit.ALL_LEDGERS),
        )
        async with running(made):
            with capture_logs() as logs:
                await asyncio.sleep(1.5 * HOUR_S)
            before = (shut_check.finished_count, other.finished_count)
            shut.clear()
            await asyncio.sleep(HOUR_S / 2)

    assert before == (1, 2)
    assert shut_check.finished_count == 2
    told = [each for each in logs if each["event"] == "check.access_denied"]
    assert [(each["check"], each["log_level"]) for each in told] == [("all-ledgers", "warning")]


async def test_due_checks_run_one_at_a_time_the_longest_overdue_first() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    now_ms = cluster.clock.wall_ms()
    begun: list[tuple[str, float]] = []

    async def note(check: CountingCheck, ledger_id: int) -> None:
        begun.append((check.kind.name, cluster.clock.now_s()))

    first, second = CountingCheck(ALL_LEDGERS, part_size=10), CountingCheck(REPLICAS, part_size=10)
    for check, age_s in ((first, 2 * HOUR_S), (second, 3 * HOUR_S)):
        assert check.kind.audit is not None
        await store_time(cluster, now_ms - age_s * 1000, check.kind.audit)
        check.before = partial(note, check)
    async with checker(cluster, first, second, settings=HOURS) as made, running(made):
        await asyncio.sleep(10)

    assert [name for name, _ in begun] == ["replicas", "all-ledgers"]
    assert begun[1][1] - begun[0][1] >= 1.0, "the second waited for the first"


@pytest.mark.compat("G34", verdict="better", why="the leader watches the znode of the last run")
@pytest.mark.parametrize("age_days", [21, None], ids=["set back by 21 days", "deleted"])
@pytest.mark.parametrize("interval_s", [HOUR_S, 30 * 24 * HOUR_S, 0])
async def test_a_requested_check_runs_at_once_without_a_restart(
    age_days: int | None, interval_s: int
) -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()
    await store_time(cluster, cluster.clock.wall_ms())
    settings = replace(HOURS, all_ledgers_interval_s=interval_s)

    async with checker(cluster, check, settings=settings) as made, running(made):
        await asyncio.sleep(60)
        before = check.started_at.copy()
        if age_days is None:
            await cluster.store.delete(PATHS.audit_time(znodes.Audit.ALL_LEDGERS))
        else:
            await store_time(cluster, cluster.clock.wall_ms() - age_days * 86_400_000)
        await asyncio.sleep(6)

    assert before == []
    assert check.started_at == [0]
    assert await checked_at_ms(cluster) is not None


async def test_a_check_requested_without_a_leader_is_run_by_the_next() -> None:
    cluster = await ten_ledgers()
    await store_time(cluster, FORCED_MS)
    check = CountingCheck()

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(10)
        assert check.started_at == [0]
        await asyncio.sleep(10 * HOUR_S)

    assert check.started_at == [0], "once"


async def test_no_check_begins_before_all_ledgers_are_known() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()

    async with checker(cluster, check, settings=HOURS) as made:
        made.is_ledger_map_ready = False
        async with running(made):
            await asyncio.sleep(60)
            assert check.started_at == []
            made.is_ledger_map_ready = True
            await asyncio.sleep(10)

    assert check.looked_at == list(range(10))


async def test_an_interval_that_is_applied_counts_at_once() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=10, part_s=0)

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(HOUR_S)
        before = list(check.looked_at)
        made.runner.apply(HOURS)
        await asyncio.sleep(2)

    assert (before, check.looked_at) == ([], list(range(10)))

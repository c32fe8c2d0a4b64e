"""Periodic checks run by the time of the last run, one at a time, and on request."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from auditor.checks.records import ALL_LEDGERS, REPLICAS, CheckKind
from auditor.checks.runner import FORCED_MS, RETRY_S, CheckState, pause_of
from ledgers.errors import SessionLostError, UnavailableError
from replication import znodes
from replication.orders import (
    ChecksOrder,
    HoldOrder,
    Order,
    Orders,
    OrderStore,
    OrderZnode,
    checks_znode,
    hold_znode,
)
from tests.auditor.checking import (
    HOUR_S,
    HOURLY,
    HOURS,
    JAVAS_CHECKS,
    NEVER,
    Checker,
    CountingCheck,
    checked_at_ms,
    checker,
    last_run,
    record,
    running,
    store_time,
    ten_ledgers,
)
from tests.auditor.scenes import with_ledgers
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

scene = ten_ledgers


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
    cluster: Cluster, kind: CheckKind, age_s: int | None, wait_s: int
) -> None:
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


async def test_the_next_run_is_due_an_interval_after_the_last_end(cluster: Cluster) -> None:
    check = CountingCheck(part_size=10, part_s=100)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(100 + HOUR_S - 1)
        once = check.started_at.copy()
        await asyncio.sleep(2)

    assert once == [0]
    assert check.started_at == [0, 0]


async def test_a_disabled_check_never_runs(cluster: Cluster) -> None:
    check = CountingCheck()

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(100 * HOUR_S)

    assert check.started_at == []


@pytest.mark.parametrize("what", ["its record", "the time of its last run"])
async def test_denied_access_to_a_checks_znodes_delays_only_this_check(what: str) -> None:
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
    cluster: Cluster, age_days: int | None, interval_s: int
) -> None:
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


async def test_a_check_requested_without_a_leader_is_run_by_the_next(cluster: Cluster) -> None:
    await store_time(cluster, FORCED_MS)
    check = CountingCheck()

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(10)
        assert check.started_at == [0]
        await asyncio.sleep(10 * HOUR_S)

    assert check.started_at == [0], "once"


async def test_no_check_begins_before_all_ledgers_are_known(cluster: Cluster) -> None:
    check = CountingCheck()

    async with checker(cluster, check, settings=HOURS) as made:
        made.is_ledger_map_ready = False
        async with running(made):
            await asyncio.sleep(60)
            assert check.started_at == []
            made.is_ledger_map_ready = True
            await asyncio.sleep(10)

    assert check.looked_at == list(range(10))


async def test_an_interval_that_is_applied_counts_at_once(cluster: Cluster) -> None:
    check = CountingCheck(part_size=10, part_s=0)

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(HOUR_S)
        before = list(check.looked_at)
        made.runner.apply(HOURS)
        await asyncio.sleep(2)

    assert (before, check.looked_at) == ([], list(range(10)))


# --- Due times of periodic checks -----------------------------------------------------------------

HOUR_MS = 3_600_000
NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("before_ms", "last_ms", "expected"),
    [
        pytest.param(NOW_MS, NOW_MS - 21 * 24 * HOUR_MS, True, id="as forceauditchecks does"),
        pytest.param(NOW_MS, None, True, id="deleted"),
        pytest.param(NOW_MS, NOW_MS + 1, False, id="another leader has run it"),
        pytest.param(None, NOW_MS, False, id="run for the first time"),
    ],
)
@pytest.mark.parametrize("interval_s", [HOUR_S, 1_000 * HOUR_S, 0])
def test_an_earlier_time_of_the_last_run_requests_the_check_of_any_interval(
    before_ms: int | None, last_ms: int | None, expected: bool, interval_s: float
) -> None:
    state = CheckState(check=CountingCheck())
    note(state, before_ms, interval_s=interval_s)

    note(state, last_ms, interval_s=interval_s)

    assert (state.due_s == -inf) is expected


def note(
    state: CheckState,
    last_ms: int | None,
    *,
    now_s: float = 100.0,
    now_ms: int = NOW_MS,
    interval_s: float = HOUR_S,
    is_unfinished: bool = False,
) -> None:
    state.update(
        last_ms, interval_s=interval_s, now_s=now_s, now_ms=now_ms, is_unfinished=is_unfinished
    )


def test_a_clock_set_back_later_delays_nothing() -> None:
    state = CheckState(check=CountingCheck())
    note(state, NOW_MS)

    note(state, NOW_MS, now_s=200.0, now_ms=NOW_MS - 1_000 * HOUR_MS)

    assert state.due_s == 100.0 + HOUR_S


@pytest.mark.parametrize(
    ("interval_s", "expected_s"),
    [
        pytest.param(HOUR_S, -inf, id="the run continues at once"),
        pytest.param(0, None, id="unless it was switched off since"),
    ],
)
def test_an_earlier_leaders_unfinished_run_is_continued(
    interval_s: float, expected_s: float | None
) -> None:
    state = CheckState(check=CountingCheck())

    note(state, NOW_MS, interval_s=interval_s, is_unfinished=True)

    assert state.due_s == expected_s


# --- Reasons for which periodic checks wait, and how a run continues after a pause ----------------

T = TypeVar("T", bound=Order)

DISABLE = PATHS.disable


async def give(cluster: Cluster, znode: OrderZnode[T], order: T) -> None:
    await OrderStore(cluster.store, PATHS).give(znode, order, over=None)


Pausing = Callable[[Cluster, Checker], Awaitable[None]]


async def disable(cluster: Cluster, made: Checker) -> None:
    await cluster.store.create(DISABLE)


async def pause_by_order(cluster: Cluster, made: Checker) -> None:
    await give(cluster, checks_znode(PATHS), ChecksOrder(since_ms=1))


async def hold(cluster: Cluster, made: Checker) -> None:
    await give(cluster, hold_znode(PATHS), HoldOrder(since_ms=1, is_by_operator=True))


async def lose_for_a_while(cluster: Cluster, made: Checker) -> None:
    made.is_audit_pending = True


async def end_pauses(cluster: Cluster, made: Checker) -> None:
    made.is_audit_pending = False
    for path in (DISABLE, checks_znode(PATHS).path, hold_znode(PATHS).path):
        if await cluster.store.exists(path):
            await cluster.store.delete(path)


PAUSES = [
    pytest.param(
        disable,
        marks=pytest.mark.compat(
            "AuditorPeriodicCheckTest.testPeriodicCheckWhenDisabled", verdict="same"
        ),
        id="disabled",
    ),
    pytest.param(pause_by_order, id="by order"),
    pytest.param(hold, id="hold"),
    pytest.param(
        lose_for_a_while,
        marks=[
            pytest.mark.compat(
                "AuditorPeriodicCheckTest.testDelayBookieAuditOfCheckAllLedgers",
                "AuditorPeriodicCheckTest.testDelayBookieAuditOfPlacementPolicy",
                "AuditorPeriodicCheckTest.testDelayBookieAuditOfReplicasCheck",
                verdict="better",
                why="a running check pauses too; Java only delays its start",
            )
        ],
        id="a recovery delay runs",
    ),
]


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("kind", JAVAS_CHECKS, ids=lambda kind: kind.name)
async def test_nothing_is_checked_during_a_pause_but_all_after_it(
    cluster: Cluster, kind: CheckKind, pause: Pausing
) -> None:
    check = CountingCheck(kind)

    async with checker(cluster, check, settings=HOURS) as made:
        await pause(cluster, made)
        await asyncio.sleep(1)
        async with running(made):
            await asyncio.sleep(2 * HOUR_S)
            before = check.looked_at.copy()
            await end_pauses(cluster, made)
            await asyncio.sleep(10)

    assert before == []
    assert check.looked_at == list(range(10))


@pytest.mark.compat(
    "G6", verdict="better", why="the check pauses, and continues at the same position"
)
@pytest.mark.parametrize("pause", PAUSES)
async def test_a_paused_run_continues_where_it_was(cluster: Cluster, pause: Pausing) -> None:
    check = CountingCheck(part_size=2, part_s=10)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(25)  # in the middle of the third of five parts
        await pause(cluster, made)
        await asyncio.sleep(HOUR_S)
        paused = (await record(cluster)).running
        looked_at, stored_ms = check.looked_at.copy(), await checked_at_ms(cluster)
        await end_pauses(cluster, made)
        await asyncio.sleep(60)

    assert paused is not None
    assert paused.pause != ""
    assert (looked_at, paused.cursor, stored_ms) == ([0, 1, 2, 3], 4, None)
    assert check.looked_at == list(range(10))
    last = await last_run(cluster)
    assert (last.ledger_count, last.counts) == (10, {"even": 5})
    assert last.active_ms < 60_000, "the pause is no part of it"
    assert await checked_at_ms(cluster) == last.finished_ms


async def test_an_interrupted_part_does_not_check_ledgers_twice(cluster: Cluster) -> None:
    check = CountingCheck(part_size=10)
    trouble = [UnavailableError("no answer")]

    async def take_longer_each(ledger_id: int) -> None:
        await asyncio.sleep(10 * ledger_id)
        if ledger_id == 6 and trouble:
            raise trouble.pop()

    check.before = take_longer_each
    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(35)
        await disable(cluster, made)
        await asyncio.sleep(HOUR_S)
        assert check.looked_at == [0, 1, 2, 3]
        await end_pauses(cluster, made)
        await asyncio.sleep(200)

    assert check.looked_at == list(range(10))
    last = await last_run(cluster)
    assert (last.ledger_count, last.counts) == (10, {"even": 5})
    assert last.active_ms < 250_000


@pytest.mark.parametrize(
    ("orders", "is_disabled", "is_audit_pending", "expected"),
    [
        pytest.param(Orders(), False, False, "", id="nothing"),
        pytest.param(
            Orders(paused_checks=ChecksOrder(since_ms=1)), False, False, "by order", id="by order"
        ),
        pytest.param(Orders(), True, True, "auto-recovery is disabled", id="disabled"),
        pytest.param(
            Orders(hold=HoldOrder(since_ms=1)), False, False, "a safety hold is in force", id="hold"
        ),
        pytest.param(
            Orders(hold=HoldOrder(since_ms=1, is_released=True)), False, False, "", id="released"
        ),
        pytest.param(Orders(), False, True, "an absent bookie is not lost yet", id="a delay runs"),
    ],
)
def test_the_reason_why_checks_wait(
    orders: Orders, is_disabled: bool, is_audit_pending: bool, expected: str
) -> None:
    assert pause_of(orders, is_disabled=is_disabled, is_audit_pending=is_audit_pending) == expected


# --- Periodic checks that are interrupted ---------------------------------------------------------


@pytest.mark.compat("G6", verdict="better")
async def test_another_leader_continues_where_the_first_one_died(cluster: Cluster) -> None:
    first, second = CountingCheck(part_s=10), CountingCheck()
    async with checker(cluster, first, name="node-1", settings=HOURS) as made, running(made):
        await asyncio.sleep(25)
    assert await checked_at_ms(cluster) is None

    async with checker(cluster, second, name="node-2", settings=HOURS) as made, running(made):
        await asyncio.sleep(20)

    assert second.started_at == [4]
    assert first.looked_at + second.looked_at == list(range(10))
    last = await last_run(cluster)
    assert (last.ledger_count, last.counts) == (10, {"even": 5})


async def test_another_leader_continues_a_check_requested_early(cluster: Cluster) -> None:
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


async def test_a_run_overtaken_by_javas_auditor_is_not_continued(cluster: Cluster) -> None:
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


async def test_an_unreadable_record_restarts_the_run(cluster: Cluster) -> None:
    await cluster.store.create(PATHS.check(HOURLY.name), b'{"version": 9}', with_parents=True)
    check = CountingCheck()

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(10)

    assert check.looked_at == list(range(10))


async def test_a_part_cut_short_is_repeated_and_counted_once(cluster: Cluster) -> None:
    check = CountingCheck()
    failures = iter([UnavailableError("gone for a moment")] * 2)

    async def fail(ledger_id: int) -> None:
        if ledger_id == 4 and (error := next(failures, None)):
            raise error

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(2 * RETRY_S + 10)

    last = await last_run(cluster)
    assert (last.ledger_count, last.counts) == (10, {"even": 5})


async def test_a_defect_of_ours_skips_one_ledger(cluster: Cluster) -> None:
    """Neither the other ledgers nor the leadership suffer."""
    check = CountingCheck(part_size=5)

    async def fail(ledger_id: int) -> None:
        assert ledger_id != 3, "a defect"

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(30)

    assert sorted(check.looked_at) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    last = await last_run(cluster)
    assert last.counts == {"even": 5, "failed": 1}


async def test_a_lost_session_ends_the_check(cluster: Cluster) -> None:
    check = CountingCheck()

    async def fail(ledger_id: int) -> None:
        raise SessionLostError("over")

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made:
        with pytest.raises(SessionLostError):
            await made.runner.run_once()
    assert await checked_at_ms(cluster) is None


async def test_a_former_leader_stores_nothing(cluster: Cluster) -> None:
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

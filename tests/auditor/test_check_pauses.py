"""Reasons for which periodic checks wait, and how a run continues after a pause."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from auditor.checks.records import CheckKind
from auditor.checks.runner import pause_of
from ledgers.errors import UnavailableError
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
    HOURS,
    JAVAS_CHECKS,
    Checker,
    CountingCheck,
    checked_at_ms,
    checker,
    record,
    running,
    ten_ledgers,
)
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS

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
            ),
        ],
        id="a recovery delay runs",
    ),
]


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("kind", JAVAS_CHECKS, ids=lambda kind: kind.name)
async def test_nothing_is_checked_during_a_pause_but_all_after_it(
    kind: CheckKind,
    pause: Pausing,
) -> None:
    cluster = await ten_ledgers()
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
async def test_a_paused_run_continues_where_it_was(
    pause: Pausing,
) -> None:
    cluster = await ten_ledgers()
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
    last = (await record(cluster)).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (10, {"even": 5})
    assert last.active_ms < 60_000, "the pause is no part of it"
    assert await checked_at_ms(cluster) == last.finished_ms


async def test_an_interrupted_part_does_not_check_ledgers_twice() -> None:
    cluster = await ten_ledgers()
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
    last = (await record(cluster)).last
    assert last is not None
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

"""How periodic checks are run: when, for how long, and what becomes of a run that is cut short."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from auditor.checks.check import Check
from auditor.checks.kinds import ALL_LEDGERS, PLACEMENT, REPLICAS, CheckKind
from auditor.checks.records import CheckRecord, CheckRun, check_path
from auditor.checks.runner import RETRY_S, pause_of
from auditor.checks.schedule import FORCED_MS
from auditor.settings import ChecksSettings
from ledgers.errors import SessionLostError, UnavailableError
from replication.cluster.order_book import Order, OrderBook, Place, checks_place, hold_place
from replication.cluster.orders import ChecksOrder, HoldOrder, Orders
from replication.cluster.own_state import parse_record
from replication.queue import payloads
from tests.auditor.checking import (
    HOURLY,
    Checker,
    CountingCheck,
    checked_at_ms,
    checker,
    record,
    running,
    store_time,
)
from tests.auditor.scenes import with_ledgers
from tests.replication.cluster import Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import UR

T = TypeVar("T", bound=Order)

HOUR_S = 3_600
HOURS = ChecksSettings(
    all_ledgers_interval_s=HOUR_S, replicas_interval_s=HOUR_S, placement_interval_s=HOUR_S
)
NEVER = replace(HOURS, all_ledgers_interval_s=0)
DISABLE = payloads.disable_path(UR)


async def ten_ledgers() -> Cluster:
    return await with_ledgers(*[(B1, B2, B3)] * 10)


async def give(cluster: Cluster, place: Place[T], order: T) -> None:
    await OrderBook(cluster.store, UR).give(place, order, over=None)


# --- When --------------------------------------------------------------------------------------------

JAVAS_DELAYS = {
    ALL_LEDGERS: "testInitialDelayOfCheckAllLedgers",
    PLACEMENT: "testInitialDelayOfPlacementPolicyCheck",
    REPLICAS: "testInitialDelayOfReplicasCheck",
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.compat(f"AuditorPeriodicCheckTest.{test}", verdict="same"),
            id=kind.name,
        )
        for kind, test in JAVAS_DELAYS.items()
    ],
)
@pytest.mark.parametrize(
    ("age_s", "wait_s"),
    [
        pytest.param(None, 0, id="never run: at once"),
        pytest.param(HOUR_S - 60, 60, id="nearly due: after what is left"),
        pytest.param(HOUR_S + 60, 0, id="overdue: at once"),
        pytest.param(-HOUR_S, HOUR_S, id="in the future: after the whole interval"),
    ],
)
@in_virtual_time
async def test_the_first_run_follows_from_the_last_whoever_led_then(
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


@in_virtual_time
async def test_the_next_run_begins_an_interval_after_the_end_of_the_last() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=10, part_s=100)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(100 + HOUR_S - 1)
        once = check.started_at.copy()
        await asyncio.sleep(2)

    assert once == [0]
    assert check.started_at == [0, 0]


@in_virtual_time
async def test_a_check_that_is_switched_off_never_runs() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(100 * HOUR_S)

    assert check.started_at == []


@in_virtual_time
async def test_of_several_that_are_due_one_runs_at_a_time_the_longest_due_first() -> None:
    cluster = await ten_ledgers()
    now_ms = cluster.clock.wall_ms()
    begun: list[tuple[str, float]] = []

    async def note(check: CountingCheck, ids: Sequence[int]) -> None:
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


@pytest.mark.compat("G34", verdict="better", why="the leader watches the time that is taken back")
@pytest.mark.parametrize("age_days", [21, None], ids=["taken back by 21 days", "deleted"])
@pytest.mark.parametrize("interval_s", [HOUR_S, 30 * 24 * HOUR_S, 0])
@in_virtual_time
async def test_a_check_that_somebody_wants_runs_at_once_without_a_restart(
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
            await cluster.store.delete(payloads.audit_time_path(UR, payloads.Audit.ALL_LEDGERS))
        else:
            await store_time(cluster, cluster.clock.wall_ms() - age_days * 86_400_000)
        await asyncio.sleep(6)

    assert before == []
    assert check.started_at == [0]
    assert await checked_at_ms(cluster) is not None


@in_virtual_time
async def test_what_somebody_wants_while_nobody_leads_the_next_leader_does() -> None:
    cluster = await ten_ledgers()
    await store_time(cluster, FORCED_MS)
    check = CountingCheck()

    async with checker(cluster, check, settings=NEVER) as made, running(made):
        await asyncio.sleep(10)
        assert check.started_at == [0]
        await asyncio.sleep(10 * HOUR_S)

    assert check.started_at == [0], "once"


@in_virtual_time
async def test_no_check_begins_before_all_ledgers_are_known() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()

    async with checker(cluster, check, settings=HOURS) as made:
        made.is_index_ready = False
        async with running(made):
            await asyncio.sleep(60)
            assert check.started_at == []
            made.is_index_ready = True
            await asyncio.sleep(10)

    assert check.looked_at == list(range(10))


# --- Pauses ------------------------------------------------------------------------------------------


Pausing = Callable[[Cluster, Checker], Awaitable[None]]


async def disable(cluster: Cluster, made: Checker) -> None:
    await cluster.store.create(DISABLE)


async def pause_by_order(cluster: Cluster, made: Checker) -> None:
    await give(cluster, checks_place(UR), ChecksOrder(since_ms=1))


async def hold(cluster: Cluster, made: Checker) -> None:
    await give(cluster, hold_place(UR), HoldOrder(since_ms=1, is_by_operator=True))


async def lose_for_a_while(cluster: Cluster, made: Checker) -> None:
    made.is_audit_pending = True


async def end_pauses(cluster: Cluster, made: Checker) -> None:
    made.is_audit_pending = False
    for path in (DISABLE, checks_place(UR).path, hold_place(UR).path):
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
                why="a check that runs waits as well; Java's only does not begin",
            ),
        ],
        id="a recovery delay runs",
    ),
]


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("kind", JAVAS_DELAYS, ids=lambda kind: kind.name)
@in_virtual_time
async def test_nothing_is_looked_at_during_a_pause_and_everything_after_it(
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


@pytest.mark.compat("G6", verdict="better", why="it waits, and goes on where it was")
@pytest.mark.parametrize("pause", PAUSES)
@in_virtual_time
async def test_a_run_that_is_paused_goes_on_where_it_was_and_is_complete_only_then(
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


@pytest.mark.parametrize(
    ("orders", "is_disabled", "is_audit_pending", "expected"),
    [
        pytest.param(Orders(), False, False, "", id="nothing"),
        pytest.param(
            Orders(paused_checks=ChecksOrder(since_ms=1)), False, False, "by order", id="by order"
        ),
        pytest.param(Orders(), True, True, "auto-recovery is disabled", id="disabled"),
        pytest.param(Orders(hold=HoldOrder(since_ms=1)), False, False, "a hold stands", id="hold"),
        pytest.param(
            Orders(hold=HoldOrder(since_ms=1, is_released=True)), False, False, "", id="released"
        ),
        pytest.param(Orders(), False, True, "a bookie is away and not lost yet", id="a delay runs"),
    ],
)
def test_why_checks_wait(
    orders: Orders, is_disabled: bool, is_audit_pending: bool, expected: str
) -> None:
    assert pause_of(orders, is_disabled=is_disabled, is_audit_pending=is_audit_pending) == expected


# --- Cut short ---------------------------------------------------------------------------------------


@pytest.mark.compat("G6", verdict="better")
@in_virtual_time
async def test_another_leader_goes_on_where_the_first_one_died() -> None:
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


@in_virtual_time
async def test_another_leader_goes_on_with_what_somebody_wanted_before_it_was_due() -> None:
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


@in_virtual_time
async def test_a_run_that_javas_auditor_has_overtaken_is_not_gone_on_with() -> None:
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


@in_virtual_time
async def test_a_record_that_cannot_be_read_costs_a_run_from_the_beginning() -> None:
    cluster = await ten_ledgers()
    await cluster.store.create(check_path(UR, HOURLY.name), b'{"version": 9}', with_parents=True)
    check = CountingCheck()

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(10)

    assert check.looked_at == list(range(10))


@in_virtual_time
async def test_a_part_during_which_zookeeper_fails_is_done_again_and_counted_once() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()
    failures = iter([UnavailableError("gone for a moment")] * 2)

    async def fail(ledger_ids: Sequence[int]) -> None:
        if 4 in ledger_ids and (error := next(failures, None)):
            raise error

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(2 * RETRY_S + 10)

    last = (await record(cluster)).last
    assert last is not None
    assert (last.ledger_count, last.counts) == (10, {"even": 5})


@in_virtual_time
async def test_a_ledger_that_our_own_code_cannot_cope_with_costs_neither_the_rest_nor_the_leader() -> (
    None
):
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=5)

    async def fail(ledger_ids: Sequence[int]) -> None:
        assert 3 not in ledger_ids, "a defect"

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(30)

    assert check.looked_at == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    last = (await record(cluster)).last
    assert last is not None
    assert last.counts == {"even": 5, "failed": 1}


@in_virtual_time
async def test_a_session_that_is_lost_ends_it() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck()

    async def fail(ledger_ids: Sequence[int]) -> None:
        raise SessionLostError("over")

    check.before = fail
    async with checker(cluster, check, settings=HOURS) as made:
        with pytest.raises(SessionLostError):
            await made.runner.run_once()
    assert await checked_at_ms(cluster) is None


@in_virtual_time
async def test_who_leads_no_more_stores_nothing() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_s=10)

    async with checker(cluster, check, settings=HOURS) as made:
        task = asyncio.create_task(made.runner.run())
        await asyncio.sleep(25)
        before = await record(cluster)
        vote = (await cluster.store.children(payloads.election_path(UR)))[0]
        await cluster.store.delete(f"{payloads.election_path(UR)}/{vote}")
        with suppress(BaseExceptionGroup):
            await task

    assert task.done()
    assert await record(cluster) == before
    assert await checked_at_ms(cluster) is None


# --- What is told ------------------------------------------------------------------------------------


@in_virtual_time
async def test_how_far_a_run_is_stands_in_its_record_with_the_time_that_is_left() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=2, part_s=10)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(41)

    run = (await record(cluster)).running
    assert run is not None
    assert (run.ledger_count, run.ledgers_left, run.cursor) == (8, 2, 8)
    assert run.remaining_s == pytest.approx(10, rel=0.1)
    assert run.counts == {"even": 4}


@in_virtual_time
async def test_a_run_under_way_leaves_what_the_last_one_found() -> None:
    cluster = await ten_ledgers()
    check = CountingCheck(part_size=2, part_s=10)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(50 + HOUR_S + 15)

    found = await record(cluster)
    assert found.running is not None
    assert found.last is not None
    assert found.last.counts == {"even": 5}


@in_virtual_time
async def test_progress_is_written_every_few_seconds_at_most() -> None:
    cluster = await with_ledgers(*[(B1, B2, B3)] * 40)
    check = CountingCheck(part_size=1, part_s=0.5)
    writes: list[float] = []

    async with checker(cluster, check, settings=HOURS) as made:
        write = made.runner._records.write

        async def counted(name: str, record: CheckRecord) -> None:
            writes.append(cluster.clock.now_s())
            await write(name, record)

        made.runner._records.write = counted  # type: ignore[method-assign]
        async with running(made):
            await until(cluster, lambda: is_finished(check))

    assert 2 <= len(writes) <= 5, writes


async def is_finished(check: CountingCheck) -> bool:
    return check.finished_count == 1


def test_a_record_reads_back_as_it_was_written() -> None:
    run = CheckRun(
        started_ms=5, cursor=7, ledger_count=3, ledgers_left=4, active_ms=9, counts={"found": 1}
    )
    for found in (
        CheckRecord(),
        CheckRecord(running=replace(run, pause="by order"), last=replace(run, finished_ms=6)),
        CheckRecord(last_ms=0),
    ):
        assert CheckRecord.parse(parse_record(found.to_json())) == found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.compat(
                f"TestLedgerUnderreplicationManager.test{name}CTime", verdict="same"
            ),
            id=kind.name,
        )
        for kind, name in (
            (ALL_LEDGERS, "CheckAllLedgers"),
            (PLACEMENT, "PlacementPolicyCheck"),
            (REPLICAS, "ReplicasCheck"),
        )
    ],
)
@in_virtual_time
async def test_when_a_check_ran_last_stands_as_java_writes_it(kind: CheckKind) -> None:
    cluster = await ten_ledgers()
    assert kind.audit is not None
    assert await checked_at_ms(cluster, kind) is None

    for time_ms, data in (
        (1_700_000_000_000, "0880d095ffbc31"),
        (1_795_258_083_503, "08afd1e1ed9f34"),
    ):
        async with checker(cluster) as made:
            last = CheckRun(started_ms=1, finished_ms=time_ms)
            written = CheckRecord(last=last, last_ms=time_ms)
            await made.runner._records.write_finished(kind.name, written, kind.audit)

        stored, _ = await cluster.store.get(payloads.audit_time_path(UR, kind.audit))
        assert stored == bytes.fromhex(data)
        assert await checked_at_ms(cluster, kind) == time_ms
        assert (await record(cluster, kind)).last == last


@in_virtual_time
async def test_a_check_that_java_does_not_know_keeps_its_time_in_its_record() -> None:
    cluster = await ten_ledgers()
    ours = replace(HOURLY, name="ours", audit=None)
    check = CountingCheck(ours)

    async with checker(cluster, check, settings=HOURS) as made, running(made):
        await asyncio.sleep(60)
        assert check.started_at == [0]
        found = await record(cluster, ours)
        forced = replace(found, last_ms=FORCED_MS).to_json()
        await cluster.store.set(check_path(UR, "ours"), forced, version=-1)
        await asyncio.sleep(60)

    assert check.started_at == [0, 0]
    assert await checked_at_ms(cluster, ours) != FORCED_MS


class _Plain(Check):
    kind = HOURLY

    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        return Counter(seen=len(ledger_ids))


@in_virtual_time
async def test_a_check_needs_no_more_than_to_look() -> None:
    cluster = await ten_ledgers()

    async with checker(cluster, _Plain(), settings=HOURS) as made, running(made):
        await asyncio.sleep(1)

    last = (await record(cluster)).last
    assert last is not None
    assert last.counts == {"seen": 10}

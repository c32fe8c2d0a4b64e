"""Limits at bookies with active, inactive or unknown clients: the decision, and its effects."""

import asyncio
from collections.abc import Callable

import pytest

from ledgers.bulk.flow_control import (
    SHARED_ADDS_PER_S,
    SHARED_BYTES_PER_S,
    SHARED_SINGLE_READS_PER_S,
    Activity,
    ActivityOf,
    FlowControl,
    flow_limits,
)
from ledgers.model import BookieId
from tests.ledgers.simulated_flow import (
    WINDOW_ENTRIES,
    Client,
    Copying,
    SimulatedBookie,
    now_s,
    start_copying,
)
from tests.replication.cluster import in_virtual_time

A, B = BookieId("a:3181"), BookieId("b:3181")


def everywhere(activity: Activity) -> ActivityOf:
    return lambda bookie: activity


def tell(
    nodes: list[list[Copying]], activity_of: ActivityOf | None, *, sharer_count: int = 1
) -> None:
    for copyings in nodes:
        copyings[0].flow.set_activity(activity_of, sharer_count=sharer_count)


def stop(nodes: list[list[Copying]]) -> None:
    for copyings in nodes:
        copyings[0].flow.close()
        for copying in copyings:
            copying.quantum = 0


# --- The decision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharer_count", [1, 100])
def test_without_an_active_client_there_is_no_rate_limit(sharer_count: int) -> None:
    limits = flow_limits(Activity.QUIET, yields=True, sharer_count=sharer_count)

    assert limits.is_full_speed
    assert (limits.reads_per_s, limits.single_reads_per_s, limits.adds_per_s) == (0, 0, 0)
    assert not limits.is_by_reply_times


@pytest.mark.parametrize("activity", Activity)
def test_without_priority_of_clients_nothing_is_limited(activity: Activity) -> None:
    assert flow_limits(activity, yields=False, sharer_count=3).is_full_speed


@pytest.mark.parametrize("activity", [Activity.ACTIVE, Activity.UNKNOWN])
def test_nodes_share_the_rate_where_clients_may_be_active(activity: Activity) -> None:
    limits = flow_limits(activity, yields=True, sharer_count=10)

    assert limits.adds_per_s == SHARED_ADDS_PER_S // 10
    assert limits.single_reads_per_s == SHARED_SINGLE_READS_PER_S // 10
    assert limits.bytes_per_s == SHARED_BYTES_PER_S // 10
    assert limits.is_by_reply_times


def test_no_number_of_nodes_makes_a_rate_of_zero() -> None:
    """It would mean no limit."""
    assert flow_limits(Activity.ACTIVE, yields=True, sharer_count=10**9).adds_per_s == 1


@in_virtual_time
async def test_a_bookie_without_a_recent_record_is_unknown() -> None:
    flow = FlowControl()
    assert flow.of(A).limits == flow_limits(Activity.UNKNOWN, yields=True, sharer_count=1)

    flow.set_activity(
        lambda bookie: Activity.QUIET if bookie == A else Activity.ACTIVE, sharer_count=2
    )
    assert flow.of(A).limits.is_full_speed
    assert not flow.of(B).limits.is_full_speed
    assert flow.is_yielding

    flow.set_activity(None, sharer_count=2)
    assert flow.of(A).limits == flow_limits(Activity.UNKNOWN, yields=True, sharer_count=2)
    flow.close()


@in_virtual_time
async def test_users_are_told_when_limits_change_and_only_then() -> None:
    flow, told = FlowControl(), []
    flow.of(A).listeners.append(lambda: told.append(flow.of(A).limits))

    flow.set_activity(everywhere(Activity.ACTIVE), sharer_count=1)  # as good as unknown
    assert told == []
    flow.yields = False

    assert told == [flow_limits(Activity.ACTIVE, yields=False, sharer_count=1)]
    flow.close()


# --- The effects, on simulated bookies ------------------------------------------------------------


@in_virtual_time
async def test_without_clients_a_bookie_is_used_fully() -> None:
    bookie = SimulatedBookie(bookie_id=A)
    nodes = start_copying([bookie])
    tell(nodes, everywhere(Activity.QUIET))

    await asyncio.sleep(5)
    stop(nodes)

    assert bookie.copied_between(1, 5) > 0.95 * bookie.entries_per_s


@in_virtual_time
async def test_a_new_client_waits_little_once_it_is_known() -> None:
    bookie = SimulatedBookie(bookie_id=A)
    nodes = start_copying([bookie])
    tell(nodes, everywhere(Activity.QUIET))
    await asyncio.sleep(2)
    at_full_speed, beside = Client(bookie=bookie), Client(bookie=bookie)
    await at_full_speed.write(1)

    tell(nodes, everywhere(Activity.ACTIVE))
    told_s = now_s()
    await asyncio.sleep(WINDOW_ENTRIES / bookie.entries_per_s)  # what was sent before
    await beside.write(10)
    stop(nodes)

    assert at_full_speed.p99_s() > 0.8 * WINDOW_ENTRIES / bookie.entries_per_s
    assert beside.p99_s() < 0.3 * at_full_speed.p99_s()
    rate = bookie.copied_between(told_s + 1, told_s + 10)
    assert rate == pytest.approx(SHARED_ADDS_PER_S, rel=0.1)


@in_virtual_time
async def test_with_an_active_client_the_rate_does_not_oscillate() -> None:
    bookie = SimulatedBookie(bookie_id=A)
    nodes = start_copying([bookie])
    tell(nodes, everywhere(Activity.ACTIVE))

    await Client(bookie=bookie).write(20)
    stop(nodes)

    rates = [bookie.copied_between(second, second + 1) for second in range(2, 20)]
    assert min(rates) > 0.8 * max(rates)


@in_virtual_time
async def test_full_speed_returns_when_a_client_has_stopped() -> None:
    bookie = SimulatedBookie(bookie_id=A)
    nodes = start_copying([bookie])
    tell(nodes, everywhere(Activity.ACTIVE))
    await Client(bookie=bookie).write(5)

    tell(nodes, everywhere(Activity.QUIET))
    told_s = now_s()
    await asyncio.sleep(2)
    stop(nodes)

    assert bookie.copied_between(told_s + 0.5, told_s + 2) > 0.95 * bookie.entries_per_s


@pytest.mark.parametrize("activity", [Activity.QUIET, Activity.ACTIVE])
@in_virtual_time
async def test_a_slow_bookie_gets_what_it_can_store(
    activity: Activity,
) -> None:
    """It delays no other bookie."""
    slow, other = SimulatedBookie(bookie_id=A, entries_per_s=400), SimulatedBookie(bookie_id=B)
    nodes = start_copying([slow, other])
    tell(nodes, everywhere(activity))

    await asyncio.sleep(30)
    stop(nodes)

    assert slow.copied_between(10, 30) > 0.7 * slow.entries_per_s
    full = other.entries_per_s if activity is Activity.QUIET else SHARED_ADDS_PER_S
    assert other.copied_between(10, 30) > 0.9 * full


@in_virtual_time
async def test_a_hanging_bookie_gets_one_window_and_delays_no_other() -> None:
    hanging, other = SimulatedBookie(bookie_id=A, hangs=True), SimulatedBookie(bookie_id=B)
    nodes = start_copying([hanging, other])
    tell(nodes, everywhere(Activity.QUIET))

    await asyncio.sleep(5)
    stop(nodes)

    assert nodes[0][0].window.window.count <= WINDOW_ENTRIES
    assert other.copied_between(1, 5) > 0.95 * other.entries_per_s


@pytest.mark.parametrize(
    "is_busy",
    [lambda number: True, lambda number: number < 3],
    ids=["clients everywhere", "clients at three"],
)
@in_virtual_time
async def test_a_hundred_nodes_share_the_rate_of_ten_bookies(
    is_busy: Callable[[int], bool],
) -> None:
    """Clients are active on the bookies."""
    bookies = [SimulatedBookie(bookie_id=BookieId(f"{n}:3181")) for n in range(10)]
    nodes = start_copying(bookies, node_count=100)
    active = {bookie.bookie_id for n, bookie in enumerate(bookies) if is_busy(n)}
    tell(
        nodes,
        lambda bookie: Activity.ACTIVE if bookie in active else Activity.QUIET,
        sharer_count=100,
    )

    await asyncio.sleep(4)
    stop(nodes)

    for bookie in bookies:
        full = SHARED_ADDS_PER_S if bookie.bookie_id in active else bookie.entries_per_s
        assert bookie.copied_between(2, 4) == pytest.approx(full, rel=0.1)
    counts = [sum(copying.copied_count for copying in copyings) for copyings in nodes]
    assert min(counts) > 0.5 * max(counts)

"""Decisions on safety holds: when one begins, which bookies it names, and when it ends."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from auditor.safety_hold import BookieCensus, SafetyHolds, is_warranted, wanted_hold
from auditor.settings import HoldSettings
from ledgers.errors import LeadershipLostError, UnavailableError
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK
from ledgers.registration import BookieView
from ledgers.store import Operation, Stat
from replication.cluster import ClusterView
from replication.orders import (
    DrainOrder,
    HoldOrder,
    MaintenanceWindow,
    Orders,
    OrderStore,
    hold_znode,
)
from replication.records import Stored
from tests.auditor.auditing import Leader, leading
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, registered
from tests.replication.nodes import PATHS

TEN = tuple(BookieId(f"bookie-{name}:3181") for name in "abcdefghij")
A, B, C, D, E, F, G, H = TEN[:8]
SETTINGS = HoldSettings(share=0.3, bookies_min=3, window_s=120, lasts_s=3_600)
NOW_S, NOW_MS = 10_000.0, 1_700_000_000_000


def census(
    bookies: Sequence[BookieId],
    absent_for_s: Mapping[BookieId, float],
    *,
    settled: Sequence[BookieId] = (),
    racks: Mapping[BookieId, str] | None = None,
) -> BookieCensus:
    """Return a census. ``absent_for_s``: how long each absent bookie has been absent."""
    return BookieCensus(
        present=frozenset(bookies) - absent_for_s.keys(),
        absent_since_s={bookie: NOW_S - ago_s for bookie, ago_s in absent_for_s.items()},
        settled=frozenset(settled),
        rack_of=lambda bookie: (racks or {}).get(bookie, DEFAULT_RACK),
    )


def wanted(
    found: BookieCensus,
    current: HoldOrder | None = None,
    *,
    settings: HoldSettings = SETTINGS,
    is_calm: bool = False,
) -> HoldOrder | None:
    return wanted_hold(
        found, current, settings=settings, now_s=NOW_S, now_ms=NOW_MS, is_calm=is_calm
    )


def all_absent(*bookies: BookieId, ago_s: float = 1) -> dict[BookieId, float]:
    return dict.fromkeys(bookies, ago_s)


# --- The beginning --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bookies", "absent_for_s", "is_held"),
    [
        pytest.param(TEN, {}, False, id="no bookie is absent"),
        pytest.param(TEN, all_absent(A, B, C), False, id="the share itself is not more than it"),
        pytest.param(TEN, all_absent(A, B, C, D), True, id="more than the share, and enough"),
        pytest.param((A, B, C), all_absent(A, B), False, id="more than the share, but too few"),
        pytest.param((A, B, C, D, E), all_absent(A, B, C), True, id="three of five"),
        pytest.param((A, B, C), all_absent(A, B, C), True, id="all: it is ZooKeeper that failed"),
        pytest.param(
            TEN, {A: 121, B: 90, C: 60, D: 1}, True, id="within the window, its end included"
        ),
        pytest.param(
            TEN, {A: 122, B: 121, C: 60, D: 0}, False, id="too far apart for one mass failure"
        ),
        pytest.param(
            TEN,
            {A: 500, B: 400, C: 300, D: 200},
            False,
            id="each lost separately, one after the other",
        ),
        pytest.param(
            TEN,
            {A: 900, B: 900, C: 60, D: 60, E: 60},
            True,
            id="of the bookies present when the mass failure began, the share is greater",
        ),
        pytest.param(
            TEN,
            {A: 5_000, B: 5_000, C: 5_000, D: 5_000},
            True,
            id="long ago, but no ledger has been marked for them yet",
        ),
    ],
)
def test_a_hold_begins_when_both_share_and_minimum_disappear(
    bookies: Sequence[BookieId], absent_for_s: Mapping[BookieId, float], is_held: bool
) -> None:
    """More than a share of the bookies, and at least a minimum number, within the window."""
    hold = wanted(census(bookies, absent_for_s))

    assert (hold is not None) is is_held
    if hold is not None:
        assert not hold.is_released
        assert not hold.is_by_operator
        assert set(hold.bookies) == absent_for_s.keys()


@pytest.mark.parametrize(
    ("share", "absent", "is_held"),
    [
        pytest.param(0.0, (A, B), False, id="without a share the number decides: too few"),
        pytest.param(0.0, (A, B, C), True, id="without a share the number decides: enough"),
        pytest.param(1.0, TEN, False, id="more than all bookies is impossible"),
    ],
)
def test_the_extremes_of_the_share(share: float, absent: Sequence[BookieId], is_held: bool) -> None:
    """At 0 the number decides alone; at 1 only operators start a hold."""
    hold = wanted(census(TEN, all_absent(*absent)), settings=replace(SETTINGS, share=share))

    assert (hold is not None) is is_held


RACKS = {A: "/r1", B: "/r1", C: "/r2", D: "/r2", E: "/r3", F: "/r3"}


@pytest.mark.parametrize(
    ("bookies", "absent", "racks", "is_held"),
    [
        pytest.param((A, B, C, D, E, F), (A, B), RACKS, True, id="a whole rack of three"),
        pytest.param((A, B, C, D, E, F), (A, C), RACKS, False, id="halves of two racks"),
        pytest.param((A, B, C, D, E, F), (A, B), {}, False, id="the default rack is no rack"),
        pytest.param((A, C, D), (A,), RACKS, False, id="a rack of one bookie is no rack"),
        pytest.param(TEN, (A, B), RACKS, False, id="one small rack of many: an ordinary loss"),
        pytest.param(
            (A, B, C, D, E), (A, B), {**RACKS, C: "/r1"}, False, id="a bookie of the rack is left"
        ),
    ],
)
def test_the_loss_of_a_whole_rack_needs_no_minimum_number(
    bookies: Sequence[BookieId],
    absent: Sequence[BookieId],
    racks: Mapping[BookieId, str],
    is_held: bool,
) -> None:
    """The share must be exceeded all the same."""
    hold = wanted(census(bookies, all_absent(*absent), racks=racks))

    assert (hold is not None) is is_held
    if hold is not None:
        assert "/r1" in hold.reason


@pytest.mark.parametrize(
    ("absent_for_s", "settled", "is_held"),
    [
        pytest.param(
            all_absent(A, B, C, D, ago_s=5_000), (A, B, C, D), False, id="handled long ago"
        ),
        pytest.param(
            all_absent(A, B, C, D, ago_s=5_000), (A, B), False, id="too few are not handled yet"
        ),
        pytest.param(
            {A: 3, B: 2, C: 1, D: 0},
            (A, B),
            True,
            id="without a recovery delay the first are marked before the last disappear",
        ),
    ],
)
def test_bookies_already_marked_count_only_within_the_window(
    absent_for_s: Mapping[BookieId, float], settled: Sequence[BookieId], is_held: bool
) -> None:
    assert (wanted(census(TEN, absent_for_s, settled=settled)) is not None) is is_held


def test_a_hold_tells_its_reason_and_its_end() -> None:
    hold = wanted(census(TEN, all_absent(A, B, C, D)))

    assert hold is not None
    assert hold.reason == "4 of 10 bookies disappeared within 120 s"
    assert (hold.since_ms, hold.until_ms) == (NOW_MS, NOW_MS + 3_600_000)


def test_a_hold_without_a_bound_has_no_end_of_its_own() -> None:
    hold = wanted(census(TEN, all_absent(A, B, C, D)), settings=replace(SETTINGS, lasts_s=0))

    assert hold is not None
    assert hold.until_ms is None


def test_a_disabled_hold_does_not_begin_but_an_operators_stays() -> None:
    off = replace(SETTINGS, enabled=False)
    by_operator = HoldOrder(since_ms=1, is_by_operator=True)
    found = census(TEN, all_absent(A, B, C, D))

    assert wanted(found, settings=off) is None
    assert wanted(found, by_operator, settings=off) == by_operator
    assert wanted(found, HoldOrder(since_ms=1, bookies=(A, B, C, D)), settings=off) is None


# --- During a hold --------------------------------------------------------------------------------

HELD = HoldOrder(since_ms=NOW_MS - 1_000, until_ms=NOW_MS + 1_000, bookies=(A, B, C, D))


def test_a_running_hold_is_left_as_it_is() -> None:
    assert wanted(census(TEN, all_absent(A, B, C, D)), HELD) == HELD
    assert wanted(census(TEN, all_absent(A, B, C)), HELD) == HELD, "not yet for long enough"


def test_a_bookie_that_disappears_during_a_hold_is_added() -> None:
    hold = wanted(census(TEN, {**all_absent(A, B, C, D, ago_s=900), E: 0}), HELD)

    assert hold == replace(HELD, bookies=(A, B, C, D, E))


def test_a_hold_that_is_not_warranted_for_long_enough_ends() -> None:
    assert wanted(census(TEN, all_absent(A)), HELD, is_calm=True) is None


@pytest.mark.parametrize(
    ("absent", "is_still"),
    [
        pytest.param((A, B, C, D), True, id="no bookie is back"),
        pytest.param(
            (A, B, C), False, id="a bookie is back, and the absent ones are no more than the share"
        ),
        pytest.param((), False, id="all are back"),
        pytest.param((E, F, G, H), False, id="other bookies do not matter"),
    ],
)
def test_a_hold_depends_on_its_own_bookies_only(absent: Sequence[BookieId], is_still: bool) -> None:
    """The time at which they disappeared does not matter."""
    absent_for_s = {bookie: 1_000.0 * number for number, bookie in enumerate(absent)}

    assert is_warranted(HELD, census(TEN, absent_for_s), SETTINGS) is is_still


# --- Released -------------------------------------------------------------------------------------

RELEASED = replace(HELD, is_released=True)
OVER = replace(HELD, until_ms=NOW_MS)


@pytest.mark.parametrize("over", [RELEASED, OVER], ids=["by an operator", "by its own end"])
def test_no_second_hold_begins_for_the_same_bookies(over: HoldOrder) -> None:
    found = census(TEN, all_absent(A, B, C, D))

    hold = wanted(found, over)

    assert hold is not None
    assert hold.is_released
    assert wanted(found, hold) == hold


def test_a_single_further_loss_starts_no_hold() -> None:
    hold = wanted(census(TEN, {**all_absent(A, B, C, D), E: 1}), RELEASED)

    assert hold == RELEASED


def test_bookies_that_returned_may_start_a_hold_again() -> None:
    back = wanted(census(TEN, all_absent(A)), RELEASED)
    assert back == replace(RELEASED, bookies=(A,))
    assert wanted(census(TEN, {}), back) is None

    again = wanted(census(TEN, {A: 900, **all_absent(B, C, D)}), back)

    assert again is not None
    assert not again.is_released
    assert again.bookies == (B, C, D)


def test_an_operators_expired_hold_says_nothing_of_the_bookies() -> None:
    """Bookies that are still absent may start a hold."""
    over = HoldOrder(since_ms=1, until_ms=NOW_MS, is_by_operator=True)

    assert wanted(census(TEN, all_absent(A)), over) is None
    hold = wanted(census(TEN, all_absent(A, B, C, D)), over)
    assert hold is not None
    assert not hold.is_by_operator


def test_bookies_in_maintenance_or_decommissioned_do_not_count() -> None:
    view = ClusterView(
        bookies=BookieView(writable=registered((E, F))),
        cookies=dict.fromkeys((A, B, C, E, F), Stat(version=0)),
        orders=Orders(
            maintenance={A: MaintenanceWindow(since_ms=0, until_ms=1)},
            draining={B: DrainOrder(since_ms=0)},
        ),
    )

    found = BookieCensus.of(
        view,
        dict.fromkeys((A, B, C, D), 50.0),
        lost_since_s={C: 10.0, E: 20.0},
        rack_of=lambda _: DEFAULT_RACK,
    )

    assert found.present == {E, F}
    assert found.absent_since_s == {C: 10.0}, "A maintenance, B drained, D decommissioned"
    assert C in found.settled, (
        "an earlier leader marked its ledgers, and knew since when it is away"
    )


def test_without_any_cookie_every_absent_bookie_counts() -> None:
    found = BookieCensus.of(
        ClusterView(bookies=BookieView()),
        {A: 50.0},
        lost_since_s={},
        rack_of=lambda _: DEFAULT_RACK,
    )

    assert found.absent_since_s == {A: 50.0}


# --- The leader's writes of safety holds ----------------------------------------------------------

FAILED = (B1, B2, B3)
HOLD_ZNODE = hold_znode(PATHS)


@asynccontextmanager
async def updating(cluster: Cluster) -> AsyncIterator[tuple[Leader, SafetyHolds]]:
    async with leading(cluster) as leader:
        holds = SafetyHolds(
            store=leader.store,
            batcher=leader.batcher,
            paths=PATHS,
            settings=HoldSettings(),
            clock=cluster.clock,
        )
        yield leader, holds


async def update(
    leader: Leader, holds: SafetyHolds, *absent: BookieId, seen: HoldOrder | None = None
) -> bool:
    """Update the hold as if the view showed ``seen`` and these bookies had just disappeared."""
    now_s = asyncio.get_running_loop().time()
    view = leader.views.current
    present = {b: r for b, r in view.bookies.writable.items() if b not in absent}
    view = replace(view, bookies=replace(view.bookies, writable=present), orders=Orders(hold=seen))
    return await holds.update(view, dict.fromkeys(absent, now_s), lost_since_s={}) is not None


async def current_hold(cluster: Cluster) -> Stored[HoldOrder] | None:
    return await OrderStore(cluster.store, PATHS).stored(HOLD_ZNODE)


async def test_a_hold_that_the_view_does_not_show_is_not_written_twice(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        assert await update(leader, holds, *FAILED)
        assert await update(leader, holds, *FAILED)

        found = await current_hold(cluster)
        assert found is not None
        assert found.version == 0


async def test_a_release_that_the_view_does_not_show_is_obeyed(cluster: Cluster) -> None:
    held = HoldOrder(since_ms=cluster.clock.wall_ms(), bookies=FAILED)
    released = replace(held, is_released=True)
    await OrderStore(cluster.store, PATHS).give(HOLD_ZNODE, released, over=None)

    async with updating(cluster) as (leader, holds):
        assert not await update(leader, holds, *FAILED, seen=held)

    found = await current_hold(cluster)
    assert found is not None
    assert found.value == released


async def test_an_operators_earlier_order_wins(cluster: Cluster) -> None:
    order_store = OrderStore(cluster.store, PATHS)
    by_operator = HoldOrder(since_ms=1, reason="new switch", is_by_operator=True)
    async with updating(cluster) as (leader, holds):
        commit = leader.batcher.commit

        async def late(operations: Sequence[Operation]) -> object:
            if await current_hold(cluster) is None:
                await order_store.give(HOLD_ZNODE, by_operator, over=None)
            return await commit(operations)

        leader.batcher.commit = late  # type: ignore[assignment,method-assign]

        assert await update(leader, holds, *FAILED)

    found = await current_hold(cluster)
    assert found is not None
    assert found.value == by_operator


async def test_an_unreadable_order_counts_as_a_hold_and_stays(cluster: Cluster) -> None:
    await cluster.store.create(HOLD_ZNODE.path, b'{"version": 2}')
    async with updating(cluster) as (leader, holds):
        seen = (await OrderStore(leader.store, PATHS).read()).hold
        assert await update(leader, holds, B1, seen=seen)
        assert await update(leader, holds, *FAILED, seen=seen)

    assert (await cluster.store.get(HOLD_ZNODE.path))[0] == b'{"version": 2}'


async def test_nothing_is_decided_while_zookeeper_does_not_answer(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):

        def unresponsive(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
            return Fault.LOST_REQUEST if store is leader.store else None

        cluster.tree.faults = unresponsive
        with pytest.raises(UnavailableError):
            await update(leader, holds, *FAILED)
        cluster.tree.faults = None

        assert await update(leader, holds, *FAILED), "the next try does it"


async def test_a_hold_is_written_although_the_directory_was_deleted(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        await cluster.store.delete(PATHS.orders)

        assert await update(leader, holds, *FAILED)

    assert await current_hold(cluster) is not None


async def test_rule_s9_a_former_leader_orders_no_hold(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        await cluster.store.delete(leader.leadership.vote_path)

        with pytest.raises(LeadershipLostError):
            await update(leader, holds, *FAILED)

    assert await current_hold(cluster) is None


async def test_settings_that_are_applied_decide_from_then_on(cluster: Cluster) -> None:
    async with updating(cluster) as (leader, holds):
        holds.apply(HoldSettings(bookies_min=100))
        assert not await update(leader, holds, *FAILED[:2])

        holds.apply(HoldSettings(bookies_min=1, share=0))
        assert await update(leader, holds, *FAILED[:2])

"""Many bookies lost at once: the safety hold pauses marking until they return or an operator
decides."""

import asyncio

from structlog.testing import capture_logs

from auditor.safety_hold import CALM_S
from auditor.settings import HoldSettings
from daemon.operations.holds import end_hold
from ledgers.model import BookieId, LedgerState
from replication.orders import HoldOrder, OrderStore, hold_znode
from tests.auditor.auditing import auditing
from tests.auditor.scenes import delayed, marked_soon, set_delay, with_ledgers
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7, BOOKIES
from tests.replication.nodes import PATHS, ROOT, working
from tests.replication.repairs import watch_fencing

HOLD = HoldSettings()
LASTS_S = HOLD.lasts_s
FAILED = (B1, B2, B3)
DELAYED = delayed(1)
"""So that a wave is seen whole before its first bookie is lost, as is the way of sessions that
expire."""


async def current_hold(cluster: Cluster) -> HoldOrder | None:
    return (await OrderStore(cluster.store, PATHS).read()).at(cluster.clock.wall_ms()).hold


async def is_held(cluster: Cluster) -> bool:
    hold = await current_hold(cluster)
    return hold is not None and not hold.is_released


async def release(cluster: Cluster, *bookies: BookieId) -> None:
    """Release the hold, as an operator's command does."""
    assert await end_hold(visiting(cluster), bookies, clock=cluster.clock)


async def order(cluster: Cluster, *, for_s: float | None = None) -> None:
    now_ms = cluster.clock.wall_ms()
    until_ms = None if for_s is None else now_ms + int(for_s * 1000)
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    hold = HoldOrder(since_ms=now_ms, until_ms=until_ms, is_by_operator=True)
    await order_store.give(znode, hold, over=await order_store.stored(znode))


async def scene() -> Cluster:
    """Return a cluster with ledgers 0 to 6, each on two neighbours of seven bookies."""
    return await with_ledgers(*zip(BOOKIES, (*BOOKIES[1:], BOOKIES[0]), strict=True))


async def test_nothing_is_marked_until_a_hold_for_a_mass_failure_ends(cluster: Cluster) -> None:
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*FAILED)
        await asyncio.sleep(LASTS_S - 1)
        assert await cluster.marked() == []
        assert await is_held(cluster)

        await asyncio.sleep(3)

        assert await cluster.marked() == [0, 1, 2, 6]
        await asyncio.sleep(2 * LASTS_S)
        assert not await is_held(cluster), "it binds: nothing holds for them again"


async def test_an_operator_who_ends_it_has_the_ledgers_marked_at_once(cluster: Cluster) -> None:
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*FAILED)
        await asyncio.sleep(50)

        await release(cluster, *FAILED)

        assert await marked_soon(cluster) == [0, 1, 2, 6]


async def test_the_hold_ends_without_marks_when_the_bookies_are_back(cluster: Cluster) -> None:
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*FAILED)
        await asyncio.sleep(50)
        assert await is_held(cluster)

        for bookie in FAILED:
            await cluster.revive(bookie)
            await asyncio.sleep(5)
        assert await is_held(cluster), "they might go again"
        await asyncio.sleep(CALM_S)

        assert await current_hold(cluster) is None
        await asyncio.sleep(LASTS_S)
        assert await cluster.marked() == []


async def test_cookies_that_no_ledger_names_do_not_prolong_the_hold(cluster: Cluster) -> None:
    """Machines replaced long ago, never decommissioned; all ledgers were read."""
    for number in range(8):
        await cluster.store.create(f"{ROOT}/cookies/old{number}:3181")
    async with auditing(cluster):
        await asyncio.sleep(2 * CALM_S)
        assert not await is_held(cluster)

        await cluster.kill(B1)
        assert 0 in await marked_soon(cluster)


async def test_a_bookie_that_stays_absent_is_lost_when_the_hold_ends(cluster: Cluster) -> None:
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*FAILED)
        await asyncio.sleep(50)
        await cluster.revive(B1)
        await cluster.revive(B2)
        await asyncio.sleep(CALM_S + 1)

        assert await current_hold(cluster) is None
        assert await cluster.marked() == [1, 2]


async def test_flapping_bookies_do_not_end_the_hold(cluster: Cluster) -> None:
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*FAILED)
        await asyncio.sleep(1)
        with capture_logs() as logs:
            for _ in range(10):
                await asyncio.sleep(CALM_S - 1)
                await cluster.revive(B1)
                await asyncio.sleep(CALM_S - 1)
                await cluster.kill(B1)

        assert await is_held(cluster)
        assert await cluster.marked() == []
        assert not [each for each in logs if each["event"].startswith("hold.")]


async def test_without_a_delay_the_rest_of_a_mass_failure_is_held(cluster: Cluster) -> None:
    """The first two are marked at once; no auditor can know that more bookies will follow."""
    async with auditing(cluster):
        await cluster.kill(B1, B2)
        assert await marked_soon(cluster) == [0, 1, 6]

        await cluster.kill(B3, B4)
        assert await marked_soon(cluster) == [0, 1, 6]
        assert await is_held(cluster)


async def test_a_second_mass_failure_starts_another_hold(cluster: Cluster) -> None:
    """The marks of the first stay."""
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*FAILED)
        await asyncio.sleep(5)
        await release(cluster, *FAILED)
        assert await marked_soon(cluster) == [0, 1, 2, 6]
        await asyncio.sleep(HOLD.window_s)

        await cluster.kill(B4, B5, B6)
        await asyncio.sleep(5)

        assert await is_held(cluster)
        assert await cluster.marked() == [0, 1, 2, 6]


async def test_all_bookies_absent_and_back_one_by_one_mark_nothing(cluster: Cluster) -> None:
    """ZooKeeper itself was unreachable for longer than their sessions lasted."""
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*BOOKIES)
        await asyncio.sleep(60)
        assert await cluster.marked() == []

        for bookie in BOOKIES:
            await cluster.revive(bookie)
            await asyncio.sleep(2)
            assert await cluster.marked() == []
        await asyncio.sleep(CALM_S + 1)

        assert await current_hold(cluster) is None
        assert await cluster.marked() == []


async def test_a_new_leader_that_finds_most_bookies_absent_holds(cluster: Cluster) -> None:
    """After a power cut the bookies may return later than the leader."""
    await cluster.kill(*FAILED)
    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        assert await is_held(cluster)


async def test_the_hold_and_its_end_survive_a_change_of_leader(cluster: Cluster) -> None:
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*FAILED)
        await asyncio.sleep(5)
    with capture_logs() as logs:
        async with auditing(cluster, "node-2", settings=DELAYED):
            await asyncio.sleep(5)
            assert await cluster.marked() == []
            assert "hold.found" in [each["event"] for each in logs]
            await release(cluster, *FAILED)
            assert await marked_soon(cluster) == [0, 1, 2, 6]
    async with auditing(cluster, "node-3", settings=DELAYED):
        await asyncio.sleep(50)
        assert not await is_held(cluster)


async def test_successive_losses_are_no_mass_failure(cluster: Cluster) -> None:
    """Neither to the leader that sees them, nor to one that leads after a long pause."""
    async with auditing(cluster):
        for bookie in FAILED:
            await cluster.kill(bookie)
            await asyncio.sleep(HOLD.window_s + 1)
        assert await cluster.marked() == [0, 1, 2, 6]
        assert await current_hold(cluster) is None
    await asyncio.sleep(100_000)

    async with auditing(cluster, "node-2"):
        await asyncio.sleep(5)
        assert await current_hold(cluster) is None
        await cluster.kill(B4)
        assert await marked_soon(cluster) == [0, 1, 2, 3, 6]


async def test_an_audit_on_request_does_not_end_the_hold(cluster: Cluster) -> None:
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(*FAILED)
        await asyncio.sleep(70)

        await set_delay(cluster, 60)

        assert await marked_soon(cluster) == []
        assert await is_held(cluster)


async def test_an_operators_hold_does_not_depend_on_bookies(cluster: Cluster) -> None:
    async with auditing(cluster):
        await order(cluster, for_s=200)
        await asyncio.sleep(1)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == []

        await asyncio.sleep(101)

        assert await cluster.marked() == [0, 6]
        assert await current_hold(cluster) is None


async def test_an_unreadable_hold_counts_until_a_command_ends_it(cluster: Cluster) -> None:
    async with auditing(cluster):
        await cluster.store.create(hold_znode(PATHS).path, b"hold it!", with_parents=True)
        await asyncio.sleep(1)
        with capture_logs() as logs:
            await cluster.kill(B1)
            await asyncio.sleep(2 * LASTS_S)
            assert await cluster.marked() == []

            await release(cluster, B1)
            assert await marked_soon(cluster) == [0, 6]

    assert [each["event"] for each in logs if each["event"].startswith("hold.")] == ["hold.ended"]


async def test_an_operators_hold_is_followed_by_the_leaders_own(cluster: Cluster) -> None:
    """It ends during a mass failure."""
    async with auditing(cluster):
        await order(cluster, for_s=200)
        await asyncio.sleep(1)
        await cluster.kill(*FAILED)
        await asyncio.sleep(210)

        assert await cluster.marked() == []
        hold = await current_hold(cluster)
        assert hold is not None
        assert not hold.is_by_operator


async def test_the_hold_is_logged_once_as_an_error_with_the_next_step(cluster: Cluster) -> None:
    with capture_logs() as logs:
        async with auditing(cluster, settings=DELAYED):
            await cluster.kill(*FAILED)
            await asyncio.sleep(50)
            await cluster.kill(B4)
            await asyncio.sleep(50)
            await release(cluster, *FAILED, B4)
            await asyncio.sleep(1)

    [begun, ended] = [each for each in logs if each["event"].startswith("hold.")]
    assert (begun["event"], begun["log_level"]) == ("hold.began", "error")
    assert (begun["absent_count"], begun["bookie_count"]) == (3, 7)
    assert ended["event"] == "hold.ended"


async def test_during_a_hold_no_ledger_is_fenced(cluster: Cluster) -> None:
    """Closed ledgers are repaired."""
    await cluster.write_ledger(
        (B4, B5, B6), ledger_id=8, write_quorum=3, ack_quorum=2, state=LedgerState.OPEN
    )
    await cluster.write_ledger((B4, B7), ledger_id=9)
    fenced = watch_fencing(cluster)
    async with auditing(cluster, settings=DELAYED), cluster.node() as node, working(node):
        await cluster.kill(B4)
        await asyncio.sleep(5)
        await cluster.kill(*FAILED)
        await asyncio.sleep(200)

        assert await is_held(cluster)
        assert fenced == []
        assert B4 not in (await cluster.metadata(9)).bookies
        assert (await cluster.metadata(8)).state is LedgerState.OPEN

        await release(cluster, *FAILED, B4)
        await asyncio.sleep(100)
        assert (await cluster.metadata(8)).is_closed

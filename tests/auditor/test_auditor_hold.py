"""Many bookies gone at once: the leader holds, and marks nothing, until they are back or somebody
says so."""

import asyncio

import pytest
from structlog.testing import capture_logs

from auditor.safety_hold import CALM_S
from auditor.settings import HoldSettings
from daemon.cli.hold import end_hold
from ledgers.model import BookieId, LedgerState
from replication.orders import HoldOrder, OrderStore, hold_znode
from tests.auditor.auditing import auditing
from tests.auditor.scenes import delayed, marked_soon, set_delay, with_ledgers
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7, BOOKIES
from tests.replication.nodes import PATHS, ROOT, working
from tests.replication.repairs import watch_fencing

HOLD = HoldSettings()
LASTS_S = HOLD.lasts_s
WAVE = (B1, B2, B3)
DELAYED = delayed(1)
"""So that a wave is seen whole before its first bookie is lost, as is the way of sessions that
expire."""


async def standing(cluster: Cluster) -> HoldOrder | None:
    return (await OrderStore(cluster.store, PATHS).read()).at(cluster.clock.wall_ms()).hold


async def is_held(cluster: Cluster) -> bool:
    hold = await standing(cluster)
    return hold is not None and not hold.is_released


async def release(cluster: Cluster, *bookies: BookieId) -> None:
    """As an operator's command does."""
    assert await end_hold(visiting(cluster), bookies, clock=cluster.clock)


async def order(cluster: Cluster, *, for_s: float | None = None) -> None:
    now_ms = cluster.clock.wall_ms()
    until_ms = None if for_s is None else now_ms + int(for_s * 1000)
    order_store, znode = OrderStore(cluster.store, PATHS), hold_znode(PATHS)
    hold = HoldOrder(since_ms=now_ms, until_ms=until_ms, is_by_operator=True)
    await order_store.give(znode, hold, over=await order_store.stored(znode))


async def scene() -> Cluster:
    """Ledgers 0, 1, … 6, each on two neighbours of seven bookies."""
    return await with_ledgers(*zip(BOOKIES, (*BOOKIES[1:], BOOKIES[0]), strict=True))


@in_virtual_time
async def test_a_mass_loss_is_held_and_nothing_marked_until_its_own_end() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*WAVE)
        await asyncio.sleep(LASTS_S - 1)
        assert await cluster.marked() == []
        assert await is_held(cluster)

        await asyncio.sleep(3)

        assert await cluster.marked() == [0, 1, 2, 6]
        await asyncio.sleep(2 * LASTS_S)
        assert not await is_held(cluster), "it binds: nothing holds for them again"


@in_virtual_time
async def test_an_operator_who_ends_it_has_them_marked_at_once() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*WAVE)
        await asyncio.sleep(50)

        await release(cluster, *WAVE)

        assert await marked_soon(cluster) == [0, 1, 2, 6]


@in_virtual_time
async def test_when_they_are_back_the_hold_ends_and_nothing_was_ever_marked() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*WAVE)
        await asyncio.sleep(50)
        assert await is_held(cluster)

        for bookie in WAVE:
            await cluster.revive(bookie)
            await asyncio.sleep(5)
        assert await is_held(cluster), "they might go again"
        await asyncio.sleep(CALM_S)

        assert await standing(cluster) is None
        await asyncio.sleep(LASTS_S)
        assert await cluster.marked() == []


@in_virtual_time
async def test_cookies_of_machines_that_no_ledger_names_hold_nothing_once_all_ledgers_were_read() -> (
    None
):
    """They were replaced long ago, and never decommissioned."""
    cluster = await scene()
    for number in range(8):
        await cluster.store.create(f"{ROOT}/cookies/old{number}:3181")
    async with auditing(cluster):
        await asyncio.sleep(2 * CALM_S)
        assert not await is_held(cluster)

        await cluster.kill(B1)
        assert 0 in await marked_soon(cluster)


@in_virtual_time
async def test_whoever_does_not_come_back_with_the_others_is_lost_when_the_hold_ends() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*WAVE)
        await asyncio.sleep(50)
        await cluster.revive(B1)
        await cluster.revive(B2)
        await asyncio.sleep(CALM_S + 1)

        assert await standing(cluster) is None
        assert await cluster.marked() == [1, 2]


@in_virtual_time
async def test_bookies_that_flap_do_not_end_it() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*WAVE)
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


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param((B1, B2), id="two of seven"),
        pytest.param((B4,), id="one"),
    ],
)
@in_virtual_time
async def test_ordinary_losses_are_marked_as_ever(lost: tuple[BookieId, ...]) -> None:
    cluster = await scene()
    async with auditing(cluster):
        await cluster.kill(*lost)

        assert len(await marked_soon(cluster)) == len(lost) + 1
        assert await standing(cluster) is None


@in_virtual_time
async def test_three_that_go_one_after_the_other_are_three_ordinary_losses() -> None:
    cluster = await scene()
    async with auditing(cluster):
        for bookie in WAVE:
            await cluster.kill(bookie)
            await asyncio.sleep(HOLD.window_s + 1)

        assert await cluster.marked() == [0, 1, 2, 6]
        assert await standing(cluster) is None


@in_virtual_time
async def test_of_a_wave_without_a_recovery_delay_the_rest_is_held() -> None:
    """The first two are marked at once; that more come nobody can know."""
    cluster = await scene()
    async with auditing(cluster):
        await cluster.kill(B1, B2)
        assert await marked_soon(cluster) == [0, 1, 6]

        await cluster.kill(B3, B4)
        assert await marked_soon(cluster) == [0, 1, 6]
        assert await is_held(cluster)


@in_virtual_time
async def test_a_further_wave_is_held_for_and_the_first_stays_marked() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*WAVE)
        await asyncio.sleep(5)
        await release(cluster, *WAVE)
        assert await marked_soon(cluster) == [0, 1, 2, 6]
        await asyncio.sleep(HOLD.window_s)

        await cluster.kill(B4, B5, B6)
        await asyncio.sleep(5)

        assert await is_held(cluster)
        assert await cluster.marked() == [0, 1, 2, 6]


@in_virtual_time
async def test_all_bookies_gone_and_back_one_by_one_mark_nothing() -> None:
    """As when ZooKeeper itself was away for longer than their sessions lasted."""
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*BOOKIES)
        await asyncio.sleep(60)
        assert await cluster.marked() == []

        for bookie in BOOKIES:
            await cluster.revive(bookie)
            await asyncio.sleep(2)
            assert await cluster.marked() == []
        await asyncio.sleep(CALM_S + 1)

        assert await standing(cluster) is None
        assert await cluster.marked() == []


@in_virtual_time
async def test_a_leader_that_finds_most_bookies_away_holds() -> None:
    """After a power cut they may come back later than the leader does."""
    cluster = await scene()
    await cluster.kill(*WAVE)
    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        assert await is_held(cluster)


@in_virtual_time
async def test_a_hold_outlives_its_leader_and_so_does_its_end() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=DELAYED):
        await cluster.kill(*WAVE)
        await asyncio.sleep(5)
    with capture_logs() as logs:
        async with auditing(cluster, "node-2", settings=DELAYED):
            await asyncio.sleep(5)
            assert await cluster.marked() == []
            assert "hold.found" in [each["event"] for each in logs]
            await release(cluster, *WAVE)
            assert await marked_soon(cluster) == [0, 1, 2, 6]
    async with auditing(cluster, "node-3", settings=DELAYED):
        await asyncio.sleep(50)
        assert not await is_held(cluster)


@in_virtual_time
async def test_bookies_lost_long_ago_are_no_wave_to_a_leader_that_comes_after_a_long_pause() -> (
    None
):
    cluster = await scene()
    async with auditing(cluster):
        for bookie in WAVE:
            await cluster.kill(bookie)
            await asyncio.sleep(HOLD.window_s + 1)
    await asyncio.sleep(100_000)

    async with auditing(cluster, "node-2"):
        await asyncio.sleep(5)
        assert await standing(cluster) is None
        await cluster.kill(B4)
        assert await marked_soon(cluster) == [0, 1, 2, 3, 6]


@in_virtual_time
async def test_asking_for_an_audit_ends_no_hold() -> None:
    cluster = await scene()
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(*WAVE)
        await asyncio.sleep(70)

        await set_delay(cluster, 60)

        assert await marked_soon(cluster) == []
        assert await is_held(cluster)


@in_virtual_time
async def test_an_operators_hold_stands_whatever_the_bookies_do() -> None:
    cluster = await scene()
    async with auditing(cluster):
        await order(cluster, for_s=200)
        await asyncio.sleep(1)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == []

        await asyncio.sleep(101)

        assert await cluster.marked() == [0, 6]
        assert await standing(cluster) is None


@in_virtual_time
async def test_a_hold_that_nobody_can_read_is_kept_to_until_it_is_ended_by_command() -> None:
    cluster = await scene()
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


@in_virtual_time
async def test_an_operators_hold_that_ends_amid_a_mass_loss_is_followed_by_the_leaders() -> None:
    cluster = await scene()
    async with auditing(cluster):
        await order(cluster, for_s=200)
        await asyncio.sleep(1)
        await cluster.kill(*WAVE)
        await asyncio.sleep(210)

        assert await cluster.marked() == []
        hold = await standing(cluster)
        assert hold is not None
        assert not hold.is_by_operator


@in_virtual_time
async def test_it_is_said_loudly_once_with_the_next_step() -> None:
    cluster = await scene()
    with capture_logs() as logs:
        async with auditing(cluster, settings=DELAYED):
            await cluster.kill(*WAVE)
            await asyncio.sleep(50)
            await cluster.kill(B4)
            await asyncio.sleep(50)
            await release(cluster, *WAVE, B4)
            await asyncio.sleep(1)

    [begun, ended] = [each for each in logs if each["event"].startswith("hold.")]
    assert (begun["event"], begun["log_level"]) == ("hold.begun", "error")
    assert (begun["away_count"], begun["bookie_count"]) == (3, 7)
    assert "bookmender hold end" in begun["next_step"]
    assert ended["event"] == "hold.ended"


@in_virtual_time
async def test_it_can_be_switched_off() -> None:
    cluster = await scene()
    async with auditing(cluster, hold=HoldSettings(enabled=False)):
        await cluster.kill(*WAVE)

        assert await marked_soon(cluster) == [0, 1, 2, 6]


@in_virtual_time
async def test_nothing_is_fenced_by_any_node_and_closed_ledgers_are_repaired() -> None:
    cluster = await scene()
    await cluster.write_ledger(
        (B4, B5, B6), ledger_id=8, write_quorum=3, ack_quorum=2, state=LedgerState.OPEN
    )
    await cluster.write_ledger((B4, B7), ledger_id=9)
    fenced = watch_fencing(cluster)
    async with auditing(cluster, settings=DELAYED), cluster.node() as node, working(node):
        await cluster.kill(B4)
        await asyncio.sleep(5)
        await cluster.kill(*WAVE)
        await asyncio.sleep(200)

        assert await is_held(cluster)
        assert fenced == []
        assert B4 not in (await cluster.metadata(9)).bookies
        assert (await cluster.metadata(8)).state is LedgerState.OPEN

        await release(cluster, *WAVE, B4)
        await asyncio.sleep(100)
        assert (await cluster.metadata(8)).is_closed

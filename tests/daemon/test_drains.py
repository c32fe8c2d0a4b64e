"""Drains that operators order, wait for and cancel."""

import asyncio
from dataclasses import replace

import pytest
from click.testing import CliRunner

from auditor.records import DrainProgress
from daemon.admin_session import AdminSession
from daemon.cli import bookie as drain_command
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.drains import (
    Drains,
    DrainsRecord,
    cancel_drains,
    concerns,
    read_drains,
    wait_drained,
)
from daemon.operations.orders import node_concerns
from ledgers.errors import CorruptionError
from ledgers.model import BookieId
from replication import znodes
from replication.nodes import Membership, Role
from replication.orders import DrainOrder, Orders, OrderStore, drain_znode
from tests.auditor.auditing import draining, leading
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import Heard, order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, node_info
from tests.said import Said


async def drained(cluster: Cluster, heard: Heard, *bookies: BookieId) -> Drains:
    """Wait until the bookies, by default B1, are drained."""
    return await wait_drained(
        visiting(cluster),
        bookies or [B1],
        notify=heard.tell,
        show=heard.show,
        clock=cluster.clock,
    )


@in_virtual_time
async def test_a_repeated_drain_order_changes_only_its_terms() -> None:
    cluster = await Cluster.start()
    await order_drain(cluster, B1)
    first = (await OrderStore(cluster.store, PATHS).read()).draining[B1]
    await asyncio.sleep(10)

    await order_drain(cluster, B1, B2, may_fence=True)

    draining_now = (await OrderStore(cluster.store, PATHS).read()).draining
    assert draining_now[B1] == DrainOrder(since_ms=first.since_ms, may_fence=True)
    assert draining_now[B2].since_ms > first.since_ms

    await order_drain(cluster, B1, may_fence=None)
    assert (await OrderStore(cluster.store, PATHS).read()).draining[B1].may_fence, "unchanged"
    await order_drain(cluster, B1, may_fence=False)
    assert not (await OrderStore(cluster.store, PATHS).read()).draining[B1].may_fence


@in_virtual_time
async def test_an_unreadable_drain_order_can_only_be_cancelled() -> None:
    """A later release may have written the order."""
    cluster = await Cluster.start()
    await cluster.store.create(drain_znode(PATHS, B1).path, b"{}", with_parents=True)

    with pytest.raises(CorruptionError, match="--cancel"):
        await order_drain(cluster, B1)

    assert await cancel_drains(visiting(cluster), [B1, B2]) == [B1]
    assert await cluster.store.exists(drain_znode(PATHS, B1).path) is None


@in_virtual_time
async def test_waiting_for_a_drain_ends_when_no_ledger_names_it() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await order_drain(cluster, B1, B4)
    heard = Heard()
    async with draining(cluster):
        waiting = asyncio.create_task(drained(cluster, heard))
        await asyncio.sleep(30)
        assert not waiting.done()
        for ledger_id in (0, 1):
            await cluster.store.delete(cluster.manager.path(ledger_id))
            await _unmark(cluster, ledger_id)
        drains = await asyncio.wait_for(waiting, 100)

    assert drains.are_drained([B1])
    assert drains.orders.draining.keys() == {B1}, "the other bookie was not asked for"
    assert heard.left[0] == 2


@in_virtual_time
async def test_waiting_for_a_drain_ends_when_it_is_cancelled() -> None:
    cluster = await with_ledgers((B1, B2))
    await order_drain(cluster, B1)
    waiting = asyncio.create_task(drained(cluster, Heard()))
    await asyncio.sleep(10)
    assert not waiting.done(), "no leader has counted its ledgers yet"

    await cancel_drains(visiting(cluster), [B1])
    drains = await asyncio.wait_for(waiting, 10)

    assert not drains.are_drained([B1])


@in_virtual_time
async def test_progress_of_an_earlier_drain_order_does_not_count() -> None:
    cluster = await with_ledgers((B2, B3))
    await order_drain(cluster, B1)
    async with draining(cluster):
        await asyncio.sleep(1)
        assert (await read_drains(visiting(cluster))).are_drained([B1])
    await cancel_drains(visiting(cluster), [B1])
    await asyncio.sleep(1)

    await order_drain(cluster, B1)

    drains = await read_drains(visiting(cluster))
    assert not drains.are_drained([B1])
    assert drains.ledgers_left is None


IN_DOUBT = DrainProgress(
    since_ms=1,
    ledgers_left=0,
    ledgers_most=9,
    is_drained=False,
    is_in_doubt=True,
    unreadable_count=23,
    unreadable=(4, 7),
)


def drains_of(**progress: DrainProgress) -> Drains:
    orders = Orders(draining={BookieId(b): DrainOrder(since_ms=1) for b in progress})
    return Drains(orders=orders, progress={BookieId(b): told for b, told in progress.items()})


DRAINED = DrainProgress(since_ms=1, ledgers_left=0, ledgers_most=9, is_drained=True)
UNDER_WAY = replace(DRAINED, ledgers_left=3, is_drained=False)
SCENES: dict[str, dict[str, DrainProgress]] = {
    "no drain": {},
    "drained": {"b1": DRAINED},
    "under way": {"b1": replace(UNDER_WAY, ledgers_left=5, ledgers_most=1_000)},
    "not proven to be empty yet": {"b1": replace(UNDER_WAY, ledgers_left=0)},
    "under way, with unreadable ledgers": {
        "b1": replace(UNDER_WAY, unreadable_count=2, unreadable=(4, 7))
    },
    "in doubt": {"b1": IN_DOUBT},
}


def test_how_far_drains_are_is_told(said: Said) -> None:
    row = BookieRow(
        bookie=B1, state=BookieState.READ_ONLY, has_cookie=True, drain=DrainOrder(since_ms=1)
    )

    said(
        "drains",
        {name: drains_of(**progress).to_text() for name, progress in SCENES.items()}
        | {
            f"in the list of bookies: {name}": replace(row, progress=progress.get("b1")).to_text(
                now_ms=0
            )
            for name, progress in SCENES.items()
        },
    )
    record = drains_of(b1=IN_DOUBT).record().bookies["b1"]
    assert (record.is_drained, record.is_in_doubt) == (False, True)
    assert (record.unreadable_count, record.unreadable) == (23, [4, 7])
    none = drains_of().record()
    assert none == DrainsRecord(bookies={}, unreadable_orders=[], blocked=[])


@pytest.mark.parametrize(
    ("progress", "exit_code"),
    [
        pytest.param({}, 0, id="nothing to drain"),
        pytest.param({"b1": DRAINED, "b2": DRAINED}, 0, id="all drained"),
        pytest.param({"b1": DRAINED, "b2": UNDER_WAY}, 1, id="one under way"),
        pytest.param({"b1": IN_DOUBT, "b2": UNDER_WAY}, 1, id="one in doubt, one under way"),
        pytest.param({"b1": IN_DOUBT, "b2": DRAINED}, 3, id="only unreadable ledgers left"),
    ],
)
def test_the_exit_code_depends_on_whether_all_is_drained(
    progress: dict[str, DrainProgress], exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_command, "run_in_session", lambda config, act: drains_of(**progress))

    result = CliRunner().invoke(drain_command.drain, [])

    assert result.exit_code == exit_code, result.output


@in_virtual_time
async def test_waiting_for_a_bookie_named_twice_waits_once() -> None:
    cluster = await with_ledgers((B1, B2))
    await order_drain(cluster, B1)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await drained(cluster, Heard(), B1, B1)


@in_virtual_time
async def test_waiting_ends_when_only_unreadable_ledgers_are_left() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.set(cluster.manager.path(1), b"?" + B1.encode(), version=-1)
    await order_drain(cluster, B1)
    async with draining(cluster):
        waiting = asyncio.create_task(drained(cluster, Heard()))
        await asyncio.sleep(30)
        assert not waiting.done(), "a ledger is still moving"
        await cluster.store.delete(cluster.manager.path(0))
        await _unmark(cluster, 0)
        drains = await asyncio.wait_for(waiting, 100)

    assert not drains.are_drained([B1])
    assert drains.progress[B1].unreadable == (1,)


async def obstacles(here: AdminSession, *bookies: BookieId) -> list[str]:
    return [*await concerns(here, bookies), *await node_concerns(here, ignored="drains")]


@in_virtual_time
async def test_obstacles_to_a_drain_are_reported_with_advice() -> None:
    cluster = await Cluster.start(B1, B2)
    here = visiting(cluster)

    writable, no_leader = await obstacles(here, B1)
    assert f"{B1} still accepts writes" in writable
    assert "readonly" in writable
    assert "No auditor is running" in no_leader

    *_, alone, _ = await obstacles(here, B1, B2)
    assert "No other writable bookie can take the copies" in alone

    await cluster.unregister(B1)
    await cluster.register(B1, is_read_only=True)
    async with leading(cluster):
        (no_worker,) = await obstacles(here, B1)
        assert no_worker.startswith("No bookmender worker is running")
        await Membership.join(cluster.store, PATHS, node_info("me", Role.HAND))
        assert await obstacles(here, B1) == [no_worker], "a repair by hand moves nothing else"
        await Membership.join(cluster.store, PATHS, node_info("node-1"))
        assert await obstacles(here, B1) == []
        await cluster.store.create(PATHS.disable)
        (disabled,) = await obstacles(here, B1)
        assert "bookmender enable" in disabled


@in_virtual_time
async def test_waiting_reports_each_change_of_its_obstacles() -> None:
    cluster, heard = await with_ledgers((B1, B2)), Heard()
    await order_drain(cluster, B1)
    told: list[int] = []
    async with draining(cluster):
        waiting = asyncio.create_task(drained(cluster, heard))
        await asyncio.sleep(100)
        told.append(len(heard.told))
        async with cluster.node():
            await asyncio.sleep(100)
            told.append(len(heard.told))
            await cluster.store.create(PATHS.disable)
            await asyncio.sleep(100)
            told.append(len(heard.told))
            await cluster.store.delete(PATHS.disable)
            await asyncio.sleep(100)
        await asyncio.sleep(100)
        waiting.cancel()

    no_worker, again, disabled, enabled, gone = heard.told
    assert told == [1, 2, 3]
    assert no_worker.startswith("No bookmender worker is running")
    assert again == enabled == "Nodes are at work now."
    assert disabled.startswith("Auto-recovery is disabled")
    assert gone == no_worker


@in_virtual_time
async def test_a_java_leader_is_named_as_an_obstacle() -> None:
    cluster = await Cluster.start(B1, B2)
    await Membership.join(cluster.store, PATHS, node_info("node-1", Role.WORKER))
    java = visiting(cluster).store
    await java.create(
        f"{PATHS.election}/V_",
        znodes.vote_to_bytes("java-1:3181"),
        is_ephemeral=True,
        is_sequential=True,
    )

    assert "Java's AutoRecovery (java-1:3181)" in (await obstacles(visiting(cluster), B1))[-1]


async def _unmark(cluster: Cluster, ledger_id: int) -> None:
    path = PATHS.private.mark(ledger_id)
    await cluster.store.delete(path)
    await cluster.store.delete(path.rpartition("/")[0])

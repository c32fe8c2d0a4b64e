"""Removing a bookie from a cluster for good, while other things happen."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest

from daemon.cli.bookie import decommission as decommission_command
from daemon.operations import decommission
from daemon.operations.errors import UnknownBookieError
from daemon.operations.holds import begin_hold
from ledgers.errors import ConflictError, RejectedError, UnavailableError
from ledgers.model import BookieId
from replication.orders import OrderStore
from tests.auditor.auditing import auditing
from tests.auditor.scenes import delayed, with_ledgers
from tests.daemon.decommissioning import decommissioned, done, has_cookie
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import Heard, order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, ROOT, working
from tests.replication.repairs import drain

STRANGER = BookieId("stranger:3181")
"""A bookie outside the cluster."""


# --- A complete decommission ----------------------------------------------------------------------


@pytest.mark.compat(
    "BookieDecommissionTest.testDecommissionBookie",
    "BookieDecommissionTest.testDecommissionForLedgersWithMultipleSegmentsAndNotWriteClosed",
    "BookieDecommissionTest.testDecommissionForEmptyLedgers",
    verdict="better",
    why="it waits only for ledgers that name the bookie, shows how many are left, and can be "
    "interrupted and repeated",
)
@in_virtual_time
async def test_a_stopped_bookie_goes_when_its_ledgers_have_moved() -> None:
    """The decommission does not wait for the recovery delay."""
    cluster = await with_ledgers((B1, B2), (B2, B3), (B1, B3))
    heard = Heard()
    async with auditing(cluster, settings=delayed(3_600)), cluster.node() as node, working(node):
        await cluster.kill(B1)
        await asyncio.sleep(1)
        assert await cluster.marked() == []

        assert await decommissioned(cluster, heard=heard) == done(moved=2)
        assert not await has_cookie(cluster)
        assert heard.told == []
        assert heard.left[0] == 2
        for ledger_id in (0, 2):
            assert B1 not in (await cluster.metadata(ledger_id)).bookies
        await cluster.assert_queue_empty()
        await cluster.assert_whole(0, 1, 2)


@in_virtual_time
async def test_a_safety_hold_is_reported_while_it_waits() -> None:
    cluster = await with_ledgers((B1, B2))
    heard = Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await begin_hold(visiting(cluster), duration_s=60, reason="", clock=cluster.clock)
        await cluster.kill(B1)

        await decommissioned(cluster, heard=heard)

    (told,) = heard.told
    assert "safety hold is in force" in told
    assert "bookmender hold" in told


@in_virtual_time
async def test_a_second_decommission_does_nothing() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    assert await decommissioned(cluster) == done()

    assert await decommissioned(cluster) == done(had_cookie=False)


async def give_cookie(cluster: Cluster) -> None:
    await cluster.store.create(f"{ROOT}/cookies/{STRANGER}")


async def give_drain_order(cluster: Cluster) -> None:
    await drain(cluster, STRANGER)


async def name_in_a_mark(cluster: Cluster) -> None:
    await cluster.mark(STRANGER, ledger_id=0)


async def name_in_a_ledger(cluster: Cluster) -> None:
    await cluster.write_ledger((STRANGER, B2, B3), ledger_id=9)


@pytest.mark.parametrize(
    ("spoken_of_by", "was_known"),
    [
        pytest.param(None, False, id="nothing"),
        pytest.param(give_cookie, True, id="its cookie"),
        pytest.param(give_drain_order, True, id="an order"),
        pytest.param(name_in_a_mark, True, id="a mark"),
        pytest.param(name_in_a_ledger, True, id="a ledger"),
    ],
)
@in_virtual_time
async def test_a_bookie_id_is_known_if_any_record_names_it(
    spoken_of_by: Callable[[Cluster], Awaitable[None]] | None, was_known: bool
) -> None:
    cluster = await with_ledgers((B1, B2))
    if spoken_of_by is not None:
        await spoken_of_by(cluster)

    async with auditing(cluster), cluster.node() as node, working(node):
        waiting = decommissioned(cluster, STRANGER, ignores_unknown=False)
        with nullcontext() if was_known else pytest.raises(UnknownBookieError):
            await asyncio.wait_for(waiting, 600)


def test_an_unknown_bookie_is_wrong_usage_unless_ignored(in_memory: InMemory) -> None:
    refused, _ = in_memory(decommission_command, STRANGER)
    assert isinstance(refused.exception, UnknownBookieError)
    assert f"Nothing names {STRANGER}" in str(refused.exception)

    ignored, _ = in_memory(decommission_command, STRANGER, "--ignore-unknown")
    assert ignored.exit_code == 0


@pytest.mark.compat(
    "BookieDecommissionTest.testDecommissionBookie",
    "BookieDecommissionTest.testDecommissionForLedgersWithMultipleSegmentsAndNotWriteClosed",
    "BookieDecommissionTest.testDecommissionForEmptyLedgers",
    verdict="better",
)
@in_virtual_time
async def test_an_interrupted_decommission_can_be_continued() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(3_600)):
        await cluster.kill(B1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(decommissioned(cluster), 10)
        assert await cluster.marked() == [0, 1], "the auditor marks the ledgers"
        assert await has_cookie(cluster)

        async with cluster.node() as node, working(node):
            assert await decommissioned(cluster) == done(moved=2)

    assert not await has_cookie(cluster)


@in_virtual_time
async def test_a_mark_alone_does_not_delay_the_decommission() -> None:
    """The mark may stay for another reason: entries that are lost for good."""
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    await cluster.mark(B1, ledger_id=0)

    await asyncio.wait_for(decommissioned(cluster, ignores_unknown=False), 10)

    assert not await has_cookie(cluster)
    assert await cluster.marked() == [0], "the mark is not deleted"


@in_virtual_time
async def test_the_mark_of_an_unreadable_ledger_keeps_the_cookie() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    await cluster.mark(B1, ledger_id=0)
    await cluster.store.set(cluster.manager.path(0), b"rubbish", version=-1)

    with pytest.raises(UnavailableError, match=r"may name b1:3181.*: 0\. "):
        await asyncio.wait_for(decommissioned(cluster), 10)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_its_drain_order_is_deleted_too() -> None:
    cluster = await with_ledgers((B2, B3))
    await order_drain(cluster, B1, B4)
    await cluster.kill(B1)

    await decommissioned(cluster)

    assert (await OrderStore(cluster.store, PATHS).read()).draining.keys() == {B4}


@in_virtual_time
async def test_an_audit_without_effect_is_requested_again() -> None:
    cluster = await with_ledgers((B1, B2))
    path = PATHS.recovery_delay
    await cluster.store.create(path, b"3600")
    await cluster.kill(B1)
    heard = Heard()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(
            decommissioned(cluster, heard=heard), 2.5 * decommission.AUDIT_AGAIN_S
        )

    data, stat = await cluster.store.get(path)
    assert data == b"3600", "the delay is unchanged"
    assert stat.version == 3
    assert sum("No auditor is running" in text for text in heard.told) == 1


# --- Unreadable data ------------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s8_an_unreadable_ledger_keeps_the_cookie() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.kill(B1)
    await cluster.store.set(cluster.manager.path(1), b"", version=-1)

    with pytest.raises(
        UnavailableError,
        match=r"unreadable metadata may name b1:3181.*: 1\. .*ignore-unreadable.*after 1 other "
        r"ledger",
    ):
        await decommissioned(cluster)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_unreadable_metadata_that_names_others_is_no_obstacle() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    data, _ = await cluster.store.get(cluster.manager.path(0))
    later = data.replace(b"Version\t3", b"Version\t4")
    await cluster.store.set(cluster.manager.path(0), later, version=-1)

    assert (await decommissioned(cluster)).cookie_deleted


@in_virtual_time
async def test_rule_s8_an_unreadable_mark_keeps_the_cookie() -> None:
    """The ledger's metadata names only others, but its mark might name the bookie."""
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    data, _ = await cluster.store.get(cluster.manager.path(0))
    later = data.replace(b"Version\t3", b"Version\t4")
    await cluster.store.set(cluster.manager.path(0), later, version=-1)
    await cluster.mark(B2, ledger_id=0)
    await cluster.store.set(PATHS.mark(0), b"rubbish \xff", version=-1)

    with pytest.raises(UnavailableError, match=r"unreadable metadata may name b1:3181.*: 0\."):
        await decommissioned(cluster)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_an_operator_can_ignore_unreadable_ledgers() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.set(cluster.manager.path(1), b"", version=-1)
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)

        went = await decommissioned(cluster, ignores_unreadable=True)

    assert (went.ledgers_moved, went.cookie_deleted, went.unreadable_ignored) == (1, True, [1])
    assert not await has_cookie(cluster)


@in_virtual_time
async def test_rule_s8_an_empty_bookie_list_does_not_prove_a_stop() -> None:
    cluster = await with_ledgers((B2, B3))
    for bookie in list((await visiting(cluster).registration.read()).available):
        await cluster.unregister(bookie)

    with pytest.raises(UnavailableError):
        await decommissioned(cluster)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_a_bookie_that_is_started_meanwhile_keeps_its_cookie() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        waiting = asyncio.create_task(decommissioned(cluster))
        await asyncio.sleep(5)
        await cluster.revive(B1)
        async with cluster.node() as node, working(node):
            await cluster.store.delete(cluster.manager.path(0))
            with pytest.raises(RejectedError, match="is still registered"):
                await asyncio.wait_for(waiting, 60)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_a_bookie_reformatted_meanwhile_keeps_its_new_cookie() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.recovery_delay, b"0")
    await cluster.kill(B1)
    waiting = asyncio.create_task(decommissioned(cluster))
    await asyncio.sleep(5)
    await cluster.wipe(B1)
    await cluster.store.delete(cluster.manager.path(0))

    with pytest.raises(ConflictError):
        await asyncio.wait_for(waiting, 60)

    assert await has_cookie(cluster)

"""The view of the bookies, as it follows ZooKeeper."""

import asyncio

import pytest

from ledgers.errors import UnavailableError
from ledgers.formats.bookie_info import Address
from ledgers.metadata import BookieId
from ledgers.registration import Registration
from replication.cluster_view import ViewSource
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import ROOT
from tests.replication.watched import settle


@in_virtual_time
async def test_a_change_is_seen_and_wakes_who_waits_for_it() -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        await settle()
        before = node.views.current
        waiting = asyncio.create_task(node.views.wait_change(node.views.change_count))

        await cluster.unregister(B2)
        await asyncio.wait_for(waiting, 1)

        assert before.available - node.views.current.available == {B2}
        assert B2 in before.available, "a view never changes"


@in_virtual_time
async def test_the_same_list_read_again_is_no_change() -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        await settle()
        count = node.views.change_count

        await node.views.refresh()

        assert node.views.change_count == count


@in_virtual_time
async def test_writable_and_read_only_bookies_are_told_apart() -> None:
    cluster = await Cluster.start()
    await cluster.unregister(B1)
    await cluster.register(B1, is_read_only=True)
    async with cluster.node() as node:
        view = node.views.current

    assert view.available == frozenset(BOOKIES)
    assert view.writable == frozenset(BOOKIES) - {B1}


@in_virtual_time
async def test_each_life_of_a_bookie_has_its_own_czxid() -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        first = node.views.current.czxid(B1)
        await cluster.unregister(B1)
        await settle()
        away = node.views.current.czxid(B1)
        await cluster.register(B1)
        await settle()

        assert away == 0
        assert node.views.current.czxid(B1) > first > 0


@in_virtual_time
async def test_rule_s6_a_bookie_with_a_younger_cookie_is_told() -> None:
    cluster = await Cluster.start()
    written = await cluster.write_ledger((B1, B2))
    stat = (await cluster.manager.read(written.ledger_id)).stat
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)

    async with cluster.node() as node:
        assert node.views.current.initialised_after(stat.czxid) == {B2}


@pytest.mark.parametrize("is_missing", [False, True], ids=["empty", "missing"])
@in_virtual_time
async def test_rule_s8_an_empty_or_missing_list_leaves_the_view_as_it_was(
    is_missing: bool,
) -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        for bookie in BOOKIES:
            await cluster.unregister(bookie)
        await cluster.store.delete(f"{ROOT}/available/readonly")
        if is_missing:
            await cluster.store.delete(f"{ROOT}/available")
        await asyncio.sleep(5)

        assert node.views.current.available

        if is_missing:
            await cluster.store.create(f"{ROOT}/available")
        await cluster.register(B3)
        await asyncio.sleep(5)
        assert node.views.current.available == {B3}


@in_virtual_time
async def test_before_the_first_reading_there_is_no_view() -> None:
    cluster = await Cluster.start()
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)

    with pytest.raises(UnavailableError):
        assert views.current


@in_virtual_time
async def test_rule_s13_an_absent_bookie_can_still_be_found_where_it_was() -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        await cluster.unregister(B1)
        await settle()

        assert node.views.resolve(B1) == Address("b1", 3181)
        assert node.views.resolve(BookieId("nobody:1")) is None

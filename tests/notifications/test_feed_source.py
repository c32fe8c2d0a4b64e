"""The versions of ledgers, from the feed of a cluster in memory."""

import asyncio

from notifications.feed_source import FeedSource
from notifications.protocol import Change, ledger
from tests.checkpoints.feed_cluster import FeedCluster
from tests.replication.cluster import in_virtual_time


@in_virtual_time
async def test_a_ledger_that_was_deleted_while_the_feed_was_disabled_is_unknown() -> None:
    """No checkpoint tells of it, and a client may hold it."""
    cluster = await FeedCluster.start()
    deleted = await cluster.create()
    await cluster.delete(deleted)
    async with cluster.leader(), cluster.follower() as follower:
        await cluster.enable()
        await cluster.wait_published(follower)
        table = await FeedSource(follower.log).load()

        assert table.answer(ledger(deleted), 0) == Change(ledger(deleted), None)


@in_virtual_time
async def test_the_table_is_loaded_after_the_first_checkpoint() -> None:
    cluster = await FeedCluster.start()
    async with cluster.follower() as follower:
        loading = asyncio.ensure_future(FeedSource(follower.log).load())
        await asyncio.sleep(60)
        was_loaded = loading.done()
        async with cluster.leader():
            await cluster.enable()
            ledger_id = await cluster.create()
            await cluster.wait_published(follower)
            table = await loading

    assert not was_loaded
    assert table.version_of(ledger(ledger_id)) > 0


@in_virtual_time
async def test_the_last_checkpoint_of_the_log_is_current() -> None:
    cluster = await FeedCluster.start()
    async with cluster.leader(), cluster.follower() as follower:
        await cluster.enable()
        await cluster.wait_published(follower)
        source = FeedSource(follower.log)
        await source.load()
        following = source.changes()
        found = []
        for _ in range(3):
            await cluster.create()
            found.append(await anext(following))
        await following.aclose()

    assert [batch.is_current for batch in found] == [True, True, True]

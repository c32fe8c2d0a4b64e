"""The feed in a cluster in memory: what a leader writes, and what followers read."""

import asyncio
import itertools
from contextlib import aclosing

import pytest

from checkpoints.chain import Kind, Segment, order_change
from checkpoints.leader_state import FeedSettings
from checkpoints.model import ledger_key
from ledgers.appending import BookiePool
from ledgers.errors import NoAnswerError, NoSuchEntryError, UnavailableError
from ledgers.placement import Candidate
from ledgers.writing import LedgerOptions, LedgerWriter
from tests.checkpoints.feed_cluster import BOOKIES, PATHS, FeedCluster, Follower
from tests.ledgers.hooked_bookies import Call
from tests.replication.cluster import in_virtual_time, shut_out


@pytest.mark.parametrize("tells_zxids", [True, False])
@in_virtual_time
async def test_a_ledger_that_lives_for_a_moment_is_told_as_deleted(tells_zxids: bool) -> None:
    cluster = await FeedCluster.start()
    cluster.tree.tells_zxids = tells_zxids
    async with cluster.leader(), cluster.follower() as follower:
        await cluster.enable()
        await cluster.create()
        await cluster.wait_published(follower)
        ledger_id = await cluster.create()
        await cluster.delete(ledger_id)
        await cluster.create()
        await cluster.wait_published(follower)

        spans = [each for checkpoint in follower.received for each in checkpoint.spans]
        (told,) = [each for each in spans if each.key == ledger_key(ledger_id)]
        assert told.is_deleted
        assert told.begin == 0


@in_virtual_time
async def test_nothing_is_written_until_the_feed_is_enabled() -> None:
    cluster = await FeedCluster.start()
    await cluster.create()
    async with cluster.leader():
        before = cluster.ledgers()
        await asyncio.sleep(60)

        assert cluster.ledgers() == before


@in_virtual_time
async def test_an_empty_checkpoint_follows_while_somebody_watches_and_nothing_changes() -> None:
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.create()
        await cluster.wait_published(follower)
        await asyncio.sleep(60)
        before = len(follower.received)
        await cluster.store.create(f"{PATHS.feed_watchers}/one", with_parents=True)
        await asyncio.sleep(60)
        empty = follower.received[before:]
        await cluster.create()
        await cluster.wait_published(follower)

        assert not any(checkpoint.spans for checkpoint in empty)
        assert 6 <= len(empty) <= 13
        assert [each.time_ms for each in empty] == sorted({each.time_ms for each in empty})
        await cluster.assert_log_is_right()


async def ids_by_log(follower: Follower) -> set[int]:
    return set((await follower.log.published_versions()).ledger_ids())


@in_virtual_time
async def test_the_ledgers_of_the_log_are_those_whose_deletion_is_told() -> None:
    cluster = await FeedCluster.start()
    kept, deleted = await cluster.create(), await cluster.create()
    async with cluster.follower() as follower:
        async with cluster.leader():
            await cluster.enable()
            await cluster.wait_published(follower)
        unseen = await cluster.create()
        await cluster.delete(deleted)

        assert await ids_by_log(follower) == follower.catalogue.keys() >= {kept, deleted}

        await cluster.delete(unseen)
        async with cluster.leader():
            await cluster.wait_published(follower)
            assert await ids_by_log(follower) == cluster.ledgers().keys()
        told = {span.key for checkpoint in follower.received for span in checkpoint.spans}
        assert ledger_key(deleted) in told
        assert ledger_key(unseen) not in told


@in_virtual_time
async def test_the_ledgers_of_the_log_are_those_of_its_base_and_what_follows() -> None:
    settings = FeedSettings(roll_bytes=200, base_bytes_min=500, base_factor=0.0)
    cluster = await FeedCluster.start(settings=settings)
    async with cluster.leader(), cluster.follower() as follower:
        await cluster.enable(retention_s=1)
        for number in range(100):
            created = await cluster.create()
            if number % 3 == 0:
                await cluster.delete(created)
            await asyncio.sleep(1)
        await cluster.wait_published(follower)

        assert (await cluster.chain()).logs[0].previous_id > 0
        ours = {i for i in cluster.ledgers() if i >= 1_000}  # those of the feed change all the time
        assert {i for i in await ids_by_log(follower) if i >= 1_000} == ours


@in_virtual_time
async def test_the_ledgers_of_the_log_are_known_before_its_last_ledger_is_created() -> None:
    cluster = await FeedCluster.start()
    async with cluster.follower() as follower:
        async with cluster.leader():
            await cluster.enable()
            await cluster.wait_published(follower)
        named = Segment(
            ledger_id=5_000, kind=Kind.LOG, previous_id=follower.log.last_id, begun_ms=0
        )
        await order_change(cluster.store, PATHS, lambda chain: chain.with_segment(named))

        assert await ids_by_log(follower) == follower.catalogue.keys()


@in_virtual_time
async def test_a_log_that_is_read_less_far_than_it_was_delivered_is_unavailable() -> None:
    cluster = await FeedCluster.start()
    await cluster.create()
    async with cluster.leader(), cluster.follower() as follower:
        await cluster.enable()
        await cluster.wait_published(follower)
        await asyncio.sleep(10)
        follower.log.last_id += 1

        with pytest.raises(UnavailableError):
            await follower.log.published_versions()


@in_virtual_time
async def test_a_ledger_that_acls_hide_from_the_next_leader_is_told_when_it_is_deleted() -> None:
    cluster = await FeedCluster.start(settings=FeedSettings(base_bytes_min=1, base_factor=0.0))
    hidden, other = await cluster.create(), await cluster.create()
    async with cluster.follower() as follower:
        async with cluster.leader():
            await cluster.enable()
            await cluster.wait_published(follower)
        leader = cluster.start_leader()
        shut_out(leader.store, cluster.manager.path(hidden), is_stat_open=False)
        await cluster.change(other)
        await asyncio.sleep(60)  # a base was written
        await cluster.delete(hidden)
        await cluster.wait_published(follower)
        await cluster.stop_leader(leader)
    await cluster.assert_log_is_right()


@in_virtual_time
async def test_the_log_rolls_and_retention_deletes_old_ledgers() -> None:
    settings = FeedSettings(roll_bytes=200, base_bytes_min=500, base_factor=0.0)
    cluster = await FeedCluster.start(settings=settings)
    async with cluster.follower() as follower:
        async with cluster.leader():
            await cluster.enable(retention_s=10)
            for _ in range(100):
                await cluster.create()
                await asyncio.sleep(1)
            await cluster.wait_published(follower)
            chain = await cluster.chain()
            assert chain.base is not None
            assert chain.logs[0].previous_id > 0
            assert len(chain.logs) < 40
        ids = [i for i in follower.catalogue if i >= 1_000]
        await cluster.delete(ids[0])
        await cluster.change(ids[1])
        async with cluster.leader():
            await cluster.wait_published(follower)
            await asyncio.sleep(60)
            await cluster.wait_published(follower)

    assert (await cluster.chain()).deleting == ()
    feed = {segment.ledger_id for segment in (await cluster.chain()).segments}
    assert {i for i in cluster.ledgers() if i < 1_000} == feed


@in_virtual_time
async def test_the_log_drops_old_ledgers_before_the_chain_is_full() -> None:
    """A base is written first, although none is due otherwise."""
    cluster = await FeedCluster.start(settings=FeedSettings(roll_bytes=200))
    async with cluster.follower() as follower:
        leader = cluster.start_leader()
        leader.store.request_bytes_max = 4_000
        await cluster.enable()
        for _ in range(150):
            await cluster.create()
            await asyncio.sleep(1)
        await cluster.wait_published(follower)

        chain = await cluster.chain()
        assert len(chain.to_json()) < 3_000
        assert chain.base is not None
        assert chain.logs[0].previous_id > 0
        assert len(chain.logs) > 5
        assert leader.publisher is not None
        assert leader.publisher.stall_state().reason is None
        await cluster.stop_leader(leader)
    await cluster.assert_log_is_right_or_retained()


@in_virtual_time
async def test_a_follower_goes_on_with_a_feed_that_was_enabled_again() -> None:
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.wait_published(follower)
        await cluster.disable()
        await cluster.create()
        await asyncio.sleep(60)
        follower.forget()
        await cluster.enable()
        await cluster.wait_published(follower)

    await cluster.assert_log_is_right()


@in_virtual_time
async def test_a_disabled_feed_leaves_no_ledger() -> None:
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.wait_published(follower)
        await cluster.disable()
        await asyncio.sleep(60)

    assert cluster.ledgers() == {}


@in_virtual_time
async def test_a_ledger_that_cannot_be_deleted_stops_no_housekeeping() -> None:
    cluster = await FeedCluster.start(settings=FeedSettings(base_bytes_min=1, base_factor=0.0))
    for _ in range(2):
        async with cluster.leader(), cluster.follower() as follower:
            await cluster.enable()
            await cluster.create()
            await cluster.wait_published(follower)
        await cluster.disable()
    damaged = min((await cluster.chain()).deleting)
    await cluster.store.set(cluster.manager.path(damaged), b"rubbish", version=-1)

    async with cluster.leader(), cluster.follower() as follower:
        await cluster.enable()
        await asyncio.sleep(120)
        chain = await cluster.chain()

        assert chain.base is not None
        others = set(chain.deleting) - {damaged}
        assert all(i > chain.logs[-1].ledger_id for i in others)  # bases that were just replaced


@in_virtual_time
async def test_a_base_that_acls_hide_does_not_stop_the_next_one() -> None:
    cluster = await FeedCluster.start(settings=FeedSettings(base_bytes_min=400, base_factor=0.0))
    leader = cluster.start_leader()
    await cluster.enable()
    while (base := (await cluster.chain()).base) is None:
        await cluster.create()
        await asyncio.sleep(1)
    shut_out(leader.store, cluster.manager.path(base.ledger_id), is_stat_open=True)

    for _ in range(30):
        await cluster.create()
        await asyncio.sleep(3)

    assert (await cluster.chain()).base != base
    await cluster.stop_leader(leader)


@in_virtual_time
async def test_the_feed_waits_for_bookies_and_misses_nothing() -> None:
    settings = FeedSettings(pending_max=3)
    cluster = await FeedCluster.start(settings=settings)
    async with cluster.leader() as leader, cluster.follower() as follower:
        await cluster.enable()
        await cluster.wait_published(follower)

        for bookie in BOOKIES:
            cluster.bookies.bookie(bookie).is_down = True
        for _ in range(10):
            await cluster.create()
            await asyncio.sleep(30)
        assert leader.is_leading
        assert follower.catalogue != cluster.ledgers()
        assert leader.publisher is not None
        assert leader.publisher.pending_count <= 4  # too many are forgotten, and found again
        for bookie in BOOKIES:
            cluster.bookies.bookie(bookie).start()
        await cluster.wait_published(follower)

    await cluster.assert_log_is_right()


@in_virtual_time
async def test_two_bookies_are_enough() -> None:
    cluster = await FeedCluster.start()
    cluster.unwritable = set(BOOKIES[2:])
    await cluster.create()
    async with cluster.leader(), cluster.follower() as follower:
        await cluster.enable()
        await cluster.wait_published(follower)

        (segment,) = (await cluster.chain()).logs
        metadata = (await cluster.manager.read(segment.ledger_id)).metadata
        assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (2, 2, 2)


@in_virtual_time
async def test_the_log_leaves_a_bookie_that_is_drained() -> None:
    """The drain waits for its open ledgers, so it would otherwise take hours."""
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.create()
        await cluster.wait_published(follower)
        before = (await cluster.chain()).logs[-1].ledger_id
        metadata = (await cluster.manager.read(before)).metadata
        cluster.unwritable = {metadata.last_segment.ensemble[0]}

        await asyncio.sleep(60)
        await cluster.create()
        await cluster.wait_published(follower)

        after = (await cluster.chain()).logs[-1].ledger_id
        metadata = (await cluster.manager.read(after)).metadata
        assert not metadata.bookies & cluster.unwritable
        assert (await cluster.manager.read(before)).metadata.is_closed
    await cluster.assert_log_is_right()


@pytest.mark.parametrize("has_entries", [True, False])
@in_virtual_time
async def test_an_id_that_a_client_chose_for_its_ledger_is_skipped(has_entries: bool) -> None:
    """ZooKeeper hands it out all the same. That proves no restore, and the ledger is not ours."""
    cluster = await FeedCluster.start()
    writing = LedgerWriter.create(
        LedgerOptions(ensemble_size=3, write_quorum=3, ack_quorum=2),
        manager=cluster.manager,
        bookies=cluster.bookies,
        pool=cluster.pool,
        clock=cluster.clock,
        random=cluster.random,
        ledger_id=0,
    )
    async with writing as client, cluster.leader():
        if has_entries:
            await client.add(b"before")
        await cluster.enable()
        await asyncio.sleep(30)

        await client.add(b"the feed has not fenced it")
        chain = await cluster.chain()
        assert (chain.generation, [each.ledger_id for each in chain.logs]) == (1, [1])


@in_virtual_time
async def test_a_read_that_fails_midway_repeats_no_checkpoint() -> None:
    async with FeedCluster.followed(settings=FeedSettings(interval_s=0.0)) as (cluster, follower):
        await cluster.create()
        await asyncio.sleep(10)
        assert follower.catalogue == cluster.ledgers()
        before_count = len(follower.received)
        last_entry_id = max(call.entry_id for call in cluster.bookies.called("add"))
        failing: set[tuple[str, int]] = {("read_lac", -1)}

        async def fail(call: Call) -> None:
            if (call.operation, call.entry_id) in failing:
                raise NoAnswerError("a fault of the test")

        cluster.bookies.before = fail
        for _ in range(5):  # the follower learns of these checkpoints together
            await cluster.create()
            await asyncio.sleep(1)
        failing |= {("read", last_entry_id + 5)}
        failing -= {("read_lac", -1)}
        await asyncio.sleep(30)
        delivered_count = len(follower.received)
        failing.clear()
        await cluster.wait_published(follower)

        assert before_count < delivered_count < len(follower.received)
    await cluster.assert_log_is_right()


@in_virtual_time
async def test_a_ledger_that_is_created_after_the_feed_was_disabled_is_deleted() -> None:
    cluster = await FeedCluster.start()
    has_room = asyncio.Event()
    writable = cluster.pool.writable

    asked = itertools.count()

    async def wait_writable() -> list[Candidate]:
        if next(asked):  # the first question is whether bookies know the ledger id
            await has_room.wait()
        return list(await writable())

    cluster.pool = BookiePool(writable=wait_writable, placement=cluster.pool.placement)
    async with cluster.leader():
        await cluster.enable()
        await asyncio.sleep(30)
        assert (await cluster.chain()).logs  # reserved, not created
        await cluster.disable()
        await asyncio.sleep(30)
        has_room.set()
        await asyncio.sleep(60)

    assert cluster.ledgers() == {}
    assert (await cluster.chain()).deleting == ()


@in_virtual_time
async def test_a_log_that_is_deleted_while_it_is_read_can_be_read_again() -> None:
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.create()
        await asyncio.sleep(10)

        async def fail(call: Call) -> None:
            if call.operation == "read":
                raise NoSuchEntryError("a fault of the test")

        cluster.bookies.before = fail
        async with aclosing(follower.log.request_checkpoints(0)) as found:
            with pytest.raises(UnavailableError):
                await anext(found)

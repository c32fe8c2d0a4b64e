"""The feed when its ledgers are lost, when it has no room, and when it cannot go on."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from checkpoints import collector as collector_module
from checkpoints.chain import Segment
from checkpoints.leader_state import FeedSettings
from checkpoints.model import Checkpoint
from checkpoints.publisher import FeedPublisher
from checkpoints.stalls import FeedStateRecord, StallReason, read_feed_state
from ledgers.errors import NoAnswerError
from tests.checkpoints.feed_cluster import BOOKIES, PATHS, ROOT, FeedCluster, Follower, Leader
from tests.ledgers.hooked_bookies import Call
from tests.replication.cluster import in_virtual_time, shut_out

SMALL = FeedSettings(roll_bytes=300, base_bytes_min=200, base_factor=0.0)
NO_BASE = FeedSettings(roll_bytes=100)


class RestartingFollower(Follower):
    """Starts again from nothing with each generation of the feed, as clients do."""

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.previous_id:
            self.forget()
        await super().receive_checkpoint(checkpoint)


def publisher_of(leader: Leader) -> FeedPublisher:
    assert leader.publisher is not None
    return leader.publisher


async def state_of(cluster: FeedCluster) -> FeedStateRecord:
    state = await read_feed_state(cluster.store, PATHS)
    assert state is not None
    return state


async def assert_begun_again(cluster: FeedCluster, lost: Segment) -> None:
    chain = await cluster.chain()
    assert chain.generation > 1
    assert chain.lost_ledger_id == lost.ledger_id
    assert chain.is_enabled
    assert lost not in chain.segments
    await cluster.assert_log_is_right()


async def written(cluster: FeedCluster, follower: Follower) -> None:
    """Let the feed have several log ledgers, and a base if the settings say so."""
    for _ in range(12):
        await cluster.create()
        await asyncio.sleep(3)
    await cluster.wait_published(follower)


# --- Lost ledgers ---------------------------------------------------------------------------------

Choose = Callable[[tuple[Segment, ...]], Segment]


@pytest.mark.parametrize(
    ("settings", "choose"),
    [
        pytest.param(NO_BASE, lambda logs: logs[-1], id="the last"),
        pytest.param(NO_BASE, lambda logs: logs[0], id="the first"),
    ],
)
@in_virtual_time
async def test_the_next_leader_begins_again_if_a_log_ledger_was_deleted(
    settings: FeedSettings, choose: Choose
) -> None:
    async with FeedCluster.followed(settings=settings) as (cluster, follower):
        await written(cluster, follower)
    lost = choose((await cluster.chain()).logs)
    await cluster.delete(lost.ledger_id)

    with capture_logs() as logs:
        async with cluster.leader():
            await asyncio.sleep(10)

    (event,) = [each for each in logs if each["event"] == "feed.begun_again"]
    assert event["ledger_id"] == lost.ledger_id
    assert event["next_step"]
    await assert_begun_again(cluster, lost)


@in_virtual_time
async def test_a_leader_notices_that_the_ledger_it_writes_was_deleted() -> None:
    cluster = await FeedCluster.start()
    async with cluster.leader(), cluster.follower() as first:
        follower = RestartingFollower(log=first.log)
        first.log.remove_checkpoint_listener(first)
        first.log.register_checkpoint_listener(follower)
        await cluster.enable()
        await cluster.create()
        await cluster.wait_published(follower)
        lost = (await cluster.chain()).logs[-1]

        await cluster.delete(lost.ledger_id)
        await asyncio.sleep(15)
        await cluster.wait_published(follower)

        await assert_begun_again(cluster, lost)
        await cluster.create()
        await cluster.wait_published(follower)


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "entries lost"])
@in_virtual_time
async def test_a_leader_drops_an_older_log_ledger_that_is_lost(is_deleted: bool) -> None:
    cluster = await FeedCluster.start(settings=NO_BASE)
    with capture_logs() as logs:
        async with cluster.leader(), cluster.follower() as follower:
            await cluster.enable()
            await written(cluster, follower)
            lost = (await cluster.chain()).logs[1]
            if is_deleted:
                await cluster.delete(lost.ledger_id)
            else:
                lose_entry(cluster, lost)
            await asyncio.sleep(300)
            await cluster.wait_published(follower)

            chain = await cluster.chain()
            assert chain.generation == 1
            assert chain.base is not None
            assert lost.ledger_id not in [each.ledger_id for each in chain.logs]
            assert chain.logs[0].previous_id > lost.previous_id
        async with cluster.leader():
            await cluster.create()
            await asyncio.sleep(5)
    assert (await cluster.chain()).generation == 1
    await cluster.assert_log_is_right_or_retained()
    (event,) = [each for each in logs if each["event"] == "feed.log_lost"]
    assert event["ledger_id"] == lost.ledger_id


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "entries lost"])
@in_virtual_time
async def test_a_leader_replaces_a_base_that_is_lost(is_deleted: bool) -> None:
    async with FeedCluster.followed(settings=SMALL) as (cluster, follower):
        await written(cluster, follower)
        base = (await cluster.chain()).base
        assert base is not None
        if is_deleted:
            await cluster.delete(base.ledger_id)
        else:
            lose_entry(cluster, base)
        await asyncio.sleep(100)
        chain = await cluster.chain()
        assert chain.generation == 1
        assert chain.base not in (None, base)
    async with cluster.leader():
        await asyncio.sleep(5)
        assert (await cluster.chain()).generation == 1
    await cluster.assert_log_is_right()


@in_virtual_time
async def test_losses_are_found_in_each_segment_of_a_log_ledger() -> None:
    async with FeedCluster.followed(settings=NO_BASE) as (cluster, follower):
        await written(cluster, follower)
        lost = (await cluster.chain()).logs[1]
        manager = cluster.new_manager(cluster.store)
        found = await manager.read(lost.ledger_id)
        (only,) = found.metadata.segments
        changed = replace(found.metadata, segments=(only, replace(only, first_entry_id=1)))
        await manager.write(lost.ledger_id, changed, read_as=found)
        lose_entry(cluster, lost, entry_id=1)
        await asyncio.sleep(300)

        assert lost.ledger_id not in [each.ledger_id for each in (await cluster.chain()).logs]


@in_virtual_time
async def test_the_next_leader_begins_again_if_the_base_was_deleted() -> None:
    async with FeedCluster.followed(settings=SMALL) as (cluster, follower):
        await written(cluster, follower)
    base = (await cluster.chain()).base
    assert base is not None
    await cluster.delete(base.ledger_id)
    async with cluster.leader():
        await asyncio.sleep(5)

    await assert_begun_again(cluster, base)


def lose_entry(cluster: FeedCluster, segment: Segment, *, entry_id: int = 0) -> None:
    for bookie in map(cluster.bookies.bookie, BOOKIES):
        if entry_id in bookie.entry_ids(segment.ledger_id):
            bookie.lose(segment.ledger_id, entry_id)


@in_virtual_time
async def test_a_leader_notices_that_the_bookies_lost_what_it_wrote() -> None:
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.create()
        await cluster.wait_published(follower)
        lost = (await cluster.chain()).logs[-1]
        await asyncio.sleep(30)
        lose_entry(cluster, lost)
        follower.log.remove_checkpoint_listener(follower)
        await cluster.create()
        await asyncio.sleep(120)

    await assert_begun_again(cluster, lost)


@in_virtual_time
async def test_entries_that_no_bookie_has_are_lost_after_a_while() -> None:
    async with FeedCluster.followed(settings=NO_BASE) as (cluster, follower):
        await written(cluster, follower)
    lost = (await cluster.chain()).logs[0]
    lose_entry(cluster, lost)
    async with cluster.leader():
        await asyncio.sleep(30)
        assert (await cluster.chain()).generation == 1, "they may say otherwise soon"
        await asyncio.sleep(90)

    await assert_begun_again(cluster, lost)


@in_virtual_time
async def test_the_feed_waits_for_bookies_that_do_not_answer() -> None:
    async with FeedCluster.followed(settings=NO_BASE) as (cluster, follower):
        await written(cluster, follower)

    async def fail(call: Call) -> None:
        raise NoAnswerError("a fault of the test")

    async with cluster.leader():
        cluster.bookies.before = fail
        await cluster.create()
        await asyncio.sleep(1_000)
        assert (await cluster.chain()).generation == 1
        state = await state_of(cluster)
        assert state.reason is StallReason.WRITE_FAILED
        assert state.detail

        async def work(call: Call) -> None:
            pass

        cluster.bookies.before = work
        await asyncio.sleep(120)
        assert not (await state_of(cluster)).is_stalled
    await cluster.assert_log_is_right()


# --- No room --------------------------------------------------------------------------------------


@in_virtual_time
async def test_memory_is_bounded_while_bookies_are_slow() -> None:
    cluster = await FeedCluster.start(settings=FeedSettings(pending_max=20))
    is_fast = asyncio.Event()
    is_fast.set()

    async def wait(call: Call) -> None:
        await is_fast.wait()

    cluster.bookies.before = wait
    async with cluster.leader() as leader, cluster.follower() as follower:
        await cluster.enable()
        await cluster.create()
        await cluster.wait_published(follower)
        is_fast.clear()
        counts = []
        for _ in range(200):
            ledger_id = await cluster.create()
            await asyncio.sleep(0.15)
            await cluster.delete(ledger_id)
            await cluster.create()
            counts.append(publisher_of(leader).pending_count)
        assert max(counts) <= 2 * 20

        is_fast.set()
        await cluster.wait_published(follower)
        await cluster.create()
        await cluster.wait_published(follower)
        assert (await cluster.chain()).generation == 1
    await cluster.assert_log_is_right()


@in_virtual_time
async def test_many_late_changes_become_several_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector_module, "LATE_MAX", 5)
    cluster = await FeedCluster.start()
    hidden = [await cluster.create() for _ in range(23)]
    leader = cluster.start_leader()
    shut = shut_out(leader.store, *map(cluster.manager.path, hidden))
    async with cluster.follower() as follower:
        await cluster.enable()
        await cluster.create()
        await asyncio.sleep(10)
        assert not follower.catalogue.keys() & set(hidden)

        shut.clear()
        leader.updater.read_again(hidden)
        await cluster.wait_published(follower)

        sizes = [len(checkpoint.spans) for checkpoint in follower.received]
        assert max(sizes) <= 5 + 1
        await cluster.change(hidden[0])
        await cluster.delete(hidden[1])
        await cluster.wait_published(follower)
    await cluster.stop_leader(leader)
    await cluster.assert_log_is_right()


# --- What operators are told ----------------------------------------------------------------------


@pytest.mark.parametrize("is_stat_open", [True, False], ids=["older ZooKeeper", "3.9.5"])
@in_virtual_time
async def test_a_directory_that_acls_hide_stops_only_itself(is_stat_open: bool) -> None:
    """Ledgers there that were published are still followed, also by the next leader."""
    cluster = await FeedCluster.start()
    known, changed, deleted, hidden = [await cluster.create(10**9 + n) for n in range(4)]
    directory = f"{ROOT}/10/0000"
    leader = cluster.start_leader()
    async with cluster.follower() as follower:
        await cluster.enable()
        await cluster.wait_published(follower)
        await cluster.stop_leader(leader)
        unseen = await cluster.create(10**9 + 5)
        await cluster.change(changed)
        await cluster.delete(deleted)

        leader = cluster.start_leader()
        shut = shut_out(
            leader.store, directory, cluster.manager.path(hidden), is_stat_open=is_stat_open
        )
        other = await cluster.create()
        told = cluster.ledgers()
        del told[unseen]
        await asyncio.sleep(200)
        assert {known, other} <= follower.catalogue.keys()
        assert {i: v for i, v in follower.catalogue.items() if i >= 1_000} == {
            i: v for i, v in told.items() if i >= 1_000
        }
        assert leader.updater.hidden == [directory]
        assert await read_feed_state(cluster.store, PATHS) is None, "it is not stalled"

        shut.clear()
        await cluster.wait_published(follower, timeout_s=70)
    await cluster.stop_leader(leader)
    await cluster.assert_log_is_right()


@in_virtual_time
async def test_a_root_that_acls_hide_stalls_the_feed_and_is_named() -> None:
    cluster = await FeedCluster.start()
    await cluster.create()
    leader = cluster.start_leader()
    shut = shut_out(leader.store, ROOT)
    with capture_logs() as logs:
        await cluster.enable()
        await asyncio.sleep(300)

        state = await state_of(cluster)
        assert (state.reason, state.path) == (StallReason.ACCESS_DENIED, ROOT)
        warnings = [each for each in logs if each["event"] == "ledger_map.changes_unknown"]
        assert 4 <= len(warnings) <= 6, "once a minute"
        assert all(each["path"] == ROOT and each["next_step"] for each in warnings)
        (stalled,) = [each for each in logs if each["event"] == "feed.stalled"]
        assert stalled["reason"] == "access-denied"

        shut.clear()
        async with cluster.follower() as follower:
            await cluster.wait_published(follower, timeout_s=70)
        await asyncio.sleep(2)
        assert not (await state_of(cluster)).is_stalled
        assert [each for each in logs if each["event"] == "feed.resumed"]
    await cluster.stop_leader(leader)


@in_virtual_time
async def test_an_idle_feed_is_not_stalled() -> None:
    cluster = await FeedCluster.start()
    async with cluster.leader() as leader:
        await cluster.enable()
        await asyncio.sleep(1_000)
        assert not publisher_of(leader).stall_state().is_stalled
        await cluster.create()
        await asyncio.sleep(1_000)
        assert not publisher_of(leader).stall_state().is_stalled
    assert await read_feed_state(cluster.store, PATHS) is None

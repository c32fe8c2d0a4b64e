"""The change feed while servers fail: nothing is missed, and repairs do not wait for it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from auditor.election import current_leader
from checkpoints.chain import RETENTION_DEFAULT_S, FeedChain, read_chain
from checkpoints.model import Checkpoint
from daemon.local.cluster import LocalCluster
from daemon.operations.feed import disable_feed, enable_feed
from ledgers.errors import BookmenderError
from ledgers.model import BookieId
from replication.marks import marked_ledger_ids
from tests.checkpoints.feed_cluster import Follower
from tests.cluster.bookies_in_trouble import expire, kill_and_expire
from tests.cluster.steps import (
    AUDITOR_ONLY,
    NONEXISTENT,
    Bench,
    bench,
    errors,
    events,
    nodes,
    shape,
    wait_for,
)
from tests.cluster.test_feed import CLOCK, change, following, wait_equal
from tests.workload import Written

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="feed"), pytest.mark.timeout(360)]

NO_HOLD = {"HOLD_ENABLED": "false", "REPLICATION_OPEN_LEDGER_GRACE_S": "1"}


@asynccontextmanager
async def feed(on: Bench) -> AsyncIterator[None]:
    await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)
    try:
        yield
    finally:
        await disable_feed(on.seen, clock=CLOCK)


async def chain_of(on: Bench) -> FeedChain:
    stored = await read_chain(on.seen.store, on.seen.paths)
    assert stored.value is not None
    return stored.value


async def log_bookies(on: Bench) -> tuple[BookieId, ...]:
    """Return the bookies of the log ledger that is being written."""
    last = (await chain_of(on)).logs[-1]
    return (await on.seen.manager.read(last.ledger_id)).metadata.last_segment.ensemble


async def leads(on: Bench) -> bool:
    return await current_leader(on.seen.store, on.seen.paths) is not None


@asynccontextmanager
async def touching(on: Bench, written: Sequence[Written]) -> AsyncIterator[None]:
    """Change the metadata of these ledgers all the time, as far as ZooKeeper answers."""

    async def touch() -> None:
        while True:
            for ledger in written:
                with suppress(BookmenderError):
                    found = await on.seen.manager.read(ledger.ledger_id)
                    path = on.seen.manager.path(ledger.ledger_id)
                    await on.seen.store.set(path, found.data, version=found.version)
                await asyncio.sleep(0.05)

    task = asyncio.create_task(touch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_missed_when_zookeeper_restarts(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start, following(on) as follower:
        written = await on.write(*(shape(number) for number in range(3)))
        node = start("node", settings=AUDITOR_ONLY)
        async with feed(on):
            await wait_equal(on, follower)
            async with touching(on, written):
                module_cluster.kill_zookeeper()
                await asyncio.to_thread(module_cluster.restart_zookeeper)
                await wait_for(lambda: leads(on), "a leader")
                await change(on, 10)
            await wait_equal(on, follower)
            assert (await chain_of(on)).lost_ledger_id is None
        assert not errors(node)


async def test_the_feeds_ledgers_are_repaired_like_all_others(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start, following(on) as follower:
        written = await on.write(*(shape(number) for number in range(3)))
        start("node", settings=NO_HOLD)
        async with feed(on):
            await wait_equal(on, follower)
            victim = (await log_bookies(on))[0]
            kill_and_expire(module_cluster, victim)
            try:
                async with touching(on, written):

                    async def is_repaired() -> bool:
                        feeds = [each.ledger_id for each in (await chain_of(on)).segments]
                        found = [await on.seen.manager.find(i) for i in feeds]
                        return not any(each and victim in each.metadata.bookies for each in found)

                    await wait_for(is_repaired, "repair of the feed's ledgers")
                await wait_equal(on, follower)
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)


async def test_the_feed_waits_for_its_bookies_and_repairs_do_not_wait_for_the_feed(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start, following(on) as follower:
        start("node", settings=NO_HOLD)
        async with feed(on):
            await on.write(shape(0))
            await wait_equal(on, follower)
            log, members = (await chain_of(on)).logs[-1], await log_bookies(on)
            others = [each for each in module_cluster.bookies if each not in members]
            victims = [*others, *members[:2]]  # in this order the feed cannot use the others
            for victim in victims:
                kill_and_expire(module_cluster, victim)
            try:
                empty = [shape(n, quorums=(1, 1, 1), entry_count=0) for n in range(1, 6)]
                written = await on.write(*empty)
                await on.lose(written)

                async def are_repaired() -> bool:
                    return not await on.names(written, NONEXISTENT)

                await wait_for(are_repaired, "repair of the other ledgers")

                async def is_marked() -> bool:
                    marked = await marked_ledger_ids(on.seen.store, on.seen.paths)
                    return log.ledger_id in marked

                await wait_for(is_marked, "mark of the feed's ledger")
                assert not {each.ledger_id for each in written} & follower.catalogue.keys()
            finally:
                await asyncio.to_thread(module_cluster.start_bookies, victims)
            await wait_equal(on, follower)
            assert (await chain_of(on)).lost_ledger_id is None


class RestartingFollower(Follower):
    """Starts again from nothing with each generation of the feed, as clients do."""

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.previous_id:
            self.forget()
        await super().receive_checkpoint(checkpoint)


async def test_the_feed_begins_again_when_the_disks_of_its_log_are_lost(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start, following(on) as first:
        follower = RestartingFollower(log=first.log)
        first.log.remove_checkpoint_listener(first)
        first.log.register_checkpoint_listener(follower)
        node = start(
            "node",
            command=("tests.cluster.impatient_feed",),
            settings={**AUDITOR_ONLY, "HOLD_ENABLED": "false"},
        )
        async with feed(on):
            await on.write(shape(0))
            await wait_equal(on, follower)
            lost, members = (await chain_of(on)).logs[-1], await log_bookies(on)
            for victim in members:
                await asyncio.to_thread(module_cluster.wipe, victim)
                expire(module_cluster, victim)
            await asyncio.to_thread(module_cluster.start_bookies, members)
            await on.write(shape(1, quorums=(1, 1, 1)))

            async def has_begun_again() -> bool:
                return (await chain_of(on)).lost_ledger_id == lost.ledger_id

            await wait_for(has_begun_again, "another feed")
            await wait_equal(on, follower)
            (event,) = events(node, "feed.begun_again")
            assert event["ledger_id"] == lost.ledger_id


async def test_a_leader_that_was_suspended_past_its_session_loses_nothing(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start, following(on) as follower:
        written = await on.write(*(shape(number) for number in range(3)))
        first = start("first", settings=AUDITOR_ONLY)
        async with feed(on):
            await wait_equal(on, follower)
            second = start("second", settings=AUDITOR_ONLY)
            await wait_for(lambda: events(second, "election.entered"), "second vote")

            async with touching(on, written):
                await asyncio.sleep(0.5)
                os.kill(first.pid, signal.SIGSTOP)
                await wait_for(lambda: events(second, "election.won"), "second leader")
                await change(on, 10)
                await wait_for(lambda: events(second, "feed.ledger_begun"), "its log ledger")
                os.kill(first.pid, signal.SIGCONT)
                await wait_for(lambda: events(first, "role.restarted"), "end of its session")
                await change(on, 20)
            await wait_equal(on, follower)

            assert (await chain_of(on)).lost_ledger_id is None
            assert not errors(first)
            assert not errors(second)

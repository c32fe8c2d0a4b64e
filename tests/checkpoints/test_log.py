"""The log as the source of a client: the seam of ``subscribe``, and listeners that raise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from checkpoints.errors import FeedChangedError
from checkpoints.log import CheckpointLog
from checkpoints.model import CommittedVersion, ledger_id_of
from checkpoints.recovery import RecoveryService
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NoAnswerError,
    RejectedError,
    UnavailableError,
)
from ledgers.tasks import task_scope
from tests.checkpoints.feed_cluster import PATHS, FeedCluster, NodeBookies
from tests.ledgers.hooked_bookies import Call, nothing
from tests.memory.feed import MemoryReceipts
from tests.memory.store import MemoryStore
from tests.replication.cluster import in_virtual_time

CLIENT = "catalogue"
EMPTY_BYTES_MAX = 60
"""Header and digest."""


@dataclass
class Listener:
    """Notes the ledgers that it is given. ``error``: raised for the next one."""

    given: list[int | None] = field(default_factory=list)
    error: Exception | None = None

    async def receive(self, committed: CommittedVersion) -> None:
        if self.error is not None:
            raise self.error
        self.given.append(ledger_id_of(committed.key))


@asynccontextmanager
async def service_of(
    cluster: FeedCluster, receipts: MemoryReceipts, *, bookies: NodeBookies | None = None
) -> AsyncIterator[RecoveryService]:
    """Run a process of the client: its log, and its service."""
    store = MemoryStore(cluster.tree)
    log = CheckpointLog(
        store=store,
        paths=PATHS,
        manager=cluster.new_manager(store),
        bookies=bookies or cluster.bookies,
        clock=cluster.clock,
    )
    try:
        async with (
            task_scope() as scope,
            RecoveryService.open(log, await receipts.open(CLIENT), clock=cluster.clock) as service,
        ):
            scope.start(log.run())
            yield service
    finally:
        await store.close()


def has_content(call: Call) -> bool:
    """False for the empty entry that confirms the one before."""
    return len(call.entry) > EMPTY_BYTES_MAX


async def until(cluster: FeedCluster, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await cluster.clock.sleep(0.05)


@in_virtual_time
async def test_a_new_client_is_given_everything_after_it_subscribed() -> None:
    """Also if the end of the log was not known yet, because bookies were slow."""
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.create()
        await cluster.wait_published(follower)
        bookies = NodeBookies(cluster.bookies)

        async def be_slow(_: str) -> None:
            await asyncio.sleep(5)

        bookies.step = be_slow
        listener = Listener()
        async with service_of(cluster, MemoryReceipts(), bookies=bookies) as service:
            missed = await service.subscribe(listener)
            assert missed.is_new
            created = await cluster.create()
            await cluster.wait_published(follower)

            await until(cluster, lambda: created in listener.given)


@pytest.mark.parametrize("kind", [UnavailableError, RejectedError, CorruptionError])
@in_virtual_time
async def test_an_error_of_a_listener_is_no_failed_read(kind: type[BookmenderError]) -> None:
    """The log must not go on with the next checkpoint: the listener would miss the rest of this."""
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.create()
        await cluster.wait_published(follower)

        async def follow() -> None:
            listener = Listener()
            async with service_of(cluster, MemoryReceipts()) as service:
                await service.subscribe(listener)
                listener.error = kind("an error of the listener")
                await cluster.create()
                await asyncio.sleep(60)

        with pytest.raises(kind, match="of the listener"):
            await follow()


@in_virtual_time
async def test_a_log_of_one_feed_ends_if_another_feed_has_taken_its_place() -> None:
    cluster = await FeedCluster.start()
    earlier = await cluster.enable()
    await cluster.enable()
    log = CheckpointLog(
        store=cluster.store,
        paths=PATHS,
        manager=cluster.manager,
        bookies=cluster.bookies,
        clock=cluster.clock,
        generation=earlier.generation,
    )

    with pytest.raises(FeedChangedError):
        async with asyncio.timeout(60):
            await log.run()


@in_virtual_time
async def test_a_log_that_ends_earlier_than_before_is_unavailable() -> None:
    """One bookie knew that the last entry was acknowledged, and does not answer any more. Without
    the last checkpoint there would be a gap between the past and what listeners are sent."""
    async with FeedCluster.followed() as (cluster, follower):
        await cluster.create()
        await cluster.wait_published(follower)
        knowing = next(call.bookie for call in cluster.bookies.called("add"))

        async def refuse(call: Call) -> None:
            if call.operation == "add" and call.bookie != knowing and not has_content(call):
                await asyncio.sleep(3_600)

        cluster.bookies.before = refuse
        created = await cluster.create()
        await until(cluster, lambda: created in follower.catalogue)

        async def be_down(call: Call) -> None:
            await refuse(call)
            if call.operation == "read_lac" and call.bookie == knowing:
                raise NoAnswerError("a fault of the test")

        cluster.bookies.before = be_down
        async with aclosing(follower.log.request_checkpoints(0)) as found:
            with pytest.raises(UnavailableError, match="ends earlier"):
                await anext(found)
        cluster.bookies.before = nothing
        async with aclosing(follower.log.request_checkpoints(0)) as found:
            assert (await anext(found)).id == follower.log.last_id

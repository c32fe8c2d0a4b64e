"""The free space of bookies: which are short of space, and when each is asked."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ledgers.bookies import DiskSpace
from ledgers.errors import AuthenticationRequiredError, UnavailableError
from ledgers.health import BookieHealth
from ledgers.model import BookieId
from ledgers.registration import Registration
from replication.cluster import ViewSource
from replication.targets import (
    INTERVAL_S,
    JITTER,
    NEAR_INTERVAL_S,
    STALE_S,
    START_TIMEOUT_S,
    DiskSpaceSource,
    is_short,
    spare_bytes,
)
from tests.memory.bookies import Fault, MemoryBookies, Op
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import ROOT

LONGEST_S = INTERVAL_S * (1 + JITTER) + 0.1


def room(free_bytes: int, total_bytes: int = 1000) -> DiskSpace:
    return DiskSpace(free_bytes=free_bytes, total_bytes=total_bytes)


@pytest.mark.parametrize(
    ("told", "floor_share", "spare", "expected"),
    [
        pytest.param(room(99), 0.1, -1, True, id="less than the floor"),
        pytest.param(room(100), 0.1, 0, False, id="the floor itself is enough"),
        pytest.param(room(150), 0.1, 50, False, id="only the space above the floor can be used"),
        pytest.param(
            room(100, 1005), 0.1, -1, True, id="not even a fraction of a byte may be missing"
        ),
        pytest.param(room(0), 0.0, None, False, id="no floor"),
        pytest.param(None, 0.5, None, False, id="a bookie without a figure is not excluded"),
    ],
)
def test_a_bookie_is_short_of_space_below_the_floor(
    told: DiskSpace | None, floor_share: float, spare: int | None, expected: bool
) -> None:
    assert spare_bytes(told, floor_share=floor_share) == spare
    assert is_short(told, floor_share=floor_share) is expected


# --- Asking ---------------------------------------------------------------------------------------


class CountingBookies(MemoryBookies):
    """Bookies that count requests for their free space, and how many are concurrent."""

    def __init__(self, cluster: Cluster, *bookies: BookieId) -> None:
        super().__init__(bookies, clock=cluster.clock)
        self.asked: list[BookieId] = []
        self.in_flight = 0
        self.in_flight_max = 0

    async def room(self, bookie: BookieId) -> DiskSpace:
        self.asked.append(bookie)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            return await super().room(bookie)
        finally:
            self.in_flight -= 1


@asynccontextmanager
async def running(
    cluster: Cluster, bookies: MemoryBookies, *, floor_share: float = 0.1
) -> AsyncIterator[DiskSpaceSource]:
    """Yield a source that has asked every bookie once."""
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    source = DiskSpaceSource(
        bookies, views, floor_share=floor_share, clock=cluster.clock, rng=random.Random(1)
    )
    async with asyncio.TaskGroup() as tasks:
        followers = [tasks.create_task(views.run()), tasks.create_task(source.run())]
        await cluster.clock.sleep(1)
        yield source
        for follower in followers:
            follower.cancel()


@asynccontextmanager
async def one_bookie(
    *, free_bytes: int
) -> AsyncIterator[tuple[Cluster, CountingBookies, DiskSpaceSource]]:
    """Yield B1 alone, and a source that has asked it once."""
    cluster = await Cluster.start(B1)
    bookies = CountingBookies(cluster, B1)
    bookies.bookie(B1).room = room(free_bytes)
    async with running(cluster, bookies) as source:
        yield cluster, bookies, source


async def test_every_bookie_is_asked_once_a_minute() -> None:
    cluster = await Cluster.start(B1, B2)
    bookies = CountingBookies(cluster, B1, B2)

    async with running(cluster, bookies) as source:
        await cluster.clock.sleep(10 * INTERVAL_S)

        assert source.disk_spaces.keys() == {B1, B2}
        for bookie in (B1, B2):
            assert 10 / (1 + JITTER) <= bookies.asked.count(bookie) - 1 <= 10 / (1 - JITTER)


async def test_a_bookie_near_the_floor_is_asked_more_often() -> None:
    cluster = await Cluster.start(B1, B2)
    bookies = CountingBookies(cluster, B1, B2)
    bookies.bookie(B1).room = room(150)

    async with running(cluster, bookies) as source:
        await cluster.clock.sleep(2 * NEAR_INTERVAL_S)
        assert source.spare_bytes(B1) == 50
        bookies.bookie(B1).room = room(99)
        await cluster.clock.sleep(1.2 * NEAR_INTERVAL_S + 1)

        assert source.spare_bytes(B1) == -1
        assert bookies.asked.count(B2) == 1


async def test_written_bytes_are_subtracted_until_the_bookie_reports() -> None:
    async with one_bookie(free_bytes=900) as (cluster, bookies, source):
        source.landed(B1, 500)
        assert (source.free_bytes(B1), source.spare_bytes(B1)) == (400, 300)
        source.landed(B1, 500)
        assert (source.free_bytes(B1), source.spare_bytes(B1)) == (0, -200)
        bookies.bookie(B1).room = room(450)
        await cluster.clock.sleep(LONGEST_S)

        assert (source.free_bytes(B1), source.spare_bytes(B1)) == (450, 350)


async def test_bytes_written_during_a_request_are_still_subtracted() -> None:
    """The answer need not include them."""
    async with one_bookie(free_bytes=900) as (cluster, bookies, source):
        bookies.fail(B1, Op.ROOM, Fault(delay_s=5.0))
        asked_count = len(bookies.asked)
        while len(bookies.asked) == asked_count:
            await cluster.clock.sleep(1)
        source.landed(B1, 500)
        while bookies.in_flight:
            await cluster.clock.sleep(1)

        assert source.free_bytes(B1) == 400


async def test_an_unresponsive_bookie_delays_no_other() -> None:
    """Its last figure counts for a while."""
    cluster = await Cluster.start(B1, B2)
    bookies = CountingBookies(cluster, B1, B2)
    bookies.bookie(B1).room = room(10)

    async with running(cluster, bookies) as source:
        bookies.fail(B1, Op.ROOM, Fault(delay_s=5.0, error=UnavailableError))
        bookies.bookie(B2).room = room(20)
        await cluster.clock.sleep(LONGEST_S)
        assert source.free_bytes(B1) == 10
        assert source.free_bytes(B2) == 20
        await cluster.clock.sleep(STALE_S)

        assert source.free_bytes(B1) is None


async def test_a_new_bookie_is_asked_at_once_and_a_lost_one_forgotten() -> None:
    cluster = await Cluster.start(B1)
    bookies = CountingBookies(cluster, B1, B3)

    async with running(cluster, bookies) as source:
        await cluster.register(B3)
        await cluster.clock.sleep(1)
        assert source.disk_spaces.keys() == {B1, B3}
        await cluster.store.delete(f"{ROOT}/available/{B3}")
        await cluster.clock.sleep(1)

        assert source.disk_spaces.keys() == {B1}


async def test_bookies_are_not_all_asked_at_once() -> None:
    many = [BookieId(f"bookie-{number}:3181") for number in range(100)]
    cluster = await Cluster.start(*many)
    bookies = CountingBookies(cluster, *many)
    for bookie in many:
        bookies.fail(bookie, Op.ROOM, Fault(delay_s=0.01))

    async with running(cluster, bookies) as source:
        assert source.disk_spaces.keys() == set(many)
        assert 1 < bookies.in_flight_max <= 16


async def test_a_start_waits_for_the_figures_within_bounds() -> None:
    cluster = await Cluster.start(B1, B2)
    bookies = CountingBookies(cluster, B1, B2)
    bookies.bookie(B1).room = room(10)
    bookies.fail(B2, Op.ROOM, Fault(delay_s=100.0))
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    source = DiskSpaceSource(
        bookies, views, floor_share=0.1, clock=cluster.clock, rng=random.Random(1)
    )
    began_s = cluster.clock.now_s()

    await source.start()

    assert source.free_bytes(B1) == 10
    assert source.free_bytes(B2) is None
    assert cluster.clock.now_s() - began_s <= START_TIMEOUT_S


async def test_a_bookie_that_demands_authentication_is_reported() -> None:
    """It is not asked again."""
    cluster = await Cluster.start(B1)
    bookies = CountingBookies(cluster, B1)
    bookies.fail(B1, Op.ROOM, Fault(error=AuthenticationRequiredError))
    quarantine = BookieHealth(cluster.clock, life=lambda bookie: 1)
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    source = DiskSpaceSource(
        bookies,
        views,
        floor_share=0.1,
        clock=cluster.clock,
        rng=random.Random(1),
        health=quarantine,
    )

    await source.ask_due()

    assert quarantine.shut()[B1].reason

"""Measuring by the growth of open ledgers on which bookies clients are active: decisions and rounds
of reads.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from auditor.activity import (
    ACTIVE_FOR_S,
    GO_ON_S,
    IDLE_INTERVAL_S,
    LOOK_INTERVAL_S,
    READS_PER_LOOK,
    ActivityWatch,
    LedgerGrowth,
)
from ledgers.bulk.flow_control import Activity
from ledgers.errors import UnavailableError
from ledgers.model import FEED_MARKER, BookieId, LedgerState
from replication.client_activity import STALE_AFTER_S, read_activity
from replication.nodes import Membership, Role
from tests.auditor.auditing import leading
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import ENTRY_BYTES, Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, node_info

A, B, C, D = (BookieId(f"{name}:3181") for name in "abcd")
ALL = frozenset({A, B, C, D})
STEP_S = 0.25


class Ledgers:
    """Open ledgers, and rounds of reads of them."""

    def __init__(self, ensembles: dict[int, Sequence[BookieId]]) -> None:
        self.ensembles = ensembles
        self.last: dict[int, int | None] = dict.fromkeys(ensembles, 10)
        self.growth = LedgerGrowth()
        self.known: set[int] | None = None
        self.now_s = 100.0
        self.read: list[int] = []
        """In the last round."""

    def read_round(self, *, count_max: int = READS_PER_LOOK, times: int = 1) -> None:
        for _ in range(times):
            self.now_s += STEP_S
            open_ids = self.ensembles.keys()
            new_ids = [] if self.known is None else [i for i in open_ids if i not in self.known]
            self.known = set(open_ids)
            self.read = self.growth.begin(open_ids, new_ids, count_max=count_max, now_s=self.now_s)
            for ledger_id in self.read:
                last = self.last[ledger_id]
                self.growth.add_reading(
                    ledger_id, self.ensembles[ledger_id], last, now_s=self.now_s
                )
            for ledger_id in new_ids:
                self.growth.add_client(ledger_id, self.ensembles[ledger_id], now_s=self.now_s)
            self.growth.end()

    def of(self, bookie: BookieId) -> Activity:
        return self.growth.activity(ALL, copying_node_count=1, now_s=self.now_s).of(bookie)

    def grow(self, ledger_id: int) -> None:
        self.last[ledger_id] = (self.last[ledger_id] or 0) + 1

    def wait(self, duration_s: float) -> None:
        """Read rounds until the time is over."""
        self.read_round(times=round(duration_s / STEP_S))


def test_a_bookie_without_open_ledgers_is_quiet_after_one_round() -> None:
    ledgers = Ledgers({1: (A, B, C)})

    ledgers.read_round()

    assert ledgers.of(D) is Activity.QUIET
    assert ledgers.of(A) is Activity.UNKNOWN


def test_a_new_ledger_shows_a_client_before_its_first_entry() -> None:
    ledgers = Ledgers({})
    ledgers.read_round(times=2)
    ledgers.ensembles[7], ledgers.last[7] = (A, B), -1

    ledgers.read_round()

    assert ledgers.of(A) is Activity.ACTIVE
    assert ledgers.of(C) is Activity.QUIET


def test_pauses_of_a_client_change_nothing() -> None:
    ledgers = Ledgers({1: (A, B)})
    ledgers.read_round(times=2)
    for _ in range(20):
        ledgers.grow(1)
        for _ in range(round((ACTIVE_FOR_S - 2) / STEP_S)):
            ledgers.read_round()
            assert ledgers.of(A) is Activity.ACTIVE


def test_a_ledger_closed_while_it_grows_keeps_its_bookies_active() -> None:
    """The bookies stay active for a while."""
    ledgers = Ledgers({1: (A, B)})
    ledgers.read_round()
    ledgers.grow(1)
    ledgers.read_round()
    del ledgers.ensembles[1]

    ledgers.read_round()
    assert ledgers.of(A) is Activity.ACTIVE
    ledgers.wait(ACTIVE_FOR_S + STEP_S)

    assert ledgers.of(A) is Activity.QUIET


def test_an_earlier_last_entry_shows_no_client() -> None:
    """A bookie that receives copies names the latest of them as its last entry for a moment."""
    ledgers = Ledgers({1: (A, B)})
    ledgers.read_round(times=3)

    for last in (4, 10):
        ledgers.last[1] = last
        ledgers.read_round()

    assert ledgers.of(A) is Activity.QUIET


# --- More ledgers than can be read in one round ---------------------------------------------------


def many() -> Ledgers:
    return Ledgers({n: (A, B) if n % 2 else (C, D) for n in range(1_000)})


def test_a_round_reads_no_more_than_its_bound() -> None:
    ledgers = many()
    seen: set[int] = set()

    for _ in range(12):
        ledgers.read_round(count_max=100)
        assert len(ledgers.read) <= 100
        seen.update(ledgers.read)

    assert len(seen) == 1_000


def test_no_bookie_is_quiet_before_all_ledgers_were_read_twice() -> None:
    ledgers = many()
    ledgers.read_round(count_max=100, times=15)
    assert ledgers.of(A) is Activity.UNKNOWN

    ledgers.read_round(count_max=100, times=10)

    assert ledgers.of(A) is Activity.QUIET


def test_a_bookie_stays_active_while_a_client_writes() -> None:
    """Any number of other ledgers may be open."""
    ledgers = many()
    ledgers.read_round(count_max=10, times=101)  # a round takes 25 s
    while ledgers.of(A) is not Activity.ACTIVE:
        ledgers.grow(501)
        ledgers.read_round(count_max=10)

    for _ in range(400):
        ledgers.grow(501)
        ledgers.read_round(count_max=10)
        assert ledgers.of(A) is Activity.ACTIVE


def test_an_active_bookie_is_quiet_after_a_round_without_growth() -> None:
    ledgers = many()
    ledgers.read_round(count_max=10, times=101)
    while ledgers.of(A) is not Activity.ACTIVE:
        ledgers.grow(501)
        ledgers.read_round(count_max=10)

    ledgers.wait(0)
    ledgers.read_round(count_max=10, times=round((ACTIVE_FOR_S + 1) / STEP_S))
    assert ledgers.of(A) is Activity.UNKNOWN
    ledgers.read_round(count_max=10, times=200)

    assert ledgers.of(A) is Activity.QUIET


@pytest.mark.parametrize("count_max", [1, 7, 125])
def test_new_ledgers_are_read_first(count_max: int) -> None:
    ledgers = many()
    ledgers.read_round(count_max=count_max, times=3)
    ledgers.ensembles[5_000], ledgers.last[5_000] = (A, B), 0

    ledgers.read_round(count_max=count_max)

    assert 5_000 in ledgers.read


# --- The leader's watch over open ledgers, in memory ----------------------------------------------

A_SECOND_S = 1.0
SETTLED_S = 3.0
"""Within so long all ledgers of a small cluster are looked at twice."""


@dataclass
class Writer:
    """Adds entries to one open ledger on B1 and B2 until it is told to stop."""

    cluster: Cluster
    is_writing: bool = False
    last: int = 9

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if self.is_writing:
                self.last += 1
                self.cluster.put(LEDGER, self.last, B1, B2)


@asynccontextmanager
async def watching(
    cluster: Cluster, *, custom: Sequence[tuple[str, bytes]] = ()
) -> AsyncIterator[Writer]:
    """Run a leader's watch, with an open ledger on B1 and B2. ``custom``: in its metadata."""
    await cluster.write_ledger((B1, B2), state=LedgerState.OPEN, custom=tuple(custom))
    writer = Writer(cluster)
    async with leading(cluster) as leader:
        watch = ActivityWatch(
            updater=leader.updater,
            views=leader.views,
            bookies=cluster.bookies,
            records=leader.records,
            clock=cluster.clock,
        )
        tasks = [asyncio.create_task(each.run()) for each in (watch, writer)]
        try:
            yield writer
        finally:
            for task in tasks:
                task.cancel()


async def said_of(cluster: Cluster, bookie: BookieId) -> Activity | None:
    """Return the recorded activity of the bookie; None if the leader wrote no recent record."""
    said = await read_activity(cluster.store, PATHS, now_ms=cluster.clock.wall_ms())
    return None if said is None else said.of(bookie)


async def all_quiet(cluster: Cluster) -> bool:
    return all([await said_of(cluster, b) is Activity.QUIET for b in (B1, B2, B3, B4)])


def recorded_requests(cluster: Cluster) -> list[tuple[BookieId, Op]]:
    """Return a list that grows by each request to a bookie."""
    requests: list[tuple[BookieId, Op]] = []

    def note(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        requests.append((bookie, op))
        return NO_FAULT

    cluster.bookies.faults = note
    return requests


async def test_bookies_without_writers_are_soon_quiet(cluster: Cluster) -> None:
    async with watching(cluster):
        await asyncio.sleep(SETTLED_S)

        assert await all_quiet(cluster)


async def test_a_writer_is_reported_within_a_second(cluster: Cluster) -> None:
    async with watching(cluster) as writer:
        await asyncio.sleep(SETTLED_S)

        writer.is_writing = True
        await asyncio.sleep(A_SECOND_S)

        assert await said_of(cluster, B1) is Activity.ACTIVE
        assert await said_of(cluster, B2) is Activity.ACTIVE
        assert await said_of(cluster, B3) is Activity.QUIET


async def test_the_writer_of_the_change_feed_is_no_client(cluster: Cluster) -> None:
    async with watching(cluster, custom=(FEED_MARKER,)) as writer:
        writer.is_writing = True
        await asyncio.sleep(SETTLED_S)
        await cluster.write_ledger(
            (B3, B4), ledger_id=LEDGER + 1, state=LedgerState.OPEN, custom=(FEED_MARKER,)
        )
        await asyncio.sleep(A_SECOND_S)

        assert await all_quiet(cluster)


async def test_a_new_ledgers_client_is_reported_within_a_second(cluster: Cluster) -> None:
    async with watching(cluster):
        await asyncio.sleep(SETTLED_S)

        await cluster.write_ledger((B3, B4), ledger_id=LEDGER + 1, state=LedgerState.OPEN)
        await asyncio.sleep(A_SECOND_S)

        assert await said_of(cluster, B3) is Activity.ACTIVE


async def test_a_client_that_stopped_is_soon_forgotten(cluster: Cluster) -> None:
    async with watching(cluster) as writer:
        writer.is_writing = True
        await asyncio.sleep(SETTLED_S)
        writer.is_writing = False

        await asyncio.sleep(ACTIVE_FOR_S / 2)
        assert await said_of(cluster, B1) is Activity.ACTIVE
        await asyncio.sleep(ACTIVE_FOR_S)

        assert await all_quiet(cluster)


async def test_a_bookie_that_does_not_answer_is_not_quiet(cluster: Cluster) -> None:
    async with watching(cluster):
        for bookie in (B1, B2):
            cluster.bookies.fail(bookie, Op.READ, Fault(error=UnavailableError))

        await asyncio.sleep(SETTLED_S)

        assert await said_of(cluster, B1) is Activity.UNKNOWN
        assert await said_of(cluster, B3) is Activity.QUIET


async def test_a_slow_bookie_does_not_delay_what_is_said_of_others(cluster: Cluster) -> None:
    async with watching(cluster) as writer:
        await cluster.write_ledger((B4, B3), ledger_id=LEDGER + 1, state=LedgerState.OPEN)
        await cluster.write_ledger((B3, B4), ledger_id=LEDGER + 2, state=LedgerState.OPEN)
        cluster.bookies.fail(B4, Op.READ, Fault(delay_s=60.0))
        await asyncio.sleep(2 * SETTLED_S)
        assert await said_of(cluster, B4) is Activity.UNKNOWN
        assert await said_of(cluster, B3) is Activity.QUIET, "it answers for both ledgers"

        writer.is_writing = True
        await asyncio.sleep(A_SECOND_S)

        assert await said_of(cluster, B1) is Activity.ACTIVE


async def test_no_bookie_is_watched_while_nothing_is_copied(cluster: Cluster) -> None:
    async with watching(cluster):
        await asyncio.sleep(GO_ON_S + STALE_AFTER_S + 1)
        assert await said_of(cluster, B1) is None
        requests = recorded_requests(cluster)

        await asyncio.sleep(10 * GO_ON_S)

        assert requests == []


async def test_a_watch_begins_when_a_bookie_is_lost(cluster: Cluster) -> None:
    async with watching(cluster):
        await asyncio.sleep(2 * GO_ON_S)

        await cluster.kill(B4)
        await asyncio.sleep(SETTLED_S)

        assert await said_of(cluster, B1) is Activity.QUIET


async def test_a_watch_continues_as_long_as_ledgers_are_locked(cluster: Cluster) -> None:
    async with watching(cluster):
        for number in range(3):
            await Membership.join(cluster.store, PATHS, node_info(f"worker-{number}", Role.WORKER))
        await asyncio.sleep(2 * GO_ON_S)
        for ledger_id in (1, 2):
            await cluster.store.create(PATHS.lock(ledger_id), with_parents=True)

        await asyncio.sleep(IDLE_INTERVAL_S + SETTLED_S)
        said = await read_activity(cluster.store, PATHS, now_ms=cluster.clock.wall_ms())
        assert said is not None
        assert said.copying_node_count == 2, "of three workers two at most hold a lock"

        await asyncio.sleep(5 * GO_ON_S)
        assert await said_of(cluster, B1) is Activity.QUIET


async def test_fewer_entries_are_read_where_entries_are_large(cluster: Cluster) -> None:
    with patch("auditor.activity.BYTES_PER_LOOK", 3 * ENTRY_BYTES):
        async with watching(cluster):
            for ledger_id in range(100, 150):
                await cluster.write_ledger((B1, B2), ledger_id=ledger_id, state=LedgerState.OPEN)
            await asyncio.sleep(SETTLED_S)
            requests = recorded_requests(cluster)

            await asyncio.sleep(10 * LOOK_INTERVAL_S)

            assert len(requests) == pytest.approx(30, abs=3)

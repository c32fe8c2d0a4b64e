"""Recoveries of ledgers whose bookies lose, damage, delay or refuse entries, drawn from a seed.

A ledger is made by hand as a dead writer may have left it. Everything that it acknowledged was on
an ack quorum of bookies, some of which were reformatted afterwards. These are newer than the
ledger; so may others be that joined by an ensemble change. If the end can be proven, the recovery
closes the ledger there. Otherwise the entries that remain get their copies back.
"""

from random import Random

import pytest

from ledgers.digest import EntryHeader
from ledgers.errors import BookmenderError, FencedError, UnavailableError
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.reading import replicas_in
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.memory_cluster import BOOKIES, LEDGER_ID, PASSWORD, TIMEOUT_S, MemoryCluster
from tests.replication.cluster import in_virtual_time

ENTRY_COUNT_MAX = 12
TOO_LONG_S = 120.0


class Aftermath:
    """The ledger that a writer left, and the faults of its bookies. ``acknowledged``: the last
    acknowledged entry."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random, self.cluster = seed, Random(seed), MemoryCluster(seed=seed)
        draw = self.random
        size = draw.randint(1, 5)
        self.quorum = draw.randint(1, size)
        self.ack_quorum = draw.randint(1, self.quorum)
        self.ensemble = tuple(draw.sample(BOOKIES, size))
        self.first = draw.choice([0, 0, 3])
        self.segment = Segment(first_entry_id=self.first, ensemble=self.ensemble)
        self.entry_count = draw.randint(0, ENTRY_COUNT_MAX)
        self.acknowledged = self.first - 1
        self.newer: set[BookieId] = set()
        self.slow, self.erring, self.refusing = self._some(0.2), self._some(0.1), self._some(0.15)
        self.damaged: set[tuple[BookieId, int]] = set()

    def _some(self, share: float) -> set[BookieId]:
        return {bookie for bookie in self.ensemble if self.random.random() < share}

    def replicas(self, entry_id: int) -> list[BookieId]:
        return list(replicas_in(self.segment, entry_id, write_quorum=self.quorum))

    async def happen(self) -> None:
        before = Segment(first_entry_id=0, ensemble=BOOKIES[: len(self.ensemble)])
        metadata = LedgerMetadata(
            ensemble_size=len(self.ensemble),
            write_quorum=self.quorum,
            ack_quorum=self.ack_quorum,
            password=PASSWORD,
            state=self.random.choice([LedgerState.OPEN, LedgerState.IN_RECOVERY]),
            segments=(before, self.segment) if self.first else (self.segment,),
        )
        await self.cluster.manager.create(LEDGER_ID, metadata)
        await self._write()
        wiped = self._some(0.3)
        for bookie in wiped:
            for entry_id in self.cluster.bookies.bookie(bookie).entry_ids(LEDGER_ID):
                self.cluster.bookies.bookie(bookie).lose(LEDGER_ID, entry_id)
        self.newer = wiped | (self._some(0.3) if self.first else set())
        self.cluster.down = self._some(0.1)
        if self.random.random() < 0.3:
            # No bookie can be a replacement.
            self.cluster.unwritable = set(BOOKIES) - set(self.ensemble)
        self.cluster.bookies.before = self._trouble

    async def _write(self) -> None:
        """Give each bookie the entries up to some id. Sometimes a bookie missed an earlier
        entry."""
        reach = {b: self.first + self.random.randint(0, self.entry_count) for b in self.ensemble}
        told = self.first - 1
        is_unbroken = True
        for entry_id in range(self.first, self.first + self.entry_count):
            holders = [
                bookie
                for bookie in self.replicas(entry_id)
                if entry_id < reach[bookie] and self.random.random() < 0.9
            ]
            if self.random.random() < 0.7:
                told = self.acknowledged
            await self.cluster.put(entry_id, *holders, lac=told)
            is_unbroken &= len(holders) >= self.ack_quorum
            if is_unbroken:
                self.acknowledged = entry_id
            self.damaged |= {(b, entry_id) for b in holders if self.random.random() < 0.02}

    async def _trouble(self, call: Call) -> None:
        if call.bookie in self.cluster.down:
            await self.cluster.clock.sleep(TIMEOUT_S)
            raise UnavailableError("time-out", bookie=call.bookie)
        if call.bookie in self.slow:
            await self.cluster.clock.sleep(self.random.uniform(0.1, 2.0))
        if call.bookie in self.erring and self.random.random() < 0.2:
            raise UnavailableError("EIO", bookie=call.bookie)
        if call.operation == "add" and call.bookie in self.refusing:
            raise FencedError("deleted here", bookie=call.bookie)
        if "read" in call.operation and (call.bookie, call.entry_id) in self.damaged:
            raise UnavailableError("EIO", bookie=call.bookie)

    # --- Afterwards -------------------------------------------------------------------------------

    def given(self) -> set[int]:
        """Return the entries of the last segment that a healthy bookie would have returned at the
        start."""
        well = set(self.ensemble) - self.cluster.down - self.erring
        return {
            entry_id
            for entry_id in range(self.first, self.first + self.entry_count)
            if any(
                bookie in well and (bookie, entry_id) not in self.damaged
                for bookie in self.cluster.stored_on(entry_id) & set(self.replicas(entry_id))
            )
        }

    @property
    def has_trouble(self) -> bool:
        """Return True if there are faults beyond reformatted bookies."""
        return bool(self.cluster.down or self.erring or self.refusing or self.damaged)

    def told_lac(self) -> int:
        """Return the greatest LAC in any entry on a bookie of the ensemble."""
        return max(
            (
                EntryHeader.of(self.cluster.bookies.bookie(b).read(LEDGER_ID, e)).lac
                for b in self.ensemble
                for e in self.cluster.bookies.bookie(b).entry_ids(LEDGER_ID)
            ),
            default=-1,
        )

    def assert_closed_well(self, closed: LedgerMetadata, told: int) -> None:
        assert closed.last_entry_id >= self.acknowledged
        for entry_id in range(max(told + 1, self.first), closed.last_entry_id + 1):
            named = replicas_in(closed.segment_of(entry_id), entry_id, write_quorum=self.quorum)
            holders = self.cluster.stored_on(entry_id) & set(named)
            assert len(holders) >= self.ack_quorum, (entry_id, holders)

    def assert_saved(self, given: set[int], told: int) -> None:
        failing = self.cluster.down | self.erring | self.refusing
        for entry_id in given:
            wanted = set(self.replicas(entry_id)) - failing
            assert wanted <= self.cluster.stored_on(entry_id), entry_id
        assert self.told_lac() >= told


@pytest.mark.parametrize("seed", range(300))
@in_virtual_time
async def test_no_acknowledged_entry_is_cut_off(seed: int) -> None:
    """If no end can be proven, the entries that remain are saved."""
    print(f"seed {seed}")

    aftermath = Aftermath(seed)
    await aftermath.happen()
    cluster = aftermath.cluster
    given, told = aftermath.given(), aftermath.told_lac()
    closed, error = None, ""
    try:
        closed = await cluster.recover(reformatted=aftermath.newer)
    except BookmenderError as failure:
        error = str(failure)

    if closed is not None:
        aftermath.assert_closed_well(closed, told)
    else:
        assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
        if "its end cannot be proven" in error:
            aftermath.assert_saved(given, told)
        else:
            assert aftermath.has_trouble, error
    assert cluster.clock.now_s() < TOO_LONG_S

"""Bookies and ledgers that appear, change and disappear as a seed draws them. All are znodes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ledgers.errors import NoSuchLedgerError
from ledgers.model import BookieId, Segment
from tests.znode_cluster import ZnodeCluster, bookie, closed

BOOKIE_COUNT = 30
ABSENT_MAX = 6
ENSEMBLE_SIZE = 3
STAYS_S = 4.0
"""A bookie stays absent or registered for at least this long. A session timeout hides shorter
times."""


@dataclass(slots=True)
class Chaos:
    """``ledger_count``: about the number of ledgers at any time.

    Every call may raise UnavailableError.
    """

    cluster: ZnodeCluster
    rng: random.Random
    ledger_count: int
    bookies: Sequence[BookieId] = field(
        default_factory=lambda: [bookie(number) for number in range(BOOKIE_COUNT)]
    )
    ever_absent: set[BookieId] = field(default_factory=set)
    loss_count: int = 0
    change_count: int = 0
    _moved_s: dict[BookieId, float] = field(default_factory=dict)
    """Times at which each bookie registered or disappeared, in monotonic seconds."""
    _ledger_ids: list[int] = field(default_factory=list)
    _next_id: int = 0

    async def begin(self) -> None:
        await self.cluster.format()
        await self.cluster.add_bookies(self.bookies)
        ledger_ids = range(self.ledger_count)
        await self.cluster.create_ledgers(
            (ledger_id, closed(*self.rng.sample(self.bookies, ENSEMBLE_SIZE)))
            for ledger_id in ledger_ids
        )
        self._ledger_ids, self._next_id = list(ledger_ids), self.ledger_count

    async def move_a_bookie(self, *, now_s: float) -> None:
        """Register or deregister a bookie, if it has stayed long enough in its state."""
        present = await self.cluster.registered()
        moved = self.rng.choice(self.bookies)
        if now_s - self._moved_s.get(moved, 0) < STAYS_S:
            return
        self._moved_s[moved] = now_s
        if moved not in present:
            await self.cluster.register(moved)
        elif len(self.bookies) - len(present) < ABSENT_MAX:
            self.ever_absent.add(moved)
            self.loss_count += 1
            await self.cluster.deregister(moved)

    async def touch_a_ledger(self) -> None:
        """Create, delete or change a ledger. Its writer names registered bookies."""
        self.change_count += 1
        present = sorted(await self.cluster.registered())
        chosen = self.rng.choice(("create", "delete", "change"))
        if chosen == "change":
            await self._change(self.rng.choice(self._ledger_ids), present)
        elif chosen == "create" or len(self._ledger_ids) < self.ledger_count:
            self._ledger_ids.append(self._next_id)
            self._next_id += 1
            ensemble = self.rng.sample(present, ENSEMBLE_SIZE)
            await self.cluster.manager.create(self._ledger_ids[-1], closed(*ensemble))
        else:
            place = self.rng.randrange(len(self._ledger_ids))
            ledger_id, self._ledger_ids[place] = self._ledger_ids[place], self._ledger_ids[-1]
            self._ledger_ids.pop()
            await self.cluster.manager.delete(ledger_id, version=-1)

    async def _change(self, ledger_id: int, present: Sequence[BookieId]) -> None:
        try:
            found = await self.cluster.manager.read(ledger_id)
        except NoSuchLedgerError:  # its creation may have failed
            return
        segment = Segment(
            first_entry_id=self.rng.choice((0, 500)),
            ensemble=tuple(self.rng.sample(present, ENSEMBLE_SIZE)),
        )
        metadata = found.metadata.with_segment(segment)
        await self.cluster.manager.write(ledger_id, metadata, read_as=found)

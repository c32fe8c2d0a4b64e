"""The queue as a repair by hand sees it: the ledgers that somebody named, and no others.

They are marked in our own tree, so that the nodes take them as well, under the same locks, and go
on where the one who asked does not stay to see the end.
"""

import random
from collections.abc import Collection, Iterable

from ledgers.clock import Clock
from ledgers.store import MetadataStore
from replication.queue.batching import Batcher
from replication.queue.disable_switch import UnheededSwitch
from replication.queue.listing import locked_ledger_ids
from replication.queue.queue import Look, Queue
from replication.queue.take import QueuedLedger


class GivenLedgers(Queue):
    """A queue of these ledgers alone. All that are left are its worker's own share."""

    def __init__(
        self,
        store: MetadataStore,
        batcher: Batcher,
        ur: str,
        *,
        holder: str,
        clock: Clock,
        ledger_ids: Collection[int],
    ) -> None:
        super().__init__(store, batcher, ur, holder=holder, clock=clock)
        self.switch = UnheededSwitch(store, ur, clock)
        self._left = set(ledger_ids)
        """Those that had a mark whenever they were looked at; before we began all of them had
        one."""

    async def look(self, rng: random.Random) -> Look:
        """Without a list of marks, of which a look at a long queue tells but a part."""
        free = frozenset(self._left - await locked_ledger_ids(self._store, self._ur))
        return Look(free=free, losses=free, urgent=())

    async def read(self, ledger_ids: Iterable[int]) -> list[QueuedLedger]:
        wanted = list(ledger_ids)
        found = await super().read(wanted)
        self._left -= set(wanted).difference(queued.ledger_id for queued in found)
        return found

    async def workers(self) -> frozenset[int]:
        """Whoever asked by hand leaves nothing to others, though they may be quicker."""
        return frozenset({self.session_id})

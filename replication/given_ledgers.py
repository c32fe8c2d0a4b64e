"""The queue as a repair by hand sees it: the ledgers that somebody named, and no others.

They are marked in our own tree, so that the nodes take them as well, under the same locks, and go on
where the one who asked does not stay to see the end.
"""

import random
from collections.abc import AsyncGenerator, Collection

from ledgers.store import MetadataStore
from replication.batching import Batcher
from replication.queue import Look, Queue


class GivenLedgers(Queue):
    """A queue of these ledgers alone. All that are left are its worker's own share."""

    def __init__(
        self,
        store: MetadataStore,
        batcher: Batcher,
        ur: str,
        *,
        holder: str,
        ledger_ids: Collection[int],
    ) -> None:
        super().__init__(store, batcher, ur, holder=holder)
        self._given = frozenset(ledger_ids)

    async def look(self, rng: random.Random) -> Look:
        seen = await super().look(rng)
        return Look(free=seen.free & self._given, urgent=())

    async def workers(self) -> frozenset[int]:
        """Whoever asked by hand leaves nothing to others, though they may be quicker."""
        return frozenset({self.session_id})

    async def is_disabled(self) -> bool:
        """What the switch is about is what nobody asked for."""
        return False

    async def watch_switch(self) -> AsyncGenerator[None, None]:
        never: tuple[None, ...] = ()
        for event in never:
            yield event

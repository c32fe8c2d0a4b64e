"""Rescue: restores the copies of a ledger's last segment if the end of the ledger cannot be proven.

Such a ledger cannot be closed, and is therefore not repaired (rule S4). The loss of another bookie
could destroy its last copies. So every entry that any bookie returns is added to the members of its
write set that lack it. This includes entries up to the LAC, and entries beyond missing ones,
because the end may lie there. Bookies that receive entries are fenced.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from itertools import count

from ledgers.clock import Clock
from ledgers.entry import EntryHeader
from ledgers.errors import BookmenderError
from ledgers.metadata import BookieId, LedgerMetadata
from ledgers.operations.ahead import read_ahead
from ledgers.operations.asking import OTHERS_S, ask, given
from ledgers.operations.reader import replicas_in
from ledgers.striping import first_of

Read = Callable[[BookieId, int], Awaitable[bytes]]
"""Reads an entry from one bookie and verifies its digest."""
Add = Callable[[BookieId, bytes], Awaitable[None]]


class Rescue:
    """One rescue of one ledger. Call ``run`` once."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        *,
        read: Read,
        add: Add,
        shown: int,
        withheld: Collection[BookieId],
        unregistered: Collection[BookieId] = (),
        clock: Clock,
    ) -> None:
        """``shown``: the highest entry that any bookie is known to store. ``withheld``: bookies
        that do not receive their first entry, because later entries may be unreadable now.
        ``unregistered``: bookies that receive nothing, because another bookie may answer at their
        address."""
        self._metadata = metadata
        self._read, self._add = read, add
        self._shown = shown
        self._withheld = frozenset(withheld)
        self._unregistered = frozenset(unregistered)
        self._clock = clock
        self._unable: set[BookieId] = set()
        """Bookies that failed an add. They receive no further entries."""

    async def run(self) -> str:
        """Run the rescue and return a text about the saved entries."""
        first_entry_id = self._metadata.last_segment.first_entry_id
        last_entry_id, entry_count = first_entry_id - 1, 0
        async with aclosing(self._save_each(first_entry_id)) as entries:
            async for entry in entries:
                last_entry_id = max(last_entry_id, EntryHeader.of(entry).entry_id)
                entry_count += 1
        left = range(first_entry_id, last_entry_id + 1)
        return what_was_saved(left, entry_count=entry_count, unable=self._unable)

    async def _save_each(self, first_entry_id: int) -> AsyncGenerator[bytes, None]:
        """Save and yield all remaining entries.

        The first entry of each bookie comes last. Once a bookie stores it, recovery trusts the
        bookie to store all of its entries (``EndFinder``), so an interrupted rescue must not leave
        it alone.
        """
        inner_id = first_entry_id + self._metadata.ensemble_size
        async with aclosing(read_ahead(count(inner_id), self._save)) as entries:
            async for entry in entries:
                if entry:
                    yield entry
        for entry_id in reversed(range(first_entry_id, inner_id)):
            if first := await self._save(entry_id):
                yield first

    async def _save(self, entry_id: int) -> bytes | None:
        """Copy one entry and return it. Empty if no bookie returned it; None if no later entry is
        known either.

        The bytes stay unchanged. With another LAC than the writer's, a later recovery could start
        from a lower LAC. No bookie is replaced, because the metadata is not changed.
        """
        replicas = replicas_in(
            self._metadata.last_segment, entry_id, write_quorum=self._metadata.write_quorum
        )
        entry, results = await ask(
            replicas,
            lambda bookie: self._read(bookie, entry_id),
            given,
            clock=self._clock,
            linger_s=OTHERS_S,
        )
        if entry is None:
            return b"" if entry_id < self._shown else None
        lacking = [b for b in replicas if b not in results or results[b].value is None]
        await asyncio.gather(
            *(self._try_add(b, entry) for b in lacking if not self._is_withheld(b, entry_id))
        )
        return entry

    def _is_withheld(self, bookie: BookieId, entry_id: int) -> bool:
        segment = self._metadata.last_segment
        return bookie in self._withheld and entry_id == first_of(
            segment.ensemble.index(bookie),
            segment.first_entry_id,
            ensemble_size=self._metadata.ensemble_size,
            write_quorum=self._metadata.write_quorum,
        )

    async def _try_add(self, bookie: BookieId, entry: bytes) -> None:
        if bookie in self._unregistered:
            self._unable.add(bookie)
        elif bookie not in self._unable:
            try:
                await self._add(bookie, entry)
            except BookmenderError:
                self._unable.add(bookie)


def what_was_saved(left: Sequence[int], *, entry_count: int, unable: Collection[BookieId]) -> str:
    """Return a text. ``left``: the ids up to the last entry found. ``unable``: bookies that failed
    an add."""
    if not left:
        return "no bookie has any"
    lost_count = len(left) - entry_count
    but_lost = f", but for {lost_count} that no bookie gave" if lost_count else ""
    but_on = f", but on {', '.join(sorted(unable))}" if unable else ""
    return f"{left[0]} to {left[-1]} are left{but_lost}, and have their copies again{but_on}"

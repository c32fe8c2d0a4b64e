"""What is left of a ledger's last segment given its copies again, where the ledger's end cannot be proven.

Such a ledger is never closed, and so never repaired (rule S4); its last copies would go with the next bookie. So
every entry that any bookie gives is added to those of its write set that lack it: those up to the LAC too, and those
beyond entries that nobody gives, as the end may lie there. Who takes them is fenced.
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
"""One bookie's copy, of which the digest is good."""
Add = Callable[[BookieId, bytes], Awaitable[None]]


class Rescue:
    """``run`` once."""

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
        """``shown``: the last entry that any bookie is known to have. ``withheld``: who is not given his first entry,
        as there may be others that nobody can give now. ``unregistered``: bookies that are given nothing, as another
        bookie may take it in their place."""
        self._metadata = metadata
        self._read, self._add = read, add
        self._shown = shown
        self._withheld = frozenset(withheld)
        self._unregistered = frozenset(unregistered)
        self._clock = clock
        self._unable: set[BookieId] = set()
        """Bookies that took no copy: they are given no more."""

    async def run(self) -> str:
        """What was saved, for people."""
        first_entry_id = self._metadata.last_segment.first_entry_id
        last_entry_id, entry_count = first_entry_id - 1, 0
        async with aclosing(self._save_each(first_entry_id)) as entries:
            async for entry in entries:
                last_entry_id = max(last_entry_id, EntryHeader.of(entry).entry_id)
                entry_count += 1
        left = range(first_entry_id, last_entry_id + 1)
        return what_was_saved(left, entry_count=entry_count, unable=self._unable)

    async def _save_each(self, first_entry_id: int) -> AsyncGenerator[bytes, None]:
        """Those that are left. Each bookie's first one comes last, as it makes the bookie believed to have them all
        (``EndFinder``)."""
        inner_id = first_entry_id + self._metadata.ensemble_size
        async with aclosing(read_ahead(count(inner_id), self._save)) as entries:
            async for entry in entries:
                if entry:
                    yield entry
        for entry_id in reversed(range(first_entry_id, inner_id)):
            if first := await self._save(entry_id):
                yield first

    async def _save(self, entry_id: int) -> bytes | None:
        """Empty where nobody gives it; None where nobody has a later one either.

        It is passed on as it is. With another LAC in it than its writer's, a later recovery might know less than
        this one; and who took over from a bookie that fails would not be named anywhere.
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
    """``left``: up to the last entry that any bookie gave. ``unable``: who took no copy."""
    if not left:
        return "no bookie has any"
    lost_count = len(left) - entry_count
    but_lost = f", but for {lost_count} that no bookie gave" if lost_count else ""
    but_on = f", but on {', '.join(sorted(unable))}" if unable else ""
    return f"{left[0]} to {left[-1]} are left{but_lost}, and have their copies again{but_on}"

"""Fencing: the part of a recovery that talks to bookies.

``EndFinder`` fences the last ensemble of a ledger, finds the last entry that may be acknowledged,
and stores all entries up to it on A bookies. If the end cannot be proven, it rescues what is left.
It changes no metadata; ``recovery`` does. Earlier segments are complete and are not read.

Every read that searches for the end also fences. Otherwise this could happen:

1. A bookie answers our read of entry 7 with "no such entry".
2. The bookie then stores entry 7 and acknowledges it to the writer.
3. Recovery closes the ledger before entry 7, although the writer told its user that entry 7 is
   stored.

Only an explicit "no such entry" counts as a "no" (rule S5). By the protocol, W - A + 1 of them
prove that an entry was not acknowledged. But a bookie that lost entries also answers "no", and
quickly:

1. Bookies A and B store entry 7, which is acknowledged (W = 3, A = 2). C does not have it yet.
2. A loses its index.
3. Fenced, B returns entry 7 as its last one.
4. A and C answer "no" for entry 7. Two "no" would prove that it was not acknowledged.

So a bookie that returned an entry when it was fenced must answer before any "no" counts. If it
times out, recovery continues without it.

*Distrusted* bookies are those whose "no" proves nothing: bookies that are known to have lost
entries, reformatted ones, and unregistered ones (another bookie may answer at their address).

*Latecomers* are reformatted bookies that joined the ledger by an ensemble change. A latecomer was
either formatted before it joined, and then has all its entries, or wiped after it joined. It is
trusted again if it still stores its first entry of the last segment.

A rescue restores the copies of the last segment. A ledger whose end is not proven cannot be closed,
and is therefore not repaired (rule S4), so the loss of another bookie could destroy its last
copies. Every entry that any bookie returns is added to the members of its write set that lack it.
This includes entries up to the LAC, and entries beyond missing ones, because the end may be there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import count

import structlog

from ledgers.appending import BookiePool, QuorumAppender, can_go_on_without
from ledgers.bookies import LAST_ENTRY, Answer, Bookies
from ledgers.clock import Clock
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import BookmenderError, DamagedEndError, UnavailableError, UnprovenEndError
from ledgers.model import LAC_NONE, BookieId, LedgerMetadata, Segment, first_of
from ledgers.quorum import (
    LATE_REPLY_WAIT_S,
    GivenUp,
    Proof,
    RecoveredEnd,
    Results,
    ask,
    fenced_bookies,
    fenced_text,
    first_value,
    has_every_answer,
    is_damaged,
    raise_if_denied,
    recovery_verdict,
    replies_text,
)
from ledgers.reading import LedgerReader, Tail, replicas_in, tail_verdict
from ledgers.tasks import read_ahead, task_scope

log = structlog.get_logger()

HEDGE_S = 0.5
"""A recovery read without reply for this long is also sent to the next bookie."""
FILL_ADDS, FILL_BYTES = 500, 8 * 1024 * 1024
"""Adds and bytes in flight while latecomers receive entries (``_add_all_except``)."""
STRAGGLERS_S = 1.0
"""Time that recovery waits for copies beyond the ack quorum before it closes the ledger."""


class EndFinder:
    """One attempt to find the end of a ledger, based on the metadata that marked it IN_RECOVERY."""

    def __init__(
        self,
        ledger_id: int,
        metadata: LedgerMetadata,
        *,
        digest: EntryDigest,
        bookies: Bookies,
        pool: BookiePool,
        clock: Clock,
        reformatted: Collection[BookieId],
        distrusted: Collection[BookieId],
        registered: Collection[BookieId] | None,
        gives_up_damaged: bool,
    ) -> None:
        """See ``recover_ledger``."""
        self._gives_up_damaged = gives_up_damaged
        self._given_up: GivenUp | None = None
        """The first entry with only damaged copies. Reads run ahead: it may be beyond the end."""
        self._last_seen = LAC_NONE
        """The highest entry id that any bookie returned when it was fenced, good or bad."""
        self._ledger_id, self._metadata = ledger_id, metadata
        self._digest, self._bookies = digest, bookies
        self._pool, self._clock = pool, clock
        members = frozenset(metadata.last_segment.ensemble)
        # Unregistered bookies differ from bookies that may have lost entries: they are only out of
        # reach. Another bookie may answer at their address, so replies in their name do not count.
        self._unregistered = members.difference(members if registered is None else registered)
        self._latecomers = latecomers(metadata, reformatted) - self._unregistered.union(distrusted)
        self._may_have_lost = {*reformatted, *distrusted}
        self._counted: set[BookieId] = set()
        """Bookies whose answers the end is based on."""
        self._answers: dict[BookieId, Answer] = {}
        self._shown: dict[BookieId, int] = {}
        """By bookie, the last entry that it returned when it was fenced."""
        self._changed: dict[int, Segment] = {}

    async def find_end(self) -> RecoveredEnd:
        """Find the last entry that may be acknowledged, and store all entries up to it on A
        bookies.

        Raises UnauthorizedError (denied, and no bookie returns an entry), UnavailableError (the end
        cannot be proven). If a "no" was not trusted, the remaining entries are rescued first,
        because one bookie may hold the only copy.
        """
        ensemble = self._metadata.last_segment.ensemble
        tail, results = await ask(
            ensemble,
            self._fenced_tail,
            lambda results: tail_verdict(
                results,
                self._metadata,
                distrusted=self._distrusted,
                knows_damaged=self._gives_up_damaged,
            ),
            clock=self._clock,
            linger_s=LATE_REPLY_WAIT_S,
        )
        self._answers = {bookie: result.answer for bookie, result in results.items()}
        self._counted |= fenced_bookies(results, self._distrusted)
        if tail is None:  # the fenced bookies do not cover the ensemble
            raise_if_denied(results)
            raise await self._unproven(results)
        last_entry_id, length = await self._write_back(tail.lac)
        if length is None:
            length = await self._length_at(last_entry_id, otherwise=tail.length)
        # If the ensemble is larger than the write quorum, a dead writer may leave entries beyond
        # the end. Otherwise they mean that bookies lost acknowledged entries.
        beyond = {bookie: last for bookie, last in self._shown.items() if last > last_entry_id}
        if beyond:
            log.warning(
                "recovery.entries_excluded",
                ledger_id=self._ledger_id,
                last_entry_id=last_entry_id,
                shown=beyond,
                reason=f"no bookie returned entry {last_entry_id + 1}, and enough of them answered "
                "no",
            )
        given_up = self._given_up
        if given_up is not None and given_up.first_entry_id != last_entry_id + 1:
            given_up = None  # reads ran ahead, and it lies beyond the end
        return RecoveredEnd(
            last_entry_id=last_entry_id,
            length=length,
            members=ensemble,
            trusted=frozenset(self._counted),
            segments=tuple(self._changed.values()),
            given_up=given_up,
        )

    @property
    def _distrusted(self) -> frozenset[BookieId]:
        """Bookies whose "no" proves nothing. A latecomer that proves itself leaves this set."""
        return self._unregistered | self._may_have_lost

    async def _unproven(self, results: Results[Tail]) -> UnavailableError:
        """Rescue the remaining entries of the last segment, then return the error to raise."""
        is_every_answer = has_every_answer(results) and self._unregistered.isdisjoint(results)
        cause = (
            "its end cannot be proven, because too many of its bookies may have lost entries of "
            "the last segment"
            if is_every_answer
            else "too few bookies of the last ensemble could be fenced"
        )
        context = {} if is_every_answer else self._who_answered(results)
        if self._may_have_lost.isdisjoint(results):
            kind = DamagedEndError if any(map(is_damaged, results.values())) else UnavailableError
            return kind(cause, ledger_id=self._ledger_id, **self._who_answered(results))
        saved = await self._rescue(withheld=() if is_every_answer else self._latecomers)
        log.warning("recovery.end_unproven", ledger_id=self._ledger_id, cause=cause, entries=saved)
        return UnprovenEndError(
            f"{cause}; {saved}",
            has_unresponsive=not is_every_answer,
            ledger_id=self._ledger_id,
            **context,
        )

    def _who_answered(self, results: Results[Tail]) -> dict[str, str]:
        """Return the error context about the replies of registered bookies."""
        replies = {b: result for b, result in results.items() if b not in self._unregistered}
        context = {"fenced": fenced_text(replies), "replies": replies_text(replies)}
        if self._unregistered:
            context["not_registered"] = ", ".join(sorted(self._unregistered))
        return context

    async def _add_again(self, bookie: BookieId, entry: bytes) -> None:
        await self._bookies.add(
            bookie,
            entry,
            master_key=self._digest.master_key,
            is_recovery=True,
            is_high_priority=True,
        )

    async def _fenced_tail(self, bookie: BookieId) -> Tail:
        entry = await self._bookies.read_fencing(
            bookie, self._ledger_id, LAST_ENTRY, master_key=self._digest.master_key
        )
        self._last_seen = max(self._last_seen, EntryHeader.of(entry).entry_id)
        header = self._digest.check(entry, ledger_id=self._ledger_id, entry_id=LAST_ENTRY)
        self._shown[bookie] = header.entry_id
        if bookie in self._latecomers:
            # A latecomer that still has its first entry of the last segment was not wiped since it
            # joined.
            with suppress(BookmenderError):
                await self._read_fencing(bookie, entry_id=first_entry_of(self._metadata, bookie))
                self._may_have_lost.discard(bookie)
        return Tail(lac=header.lac, length=header.length)

    async def _write_back(self, lac: int) -> tuple[int, int | None]:
        """Add every entry after the LAC again. Returns the last id, and the length if known."""
        failed = await self._latecomers_to_skip(lac)
        length = None
        async with task_scope() as scope:
            appender = QuorumAppender(
                self._metadata,
                bookies=self._bookies,
                pool=self._pool,
                clock=self._clock,
                scope=scope,
                master_key=self._digest.master_key,
                confirmed=lac,
                is_recovery=True,
                on_change=self._note_change,
                unregistered=self._unregistered,
            )
            last_add = None
            async with aclosing(read_ahead(count(lac + 1), self._read)) as entries:
                async for entry in entries:
                    header = EntryHeader.of(entry)
                    length = header.length
                    if last_add is None:
                        await appender.do_without(failed)
                    await appender.wait_for_room(len(entry))
                    last_add = appender.add(
                        header.entry_id,
                        self._digest.pack(
                            ledger_id=self._ledger_id,
                            entry_id=header.entry_id,
                            lac=self._lac_for_header(appender.confirmed),
                            length=length,
                            payload=self._digest.payload(entry),
                        ),
                    )
            if last_add is not None:
                await last_add
                await appender.settle(STRAGGLERS_S)
            return appender.confirmed, length

    async def _latecomers_to_skip(self, lac: int) -> dict[BookieId, BookmenderError]:
        """Return the latecomers that receive no entries, and why. A latecomer is trusted once it
        stores its first entry of the last segment:

        1. A recovery writes the first entry to a wiped latecomer, and is then killed.
        2. The next recovery trusts it for that, and counts its "no" for later entries.
        3. It never received these entries, although they may be acknowledged.

        So an untrusted latecomer receives nothing if the other bookies suffice. Otherwise it
        receives all other entries before its first one (``_add_all_except``).
        """
        members = set(self._metadata.last_segment.ensemble)
        firsts = {
            bookie: first_entry_id
            for bookie in members & self._latecomers & self._may_have_lost
            if (first_entry_id := first_entry_of(self._metadata, bookie)) > lac
        }
        if not firsts:
            return {}
        writable = {candidate.bookie for candidate in await self._pool.writable()}
        failing = (members - writable) | firsts.keys()
        if await can_go_on_without(self._metadata, failing, pool=self._pool, clock=self._clock):
            return dict.fromkeys(
                firsts, UnavailableError("it may have been reformatted since it joined")
            )
        return await self._add_all_except(firsts, lac)

    async def _add_all_except(
        self, firsts: Mapping[BookieId, int], lac: int
    ) -> dict[BookieId, BookmenderError]:
        """Write all entries after the LAC to their write sets, but not to these bookies their first
        entry. Returns the bookies of ``firsts`` that failed."""
        failed: dict[BookieId, BookmenderError] = {}

        async def add(bookie: BookieId, entry: bytes) -> None:
            try:
                await self._add_again(bookie, entry)
            except BookmenderError as error:
                failed[bookie] = error

        part: list[tuple[BookieId, bytes]] = []
        part_bytes = 0
        async with aclosing(read_ahead(count(lac + 1), self._read)) as entries:
            try:
                async for entry in entries:
                    entry_id = EntryHeader.of(entry).entry_id
                    unable = self._unregistered.union(failed)
                    takers = [b for b in self._replicas(entry_id) if b not in unable]
                    part += [(each, entry) for each in takers if firsts.get(each) != entry_id]
                    part_bytes += len(entry)
                    if len(part) >= FILL_ADDS or part_bytes >= FILL_BYTES:
                        await asyncio.gather(*(add(*each) for each in part))
                        part.clear()
                        part_bytes = 0
            except UnavailableError:
                await asyncio.gather(*(add(*each) for each in part))
                raise
        await asyncio.gather(*(add(*each) for each in part))
        return {bookie: error for bookie, error in failed.items() if bookie in firsts}

    async def _read(self, entry_id: int) -> bytes | None:
        """Read an entry from any bookie of its write set; None if it cannot be acknowledged."""
        replicas = self._replicas(entry_id)
        decide: Callable[[Results[bytes]], Proof | None] = partial(
            recovery_verdict,
            write_quorum=self._metadata.write_quorum,
            ack_quorum=self._metadata.ack_quorum,
            distrusted=self._distrusted,
            awaited=[b for b in replicas if self._shown.get(b, LAC_NONE) >= entry_id],
            gives_up_damaged=self._gives_up_damaged,
        )
        # Bookies that returned an entry when they were fenced come first, silent ones last.
        ranks = {Answer.PRESENT: 0, Answer.ABSENT: 1}
        verdict, results = await ask(
            sorted(replicas, key=lambda b: ranks.get(self._answers.get(b, Answer.UNKNOWN), 2)),
            partial(self._read_fencing, entry_id=entry_id),
            decide,
            clock=self._clock,
            hedge_s=HEDGE_S,
        )
        has_damaged = any(map(is_damaged, results.values()))
        if verdict is None:
            error = DamagedEndError if has_damaged else UnavailableError
            raise error(
                "neither the entry nor its absence could be proven",
                ledger_id=self._ledger_id,
                entry_id=entry_id,
                replies=replies_text(results),
            )
        if isinstance(verdict, bytes):
            return verdict
        self._counted |= fenced_bookies(results, self._distrusted)
        is_first = self._given_up is None or entry_id < self._given_up.first_entry_id
        if has_damaged and is_first:
            self._given_up = GivenUp(
                first_entry_id=entry_id,
                last_entry_id=max(entry_id, self._last_seen),
                replies=replies_text(results),
            )
        return None

    def _replicas(self, entry_id: int) -> Sequence[BookieId]:
        """Return the write set of an entry."""
        return replicas_in(
            self._metadata.last_segment, entry_id, write_quorum=self._metadata.write_quorum
        )

    async def _read_fencing(self, bookie: BookieId, entry_id: int) -> bytes:
        entry = await self._bookies.read_fencing(
            bookie,
            self._ledger_id,
            entry_id,
            master_key=self._digest.master_key,
            is_high_priority=True,
        )
        self._digest.check(entry, ledger_id=self._ledger_id, entry_id=entry_id)
        return entry

    async def _note_change(self, segment: Segment) -> None:
        self._changed[segment.first_entry_id] = segment

    def _lac_for_header(self, confirmed: int) -> int:
        """Return the LAC for the header of an entry that is written back: the confirmed entry, but
        not beyond an ensemble change of this recovery. Otherwise:

        1. This recovery replaces bookie B by D from entry 5 on. Only the CLOSED metadata will say
           so.
        2. It confirms entries 5 to 9 on the new ensemble, and writes entry 10 with LAC 9.
        3. A concurrent recovery reads entry 10, and starts from LAC 9. It does not write entries 5
           to 9 again.
        4. It closes the ledger first, with the old ensemble. Entries 5 to 9 are then on fewer than
           A of the bookies that the metadata names.
        """
        return min([confirmed, *(first_entry_id - 1 for first_entry_id in self._changed)])

    async def _length_at(self, entry_id: int, *, otherwise: int) -> int:
        """Return the length up to this entry from its header; else ``otherwise``, because a wrong
        length does less harm than a ledger that cannot be closed. These reads need not fence: they
        do not decide the end."""
        if entry_id == LAC_NONE:
            return 0
        reader = LedgerReader(
            self._ledger_id,
            self._metadata,
            digest=self._digest,
            bookies=self._bookies,
            clock=self._clock,
        )
        try:
            entry = await reader.read(entry_id)
        except BookmenderError:
            return otherwise
        return EntryHeader.of(entry).length

    async def _rescue(self, *, withheld: Collection[BookieId]) -> str:
        """Copy the remaining entries of the last segment to their write sets. Returns a text.

        ``withheld``: bookies without their first entry, because later entries may be unreadable
        now. For the others it comes last: once a bookie stores it, recovery trusts the bookie, so
        an interrupted rescue must not leave it alone.
        """
        unable: set[BookieId] = set()

        def save(entry_id: int) -> Awaitable[bytes | None]:
            return self._save(entry_id, withheld=withheld, unable=unable)

        first_entry_id = self._metadata.last_segment.first_entry_id
        inner_id = first_entry_id + self._metadata.ensemble_size
        last_entry_id, entry_count = first_entry_id - 1, 0
        async with aclosing(read_ahead(count(inner_id), save)) as entries:
            async for entry in entries:
                if entry:
                    last_entry_id = EntryHeader.of(entry).entry_id
                    entry_count += 1
        for entry_id in reversed(range(first_entry_id, inner_id)):
            if await save(entry_id):
                last_entry_id = max(last_entry_id, entry_id)
                entry_count += 1
        if not entry_count:
            return "no bookie returned an entry"
        lost_count = last_entry_id - first_entry_id + 1 - entry_count
        lost = f", except {lost_count} that no bookie returned" if lost_count else ""
        not_on = f", except on {', '.join(sorted(unable))}" if unable else ""
        return (
            f"entries {first_entry_id} to {last_entry_id} remain{lost}; their copies are restored"
            f"{not_on}"
        )

    async def _save(
        self, entry_id: int, *, withheld: Collection[BookieId], unable: set[BookieId]
    ) -> bytes | None:
        """Copy one entry and return it. Empty if no bookie returned it; None if no later entry is
        known either. ``unable``: bookies that failed an add; they receive no further entries.

        The bytes stay unchanged. With another LAC than the writer's, a later recovery could start
        from a lower LAC. No bookie is replaced, because the metadata is not changed.
        """
        replicas = self._replicas(entry_id)
        entry, results = await ask(
            replicas,
            partial(self._read_fencing, entry_id=entry_id),
            first_value,
            clock=self._clock,
            linger_s=LATE_REPLY_WAIT_S,
        )
        if entry is None:
            return b"" if entry_id < max(self._shown.values(), default=LAC_NONE) else None
        saved = entry

        async def add(bookie: BookieId) -> None:
            if bookie in self._unregistered:
                unable.add(bookie)
            elif bookie not in unable:
                try:
                    await self._add_again(bookie, saved)
                except BookmenderError:
                    unable.add(bookie)

        lacking = [b for b in replicas if b not in results or results[b].value is None]
        takers = [
            bookie
            for bookie in lacking
            if bookie not in withheld or entry_id != first_entry_of(self._metadata, bookie)
        ]
        await asyncio.gather(*map(add, takers))
        return entry


def latecomers(metadata: LedgerMetadata, reformatted: Collection[BookieId]) -> frozenset[BookieId]:
    """Return the ``reformatted`` bookies that joined by an ensemble change. One that still stores
    its ``first_entry_of`` the last segment was not wiped since then."""
    return frozenset(reformatted).difference(metadata.segments[0].ensemble)


def first_entry_of(metadata: LedgerMetadata, bookie: BookieId) -> int:
    """Return the first entry of the last segment that this member should store."""
    last = metadata.last_segment
    return first_of(
        last.ensemble.index(bookie),
        last.first_entry_id,
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
    )

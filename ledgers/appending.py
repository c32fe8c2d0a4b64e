"""Adds entries to their write sets, and replaces bookies that fail. Used by writers and recovery.

``QuorumAppender`` sends entries and confirms them in order. Its user decides how an ensemble change
is recorded (``OnChange``): a writer writes it to the metadata at once, recovery keeps it in memory
until the ledger is closed. EFENCED means to a writer that another client recovers the ledger. To
recovery it means only that this bookie deleted its copy once and accepts no more entries of the
ledger.

``CurrentEnsemble`` knows which bookies failed and chooses replacements from a ``BookiePool``.

``AckWindow`` counts acknowledgements: an entry is confirmed when A bookie indexes of its write set
have acknowledged it, and all lower entries are confirmed. It counts indexes, not bookies, for this
reason:

1. Bookie X at index 1 acknowledges entry 7, which is not confirmed yet.
2. X fails. Bookie Y replaces it at index 1, from entry 7 on.
3. The metadata names Y for entry 7. The copy on X is not found by readers, so its acknowledgement
   is withdrawn, and entry 7 is sent to Y.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    FencedError,
    NotEnoughBookiesError,
    RejectedError,
    UnavailableError,
)
from ledgers.model import BookieId, LedgerMetadata, Segment, covers, write_set
from ledgers.placement import Candidate, PlacementPolicy
from ledgers.tasks import TaskScope, task_scope

FAILED_BOOKIE_REST_S = 60.0
"""A bookie that failed is not chosen again for the ledger for this long."""

WritableBookies = Callable[[], Awaitable[Collection[Candidate]]]
"""Returns the bookies that may be chosen now: writable, not draining, not in maintenance."""
ENTRIES_MAX = 512
BYTES_MAX = 8 * 1024 * 1024
"""Limits on unconfirmed entries and their bytes. A single entry passes, however large it is."""

OnChange = Callable[[Segment], Awaitable[None]]
"""Records the new ensemble, which applies from the first entry of this segment on."""


class QuorumAppender:
    """Adds packed entries, in order, to the last segment of a ledger. Its tasks live in ``scope``.

    Nothing is confirmed while a bookie is being replaced. Otherwise:

    1. The new segment is written to the metadata, from entry 8 on, because 7 is confirmed.
    2. Meanwhile the old ensemble acknowledges entry 8, and the user is told so.
    3. The metadata then names the new ensemble for entry 8, in which too few bookies store it.

    If there is no replacement, entries may have only A copies. With fewer, appending fails.
    """

    def __init__(
        self,
        metadata: LedgerMetadata,
        *,
        bookies: Bookies,
        pool: BookiePool,
        clock: Clock,
        scope: TaskScope,
        master_key: bytes,
        confirmed: int,
        is_recovery: bool,
        on_change: OnChange,
        unregistered: Collection[BookieId] = (),
    ) -> None:
        """``unregistered``: bookies that receive nothing: another may answer at their address."""
        self._bookies, self._clock, self._scope = bookies, clock, scope
        self._master_key, self._is_recovery = master_key, is_recovery
        self._on_change = on_change
        self._unregistered = frozenset(unregistered)
        self._ensemble = CurrentEnsemble(metadata, pool=pool, clock=clock)
        self._acks = AckWindow(
            confirmed=confirmed,
            ensemble_size=metadata.ensemble_size,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
        )
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._flying_count = 0
        self._is_changing = False
        self._error: BookmenderError | None = None
        self._progress = asyncio.Event()

    @property
    def confirmed(self) -> int:
        """The last entry that, with all before it, is stored on A bookies; -1 if there is none."""
        return self._acks.confirmed

    async def wait_for_room(self, entry_bytes: int) -> None:
        """Wait for room for an entry of this size. Raises the error that ended appending."""
        while self._pending and (
            len(self._pending) >= ENTRIES_MAX or self._pending_bytes + entry_bytes > BYTES_MAX
        ):
            await self._progress.wait()
        self._raise_if_ended()

    async def do_without(self, failed: Mapping[BookieId, BookmenderError]) -> None:
        """Replace these bookies before anything is added. Raises NotEnoughBookiesError."""
        for index, bookie in enumerate(self._ensemble.bookies):
            if bookie in failed:
                self._ensemble.note_failure(index, bookie, failed[bookie])
        if self._ensemble.failed:
            await self._replace_failed()

    def add(self, entry_id: int, entry: bytes) -> asyncio.Future[int]:
        """Send the next entry. The future is done when the entry is confirmed."""
        self._raise_if_ended()
        pending = self._pending[entry_id] = _Pending(entry=entry)
        self._pending_bytes += len(entry)
        for index in self._acks.begin(entry_id):
            self._send(entry_id, index)
        self._look_after()
        return pending.confirmed

    async def settle(self, within_s: float) -> None:
        """Wait at most ``within_s`` for the acknowledgements beyond the ack quorum."""

        async def wait_idle() -> None:
            while self._flying_count:
                await self._progress.wait()

        async with task_scope() as scope:
            waits = (scope.start(self._clock.sleep(within_s)), scope.start(wait_idle()))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def fail(self, error: BookmenderError) -> None:
        """Stop: all unconfirmed adds, and all later calls, fail with this error."""
        if self._error is not None:
            return
        self._error = error
        for pending in self._pending.values():
            if not pending.confirmed.done():
                pending.confirmed.set_exception(error)
                # Marked as retrieved, because a caller may await only the last of many adds.
                pending.confirmed.exception()
        self._pending.clear()
        self._notify()

    # --- Sending ----------------------------------------------------------------------------------

    def _send(self, entry_id: int, index: int) -> None:
        if index not in self._ensemble.dead:
            self._flying_count += 1
            bookie, entry = self._ensemble.bookies[index], self._pending[entry_id].entry
            self._scope.start(self._fly(entry_id, entry, index=index, bookie=bookie))

    async def _fly(self, entry_id: int, entry: bytes, *, index: int, bookie: BookieId) -> None:
        try:
            if bookie in self._unregistered:
                raise UnavailableError("it is not registered", bookie=bookie)
            await self._bookies.add(
                bookie,
                entry,
                master_key=self._master_key,
                is_recovery=self._is_recovery,
                is_high_priority=self._is_recovery,
            )
        except BookmenderError as error:
            self._refused(index, bookie, error)
        else:
            if self._ensemble.bookies[index] == bookie:
                self._acks.acknowledge(entry_id, index)
        # Not in a ``finally``: a cancelled task must not start further work.
        self._flying_count -= 1
        self._look_after()

    def _refused(self, index: int, bookie: BookieId, error: BookmenderError) -> None:
        """Record a failed bookie, or end appending if the error is not this bookie's own. Denied
        access is its own: our key was proven, but a bookie may have adopted another one."""
        is_of_ledger = isinstance(error, FencedError) and not self._is_recovery
        is_unsendable = type(error) is RejectedError  # the entry is too large for every bookie
        if is_of_ledger or is_unsendable:
            self.fail(error)
        else:
            self._ensemble.note_failure(index, bookie, error)

    # --- After each event -------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Confirm entries, unless bookies must be replaced first. Called after each event."""
        if self._error is None and not self._is_changing:
            if self._ensemble.failed and self._pending:
                self._is_changing = True
                self._scope.start(self._change_ensemble())
            else:
                for entry_id in self._acks.confirm():
                    pending = self._pending.pop(entry_id)
                    self._pending_bytes -= len(pending.entry)
                    if not pending.confirmed.done():  # else its caller was cancelled
                        pending.confirmed.set_result(entry_id)
        self._notify()

    async def _change_ensemble(self) -> None:
        try:
            while self._ensemble.failed and self._pending:
                await self._replace_failed()
        except BookmenderError as error:
            self.fail(error)
        self._is_changing = False
        self._look_after()

    async def _replace_failed(self) -> None:
        bookies, wanted = await self._ensemble.choose()
        self._raise_if_ended()
        replaced = [i for i in sorted(wanted) if bookies[i] != self._ensemble.bookies[i]]
        if replaced:
            segment = Segment(first_entry_id=self.confirmed + 1, ensemble=bookies)
            await self._on_change(segment)
            self._raise_if_ended()
        self._ensemble.install(bookies, wanted)
        if self._ensemble.is_broken:
            raise NotEnoughBookiesError(
                "no bookie is left to take over from those that failed",
                failures=self._ensemble.failures,
            )
        for index in replaced:
            for entry_id in self._acks.withdraw(index):
                self._send(entry_id, index)

    # --- Waiting ----------------------------------------------------------------------------------

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _notify(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


@dataclass(slots=True, kw_only=True)
class _Pending:
    entry: bytes
    confirmed: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class AckWindow:
    """The acknowledgements of unconfirmed entries. ``confirmed``: the last confirmed; -1: none."""

    def __init__(
        self, *, confirmed: int, ensemble_size: int, write_quorum: int, ack_quorum: int
    ) -> None:
        assert ack_quorum >= 1, ack_quorum  # else entries without a copy would be confirmed
        self.confirmed = confirmed
        self._ensemble_size, self._write_quorum = ensemble_size, write_quorum
        self._ack_quorum = ack_quorum
        self._acks: dict[int, set[int]] = {}

    def begin(self, entry_id: int) -> tuple[int, ...]:
        """Start to count acknowledgements of the next entry. Returns the indexes to send it to."""
        assert entry_id == self.confirmed + len(self._acks) + 1, (entry_id, self.confirmed)
        self._acks[entry_id] = set()
        return self._write_set(entry_id)

    def acknowledge(self, entry_id: int, index: int) -> None:
        """Count an acknowledgement. Ignored if the entry is confirmed already."""
        if entry_id in self._acks:
            self._acks[entry_id].add(index)

    def confirm(self) -> list[int]:
        """Confirm all entries that can be confirmed, in order. Returns their ids."""
        confirmed = []
        while len(self._acks.get(self.confirmed + 1, ())) >= self._ack_quorum:
            self.confirmed += 1
            del self._acks[self.confirmed]
            confirmed.append(self.confirmed)
        return confirmed

    def withdraw(self, index: int) -> list[int]:
        """Discard the acknowledgements of this index. Returns its unconfirmed entries."""
        striped = [entry_id for entry_id in self._acks if index in self._write_set(entry_id)]
        for entry_id in striped:
            self._acks[entry_id].discard(index)
        return striped

    def _write_set(self, entry_id: int) -> tuple[int, ...]:
        return write_set(
            entry_id, ensemble_size=self._ensemble_size, write_quorum=self._write_quorum
        )


class CurrentEnsemble:
    """The ensemble that a ledger is being written to, and its failures. A ``dead`` bookie has no
    replacement and receives nothing; one is looked for again at each further failure."""

    def __init__(self, metadata: LedgerMetadata, *, pool: BookiePool, clock: Clock) -> None:
        self.bookies = metadata.last_segment.ensemble
        self.dead: frozenset[int] = frozenset()
        self._metadata = metadata
        self._pool, self._clock = pool, clock
        self.failed: set[int] = set()
        """Indexes of bookies that failed and were neither replaced nor given up yet."""
        self._failures: dict[BookieId, tuple[float, BookmenderError]] = {}

    @property
    def is_broken(self) -> bool:
        """True if a write set has fewer than A bookies that are not dead."""
        size, write_quorum = self._metadata.ensemble_size, self._metadata.write_quorum
        return not covers(
            frozenset(range(size)) - self.dead,
            ensemble_size=size,
            write_quorum=write_quorum,
            # At most W - A of a write set may be dead.
            ack_quorum=write_quorum - self._metadata.ack_quorum + 1,
        )

    @property
    def failures(self) -> str:
        """The failed bookies and their errors, as text for an error message."""
        return "; ".join(f"{bookie}: {error}" for bookie, (_, error) in self._failures.items())

    def note_failure(self, index: int, bookie: BookieId, error: BookmenderError) -> None:
        """Record a failure, unless the bookie was replaced or given up there before."""
        if self.bookies[index] == bookie and index not in self.dead:
            self.failed.add(index)
            self._failures[bookie] = (self._clock.now_s(), error)

    async def choose(self) -> tuple[tuple[BookieId, ...], frozenset[int]]:
        """Return an ensemble, with new bookies as far as possible, and the indexes to replace."""
        candidates = await self._pool.writable()
        wanted = self.dead.union(self.failed)
        since_s = self._clock.now_s() - FAILED_BOOKIE_REST_S
        resting = [b for b, (failed_at_s, _) in self._failures.items() if failed_at_s >= since_s]
        excluded = frozenset(self.bookies).union(resting)
        chosen = list(self.bookies)
        for index in sorted(wanted):
            try:
                chosen[index] = self._pool.placement.choose_replacement(
                    candidates,
                    ensemble=chosen,
                    index=index,
                    write_quorum=self._metadata.write_quorum,
                    ack_quorum=self._metadata.ack_quorum,
                    excluded=excluded,
                )
            except NotEnoughBookiesError:
                continue
        return tuple(chosen), wanted

    def install(self, bookies: tuple[BookieId, ...], wanted: frozenset[int]) -> None:
        """Make the result of ``choose`` current. Indexes without a new bookie are dead. Bookies
        that failed since ``choose`` still count as failed."""
        self.dead = frozenset(i for i in wanted if bookies[i] == self.bookies[i])
        self.bookies = bookies
        self.failed -= wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class BookiePool:
    """The bookies from which new members are chosen, and the policy of the choice."""

    writable: WritableBookies
    placement: PlacementPolicy


def with_ensemble(metadata: LedgerMetadata, segment: Segment) -> LedgerMetadata:
    """Return the metadata with this ensemble as the current one, from its first entry on."""
    last = metadata.last_segment
    if segment.first_entry_id == last.first_entry_id:
        segment = replace(last, ensemble=segment.ensemble)  # keep its other fields
    return metadata.with_segment(segment)


async def can_go_on_without(
    metadata: LedgerMetadata, failed: Collection[BookieId], *, pool: BookiePool, clock: Clock
) -> bool:
    """Return True if entries can be added to the last segment without these bookies. Either
    replacements exist, or every write set keeps an ack quorum."""
    ensemble = CurrentEnsemble(metadata, pool=pool, clock=clock)
    for index, bookie in enumerate(ensemble.bookies):
        if bookie in failed:
            ensemble.note_failure(index, bookie, UnavailableError("no answer"))
    ensemble.install(*await ensemble.choose())
    return not ensemble.is_broken

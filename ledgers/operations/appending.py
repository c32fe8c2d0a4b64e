"""Adding entries to their write sets, with replacements for the bookies that fail.

What a writer and a recovery have in common. They differ in how a change of the ensemble is put on
record (``OnChange``: at once in the metadata, or in memory until the ledger is closed) and in what
EFENCED means: to a writer that somebody recovers the ledger, to a recovery only that this bookie
once deleted its copy and takes no more of it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    FencedError,
    NotEnoughBookiesError,
    ReadOnlyError,
    RejectedError,
    UnavailableError,
)
from ledgers.metadata import BookieId, LedgerMetadata, Segment
from ledgers.operations.acks import AckWindow
from ledgers.operations.ensembles import BookiePool, CurrentEnsemble
from ledgers.operations.tasks import TaskScope, task_scope

ENTRIES_MAX = 512
BYTES_MAX = 8 * 1024 * 1024
"""At most so many unconfirmed entries, and bytes of them; but always one entry, however large."""

OnChange = Callable[[Segment], Awaitable[None]]
"""Puts on record that from this segment's first entry on its ensemble is the current one."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    entry: bytes
    confirmed: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class QuorumAppender:
    """Adds packed entries, in order, to the last segment of a ledger. Its tasks live in ``scope``.

    While bookies are being replaced nothing is confirmed, so that the first entry of the new
    segment, the one after the last confirmed, stands still. Where there is no replacement, copies
    beyond the A that an acknowledgement needs may be lacking; without A it fails.
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
        """``unregistered``: bookies that nothing is sent to, because another bookie may acknowledge
        it in their place."""
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
        """The last entry that is on A bookies together with all before it; -1 if none."""
        return self._acks.confirmed

    async def wait_for_room(self, entry_bytes: int) -> None:
        """Return when one more entry of this size may be added. Raises what ended the appending."""
        while self._pending and not self._has_room(entry_bytes):
            await self._progress.wait()
        self._raise_if_ended()

    async def do_without(self, failed: Mapping[BookieId, BookmenderError]) -> None:
        """Have others take over from these before anything is added. Raises
        NotEnoughBookiesError."""
        for index, bookie in enumerate(self._ensemble.bookies):
            if bookie in failed:
                self._ensemble.note_failure(index, bookie, failed[bookie])
        if self._ensemble.has_failures:
            await self._replace_failed()

    def add(self, entry_id: int, entry: bytes) -> asyncio.Future[int]:
        """Send the entry, which has to be the next one; done when it is confirmed."""
        self._raise_if_ended()
        pending = self._pending[entry_id] = _Pending(entry=entry)
        self._pending_bytes += len(entry)
        for index in self._acks.begin(entry_id):
            self._send(entry_id, index)
        self._look_after()
        return pending.confirmed

    async def settle(self, within_s: float) -> None:
        """Wait a while for the acknowledgements beyond the A that confirmed the entries."""
        async with task_scope() as scope:
            waits = (scope.start(self._clock.sleep(within_s)), scope.start(self._wait_idle()))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def fail(self, error: BookmenderError) -> None:
        """End it: every unconfirmed add fails with this error, and so does what comes later."""
        if self._error is not None:
            return
        self._error = error
        for pending in self._pending.values():
            if not pending.confirmed.done():
                pending.confirmed.set_exception(error)
                # Taken as seen: who awaits no more than the last of many adds learns it there.
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
        # Not in a finally: a cancelled flight must not set anything going any more.
        self._flying_count -= 1
        self._look_after()

    def _refused(self, index: int, bookie: BookieId, error: BookmenderError) -> None:
        """A failed bookie is replaced; what every bookie would refuse alike ends the appending."""
        is_this_bookies = isinstance(error, ReadOnlyError) or (
            isinstance(error, FencedError) and self._is_recovery
        )
        if isinstance(error, RejectedError) and not is_this_bookies:
            self.fail(error)
        else:
            self._ensemble.note_failure(index, bookie, error)

    # --- After each event -------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Confirm what can be, unless bookies have to be replaced first."""
        if self._error is None and not self._is_changing:
            if self._ensemble.has_failures and self._pending:
                self._is_changing = True
                self._scope.start(self._change_ensemble())
            else:
                for entry_id in self._acks.confirm():
                    self._confirmed(entry_id)
        self._notify()

    def _confirmed(self, entry_id: int) -> None:
        pending = self._pending.pop(entry_id)
        self._pending_bytes -= len(pending.entry)
        if not pending.confirmed.done():  # its caller may have gone away
            pending.confirmed.set_result(entry_id)

    async def _change_ensemble(self) -> None:
        try:
            while self._ensemble.has_failures and self._pending:
                await self._replace_failed()
        except BookmenderError as error:
            self.fail(error)
        self._is_changing = False
        self._look_after()

    async def _replace_failed(self) -> None:
        change = await self._ensemble.choose()
        self._raise_if_ended()
        if change.replaced:
            segment = Segment(first_entry_id=self.confirmed + 1, ensemble=change.bookies)
            await self._on_change(segment)
            self._raise_if_ended()
        self._ensemble.install(change)
        if self._ensemble.is_broken:
            raise NotEnoughBookiesError(
                "no bookie is left to take over from those that failed",
                failures=self._ensemble.failures,
            )
        for index in sorted(change.replaced):
            for entry_id in self._acks.withdraw(index):
                self._send(entry_id, index)

    # --- Waiting ----------------------------------------------------------------------------------

    def _has_room(self, entry_bytes: int) -> bool:
        return len(self._pending) < ENTRIES_MAX and self._pending_bytes + entry_bytes <= BYTES_MAX

    async def _wait_idle(self) -> None:
        while self._flying_count:
            await self._progress.wait()

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _notify(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

"""Copies whose LAC is rewritten on the way, entry by entry (rule S12).

For a target that stands in the last ensemble of a ledger which is not closed. A reader asks the
bookies of that ensemble for their last entry and takes the LAC in its header for what the writer
had confirmed. An entry of an earlier fragment carries an old LAC. So the header gets one that is
known now, and the digest is computed again, as BookKeeper's LedgerFragmentReplicator does. That
happens only where no other bookie is left, so these copies go one request at a time instead of in
bulk.
"""

import asyncio
from collections import defaultdict

from ledgers.bookies import Answer, Bookies, Transfer, TransferResult
from ledgers.entry import EntryDigest, EntryHeader
from ledgers.errors import BookmenderError, UnreadableError
from ledgers.metadata import LAC_NONE, BookieId, LedgerMetadata
from ledgers.operations.asking import Result

AT_ONCE = 64
"""Entries under way, each read and then written."""


def lac_to_tell(metadata: LedgerMetadata) -> int:
    """One less than the LAC that the last segment proves: its writer had all entries before that
    acknowledged.

    A recovery by Java takes the ledger's length from the header with the greatest LAC, and the
    length in a copy's header is that of an earlier entry. So a recovery always has to read one
    acknowledged entry more, and takes that one's.
    """
    return max(LAC_NONE, metadata.last_segment.first_entry_id - 2)


def with_lac(entry: bytes, lac: int, digest: EntryDigest) -> bytes:
    """Return the same entry with this LAC in its header. Ids, length and payload stay."""
    header = EntryHeader.of(entry)
    return digest.pack(
        ledger_id=header.ledger_id,
        entry_id=header.entry_id,
        lac=lac,
        length=header.length,
        payload=digest.payload(entry),
    )


async def transfer_with_lac(bookies: Bookies, transfer: Transfer, lac: int) -> TransferResult:
    """As ``Bookies.transfer`` to a target, with the LAC of each entry rewritten. ``checks`` are
    read too."""
    copying = _Copying(bookies, transfer, lac)
    await copying.run()
    return copying.result


class _Copying:
    def __init__(self, bookies: Bookies, transfer: Transfer, lac: int) -> None:
        assert transfer.target is not None, transfer.ledger_id
        self._bookies, self._transfer, self._lac = bookies, transfer, lac
        self._target = transfer.target
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._failures: dict[BookieId, dict[int, Answer]] = defaultdict(dict)
        self._unwritten: set[int] = set()
        self._target_error: BookmenderError | None = None
        self._entry_count = self._entry_bytes = 0

    @property
    def result(self) -> TransferResult:
        return TransferResult(
            entry_count=self._entry_count,
            entry_bytes=self._entry_bytes,
            failures=self._failures,
            unwritten=frozenset(self._unwritten),
            target_error=self._target_error,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for asked, is_written in ((self._transfer.reads, True), (self._transfer.checks, False)):
                for source, entry_ids in asked.items():
                    for entry_id in entry_ids:
                        await self._slots.acquire()
                        tasks.create_task(self._copy(source, entry_id, is_written=is_written))

    async def _copy(self, source: BookieId, entry_id: int, *, is_written: bool) -> None:
        try:
            if self._target_error is not None:
                self._unwritten.add(entry_id)
                return
            entry = await self._read(source, entry_id)
            if entry is not None and is_written:
                await self._write(entry_id, entry)
        finally:
            self._slots.release()

    async def _read(self, source: BookieId, entry_id: int) -> bytes | None:
        """None, and what the source said instead, where it gives no good copy."""
        ledger_id = self._transfer.ledger_id
        try:
            entry = await self._bookies.read(source, ledger_id, entry_id)
            self._transfer.digest.check(entry, ledger_id=ledger_id, entry_id=entry_id)
        except UnreadableError:
            self._failures[source][entry_id] = Answer.UNREADABLE
            return None
        except BookmenderError as error:
            self._failures[source][entry_id] = Result[bytes](error=error).answer
            return None
        return entry

    async def _write(self, entry_id: int, entry: bytes) -> None:
        digest = self._transfer.digest
        try:
            await self._bookies.add(
                self._target,
                with_lac(entry, self._lac, digest),
                master_key=digest.master_key,
                is_recovery=True,
            )
        except BookmenderError as error:
            self._target_error = self._target_error or error
            self._unwritten.add(entry_id)
        else:
            self._entry_count += 1
            self._entry_bytes += len(entry)

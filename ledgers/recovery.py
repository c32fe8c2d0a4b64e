"""Ledger recovery: fence an open ledger whose writer is gone, find its end, close it.

The closed ledger must contain every entry that was acknowledged to the writer. This holds even if
bookies are down, slow or wrong, or if another recovery or the writer is still active. The steps:

1. Mark the ledger IN_RECOVERY by compare-and-set. Then the writer cannot change the ensemble.
2. Fence every bookie of the last ensemble. Its answers count only after that. Every read that
   searches for the end also fences, so a bookie that answered "no" can no longer acknowledge the
   entry to the writer.
3. Read on from the LAC. Only an explicit "no" counts (``recovery_verdict``, rule S5). W - A + 1 of
   them are the end. With fewer, recovery fails, and the ledger stays IN_RECOVERY.
4. Add each entry that was found again until A bookies store it.
5. Write CLOSED by compare-and-set. A slower recovery adopts the result of the faster one.

Earlier segments are complete and never change, so recovery does not read them.

A ledger with an ack quorum below 1 is not recovered: its end cannot be proven, not even if all
bookies answer. Java's writer may acknowledge an entry that no bookie of the last ensemble stores:

1. Bookie X acknowledges entry 7, which is then complete. Its callback waits, because X fails.
2. Y replaces X, and the acknowledgement of X is withdrawn. But no acknowledgements suffice for an
   ack quorum of 0, so entry 7 stays complete (PendingAddOp.unsetSuccessAndSendWriteRequest).
3. The writer tells its user that entry 7 is stored, and dies before Y or another bookie stores it.

Java 4.18.0 cannot recover such ledgers either, its clients and AutoRecovery alike: no answers cover
an ack quorum of 0. It marks the ledger IN_RECOVERY first, which locks out a running writer. Here
nothing is fenced, so a running writer can still close the ledger.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence

from ledgers.appending import BookiePool, with_ensemble
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.digest import EntryDigest
from ledgers.errors import ConflictError, UnavailableError, UnknownOutcomeError, UnprovenEndError
from ledgers.fencing import EndFinder
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerState
from ledgers.quorum import RecoveredEnd
from ledgers.reading import ledger_digest
from ledgers.store import Operation

NO_ACK_QUORUM = (
    "its end cannot be proven: its ack quorum is below 1, so an entry may be acknowledged that no "
    "bookie stores"
)
METADATA_TRIES_MAX = 10
"""Attempts at one compare-and-set. If the metadata keeps changing, recovery fails for now."""


Confirm = Callable[[RecoveredEnd], Awaitable[None]]
"""Called after the end is found and before CLOSED is written. Raises UnavailableError if an answer
that the end is based on may be wrong. It defends against this interleaving:

1. The caller determines which bookies are ``reformatted`` and which are ``registered``.
2. A bookie is wiped, or another bookie registers at its address.
3. Recovery asks there and gets "no such entry" for acknowledged entries.
4. Recovery would close the ledger before these entries.
"""


Beside = Callable[[], Awaitable[Sequence[Operation]]]
"""Called before each attempt to write CLOSED. Returns operations for the same transaction."""


async def nothing_beside() -> Sequence[Operation]:
    """The ``Beside`` of a recovery that writes only metadata."""
    return ()


async def recover_ledger(
    found: VersionedMetadata,
    *,
    manager: LedgerManager,
    bookies: Bookies,
    pool: BookiePool,
    clock: Clock,
    fallback: EntryDigest | None = None,
    reformatted: Collection[BookieId] = (),
    distrusted: Collection[BookieId] = (),
    registered: Collection[BookieId] | None = None,
    gives_up_damaged: bool = False,
    confirm: Confirm | None = None,
    guards: Sequence[Operation] = (),
    beside: Beside = nothing_beside,
    on_marked: Callable[[VersionedMetadata], None] = lambda marked: None,
) -> VersionedMetadata:
    """Recover and close the ledger. Returns its CLOSED metadata, also if another recovery wrote it.

    May be interrupted at any point, and may run several times at once.

    ``found``: the metadata from which the caller decided to recover. If the ledger is OPEN, the
    compare-and-set that locks the writer out applies to this version (rule S2). ``fallback``: see
    ``ledger_digest``. ``distrusted``: bookies that are known to have lost entries. Their "no"
    proves nothing. ``reformatted``: bookies that were reformatted after the ledger was created.
    Their "no" proves nothing either, unless they prove that they lost nothing. ``registered``:
    registered bookies, each the latest one at its address (None: all). At the address of any other
    bookie another one may answer. So its "no" proves nothing, it does not count as fenced, and it
    receives no entries. An entry that it returns counts, because the digest proves it.
    ``gives_up_damaged``: the ledger may end before an entry that has only damaged copies, although
    the entry may be acknowledged. Only an operator may order this. ``guards``: operations in the
    transaction of each metadata write. ``on_marked``: called when an OPEN ledger has become
    IN_RECOVERY, so that its writer is locked out.

    Raises UnavailableError (too few bookies answer; the ledger stays IN_RECOVERY), UnprovenEndError
    (also for an ack quorum below 1; then nothing is fenced), NoSuchLedgerError (it was deleted),
    UnauthorizedError (the master key seems to be wrong), LockLostError (a guard failed),
    ConflictError (the metadata changed since ``found``: decide again).
    """
    if found.metadata.ack_quorum < 1 and not found.metadata.is_closed:
        raise UnprovenEndError(
            NO_ACK_QUORUM,
            has_unresponsive=False,
            ledger_id=found.ledger_id,
            ack_quorum=found.metadata.ack_quorum,
        )
    versioned = await _mark(found, manager, guards)
    if versioned.metadata.is_closed:
        return versioned
    if found.metadata.state is LedgerState.OPEN:
        on_marked(versioned)
    ledger_id = versioned.ledger_id
    finder = EndFinder(
        ledger_id,
        versioned.metadata,
        digest=ledger_digest(versioned.metadata, fallback),
        bookies=bookies,
        pool=pool,
        clock=clock,
        reformatted=reformatted,
        distrusted=distrusted,
        registered=registered,
        gives_up_damaged=gives_up_damaged,
    )
    end = await finder.find_end()
    if confirm is not None:
        await confirm(end)
    return await _close(versioned, end, manager, guards, beside)


async def _mark(
    found: VersionedMetadata, manager: LedgerManager, guards: Sequence[Operation]
) -> VersionedMetadata:
    """Change the state from OPEN to IN_RECOVERY, so that the writer can no longer change the
    ensemble.

    The decision to fence is based on ``found``: its last fragment misses a bookie, or the writer
    seems to be dead. It must not apply to a later version. Otherwise:

    1. We read version 5, which names a lost bookie.
    2. We ask that bookie directly, which takes seconds.
    3. The writer replaces the bookie and writes version 6, which is healthy.
    4. Marking version 6 IN_RECOVERY would lock out a live writer.

    A compare-and-set on version 5 fails in step 4 and raises ConflictError.
    """
    versioned = found
    if found.metadata.state is not LedgerState.OPEN:
        return found
    marked = found.metadata.with_state(LedgerState.IN_RECOVERY)
    for _ in range(METADATA_TRIES_MAX):
        try:
            return await manager.write(found.ledger_id, marked, read_as=found, guards=guards)
        except UnknownOutcomeError:
            versioned = await manager.read(found.ledger_id)
        if versioned.version == found.version:
            continue  # the request was lost
        if versioned.version == found.version + 1 and versioned.metadata == marked:
            # Written by us, or by another recovery that decided from the same version. Both lock
            # the writer out, and two recoveries may run at once.
            return versioned
        raise ConflictError(
            "the metadata changed while its mark was written", ledger_id=found.ledger_id
        )
    raise UnavailableError("the metadata kept changing", ledger_id=found.ledger_id)


async def _close(
    versioned: VersionedMetadata,
    end: RecoveredEnd,
    manager: LedgerManager,
    guards: Sequence[Operation],
    beside: Beside,
) -> VersionedMetadata:
    """Write CLOSED, or adopt the CLOSED metadata of a faster recovery. Earlier segments may be
    repaired meanwhile; the last must not change, because the end is based on it."""
    ledger_id, last_segment = versioned.ledger_id, versioned.metadata.last_segment
    for _ in range(METADATA_TRIES_MAX):
        metadata = versioned.metadata
        if metadata.is_closed:
            return versioned
        if metadata.state is LedgerState.OPEN or metadata.last_segment != last_segment:
            raise ConflictError("the ensemble changed under a recovery", ledger_id=ledger_id)
        for segment in end.segments:
            metadata = with_ensemble(metadata, segment)
        try:
            return await manager.write(
                ledger_id,
                metadata.closed(last_entry_id=end.last_entry_id, length=end.length),
                read_as=versioned,
                guards=guards,
                beside=await beside(),
            )
        except (ConflictError, UnknownOutcomeError):
            versioned = await manager.read(ledger_id)
    raise UnavailableError("the metadata kept changing", ledger_id=ledger_id)

"""Open with recovery: fence an abandoned ledger, find its end, close it.

The end must hold every entry that the writer was ever told is stored, whatever bookies are down,
slow or wrong, and whoever else recovers or still writes. What that rests on:

- The ledger is marked IN_RECOVERY first, by compare-and-set, so that the ensemble cannot change.
- Every bookie of the last ensemble is fenced before its word counts, and every read that looks for
  the end fences too: a bookie that said "no" to us can acknowledge nothing to the writer any more.
- Only an explicit no is a no (``recovery_verdict``, rule S5). Without W - A + 1 of them there is no
  end: recovery fails, and the ledger stays IN_RECOVERY for the next attempt.
- Nothing before the last segment is looked at: it is complete, and never changes.
- What was found is added again until A bookies have it. CLOSED is written by compare-and-set; who
  comes second adopts what the first wrote.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.entry import EntryDigest
from ledgers.errors import ConflictError, UnavailableError, UnknownOutcomeError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.metadata import BookieId, LedgerMetadata, LedgerState
from ledgers.operations.ensembles import BookiePool, with_ensemble
from ledgers.operations.fencing import EndFinder
from ledgers.operations.opening import ledger_digest
from ledgers.operations.recovery_verdicts import RecoveredEnd
from ledgers.store import Operation

METADATA_TRIES_MAX = 10
"""Compare-and-sets of one step, before a ledger whose metadata never rests is given up for now."""


Confirm = Callable[[RecoveredEnd], Awaitable[None]]
"""Called once the end is found, right before CLOSED is written. Raises UnavailableError where an answer that the end
rests on may not stand: its bookie may have lost entries since ``young`` was determined, or another bookie may have
answered in its place since ``registered`` was."""


async def nothing_to_confirm(end: RecoveredEnd) -> None:
    """The ``Confirm`` of callers that believe every "no"."""


Beside = Callable[[], Awaitable[Sequence[Operation]]]
"""Called before each try to write CLOSED: what is to be applied in the same transaction."""


async def nothing_beside() -> Sequence[Operation]:
    """For a recovery that writes the metadata alone."""
    return ()


async def recover_ledger(
    found: VersionedMetadata,
    *,
    manager: LedgerManager,
    bookies: Bookies,
    pool: BookiePool,
    clock: Clock,
    fallback: EntryDigest | None = None,
    young: Collection[BookieId] = (),
    distrusted: Collection[BookieId] = (),
    registered: Collection[BookieId] | None = None,
    gives_up_damaged: bool = False,
    confirm: Confirm = nothing_to_confirm,
    guards: Sequence[Operation] = (),
    beside: Beside = nothing_beside,
) -> VersionedMetadata:
    """Recover and close the ledger; its CLOSED metadata, whoever wrote it.

    ``found``: the metadata from which the caller decided to recover the ledger. If the ledger is OPEN,
    its writer is locked out by a compare-and-set on this very version (rule S2). ``fallback``: see ``ledger_digest``. ``distrusted``: bookies whose "no" proves nothing, as they are
    known to have lost entries. ``young``: set up after the ledger was made, and perhaps wiped (another
    cookie): likewise, unless they show that they lost nothing. ``registered``: the bookies that are registered, each the last
    that registered at its address (None: all bookies). Another bookie may answer in the place of any other one: so its
    "no" proves nothing, it does not count as fenced, and no entry is sent to it. An entry that it gives counts, as
    the digest proves it. ``gives_up_damaged``: the ledger may end before an entry that has damaged copies alone, though
    it may have been acknowledged: only an operator may say so. ``confirm``: see there. ``guards`` ride with each metadata write.

    Raises UnavailableError when too few bookies answer: the ledger stays IN_RECOVERY, try again
    later. NoSuchLedgerError: it was deleted. UnauthorizedError: our key is not the bookies'.
    LockLostError: a guard does not hold. ConflictError: the metadata changed since ``found``, so the
    decision is to be made again; or it changed in a way that no writer and no recovery makes. May be
    cut short anywhere, and run by several at once.
    """
    versioned = await _mark(found, manager, guards)
    if versioned.metadata.is_closed:
        return versioned
    ledger_id = versioned.ledger_id
    finder = EndFinder(
        ledger_id,
        versioned.metadata,
        digest=ledger_digest(versioned.metadata, fallback),
        bookies=bookies,
        pool=pool,
        clock=clock,
        young=young,
        distrusted=distrusted,
        registered=registered,
        gives_up_damaged=gives_up_damaged,
    )
    end = await finder.find_end()
    await confirm(end)
    return await _close(versioned, end, manager, guards, beside)


def closed_at(metadata: LedgerMetadata, end: RecoveredEnd) -> LedgerMetadata:
    """The metadata with the changed ensembles, closed."""
    for segment in end.segments:
        metadata = with_ensemble(metadata, segment)
    return metadata.closed(last_entry_id=end.last_entry_id, length=end.length)


async def _mark(
    found: VersionedMetadata, manager: LedgerManager, guards: Sequence[Operation]
) -> VersionedMetadata:
    """Make sure that the ledger is no longer OPEN, so that no writer changes its ensemble.

    The decision to fence was made from ``found``: an open fragment misses a bookie, or its writer seems
    to be gone. It must not be carried out on a later version, in which the writer may have replaced the
    bookie. Interleaving: 1. we read v5, which names a lost bookie; 2. we ask that bookie, for seconds;
    3. the writer's ensemble change makes v6, which is healthy; 4. marking v6 IN_RECOVERY would lock out
    a writer that is alive. So a write on v5 fails at step 4, and ConflictError goes up.
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
            # Ours, or that of another recovery which decided from the same version: either locks the
            # writer out, and two recoveries may run at once.
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
    """Write CLOSED, or adopt it from who was faster: then their end, and their ensembles, hold.

    An earlier segment may be repaired meanwhile. The last one may not change, since all that
    recovery found rests on it.
    """
    ledger_id, last_segment = versioned.ledger_id, versioned.metadata.last_segment
    for _ in range(METADATA_TRIES_MAX):
        metadata = versioned.metadata
        if metadata.is_closed:
            return versioned
        if metadata.state is LedgerState.OPEN or metadata.last_segment != last_segment:
            raise ConflictError("the ensemble changed under a recovery", ledger_id=ledger_id)
        try:
            return await manager.write(
                ledger_id,
                closed_at(metadata, end),
                read_as=versioned,
                guards=guards,
                beside=await beside(),
            )
        except (ConflictError, UnknownOutcomeError):
            versioned = await manager.read(ledger_id)
    raise UnavailableError("the metadata kept changing", ledger_id=ledger_id)

"""The marks of both queues, the one that Java shares and our own, as a command sees them."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from daemon.visit import Visit
from replication.cluster.own_state import own_path
from replication.queue.listing import MarkedLedger, marked_ledger_ids, read_locks, read_marks
from replication.waiting.notes import WaitingNote


async def listed(cluster: Visit) -> set[int]:
    """Ledgers in either queue."""
    store, ur = cluster.store, cluster.ur
    return {*await marked_ledger_ids(store, ur), *await marked_ledger_ids(store, own_path(ur))}


async def marks_of(cluster: Visit, ledger_ids: Collection[int]) -> list[MarkedLedger]:
    """Theirs, in either queue: two of a ledger that is in both."""
    ordered = sorted(ledger_ids)
    return [
        *await read_marks(cluster.store, cluster.ur, ordered),
        *await read_marks(cluster.store, own_path(cluster.ur), ordered),
    ]


async def marked_since(cluster: Visit, ledger_ids: Collection[int]) -> dict[int, int]:
    """When the mark of each was made (czxid), of those that are marked: of both as in
    ``QueuedLedger.czxid``."""
    czxids: dict[int, int] = {}
    for marked in await marks_of(cluster, ledger_ids):  # the shared ones first
        czxids.setdefault(marked.ledger_id, marked.czxid)
    return czxids


async def current_notes(cluster: Visit, notes: Sequence[WaitingNote]) -> list[WaitingNote]:
    """Without those of marks that are gone, which tell nothing of the ones that stand there now;
    and without the graces that nobody waits out any more: with the ledger's lock they go, and who
    takes it next waits anew."""
    czxids = await marked_since(cluster, [note.ledger_id for note in notes])
    current = [note for note in notes if not note.is_older_than(czxids.get(note.ledger_id, 0))]
    in_grace = [note.ledger_id for note in current if note.grace_until_ms]
    locks = {lock.ledger_id: lock for lock in await read_locks(cluster.store, cluster.ur, in_grace)}
    return [
        note
        if note.ledger_id in locks and not note.is_older_than(locks[note.ledger_id].czxid)
        else replace(note, grace_until_ms=0)
        for note in current
    ]


def shut_text(marked: MarkedLedger) -> str:
    """Of one that ACLs shut away: what that means, and who may open it, as ZooKeeper says."""
    return f"its mark cannot be read, so that no node takes it: {marked.refusal}"

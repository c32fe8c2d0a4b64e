"""Which of the ledgers that wait this node takes, and in what order: pure functions.

Each worker sees to its own share (``shares``). Others' ledgers it takes when its own are out, and
only those that their owner has left lying for a while: it may be busy, or stopped. So hardly two
workers reach for the same ledger, and none takes all of a short queue while its neighbours are
idle.
"""

import math
import random
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from ledgers.metadata import BookieId
from replication.queue.take import QueuedLedger
from replication.waiting.notes import WaitingNote

HELP_MAX = 25
"""Ledgers of other workers that one look takes at most: what goes into one transaction."""


class DueLedger(Struct, frozen=True, kw_only=True):
    """A marked ledger that is to be taken now, and why it waited so far, if it did.

    ``has_old_note``: there is one, of a mark that is gone. ``bad_sources``: as either kind of note
    has it; whoever unmarked the ledger need not have mended that.
    """

    queued: QueuedLedger
    note: WaitingNote | None
    has_old_note: bool = False
    bad_sources: frozenset[BookieId] = frozenset()

    @property
    def ledger_id(self) -> int:
        return self.queued.ledger_id


def own_to_read(
    own: Collection[int],
    urgent: Sequence[int],
    *,
    losses: Collection[int] = (),
    limit: int,
    rng: random.Random,
) -> list[int]:
    """Whose marks are worth reading: the urgent ones first, then losses, then any; at most
    ``limit``."""
    rest = set(own)
    chosen = [ledger_id for ledger_id in urgent if ledger_id in rest]
    rest.difference_update(chosen)
    lost = rest.intersection(losses)
    for each in (lost, rest - lost):
        count = max(0, min(limit - len(chosen), len(each)))
        chosen += rng.sample(sorted(each), count)
    return chosen[:limit]


def others_to_read(
    left_lying: Collection[int],
    urgent: Sequence[int],
    *,
    losses: Collection[int] = (),
    worker_count: int,
    room: int,
    rng: random.Random,
) -> list[int]:
    """Ledgers of other workers to help with: this worker's share of them, urgent ones first.

    ``room``: how many may be begun now besides our own. The others are left to the other helpers.
    """
    count = min(math.ceil(len(left_lying) / worker_count), room, HELP_MAX)
    return own_to_read(left_lying, urgent, losses=losses, limit=max(0, count), rng=rng)


def most_endangered_first(
    found: Sequence[DueLedger], urgent: Collection[int], *, is_own: Callable[[int], bool]
) -> list[DueLedger]:
    """Losses, what the leader calls urgent, most bookies missing; among equals our own, then the
    oldest."""
    ranks = {ledger_id: rank for rank, ledger_id in enumerate(urgent)}

    def urgency(due: DueLedger) -> tuple[bool, bool, int, bool, int, int]:
        ledger_id, queued = due.ledger_id, due.queued
        return (
            not queued.is_loss,
            ledger_id not in ranks,
            -len(queued.replicas),
            not is_own(ledger_id),
            ranks.get(ledger_id, 0),
            queued.since_ms,
        )

    return sorted(found, key=urgency)

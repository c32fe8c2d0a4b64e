"""What becomes of a repair: done, waiting for a reason, or to be taken anew."""

import enum

from msgspec import Struct

from ledgers.model import BookieId
from replication.open_ledgers import WriterSighting
from replication.reasons import Blocked, Reason


class OutcomeKind(enum.Enum):
    DONE = "done"
    """Whole, or gone: mark and lock are deleted."""
    WAITING = "waiting"
    """Something is in the way; the lock is still ours."""
    MARKED_AGAIN = "marked-again"
    """Its marks are others by now, as somebody found more missing, or a loss is over: give it back,
    to be taken anew. The lock is still ours."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of a repair.

    ``sighting``: given with the grace reasons, to come back with. ``retry_at_ms``: wall-clock, when
    what is in the way will be over; None where nobody knows. ``besides``: what else is in the way.
    ``suspects``: bookies whose copies turned out bad, so that the next try has to read them
    whole.
    """

    kind: OutcomeKind
    reason: Reason | None = None
    detail: str = ""
    sighting: WriterSighting | None = None
    retry_at_ms: int | None = None
    besides: frozenset[Reason] = frozenset()
    entry_count: int = 0
    entry_bytes: int = 0
    suspects: frozenset[BookieId] = frozenset()


DONE = Outcome(kind=OutcomeKind.DONE)
MARKED_AGAIN = Outcome(kind=OutcomeKind.MARKED_AGAIN)


def waiting(blocked: Blocked, sighting: WriterSighting | None = None) -> Outcome:
    return Outcome(
        kind=OutcomeKind.WAITING,
        reason=blocked.reason,
        detail=blocked.detail,
        sighting=sighting,
        retry_at_ms=blocked.until_ms,
        besides=blocked.besides,
    )

"""The result of one repair: done, waiting for a reason, or to be leased again."""

import enum

from msgspec import Struct

from replication.history import CausedBy
from replication.open_ledgers import WriterSighting
from replication.reasons import Blocked, Reason


class OutcomeKind(enum.Enum):
    DONE = "done"
    """The ledger is whole, or deleted. Its mark and its lock are deleted."""
    WAITING = "waiting"
    """The repair is blocked. The worker still holds the lock."""
    MARKED_AGAIN = "marked-again"
    """The mark changed during the repair: more copies are missing, or a loss is over. The worker
    still holds the lock, and must release it so that the ledger is leased again."""


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of one repair.

    ``blocked``: set if and only if the ledger is WAITING. ``sighting``: set during a grace; the
    next attempt needs it. ``caused_by``: for the history; None if the mark names no bookie.
    """

    kind: OutcomeKind
    blocked: Blocked | None = None
    sighting: WriterSighting | None = None
    entry_count: int = 0
    entry_bytes: int = 0
    caused_by: CausedBy | None = None

    @property
    def reason(self) -> Reason | None:
        return None if self.blocked is None else self.blocked.reason


DONE = Outcome(kind=OutcomeKind.DONE)
MARKED_AGAIN = Outcome(kind=OutcomeKind.MARKED_AGAIN)


def waiting(blocked: Blocked, sighting: WriterSighting | None = None) -> Outcome:
    """Return the outcome of a repair that is blocked."""
    return Outcome(kind=OutcomeKind.WAITING, blocked=blocked, sighting=sighting)

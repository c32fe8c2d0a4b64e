"""What a ledger that cannot be repaired waits for, boiled down so that it fits into its note.

A try that failed is worth repeating before its time when a bookie came or came back, or an order of
the operator's changed; that a bookie went seldom helps, but may be one more that is to be replaced.
Registrations tell the two apart by themselves: each new one has a greater czxid than all before it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Self

from ledgers.metadata import BookieId
from replication.cluster.cluster_view import ClusterView
from replication.cluster.own_state import text, whole
from replication.reasons import Reason

_ANY_CHANGE_HELPS = frozenset(
    {
        # Once a bookie that hangs counts as gone, the ledger is repaired without it.
        Reason.NO_ANSWER,
        Reason.RECOVERY_FAILED,
        Reason.CONFLICTS,
        # The rest of the ledger was repaired, and is to be again, whoever goes: these waits are
        # long.
        Reason.MAINTENANCE,
        Reason.NO_COPY,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Bookies and orders at one moment. The two fingerprints are eight hexadecimal digits each."""

    newest_czxid: int
    """Of the bookies' registrations; 0 without any."""
    bookies: str
    """Fingerprint of who is there, and in which life."""
    orders: str
    """Fingerprint of which bookies drain, or are under maintenance, and until when; of a hold; and
    of trusted cookies."""

    @classmethod
    def of(cls, view: ClusterView) -> Self:
        lives = {bookie: view.czxid(bookie) for bookie in view.available}
        draining = [(b, o.since_ms, o.may_fence) for b, o in view.orders.draining.items()]
        maintenance = [(b, w.until_ms) for b, w in view.orders.maintenance.items()]
        return cls(
            newest_czxid=max(lives.values(), default=0),
            bookies=_fingerprint(sorted(lives.items())),
            orders=_fingerprint(
                [sorted(draining), sorted(maintenance), *_hold(view), *_trust(view)]
            ),
        )

    def has_improved_since(self, then: "World", reason: Reason | None) -> bool:
        """Whether what failed then for that reason is worth a try before its time."""
        return (
            self.newest_czxid > then.newest_czxid
            or self.orders != then.orders
            or (reason in _ANY_CHANGE_HELPS and self.bookies != then.bookies)
        )

    def to_record(self) -> dict[str, Any]:
        return {
            "newest_czxid": self.newest_czxid,
            "bookies": self.bookies,
            "orders": self.orders,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            newest_czxid=whole(record, "newest_czxid"),
            bookies=text(record, "bookies"),
            orders=text(record, "orders"),
        )


def _hold(view: ClusterView) -> list[int]:
    """When the hold that stands began; without one nothing, as in the releases that knew of
    none."""
    hold = view.orders.hold
    return [] if hold is None or not view.orders.is_held else [hold.since_ms]


def _trust(view: ClusterView) -> list[tuple[BookieId, int]]:
    """The cookies that an order trusts: an end that could not be proven may be provable now.
    Without an order nothing."""
    return sorted(view.orders.trusted_cookies.items())


def _fingerprint(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]

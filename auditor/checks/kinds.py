"""Which periodic checks there are, for who runs them and for who asks about them."""

from collections.abc import Callable
from dataclasses import dataclass

from auditor.settings import ChecksSettings
from replication.queue.payloads import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckKind:
    """``name``: as people and our znodes call it. ``about``: what it does, for people."""

    name: str
    about: str
    audit: Audit | None = None
    """Whose znode keeps the time of the last run, as Java's auditor does; None: our record
    alone."""
    interval_of: Callable[[ChecksSettings], float]
    """Seconds from the end of a run to the beginning of the next. 0: only when somebody asks for
    it."""


ALL_LEDGERS = CheckKind(
    name="all-ledgers",
    about="reads entries of every copy of every ledger, and marks what lacks some",
    audit=Audit.ALL_LEDGERS,
    interval_of=lambda settings: settings.all_ledgers_interval_s,
)
REPLICAS = CheckKind(
    name="replicas",
    about="counts the copies of every entry of every closed ledger, and marks where some lack",
    audit=Audit.REPLICAS,
    interval_of=lambda settings: settings.replicas_interval_s,
)
PLACEMENT = CheckKind(
    name="placement",
    about="compares where copies are with the placement policy",
    audit=Audit.PLACEMENT_POLICY,
    interval_of=lambda settings: settings.placement_interval_s,
)
IDLE_OPEN = CheckKind(
    name="idle-open",
    about="looks for open ledgers that nobody writes any more",
    interval_of=lambda settings: settings.idle_open_after_s,
)
RECENT_COPIES = CheckKind(
    name="recent-copies",
    about="reads copies again that a repair made, once the bookies have flushed",
    interval_of=lambda settings: 0,
)
"""Looks at what repairs recorded instead of all ledgers, beside the others, and needs no asking."""
OVERDUE = "overdue"
"""Looks at marks instead of ledgers, beside the others, and needs no asking."""

KINDS = (ALL_LEDGERS, REPLICAS, PLACEMENT, IDLE_OPEN)

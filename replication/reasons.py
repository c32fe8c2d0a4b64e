"""Why a marked ledger is not being repaired now.

Where the bookies are that hold what is missing, and whose word does not count: for the sentence
that tells an operator what to do.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId
from replication.cluster import ClusterView


class Reason(enum.Enum):
    """Shown by commands, kept in notes of all nodes: never change a value."""

    OPEN_LEDGER_GRACE = "open-ledger-grace"
    OPEN_FRAGMENT = "open-fragment"
    WRITER_ALIVE = "writer-alive"
    NO_COPY = "no-copy"
    NO_TARGET = "no-target"
    MISPLACED = "misplaced"
    NO_ANSWER = "no-answer"
    RECOVERY_FAILED = "recovery-failed"
    NO_COVERAGE = "no-coverage"
    END_UNPROVEN = "end-unproven"
    RECOVERY_UNENDED = "recovery-unended"
    CORRUPT_METADATA = "corrupt-metadata"
    SHUT_AWAY = "shut-away"
    WRITE_REFUSED = "write-refused"
    DIGEST_SUSPECT = "digest-suspect"
    CONFLICTS = "conflicts"
    MAINTENANCE = "maintenance"
    HOLD = "hold"
    LEFT_TO_OTHERS = "left-to-others"
    JOURNAL = "journal-unwritable"

    @property
    def is_of_this_node(self) -> bool:
        """Whether another node may well succeed now: nothing about the ledger stands in the way."""
        return self in (Reason.LEFT_TO_OTHERS, Reason.JOURNAL)

    @property
    def is_a_grace(self) -> bool:
        """Whether the ledger is left to its writer."""
        return self in (Reason.OPEN_LEDGER_GRACE, Reason.WRITER_ALIVE)

    @property
    def is_of_recovery(self) -> bool:
        """Whether the ledger may have been recovered in vain: while its next grace goes on, that is
        what is to be known."""
        return self in _OF_RECOVERY

    @property
    def ends_with_a_bookie(self) -> bool:
        """Whether a bookie that comes (back) is all that helps: every node sees it at once, and
        tries again."""
        return self in (Reason.NO_COPY, Reason.NO_COVERAGE)

    @property
    def needs_help(self) -> bool:
        """Whether time alone will not help: a bookie must come (back), or a person."""
        return self in _NEEDS_HELP


_OF_RECOVERY = frozenset(
    {Reason.RECOVERY_FAILED, Reason.NO_COVERAGE, Reason.END_UNPROVEN, Reason.NO_TARGET}
)

_NEEDS_HELP = frozenset(
    {
        Reason.NO_COPY,
        Reason.NO_TARGET,
        Reason.MISPLACED,
        Reason.NO_COVERAGE,
        Reason.END_UNPROVEN,
        Reason.RECOVERY_UNENDED,
        Reason.CORRUPT_METADATA,
        Reason.SHUT_AWAY,
        Reason.WRITE_REFUSED,
        Reason.DIGEST_SUSPECT,
        Reason.JOURNAL,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """What stands in the way of a repair. ``detail`` is a sentence for an operator.

    ``until_ms``: wall-clock, when it will be over; None where nobody knows. ``besides``: reasons of
    others that it stands for.
    """

    reason: Reason
    detail: str
    until_ms: int | None = None
    besides: frozenset[Reason] = frozenset()


def gravest(blocked: Sequence[Blocked]) -> Blocked:
    """One for all of them, at least one: that entries have no copy comes first, as what helps the
    others may not help these; then what needs help, then what came first."""
    ordered = sorted(blocked, key=lambda each: gravity(each.reason))  # stable
    untils = [each.until_ms for each in ordered]
    return Blocked(
        reason=ordered[0].reason,
        detail="; ".join(dict.fromkeys(each.detail for each in ordered)),
        # Only if time is all that each of them waits for.
        until_ms=min((u for u in untils if u is not None), default=None)
        if None not in untils
        else None,
        besides=frozenset(each.reason for each in ordered) - {ordered[0].reason},
    )


def gravity(reason: Reason) -> int:
    """By which reasons are told, the least first."""
    return 0 if reason is Reason.NO_COPY else 1 if reason.needs_help else 2


def writer_hint(ledger_id: int) -> str:
    """What an operator can do about a ledger that is not closed, and waits for that."""
    return (
        f"its writer is to close it, or, if he is gone, bookmender ledger close {ledger_id} --yes (with --force, where "
        "nobody knows that he is)"
    )


def give_up_hint(ledger_id: int) -> str:
    """What an operator can do about an open ledger of which the last entries have damaged copies
    alone."""
    return (
        "where no bookie will ever give a good copy, bookmender ledger close "
        f"{ledger_id} --accept-loss --force shows which entries would be given up, and with --yes closes it before them"
    )


def close_hint(ledger_id: int, *, has_unresponsive: bool, wanted: Sequence[str] = ()) -> str:
    """What an operator can do about a ledger whose end cannot be proven. ``has_unresponsive``: of its
    bookies.

    ``wanted``: those that are, where they are so many that nothing is proven of any end, and so it
    is not closed whatever is accepted (rule S5).
    """
    if wanted:
        first = (
            f"first start {'enough of ' if len(wanted) > 1 else ''}{', '.join(wanted)} (empty, if what they had is "
            "gone): nothing closes it before; if its end cannot be proven then either, "
        )
    elif has_unresponsive:
        first = "start its other bookies, or, if they will never have more to say, "
    else:
        first = ""
    return (
        f"{first}bookmender ledger close {ledger_id} --accept-loss --yes closes it "
        "after the last entry that is there"
    )


IMPORT_HINT = (
    "every bookie was set up after the ledger: if ZooKeeper was imported, or bookie ids were changed, and no disk was "
    "wiped, bookmender bookie trust-identities says so"
)


def whereabouts(bookies: Collection[BookieId], view: ClusterView) -> str:
    """Which of them are away and may come back, and which are gone for good; empty if none is
    either.

    A bookie keeps its cookie while it is away. Decommissioned, or never there, it has none.
    """
    absent = sorted(set(bookies) - view.available)
    away = [bookie for bookie in absent if bookie in view.cookies]
    gone = [bookie for bookie in absent if bookie not in view.cookies]
    told = []
    if away:
        told.append(f"away, and wanted back: {', '.join(away)}")
    if gone:
        told.append(f"gone for good (without a cookie): {', '.join(gone)}")
    return "; ".join(told)


def not_believed(ledger: VersionedMetadata, view: ClusterView) -> str:
    """Members of the last ensemble that may have lost what they had with their disks; empty if none
    may."""
    young = view.initialised_after(ledger.stat.czxid)
    named = sorted(young.intersection(ledger.metadata.last_segment.ensemble))
    if not named:
        return ""
    told = f"; set up after the ledger was made, so its 'no' is not believed: {', '.join(named)}"
    return f"{told}; {IMPORT_HINT}" if view.are_all_younger_than(ledger.stat.czxid) else told

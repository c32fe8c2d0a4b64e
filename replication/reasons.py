"""Why a ledger is not repaired now: a reason and facts.

A decision that cannot go on returns ``Blocked``. It holds values only: bookies, entry ids, counts.
``daemon/messages.py`` turns them into text for people, and is the only place that names commands.
Workers store the same values in ZooKeeper (``ledger_record.WaitingNote``).

To add a reason for blocking a repair:

1. Add a member with a docstring to ``Reason``, and a row to ``_TRAITS``. If it needs help, name it
   in the causes of ``repairs_blocked`` in ``daemon/status/conditions.py``.
2. If no field of ``Facts`` fits, add one with a default, and its row in ``docs/json.md``.
3. Return ``Blocked(reason=..., facts=Facts(...))`` where the repair cannot go on. If it replaces
   ``NO_TARGET``, see ``Plan.untargeted`` in ``plan.py``, which lists what has no target.
4. Add its text to ``TEXTS`` in ``daemon/messages.py``, and new facts to ``_facts`` there. The text
   must also read well without any facts.
5. Add a row to the tables in ``tests/daemon/test_messages.py`` and ``test_status_conditions.py``.

A new ``Exclusion`` needs a text in ``EXCLUSIONS`` (``daemon/messages.py``).

A node of an older release rejects a note with a reason or exclusion that it does not know.
"""

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ledgers.model import BookieId
from replication.cluster import ClusterView

BOOKIES_MAX = 20
"""Bookies that one field of ``Facts`` names at most, so that a note stays small."""
SAME_REASON_MAX = 5
"""Maximum number of blocked parts of a ledger that are kept for the same reason."""


class Reason(enum.Enum):
    """Why a repair is blocked. The values are stored in ZooKeeper: never change one."""

    OPEN_LEDGER_GRACE = "open-ledger-grace"
    """The open last fragment misses a bookie. The writer has the open-ledger grace to react."""
    OPEN_FRAGMENT = "open-fragment"
    """A fragment is still open, so it cannot be copied. Its writer must close the ledger."""
    WRITER_ALIVE = "writer-alive"
    """During the grace the writer continued to write to a bookie that ZooKeeper does not show."""
    NO_COPY = "no-copy"
    """No registered bookie has a good copy of some entries."""
    NO_TARGET = "no-target"
    """No bookie may receive the copy."""
    MISPLACED = "misplaced"
    """All copies exist, but no bookie is left that would improve their placement."""
    NO_ANSWER = "no-answer"
    """A bookie did not answer."""
    RECOVERY_FAILED = "recovery-failed"
    """The open ledger could not be recovered. The next try may succeed."""
    END_DAMAGED = "end-damaged"
    """An entry at the end of the open ledger has damaged copies only, and may be acknowledged."""
    NO_COVERAGE = "no-coverage"
    """Too few bookies of the last ensemble answer to find the end of the open ledger."""
    END_UNPROVEN = "end-unproven"
    """Too many bookies of the last ensemble may have lost entries, or the ack quorum is below 1, so
    the end is not provable."""
    RECOVERY_UNENDED = "recovery-unended"
    """A draining bookie holds an open fragment of a ledger whose recovery was never finished."""
    CORRUPT_METADATA = "corrupt-metadata"
    """The metadata is damaged or of an unknown version."""
    ACCESS_DENIED = "access-denied"
    """An ACL denies access to the metadata."""
    WRITE_REFUSED = "write-refused"
    """ZooKeeper refuses to store the new metadata."""
    DIGEST_SUSPECT = "digest-suspect"
    """Every copy fails its digest, or no key is known: the password or digest type may be wrong."""
    CONFLICTS = "conflicts"
    """Metadata or bookies changed in every round of the repair."""
    MAINTENANCE = "maintenance"
    """A bookie is absent or unresponsive during its maintenance window."""
    HOLD = "hold"
    """A safety hold forbids fencing."""
    LEFT_TO_OTHERS = "left-to-others"
    """This node cannot repair the ledger, but another node can."""
    JOURNAL = "journal-unwritable"
    """The local journal cannot record the metadata write."""

    @property
    def is_of_this_node(self) -> bool:
        """True if another node may succeed now, because the obstacle is not in the ledger."""
        return Trait.OF_THIS_NODE in traits(self)

    @property
    def is_a_grace(self) -> bool:
        """The ledger is left to its writer for the open-ledger grace."""
        return Trait.GRACE in traits(self)

    @property
    def ends_with_a_bookie(self) -> bool:
        """A bookie that registers is all that helps. Every node sees it at once, and retries."""
        return Trait.ENDS_WITH_A_BOOKIE in traits(self)

    @property
    def ends_by_others(self) -> bool:
        """It ends by an order or by the writer, for which ``bookmender repair`` does not wait."""
        return Trait.ENDS_BY_OTHERS in traits(self)

    @property
    def needs_help(self) -> bool:
        """True if time alone does not help: a bookie must register, or an operator must act."""
        return Trait.NEEDS_HELP in traits(self)


class Trait(enum.Flag):
    """What else a reason says about the ledger and its retries."""

    GRACE = enum.auto()
    NEEDS_HELP = enum.auto()
    OF_THIS_NODE = enum.auto()
    ENDS_WITH_A_BOOKIE = enum.auto()
    ENDS_BY_OTHERS = enum.auto()
    OF_RECOVERY = enum.auto()
    """The last attempt to recover the ledger failed. This stays the reason in the next grace."""
    ANY_CHANGE_HELPS = enum.auto()
    """Any change of the registered bookies warrants a retry, not only a new bookie."""
    RETRIED_LATE = enum.auto()
    """Retries wait longer than the settings say, because only a rare event helps."""
    RETRIED_SOON = enum.auto()
    """Retries wait shorter than the settings say, because the obstacle may be gone in a moment."""


_STUCK = Trait.NEEDS_HELP | Trait.RETRIED_LATE
_TRAITS: Mapping[Reason, Trait] = {
    Reason.OPEN_LEDGER_GRACE: Trait.GRACE,
    Reason.OPEN_FRAGMENT: Trait.ENDS_BY_OTHERS,
    Reason.WRITER_ALIVE: Trait.GRACE,
    # Another bookie of the ledger may be missing now: its entries need not wait for the first one.
    Reason.NO_COPY: _STUCK | Trait.ENDS_WITH_A_BOOKIE | Trait.ANY_CHANGE_HELPS,
    Reason.NO_TARGET: Trait.NEEDS_HELP | Trait.OF_RECOVERY,
    Reason.MISPLACED: _STUCK,
    # When an unresponsive bookie becomes absent, the ledger is repaired without it.
    Reason.NO_ANSWER: Trait.RETRIED_SOON | Trait.ANY_CHANGE_HELPS,
    Reason.RECOVERY_FAILED: Trait.OF_RECOVERY | Trait.ANY_CHANGE_HELPS,
    Reason.END_DAMAGED: Trait.NEEDS_HELP | Trait.OF_RECOVERY,
    Reason.NO_COVERAGE: Trait.NEEDS_HELP | Trait.OF_RECOVERY | Trait.ENDS_WITH_A_BOOKIE,
    Reason.END_UNPROVEN: Trait.NEEDS_HELP | Trait.OF_RECOVERY,
    Reason.RECOVERY_UNENDED: Trait.NEEDS_HELP,
    Reason.CORRUPT_METADATA: _STUCK,
    Reason.ACCESS_DENIED: _STUCK,
    Reason.WRITE_REFUSED: _STUCK,
    Reason.DIGEST_SUSPECT: _STUCK,
    Reason.CONFLICTS: Trait.RETRIED_SOON | Trait.ANY_CHANGE_HELPS,
    Reason.MAINTENANCE: Trait.ENDS_BY_OTHERS | Trait.ANY_CHANGE_HELPS,
    Reason.HOLD: Trait.ENDS_BY_OTHERS,
    Reason.LEFT_TO_OTHERS: Trait.OF_THIS_NODE,
    Reason.JOURNAL: Trait.NEEDS_HELP | Trait.OF_THIS_NODE,
}


def traits(reason: Reason | None) -> Trait:
    """Return the traits of a reason. None, an unexpected error, has none."""
    return Trait(0) if reason is None else _TRAITS[reason]


class Exclusion(enum.Enum):
    """Why a writable bookie may not receive a copy. Stored in ZooKeeper: never change a value."""

    MEMBER = "member"
    """It stores this part of the ledger already, or belongs to the last ensemble of an open one."""
    REFUSED = "refused"
    """It refused a copy of this ledger."""
    SHORT_OF_SPACE = "short-of-space"
    """Its disks have too little free space."""
    DRAINING = "draining"
    MAINTENANCE = "maintenance"
    QUARANTINED = "quarantined"
    """It did not answer recently, so that no request is sent to it for a while."""
    ISOLATED = "isolated"
    """It is outside the isolation groups of the ledger."""
    NOT_LOCAL = "not-local"
    """It is not the bookie of this node, and ``replication.target`` is ``local``."""


class Facts(Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """The known facts about a blocked repair. Each reason sets the few fields that it needs."""

    absent: tuple[BookieId, ...] = ()
    """Not registered. They have a cookie, so they may return."""
    decommissioned: tuple[BookieId, ...] = ()
    """Not registered, and without a cookie."""
    unresponsive: tuple[BookieId, ...] = ()
    """Registered, but they do not answer."""
    superseded: tuple[BookieId, ...] = ()
    """Another bookie is registered at their address."""
    reformatted: tuple[BookieId, ...] = ()
    """Reformatted after the ledger was created: their "no such entry" is not trusted (rule S5)."""
    lacking: tuple[BookieId, ...] = ()
    """Registered, but they lack entries that they should have."""
    draining: tuple[BookieId, ...] = ()
    in_maintenance: tuple[BookieId, ...] = ()
    needed: tuple[BookieId, ...] = ()
    """The ledger cannot be closed at all before enough of these answer."""
    replaced: BookieId | None = None
    """The bookie whose copy another bookie must receive."""
    local: BookieId | None = None
    """The bookie of this node, where it is the only allowed target."""

    entry_ids: tuple[int, ...] = ()
    """The first entries that are concerned, ascending."""
    entry_count: int = 0
    """Number of affected entries."""
    has_more_entries: bool = False
    """``entry_count`` is a lower bound."""
    withheld_count: int | None = None
    """Copies of other entries that are not made, because the same copy lacks an entry. 0: they were
    not counted."""

    excluded: tuple[tuple[Exclusion, int], ...] | None = None
    """Number of writable bookies that are excluded as targets, by reason. Empty: none is writable.
    None: the placement policy refused (``errors``)."""
    ack_quorum: int | None = None
    """Set if recovery must store the last entries on this many bookies before the close. Below 1:
    nobody can recover the ledger."""
    metadata_bytes: int | None = None
    request_bytes_max: int | None = None
    """The size of the metadata, and the size that this node may send to ZooKeeper."""
    grace_count: int = 0
    grace_count_max: int = 0
    """Number of this grace of the writer, and the maximum number of graces."""
    round_count: int = 0
    """Rounds of the repair that failed."""

    is_in_recovery: bool = False
    """A recovery of the ledger was begun and not finished."""
    is_end_doubtful: bool = False
    """Recovery may fail to prove the end, for ``absent``, ``superseded`` and ``reformatted``."""
    are_all_reformatted: bool = False
    """Every cookie of the cluster is newer than the ledger, as after an import of ZooKeeper."""
    are_others_unasked: bool = False
    """Bookies of other fragments may have the entries, and were not asked."""

    comment: str = ""
    """Text that the operator or the leader wrote into the order of a safety hold or a window."""
    errors: tuple[str, ...] = ()
    """Messages of the errors that caused it."""


class Blocked(Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """The reason why the repair of a ledger, or of a part of it, is blocked, with facts."""

    reason: Reason
    facts: Facts = Facts()
    until_ms: int | None = None
    """Wall-clock time at which it will be over. None: unknown."""
    besides: tuple["Blocked", ...] = ()
    """Reasons for other parts of the same ledger, if this one represents all (``gravest``)."""

    @property
    def all_reasons(self) -> tuple[Reason, ...]:
        return self.reason, *(each.reason for each in self.besides)

    def to_record(self) -> dict[str, Any]:
        """Return it as a JSON object. Fields at their defaults are omitted."""
        record: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return record


def gravest(blocked: Sequence[Blocked]) -> Blocked:
    """Return one value that stands for all of ``blocked`` (at least one).

    Entries without a copy come first, because what helps the others may not help these. Then comes
    what needs help, then the rest.
    """
    kept: list[Blocked] = []
    for each in sorted(dict.fromkeys(blocked), key=lambda each: gravity(each.reason)):  # stable
        if sum(other.reason is each.reason for other in kept) < SAME_REASON_MAX:
            kept.append(each)
    # The ledger is due at a known time only if each of them waits for a time.
    untils = [each.until_ms for each in blocked if each.until_ms is not None]
    until_ms = min(untils) if len(untils) == len(blocked) else None
    return msgspec.structs.replace(kept[0], until_ms=until_ms, besides=tuple(kept[1:]))


def gravity(reason: Reason) -> int:
    """Return the rank by which reasons are shown, the smallest first."""
    return 0 if reason is Reason.NO_COPY else 1 if reason.needs_help else 2


def named(bookies: Collection[BookieId]) -> tuple[BookieId, ...]:
    """Return the bookies as a field of ``Facts`` names them: sorted, and not too many."""
    return tuple(sorted(bookies)[:BOOKIES_MAX])


def absence_facts(bookies: Collection[BookieId], view: ClusterView) -> Facts:
    """Return which of the bookies are absent and which are decommissioned."""
    unregistered = set(bookies) - view.available
    return Facts(
        absent=named(unregistered & view.cookies.keys()),
        decommissioned=named(unregistered - view.cookies.keys()),
    )

"""What is to be copied where: a pure function of findings and bookies (rules S1, S4, S11, S12, S15).

A plan says for every finding that is not good either a ``Repair`` or a ``Blocked`` reason; the
worker executes it as it stands, and a command can print it.
"""

import enum
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ledgers.errors import NotEnoughBookiesError
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId, LedgerMetadata
from ledgers.placement import choose_replacement
from replication.check import Finding, Verdict


class Reason(enum.Enum):
    """Why a marked ledger is not being repaired now. Shown by commands; never change a value."""

    OPEN_LEDGER_GRACE = "open-ledger-grace"
    OPEN_FRAGMENT = "open-fragment"
    WRITER_ALIVE = "writer-alive"
    NO_COPY = "no-copy"
    NO_TARGET = "no-target"
    NO_ANSWER = "no-answer"
    RECOVERY_FAILED = "recovery-failed"
    CORRUPT_METADATA = "corrupt-metadata"
    DIGEST_SUSPECT = "digest-suspect"
    CONFLICTS = "conflicts"
    MAINTENANCE = "maintenance"
    LEFT_TO_OTHERS = "left-to-others"

    @property
    def is_of_this_node(self) -> bool:
        """Whether another node may well succeed now: nothing about the ledger stands in the way."""
        return self is Reason.LEFT_TO_OTHERS

    @property
    def needs_help(self) -> bool:
        """Whether time alone will not help: a bookie must come (back), or a person."""
        return self in _NEEDS_HELP


_NEEDS_HELP = frozenset(
    {Reason.NO_COPY, Reason.NO_TARGET, Reason.CORRUPT_METADATA, Reason.DIGEST_SUSPECT}
)

CopyKey = tuple[Fragment, int]
"""What was copied: a bookie index of a fragment. Other bounds or members make it another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Give bookie index ``index`` of ``fragment`` the entries it misses, on ``target``.

    ``entry_ids`` ascend. Where ``target`` is the bookie at that index already, the metadata stays.
    """

    fragment: Fragment
    index: int
    target: BookieId
    entry_ids: Sequence[int]

    @property
    def replaced(self) -> BookieId:
        return self.fragment.ensemble[self.index]

    @property
    def key(self) -> CopyKey:
        return self.fragment, self.index

    @property
    def is_in_place(self) -> bool:
        return self.target == self.replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """What stands in the way of a repair. ``detail`` is a sentence for an operator."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    repairs: tuple[Repair, ...] = ()
    blocked: tuple[Blocked, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Nothing is missing and nothing unknown: the mark may go (rule S6)."""
        return not self.repairs and not self.blocked


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The bookies that may receive copies, with the bytes already under way to each."""

    load_bytes: Mapping[BookieId, int]
    refused: frozenset[BookieId] = frozenset()
    """Those that refused a recovery add of this ledger (rule S11)."""
    refilled: frozenset[BookieId] = frozenset()
    """Members that an earlier round gave what they lacked: what they lack still, they do not keep."""
    local: BookieId | None = None
    copied: Mapping[CopyKey, BookieId] = field(default_factory=dict)
    """Copies made in earlier rounds, with the bookie that holds them whole."""


def plan_repair(
    metadata: LedgerMetadata,
    findings: Sequence[Finding],
    targets: Targets,
    *,
    rng: random.Random,
) -> Plan:
    """Only closed fragments are repaired (rule S4)."""
    if detail := _suspect_key(findings):
        return Plan(blocked=(Blocked(reason=Reason.DIGEST_SUSPECT, detail=detail),))
    repairs: list[Repair] = []
    blocked: list[Blocked] = []
    for finding in findings:
        if finding.verdict is Verdict.GOOD:
            continue
        step = _step(metadata, finding, targets, repairs, rng=rng)
        if isinstance(step, Repair):
            repairs.append(step)
        else:
            blocked.append(step)
    return Plan(repairs=tuple(repairs), blocked=tuple(blocked))


def _suspect_key(findings: Sequence[Finding]) -> str | None:
    """Copies that all fail their digest alike say more about our key than about them (rule S7).

    One entry that is good, wherever it is, proves the key.
    """
    if not any(f.mismatched for f in findings):
        return None
    read = [f for f in findings if f.verdict in (Verdict.GOOD, Verdict.MISSING)]
    if not any(len(f.absent) + len(f.mismatched) < len(f.entries) for f in read):
        return "every copy fails its digest: is the ledger's password or digest type another one?"
    return None


def _step(
    metadata: LedgerMetadata,
    finding: Finding,
    targets: Targets,
    planned: Sequence[Repair],
    *,
    rng: random.Random,
) -> Repair | Blocked:
    """What to do about a finding that is not good."""
    if finding.verdict is Verdict.UNKNOWN:
        return Blocked(reason=Reason.NO_ANSWER, detail=f"{finding.bookie} does not answer")
    if not finding.fragment.is_closed:
        detail = f"{finding.bookie} lacks entries of a fragment that is not closed yet"
        return Blocked(reason=Reason.OPEN_FRAGMENT, detail=detail)
    may_refill = _may_refill(metadata, finding, targets)
    if may_refill and not finding.mismatched:
        return _of(finding, finding.bookie, finding.absent)
    taken = _taken(metadata, finding, targets, planned)
    return _move(finding, targets, taken, may_refill=may_refill, rng=rng)


def _may_refill(metadata: LedgerMetadata, finding: Finding, targets: Targets) -> bool:
    """Whether a member that is there may be given what it lacks (rule S15).

    Of a ledger that is not closed, a member of the last ensemble may not (rule S12, see ``_taken``).
    """
    is_last = not metadata.is_closed and finding.bookie in metadata.last_segment.ensemble
    has_failed = finding.bookie in targets.refused or finding.bookie in targets.refilled
    return finding.verdict is Verdict.MISSING and not is_last and not has_failed


def _taken(
    metadata: LedgerMetadata, finding: Finding, targets: Targets, planned: Sequence[Repair]
) -> frozenset[BookieId]:
    """Bookies that must not come into this ensemble: its members, and other targets of the fragment.

    Of a ledger that is not closed, the members of the last ensemble neither: a copy's LAC field is
    the reader's clue there, and ours would be an old one (rule S12).
    """
    taken = set(finding.fragment.ensemble)
    first_entry_id = finding.fragment.first_entry_id
    taken.update(r.target for r in planned if r.fragment.first_entry_id == first_entry_id)
    taken.update(
        target
        for (fragment, index), target in targets.copied.items()
        if fragment == finding.fragment and index != finding.index
    )
    if not metadata.is_closed:
        taken.update(metadata.last_segment.ensemble)
    return frozenset(taken)


def _move(
    finding: Finding,
    targets: Targets,
    taken: Collection[BookieId],
    *,
    may_refill: bool,
    rng: random.Random,
) -> Repair | Blocked:
    """To another bookie; damage stays where it is, to be overwritten, only if there is none (S15)."""
    copied = targets.copied.get((finding.fragment, finding.index))
    if copied is not None and copied not in taken and copied in targets.load_bytes:
        return _of(finding, copied, ())
    try:
        target = choose_replacement(
            candidates=targets.load_bytes,
            ensemble=finding.fragment.ensemble,
            excluded=targets.refused | frozenset(taken),
            local=targets.local,
            random=rng,
        )
    except NotEnoughBookiesError:
        if may_refill:
            missing = sorted((*finding.absent, *finding.mismatched))
            return _of(finding, finding.bookie, missing)
        return Blocked(reason=Reason.NO_TARGET, detail=_no_target(finding, targets, taken))
    return _of(finding, target, finding.entries)


def _of(finding: Finding, target: BookieId, entry_ids: Sequence[int]) -> Repair:
    return Repair(
        fragment=finding.fragment, index=finding.index, target=target, entry_ids=entry_ids
    )


def _no_target(finding: Finding, targets: Targets, taken: Collection[BookieId]) -> str:
    writable = len(targets.load_bytes)
    members = len(targets.load_bytes.keys() & set(taken))
    refused = len(targets.load_bytes.keys() & targets.refused)
    return (
        f"no bookie can take over from {finding.bookie}: of {writable} writable ones {members} "
        f"already hold this part of the ledger or its open end and {refused} refused it; add a bookie"
    )

"""One ledger's verdict, collected stretch by stretch. Pure. Its size depends on the metadata, not
on the number of entries."""

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace

from auditor.fsck.judging import StretchVerdict
from auditor.fsck.verdicts import (
    DAMAGE,
    WRONG_KEY,
    Evidence,
    Finding,
    FragmentVerdict,
    Grade,
    LedgerVerdict,
)
from ledgers.fragments import Fragment
from ledgers.manager import VersionedMetadata
from ledgers.metadata import BookieId

EVIDENCE_MAX = 100
"""Number of observations kept for one ledger; the worst come first."""
_ORDER = tuple(Finding)
_LACKS = frozenset(
    {Finding.MISSING, Finding.ACK_QUORUM_ONLY, Finding.BAD_DIGEST, Finding.READ_ERROR}
)

_Key = tuple[Finding, BookieId | None, int, str]
"""What observations have in common that are merged. The number is the first entry of the fragment,
or -1; the last item is the code."""


class SummingUp:
    """The verdict of one look at one ledger, while it grows."""

    def __init__(self, versioned: VersionedMetadata) -> None:
        self._versioned = versioned
        self._fragments: dict[int, FragmentVerdict] = {}
        """By position in the ledger."""
        self._evidence: dict[_Key, Evidence] = {}
        self.entries_read = 0
        self.bytes_read = 0
        self.last_entry_id = -1
        self.is_tail_unseen = False
        self.length = versioned.metadata.length

    def add_fragment(self, position: int, fragment: Fragment, *, is_unknown: bool = False) -> None:
        """Add a fragment that is whole until ``add`` says otherwise. ``is_unknown``: True if its
        end is unknown."""
        assert fragment.last_entry_id is not None, fragment
        self._fragments[position] = FragmentVerdict(
            first_entry_id=fragment.first_entry_id,
            last_entry_id=fragment.last_entry_id,
            ensemble=fragment.ensemble,
            grade=Grade.UNKNOWN if is_unknown else Grade.WHOLE,
            copies_least=0 if is_unknown else fragment.write_quorum,
            rests_on_unknown=is_unknown,
        )

    def add(self, position: int, found: StretchVerdict) -> None:
        """Merge the verdict on a stretch. ``position``: of its fragment in the ledger."""
        known = self._fragments[position]
        self._fragments[position] = replace(
            known,
            grade=min(known.grade, found.grade, key=lambda grade: grade.rank),
            copies_least=min(known.copies_least, found.copies_least),
            rests_on_unknown=known.rests_on_unknown or found.rests_on_unknown,
        )
        self.note(found.evidence, fragment_start=known.first_entry_id)

    def doubt_end(self, evidence: Collection[Evidence]) -> None:
        """Note that nobody can prove where the last fragment ends. Does nothing without evidence of
        that."""
        if not evidence:
            return
        position = max(self._fragments)
        known = self._fragments[position]
        grade = min(known.grade, Grade.UNKNOWN, key=lambda grade: grade.rank)
        self._fragments[position] = replace(known, grade=grade, rests_on_unknown=True)
        self.note(evidence)

    def lacks(self, bookie: BookieId, entry_id: int) -> bool:
        """True if the bookie was seen to lack the entry, which must be the first one requested from
        it in a fragment."""
        return any(
            each.bookie == bookie and each.first_entry_id == entry_id and each.finding in _LACKS
            for each in self._evidence.values()
        )

    def note(self, evidence: Iterable[Evidence], *, fragment_start: int = -1) -> None:
        """Add observations. Those of one kind in one fragment are merged into one."""
        for each in evidence:
            key = (each.finding, each.bookie, fragment_start, each.code)
            known = self._evidence.get(key)
            self._evidence[key] = each if known is None else _joined(known, each)

    def verdict(self, *, checked_ms: int, is_key_suspect: bool = False) -> LedgerVerdict:
        """Return the verdict. ``is_key_suspect``: True if no entry matches our key and the metadata
        holds none, so that nothing is known (rule S7)."""
        if is_key_suspect:
            self.note([_WRONG_KEY])
            for position, fragment in self._fragments.items():
                self._fragments[position] = replace(
                    fragment, grade=Grade.UNKNOWN, copies_least=0, rests_on_unknown=True
                )
        metadata, stat = self._versioned.metadata, self._versioned.stat
        fragments = tuple(verdict for _, verdict in sorted(self._fragments.items()))
        evidence = sorted(self._evidence.values(), key=_weight)
        found = {each.finding for each in evidence}
        return LedgerVerdict(
            ledger_id=self._versioned.ledger_id,
            grade=_grade(fragments, found),
            findings=tuple(sorted(found, key=_ORDER.index)),
            rests_on_unknown=any(fragment.rests_on_unknown for fragment in fragments),
            evidence=tuple(evidence[:EVIDENCE_MAX]),
            evidence_left_out=max(0, len(evidence) - EVIDENCE_MAX),
            fragments=fragments,
            state=metadata.state.name.lower(),
            length=self.length,
            last_entry_id=self.last_entry_id,
            is_tail_unseen=self.is_tail_unseen,
            metadata_version=stat.version,
            mtime_ms=stat.mtime_ms,
            entries_read=self.entries_read,
            bytes_read=self.bytes_read,
            checked_ms=checked_ms,
        )


def _grade(fragments: Sequence[FragmentVerdict], found: Set[Finding]) -> Grade:
    """Return the grade of the worst fragment. If only legally missing copies degrade the ledger,
    but other copies were not answered for, it is ``UNKNOWN``."""
    worst = min((fragment.grade for fragment in fragments), key=lambda grade: grade.rank)
    is_legal = worst is Grade.DEGRADED and DAMAGE.isdisjoint(found)
    is_silent = any(fragment.rests_on_unknown for fragment in fragments)
    return Grade.UNKNOWN if is_legal and is_silent else worst


_WRONG_KEY = Evidence(
    finding=Finding.BAD_DIGEST,
    code=WRONG_KEY,
    detail="no entry fits the default password and digest type, and the metadata holds none",
)


def _joined(before: Evidence, after: Evidence) -> Evidence:
    return replace(
        before,
        first_entry_id=min(before.first_entry_id, after.first_entry_id),
        last_entry_id=max(before.last_entry_id, after.last_entry_id),
        entry_count=before.entry_count + after.entry_count,
    )


def _weight(evidence: Evidence) -> tuple[int, int, str]:
    return _ORDER.index(evidence.finding), evidence.first_entry_id, evidence.bookie or ""

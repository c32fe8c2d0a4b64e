"""One ledger looked at: its metadata, its end, the copies that are missing. Writes and fences
nothing.

What comes of it is a value: a ``Survey``, from which a plan is made, or what keeps one from being
made. Worker and ``bookmender plan`` look through the same eyes.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from ledgers.bookie.protocol.frames import FRAME_BYTES_MAX
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.entry import HEADER_BYTES, EntryDigest
from ledgers.errors import (
    CorruptionError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.fragments import Fragment, fragments, known_fragments
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.metadata import BookieId, LedgerMetadata, LedgerState
from ledgers.operations.opening import find_end, ledger_digest
from replication.cluster.cluster_view import ClusterView
from replication.planning.check import IndexFinding, Verdict, check, judge
from replication.planning.entry_lists import EntryLists
from replication.planning.open_fragment import (
    ENTRY_BYTES_GUESS,
    first_endangered,
    leaving_members,
    survey_tail,
)
from replication.planning.questions import GAVE_ALL, Questions, questions
from replication.reasons import Blocked, Reason

SMALL_ENTRIES = 64
"""A ledger of no more than that is copied while what is presumed of it is being proven."""


class Survey(Struct, frozen=True, kw_only=True):
    """All that a plan is made from. ``findings``: one for every bookie index of every fragment that
    was looked at."""

    versioned: VersionedMetadata
    view: ClusterView
    digest: EntryDigest
    findings: tuple[IndexFinding, ...]

    @property
    def ledger_id(self) -> int:
        return self.versioned.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        return self.versioned.metadata

    @property
    def is_abandoned(self) -> bool:
        """Whether an open fragment lacks copies that no writer will add: a recovery has locked him
        out."""
        return self.metadata.state is LedgerState.IN_RECOVERY and any(
            finding.verdict is Verdict.MISSING and not finding.fragment.is_closed
            for finding in self.findings
        )

    @property
    def has_good_entry(self) -> bool:
        """Whether any entry was read and found good: then our key is the ledger's (rule S7)."""
        return any(
            f.bad_count < len(f.entries)
            for f in self.findings
            if f.verdict in (Verdict.GOOD, Verdict.MISSING)
        )

    @property
    def entry_bytes(self) -> int:
        return entry_bytes_guess(self.metadata, self.digest)


class Presumption(Struct, frozen=True, kw_only=True):
    """What a survey will find if every bookie that is there has its copies; ``asked``: what proves
    it."""

    survey: Survey
    asked: Questions


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnd:
    """A ledger that must be closed first, for its open fragment's sake.

    ``leaving``: members that it is to be rid of. ``lacking``: members that are there and lack an
    entry, ``first_lacking``, which may be on fewer than an ack quorum of bookies for it; it is the
    first such.
    """

    versioned: VersionedMetadata
    view: ClusterView
    leaving: tuple[BookieId, ...] = ()
    lacking: tuple[BookieId, ...] = ()
    first_lacking: int | None = None


Surveyed = Survey | OpenEnd | Blocked | None
"""None: the ledger is gone."""


class Surveyor:
    """Looks at ledgers, many at once. One for a worker or a command."""

    def __init__(
        self,
        *,
        manager: LedgerManager,
        bookies: Bookies,
        clock: Clock,
        rng: random.Random,
        fallback_digest: EntryDigest,
        checked_share: float = 0.0,
        entry_lists: bool = False,
    ) -> None:
        """``checked_share``, ``entry_lists``: see ``ReplicationSettings``."""
        self._manager = manager
        self._bookies = bookies
        self._clock = clock
        self._rng = rng
        self._fallback_digest = fallback_digest
        self._checked_share = checked_share
        self._lists = EntryLists(bookies, clock) if entry_lists else None

    async def survey(
        self, ledger_id: int, view: ClusterView, *, distrusted: Collection[BookieId] = ()
    ) -> Surveyed:
        """``distrusted``: bookies to be asked for every entry, besides those set up anew."""
        match await self.find(ledger_id):
            case VersionedMetadata() as versioned:
                return await self.survey_metadata(versioned, view, distrusted=distrusted)
            case found:
                return found

    async def find(self, ledger_id: int) -> VersionedMetadata | Blocked | None:
        """Its metadata alone; None: the ledger is deleted."""
        try:
            return await self._manager.find(ledger_id)
        except CorruptionError as error:
            return Blocked(reason=Reason.CORRUPT_METADATA, detail=str(error))
        except UnauthorizedError as error:
            detail = f"its metadata cannot be read: {error}"
            return Blocked(reason=Reason.SHUT_AWAY, detail=detail)

    def presume(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        distrusted: Collection[BookieId] = (),
    ) -> Presumption | None:
        """Asks nobody. None where it is not worth presuming anything: the ledger is open, or not
        small."""
        metadata = versioned.metadata
        is_small = metadata.is_closed and metadata.last_entry_id < SMALL_ENTRIES
        if not is_small or self._lists is not None:
            return None
        try:
            digest = ledger_digest(metadata, self._fallback_digest)
        except UnauthorizedError:
            return None
        judged = known_fragments(versioned.ledger_id, metadata, lac=metadata.last_entry_id)
        asked = questions(
            judged,
            available=view.checked,
            distrusted=self._suspects(versioned, view, distrusted),
            share=self._checked_share,
            rng=self._rng,
        )
        findings = judge(judged, dict.fromkeys(asked, GAVE_ALL), available=view.checked)
        survey = Survey(
            versioned=versioned, view=view, digest=digest, findings=under_orders(findings, view)
        )
        return Presumption(survey=survey, asked=asked)

    async def survey_metadata(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        distrusted: Collection[BookieId] = (),
    ) -> Survey | OpenEnd | Blocked:
        """Of metadata that was read already, or that is yet to be written."""
        if leaving := leaving_members(versioned.metadata, view):
            return OpenEnd(versioned=versioned, view=view, leaving=leaving)
        try:
            digest = ledger_digest(versioned.metadata, self._fallback_digest)
            lac = await self._lac(versioned)
        except UnauthorizedError as error:
            return Blocked(reason=Reason.DIGEST_SUSPECT, detail=str(error))
        except UnavailableError as error:
            return _without_end(versioned, view, error)
        judged = known_fragments(versioned.ledger_id, versioned.metadata, lac=lac)
        survey = await self._survey(versioned, judged, digest, view, distrusted)
        if not versioned.metadata.is_closed:
            tail = await survey_tail(
                versioned, view, digest=digest, lac=lac, bookies=self._bookies, clock=self._clock
            )
            survey = replace(survey, findings=survey.findings + under_orders(tail, view))
            if endangered := first_endangered(survey.findings, versioned.metadata):
                return OpenEnd(
                    versioned=versioned,
                    view=view,
                    lacking=endangered.lacking,
                    first_lacking=endangered.entry_id,
                )
        return survey

    async def survey_closed_part(
        self, found: OpenEnd, *, distrusted: Collection[BookieId] = ()
    ) -> Survey | None:
        """All fragments but the last, which need not wait for that one; None where there are none.

        That the last one was begun says that every entry before it is acknowledged: they are
        closed, whatever its bookies may tell (rule S4).
        """
        versioned, metadata = found.versioned, found.versioned.metadata
        lac = metadata.last_segment.first_entry_id - 1
        closed = [f for f in fragments(versioned.ledger_id, metadata, lac=lac) if f.is_closed]
        if not closed:
            return None
        try:
            digest = ledger_digest(metadata, self._fallback_digest)
        except UnauthorizedError:
            return None
        return await self._survey(versioned, closed, digest, found.view, distrusted)

    async def _lac(self, versioned: VersionedMetadata) -> int:
        """The last entry known to be acknowledged. Errors are those of ``find_end``."""
        if versioned.metadata.is_closed:
            return versioned.metadata.last_entry_id
        opened = await find_end(
            versioned, bookies=self._bookies, clock=self._clock, fallback=self._fallback_digest
        )
        return opened.lac

    async def _survey(
        self,
        versioned: VersionedMetadata,
        judged: Sequence[Fragment],
        digest: EntryDigest,
        view: ClusterView,
        distrusted: Collection[BookieId],
    ) -> Survey:
        suspects = self._suspects(versioned, view, distrusted)
        if self._lists is not None:
            suspects |= await self._lists.lacking(judged, view.checked - suspects)
        findings = await check(
            judged,
            bookies=self._bookies,
            digest=digest,
            available=view.checked,
            distrusted=suspects,
            entry_bytes=entry_bytes_guess(versioned.metadata, digest),
            share=self._checked_share,
            rng=self._rng,
        )
        return Survey(
            versioned=versioned, view=view, digest=digest, findings=under_orders(findings, view)
        )

    @staticmethod
    def _suspects(
        versioned: VersionedMetadata, view: ClusterView, distrusted: Collection[BookieId]
    ) -> frozenset[BookieId]:
        """Bookies to be asked for every entry: an identity younger than the ledger may be an empty
        one's."""
        return view.initialised_after(versioned.stat.czxid).union(distrusted)


def entry_bytes_guess(metadata: LedgerMetadata, digest: EntryDigest) -> int:
    """A guess at the stored size of an entry, from what the metadata says."""
    if not metadata.is_closed or metadata.last_entry_id < 0:
        return ENTRY_BYTES_GUESS
    overhead = HEADER_BYTES + digest.size
    length = max(0, metadata.length) // (metadata.last_entry_id + 1)
    return overhead + min(length, FRAME_BYTES_MAX)


def _without_end(
    versioned: VersionedMetadata, view: ClusterView, error: UnavailableError
) -> Blocked:
    """Too few bookies told where an open ledger ends: perhaps because some are away on purpose."""
    windows = view.orders.maintenance
    away = sorted(b for b in versioned.metadata.last_segment.ensemble if b in windows)
    if not away:
        return Blocked(reason=Reason.NO_ANSWER, detail=str(error))
    return Blocked(
        reason=Reason.MAINTENANCE,
        detail=f"{error}; under maintenance: {', '.join(away)}",
        until_ms=min(windows[bookie].until_ms for bookie in away),
    )


def under_orders(findings: tuple[IndexFinding, ...], view: ClusterView) -> tuple[IndexFinding, ...]:
    """What an operator ordered makes of findings: who drains is missing, who is away is not.

    The draining bookies were not asked, so that they seem lost.
    """
    if not view.orders.draining and not view.orders.maintenance:
        return findings
    return tuple(_under_orders(finding, view) for finding in findings)


def _under_orders(finding: IndexFinding, view: ClusterView) -> IndexFinding:
    is_seen = finding.bookie in view.available
    if finding.verdict is Verdict.LOST and is_seen:
        return replace(finding, verdict=Verdict.DRAINING)
    is_silent = finding.verdict is Verdict.UNKNOWN or not is_seen
    if is_silent and finding.bookie in view.orders.maintenance:
        return replace(finding, verdict=Verdict.AWAY)
    return finding

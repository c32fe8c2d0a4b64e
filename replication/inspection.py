"""The inspection of one ledger: its metadata, its end, its missing copies. Writes and fences
nothing.

``Inspector`` returns a value: an ``Inspection``, from which a plan is made, ``RecoveryRequired``,
or the reason why there is neither (``Blocked``). The worker, the dry run and ``ledger restore`` use
it.

The last fragment of a ledger that is not closed is special, because its end is unknown. Entries up
to the LAC are acknowledged. Entries after it may be acknowledged, as far as any bookie has them.
After the death of the writer this is unknown.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.digest import HEADER_BYTES, EntryDigest
from ledgers.errors import CorruptionError, UnauthorizedError, UnavailableError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import (
    BookieId,
    Fragment,
    LedgerMetadata,
    LedgerState,
    closed_fragments,
    fragments,
    known_fragments,
)
from ledgers.reading import find_end, highest_entry_id, ledger_digest
from ledgers.wire.framing import FRAME_BYTES_MAX
from replication.cluster import ClusterView
from replication.copy_reader import (
    GAVE_ALL,
    CopyFinding,
    ReadPlan,
    Verdict,
    inspect_copies,
    judge,
    plan_reads,
)
from replication.entry_runs import overlaps
from replication.reasons import Blocked, Facts, Reason, named

IN_FLIGHT_WAIT_S = 1.0
"""A copy that a writer has sent arrives within this time."""
ENTRY_BYTES_GUESS = 1_024
"""The assumed size of an entry while the length of the ledger is unknown."""
SMALL_ENTRIES = 64
"""A ledger of up to this size is copied while its other copies are still being checked."""


class Inspection(Struct, frozen=True, kw_only=True):
    """Everything from which a plan is made. ``findings``: one for every bookie index of every
    inspected fragment."""

    versioned: VersionedMetadata
    view: ClusterView
    digest: EntryDigest
    findings: tuple[CopyFinding, ...]

    @property
    def ledger_id(self) -> int:
        return self.versioned.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        return self.versioned.metadata

    @property
    def is_abandoned(self) -> bool:
        """True if an open fragment lacks copies that no writer will add, because a recovery has
        fenced the writer."""
        return self.metadata.state is LedgerState.IN_RECOVERY and any(
            finding.verdict is Verdict.MISSING and not finding.fragment.is_closed
            for finding in self.findings
        )

    @property
    def has_good_entry(self) -> bool:
        """True if some entry was read and is good, which proves our key (rule S7)."""
        return any(
            f.bad_count < len(f.entries)
            for f in self.findings
            if f.verdict in (Verdict.GOOD, Verdict.MISSING)
        )

    @property
    def entry_bytes(self) -> int:
        return entry_bytes_guess(self.metadata, self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRequired:
    """A ledger that must be closed first, because its open fragment lacks copies.

    ``leaving``: members that must leave the ensemble. ``lacking``: registered members that lack the
    entry ``first_lacking``, the first one that may be on fewer bookies than an ack quorum.
    """

    versioned: VersionedMetadata
    view: ClusterView
    leaving: tuple[BookieId, ...] = ()
    lacking: tuple[BookieId, ...] = ()
    first_lacking: int | None = None


@dataclass(kw_only=True)
class Inspector:
    """Inspects ledgers, many at once. Shared by all repairs of a worker, or of a command."""

    manager: LedgerManager
    bookies: Bookies
    clock: Clock
    rng: random.Random
    fallback_digest: EntryDigest
    checked_share: float = 0.0
    """See ``ReplicationSettings``."""

    async def inspect(
        self, ledger_id: int, view: ClusterView, *, suspects: Collection[BookieId] = ()
    ) -> Inspection | RecoveryRequired | Blocked | None:
        """Read the metadata and inspect the ledger. Return None if the ledger is deleted.

        ``suspects``: bookies that are asked for every entry, besides bookies with a cookie newer
        than the ledger, which may have been empty.
        """
        match await self.find(ledger_id):
            case VersionedMetadata() as versioned:
                return await self.inspect_metadata(versioned, view, suspects=suspects)
            case found:
                return found

    async def find(self, ledger_id: int) -> VersionedMetadata | Blocked | None:
        """Return the metadata; None if the ledger is deleted."""
        try:
            return await self.manager.find(ledger_id)
        except CorruptionError as error:
            return Blocked(reason=Reason.CORRUPT_METADATA, facts=Facts(errors=(str(error),)))
        except UnauthorizedError as error:
            return Blocked(reason=Reason.ACCESS_DENIED, facts=Facts(errors=(str(error),)))

    def inspect_optimistically(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        suspects: Collection[BookieId] = (),
    ) -> tuple[Inspection, ReadPlan] | None:
        """Return what an inspection will find if every registered bookie has its copies, and the
        reads that prove it. Asks no bookie. None if the ledger is open or not small."""
        metadata = versioned.metadata
        if not metadata.is_closed or metadata.last_entry_id >= SMALL_ENTRIES:
            return None
        try:
            digest = ledger_digest(metadata, self.fallback_digest)
        except UnauthorizedError:
            return None
        judged = known_fragments(versioned.ledger_id, metadata, lac=metadata.last_entry_id)
        asked = plan_reads(
            judged,
            available=view.checked,
            suspects=view.initialised_after(versioned.stat.czxid).union(suspects),
            share=self.checked_share,
            rng=self.rng,
        )
        findings = judge(judged, dict.fromkeys(asked, GAVE_ALL), available=view.checked)
        inspection = Inspection(
            versioned=versioned, view=view, digest=digest, findings=under_orders(findings, view)
        )
        return inspection, asked

    async def inspect_metadata(
        self,
        versioned: VersionedMetadata,
        view: ClusterView,
        *,
        suspects: Collection[BookieId] = (),
    ) -> Inspection | RecoveryRequired | Blocked:
        """Inspect metadata that was read already, or that may be written later."""
        metadata = versioned.metadata
        if leaving := leaving_members(metadata, view):
            return RecoveryRequired(versioned=versioned, view=view, leaving=leaving)
        try:
            digest = ledger_digest(metadata, self.fallback_digest)
            lac = metadata.last_entry_id
            if not metadata.is_closed:
                opened = await find_end(
                    versioned, bookies=self.bookies, clock=self.clock, fallback=self.fallback_digest
                )
                lac = opened.lac
        except UnauthorizedError as error:
            return Blocked(reason=Reason.DIGEST_SUSPECT, facts=Facts(errors=(str(error),)))
        except UnavailableError as error:  # too few bookies answer to find the end
            windows = view.orders.maintenance
            resting = windows.keys() & set(metadata.last_segment.ensemble)
            return Blocked(
                reason=Reason.MAINTENANCE if resting else Reason.NO_ANSWER,
                facts=Facts(in_maintenance=named(resting), errors=(str(error),)),
                until_ms=min((windows[bookie].until_ms for bookie in resting), default=None),
            )
        judged = known_fragments(versioned.ledger_id, metadata, lac=lac)
        inspection = await self._inspect(versioned, judged, digest, view, suspects)
        if metadata.is_closed:
            return inspection
        tail = under_orders(await self._inspect_tail(versioned, view, digest, lac=lac), view)
        inspection = replace(inspection, findings=inspection.findings + tail)
        return _underreplicated(inspection) or inspection

    async def inspect_closed_part(
        self, found: RecoveryRequired, *, suspects: Collection[BookieId] = ()
    ) -> Inspection | None:
        """Inspect all fragments but the last, which need not wait for the last one. None if there
        is only one.
        """
        versioned, metadata = found.versioned, found.versioned.metadata
        closed = closed_fragments(versioned.ledger_id, metadata)
        if not closed:
            return None
        try:
            digest = ledger_digest(metadata, self.fallback_digest)
        except UnauthorizedError:
            return None
        return await self._inspect(versioned, closed, digest, found.view, suspects)

    async def _inspect_tail(
        self, versioned: VersionedMetadata, view: ClusterView, digest: EntryDigest, *, lac: int
    ) -> tuple[CopyFinding, ...]:
        """Return what is missing of the entries after the LAC that any member has; and which
        members did not answer, because they may have more entries.

        In recovery there is no writer, so every member is asked. A writer may have copies in
        flight, so for an open ledger only bookies that were reformatted after its creation are
        asked, and twice.
        """
        metadata = versioned.metadata
        is_abandoned = metadata.state is LedgerState.IN_RECOVERY
        members = view.checked.intersection(metadata.last_segment.ensemble)
        asked = members if is_abandoned else members & view.initialised_after(versioned.stat.czxid)
        if not asked:
            return ()
        shown, unresponsive = await highest_entry_id(
            self.bookies, members, versioned.ledger_id, digest=digest
        )
        read = partial(
            inspect_tail,
            versioned,
            bookies=self.bookies,
            digest=digest,
            asked=asked,
            first_entry_id=lac + 1,
            last_entry_id=max(lac, shown),
        )
        findings = await read()
        if not is_abandoned and any(f.verdict is Verdict.MISSING for f in findings):
            await self.clock.sleep(IN_FLIGHT_WAIT_S)
            findings = await read()
        unknown = (
            CopyFinding(fragment=f.fragment, index=f.index, verdict=Verdict.UNKNOWN)
            for f in findings
            if f.bookie in unresponsive
        )
        return (*unknown, *(f for f in findings if f.verdict is Verdict.MISSING))

    async def _inspect(
        self,
        versioned: VersionedMetadata,
        judged: Sequence[Fragment],
        digest: EntryDigest,
        view: ClusterView,
        suspects: Collection[BookieId],
    ) -> Inspection:
        findings = await inspect_copies(
            judged,
            bookies=self.bookies,
            digest=digest,
            available=view.checked,
            suspects=view.initialised_after(versioned.stat.czxid).union(suspects),
            entry_bytes=entry_bytes_guess(versioned.metadata, digest),
            share=self.checked_share,
            rng=self.rng,
        )
        return Inspection(
            versioned=versioned, view=view, digest=digest, findings=under_orders(findings, view)
        )


async def inspect_tail(
    versioned: VersionedMetadata,
    *,
    bookies: Bookies,
    digest: EntryDigest,
    asked: Collection[BookieId],
    first_entry_id: int,
    last_entry_id: int,
) -> tuple[CopyFinding, ...]:
    """Read all these entries from the ``asked`` members of the last ensemble, and judge them. Both
    ends are inclusive. Fences nothing."""
    last = fragments(versioned.ledger_id, versioned.metadata, lac=first_entry_id - 1)[-1]
    return await inspect_copies(
        [replace(last, first_entry_id=first_entry_id, last_entry_id=last_entry_id)],
        bookies=bookies,
        digest=digest,
        available=asked,
        suspects=asked,
        entry_bytes=ENTRY_BYTES_GUESS,
    )


def entry_bytes_guess(metadata: LedgerMetadata, digest: EntryDigest) -> int:
    """Return the estimated stored size of an entry, computed from the metadata."""
    if not metadata.is_closed or metadata.last_entry_id < 0:
        return ENTRY_BYTES_GUESS
    overhead = HEADER_BYTES + digest.size
    length = max(0, metadata.length) // (metadata.last_entry_id + 1)
    return overhead + min(length, FRAME_BYTES_MAX)


def leaving_members(metadata: LedgerMetadata, view: ClusterView) -> tuple[BookieId, ...]:
    """Return the bookies that must leave the open fragment; none for a closed ledger.

    These are absent bookies that are not in maintenance, and draining ones whose order allows
    fencing (rule S16). A read-only bookie is no reason to fence, because an idle writer would lose
    its ledger. Java also takes the last but one fragment for open until its reader knows that the
    end is acknowledged (BookKeeper's pull request 3917); we know it from the metadata.
    """
    if metadata.is_closed:
        return ()
    members = frozenset(metadata.last_segment.ensemble)
    draining = view.orders.draining
    fenced = {b for b in members if (order := draining.get(b)) is not None and order.may_fence}
    absent = members - view.available - view.orders.maintenance.keys()
    return tuple(sorted(absent | (fenced & view.available)))


def _underreplicated(inspection: Inspection) -> RecoveryRequired | None:
    """Return the first entry of an OPEN ledger that is on fewer bookies than an ack quorum, and
    the members that lack it; None if there is no such entry.

    The writer does not notice: a reformatted bookie accepts new entries, so the fragment would stay
    as it is until the last copy is lost too.
    """
    metadata = inspection.metadata
    if metadata.state is not LedgerState.OPEN:
        return None
    lacked = [
        (finding.bookie, finding.bad)
        for finding in inspection.findings
        if finding.verdict is Verdict.MISSING and not finding.fragment.is_closed
    ]
    for entry_id, depth in overlaps(entries for _, entries in lacked):
        if depth > metadata.write_quorum - metadata.ack_quorum:
            return RecoveryRequired(
                versioned=inspection.versioned,
                view=inspection.view,
                lacking=tuple(sorted({b for b, entries in lacked if entry_id in entries})),
                first_lacking=entry_id,
            )
    return None


def first_damaged(
    findings: Sequence[CopyFinding], *, first_entry_id: int, last_entry_id: int
) -> int | None:
    """Return the first entry of the range of which some bookie has a damaged copy and none a good
    one.

    ``findings``: about every entry of one fragment. Both ends of the range are inclusive.
    """
    for entry_id in range(first_entry_id, last_entry_id + 1):
        holders = [f for f in findings if entry_id in f.entries]
        is_good = any(
            f.verdict in (Verdict.GOOD, Verdict.MISSING) and entry_id not in f for f in holders
        )
        if not is_good and any(entry_id in f.damaged for f in holders):
            return entry_id
    return None


def under_orders(findings: tuple[CopyFinding, ...], view: ClusterView) -> tuple[CopyFinding, ...]:
    """Return the findings as the operator's orders change them: a draining bookie counts as
    missing, an absent one in maintenance does not.

    Draining bookies were not asked, so they seem lost in ``findings``.
    """
    if not view.orders.draining and not view.orders.maintenance:
        return findings
    changed = []
    for finding in findings:
        is_seen = finding.bookie in view.available
        is_unanswered = finding.verdict is Verdict.UNKNOWN or not is_seen
        if finding.verdict is Verdict.BOOKIE_ABSENT and is_seen:
            finding = replace(finding, verdict=Verdict.DRAINING)
        elif is_unanswered and finding.bookie in view.orders.maintenance:
            finding = replace(finding, verdict=Verdict.IN_MAINTENANCE)
        changed.append(finding)
    return tuple(changed)

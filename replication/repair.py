"""The repair of one taken ledger: read, decide, copy, write, until it is whole or something is in the way.

A round reads the metadata afresh, judges every copy (``check``), plans (``plan``), copies
(``copying``) and writes all changed ensembles in one compare-and-set (rule S2) under the lock (rule
S3). A conflict begins another round, and so does a bookie of the ledger that comes or goes
meanwhile; what was copied is remembered as long as the target's registration is the same. A ledger
whose open last fragment misses a bookie is not touched: the outcome says so, and the worker comes
back after the open-ledger grace (``open_ledger``).
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.entry import EntryDigest
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    LockLostError,
    NoNodeError,
    NoSuchLedgerError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.fragments import Fragment, fragments
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.metadata import BookieId, LedgerMetadata, LedgerState
from ledgers.operations.opening import find_end, ledger_digest
from replication.check import check
from replication.cluster_view import ClusterView, ViewSource
from replication.copier import Copier, Memory
from replication.copying import CopyOutcome
from replication.open_ledger import OpenLedgers, WriterSighting, absent_members
from replication.outcome import DONE, MARKED_AGAIN, Outcome, waiting
from replication.plan import Blocked, Plan, Reason, Repair, plan_repair
from replication.queue import Queue, Take

log = structlog.get_logger()

ROUNDS_MAX = 10
"""Rounds of one repair before the ledger is put aside: each is a conflict, or a failed target."""
SECOND_CHECK_ENTRIES = 1_000
"""Copying more than this takes so long that the survivors are judged again before the unmark."""


class Repairer:
    """Repairs ledgers that the caller has taken. One for a worker; rounds of many ledgers interleave."""

    def __init__(
        self,
        *,
        queue: Queue,
        manager: LedgerManager,
        bookies: Bookies,
        views: ViewSource,
        open_ledgers: OpenLedgers,
        fallback_digest: EntryDigest,
        copier: Copier,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._queue = queue
        self._manager = manager
        self._bookies = bookies
        self._views = views
        self._open_ledgers = open_ledgers
        self._fallback_digest = fallback_digest
        self._copier = copier
        self._clock = clock
        self._rng = rng

    async def repair(self, take: Take, sighting: WriterSighting | None = None) -> Outcome:
        """Until the ledger is done or something stands in the way.

        ``sighting``: what an earlier outcome gave, once its grace is over. Raises SessionLostError
        and LockLostError (hold nothing more of this ledger), and UnavailableError when ZooKeeper
        does not answer.
        """
        memory = Memory()
        for _ in range(ROUNDS_MAX):
            try:
                outcome = await self._round(take, sighting, memory)
            except (ConflictError, NoNodeError):  # the metadata moved on, or is gone: read again
                continue
            except UnknownOutcomeError:
                if await self._queue.is_finished(take):
                    outcome = DONE
                else:
                    continue
            if outcome is not None:
                return replace(
                    outcome, entry_count=memory.entry_count, entry_bytes=memory.entry_bytes
                )
        detail = f"no success in {ROUNDS_MAX} rounds: its metadata or its bookies keep changing"
        return waiting(Reason.CONFLICTS, detail)

    async def _round(
        self, take: Take, sighting: WriterSighting | None, memory: Memory
    ) -> Outcome | None:
        """One round; None asks for another."""
        view = self._views.current
        try:
            versioned = await self._read(take.ledger_id)
        except CorruptionError as error:
            return waiting(Reason.CORRUPT_METADATA, str(error))
        if versioned is None:
            return DONE if await self._queue.finish(take) else MARKED_AGAIN
        if absent := absent_members(versioned.metadata, view):
            return await self._settle(take, versioned, sighting, absent, view)
        try:
            lac = await self._lac(versioned)
        except UnauthorizedError as error:
            return waiting(Reason.DIGEST_SUSPECT, str(error))
        except UnavailableError as error:
            return waiting(Reason.NO_ANSWER, str(error))
        if absent := absent_members(versioned.metadata, view, lac=lac):
            return await self._settle(take, versioned, sighting, absent, view)
        digest = ledger_digest(versioned.metadata, self._fallback_digest)
        plan = await self._plan(versioned, lac, digest, view, memory)
        if _is_abandoned(versioned.metadata, plan):
            return await self._recover(take, versioned, view)
        if plan.is_whole:
            if not self._is_unchanged(versioned.metadata.bookies, view):
                return None
            return DONE if await self._queue.finish(take) else MARKED_AGAIN
        outcomes = await self._copier.copy_all(plan, versioned.metadata, digest, view, memory)
        return await self._write(take, versioned, plan, outcomes, view)

    def _is_unchanged(self, bookies: Iterable[BookieId], view: ClusterView) -> bool:
        """Whether none of them has come, gone, or begun another life since the view was taken.

        The auditor may have handled such a loss already, and found no reason for another mark: the
        ledger was marked, or did not name the target yet.
        """
        now = self._views.current
        return all(now.czxid(bookie) == view.czxid(bookie) for bookie in bookies)

    async def _read(self, ledger_id: int) -> VersionedMetadata | None:
        """None for a ledger that is gone: believed only after a sync and a second read (rule S8)."""
        try:
            return await self._manager.read(ledger_id)
        except NoSuchLedgerError:
            await self._manager.sync(ledger_id)
        try:
            return await self._manager.read(ledger_id)
        except NoSuchLedgerError:
            return None

    async def _settle(
        self,
        take: Take,
        versioned: VersionedMetadata,
        sighting: WriterSighting | None,
        absent: Sequence[BookieId],
        view: ClusterView,
    ) -> Outcome | None:
        """An open fragment misses a bookie: leave it to its writer, or recover the ledger."""
        grace = await self._open_ledgers.judge(versioned, absent, sighting)
        if grace is not None:
            return waiting(grace.reason, grace.detail, grace)
        return await self._recover(take, versioned, view)

    async def _recover(
        self, take: Take, versioned: VersionedMetadata, view: ClusterView
    ) -> Outcome | None:
        """Recover and close the ledger, for the next round to repair it."""
        try:
            await self._open_ledgers.recover(versioned, view, guards=self._queue.guards(take))
        except (ConflictError, SessionLostError, LockLostError):
            raise
        except NoSuchLedgerError:
            return None
        except BookmenderError as error:
            return waiting(Reason.RECOVERY_FAILED, f"{error}{_distrust(versioned, view)}")
        return None

    async def _lac(self, versioned: VersionedMetadata) -> int:
        """The last entry known to be acknowledged. Errors are those of ``find_end``."""
        opened = await find_end(
            versioned, bookies=self._bookies, clock=self._clock, fallback=self._fallback_digest
        )
        return opened.lac

    async def _plan(
        self,
        versioned: VersionedMetadata,
        lac: int,
        digest: EntryDigest,
        view: ClusterView,
        memory: Memory,
    ) -> Plan:
        findings = await check(
            _judged(fragments(versioned.ledger_id, versioned.metadata, lac=lac), lac),
            bookies=self._bookies,
            digest=digest,
            available=view.available,
            distrusted=view.initialised_after(versioned.stat.czxid) | memory.refilled,
        )
        return plan_repair(
            versioned.metadata, findings, self._copier.targets(view, memory), rng=self._rng
        )

    async def _write(
        self,
        take: Take,
        versioned: VersionedMetadata,
        plan: Plan,
        outcomes: Sequence[CopyOutcome],
        view: ClusterView,
    ) -> Outcome | None:
        """Write what was copied whole, and say what was not. None: to be checked again."""
        pairs = list(zip(plan.repairs, outcomes, strict=True))
        moved = [
            repair
            for repair, outcome in pairs
            if outcome.is_complete
            and not repair.is_in_place
            and self._is_unchanged([repair.target], view)  # else it may have lost them again (S3)
        ]
        repaired = _repaired(versioned.metadata, moved)
        in_the_way = [*plan.blocked, *(b for r, o in pairs if (b := _blocked(r, o)) is not None)]
        may_unmark = (
            len(moved) == len(pairs)
            and not plan.blocked
            and sum(o.entry_count for o in outcomes) <= SECOND_CHECK_ENTRIES
            and self._is_unchanged(repaired.bookies, view)
        )
        if moved:
            write = self._manager.write_operation(take.ledger_id, repaired, read_as=versioned)
            if may_unmark:
                return DONE if await self._queue.finish(take, [write]) else MARKED_AGAIN
            await self._queue.write(take, [write])
        if in_the_way:
            return waiting(in_the_way[0].reason, "; ".join(b.detail for b in in_the_way))
        return None


def _distrust(versioned: VersionedMetadata, view: ClusterView) -> str:
    young = view.initialised_after(versioned.stat.czxid)
    named = sorted(young.intersection(versioned.metadata.last_segment.ensemble))
    if not named:
        return ""
    return f"; set up after the ledger was made, so its 'no' is not believed: {', '.join(named)}"


def _judged(found: Sequence[Fragment], lac: int) -> tuple[Fragment, ...]:
    """The fragments as far as they are known: of one whose end nobody knows, what is acknowledged."""
    return tuple(
        replace(fragment, last_entry_id=max(lac, fragment.first_entry_id - 1))
        if fragment.last_entry_id is None
        else fragment
        for fragment in found
    )


def _is_abandoned(metadata: LedgerMetadata, plan: Plan) -> bool:
    """Whether an open fragment lacks copies that no writer will add: a recovery has locked him out."""
    return metadata.state is LedgerState.IN_RECOVERY and any(
        blocked.reason is Reason.OPEN_FRAGMENT for blocked in plan.blocked
    )


def _repaired(metadata: LedgerMetadata, moved: Sequence[Repair]) -> LedgerMetadata:
    """All changed ensembles at once."""
    changes: dict[int, dict[int, BookieId]] = {}
    for repair in moved:
        changes.setdefault(repair.fragment.first_entry_id, {})[repair.index] = repair.target
    segments = tuple(
        segment.with_bookies(changes.get(segment.first_entry_id, {}))
        for segment in metadata.segments
    )
    return replace(metadata, segments=segments)


def _blocked(repair: Repair, outcome: CopyOutcome) -> Blocked | None:
    """Why a copy is not complete; None also when its target failed: another round takes another."""
    if outcome.without_copy:
        detail = (
            f"no good copy of {_listed(outcome.without_copy)} besides the one on {repair.replaced}"
        )
        return Blocked(reason=Reason.NO_COPY, detail=detail)
    if outcome.unknown:
        detail = f"no replica answered for {_listed(outcome.unknown)}"
        return Blocked(reason=Reason.NO_ANSWER, detail=detail)
    return None


def _listed(entry_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, entry_ids[:5]))
    if len(entry_ids) == 1:
        return f"entry {shown}"
    return f"{len(entry_ids)} entries ({shown}{', …' if len(entry_ids) > 5 else ''})"

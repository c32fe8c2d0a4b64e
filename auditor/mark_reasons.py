"""Records why ledgers are marked, and explains marks to people.

The payload of a mark is defined by Java and has no room for a reason. The leader records reasons
beside the marks, as versioned JSON:

- ``<ur>/bookmender/losses``: by bookie, since when it is or was lost or reformatted. One znode for
  all, because a znode for each mark would double the number of writes.
- ``<ur>/bookmender/findings/<ledger id>``: what a periodic check or fsck found wrong with the
  ledger. The znode is deleted after the mark. Workers read all entries from the bookies of a
  finding, because reading only the ends may find nothing wrong.

``MarkExplainer`` combines these with the drain orders and the bookies that the mark names.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import structlog

from ledgers.clock import Clock
from ledgers.errors import ConflictError, NoNodeError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.store import Delete, MetadataStore, children_if_any
from ledgers.tasks import gather_in_parts
from replication.history import NO_HISTORY, Event, History, Kind
from replication.marks import READS_AT_ONCE, MarkTree
from replication.orders import DrainOrder, OrderStore
from replication.records import (
    Record,
    Stored,
    TimeMs,
    read_record,
    read_stored,
    update_record,
)
from replication.transactions import Batcher
from replication.znodes import ClusterPaths, Mark, ledger_id_of_name

log = structlog.get_logger()

SWEEP_S = 60.0
"""Interval between two sweeps of findings. A finding without a mark is deleted in the second sweep
that sees it, because its mark may be about to be written."""
SWEPT_PER_S = 200.0
"""With many findings, sweeps are rarer: each finding costs ZooKeeper three reads."""
UNKNOWN = "unknown"
KEPT_MS = 7 * 86_400_000
"""Time that the loss of a bookie is kept after the bookie returned: marks may still be waiting."""
KEPT_MAX = 2_000
"""Bookies in the record. The losses that ended first are dropped first."""
CLOCKS_APART_MS = 10_000
"""Largest expected difference between the clocks of two leaders. It also covers marks that are
being written while the bookie returns."""


# --- The reasons of a mark ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReason:
    """One reason of a mark.

    ``cause``: lost, reformatted, drained, hand (an operator marked the ledger), unknown, or the
    name of a check. ``bookie``: None if the reason is not about a single bookie. ``since_ms``:
    wall clock; None if unknown. ``detail``: part of a sentence for an operator; may be empty.
    """

    cause: str
    bookie: BookieId | None = None
    since_ms: int | None = None
    detail: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkExplainer:
    """Explains marks from what was recorded at one moment."""

    losses: Mapping[BookieId, LossRecord] = field(default_factory=dict)
    are_losses_unreadable: bool = False
    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    findings: Mapping[int, Finding] = field(default_factory=dict)

    @classmethod
    async def read(
        cls, store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
    ) -> MarkExplainer:
        """Read what is needed to explain the marks of these ledgers."""
        losses = await read_stored(store, paths.losses, LossRecords.parse)
        return cls(
            losses=losses.value.bookies if losses.value else {},
            are_losses_unreadable=losses.is_unreadable,
            draining=(await OrderStore(store, paths).read()).draining,
            findings=await read_findings(store, paths, ledger_ids),
        )

    def explain(self, ledger_id: int, mark: Mark | None, *, is_private: bool) -> list[MarkReason]:
        """Return the reasons of a mark, at least one. ``mark``: None if it cannot be read.
        ``is_private``: True for a mark in our private queue."""
        finding = self.findings.get(ledger_id)
        reasons = [] if finding is None else finding.reasons()
        explained = {reason.bookie for reason in reasons}
        if mark is not None:
            reasons += [
                self._private_reason(bookie)
                if is_private
                else self._shared_reason(bookie, mark.ctime_ms)
                for bookie in mark.replicas
                if bookie not in explained
            ]
        return reasons or [MarkReason(cause="hand" if is_private else UNKNOWN)]

    def _private_reason(self, bookie: BookieId) -> MarkReason:
        order = self.draining.get(bookie)
        if order is None:
            return MarkReason(cause="hand", bookie=bookie, detail="or its drain was cancelled")
        return MarkReason(cause="drained", bookie=bookie, since_ms=order.since_ms)

    def _shared_reason(self, bookie: BookieId, ctime_ms: int | None) -> MarkReason:
        loss = self.losses.get(bookie)
        if loss is None or loss.had_ended_at(ctime_ms):
            detail = "marked by another auditor"
            if self.are_losses_unreadable:
                detail = "the record of lost bookies cannot be read"
            return MarkReason(cause=UNKNOWN, bookie=bookie, detail=detail)
        has_returned = loss.kind is LossKind.LOST and loss.ended_ms is not None
        return MarkReason(
            cause=loss.kind.value,
            bookie=bookie,
            since_ms=loss.since_ms,
            detail="registered again" if has_returned else "",
        )


# --- Losses of bookies ----------------------------------------------------------------------------


class LossKind(enum.Enum):
    """Stored, and shown by commands: never change a value."""

    LOST = "lost"
    REFORMATTED = "reformatted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord:
    """The loss of one bookie's copies. Times are wall-clock milliseconds.

    ``ended_ms``: when the bookie returned, or, for a reformatted bookie, when all its ledgers were
    marked; None until then.
    """

    kind: LossKind
    since_ms: TimeMs
    ended_ms: TimeMs | None = None

    def had_ended_at(self, ctime_ms: int | None) -> bool:
        """True if a mark created at ``ctime_ms`` cannot come from this loss. None: the creation
        time is unknown.

        An older mark may well come from this loss: an existing mark is extended, and keeps its
        creation time.
        """
        if self.ended_ms is None or ctime_ms is None:
            return False
        return ctime_ms > self.ended_ms + CLOCKS_APART_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecords(Record):
    bookies: Mapping[BookieId, LossRecord] = field(default_factory=dict)


def updated_losses(
    known: Mapping[BookieId, LossRecord], current: Mapping[BookieId, LossRecord], *, now_ms: int
) -> dict[BookieId, LossRecord]:
    """Return the losses to store. ``current``: the losses that exist now.

    A loss that continues keeps its start. A loss that is not in ``current`` has ended, and is kept
    for ``KEPT_MS``.
    """
    losses = dict(current)
    for bookie, loss in known.items():
        now = current.get(bookie)
        if now is None:
            ended_ms = now_ms if loss.ended_ms is None else loss.ended_ms
            if now_ms - ended_ms < KEPT_MS:
                losses[bookie] = replace(loss, ended_ms=ended_ms)
        elif now.kind is loss.kind and loss.ended_ms is None:
            losses[bookie] = loss
    if len(losses) > KEPT_MAX:
        by_end = sorted(losses, key=lambda b: (losses[b].ended_ms is None, losses[b].ended_ms or 0))
        losses = {bookie: losses[bookie] for bookie in by_end[-KEPT_MAX:]}
    return losses


def loss_events(
    before: Mapping[BookieId, LossRecord],
    after: Mapping[BookieId, LossRecord],
    *,
    registered: Collection[BookieId],
) -> list[Event]:
    """Return what the change of the stored losses means for the history."""
    events = []
    for bookie, loss in sorted(after.items()):
        known = before.get(bookie)
        is_same = known is not None and known.kind is loss.kind and known.ended_ms is None
        if loss.ended_ms is None and not is_same:
            is_lost = loss.kind is LossKind.LOST
            kind = Kind.BOOKIE_LOST if is_lost else Kind.BOOKIE_REFORMATTED
            since_ms = loss.since_ms if is_lost else None
            events.append(Event(kind=kind, bookies=(bookie,), since_ms=since_ms))
        elif loss.ended_ms is not None and is_same and loss.kind is LossKind.LOST:
            kind = Kind.BOOKIE_RETURNED if bookie in registered else Kind.LOSS_ENDED
            events.append(Event(kind=kind, bookies=(bookie,)))
    return events


async def read_losses(store: MetadataStore, paths: ClusterPaths) -> Mapping[BookieId, LossRecord]:
    """Return the recorded losses; none without a readable record."""
    stored = await read_record(store, paths.losses, LossRecords.parse)
    return {} if stored is None else stored.bookies


# --- Findings of checks ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Record):
    """A finding of a check: what is wrong with a ledger.

    ``check``: the name of the check; ``UNKNOWN`` if the finding is unreadable. ``bookies``: those
    with damaged copies; none if copies are only misplaced, or if the finding is unreadable.
    ``detail``: a sentence for an operator. ``found_ms``: wall clock.
    """

    check: str
    bookies: tuple[BookieId, ...]
    detail: str
    found_ms: TimeMs

    @property
    def may_be_damage(self) -> bool:
        """True if a bookie has damaged copies, or may have: an unreadable finding counts."""
        return bool(self.bookies) or self.check == UNKNOWN

    def reasons(self) -> list[MarkReason]:
        return [
            MarkReason(
                cause=self.check, bookie=bookie, since_ms=self.found_ms or None, detail=self.detail
            )
            for bookie in self.bookies or (None,)
        ]

    def added_to(self, earlier: Finding | None) -> Self:
        """Return this finding with the bookies of an earlier one added."""
        before = () if earlier is None else earlier.bookies
        return replace(self, bookies=tuple(sorted({*self.bookies, *before})))


UNREADABLE_FINDING = Finding(
    check=UNKNOWN, bookies=(), detail="the finding cannot be read", found_ms=0
)


_ZnodeVersion = tuple[int, int]
"""Czxid and version of a finding's znode."""


class Findings:
    """Writes and sweeps findings, through ``batcher``, whose guards prove the leadership (rule
    S9)."""

    def __init__(
        self,
        store: MetadataStore,
        batcher: Batcher,
        paths: ClusterPaths,
        clock: Clock,
        history: History = NO_HISTORY,
    ) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths
        self._clock = clock
        self._history = history
        self._unmarked: dict[int, _ZnodeVersion] = {}
        """Findings that had no mark in the last sweep."""

    async def write(
        self, ledger_id: int, check: str, bookies: Collection[BookieId], detail: str
    ) -> None:
        """Write a finding. The caller then writes the mark within ``SWEEP_S``; otherwise a sweep
        may delete the finding.

        The finding replaces an earlier one and keeps its bookies, because their copies may not be
        repaired yet. An unreadable one may name any bookie of the ledger's marks. Raises
        UnavailableError.
        """
        finding = Finding(
            check=check,
            bookies=tuple(sorted(bookies)),
            detail=detail,
            found_ms=self._clock.wall_ms(),
        )
        await update_record(
            self._store,
            self._paths.finding(ledger_id),
            Finding.parse,
            finding.added_to,
            apply=self._batcher.apply,
            known=Stored(),
            in_doubt=lambda: self._finding_in_doubt(ledger_id),
        )
        self._history.record(
            Event(
                kind=Kind.FINDING,
                ledger_id=ledger_id,
                bookies=finding.bookies,
                cause=check,
                reason=detail,
            )
        )

    async def _finding_in_doubt(self, ledger_id: int) -> Finding:
        """Return what an unreadable finding counts as: damage on each bookie of the ledger's marks,
        as for a worker that reads it."""
        marks = [await tree.read(ledger_id) for tree in self._mark_trees()]
        bookies = {bookie for seen in marks if seen for bookie in seen.replicas}
        return replace(UNREADABLE_FINDING, bookies=tuple(sorted(bookies)))

    async def run(self) -> None:
        """Sweep regularly, until cancelled. Raises SessionLostError or LeadershipLostError."""
        finding_count = 0
        while True:
            await self._clock.sleep(SWEEP_S + finding_count / SWEPT_PER_S)
            try:
                finding_count = await self.sweep()
            except (UnavailableError, UnauthorizedError) as error:  # the next sweep does the rest
                log.warning("findings.sweep_failed", error=str(error), retry_s=SWEEP_S)

    async def sweep(self) -> int:
        """Delete the findings whose marks are gone, because their ledgers were repaired or found
        healthy. Return the number of findings before."""
        ledger_ids = await _ledgers_with_findings(self._store, self._paths)
        found = await gather_in_parts(self._sweep_one, ledger_ids, at_once=READS_AT_ONCE)
        self._unmarked = {
            ledger_id: version
            for ledger_id, version in zip(ledger_ids, found, strict=True)
            if version is not None
        }
        return len(ledger_ids)

    async def _sweep_one(self, ledger_id: int) -> _ZnodeVersion | None:
        """Return the finding's version if it has no mark in this sweep for the first time."""
        path = self._paths.finding(ledger_id)
        try:
            stat = await self._store.exists(path)
            if stat is None or any([await tree.holds(ledger_id) for tree in self._mark_trees()]):
                return None
            version = (stat.czxid, stat.version)
            if self._unmarked.get(ledger_id) != version:
                return version
            # If the finding was written again since, its mark is about to follow.
            with suppress(NoNodeError, ConflictError):
                await self._batcher.apply(Delete(path=path, version=stat.version))
        except UnauthorizedError as error:
            log.warning("finding.access_denied", ledger_id=ledger_id, error=str(error))
        return None

    def _mark_trees(self) -> tuple[MarkTree, MarkTree]:
        return MarkTree(self._store, self._paths), MarkTree(self._store, self._paths.private)


async def read_findings(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
) -> dict[int, Finding]:
    """Return the findings of these ledgers; ``UNREADABLE_FINDING`` for an unreadable one."""
    with_findings = await _ledgers_with_findings(store, paths)
    wanted = sorted(set(with_findings).intersection(ledger_ids))

    async def read(ledger_id: int) -> Finding | None:
        stored = await read_stored(store, paths.finding(ledger_id), Finding.parse)
        return UNREADABLE_FINDING if stored.is_unreadable else stored.value

    findings = await gather_in_parts(read, wanted, at_once=READS_AT_ONCE)
    return {i: each for i, each in zip(wanted, findings, strict=True) if each is not None}


async def _ledgers_with_findings(store: MetadataStore, paths: ClusterPaths) -> list[int]:
    """Return the ids of the ledgers that have a finding, ascending."""
    names = await children_if_any(store, paths.findings)
    return sorted(i for i in map(ledger_id_of_name, names) if i is not None)

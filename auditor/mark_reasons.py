"""Records why ledgers are marked, marks what a check or fsck found wrong, and explains marks to
people.

The payload of a mark is defined by Java and has no room for a reason. The leader records reasons
beside the marks, as versioned JSON:

- ``<ur>/bookmender/losses``: by bookie, since when it is or was lost or reformatted. One znode for
  all, because a znode for each mark would double the number of writes.
- ``<ur>/bookmender/findings/<ledger id>``: what a periodic check or fsck found wrong with the
  ledger. The znode is deleted after the mark. Workers read all entries from the bookies of a
  finding, because reading only the ends may find nothing wrong.

``MarkExplainer`` combines these with the drain orders and the bookies that the mark names.

What a check or fsck found is marked in the queue where the mark helps. A worker of Java's
AutoRecovery decides with its LedgerChecker, which reads the first and the last entry of each
bookie's part of a fragment (``auditorLedgerVerificationPercentage`` is 0 by default). The
LedgerChecker treats every answer except the entry as a loss, and checks no digest. It cannot detect
any other damage: it finds such a ledger healthy and deletes the mark within milliseconds. If it
detects damage, it copies that whole part again. So damage that Java can detect is marked in the
shared queue, and other damage in our private queue, where workers read the finding.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import structlog

from auditor.marker import Marker
from ledgers.clock import Clock
from ledgers.errors import ConflictError, NoNodeError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId, Fragment
from ledgers.store import Delete, MetadataStore, children_if_any
from ledgers.tasks import gather_in_parts
from replication.copy_reader import ReadFailures
from replication.history import NO_HISTORY, Event, History, Kind
from replication.marks import READS_AT_ONCE, MarkTree, marked_ledger_ids
from replication.orders import DrainOrder, OrderStore
from replication.records import Record, Stored, TimeMs, read_record, read_stored, update_record
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
        for bookie in mark.replicas if mark is not None else ():
            if bookie in explained:
                continue
            order, loss = self.draining.get(bookie), self.losses.get(bookie)
            since_ms = None
            if is_private and order is not None:
                cause, detail, since_ms = "drained", "", order.since_ms
            elif is_private:
                cause, detail = "hand", "or its drain was cancelled"
            elif mark is not None and loss is not None and not loss.had_ended_at(mark.ctime_ms):
                has_returned = loss.kind is LossKind.LOST and loss.ended_ms is not None
                cause, detail = loss.kind.value, "registered again" if has_returned else ""
                since_ms = loss.since_ms
            elif self.are_losses_unreadable:
                cause, detail = UNKNOWN, "the record of lost bookies cannot be read"
            else:
                cause, detail = UNKNOWN, "marked by another auditor"
            reasons.append(MarkReason(cause=cause, bookie=bookie, since_ms=since_ms, detail=detail))
        return reasons or [MarkReason(cause="hand" if is_private else UNKNOWN)]


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


# --- What Java's workers can detect ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaVisibility:
    """The damaged bookies of a ledger. ``visible``: bookies with damage that Java's workers can
    detect. ``hidden``: bookies with other damage. A bookie may be in both."""

    visible: frozenset[BookieId] = frozenset()
    hidden: frozenset[BookieId] = frozenset()

    @property
    def bookies(self) -> frozenset[BookieId]:
        return self.visible | self.hidden

    @property
    def needs_private_mark(self) -> bool:
        """True also if no bookie is damaged, for example if copies are only misplaced."""
        return bool(self.hidden) or not self.visible


def java_visibility(
    fragments: Iterable[Fragment],
    damage: Mapping[BookieId, ReadFailures],
    *,
    registered: Collection[BookieId],
) -> JavaVisibility:
    """Return which damage of a ledger Java's workers can detect.

    ``fragments``: of the ledger. A fragment without a known end is ignored, because Java cannot
    check its last entry. ``damage``: at least the first and the last bad entry of each fragment.
    Damage outside the fragments counts as hidden: one check too many is better than one too few.
    """
    visible: set[BookieId] = set()
    hidden: set[BookieId] = set()
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            found = damage.get(bookie)
            if found is None or fragment.last_entry_id is None:
                continue
            entries = fragment.entries_of(index)
            if not entries or not (found := found.between(entries[0], entries[-1])).bad_count:
                continue
            # A writer of an open fragment may have added other entries by the time that Java reads.
            ends = (entries[0], entries[-1]) if fragment.is_closed else (entries[0],)
            is_visible = bookie not in registered or any(
                end in found.absent or end in found.unreadable for end in ends
            )
            (visible if is_visible else hidden).add(bookie)
    hidden.update(damage.keys() - visible)
    return JavaVisibility(visible=frozenset(visible), hidden=frozenset(hidden))


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


@dataclass
class Findings:
    """Writes and sweeps findings, and marks their ledgers, through ``batcher``, whose guards prove
    the leadership (rule S9)."""

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    clock: Clock
    history: History = NO_HISTORY
    _unmarked: dict[int, _ZnodeVersion] = field(default_factory=dict, init=False)
    """Findings that had no mark in the last sweep."""
    _shared: Marker = field(init=False)
    _private: Marker = field(init=False)

    def __post_init__(self) -> None:
        store, batcher, clock = self.store, self.batcher, self.clock
        self._shared = Marker(store, batcher, self.paths, clock)
        self._private = Marker(store, batcher, self.paths.private, clock)

    async def mark(
        self, ledger_id: int, check: str, visibility: JavaVisibility, detail: str
    ) -> bool:
        """Write a finding, and mark the ledger in the shared queue, the private queue, or both.
        Return True if a mark is new or names more bookies now. Raises UnavailableError.

        ``visibility``: of the damaged bookies; of none if copies are only misplaced. The private
        mark is written first, so that a worker which completes the shared mark meanwhile leaves the
        private one.
        """
        await self.write(ledger_id, check, visibility.bookies, detail)
        has_changed = False
        if visibility.needs_private_mark:
            has_changed = await self._private.mark(ledger_id, visibility.hidden)
        if visibility.visible:
            has_changed |= await self._shared.mark(ledger_id, visibility.visible)
        return has_changed

    async def write(
        self, ledger_id: int, check: str, bookies: Collection[BookieId], detail: str
    ) -> None:
        """Write a finding. The caller then writes the mark within ``SWEEP_S``; otherwise a sweep
        may delete the finding.

        The finding replaces an earlier one and keeps its bookies, because their copies may not be
        repaired yet. An unreadable one may name any bookie of the ledger's marks. Raises
        UnavailableError.
        """

        async def in_doubt() -> Finding:
            """Return what an unreadable finding counts as: damage on each bookie of the ledger's
            marks, as for a worker that reads it."""
            marks = [await tree.read(ledger_id) for tree in self._mark_trees()]
            named = {bookie for seen in marks if seen for bookie in seen.replicas}
            return replace(UNREADABLE_FINDING, bookies=tuple(sorted(named)))

        finding = Finding(
            check=check,
            bookies=tuple(sorted(bookies)),
            detail=detail,
            found_ms=self.clock.wall_ms(),
        )
        await update_record(
            self.store,
            self.paths.finding(ledger_id),
            Finding.parse,
            finding.added_to,
            apply=self.batcher.apply,
            known=Stored(),
            in_doubt=in_doubt,
        )
        self.history.record(
            Event(
                kind=Kind.FINDING,
                ledger_id=ledger_id,
                bookies=finding.bookies,
                cause=check,
                reason=detail,
            )
        )

    async def run(self) -> None:
        """Sweep regularly, until cancelled. Raises SessionLostError or LeadershipLostError."""
        finding_count = 0
        while True:
            await self.clock.sleep(SWEEP_S + finding_count / SWEPT_PER_S)
            try:
                finding_count = await self.sweep()
            except (UnavailableError, UnauthorizedError) as error:  # the next sweep does the rest
                log.warning("findings.sweep_failed", error=str(error), retry_s=SWEEP_S)

    async def sweep(self) -> int:
        """Delete the findings whose marks are gone, because their ledgers were repaired or found
        healthy. Return the number of findings before."""
        ledger_ids = await _ledgers_with_findings(self.store, self.paths)
        found = await gather_in_parts(self._sweep_one, ledger_ids, at_once=READS_AT_ONCE)
        self._unmarked = {
            ledger_id: version
            for ledger_id, version in zip(ledger_ids, found, strict=True)
            if version is not None
        }
        return len(ledger_ids)

    async def _sweep_one(self, ledger_id: int) -> _ZnodeVersion | None:
        """Return the finding's version if it has no mark in this sweep for the first time."""
        path = self.paths.finding(ledger_id)
        try:
            stat = await self.store.exists(path)
            if stat is None or any([await tree.holds(ledger_id) for tree in self._mark_trees()]):
                return None
            version = (stat.czxid, stat.version)
            if self._unmarked.get(ledger_id) != version:
                return version
            # If the finding was written again since, its mark is about to follow.
            with suppress(NoNodeError, ConflictError):
                await self.batcher.apply(Delete(path=path, version=stat.version))
        except UnauthorizedError as error:
            log.warning("finding.access_denied", ledger_id=ledger_id, error=str(error))
        return None

    def _mark_trees(self) -> tuple[MarkTree, MarkTree]:
        return MarkTree(self.store, self.paths), MarkTree(self.store, self.paths.private)


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


# --- The private queue ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateQueue:
    """The ledgers marked only in our private queue. Ids ascend.

    ``damaged``: ledgers with a finding that names bookies. ``others``: ledgers marked by an
    operator's order (a drain, or a repair by hand), which may have all their copies.
    """

    damaged: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.damaged) + len(self.others)

    @property
    def ledger_ids(self) -> list[int]:
        return sorted((*self.damaged, *self.others))


async def read_private_queue(
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    shared: Collection[int],
    known_damaged: Collection[int] = (),
) -> PrivateQueue:
    """Read which ledgers are marked only in our private queue.

    ``shared``: the ledgers marked in the shared queue. ``known_damaged``: ledgers found damaged by
    an earlier call. A finding stays as long as its mark, so these findings need not be read again.
    """
    ledger_ids = set(await marked_ledger_ids(store, paths.private)).difference(shared)
    damaged = ledger_ids.intersection(known_damaged)
    findings = await read_findings(store, paths, sorted(ledger_ids - damaged))
    damaged |= {ledger_id for ledger_id, found in findings.items() if found.may_be_damage}
    return PrivateQueue(damaged=tuple(sorted(damaged)), others=tuple(sorted(ledger_ids - damaged)))

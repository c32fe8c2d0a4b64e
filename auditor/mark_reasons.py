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
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import structlog

from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import Create, Delete, MetadataStore, SetData, children_if_any
from ledgers.tasks import gather_in_parts
from replication.marks import READS_AT_ONCE, MarkTree
from replication.orders import DrainOrder, OrderStore
from replication.transactions import Batcher
from replication.znodes import (
    ClusterPaths,
    Mark,
    as_text,
    ensure_znode,
    ledger_id_of_name,
    object_field,
    parse_record,
    read_if_allowed,
    read_record,
    text_field,
    texts_field,
    time_field,
)

log = structlog.get_logger()

SWEEP_S = 60.0
"""Interval between two sweeps of findings. A finding without a mark is deleted in the second sweep
that sees it, because its mark may be about to be written."""
SWEPT_PER_S = 200.0
"""With many findings, sweeps are rarer: each finding costs ZooKeeper three reads."""
WRITE_TRIES_MAX = 3
KEPT_MS = 7 * 86_400_000
"""How long the loss of a bookie is kept after the bookie returned: marks may still be waiting."""
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
    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    findings: Mapping[int, Finding] = field(default_factory=dict)

    @classmethod
    async def read(
        cls, store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
    ) -> MarkExplainer:
        """Read what is needed to explain the marks of these ledgers."""
        return cls(
            losses=await read_losses(store, paths),
            draining=(await OrderStore(store, paths).read()).draining,
            findings=await read_findings(store, paths, ledger_ids),
        )

    def explain(self, ledger_id: int, mark: Mark | None, *, is_own: bool) -> list[MarkReason]:
        """Return the reasons of a mark, at least one. ``mark``: None if it cannot be read.
        ``is_own``: True for a mark in our private queue."""
        finding = self.findings.get(ledger_id)
        reasons = [] if finding is None else finding.reasons()
        explained = {reason.bookie for reason in reasons}
        if mark is not None:
            reasons += [
                self._own_reason(bookie) if is_own else self._shared_reason(bookie, mark.ctime_ms)
                for bookie in mark.replicas
                if bookie not in explained
            ]
        return reasons or [MarkReason(cause="hand" if is_own else "unknown")]

    def _own_reason(self, bookie: BookieId) -> MarkReason:
        order = self.draining.get(bookie)
        if order is None:
            return MarkReason(cause="hand", bookie=bookie, detail="or its drain was cancelled")
        return MarkReason(cause="drained", bookie=bookie, since_ms=order.since_ms)

    def _shared_reason(self, bookie: BookieId, ctime_ms: int | None) -> MarkReason:
        loss = self.losses.get(bookie)
        if loss is None or loss.had_ended_at(ctime_ms):
            return MarkReason(cause="unknown", bookie=bookie, detail="marked by another auditor")
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
    since_ms: int
    ended_ms: int | None = None

    def had_ended_at(self, ctime_ms: int | None) -> bool:
        """True if a mark created at ``ctime_ms`` cannot come from this loss. None: the creation
        time is unknown.

        An older mark may well come from this loss: an existing mark is extended, and keeps its
        creation time.
        """
        if self.ended_ms is None or ctime_ms is None:
            return False
        return ctime_ms > self.ended_ms + CLOCKS_APART_MS

    def to_record(self) -> dict[str, object]:
        record: dict[str, object] = {"kind": self.kind.value, "since_ms": self.since_ms}
        return record if self.ended_ms is None else {**record, "ended_ms": self.ended_ms}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Raises CorruptionError."""
        try:
            kind = LossKind(text_field(record, "kind"))
        except ValueError as error:
            raise CorruptionError("this release does not know this kind of loss") from error
        has_ended = record.get("ended_ms") is not None
        return cls(
            kind=kind,
            since_ms=time_field(record, "since_ms"),
            ended_ms=time_field(record, "ended_ms") if has_ended else None,
        )


def updated_losses(
    known: Mapping[BookieId, LossRecord], current: Mapping[BookieId, LossRecord], *, now_ms: int
) -> dict[BookieId, LossRecord]:
    """Return the losses to store. ``current``: the losses that exist now.

    A loss that goes on keeps its start. A loss that is not in ``current`` has ended, and is kept
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


def losses_to_bytes(losses: Mapping[BookieId, LossRecord]) -> bytes:
    bookies = {bookie: loss.to_record() for bookie, loss in sorted(losses.items())}
    return json.dumps({"version": 1, "bookies": bookies}).encode()


async def read_losses(store: MetadataStore, paths: ClusterPaths) -> dict[BookieId, LossRecord]:
    """Return the recorded losses. Entries that cannot be read are left out."""
    bookies = (
        await read_if_allowed(
            store, losses_path(paths), lambda record: object_field(record, "bookies")
        )
        or {}
    )
    losses: dict[BookieId, LossRecord] = {}
    for name in bookies:
        try:
            losses[BookieId(as_text(name, "bookie"))] = LossRecord.from_record(
                object_field(bookies, name)
            )
        except CorruptionError:
            continue
    return losses


def losses_path(paths: ClusterPaths) -> str:
    return f"{paths.private.directory}/losses"


# --- Findings of checks ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found wrong with a ledger.

    ``check``: the name of the check. ``bookies``: those with damaged copies; none if copies are
    only misplaced. ``detail``: a sentence for an operator. ``found_ms``: wall clock.
    """

    check: str
    bookies: tuple[BookieId, ...]
    detail: str
    found_ms: int

    def reasons(self) -> list[MarkReason]:
        return [
            MarkReason(cause=self.check, bookie=bookie, since_ms=self.found_ms, detail=self.detail)
            for bookie in self.bookies or (None,)
        ]

    def with_bookies_of(self, earlier: bytes) -> Self:
        """Return this finding with the bookies of an earlier stored finding added. If that cannot
        be parsed, nothing is added."""
        try:
            before = self.from_record(parse_record(earlier))
        except CorruptionError:
            return self
        return replace(self, bookies=tuple(sorted({*self.bookies, *before.bookies})))

    def to_json(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            check=text_field(record, "check"),
            bookies=tuple(map(BookieId, texts_field(record, "bookies"))),
            detail=text_field(record, "detail"),
            found_ms=time_field(record, "found_ms"),
        )


_ZnodeVersion = tuple[int, int]
"""Czxid and version of a finding's znode."""


class Findings:
    """Writes and sweeps findings, through ``batcher``, whose guards prove the leadership (rule
    S9)."""

    def __init__(
        self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths, clock: Clock
    ) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths
        self._clock = clock
        self._has_directory = False
        self._unmarked: dict[int, _ZnodeVersion] = {}
        """Findings that had no mark in the last sweep."""

    async def write(
        self, ledger_id: int, check: str, bookies: Collection[BookieId], detail: str
    ) -> None:
        """Write a finding. The caller writes the mark afterwards, within ``SWEEP_S``.

        An earlier finding is replaced, and its bookies are kept, because their copies may not be
        repaired yet. Raises UnavailableError.
        """
        finding = Finding(
            check=check,
            bookies=tuple(sorted(bookies)),
            detail=detail,
            found_ms=self._clock.wall_ms(),
        )
        path = self._paths.finding(ledger_id)
        for _ in range(WRITE_TRIES_MAX):
            await self._create_directory()
            try:
                return await self._create_or_replace(path, finding)
            except NoNodeError:  # the directory was deleted by hand, or the finding just swept
                self._has_directory = False
            except ConflictError:
                continue  # another client wrote a finding meanwhile
        raise UnavailableError("other clients keep changing or deleting the finding", path=path)

    async def _create_or_replace(self, path: str, finding: Finding) -> None:
        """Raises NoNodeError without a directory. Raises NoNodeError or ConflictError if another
        client deleted or changed the finding meanwhile."""
        try:
            await self._batcher.apply(Create(path=path, data=finding.to_json()))
        except NodeExistsError:
            earlier, stat = await self._store.get(path)
            data = finding.with_bookies_of(earlier).to_json()
            await self._batcher.apply(SetData(path=path, data=data, version=stat.version))

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
            if stat is None or await self._is_marked(ledger_id):
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

    async def _is_marked(self, ledger_id: int) -> bool:
        trees = (MarkTree(self._store, self._paths), MarkTree(self._store, self._paths.private))
        return any([await tree.holds(ledger_id) for tree in trees])

    async def _create_directory(self) -> None:
        """Create the directory of findings, without the batcher: a directory that is created in a
        batch disappears if the batch fails. The empty directory proves nothing, so it needs no
        guard."""
        if not self._has_directory:
            await ensure_znode(self._store, self._paths.findings)
            self._has_directory = True


async def read_findings(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
) -> dict[int, Finding]:
    """Return the findings of these ledgers. Findings that cannot be read are left out."""
    with_findings = await _ledgers_with_findings(store, paths)
    wanted = sorted(set(with_findings).intersection(ledger_ids))

    async def read(ledger_id: int) -> Finding | None:
        try:
            return await read_record(store, paths.finding(ledger_id), Finding.from_record)
        except UnauthorizedError as error:
            log.warning("finding.access_denied", ledger_id=ledger_id, error=str(error))
            return None

    findings = await gather_in_parts(read, wanted, at_once=READS_AT_ONCE)
    return {i: each for i, each in zip(wanted, findings, strict=True) if each is not None}


async def _ledgers_with_findings(store: MetadataStore, paths: ClusterPaths) -> list[int]:
    """Return the ids of the ledgers that have a finding, ascending."""
    names = await children_if_any(store, paths.findings)
    return sorted(i for i in map(ledger_id_of_name, names) if i is not None)

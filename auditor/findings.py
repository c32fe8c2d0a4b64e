"""What a periodic check found wrong with a ledger: ``<ur>/bookmender/findings/<ledger id>``,
versioned JSON.

A mark itself cannot say why it was made: its payload is Java's. For a lost bookie the reason
follows from ``causes``; what a check, or fsck, found stands here, one znode a ledger, until the
mark is gone. Workers go by ``bookies``, too: those are asked for all that they should have, as a
look at the ends may find nothing wrong.

Why a ledger is marked. A mark's payload is Java's and cannot say; a znode for each would double
the writes.

So the leader notes, per bookie, why its copies are missing: ``<ur>/bookmender/causes``, one znode,
versioned JSON. The reason of a mark follows from the replicas it names, from the orders
(``draining``) and from what a periodic check found (``findings``).
"""

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
"""Between two looks at which marks are gone: one that has none may have it to come, and is looked
at once more."""
SWEPT_PER_S = 200.0
"""Findings looked at; where they are many, the looks are fewer: each finding costs ZooKeeper three
reads."""

TRIES_MAX = 3
"""To write a finding whose directory is not there."""


Sighting = tuple[int, int]
"""Of a finding's znode: czxid and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``check``: the check's name. ``bookies``: whose copies are at fault; none for a placement.

    ``detail`` is a sentence for an operator. ``found_ms``: wall-clock.
    """

    check: str
    bookies: tuple[BookieId, ...]
    detail: str
    found_ms: int

    def beside(self, before: bytes) -> Self:
        """With the bookies of an earlier one, as it stands in its znode; alone where that cannot be
        read."""
        try:
            earlier = self.from_record(parse_record(before))
        except CorruptionError:
            return self
        return replace(self, bookies=tuple(sorted({*self.bookies, *earlier.bookies})))

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


class Findings:
    """The leader's: written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(
        self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths, clock: Clock
    ) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths
        self._clock = clock
        self._has_directory = False
        self._unmarked: dict[int, Sighting] = {}
        """Findings that had no mark at the last look."""

    async def write(
        self, ledger_id: int, check: str, bookies: Collection[BookieId], detail: str
    ) -> None:
        """To be followed by the mark, within ``SWEEP_S``. A later finding takes an earlier one's
        znode, and adds its bookies to those: what was found first may not be mended yet.

        Raises UnavailableError.
        """
        finding = Finding(
            check=check,
            bookies=tuple(sorted(bookies)),
            detail=detail,
            found_ms=self._clock.wall_ms(),
        )
        path = self._paths.finding(ledger_id)
        for _ in range(TRIES_MAX):
            await self._make_directory()
            try:
                return await self._put(path, finding)
            except NoNodeError:  # somebody's hand took the directory away, or it was swept just now
                self._has_directory = False
            except ConflictError:
                continue  # somebody else's finding
        raise UnavailableError(
            "a finding is deleted, or written by others, again and again", path=path
        )

    async def _put(self, path: str, finding: Finding) -> None:
        """Raises NoNodeError where there is no directory, and like ConflictError when others were
        quicker."""
        try:
            await self._batcher.apply(Create(path=path, data=finding.to_json()))
        except NodeExistsError:
            data, stat = await self._store.get(path)
            data = finding.beside(data).to_json()
            await self._batcher.apply(SetData(path=path, data=data, version=stat.version))

    async def run(self) -> None:
        """Sweep now and then, until cancelled. Raises SessionLostError or LeadershipLostError."""
        seen_count = 0
        while True:
            await self._clock.sleep(SWEEP_S + seen_count / SWEPT_PER_S)
            try:
                seen_count = await self.sweep()
            except (UnavailableError, UnauthorizedError) as error:  # its rest goes with the next
                log.warning("findings.sweep_failed", error=str(error), retry_s=SWEEP_S)

    async def sweep(self) -> int:
        """Remove the findings whose marks are gone: their ledgers were repaired, or found whole.

        Returns how many were looked at.
        """
        ledger_ids = await _noted(self._store, self._paths)
        found = await gather_in_parts(self._sweep_one, ledger_ids, at_once=READS_AT_ONCE)
        self._unmarked = {
            ledger_id: seen
            for ledger_id, seen in zip(ledger_ids, found, strict=True)
            if seen is not None
        }
        return len(ledger_ids)

    async def _sweep_one(self, ledger_id: int) -> Sighting | None:
        """None unless it has no mark, and is to be looked at once more."""
        path = self._paths.finding(ledger_id)
        try:
            stat = await self._store.exists(path)
            if stat is None or await self._is_marked(ledger_id):
                return None
            seen = (stat.czxid, stat.version)
            if self._unmarked.get(ledger_id) != seen:
                return seen
            # A finding that was written since has a mark to come.
            with suppress(NoNodeError, ConflictError):
                await self._batcher.apply(Delete(path=path, version=stat.version))
        except UnauthorizedError as error:
            log.warning("finding.access_denied", ledger_id=ledger_id, error=str(error))
        return None

    async def _is_marked(self, ledger_id: int) -> bool:
        trees = (MarkTree(self._store, self._paths), MarkTree(self._store, self._paths.private))
        return any([await tree.holds(ledger_id) for tree in trees])

    async def _make_directory(self) -> None:
        """Not through the batcher: what is there by another's transaction of a batch goes if the
        batch fails.

        It is empty, and proves nothing, so that it needs no guard."""
        if not self._has_directory:
            await ensure_znode(self._store, self._paths.findings)
            self._has_directory = True


async def read_findings(
    store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
) -> dict[int, Finding]:
    """Those of the ledgers that have one which can be read."""
    noted = await _noted(store, paths)
    wanted = sorted(set(noted).intersection(ledger_ids))

    async def read(ledger_id: int) -> Finding | None:
        try:
            return await read_record(store, paths.finding(ledger_id), Finding.from_record)
        except UnauthorizedError as error:
            log.warning("finding.access_denied", ledger_id=ledger_id, error=str(error))
            return None

    findings = await gather_in_parts(read, wanted, at_once=READS_AT_ONCE)
    return {i: each for i, each in zip(wanted, findings, strict=True) if each is not None}


async def _noted(store: MetadataStore, paths: ClusterPaths) -> list[int]:
    """Ledgers that have a finding, ascending."""
    names = await children_if_any(store, paths.findings)
    return sorted(i for i in map(ledger_id_of_name, names) if i is not None)


KEPT_MS = 7 * 86_400_000
"""So long the cause is remembered of a bookie that is back: marks may wait for a worker."""
KEPT_MAX = 2_000
"""Bookies in the record; the oldest of those that are back go first."""

CLOCKS_APART_MS = 10_000
"""So far the clocks of two leaders may differ; and what is being marked just when a bookie is back
takes a while."""


class Why(enum.Enum):
    """Stored, and shown by commands: never change a value."""

    LOST = "lost"
    REBORN = "reformatted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a bookie's copies are, or were, missing. Wall-clock milliseconds.

    ``ended_ms``: when it was back, or its ledgers were looked at; None while that is to come.
    """

    why: Why
    since_ms: int
    ended_ms: int | None = None

    def was_over_at(self, ctime_ms: int | None) -> bool:
        """Whether a mark made then is none of its marks. None: nobody knows when it was made.

        An older mark may be: one that stood when the bookie was lost serves for that, too, and
        keeps its time.
        """
        if self.ended_ms is None or ctime_ms is None:
            return False
        return ctime_ms > self.ended_ms + CLOCKS_APART_MS

    def to_record(self) -> dict[str, object]:
        record: dict[str, object] = {"cause": self.why.value, "since_ms": self.since_ms}
        return record if self.ended_ms is None else {**record, "ended_ms": self.ended_ms}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Raises CorruptionError."""
        try:
            why = Why(text_field(record, "cause"))
        except ValueError as error:
            raise CorruptionError("a cause that this release does not know") from error
        has_ended = record.get("ended_ms") is not None
        return cls(
            why=why,
            since_ms=time_field(record, "since_ms"),
            ended_ms=time_field(record, "ended_ms") if has_ended else None,
        )


def updated_causes(
    known: Mapping[BookieId, Cause], current: Mapping[BookieId, Cause], *, now_ms: int
) -> dict[BookieId, Cause]:
    """``current``: those that are missing now. What goes on keeps the time of its beginning."""
    causes = dict(current)
    for bookie, cause in known.items():
        now = current.get(bookie)
        if now is None:
            ended_ms = now_ms if cause.ended_ms is None else cause.ended_ms
            if now_ms - ended_ms < KEPT_MS:
                causes[bookie] = replace(cause, ended_ms=ended_ms)
        elif now.why is cause.why and cause.ended_ms is None:
            causes[bookie] = cause
    if len(causes) > KEPT_MAX:
        by_age = sorted(causes, key=lambda b: (causes[b].ended_ms is None, causes[b].ended_ms or 0))
        causes = {bookie: causes[bookie] for bookie in by_age[-KEPT_MAX:]}
    return causes


def causes_to_bytes(causes: Mapping[BookieId, Cause]) -> bytes:
    bookies = {bookie: cause.to_record() for bookie, cause in sorted(causes.items())}
    return json.dumps({"version": 1, "bookies": bookies}).encode()


async def read_causes(store: MetadataStore, paths: ClusterPaths) -> dict[BookieId, Cause]:
    """Those that can be read; the others are as good as unknown."""
    path = paths.causes
    bookies = (
        await read_if_allowed(store, path, lambda record: object_field(record, "bookies")) or {}
    )
    causes: dict[BookieId, Cause] = {}
    for name in bookies:
        try:
            causes[BookieId(as_text(name, "bookie"))] = Cause.from_record(
                object_field(bookies, name)
            )
        except CorruptionError:
            continue
    return causes


# --- The reason of a mark ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReason:
    """One of them. ``cause``: lost, reformatted, drained, hand, unknown, or the name of a check.

    ``bookie``: None where the mark is not about a single one. ``since_ms``: wall-clock; None:
    unknown. ``detail`` is a part of a sentence for an operator; it may be empty.
    """

    cause: str
    bookie: BookieId | None = None
    since_ms: int | None = None
    detail: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "cause": self.cause,
            "bookie": self.bookie,
            "since_ms": self.since_ms,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReasons:
    """What the reasons of marks follow from, at one moment."""

    causes: Mapping[BookieId, Cause] = field(default_factory=dict)
    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    findings: Mapping[int, Finding] = field(default_factory=dict)

    @classmethod
    async def read(
        cls, store: MetadataStore, paths: ClusterPaths, ledger_ids: Sequence[int]
    ) -> "MarkReasons":
        """For the marks of these ledgers."""
        return cls(
            causes=await read_causes(store, paths),
            draining=(await OrderStore(store, paths).read()).draining,
            findings=await read_findings(store, paths, ledger_ids),
        )

    def of(self, ledger_id: int, mark: Mark | None, *, is_own: bool) -> list[MarkReason]:
        """``mark``: None where it cannot be read. ``is_own``: it stands in our private queue."""
        finding = self.findings.get(ledger_id)
        found = [] if finding is None else _reasons_of(finding)
        told = {reason.bookie for reason in found}
        if mark is not None:
            others = [bookie for bookie in mark.replicas if bookie not in told]
            found += [
                self._own_reason(bookie) if is_own else self._shared_reason(bookie, mark.ctime_ms)
                for bookie in others
            ]
        return found or [MarkReason(cause="hand" if is_own else "unknown")]

    def _own_reason(self, bookie: BookieId) -> MarkReason:
        order = self.draining.get(bookie)
        if order is None:
            return MarkReason(cause="hand", bookie=bookie, detail="or its drain was taken back")
        return MarkReason(cause="drained", bookie=bookie, since_ms=order.since_ms)

    def _shared_reason(self, bookie: BookieId, ctime_ms: int | None) -> MarkReason:
        cause = self.causes.get(bookie)
        if cause is None or cause.was_over_at(ctime_ms):
            return MarkReason(cause="unknown", bookie=bookie, detail="marked by another auditor")
        is_back = cause.why is Why.LOST and cause.ended_ms is not None
        return MarkReason(
            cause=cause.why.value,
            bookie=bookie,
            since_ms=cause.since_ms,
            detail="back by now" if is_back else "",
        )


def _reasons_of(finding: Finding) -> list[MarkReason]:
    return [
        MarkReason(
            cause=finding.check, bookie=bookie, since_ms=finding.found_ms, detail=finding.detail
        )
        for bookie in finding.bookies or (None,)
    ]

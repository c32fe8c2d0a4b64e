"""Why a ledger is marked. A mark's payload is Java's and cannot say; a znode for each would double
the writes.

So the leader notes, per bookie, why its copies are missing: ``<ur>/bookmender/causes``, one znode,
versioned JSON. The reason of a mark follows from the replicas it names, from the orders
(``draining``) and from what a periodic check found (``findings``).
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from auditor.findings import Finding, read_findings
from ledgers.errors import CorruptionError
from ledgers.metadata import BookieId
from ledgers.store import MetadataStore
from replication.cluster.order_book import OrderBook
from replication.cluster.orders import DrainOrder
from replication.cluster.own_state import as_text, own_path, part, read_aid, text, time_ms
from replication.queue.payloads import Mark

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
    REBORN = "reborn"


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
            why = Why(text(record, "cause"))
        except ValueError as error:
            raise CorruptionError("a cause that this release does not know") from error
        has_ended = record.get("ended_ms") is not None
        return cls(
            why=why,
            since_ms=time_ms(record, "since_ms"),
            ended_ms=time_ms(record, "ended_ms") if has_ended else None,
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


async def read_causes(store: MetadataStore, ur: str) -> dict[BookieId, Cause]:
    """Those that can be read; the others are as good as unknown."""
    path = causes_path(ur)
    bookies = await read_aid(store, path, lambda record: part(record, "bookies")) or {}
    causes: dict[BookieId, Cause] = {}
    for name in bookies:
        try:
            causes[BookieId(as_text(name, "bookie"))] = Cause.from_record(part(bookies, name))
        except CorruptionError:
            continue
    return causes


def causes_path(ur: str) -> str:
    return f"{own_path(ur)}/causes"


# --- The reason of a mark ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReason:
    """One of them. ``cause``: lost, reborn, drained, hand, unknown, or the name of a check.

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
    async def read(cls, store: MetadataStore, ur: str, ledger_ids: Sequence[int]) -> "MarkReasons":
        """For the marks of these ledgers."""
        return cls(
            causes=await read_causes(store, ur),
            draining=(await OrderBook(store, ur).read()).draining,
            findings=await read_findings(store, ur, ledger_ids),
        )

    def of(self, ledger_id: int, mark: Mark | None, *, is_own: bool) -> list[MarkReason]:
        """``mark``: None where it cannot be read. ``is_own``: it stands in our own queue."""
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

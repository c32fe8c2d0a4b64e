"""What an operator has ordered of the whole cluster: bookies to drain, maintenance windows, limits.

Below ``<ur>/bookmender/orders``: ``draining/<bookie id>``, ``maintenance/<bookie id>`` and ``limits``, each
versioned JSON; ``order_book`` reads and writes them. Every session of ours sees them as part of its
``ClusterView``. An order that cannot be read (a later release's, a slip of somebody's hand) is reported
and passed over; it never stops a node.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ledgers.errors import CorruptionError
from ledgers.metadata import BookieId
from replication.cluster.own_state import parse_record, switch, text, time_ms, whole

VERSION = 1
"""Of every order's record. Raised when a reader of the release before would misunderstand it; fields
that it may leave out of account come without."""

LIMIT_RANGES: Mapping[str, tuple[int, int]] = {
    "bytes_per_s": (0, 10**12),
    "entries_per_s": (0, 10**9),
    "reads_in_flight_per_bookie": (1, 500),
    "requests_per_s": (0, 1_000_000),
}
"""The least and the most of each number in ``LimitsOrder``: what the settings of the same name allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """Move all that the bookie holds elsewhere, while it serves (rule S16)."""

    since_ms: int
    may_fence: bool = False
    """Whether open ledgers on it are to be recovered and closed, instead of left until they close."""

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        return cls(
            since_ms=time_ms(record, "since_ms"),
            may_fence=_holds(record, "may_fence") and switch(record, "may_fence"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow:
    """The bookie may be away until then: neither lost nor a target. Wall-clock milliseconds."""

    since_ms: int
    until_ms: int
    reason: str = ""

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        return cls(
            since_ms=time_ms(record, "since_ms"),
            until_ms=time_ms(record, "until_ms"),
            reason=text(record, "reason") if "reason" in record else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsOrder:
    """What each node may cost, in place of its settings; None: as its settings say. 0: no limit."""

    bytes_per_s: int | None = None
    entries_per_s: int | None = None
    reads_in_flight_per_bookie: int | None = None
    requests_per_s: int | None = None
    yields_to_writers: bool | None = None

    def to_json(self) -> bytes:
        return _to_json({key: value for key, value in asdict(self).items() if value is not None})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError, also for a number that no setting would be allowed (rule S10)."""
        record = _record(data)
        numbers = {
            key: whole(record, key, least=least, most=most)
            for key, (least, most) in LIMIT_RANGES.items()
            if _holds(record, key)
        }
        yields = "yields_to_writers"
        return cls(
            **numbers, yields_to_writers=switch(record, yields) if _holds(record, yields) else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All of them at one moment. In a ``ClusterView`` windows that are over are not among them."""

    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    maintenance: Mapping[BookieId, MaintenanceWindow] = field(default_factory=dict)
    limits: LimitsOrder = field(default_factory=LimitsOrder)

    def at(self, now_ms: int) -> "Orders":
        """Without the windows that are over by then; the end itself is outside."""
        current = {b: window for b, window in self.maintenance.items() if now_ms < window.until_ms}
        return self if len(current) == len(self.maintenance) else replace(self, maintenance=current)

    @property
    def next_end_ms(self) -> int | None:
        """When the first of the windows ends; None without any."""
        return min((window.until_ms for window in self.maintenance.values()), default=None)


def _to_json(fields: Mapping[str, object]) -> bytes:
    return json.dumps({"version": VERSION, **fields}).encode()


def _holds(record: Mapping[str, Any], key: str) -> bool:
    """Null is as good as nothing, in what may be left out."""
    return record.get(key) is not None


def _record(data: bytes) -> dict[str, Any]:
    record = parse_record(data)
    if record.get("version") != VERSION:
        raise CorruptionError("an order of a kind that this release does not know", data=data[:80])
    return record

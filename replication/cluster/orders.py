"""What is ordered of the whole cluster: bookies to drain, maintenance windows, limits, holds,
pauses, tries.

Below ``<ur>/bookmender/orders``: ``draining/<bookie id>``, ``maintenance/<bookie id>``, ``limits``,
``hold``, ``checks``, ``identities`` and ``tries``, each versioned JSON. An operator gives them; the
leader, too, orders a hold. ``order_book`` reads and writes them, and every session of ours sees
them as part of its ``ClusterView``. An order that cannot be read (a later release's, a slip of
somebody's hand) is reported and never stops a node: it is passed over, but for limits, which stay
as they were, and for a hold or a pause of the checks, which stand. Drains and windows stay as they
were where they cannot even be listed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ledgers.errors import CorruptionError
from ledgers.metadata import BookieId
from replication.cluster.own_state import (
    ledger_id_of_name,
    parse_record,
    part,
    switch,
    text,
    texts,
    time_ms,
    whole,
)

VERSION = 1
"""Of every order's record. Raised when a reader of the release before would misunderstand it;
fields that it may leave out of account come without."""

TRIES_TOLD_S = 600.0
"""So long after a try was ordered a node that had lost its connection still learns of it, though
others were since."""
TRIES_TOLD_MAX = 1_000

LIMIT_RANGES: Mapping[str, tuple[int, int]] = {
    "bytes_per_s": (0, 10**12),
    "entries_per_s": (0, 10**9),
    "reads_in_flight_per_bookie": (1, 500),
    "requests_per_s": (0, 1_000_000),
}
"""The least and the most of each number in ``LimitsOrder``: what the settings of the same name
allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """Move all that the bookie holds elsewhere, while it serves (rule S16)."""

    since_ms: int
    may_fence: bool = False
    """Whether open ledgers on it are to be recovered and closed, instead of left until they
    close."""

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
class HoldOrder:
    """Mark nothing and fence nothing; or, released, let nothing hold on account of these bookies.

    ``bookies``: those that were away when it was written. ``until_ms``: wall-clock; None: until
    somebody ends it. ``is_by_operator``: an operator's stands whatever the bookies do.
    """

    since_ms: int
    until_ms: int | None = None
    bookies: tuple[BookieId, ...] = ()
    reason: str = ""
    is_by_operator: bool = False
    is_released: bool = False

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        return cls(
            since_ms=time_ms(record, "since_ms"),
            until_ms=time_ms(record, "until_ms") if _holds(record, "until_ms") else None,
            bookies=tuple(BookieId(each) for each in texts(record, "bookies")),
            reason=text(record, "reason") if _holds(record, "reason") else "",
            is_by_operator=switch(record, "is_by_operator"),
            is_released=switch(record, "is_released"),
        )

    @classmethod
    def unreadable(cls, *, since_ms: int) -> Self:
        """What is kept to where the order cannot be read: a hold. Perhaps one was meant, and a hold
        for nothing costs time only, while fencing for nothing stops writers. ``since_ms``: when it
        was written."""
        reason = "so it is taken, as the order cannot be read"
        return cls(since_ms=since_ms, reason=reason, is_by_operator=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksOrder:
    """The periodic checks pause while it stands."""

    since_ms: int

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        return cls(since_ms=time_ms(_record(data), "since_ms"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesOrder:
    """Marked ledgers that are to be tried now, whatever they waited for, and when that was ordered
    (wall-clock): each counts once, for who has not seen it before."""

    ordered_ms: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return _to_json({"ledgers": {str(i): ms for i, ms in self.ordered_ms.items()}})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        told = part(_record(data), "ledgers")
        ordered_ms = {ledger_id_of_name(name): time_ms(told, name) for name in told}
        return cls(ordered_ms={i: ms for i, ms in ordered_ms.items() if i is not None})

    def with_ledger(self, ledger_id: int, *, now_ms: int) -> Self:
        """That one, too; what was ordered long ago, or before very many others, is forgotten."""
        told = {i: ms for i, ms in self.ordered_ms.items() if now_ms - ms <= TRIES_TOLD_S * 1000}
        told.pop(ledger_id, None)  # the latest comes last
        latest = [*told.items(), (ledger_id, now_ms)][-TRIES_TOLD_MAX:]
        return replace(self, ordered_ms=dict(latest))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentitiesOrder:
    """These bookies have lost nothing since they were first set up, though their cookies may be
    younger.

    A cookie that is younger than a ledger says that its bookie may have been reformatted since.
    That is wrong for all bookies at once where ZooKeeper was imported by a tool that creates znodes
    again, or where bookie ids were changed (``updatecookie``). ``cookies``: the czxid that each
    bookie's cookie had when the order was given; the order says nothing of a bookie whose cookie is
    another one by now.
    """

    since_ms: int
    cookies: Mapping[BookieId, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return _to_json({"since_ms": self.since_ms, "cookies": dict(self.cookies)})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record = _record(data)
        cookies = part(record, "cookies")
        return cls(
            since_ms=time_ms(record, "since_ms"),
            cookies={BookieId(bookie): whole(cookies, bookie) for bookie in cookies},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All of them at one moment. In a ``ClusterView`` windows that are over are not among them."""

    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    maintenance: Mapping[BookieId, MaintenanceWindow] = field(default_factory=dict)
    limits: LimitsOrder = field(default_factory=LimitsOrder)
    hold: HoldOrder | None = None
    """Also one that is released. ``is_held`` says whether it holds."""
    paused_checks: ChecksOrder | None = None
    tries: TriesOrder = field(default_factory=TriesOrder)
    identities: IdentitiesOrder | None = None
    unreadable: tuple[str, ...] = ()
    """Paths of those that stand there and cannot be read."""

    @property
    def is_held(self) -> bool:
        """Whether nothing may be marked, and nothing fenced."""
        return self.hold is not None and not self.hold.is_released

    def at(self, now_ms: int) -> "Orders":
        """As they stand then, an end itself being outside: a hold that is over is as good as
        released."""
        current = {b: window for b, window in self.maintenance.items() if now_ms < window.until_ms}
        hold = self.hold
        if hold is not None and hold.until_ms is not None and hold.until_ms <= now_ms:
            hold = replace(hold, is_released=True)
        if len(current) == len(self.maintenance) and hold == self.hold:
            return self
        return replace(self, maintenance=current, hold=hold)

    @property
    def trusted_cookies(self) -> Mapping[BookieId, int]:
        """The czxid of each cookie that counts as old, whatever it is (``IdentitiesOrder``)."""
        return {} if self.identities is None else self.identities.cookies

    @property
    def next_end_ms(self) -> int | None:
        """When the first of the windows, or the hold, ends; None where nothing does."""
        ends_ms = [window.until_ms for window in self.maintenance.values()]
        if self.hold is not None and self.hold.until_ms is not None and self.is_held:
            ends_ms.append(self.hold.until_ms)
        return min(ends_ms, default=None)


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

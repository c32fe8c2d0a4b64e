"""How fast nodes copy now, and why. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from daemon.limits import Limits
from daemon.operating.progress import counted
from ledgers.bookie.bulk.flow import Activity
from ledgers.metadata import BookieId
from replication.cluster.activity import ClientActivity

BOOKIES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyingPace:
    """By the limits in force and by what the leader says of clients."""

    yields: bool = True
    """Whether clients go first at all."""
    is_known: bool = False
    """Whether the leader has said lately at which bookies clients are active."""
    active: tuple[BookieId, ...] = ()
    unknown: tuple[BookieId, ...] = ()
    """Of which it does not know yet: copies yield there as well."""
    full_speed_count: int = 0
    """Other bookies."""
    copying_node_count: int = 1
    bytes_per_s: int = 0
    entries_per_s: int = 0
    """Of each node. 0: no limit."""

    @property
    def is_full_speed(self) -> bool:
        """At every bookie, but for the limits of an operator."""
        return not self.yields or (self.is_known and not self.active and not self.unknown)

    def to_json(self) -> dict[str, Any]:
        return {
            "speed": "full" if self.is_full_speed else "yielding",
            "yields_to_writers": self.yields,
            "is_client_activity_known": self.is_known,
            "active_bookies": list(self.active),
            "unknown_bookies": list(self.unknown),
            "copying_nodes": self.copying_node_count,
            "bytes_per_s": self.bytes_per_s,
            "entries_per_s": self.entries_per_s,
        }


def copying_pace(
    limits: Limits, said: ClientActivity | None, bookies: Collection[BookieId]
) -> CopyingPace:
    """``said``: by the leader; None where it has said nothing lately. ``bookies``: those that are there."""
    of = {} if said is None else {bookie: said.of(bookie) for bookie in bookies}
    return CopyingPace(
        yields=limits.yields_to_writers,
        is_known=said is not None,
        active=tuple(sorted(b for b in of if of[b] is Activity.ACTIVE)),
        unknown=tuple(sorted(b for b in of if of[b] is Activity.UNKNOWN)),
        full_speed_count=sum(of[b] is Activity.QUIET for b in of),
        copying_node_count=1 if said is None else said.copying_node_count,
        bytes_per_s=limits.bytes_per_s,
        entries_per_s=limits.entries_per_s,
    )


def pace_text(pace: CopyingPace) -> str:
    limits = [
        f"{per_s:,} {what}/s"
        for per_s, what in ((pace.entries_per_s, "entries"), (pace.bytes_per_s, "bytes"))
        if per_s
    ]
    capped = f"; each node copies {' and '.join(limits)} at most" if limits else ""
    return _speed_text(pace) + capped


def _speed_text(pace: CopyingPace) -> str:
    if not pace.yields:
        return "full speed, as clients do not go first (bookmender limits)"
    if not pace.is_known:
        return "yielding at all bookies: the leader has not said lately whether clients are active"
    if pace.is_full_speed:
        return "full speed: no client is active"
    where = []
    if pace.active:
        shown = ", ".join(pace.active[:BOOKIES_SHOWN_MAX])
        more = ", …" if len(pace.active) > BOOKIES_SHOWN_MAX else ""
        where.append(f"{counted(len(pace.active), 'bookie')}, clients active ({shown}{more})")
    if pace.unknown:
        where.append(f"{counted(len(pace.unknown), 'bookie')}, not known yet whether any is active")
    others = "; full speed at the others" if pace.full_speed_count else ""
    return f"yielding at {', and at '.join(where)}{others}"

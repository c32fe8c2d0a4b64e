"""The pace of copying as ``bookmender status`` shows it: full speed, or yielding to clients. No
I/O."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from daemon.limits import Limits
from daemon.words import counted, shortened
from ledgers.bulk.flow_control import Activity
from ledgers.model import BookieId
from replication.client_activity import ClientActivity

BOOKIES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyingPace:
    """The current pace, derived from the limits in force and from the published client activity."""

    yields: bool = True
    """True if copies yield to clients."""
    is_known: bool = False
    """True if the leader publishes client activity."""
    active: tuple[BookieId, ...] = ()
    unknown: tuple[BookieId, ...] = ()
    """Bookies whose activity is unknown. Copies yield there as well."""
    full_speed_count: int = 0
    """Number of bookies without active clients."""
    copying_node_count: int = 1
    bytes_per_s: int = 0
    entries_per_s: int = 0
    """Operator limits of each node. 0: no limit."""

    @property
    def is_full_speed(self) -> bool:
        """True if copies run at full speed at every bookie. Operator limits may still apply."""
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
    """Return the pace. ``said``: the published client activity, if any. ``bookies``: the registered
    bookies."""
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
        return "full speed: yielding to clients is switched off (bookmender limits)"
    if not pace.is_known:
        return "yielding at all bookies: the leader has not published client activity"
    if pace.is_full_speed:
        return "full speed: no client is active"
    where = []
    if pace.active:
        shown = shortened(pace.active, at_most=BOOKIES_SHOWN_MAX)
        where.append(f"{counted(len(pace.active), 'bookie')} with active clients ({shown})")
    if pace.unknown:
        where.append(f"{counted(len(pace.unknown), 'bookie')} whose clients are unknown")
    others = "; full speed at the others" if pace.full_speed_count else ""
    return f"yielding at {', and at '.join(where)}{others}"

"""The pace of copying as ``bookmender status`` shows it: full speed, or yielding to clients. No
I/O."""

from collections.abc import Collection

from daemon.limits import Limits
from daemon.status.answers import CopyingRecord
from daemon.words import counted, shortened
from ledgers.bulk.flow_control import Activity
from ledgers.model import BookieId
from ledgers.sizes import size_text
from replication.client_activity import ClientActivity

BOOKIES_SHOWN_MAX = 8


def copying_pace(
    limits: Limits, said: ClientActivity | None, bookies: Collection[BookieId]
) -> CopyingRecord:
    """Return the pace. ``said``: the published client activity, if any. ``bookies``: the registered
    bookies."""
    of = {} if said is None else {bookie: said.of(bookie) for bookie in sorted(bookies)}
    active = [bookie for bookie in of if of[bookie] is Activity.ACTIVE]
    unknown = [bookie for bookie in of if of[bookie] is Activity.UNKNOWN]
    is_full = not limits.yields_to_writers or (said is not None and not active and not unknown)
    return CopyingRecord(
        speed="full" if is_full else "yielding",
        yields_to_writers=limits.yields_to_writers,
        is_client_activity_known=said is not None,
        active_bookies=active,
        unknown_bookies=unknown,
        copying_nodes=1 if said is None else said.copying_node_count,
        bytes_per_s=limits.bytes_per_s,
        entries_per_s=limits.entries_per_s,
    )


def pace_text(pace: CopyingRecord, *, bookie_count: int) -> str:
    """``bookie_count``: number of registered bookies."""
    limits = [f"{pace.entries_per_s:,} entries/s"] if pace.entries_per_s else []
    limits += [f"{size_text(pace.bytes_per_s)}/s"] if pace.bytes_per_s else []
    capped = f"; limited to {' and '.join(limits)} a node (bookmender limits)" if limits else ""
    active, unknown = pace.active_bookies, pace.unknown_bookies
    if not pace.yields_to_writers:
        speed = "full speed: yielding to clients is switched off (bookmender limits)"
    elif not pace.is_client_activity_known:
        speed = "yielding at all bookies: the leader has not published client activity"
    elif pace.speed == "full":
        speed = "no client is active" if limits else "full speed: no client is active"
    else:
        where = []
        if active:
            shown = shortened(active, at_most=BOOKIES_SHOWN_MAX)
            where.append(f"{counted(len(active), 'bookie')} with active clients ({shown})")
        if unknown:
            where.append(f"{counted(len(unknown), 'bookie')} whose clients are unknown")
        others = "; full speed at the others" if len(active + unknown) < bookie_count else ""
        speed = f"yielding at {', and at '.join(where)}{others}"
    return speed + capped

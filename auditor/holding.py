"""The safety hold: so many bookies went at once that it is hardly they who failed.

A switch, a rack's power or ZooKeeper itself takes many bookies' znodes away together, while their
disks are as they were. To copy all that they hold would be the wrong answer, and to fence what is
being written a harmful one. So the leader orders a hold (``holds``): no further ledger is marked
for lost bookies, and nothing fenced, by any node, until enough of them are back, the hold's own end
comes, or an operator says that they are lost.

A hold begins when more than a set share of the bookies went within a window of each other, and they
are at least so many, or a whole rack. The share must be exceeded in either case: where racks are
small, losing one is an ordinary loss. What a leader finds away when it begins, and no leader before
it knew of, went just now: after a power cut bookies may come back later than we do.

A hold that is over, by its own end or an operator's word, is kept as long as one of its bookies is
away: it binds for these, so that nothing holds on their account again; a further wave of others
does.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from auditor.settings import HoldSettings
from ledgers.metadata import BookieId
from ledgers.placement import DEFAULT_RACK, Locate
from replication.cluster.cluster_view import ClusterView
from replication.cluster.orders import HoldOrder, Orders

RACK_BOOKIES_MIN = 2
"""A rack of one bookie is no more than that bookie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Muster:
    """Who is there and who is not, of the bookies that count. Times are seconds of one clock.

    ``absent_since_s``: those that were set up and are away neither on purpose nor for good.
    """

    present: frozenset[BookieId]
    absent_since_s: Mapping[BookieId, float]
    settled: frozenset[BookieId] = frozenset()
    """Those whose ledgers are marked: on their account alone it is too late to hold."""
    rack_of: Locate = lambda _: DEFAULT_RACK

    @classmethod
    def of(
        cls,
        view: ClusterView,
        absent_since_s: Mapping[BookieId, float],
        *,
        lost_since_s: Mapping[BookieId, float],
        rack_of: Locate,
    ) -> "Muster":
        """Without those that are away on purpose: under maintenance, or drained and then gone. Nor
        does one count that ledgers name and that has no cookie (any more).

        ``lost_since_s``: whose ledgers are marked, by an earlier leader perhaps, which saw them go.
        """
        # Without a single cookie, somebody deleted their directory: then every bookie counts, as no
        # hold would begin.
        known = view.cookies.keys() or view.available | absent_since_s.keys()
        counted = known - view.orders.maintenance.keys() - view.orders.draining.keys()
        return cls(
            present=view.available,
            absent_since_s={
                bookie: min(since_s, lost_since_s.get(bookie, since_s))
                for bookie, since_s in absent_since_s.items()
                if bookie in counted
            },
            settled=frozenset(lost_since_s),
            rack_of=rack_of,
        )


def wanted_hold(
    muster: Muster,
    standing: HoldOrder | None,
    *,
    settings: HoldSettings,
    now_s: float,
    now_ms: int,
    is_calm: bool,
) -> HoldOrder | None:
    """The order that should stand now, in place of ``standing``; None: there should be none.

    ``is_calm``: the standing hold has not been warranted for long enough.
    """
    standing = Orders(hold=standing).at(now_ms).hold
    recent = {
        bookie: since_s
        for bookie, since_s in muster.absent_since_s.items()
        if bookie not in muster.settled or now_s - since_s <= settings.window_s
    }
    if standing is None or standing.is_released:
        return _after_release(muster, recent, standing, settings, now_ms=now_ms)
    if standing.is_by_operator:
        return standing
    if is_calm or not settings.enabled:
        return None
    return replace(standing, bookies=_in_order(recent.keys() | set(standing.bookies)))


def is_warranted(hold: HoldOrder, muster: Muster, settings: HoldSettings) -> bool:
    """Whether the bookies of a hold that are still away are enough for it, whenever they went."""
    away = muster.absent_since_s.keys() & set(hold.bookies)
    return _is_enough(away, muster, settings, bookie_count=len(muster.present) + len(away))


def _after_release(
    muster: Muster,
    recent: Mapping[BookieId, float],
    released: HoldOrder | None,
    settings: HoldSettings,
    *,
    now_ms: int,
) -> HoldOrder | None:
    named = set() if released is None else set(released.bookies)
    wave = {bookie: since_s for bookie, since_s in recent.items() if bookie not in named}
    if settings.enabled and (gone := _gone_at_once(wave, muster, settings)):
        return HoldOrder(
            since_ms=now_ms,
            until_ms=now_ms + int(settings.lasts_s * 1000) if settings.lasts_s else None,
            bookies=_in_order(wave),
            reason=_reason(gone, muster, settings),
        )
    bound = named & muster.absent_since_s.keys()
    return replace(released, bookies=_in_order(bound)) if released is not None and bound else None


def _gone_at_once(
    wave: Mapping[BookieId, float], muster: Muster, settings: HoldSettings
) -> frozenset[BookieId]:
    """Those that went within the window of each other, if they are enough for a hold; else none.

    The share is of the bookies that were there when the first of them went.
    """
    for start_s in sorted(set(wave.values())):
        later = {bookie: since_s for bookie, since_s in wave.items() if since_s >= start_s}
        gone = {b for b, since_s in later.items() if since_s <= start_s + settings.window_s}
        if _is_enough(gone, muster, settings, bookie_count=len(muster.present) + len(later)):
            return frozenset(gone)
    return frozenset()


def _is_enough(
    gone: Collection[BookieId], muster: Muster, settings: HoldSettings, *, bookie_count: int
) -> bool:
    if len(gone) <= settings.share * bookie_count:
        return False
    return len(gone) >= settings.bookies_min or bool(_whole_racks(gone, muster))


def _whole_racks(gone: Collection[BookieId], muster: Muster) -> list[str]:
    """Racks, the default one being none, of which several bookies are gone and nobody is left."""
    members = defaultdict(set)
    for bookie in gone:
        members[muster.rack_of(bookie)].add(bookie)
    inhabited = {DEFAULT_RACK, *map(muster.rack_of, muster.present)}
    return sorted(
        rack
        for rack, bookies in members.items()
        if len(bookies) >= RACK_BOOKIES_MIN and rack not in inhabited
    )


def _reason(gone: Collection[BookieId], muster: Muster, settings: HoldSettings) -> str:
    count = len(muster.present) + len(gone)
    racks = _whole_racks(gone, muster)
    told = f", all of {', '.join(racks)} among them" if racks else ""
    return f"{len(gone)} of {count} bookies went within {settings.window_s:g} s{told}"


def _in_order(bookies: Collection[BookieId]) -> tuple[BookieId, ...]:
    return tuple(sorted(bookies))

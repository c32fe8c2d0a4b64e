"""What a bookie that goes away, too, leaves without any copy: before its maintenance window begins.

A look at all metadata, for some seconds at most: of very many ledgers it sees the first only, and
says so. Once it is away the leader counts them all (``auditor.copyless``), and ``status`` tells.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from auditor.copyless import has_copyless
from auditor.records import read_absences
from auditor.scan import read_indexed
from daemon.operating.bookie_ids import registered_bookies
from daemon.operating.progress import counted
from daemon.status.leader import is_named_by_none
from daemon.visit import Visit
from ledgers.clock import Clock
from ledgers.metadata import BookieId
from replication.cluster.order_book import OrderBook

LOOK_S = 15.0
"""An operator waits for it: some hundred thousand ledgers."""
READS_AT_ONCE = 500
BOOKIES_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftWithout:
    """``count``: ledgers that ``bookie`` holds copies of, with entries whose every copy is on it
    and ``others``, which are away or may be. ``looked_at``: how many were read; ``is_whole``: all
    that could be."""

    bookie: BookieId
    others: tuple[BookieId, ...]
    count: int = 0
    looked_at: int = 0
    unreadable_count: int = 0
    is_whole: bool = True

    @property
    def is_harmless(self) -> bool:
        """Whether it is certain that each entry keeps a copy."""
        return not self.count and not self.unreadable_count and self.is_whole

    def to_text(self) -> str:
        """Of one that is not."""
        more = ", …" if len(self.others) > BOOKIES_SHOWN_MAX else ""
        others = ", ".join(self.others[:BOOKIES_SHOWN_MAX]) + more
        if self.count:
            least = "" if self.is_whole and not self.unreadable_count else "at least "
            return (
                f"with {self.bookie} away, too, {least}{counted(self.count, 'ledger')} would have entries without "
                f"any copy that is there (away or under maintenance already: {others})"
            )
        first = "" if self.is_whole else "the first "
        rest = (
            f"the metadata of {self.unreadable_count:,} more cannot be read"
            if self.is_whole
            else "the rest was not looked at"
        )
        return (
            f"other bookies are away or under maintenance ({others}): what has copies on these and {self.bookie} "
            f"alone cannot be read meanwhile (nothing of the kind among {first}"
            f"{counted(self.looked_at, 'ledger')}; {rest})"
        )


async def left_without(cluster: Visit, bookie: BookieId, *, clock: Clock) -> LeftWithout | None:
    """None where no other bookie is away, or under maintenance and so may be. Raises
    UnavailableError."""
    others = await _others(cluster, bookie, clock=clock)
    if not others:
        return None
    look = _Look(bookie, frozenset((bookie, *others)))
    deadline_s, is_whole = clock.now_s() + LOOK_S, True
    async for ledger_ids in cluster.manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            is_whole = is_whole and clock.now_s() < deadline_s
            if is_whole:
                await look.at(cluster, ledger_ids[start : start + READS_AT_ONCE])
        if not is_whole:
            break
    return LeftWithout(
        bookie=bookie,
        others=others,
        count=look.count,
        looked_at=look.looked_at,
        unreadable_count=look.unreadable_count,
        is_whole=is_whole,
    )


async def _others(cluster: Visit, bookie: BookieId, *, clock: Clock) -> tuple[BookieId, ...]:
    """Without those that are known to be named by no ledger: nobody may have come to decommission
    them."""
    windows = (await OrderBook(cluster.store, cluster.ur).read()).at(clock.wall_ms()).maintenance
    available = (await registered_bookies(cluster)).available
    # The leader tells of bookies without a cookie, too: of one that died, and is about to be set up
    # anew.
    named = (await read_absences(cluster.store, cluster.ur)).named(now_ms=clock.wall_ms())
    gone = ((await cluster.registration.cookies()).keys() | named) - available.keys()
    others = sorted((gone | windows.keys()) - {bookie})
    return tuple([b for b in others if not await is_named_by_none(cluster, b, clock=clock)])


class _Look:
    """What was seen so far."""

    def __init__(self, bookie: BookieId, away: Collection[BookieId]) -> None:
        self._bookie, self._away = bookie, away
        self.count = self.looked_at = self.unreadable_count = 0

    async def at(self, cluster: Visit, ledger_ids: Sequence[int]) -> None:
        ledgers, unreadable = await read_indexed(cluster.manager, ledger_ids)
        self.looked_at += len(ledgers)
        self.unreadable_count += len(unreadable)
        self.count += sum(
            self._bookie in ledger.bookies and has_copyless(ledger, self._away)
            for ledger in ledgers
        )

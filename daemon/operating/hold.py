"""The safety hold as operators see and order it: no further ledger is marked for lost bookies,
nothing fenced."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.records import read_absences
from daemon.operating.bookie_ids import registered_bookies
from daemon.operating.progress import counted, duration_text, printable
from daemon.visit import Visit
from ledgers.clock import Clock
from ledgers.metadata import BookieId
from replication.cluster.order_book import OrderBook, hold_place
from replication.cluster.orders import HoldOrder, Orders

BOOKIES_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldState:
    """``hold``: the one that stands now; None when nothing is held. ``away``: set up, not
    registered, and neither under maintenance nor draining; ``excused``: one of both."""

    hold: HoldOrder | None
    away: tuple[BookieId, ...]
    bookie_count: int
    """Of those that are there and those that are away, for whatever reason."""
    excused: tuple[BookieId, ...] = ()
    unreadable: str = ""
    """The path of an order that stands there and cannot be read: ``hold`` is what it is taken
    for."""

    def to_json(self) -> dict[str, Any]:
        return {
            "is_held": self.hold is not None,
            "hold": None if self.hold is None else hold_record(self.hold),
            "away": list(self.away),
            "away_on_purpose": list(self.excused),
            "bookie_count": self.bookie_count,
            "unreadable_orders": [self.unreadable] if self.unreadable else [],
        }

    def to_text(self, *, now_ms: int) -> str:
        first = "nothing is held" if self.hold is None else hold_text(self.hold, now_ms=now_ms)
        return f"{first}\n{self.away_text}"

    @property
    def away_text(self) -> str:
        count = len(self.away) + len(self.excused)
        text = f"{count} of {self.bookie_count} bookies {'is' if count == 1 else 'are'} away"
        if not self.excused:
            return f"{text}: {_named(self.away)}" if self.away else text
        share = f"{len(self.excused)} of them" if self.away else "all"
        text = f"{text}, {share} under maintenance or draining: {_named(self.excused)}"
        return f"{text}; not so: {_named(self.away)}" if self.away else text


def _named(bookies: Sequence[BookieId]) -> str:
    more = ", …" if len(bookies) > BOOKIES_SHOWN_MAX else ""
    return ", ".join(bookies[:BOOKIES_SHOWN_MAX]) + more


def hold_record(hold: HoldOrder) -> dict[str, Any]:
    return {
        "since_ms": hold.since_ms,
        "until_ms": hold.until_ms,
        "bookies": list(hold.bookies),
        "reason": hold.reason,
        "is_by_operator": hold.is_by_operator,
    }


def hold_text(
    hold: HoldOrder, *, now_ms: int, marked_count: int = 0, are_back: bool = False
) -> str:
    """``marked_count``: ledgers that are marked, and that somebody works on; 0 too where nobody
    knows.

    ``are_back``: none of its bookies is away any more, and a leader of ours is there to end it.
    """
    since = duration_text((now_ms - hold.since_ms) / 1000)
    by = "an operator" if hold.is_by_operator else "the leader"
    why = f" ({printable(hold.reason)})" if hold.reason else ""
    marked = f"{counted(marked_count, 'ledger')} marked before"
    meanwhile = f"; {marked} can be repaired meanwhile" if marked_count else ""
    end = _end_text(hold, now_ms=now_ms, are_back=are_back)
    return (
        f"held for {since} by {by}{why}, {end}: no further ledger is marked for lost bookies, "
        f"and nothing is fenced{meanwhile}"
    )


def _end_text(hold: HoldOrder, *, now_ms: int, are_back: bool) -> str:
    """The leader ends its own when its bookies are back for a while; an operator's lasts."""
    ends_itself = bool(hold.bookies) and not hold.is_by_operator
    if ends_itself and are_back:
        return "ending soon, as its bookies are back"
    if hold.until_ms is None:
        return "until it is ended" + (", or soon after its bookies are back" if ends_itself else "")
    left = f"for another {duration_text((hold.until_ms - now_ms) / 1000)}"
    return left + (", or until soon after its bookies are back" if ends_itself else "")


async def current_hold(cluster: Visit, *, clock: Clock) -> HoldOrder | None:
    """The one that stands now. Raises UnavailableError."""
    standing = await OrderBook(cluster.store, cluster.ur).standing(hold_place(cluster.ur))
    orders = Orders(hold=None if standing is None else standing.order).at(clock.wall_ms())
    return orders.hold if orders.is_held else None


async def read_hold(cluster: Visit, *, clock: Clock) -> HoldState:
    """It, and who is away. Raises UnavailableError."""
    orders = (await OrderBook(cluster.store, cluster.ur).read()).at(clock.wall_ms())
    place = hold_place(cluster.ur)
    available = (await registered_bookies(cluster)).available
    named = (await read_absences(cluster.store, cluster.ur)).named(now_ms=clock.wall_ms())
    gone = ((await cluster.registration.cookies()).keys() | named) - available.keys()
    excused = gone & (orders.maintenance.keys() | orders.draining.keys())
    return HoldState(
        hold=orders.hold if orders.is_held else None,
        away=tuple(sorted(gone - excused)),
        excused=tuple(sorted(excused)),
        bookie_count=len(gone) + len(available),
        unreadable=place.path if place.path in orders.unreadable else "",
    )


async def begin_hold(
    cluster: Visit, *, duration_s: int | None, reason: str, clock: Clock
) -> HoldOrder:
    """From now on, in place of one that stands, the leader's too. Raises ConflictError.

    It names no bookie: at its own end it says nothing of those that are still away then.
    """
    book, place = OrderBook(cluster.store, cluster.ur), hold_place(cluster.ur)
    now_ms = clock.wall_ms()
    hold = HoldOrder(
        since_ms=now_ms,
        until_ms=None if duration_s is None else now_ms + duration_s * 1000,
        reason=reason,
        is_by_operator=True,
    )
    await book.give(place, hold, over=await book.standing(place))
    return hold


async def end_hold(cluster: Visit, away: Collection[BookieId], *, clock: Clock) -> bool:
    """These bookies are lost: it binds for them. False when nothing was held. Raises
    ConflictError."""
    book, place = OrderBook(cluster.store, cluster.ur), hold_place(cluster.ur)
    standing = await book.standing(place)
    if standing is None or standing.order is None:
        return False
    order = standing.order
    if not Orders(hold=order).at(clock.wall_ms()).is_held:
        return False
    if away:
        bookies = tuple(sorted({*order.bookies, *away}))
        released = replace(order, bookies=bookies, is_released=True)
        await book.give(place, released, over=standing)
    else:
        await book.withdraw(place, over=standing)
    return True

"""The safety hold: shows, begins and ends it.

During a hold no further ledger is marked for lost bookies, and no ledger is fenced.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Self

import msgspec

from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.operations.bookies import REGISTERED, BookieState, gather_bookies
from daemon.words import duration_text, printable, shortened
from ledgers.clock import Clock
from ledgers.model import BookieId
from replication.orders import HoldOrder, Orders, OrderStore, hold_znode

BOOKIES_SHOWN_MAX = 20


class HoldRecord(Answer, frozen=True, kw_only=True):
    """A safety hold. ``until_ms``: null until it is ended. ``bookies``: those that caused it."""

    since_ms: int
    until_ms: int | None
    bookies: list[str]
    reason: str
    is_by_operator: bool

    @classmethod
    def of(cls, hold: HoldOrder) -> Self:
        return cls(
            since_ms=hold.since_ms,
            until_ms=hold.until_ms,
            bookies=list(hold.bookies),
            reason=hold.reason,
            is_by_operator=hold.is_by_operator,
        )


class HoldStateRecord(Answer, frozen=True, kw_only=True):
    """The safety hold, and the bookies that are not registered."""

    is_held: bool
    hold: HoldRecord | None
    """The hold in force. If its order cannot be read, the default that replaces it."""
    absent: list[str]
    """Bookies that are not registered, not in maintenance and not draining."""
    lost: list[str]
    """Those of the absent bookies that count as lost already."""
    absent_by_order: list[str]
    """Bookies that are not registered, but in maintenance or draining."""
    bookie_count: int
    """Number of registered and unregistered bookies together."""
    unreadable_orders: list[str]

    def to_text(self, *, now_ms: int) -> str:
        first = "no safety hold" if self.hold is None else hold_text(self.hold, now_ms=now_ms)
        return f"{first}\n{self.absent_text}"

    @property
    def absent_text(self) -> str:
        count = len(self.absent) + len(self.absent_by_order)
        lost = "" if not self.lost else f" ({len(self.lost)} lost)"
        are_all_lost = bool(count) and len(self.lost) == count
        text = f"{count} of {self.bookie_count} bookies {'is' if count == 1 else 'are'} "
        text += "lost" if are_all_lost else f"absent{lost}"
        if self.absent:
            text += f": {shortened(self.absent, at_most=BOOKIES_SHOWN_MAX)}"
        if self.absent_by_order:
            also = "; also absent, but" if self.absent else ","
            excused = shortened(self.absent_by_order, at_most=BOOKIES_SHOWN_MAX)
            text += f"{also} in maintenance or draining: {excused}"
        return text


def hold_record(hold: HoldOrder) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(HoldRecord.of(hold))
    return record


def hold_text(hold: HoldOrder | HoldRecord, *, now_ms: int) -> str:
    """Return one line about a hold that is in force: since when, by whom, why and until when."""
    since = duration_text((now_ms - hold.since_ms) / 1000)
    by = "an operator" if hold.is_by_operator else "the leader"
    why = f" ({printable(hold.reason)})" if hold.reason else ""
    end = (
        "until it is ended"
        if hold.until_ms is None
        else f"for another {duration_text((hold.until_ms - now_ms) / 1000)}"
    )
    if hold.bookies and not hold.is_by_operator:  # the leader ends only its own hold
        end += ", or until soon after its bookies are back"
    return (
        f"safety hold by {by} for {since}{why}. It lasts {end}. Meanwhile no further ledger is "
        "marked for lost bookies, and no ledger is fenced."
    )


async def current_hold(cluster: AdminSession, *, clock: Clock) -> HoldOrder | None:
    """Return the present hold; None without one. Raises UnavailableError."""
    stored = await OrderStore(cluster.store, cluster.paths).stored(hold_znode(cluster.paths))
    orders = Orders(hold=None if stored is None else stored.value).at(clock.wall_ms())
    return orders.hold if orders.is_held else None


async def read_hold(cluster: AdminSession, *, clock: Clock) -> HoldStateRecord:
    """Read the hold and the absent bookies. Raises UnavailableError."""
    orders = (await OrderStore(cluster.store, cluster.paths).read()).at(clock.wall_ms())
    znode = hold_znode(cluster.paths)
    rows, _ = await gather_bookies(cluster, clock=clock)
    there = [row for row in rows if row.state in REGISTERED]
    gone = [row for row in rows if row not in there and (row.has_cookie or row.is_named)]
    excused = [row for row in gone if row.drain is not None or row.maintenance is not None]
    return HoldStateRecord(
        is_held=orders.is_held,
        hold=HoldRecord.of(orders.hold) if orders.hold and orders.is_held else None,
        absent=[row.bookie for row in gone if row not in excused],
        lost=[row.bookie for row in gone if row.state is BookieState.LOST],
        absent_by_order=[row.bookie for row in excused],
        bookie_count=len(gone) + len(there),
        unreadable_orders=[znode.path] if znode.path in orders.unreadable else [],
    )


async def begin_hold(
    cluster: AdminSession, *, duration_s: int | None, reason: str, clock: Clock
) -> HoldOrder:
    """Begin a hold now, replacing an existing one, also the leader's. Raises ConflictError.

    The order names no bookies. So bookies that are still absent when it expires can cause another
    hold.
    """
    order_store, znode = OrderStore(cluster.store, cluster.paths), hold_znode(cluster.paths)
    now_ms = clock.wall_ms()
    hold = HoldOrder(
        since_ms=now_ms,
        until_ms=None if duration_s is None else now_ms + duration_s * 1000,
        reason=reason,
        is_by_operator=True,
    )
    await order_store.give(znode, hold, over=await order_store.stored(znode))
    await cluster.note_order(order_event("hold begin", ends_ms=hold.until_ms, reason=reason))
    return hold


async def release_hold(
    cluster: AdminSession, *, accepts_lost: bool, clock: Clock
) -> tuple[HoldStateRecord, bool]:
    """End the hold in force, unless bookies are absent and ``accepts_lost`` is False: they would
    count as lost. Return the state afterwards, and True if it was refused. Raises ConflictError."""
    before = await read_hold(cluster, clock=clock)
    if before.hold is None:
        return before, False
    if before.absent and not accepts_lost:
        return before, True
    await end_hold(cluster, [*map(BookieId, before.absent)], clock=clock)
    return await read_hold(cluster, clock=clock), False


async def end_hold(cluster: AdminSession, absent: Collection[BookieId], *, clock: Clock) -> bool:
    """End the hold, and return False if none was in force. Raises ConflictError.

    ``absent``: absent bookies that the operator gives up as lost. The released order keeps their
    names, so that they do not cause another hold.
    """
    order_store, znode = OrderStore(cluster.store, cluster.paths), hold_znode(cluster.paths)
    stored = await order_store.stored(znode)
    if stored is None or stored.value is None:
        return False
    hold = stored.value
    if not Orders(hold=hold).at(clock.wall_ms()).is_held:
        return False
    if absent:
        bookies = tuple(sorted({*hold.bookies, *absent}))
        released = replace(hold, bookies=bookies, is_released=True)
        await order_store.give(znode, released, over=stored)
    else:
        await order_store.withdraw(znode, over=stored)
    await cluster.note_order(order_event("hold end", bookies=tuple(sorted(absent))))
    return True

"""Draining bookies: giving the orders, taking them back, and waiting until all has moved."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.election import current_leader
from auditor.records import DrainProgress
from daemon.operating.bookie_ids import registered_bookies
from daemon.operating.bookies import drain_progress, drain_record, drain_text
from daemon.operating.marks import listed, marks_of
from daemon.operating.progress import Show
from daemon.operating.stuck import (
    NOBODY_WAITS,
    StuckLedgers,
    shown,
    still_naming,
    waiting_text,
    waits_among,
)
from daemon.operating.unreadable_orders import unreadable_drains
from daemon.visit import Visit
from ledgers.clock import Clock
from ledgers.errors import CorruptionError
from ledgers.metadata import BookieId
from replication.cluster.membership import Half, LiveNode, live_nodes
from replication.cluster.order_book import OrderBook, drain_place
from replication.cluster.orders import DrainOrder, Orders
from replication.queue import payloads
from replication.waiting.notes import WaitingNotes

POLL_S = 1.0
ROLL_CALL_S = 10.0
"""Between two looks at whether nodes are at work."""
POLLED_MARKS_PER_S = 500
"""The marks of what is left are read again and again: many of them less often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drains:
    """Those that are ordered, and how far each is."""

    orders: Orders
    progress: dict[BookieId, DrainProgress]
    stuck: tuple[str, ...] = ()
    """Why each ledger that is left cannot move before somebody helps, where that holds for all of
    them."""

    @property
    def ledgers_left(self) -> int | None:
        """Over all of them; None while one was not looked for yet."""
        if self.progress.keys() != self.orders.draining.keys():
            return None
        return sum(progress.ledgers_left for progress in self.progress.values())

    def are_drained(self, bookies: Sequence[BookieId]) -> bool:
        """Whether no ledger names any of these, or may, as the leader last saw it."""
        return all(b in self.progress and self.progress[b].is_drained for b in bookies)

    def are_drained_or_in_doubt(self, bookies: Sequence[BookieId]) -> bool:
        """Whether nothing is left to move that anybody knows of: ledgers that cannot be read, at
        most."""
        return all(
            b in self.progress and (self.progress[b].is_drained or self.progress[b].is_in_doubt)
            for b in bookies
        )

    def only(self, bookies: Sequence[BookieId]) -> "Drains":
        draining = {b: order for b, order in self.orders.draining.items() if b in bookies}
        return Drains(
            orders=Orders(
                draining=draining,
                unreadable=unreadable_drains(self.orders.unreadable, bookies),
            ),
            progress={b: p for b, p in self.progress.items() if b in bookies},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "bookies": {
                bookie: drain_record(order, self.progress.get(bookie))
                for bookie, order in sorted(self.orders.draining.items())
            },
            "unreadable_orders": list(self.orders.unreadable),
            "waiting_for_help": list(self.stuck),
        }

    def to_text(self) -> str:
        lines = [f"{b}: {drain_text(self.progress.get(b))}" for b in sorted(self.orders.draining)]
        if self.stuck:
            lines += ["none of those that are left can move before that is helped:"]
            lines += [f"  {text}" for text in shown(self.stuck)]
        return "\n".join(lines) or "no bookie is being drained"


async def read_drains(cluster: Visit) -> Drains:
    """Of the orders those about drains."""
    every = await OrderBook(cluster.store, cluster.ur).read()
    orders = Orders(draining=every.draining, unreadable=unreadable_drains(every.unreadable))
    return Drains(orders=orders, progress=await drain_progress(cluster, orders))


async def order_drains(
    cluster: Visit, bookies: Sequence[BookieId], *, may_fence: bool | None, clock: Clock
) -> None:
    """One that is being drained already goes on, under the new terms. ``may_fence``: None: as it
    stands.

    Raises ConflictError, and CorruptionError where a later release's order stands.
    """
    book = OrderBook(cluster.store, cluster.ur)
    for bookie in bookies:
        place = drain_place(cluster.ur, bookie)
        standing = await book.standing(place)
        if standing is None:
            order = DrainOrder(since_ms=clock.wall_ms(), may_fence=bool(may_fence))
        elif standing.order is None:
            raise CorruptionError(
                "an order stands that this release cannot read; --cancel takes it back",
                bookie=bookie,
            )
        elif may_fence is None:
            order = standing.order
        else:
            order = replace(standing.order, may_fence=may_fence)
        if standing is None or standing.order != order:
            await book.give(place, order, over=standing)


async def cancel_drains(cluster: Visit, bookies: Sequence[BookieId]) -> list[BookieId]:
    """Take the orders back; returns those that there was one for. Raises ConflictError."""
    book = OrderBook(cluster.store, cluster.ur)
    cancelled = []
    for bookie in bookies:
        place = drain_place(cluster.ur, bookie)
        standing = await book.standing(place)
        if standing is not None:
            await book.withdraw(place, over=standing)
            cancelled.append(bookie)
    return cancelled


async def wait_drained(
    cluster: Visit,
    bookies: Sequence[BookieId],
    *,
    tell: Callable[[str], None],
    show: Show,
    clock: Clock,
) -> Drains:
    """Until no ledger that can be read names any of them, an order is taken back, or none that is
    left can move.

    ``tell``: of what keeps nodes from the work, now and whenever it changes. Returns the drains as
    they are then: one may still be in doubt, or ``stuck``.
    """
    left, roll_call = _LeftLedgers(cluster, clock), _RollCall(cluster, tell, clock)
    while True:
        drains = (await read_drains(cluster)).only(bookies)
        if drains.orders.draining.keys() != set(bookies):
            return drains
        if drains.are_drained_or_in_doubt(bookies):
            return drains
        await roll_call.call()
        if drains.ledgers_left is not None:
            if reasons := await left.look(drains):
                return replace(drains, stuck=tuple(reasons))
            waits = left.waits
            show(
                drains.ledgers_left,
                waiting=waits.count,
                beside=waiting_text(waits, left=drains.ledgers_left, now_ms=clock.wall_ms()),
            )
        await clock.sleep(POLL_S)


class _RollCall:
    """Whether nodes are at work on what is ordered."""

    def __init__(self, cluster: Visit, tell: Callable[[str], None], clock: Clock) -> None:
        self._cluster = cluster
        self._tell = tell
        self._clock = clock
        self._due_s = -math.inf
        self._told: list[str] = []
        self._nodes: dict[str, LiveNode | None] = {}

    async def call(self) -> None:
        """Tell what is new, every now and then."""
        if self._clock.now_s() < self._due_s:
            return
        self._due_s = self._clock.now_s() + ROLL_CALL_S
        found = await nobody_at_work(self._cluster, self._nodes)
        if found != self._told:
            for text in found or ["that is over: nodes are at work on it"]:
                self._tell(text)
        self._told = found


class _LeftLedgers:
    """What is left of drains, by the marks: whether any of it moves."""

    def __init__(self, cluster: Visit, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._stuck = StuckLedgers(cluster, clock)
        self._due_s = 0.0
        self.waits = NOBODY_WAITS
        """As it was when they were last looked at."""

    async def look(self, drains: Drains) -> list[str]:
        """Why each cannot move, once that is certain of all; else empty."""
        if self._clock.now_s() < self._due_s:
            return []
        ledger_ids = await self._marked(drains)
        self.waits = await waits_among(self._cluster, ledger_ids)
        reasons = await self._stuck.look(ledger_ids)
        self._due_s = self._clock.now_s() + len(ledger_ids) / POLLED_MARKS_PER_S
        return reasons

    async def _marked(self, drains: Drains) -> set[int]:
        """Those marked for the bookies that name them still, or whose marks cannot be read; none
        while others are not marked yet."""
        marks = await marks_of(self._cluster, await listed(self._cluster))
        named = {
            bookie: {m.ledger_id for m in marks if m.mark is None or bookie in m.mark.replicas}
            for bookie in drains.progress
        }
        if any(len(named[b]) < progress.ledgers_left for b, progress in drains.progress.items()):
            return set()
        marked = set().union(*named.values())
        if all(len(named[b]) == progress.ledgers_left for b, progress in drains.progress.items()):
            return marked
        # What has left them may wait on, for copies on others that are under maintenance: that is
        # nothing to wait for.
        noted = marked & await WaitingNotes(self._cluster.store, self._cluster.ur).ledger_ids()
        still = await still_naming(self._cluster, sorted(noted), drains.progress)
        return marked - (noted - set(still))


async def concerns(cluster: Visit, bookies: Sequence[BookieId]) -> list[str]:
    """What keeps these from being drained, or from staying so: sentences that say what to do."""
    return [
        *await concerns_of_bookies(cluster, bookies),
        *await nobody_at_work(cluster),
    ]


async def nobody_at_work(
    cluster: Visit, known: dict[str, LiveNode | None] | None = None
) -> list[str]:
    """What keeps our daemons from doing what is ordered. ``known``: as for ``live_nodes``."""
    store, ur = cluster.store, cluster.ur
    if await store.exists(payloads.disable_path(ur)) is not None:
        return ["auto-recovery is disabled, so nothing moves: bookmender enable"]
    leader = await current_leader(store, ur)
    nodes = await live_nodes(store, ur, known)
    if leader is None:
        return ["no auditor is running, so nobody looks for the ledgers: bookmender daemon"]
    if leader.session_id not in {node.session_id for node in nodes}:
        return [
            f"the leader is Java's AutoRecovery ({leader.candidate}), which knows no drains: "
            "stop it, so that a node of ours leads"
        ]
    if not any(node.info.half is Half.WORKER for node in nodes):
        return [
            "no worker of bookmender is running, and those of Java's AutoRecovery do not look at what is drained, "
            "so nothing is copied: bookmender daemon"
        ]
    return []


async def concerns_of_bookies(cluster: Visit, bookies: Sequence[BookieId]) -> list[str]:
    """Likewise, but for those about nodes, of which who waits is told anyway."""
    view = await registered_bookies(cluster)
    writable = sorted(set(bookies) & view.writable.keys())
    concerns = []
    if writable:
        concerns.append(
            f"{', '.join(writable)} still take{'s' if len(writable) == 1 else ''} writes, so that new ledgers are "
            "put there: make it read-only, by its own HTTP admin server:\n"
            "    curl -X PUT -H 'Content-Type: application/json' -d '{\"readOnly\": true}' "
            "http://HOST:PORT/api/v1/bookie/state/readonly\n"
            "  or by forceReadOnlyBookie=true in its settings, and a restart"
        )
    orders = await OrderBook(cluster.store, cluster.ur).read()
    others = view.writable.keys() - orders.draining.keys() - set(bookies)
    if not others:
        concerns.append("no other writable bookie is left to take over: add one")
    return concerns

"""Drains: orders them, withdraws them, and waits until they are complete.

An absent bookie is drained only if that is accepted: nothing can be read from it, and its ledgers
are copied anyway once it is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from auditor.absence import read_delay
from auditor.records import DrainProgress
from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.operations.bookies import (
    DrainRecord,
    check_known,
    drain_progress,
    drain_text,
    maintenance_text,
    registered_bookies,
)
from daemon.operations.orders import node_concerns, unreadable_of, withdraw_order
from daemon.operations.waiting import (
    POLL_S,
    Show,
    Waiter,
    all_marked,
    first_reasons,
    read_all_marks,
    still_naming,
)
from daemon.status.leader import losses_due_ms
from daemon.words import duration_text, loss_due_text
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, RejectedError
from ledgers.model import BookieId
from replication.ledger_record import WaitingNotes
from replication.orders import DrainOrder, Orders, OrderStore, drain_znode


class DrainsRecord(Answer, frozen=True, kw_only=True):
    """The ordered drains."""

    bookies: dict[str, DrainRecord]
    unreadable_orders: list[str]
    blocked: list[str]
    """Why the remaining ledgers cannot move; empty unless that is so for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drains:
    """The ordered drains and the progress of each."""

    orders: Orders
    progress: dict[BookieId, DrainProgress]
    blocked: tuple[str, ...] = ()
    """Why the remaining ledgers cannot move without an operator. Empty unless that is so for all of
    them."""

    @property
    def ledgers_left(self) -> int | None:
        """Return the number of remaining ledgers of all drains.

        Returns None until the leader has scanned the ledgers for every drain.
        """
        if self.progress.keys() != self.orders.draining.keys():
            return None
        return sum(progress.ledgers_left for progress in self.progress.values())

    def are_drained(self, bookies: Sequence[BookieId]) -> bool:
        """Return True if no ledger names or may name these bookies, by the leader's last scan."""
        return all(b in self.progress and self.progress[b].is_drained for b in bookies)

    def are_drained_or_in_doubt(self, bookies: Sequence[BookieId]) -> bool:
        """Return True if no ledger is known to name these bookies. Unreadable ledgers may."""
        return all(
            b in self.progress and (self.progress[b].is_drained or self.progress[b].is_in_doubt)
            for b in bookies
        )

    def only(self, bookies: Sequence[BookieId]) -> "Drains":
        draining = {b: order for b, order in self.orders.draining.items() if b in bookies}
        return Drains(
            orders=Orders(
                draining=draining,
                unreadable=unreadable_of("draining", self.orders.unreadable, bookies),
            ),
            progress={b: p for b, p in self.progress.items() if b in bookies},
        )

    def record(self) -> DrainsRecord:
        return DrainsRecord(
            bookies={
                bookie: DrainRecord.of(order, self.progress.get(bookie))
                for bookie, order in sorted(self.orders.draining.items())
            },
            unreadable_orders=list(self.orders.unreadable),
            blocked=list(self.blocked),
        )

    def to_text(self) -> str:
        lines = [f"{b}: {drain_text(self.progress.get(b))}" for b in sorted(self.orders.draining)]
        if self.blocked:
            lines += ["all ledgers that are left are blocked:"]
            lines += [f"  {text}" for text in first_reasons(self.blocked)]
        return "\n".join(lines) or "no drain is ordered"


async def read_drains(cluster: AdminSession) -> Drains:
    """Read the drain orders and their progress."""
    every = await OrderStore(cluster.store, cluster.paths).read()
    orders = Orders(draining=every.draining, unreadable=unreadable_of("draining", every.unreadable))
    return Drains(orders=orders, progress=await drain_progress(cluster, orders))


async def begin_drains(
    cluster: AdminSession,
    bookies: Sequence[BookieId],
    *,
    may_fence: bool | None,
    accepts_absent: bool,
    clock: Clock,
) -> list[str]:
    """Order the drains. Return what keeps these bookies from being drained, without problems of
    nodes (see ``node_concerns``).

    Raises UnknownBookieError, and RejectedError if an absent bookie has no drain order yet and
    ``accepts_absent`` is False.
    """
    await check_known(cluster, bookies)
    absent = await absent_concerns(cluster, bookies, clock=clock)
    if absent and not accepts_absent:
        draining = (await read_drains(cluster)).orders.draining
        if refused := [text for bookie, text in absent.items() if bookie not in draining]:
            raise RejectedError(" ".join(refused))
    await order_drains(cluster, bookies, may_fence=may_fence, clock=clock)
    return [*absent.values(), *await concerns(cluster, bookies)]


async def order_drains(
    cluster: AdminSession, bookies: Sequence[BookieId], *, may_fence: bool | None, clock: Clock
) -> None:
    """Order the drains. A drain that is already in progress continues with the new ``may_fence``.

    ``may_fence``: None keeps the present value. Raises ConflictError, and CorruptionError if a
    later release wrote the present order.
    """
    order_store = OrderStore(cluster.store, cluster.paths)
    for bookie in bookies:
        znode = drain_znode(cluster.paths, bookie)
        stored = await order_store.stored(znode)
        if stored is None:
            drain = DrainOrder(since_ms=clock.wall_ms(), may_fence=bool(may_fence))
        elif stored.value is None or stored.is_unreadable:
            raise CorruptionError(
                f"the present order to drain {bookie} cannot be read. Cancel it first: bookmender "
                f"bookie drain {bookie} --cancel"
            )
        elif may_fence is None:
            drain = stored.value
        else:
            drain = replace(stored.value, may_fence=may_fence)
        if stored is None or stored.value != drain:
            await order_store.give(znode, drain, over=stored)
            name = "bookie drain --fence-open" if drain.may_fence else "bookie drain"
            await cluster.note_order(order_event(name, bookies=(bookie,)))


async def cancel_drains(cluster: AdminSession, bookies: Sequence[BookieId]) -> list[BookieId]:
    """Withdraw the orders, and return the bookies that had one. Raises ConflictError."""
    return [
        bookie
        for bookie in bookies
        if await withdraw_order(
            cluster,
            drain_znode(cluster.paths, bookie),
            order_event("bookie drain --cancel", bookies=(bookie,)),
        )
    ]


async def wait_drained(
    cluster: AdminSession,
    bookies: Sequence[BookieId],
    *,
    notify: Callable[[str], None],
    show: Show,
    clock: Clock,
) -> Drains:
    """Wait until the drains are complete, an order is withdrawn, or no remaining ledger can move.

    ``notify``: receives what keeps nodes from the work, at the start and after each change. Returns
    the drains at that moment. Unreadable ledgers may still name the bookies, and ``blocked`` may
    have reasons.
    """
    waiter = Waiter(
        cluster,
        concerns=lambda known: node_concerns(cluster, ignored="drains", known=known),
        notify=notify,
        show=show,
        clock=clock,
    )
    while True:
        drains = (await read_drains(cluster)).only(bookies)
        is_ordered = drains.orders.draining.keys() == set(bookies)
        if not is_ordered or drains.are_drained_or_in_doubt(bookies):
            return drains
        if (left := drains.ledgers_left) is None:
            await waiter.call_roll()
            await clock.sleep(POLL_S)
        elif reasons := await waiter.poll(await _marked(cluster, drains), left=left):
            return replace(drains, blocked=tuple(reasons))


async def _marked(cluster: AdminSession, drains: Drains) -> set[int]:
    """Return the remaining ledgers that are marked for a drained bookie, or whose mark is
    unreadable.

    Returns an empty set while some remaining ledgers are not marked yet.
    """
    marks = await read_all_marks(cluster, await all_marked(cluster))
    named = {
        bookie: {m.ledger_id for m in marks if m.mark is None or bookie in m.mark.replicas}
        for bookie in drains.progress
    }
    if any(len(named[b]) < progress.ledgers_left for b, progress in drains.progress.items()):
        return set()
    marked = set().union(*named.values())
    if all(len(named[b]) == progress.ledgers_left for b, progress in drains.progress.items()):
        return marked
    # A ledger that has left the bookie may keep its mark, because copies are missing on another
    # bookie that is in maintenance. The drain does not wait for that ledger.
    noted = marked & await WaitingNotes(cluster.store, cluster.paths).ledger_ids()
    still = await still_naming(cluster, sorted(noted), drains.progress)
    return marked - (noted - set(still))


async def concerns(cluster: AdminSession, bookies: Sequence[BookieId]) -> list[str]:
    """Return what keeps these bookies from being drained, without problems of nodes.

    A command that waits reports the problems of nodes anyway.
    """
    view = await registered_bookies(cluster)
    writable = sorted(set(bookies) & view.writable.keys())
    concerns = []
    if writable:
        concerns.append(
            f"{', '.join(writable)} still accept{'s' if len(writable) == 1 else ''} writes and "
            "gets new ledgers. Make "
            "it read-only with its HTTP admin server:\n"
            "    curl -X PUT -H 'Content-Type: application/json' -d '{\"readOnly\": true}' "
            "http://HOST:PORT/api/v1/bookie/state/readonly\n"
            "  or set forceReadOnlyBookie=true in its settings and restart it."
        )
    orders = await OrderStore(cluster.store, cluster.paths).read()
    others = view.writable.keys() - orders.draining.keys() - set(bookies)
    if not others:
        concerns.append("No other writable bookie can take the copies. Add one.")
    return concerns


async def absent_concerns(
    cluster: AdminSession, bookies: Sequence[BookieId], *, clock: Clock
) -> dict[BookieId, str]:
    """Return a sentence for each of these bookies that is absent.

    The result is empty while no bookie is registered (rule S8).
    """
    available = (await registered_bookies(cluster)).available
    absent = [bookie for bookie in dict.fromkeys(bookies) if bookie not in available]
    if not absent or not available:
        return {}
    now_ms = clock.wall_ms()
    windows = (await OrderStore(cluster.store, cluster.paths).read()).at(now_ms).maintenance
    due_ms = await losses_due_ms(cluster, absent, clock=clock)
    default_s = cluster.settings.auditor.lost_bookie_recovery_delay_s
    delay = await read_delay(cluster.store, cluster.paths, default_s=default_s)
    told = {}
    for bookie in absent:
        advice = f"If it never returns, run: bookmender bookie decommission {bookie}"
        if bookie in windows:
            told[bookie] = (
                f"{bookie} is absent, {maintenance_text(windows[bookie], now_ms=now_ms)}. Its "
                "ledgers are moved only when it is back, or when the window ends."
            )
        elif bookie not in due_ms:
            told[bookie] = (
                f"{bookie} is lost. Its ledgers are repaired from their other copies without a "
                f"drain. {advice}"
            )
        else:
            at_ms = due_ms[bookie]  # None: no auditor tracks it
            loss = f"lost after the recovery delay of {duration_text(delay.delay_s)}"
            loss = loss if at_ms is None else loss_due_text(at_ms, now_ms=now_ms)
            told[bookie] = (
                f"{bookie} is absent, so no copy can be read from it ({loss}). Once it is lost, "
                "its ledgers are repaired from their other copies without a drain. A drain does "
                f"not wait for that, and treats its open ledgers as if it were lost. {advice}"
            )
    return told

"""``bookmender bookie drain``: orders drains, withdraws them, and waits until they are complete.

The command refuses to drain an absent bookie without --yes: nothing can be read from it, and its
ledgers are copied anyway once it is lost.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from auditor.absence import read_delay
from auditor.election import current_leader
from auditor.records import DrainProgress
from daemon.admin_session import AdminSession, order_event, run_in_session
from daemon.cli.blocked import (
    NO_WAITS,
    BlockedLedgers,
    all_marked,
    count_waiting,
    first_reasons,
    read_all_marks,
    still_naming,
    waiting_text,
)
from daemon.cli.bookies import (
    BookieArgument,
    drain_progress,
    drain_record,
    drain_text,
    known_bookies,
    loss_due_text,
    maintenance_text,
    registered_bookies,
    require_known,
)
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN, config_option, output_option
from daemon.cli.orders import UNREADABLE_VOTE, unreadable_drains, unreadable_texts
from daemon.cli.plan import plan
from daemon.cli.progress import NODES_GO_ON, ProgressLine, Show, echo_notes, explain_interrupt
from daemon.status.leader import losses_due_ms
from daemon.words import duration_text, printable
from ledgers.clock import Clock, SystemClock
from ledgers.errors import CorruptionError, RejectedError
from ledgers.model import BookieId
from replication.ledger_record import WaitingNotes
from replication.nodes import LiveNode, Role, live_nodes
from replication.orders import DrainOrder, MaintenanceWindow, Orders, OrderStore, drain_znode

POLL_S = 1.0
ROLL_CALL_S = 10.0
"""Time between two checks of whether nodes work on the drains."""
POLLED_MARKS_PER_S = 500
"""Number of remaining marks that add one second to the time between two reads of them."""


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
            "blocked": list(self.blocked),
        }

    def to_text(self) -> str:
        lines = [f"{b}: {drain_text(self.progress.get(b))}" for b in sorted(self.orders.draining)]
        if self.blocked:
            lines += ["all ledgers that are left are blocked:"]
            lines += [f"  {text}" for text in first_reasons(self.blocked)]
        return "\n".join(lines) or "no drain is ordered"


async def read_drains(cluster: AdminSession) -> Drains:
    """Read the drain orders and their progress."""
    every = await OrderStore(cluster.store, cluster.paths).read()
    orders = Orders(draining=every.draining, unreadable=unreadable_drains(every.unreadable))
    return Drains(orders=orders, progress=await drain_progress(cluster, orders))


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
    order_store = OrderStore(cluster.store, cluster.paths)
    cancelled = []
    for bookie in bookies:
        znode = drain_znode(cluster.paths, bookie)
        stored = await order_store.stored(znode)
        if stored is not None:
            await order_store.withdraw(znode, over=stored)
            await cluster.note_order(order_event("bookie drain --cancel", bookies=(bookie,)))
            cancelled.append(bookie)
    return cancelled


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
    left, roll_call = _LeftLedgers(cluster, clock), _RollCall(cluster, notify, clock)
    while True:
        drains = (await read_drains(cluster)).only(bookies)
        if drains.orders.draining.keys() != set(bookies):
            return drains
        if drains.are_drained_or_in_doubt(bookies):
            return drains
        await roll_call.call()
        if drains.ledgers_left is not None:
            if reasons := await left.look(drains):
                return replace(drains, blocked=tuple(reasons))
            waits = left.waits
            show(
                drains.ledgers_left,
                waiting=waits.count,
                beside=waiting_text(waits, left=drains.ledgers_left, now_ms=clock.wall_ms()),
            )
        await clock.sleep(POLL_S)


class _RollCall:
    """Reports whether nodes work on the drains."""

    def __init__(self, cluster: AdminSession, notify: Callable[[str], None], clock: Clock) -> None:
        self._cluster = cluster
        self._notify = notify
        self._clock = clock
        self._due_s = -math.inf
        self._told: list[str] = []
        self._nodes: dict[str, LiveNode | None] = {}

    async def call(self) -> None:
        """Report changes to ``notify``, at most once per ``ROLL_CALL_S``."""
        if self._clock.now_s() < self._due_s:
            return
        self._due_s = self._clock.now_s() + ROLL_CALL_S
        found = await nobody_at_work(self._cluster, self._nodes)
        if found != self._told:
            for text in found or ["Nodes work on the drain now."]:
                self._notify(text)
        self._told = found


class _LeftLedgers:
    """Finds out from the marks whether the remaining ledgers of the drains move."""

    def __init__(self, cluster: AdminSession, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._blocked = BlockedLedgers(cluster, clock)
        self._due_s = 0.0
        self.waits = NO_WAITS
        """The counts of the last call of ``look``."""

    async def look(self, drains: Drains) -> list[str]:
        """Return why each remaining ledger cannot move, once that is certain of all; else empty."""
        if self._clock.now_s() < self._due_s:
            return []
        ledger_ids = await self._marked(drains)
        self.waits = await count_waiting(self._cluster, ledger_ids)
        reasons = await self._blocked.look(ledger_ids)
        self._due_s = self._clock.now_s() + len(ledger_ids) / POLLED_MARKS_PER_S
        return reasons

    async def _marked(self, drains: Drains) -> set[int]:
        """Return the remaining ledgers that are marked for a drained bookie, or whose mark is
        unreadable.

        Returns an empty set while some remaining ledgers are not marked yet.
        """
        marks = await read_all_marks(self._cluster, await all_marked(self._cluster))
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
        noted = marked & await WaitingNotes(self._cluster.store, self._cluster.paths).ledger_ids()
        still = await still_naming(self._cluster, sorted(noted), drains.progress)
        return marked - (noted - set(still))


async def concerns(cluster: AdminSession, bookies: Sequence[BookieId]) -> list[str]:
    """Return sentences about what keeps these bookies from being drained, with next steps."""
    return [
        *await concerns_of_bookies(cluster, bookies),
        *await nobody_at_work(cluster),
    ]


async def nobody_at_work(
    cluster: AdminSession, known: dict[str, LiveNode | None] | None = None
) -> list[str]:
    """Return what keeps bookmender's nodes from following orders, as sentences.

    ``known``: a cache, as in ``live_nodes``.
    """
    store, paths = cluster.store, cluster.paths
    if await store.exists(paths.disable) is not None:
        return ["Auto-recovery is disabled, so nothing is moved. Enable it: bookmender enable"]
    leader = await current_leader(store, paths)
    nodes = await live_nodes(store, paths, known)
    if leader is None:
        return [
            "No auditor is running, so the ledgers are not marked. Start one: bookmender daemon"
        ]
    if leader.session_id not in {node.session_id for node in nodes}:
        return [
            "The leader is Java's AutoRecovery "
            f"({printable(leader.candidate or UNREADABLE_VOTE)}), which ignores drains. Stop it, "
            "so that a bookmender node leads."
        ]
    if not any(node.info.role is Role.WORKER for node in nodes):
        return [
            "No bookmender worker is running, and Java's workers ignore drains, so nothing is "
            "copied. Start one: bookmender daemon"
        ]
    return []


async def concerns_of_bookies(cluster: AdminSession, bookies: Sequence[BookieId]) -> list[str]:
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
    losses = {
        bookie: _loss_text(at_ms, delay_s=delay.delay_s, now_ms=now_ms)
        for bookie, at_ms in due_ms.items()
    }
    return {
        bookie: in_maintenance_text(bookie, windows[bookie], now_ms=now_ms)
        if bookie in windows
        else absent_text(bookie, losses.get(bookie, ""))
        for bookie in absent
    }


def in_maintenance_text(bookie: BookieId, window: MaintenanceWindow, *, now_ms: int) -> str:
    """Return a sentence about a bookie that is absent in its maintenance window."""
    return (
        f"{bookie} is absent, {maintenance_text(window, now_ms=now_ms)}. Its ledgers are moved "
        "only when it is back, or when the window ends."
    )


def absent_text(bookie: BookieId, loss: str) -> str:
    """Return sentences about an absent bookie. ``loss``: when it becomes lost; empty if it is
    lost."""
    advice = f"If it never returns, run: bookmender bookie decommission {bookie}"
    if not loss:
        return (
            f"{bookie} is lost. Its ledgers are repaired from their other copies without a drain. "
            f"{advice}"
        )
    return (
        f"{bookie} is absent, so no copy can be read from it ({loss}). Once it is lost, its "
        "ledgers are repaired from their other copies without a drain. A drain does not wait for "
        f"that, and treats its open ledgers as if it were lost. {advice}"
    )


def _loss_text(due_ms: int | None, *, delay_s: int, now_ms: int) -> str:
    """Return when an absent bookie becomes lost. ``due_ms``: None if no auditor tracks it."""
    if due_ms is None:
        return f"lost after the recovery delay of {duration_text(delay_s)}"
    return loss_due_text(due_ms, now_ms=now_ms)


@click.command()
@click.argument("bookies", metavar="[ID]...", type=BookieArgument(), nargs=-1)
@config_option
@output_option
@click.option(
    "--fence-open/--leave-open",
    default=None,
    help="Close open ledgers, or leave them (default).",
)
@click.option("--wait", is_flag=True, help="Wait until the drain is complete.")
@click.option("--cancel", is_flag=True, help="Cancel the order. Moved copies stay moved.")
@click.option("--yes", is_flag=True, help="Drain a bookie although it is absent.")
@click.option("--dry-run", is_flag=True, help="Only show the plan, as bookmender plan does.")
def drain(
    bookies: tuple[BookieId, ...],
    config: Path | None,
    output: str,
    fence_open: bool | None,
    wait: bool,
    cancel: bool,
    yes: bool,
    dry_run: bool,
) -> None:
    """Move all copies of running bookies to other bookies.

    Make the bookie read-only first, or it gets new ledgers. Without an ID the command shows the
    progress of all drains. The order lasts until --cancel, or until the bookie is decommissioned.
    An absent bookie is refused without --yes: it cannot be read, and once it is lost its ledgers
    are repaired anyway.

    Exit codes: 0 drained; without --wait: ordered; with --cancel: no drain is ordered any more. 1
    copies are left (with --wait: all are blocked, and the reasons are listed), refused, or an order
    is unreadable. 2 unknown bookie. 3 only unreadable ledgers are left: see bookie decommission
    --ignore-unreadable.
    """
    if cancel and (wait or fence_open is not None or yes):
        raise click.UsageError(
            "--cancel cannot be combined with --wait, --yes or the open-ledger options."
        )
    if (cancel or wait or fence_open is not None or yes) and not bookies:
        raise click.UsageError("Name the bookie.")

    if dry_run:
        if len(bookies) != 1 or cancel:
            raise click.UsageError("--dry-run needs one bookie, and no --cancel.")
        click.get_current_context().invoke(
            plan, ledger_ids=(), bookie=bookies[0], config=config, output=output
        )

    async def act(cluster: AdminSession) -> Drains:
        if not bookies:
            return await read_drains(cluster)
        require_known(bookies, await known_bookies(cluster))
        if cancel:
            cancelled = await cancel_drains(cluster, bookies)
            echo_notes(
                f"The drain of {b} is cancelled. Moved copies stay moved." for b in cancelled
            )
            others = [bookie for bookie in dict.fromkeys(bookies) if bookie not in cancelled]
            echo_notes(f"No drain of {bookie} was ordered." for bookie in others)
            return await read_drains(cluster)
        echo_notes(await _absent(cluster, bookies, is_sure=yes))
        await order_drains(cluster, bookies, may_fence=fence_open, clock=SystemClock())
        if not wait:
            echo_notes(await concerns(cluster, bookies))
            return (await read_drains(cluster)).only(bookies)
        echo_notes(await concerns_of_bookies(cluster, bookies))
        with ProgressLine() as line:
            return await wait_drained(
                cluster, bookies, notify=line.note, show=line.show, clock=SystemClock()
            )

    with explain_interrupt(_what_stays(bookies, is_ordered=wait)):
        drains = run_in_session(config, act)
    echo_notes(unreadable_texts(drains.orders.unreadable))
    click.echo(json.dumps(drains.to_json(), indent=2) if output == "json" else drains.to_text())
    if wait or not bookies:
        sys.exit(_exit_code(drains, bookies or tuple(drains.orders.draining)))


async def _absent(
    cluster: AdminSession, bookies: Sequence[BookieId], *, is_sure: bool
) -> list[str]:
    """Return what follows from draining the absent bookies among these.

    Raises RejectedError if one of them has no drain order yet and the operator has not confirmed
    (``is_sure``).
    """
    told = await absent_concerns(cluster, bookies, clock=SystemClock())
    if not told or is_sure:
        return [*told.values()]
    draining = (await read_drains(cluster)).orders.draining
    if refused := [text for bookie, text in told.items() if bookie not in draining]:
        raise RejectedError(
            f"nothing was ordered. To order the drain anyway, give --yes. {' '.join(refused)}"
        )
    return [*told.values()]


def _what_stays(bookies: Sequence[BookieId], *, is_ordered: bool) -> str:
    if not is_ordered:
        return "bookmender bookie drain shows what is ordered."
    return (
        f"An order that was written stays, and {NODES_GO_ON}. bookmender bookie drain shows the "
        f"progress, bookmender bookie drain {' '.join(bookies)} --cancel cancels it."
    )


def _exit_code(drains: Drains, bookies: Sequence[BookieId]) -> int:
    if drains.orders.unreadable:
        return EXIT_FAILED
    if drains.are_drained(bookies):
        return 0
    return EXIT_UNKNOWN if drains.are_drained_or_in_doubt(bookies) else EXIT_FAILED

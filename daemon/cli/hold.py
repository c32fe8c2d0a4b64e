"""``bookmender hold``: shows, starts and ends the safety hold.

During a hold no further ledger is marked for lost bookies, and no ledger is fenced.
"""

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from auditor.records import read_absences
from daemon.admin_session import AdminSession, order_event, run_in_session, shared_clock
from daemon.cli.bookies import registered_bookies
from daemon.cli.main import EXIT_FAILED, config_option, output_option
from daemon.cli.option_types import Duration, ReasonText
from daemon.cli.orders import leader_concerns, unreadable_texts
from daemon.cli.progress import echo_notes
from daemon.words import duration_text, printable, shortened
from ledgers.clock import Clock, SystemClock
from ledgers.model import BookieId
from replication.orders import HoldOrder, Orders, OrderStore, hold_znode

BOOKIES_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldState:
    """The safety hold, and the bookies that are not registered.

    ``hold``: the hold in force, if any. ``absent``: bookies that are not registered, not in
    maintenance and not draining. ``excused``: bookies that are not registered, but in maintenance
    or draining.
    """

    hold: HoldOrder | None
    absent: tuple[BookieId, ...]
    bookie_count: int
    """Number of registered and unregistered bookies together."""
    excused: tuple[BookieId, ...] = ()
    unreadable: str = ""
    """The path of an order that cannot be read; ``hold`` is then the default that replaces it.
    Empty if there is no such order."""

    def to_json(self) -> dict[str, Any]:
        return {
            "is_held": self.hold is not None,
            "hold": None if self.hold is None else hold_record(self.hold),
            "absent": list(self.absent),
            "absent_by_order": list(self.excused),
            "bookie_count": self.bookie_count,
            "unreadable_orders": [self.unreadable] if self.unreadable else [],
        }

    def to_text(self, *, now_ms: int) -> str:
        first = "no safety hold" if self.hold is None else hold_text(self.hold, now_ms=now_ms)
        return f"{first}\n{self.absent_text}"

    @property
    def absent_text(self) -> str:
        count = len(self.absent) + len(self.excused)
        text = f"{count} of {self.bookie_count} bookies {'is' if count == 1 else 'are'} absent"
        if self.absent:
            text += f": {shortened(self.absent, at_most=BOOKIES_SHOWN_MAX)}"
        if self.excused:
            also = "; also absent, but" if self.absent else ","
            excused = shortened(self.excused, at_most=BOOKIES_SHOWN_MAX)
            text += f"{also} in maintenance or draining: {excused}"
        return text


def hold_record(hold: HoldOrder) -> dict[str, Any]:
    return {
        "since_ms": hold.since_ms,
        "until_ms": hold.until_ms,
        "bookies": list(hold.bookies),
        "reason": hold.reason,
        "is_by_operator": hold.is_by_operator,
    }


def hold_text(hold: HoldOrder, *, now_ms: int) -> str:
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


async def read_hold(cluster: AdminSession, *, clock: Clock) -> HoldState:
    """Read the hold and the absent bookies. Raises UnavailableError."""
    orders = (await OrderStore(cluster.store, cluster.paths).read()).at(clock.wall_ms())
    znode = hold_znode(cluster.paths)
    available = (await registered_bookies(cluster)).available
    named = (await read_absences(cluster.store, cluster.paths)).named(now_ms=clock.wall_ms())
    gone = ((await cluster.registration.cookies()).keys() | named) - available.keys()
    excused = gone & (orders.maintenance.keys() | orders.draining.keys())
    return HoldState(
        hold=orders.hold if orders.is_held else None,
        absent=tuple(sorted(gone - excused)),
        excused=tuple(sorted(excused)),
        bookie_count=len(gone) + len(available),
        unreadable=znode.path if znode.path in orders.unreadable else "",
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


class _ShowingGroup(click.Group):
    """A group that runs ``show`` if no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in self.get_help_option_names(ctx)):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowingGroup)
def hold() -> None:
    """Show, start or end the safety hold, which pauses marking and fencing.

    \b
      bookmender hold                        is there a hold, and why?
      bookmender hold begin --for 2h         before work on the network
      bookmender hold end                    end it, unless bookies are absent
      bookmender hold end --yes              end it: absent bookies count as lost

    The leader starts a hold by itself when many bookies disappear at once (settings: [hold]). It
    ends that hold soon after the bookies return, or after hold.lasts_s. Ledgers marked before are
    still repaired. A recovery delay of about 30 s lets the leader see a mass failure before it
    marks the first ledger. Bring bookies back before you end a hold, or give them a window with
    bookmender bookie maintenance.
    """


@hold.command()
@config_option
@output_option
def show(config: Path | None, output: str) -> None:
    """Show the safety hold, its reason and the absent bookies.

    Exit codes: 0 no hold. 1 a hold. An unreadable order counts as a hold.
    """
    state = run_in_session(config, lambda cluster: _read(cluster, SystemClock()))
    _print(state, output)
    sys.exit(0 if state.hold is None else EXIT_FAILED)


@hold.command()
@config_option
@output_option
@click.option("--for", "duration_s", type=Duration(), help="Duration from now: 30m, 2h, 1d.")
@click.option("--reason", type=ReasonText(), default="", help="Shown with the hold.")
def begin(config: Path | None, output: str, duration_s: int | None, reason: str) -> None:
    """Start a safety hold, or replace the present one.

    Use this before work during which many bookies may disappear. Without --for the hold lasts until
    bookmender hold end. Bookies that are absent at its end are lost, unless there are so many that
    the leader starts its own hold.
    """

    async def act(cluster: AdminSession) -> HoldState:
        clock = await shared_clock(cluster)
        await begin_hold(cluster, duration_s=duration_s, reason=reason, clock=clock)
        return await _read(cluster, clock)

    _print(run_in_session(config, act), output)


@hold.command()
@config_option
@output_option
@click.option("--yes", is_flag=True, help="End it even if bookies are absent.")
def end(config: Path | None, output: str, yes: bool) -> None:
    """End the safety hold. Bookies that are absent now count as lost.

    After the recovery delay their ledgers are marked and copied, and open ones are fenced. These
    bookies cause another hold only after they were registered again.

    Exit codes: 0 ended, or there was no hold. 1 bookies are absent and --yes is missing: nothing
    was changed.
    """

    async def act(cluster: AdminSession) -> tuple[HoldState, bool]:
        clock = await shared_clock(cluster)
        before = await read_hold(cluster, clock=clock)
        if before.hold is None or (before.absent and not yes):
            return before, False
        has_ended = await end_hold(cluster, before.absent, clock=clock)
        return await read_hold(cluster, clock=clock), has_ended

    state, has_ended = run_in_session(config, act)
    _print(state, output)
    if state.hold is not None and not has_ended:
        click.echo(
            "Nothing was changed, because bookies are absent. With --yes the hold ends, and the "
            "ledgers of absent bookies that are neither in maintenance nor draining are marked.",
            err=True,
        )
        sys.exit(EXIT_FAILED)


async def _read(cluster: AdminSession, clock: Clock) -> HoldState:
    """Read the hold, and print a warning if the leader does not follow it."""
    state = await read_hold(cluster, clock=clock)
    if state.hold is not None:
        echo_notes(await leader_concerns(cluster, "holds"))
    return state


def _print(state: HoldState, output: str) -> None:
    if output == "json":
        click.echo(json.dumps(state.to_json(), indent=2))
    else:
        click.echo(state.to_text(now_ms=SystemClock().wall_ms()))
    if state.unreadable:
        echo_notes(unreadable_texts([state.unreadable]))

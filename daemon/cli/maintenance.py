"""``bookmender bookie maintenance``: shows, begins and ends maintenance windows.

Before a window begins, the command checks which ledgers would have unavailable entries while the
bookie is absent as well. It reads metadata for a few seconds at most. In a large cluster it reads
only the first ledgers, and says so. Once the bookie is absent, the leader counts all such ledgers,
and ``status`` shows the number.
"""

import json
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from auditor.absence import read_delay
from auditor.backlog import has_unavailable_entry
from auditor.records import read_absences
from auditor.scan import read_mapped_ledgers
from daemon.admin_session import AdminSession, order_event, run_in_session, shared_clock
from daemon.cli.bookies import (
    BookieArgument,
    known_bookies,
    maintenance_record,
    maintenance_text,
    registered_bookies,
    require_known,
)
from daemon.cli.hold import current_hold
from daemon.cli.main import EXIT_FAILED, config_option, output_option
from daemon.cli.option_types import Duration, ReasonText
from daemon.cli.orders import leader_concerns, unreadable_texts, unreadable_windows
from daemon.cli.progress import echo_notes
from daemon.status.leader import is_named_by_none
from daemon.words import counted, duration_text, shortened
from ledgers.clock import Clock, SystemClock
from ledgers.errors import ConflictError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from replication.marks import marked_ledger_ids, read_marks
from replication.orders import MaintenanceWindow, OrderStore, maintenance_znode

LOOK_S = 15.0
"""Time limit for reading metadata, enough for some hundred thousand ledgers. An operator is
waiting."""
READS_AT_ONCE = 500
BOOKIES_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftWithout:
    """Ledgers that would have unavailable entries if ``bookie`` became absent.

    ``others``: other bookies that are absent, or may be because they are in maintenance. ``count``:
    ledgers of ``bookie`` with an entry whose every copy is on ``bookie`` and ``others``.
    ``looked_at``: number of ledgers that were read. ``is_whole``: True if the scan reached the last
    ledger.
    """

    bookie: BookieId
    others: tuple[BookieId, ...]
    count: int = 0
    looked_at: int = 0
    unreadable_count: int = 0
    is_whole: bool = True

    @property
    def is_harmless(self) -> bool:
        """Return True if every entry certainly keeps a copy on a registered bookie."""
        return not self.count and not self.unreadable_count and self.is_whole

    def to_text(self) -> str:
        """Return sentences about the ledgers, without a capital at the start. Call this only if
        ``is_harmless`` is False."""
        others = shortened(self.others, at_most=BOOKIES_SHOWN_MAX)
        why = f"Already absent or in maintenance: {others}."
        if self.count:
            least = "" if self.is_whole and not self.unreadable_count else "at least "
            return (
                f"without {self.bookie}, {least}{counted(self.count, 'ledger')} would be "
                f"unavailable: all copies of some entries are on absent bookies. {why}"
            )
        checked = (
            f"The metadata of {counted(self.unreadable_count, 'ledger')} cannot be read; none of "
            f"the other {self.looked_at:,} would be unavailable."
            if self.is_whole
            else f"Only the first {counted(self.looked_at, 'ledger')} were checked; none of them "
            "would be unavailable."
        )
        return f"without {self.bookie}, ledgers may be unavailable. {why} {checked}"


async def left_without(
    cluster: AdminSession, bookie: BookieId, *, clock: Clock
) -> LeftWithout | None:
    """Count the ledgers that would have unavailable entries.

    Returns None if no other bookie is absent or in maintenance. Raises UnavailableError.
    """
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


async def _others(cluster: AdminSession, bookie: BookieId, *, clock: Clock) -> tuple[BookieId, ...]:
    """Return the other bookies that are absent or in maintenance and that ledgers may name.

    An absent bookie that no ledger names does not matter; it may only wait to be decommissioned.
    """
    windows = (
        (await OrderStore(cluster.store, cluster.paths).read()).at(clock.wall_ms()).maintenance
    )
    available = (await registered_bookies(cluster)).available
    # The leader's record also names bookies without a cookie, such as one that died and is about to
    # be reformatted.
    named = (await read_absences(cluster.store, cluster.paths)).named(now_ms=clock.wall_ms())
    gone = ((await cluster.registration.cookies()).keys() | named) - available.keys()
    others = sorted((gone | windows.keys()) - {bookie})
    return tuple([b for b in others if not await is_named_by_none(cluster, b, clock=clock)])


class _Look:
    """Counts ledgers that would have unavailable entries, batch by batch."""

    def __init__(self, bookie: BookieId, away: Collection[BookieId]) -> None:
        self._bookie, self._away = bookie, away
        self.count = self.looked_at = self.unreadable_count = 0

    async def at(self, cluster: AdminSession, ledger_ids: Sequence[int]) -> None:
        ledgers, unreadable = await read_mapped_ledgers(cluster.manager, ledger_ids)
        self.looked_at += len(ledgers)
        self.unreadable_count += len(unreadable)
        self.count += sum(
            self._bookie in ledger.bookies and has_unavailable_entry(ledger, self._away)
            for ledger in ledgers
        )


@click.command()
@click.argument("bookie", metavar="[ID]", type=BookieArgument(), required=False)
@config_option
@output_option
@click.option("--for", "duration_s", type=Duration(), help="Duration from now: 30m, 2h, 1d.")
@click.option("--reason", type=ReasonText(), default="", help="Shown with the window.")
@click.option("--end", is_flag=True, help="End the window now.")
@click.option(
    "--yes",
    is_flag=True,
    help="Begin the window even if ledgers become unavailable.",
)
def maintenance(
    bookie: BookieId | None,
    config: Path | None,
    output: str,
    duration_s: int | None,
    reason: str,
    end: bool,
    yes: bool,
) -> None:
    """Let a bookie be absent for a while without copying its ledgers.

    \b
      bookmender bookie maintenance ID --for 30m    before the restart of a host
      bookmender bookie maintenance ID --end        when the work is done
      bookmender bookie maintenance                 show all windows

    Until the end of the window nothing is marked or copied for the bookie, it gets no copies, and
    its open ledgers are not fenced. If it is still absent at the end, the recovery delay begins.
    If other bookies are absent too, ledgers may become unavailable. The command then checks the
    metadata for up to 15 s, and refuses without --yes if that could happen.

    Exit codes: 0 done; with --end: the bookie has no window any more. 1 refused, or an order is
    unreadable. 2 unknown bookie.
    """
    if end and duration_s is not None:
        raise click.UsageError("Give --for, which begins a window, or --end, not both.")
    if (end or duration_s is not None or reason) and bookie is None:
        raise click.UsageError("Name the bookie.")
    if reason and duration_s is None:
        raise click.UsageError("--reason needs --for.")
    if yes and duration_s is None:
        raise click.UsageError("--yes needs --for.")

    refusal = ""

    async def act(
        cluster: AdminSession,
    ) -> tuple[dict[BookieId, MaintenanceWindow], tuple[str, ...]]:
        nonlocal refusal
        clock = await shared_clock(cluster)
        if bookie is not None:
            require_known([bookie], await known_bookies(cluster))
            if duration_s is not None and not yes:
                refusal = await _refusal(cluster, bookie)
            if not refusal:
                await _change(
                    cluster, bookie, duration_s=duration_s, reason=reason, end=end, clock=clock
                )
        windows = await read_windows(cluster, clock)
        if windows if bookie is None else bookie in windows:
            echo_notes(await leader_concerns(cluster, "maintenance windows"))
        unreadable = await read_unreadable_windows(cluster, bookie)
        echo_notes(unreadable_texts(unreadable))
        return {b: window for b, window in windows.items() if bookie in (None, b)}, unreadable

    windows, unreadable = run_in_session(config, act)
    if output == "json":
        record = {b: maintenance_record(window) for b, window in sorted(windows.items())}
        told = {"bookies": record, "unreadable_orders": [*unreadable]}
        why = {"error": refusal, "exit_code": EXIT_FAILED} if refusal else {}
        click.echo(json.dumps(told | why, indent=2))
    if refusal:
        echo_notes([f"Nothing was changed: {refusal} To begin the window anyway, give --yes."])
    if output == "text":
        now_ms = SystemClock().wall_ms()
        for each, window in sorted(windows.items()):
            click.echo(f"{each}: {maintenance_text(window, now_ms=now_ms)}")
        if not windows and not refusal:
            click.echo(f"{bookie or 'no bookie'} is{' not' if bookie else ''} in maintenance")
    sys.exit(EXIT_FAILED if unreadable or refusal else 0)


async def _refusal(cluster: AdminSession, bookie: BookieId) -> str:
    """Return why the bookie should not be absent now; empty if there is no objection."""
    left = await left_without(cluster, bookie, clock=SystemClock())
    return "" if left is None or left.is_harmless else left.to_text()


async def _change(
    cluster: AdminSession,
    bookie: BookieId,
    *,
    duration_s: int | None,
    reason: str,
    end: bool,
    clock: Clock,
) -> None:
    """Open or end the bookie's window, if the operator asked for either."""
    if duration_s is not None:
        await open_window(cluster, bookie, duration_s=duration_s, reason=reason, clock=clock)
        echo_notes(await concerns(cluster, bookie, clock=clock))
    if end:
        has_ended = await end_window(cluster, bookie)
        echo_notes(
            [
                f"The maintenance window of {bookie} is ended."
                if has_ended
                else f"{bookie} had no maintenance window."
            ]
        )
        if has_ended:
            echo_notes(await end_concerns(cluster, bookie, clock=SystemClock()))


async def open_window(
    cluster: AdminSession, bookie: BookieId, *, duration_s: int, reason: str, clock: Clock
) -> MaintenanceWindow:
    """Begin a window now, replacing an existing one. Raises ConflictError."""
    order_store, znode = (
        OrderStore(cluster.store, cluster.paths),
        maintenance_znode(cluster.paths, bookie),
    )
    now_ms = clock.wall_ms()
    window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + duration_s * 1000, reason=reason)
    await order_store.give(znode, window, over=await order_store.stored(znode))
    await cluster.note_order(
        order_event("bookie maintenance", bookies=(bookie,), ends_ms=window.until_ms, reason=reason)
    )
    return window


async def end_window(cluster: AdminSession, bookie: BookieId) -> bool:
    """End the window, and return False if there was none. Raises ConflictError."""
    order_store, znode = (
        OrderStore(cluster.store, cluster.paths),
        maintenance_znode(cluster.paths, bookie),
    )
    stored = await order_store.stored(znode)
    if stored is None:
        return False
    await order_store.withdraw(znode, over=stored)
    await cluster.note_order(order_event("bookie maintenance --end", bookies=(bookie,)))
    return True


async def read_unreadable_windows(
    cluster: AdminSession, bookie: BookieId | None
) -> tuple[str, ...]:
    """Return the paths of unreadable windows; if a bookie is given, only of that bookie."""
    orders = await OrderStore(cluster.store, cluster.paths).read()
    return unreadable_windows(orders.unreadable, None if bookie is None else [bookie])


async def read_windows(cluster: AdminSession, clock: Clock) -> dict[BookieId, MaintenanceWindow]:
    """Return the current windows, and delete those that are over."""
    order_store = OrderStore(cluster.store, cluster.paths)
    orders = await order_store.read()
    current = dict(orders.at(clock.wall_ms()).maintenance)
    for bookie in orders.maintenance.keys() - current.keys():
        znode = maintenance_znode(cluster.paths, bookie)
        stored = await order_store.stored(znode)
        is_over = stored is not None and stored.value == orders.maintenance[bookie]
        if stored is not None and is_over and not stored.is_unreadable:
            # On a conflict another command is writing a new window. A window that stays does no
            # harm.
            with suppress(ConflictError, UnauthorizedError, UnavailableError):
                await order_store.withdraw(znode, over=stored)
    return current


async def concerns(cluster: AdminSession, bookie: BookieId, *, clock: Clock) -> list[str]:
    """Return why the window is too late or not needed, as sentences."""
    if bookie in (await registered_bookies(cluster)).available:
        return []
    marked = await marked_ledger_ids(cluster.store, cluster.paths)
    marks = await read_marks(cluster.store, cluster.paths, marked)
    count = sum(m.mark is not None and bookie in m.mark.replicas for m in marks)
    doubtful = sum(m.mark is None for m in marks)
    found: list[str] = []
    if count:
        found.append(
            f"{bookie} is already lost, and {counted(count, 'ledger')} "
            f"{'is' if count == 1 else 'are'} marked for it. The marks and new copies stay. The "
            "other repairs wait until the window ends or the bookie is back."
        )
    if doubtful:
        found.append(
            f"{counted(doubtful, 'unreadable mark')} may name {bookie}: bookmender queue list "
            "shows the ledgers."
        )
    if not found and await is_named_by_none(cluster, bookie, clock=clock):
        found.append(
            f"No ledger names {bookie}, so it needs no window. If it never returns, run: "
            f"bookmender bookie decommission {bookie}"
        )
    return found


async def end_concerns(cluster: AdminSession, bookie: BookieId, *, clock: Clock) -> list[str]:
    """Return what follows if the window of an absent bookie ends now, as sentences.

    The result is empty while no bookie is registered, because then no bookie becomes lost (rule
    S8).
    """
    store, paths = cluster.store, cluster.paths
    available = (await registered_bookies(cluster)).available
    if not available or bookie in available:
        return []
    if await is_named_by_none(cluster, bookie, clock=clock):
        return [
            f"{bookie} is absent, but no ledger names it, so nothing is copied. If it never "
            f"returns, run: bookmender bookie decommission {bookie}"
        ]
    default_s = cluster.settings.auditor.lost_bookie_recovery_delay_s
    delay = await read_delay(store, paths, default_s=default_s)
    absences = await read_absences(store, paths)
    unmarked_until = ""
    if await current_hold(cluster, clock=clock) is not None:
        unmarked_until = "the safety hold ends (bookmender hold)"
    elif await store.exists(paths.disable) is not None:
        unmarked_until = "auto-recovery is enabled (bookmender enable)"
    return [
        lost_at_end_text(
            bookie,
            delay_s=delay.delay_s,
            named_count=absences.named_count(bookie, now_ms=clock.wall_ms()),
            unmarked_until=unmarked_until,
        )
    ]


def lost_at_end_text(
    bookie: BookieId, *, delay_s: int, named_count: int | None, unmarked_until: str
) -> str:
    """Return a sentence on when an absent bookie becomes lost and what happens to its ledgers.

    ``named_count``: ledgers that name the bookie; None if no auditor counts them.
    ``unmarked_until``: what must happen before a ledger is marked; empty if nothing prevents it.
    """
    when = (
        f"will be lost in {duration_text(delay_s)}, unless it is back by then"
        if delay_s
        else "is lost now"
    )
    whose = "Its ledgers" if named_count is None else f"Its {counted(named_count, 'ledger')}"
    verb = "is" if named_count == 1 else "are"
    but = f", but not before {unmarked_until}" if unmarked_until else ""
    return (
        f"{bookie} is absent, and {when}. {whose} {verb} then marked and copied to other "
        f"bookies{but}. To prevent that, begin another window: bookmender bookie maintenance "
        f"{bookie} --for 1h"
    )

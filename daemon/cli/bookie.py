"""``bookmender bookie``: lists bookies, and orders what happens to them."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from daemon.admin_session import AdminSession, in_each_session, shared_clock
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN, CommandGroup, cluster_options
from daemon.cli.option_types import BookieArgument, Duration, ReasonText
from daemon.cli.output import echo, echo_list, list_options, table
from daemon.cli.progress import NODES_GO_ON, ProgressLine, echo_notes, explain_interrupt
from daemon.cli.session import run_in_session
from daemon.operations import drains, maintenance
from daemon.operations.bookies import (
    SORTED_BY,
    WORST_FIRST,
    BookieRow,
    BookieState,
    MaintenanceRecord,
    bookies_record,
    check_known,
    chosen_rows,
    gather_bookies,
    known_bookies,
    maintenance_text,
)
from daemon.operations.decommission import (
    Decommissioned,
    decommission_bookie,
)
from daemon.operations.identities import (
    Identities,
    give_trust,
    read_identities,
    withdraw_trust,
)
from daemon.operations.orders import leader_concerns, node_concerns, unreadable_texts
from daemon.words import counted, duration_text, loss_due_text
from ledgers.clock import SystemClock
from ledgers.errors import RejectedError
from ledgers.model import BookieId
from ledgers.placement.topology import clean_rack
from ledgers.sizes import size_text
from ledgers.typed import convert


@click.group(cls=CommandGroup)
def bookie() -> None:
    """List bookies, and take them out of service.

    \b
    Take a bookie out of service while it runs:
      bookmender bookie drain ID --wait           move its copies to other bookies
      (stop the bookie)
      bookmender bookie decommission ID           delete its cookie
    Restart its host without any copying:
      bookmender bookie maintenance ID --for 30m
    """


def parse_states(text: str) -> frozenset[BookieState]:
    """Return the states of a list such as ``lost,absent``."""
    try:
        return frozenset(map(BookieState, text.split(",")))
    except ValueError as error:
        allowed = ", ".join(state.value for state in WORST_FIRST)
        raise click.BadParameter(f"{text!r} is not a list of states. Allowed: {allowed}") from error


@bookie.command("list")
@list_options
@click.option(
    "--state",
    "states",
    type=parse_states,
    metavar="STATE,...",
    help="Only these, such as lost,absent.",
)
@click.option(
    "--rack", type=clean_rack, metavar="RACK", help="Only bookies in this rack or region."
)
@click.option(
    "--sort", type=click.Choice(tuple(SORTED_BY)), default="state", help="Order.  [default: state]"
)
@click.option("--space", is_flag=True, help="Also ask each bookie for its disk space.")
def list_bookies(
    config: Path | None,
    output: str,
    states: frozenset[BookieState] | None,
    rack: str | None,
    sort: str,
    space: bool,
) -> None:
    """List bookies with their states and orders.

    \b
      writable   takes reads and writes
      read-only  takes reads only
      absent     not registered, but in maintenance or within the recovery delay
      lost       absent for longer than the recovery delay; its ledgers are copied

    The worst state comes first; with --sort space the fullest bookie, with --sort since the latest
    change. LEDGERS LEFT are those that still name a bookie that is not there or is draining. A
    bookmender leader records them, and the racks.

    Exit code 1: an order cannot be read. The message names it.
    """

    known, unreadable = run_in_session(
        config,
        lambda cluster: gather_bookies(
            cluster, clock=SystemClock(), with_space=space or sort == "space"
        ),
    )
    rows = chosen_rows(known, sort=sort, states=states or frozenset(WORST_FIRST), rack=rack)
    echo_list(
        output,
        bookies_record(rows, unreadable),
        rows="bookies",
        text=lambda: list_text(rows, known, now_ms=SystemClock().wall_ms()),
    )
    echo_notes(unreadable_texts(unreadable))
    sys.exit(EXIT_FAILED if unreadable else 0)


def list_text(rows: Sequence[BookieRow], known: Sequence[BookieRow], *, now_ms: int) -> str:
    """Return a line for each row, and how many bookies are shown and in which states."""
    shown = counted(len(known), "bookie")
    shown = shown if len(rows) == len(known) else f"{len(rows):,} of {shown}"
    counts = Counter(row.state for row in rows)
    by_state = ", ".join(f"{counts[s]:,} {s.value}" for s in WORST_FIRST if counts[s])
    lines = table([_cells(row, now_ms=now_ms) for row in rows], numbers=("LEDGERS LEFT",))
    return "\n".join([*lines, f"{shown}: {by_state}" if by_state else shown])


def _cells(row: BookieRow, *, now_ms: int) -> dict[str, str]:
    state, orders, left = row.state.value, [], ""
    if row.loss_due_ms is not None:
        state += f", {loss_due_text(row.loss_due_ms, now_ms=now_ms)}"
    if row.drain is not None:
        is_drained = row.progress is not None and row.progress.is_drained
        orders.append("drained" if is_drained else "drain")
    if row.maintenance is not None:
        ends = duration_text((row.maintenance.until_ms - now_ms) / 1000)
        orders.append(f"maintenance for {ends}")
    if row.drain is not None or row.state in (BookieState.ABSENT, BookieState.LOST):
        left = "unknown" if row.ledgers_left is None else f"{row.ledgers_left:,}"
    used = ""
    if row.disk_space is not None and row.used_share is not None:
        used = f"{row.used_share:.0%} of {size_text(row.disk_space.total_bytes)}"
    since = row.since_ms and duration_text((now_ms - row.since_ms) / 1000)
    return {
        "BOOKIE": row.bookie,
        "STATE": state,
        "SINCE": f"{since} ago" if since else "",
        "RACK": row.rack or "",
        "LEDGERS LEFT": left,
        "USED": used,
        "ORDERS": ", ".join(orders),
    }


# --- Drains ---------------------------------------------------------------------------------------


@bookie.command()
@click.argument("bookies", metavar="[ID]...", type=BookieArgument(), nargs=-1)
@cluster_options
@click.option(
    "--fence-open/--leave-open",
    default=None,
    help="Close open ledgers, or leave them (default).",
)
@click.option("--wait", is_flag=True, help="Wait until the drain is complete.")
@click.option("--cancel", is_flag=True, help="Cancel the order. Moved copies stay moved.")
@click.option("--yes", is_flag=True, help="Drain a bookie although it is absent.")
def drain(
    bookies: tuple[BookieId, ...],
    config: Path | None,
    output: str,
    fence_open: bool | None,
    wait: bool,
    cancel: bool,
    yes: bool,
) -> None:
    """Move all copies off running bookies.

    \b
      bookmender bookie drain host:3181 --fence-open --wait
      bookmender bookie drain                                show the progress of all drains
      bookmender bookie drain host:3181 --cancel

    Make the bookie read-only first, or it gets new ledgers. bookmender plan --bookie ID shows what
    will be copied. The order lasts until --cancel, or until the bookie is decommissioned. An absent
    bookie is refused without --yes: it cannot be read, and once it is lost its ledgers are repaired
    anyway.

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

    async def act(cluster: AdminSession) -> drains.Drains:
        if not bookies:
            return await drains.read_drains(cluster)
        if cancel:
            await check_known(cluster, bookies)
            cancelled = await drains.cancel_drains(cluster, bookies)
            for each in cancelled:
                echo_notes([f"The drain of {each} is cancelled. Moved copies stay moved."])
            others = [each for each in dict.fromkeys(bookies) if each not in cancelled]
            echo_notes(f"No drain of {each} was ordered." for each in others)
            return await drains.read_drains(cluster)
        clock = SystemClock()
        try:
            concerns = await drains.begin_drains(
                cluster, bookies, may_fence=fence_open, accepts_absent=yes, clock=clock
            )
        except RejectedError as error:
            raise RejectedError(
                f"nothing was ordered. To order the drain anyway, give --yes. {error}"
            ) from error
        echo_notes(concerns)
        if not wait:
            echo_notes(await node_concerns(cluster, ignored="drains"))
            return (await drains.read_drains(cluster)).only(bookies)
        with ProgressLine() as line:
            return await in_each_session(
                cluster,
                lambda here: drains.wait_drained(
                    here, bookies, notify=line.note, show=line.show, clock=clock
                ),
            )

    stays = "bookmender bookie drain shows what is ordered."
    if wait:
        stays = (
            f"An order that was written stays, and {NODES_GO_ON}. bookmender bookie drain shows "
            f"the progress, bookmender bookie drain {' '.join(bookies)} --cancel cancels it."
        )
    with explain_interrupt(stays):
        found = run_in_session(config, act)
    echo_notes(unreadable_texts(found.orders.unreadable))
    echo(output, found.record(), found.to_text())
    if not wait and bookies:
        return
    wanted = bookies or tuple(found.orders.draining)
    if found.orders.unreadable:
        sys.exit(EXIT_FAILED)
    if not found.are_drained(wanted):
        sys.exit(EXIT_UNKNOWN if found.are_drained_or_in_doubt(wanted) else EXIT_FAILED)


# --- Maintenance ----------------------------------------------------------------------------------


@bookie.command("maintenance")
@click.argument("bookie", metavar="[ID]", type=BookieArgument(), required=False)
@cluster_options
@click.option("--for", "duration_s", type=Duration(), help="Duration from now: 30m, 2h, 1d.")
@click.option("--reason", type=ReasonText(), default="", help="Shown with the window.")
@click.option("--end", is_flag=True, help="End the window now.")
@click.option(
    "--yes",
    is_flag=True,
    help="Begin the window even if ledgers become unavailable.",
)
def maintain(
    bookie: BookieId | None,
    config: Path | None,
    output: str,
    duration_s: int | None,
    reason: str,
    end: bool,
    yes: bool,
) -> None:
    """Let a bookie be absent without copying.

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
    if (reason or yes) and duration_s is None:
        raise click.UsageError(f"{'--reason' if reason else '--yes'} needs --for.")

    async def act(cluster: AdminSession) -> maintenance.WindowsRecord:
        clock = SystemClock()
        if bookie is not None and duration_s is not None:
            try:
                concerns = await maintenance.begin_window(
                    cluster,
                    bookie,
                    duration_s=duration_s,
                    reason=reason,
                    accepts_unavailable=yes,
                    clock=clock,
                )
            except RejectedError as error:
                raise RejectedError(
                    f"nothing was changed: {error} To begin the window anyway, give --yes"
                ) from error
            echo_notes(concerns)
        elif bookie is not None:
            await check_known(cluster, [bookie])
        if bookie is not None and end:
            has_ended = await maintenance.end_window(cluster, bookie)
            ended, missing = f"The maintenance window of {bookie} is ended.", "had no maintenance"
            echo_notes([ended if has_ended else f"{bookie} {missing} window."])
            if has_ended:
                echo_notes(await maintenance.end_concerns(cluster, bookie, clock=clock))
        windows = await maintenance.read_windows(cluster, await shared_clock(cluster))
        if windows if bookie is None else bookie in windows:
            echo_notes(await leader_concerns(cluster, "maintenance windows"))
        unreadable = await maintenance.read_unreadable_windows(cluster, bookie)
        return maintenance.WindowsRecord(
            bookies={
                each: convert(window, MaintenanceRecord, from_attributes=True)
                for each, window in sorted(windows.items())
                if bookie in (None, each)
            },
            unreadable_orders=list(unreadable),
        )

    found = run_in_session(config, act)
    echo_notes(unreadable_texts(found.unreadable_orders))
    now_ms, none = SystemClock().wall_ms(), f"{bookie or 'no bookie'} is{' not' if bookie else ''}"
    texts = [
        f"{each}: {maintenance_text(window, now_ms=now_ms)}"
        for each, window in found.bookies.items()
    ]
    echo(output, found, "\n".join(texts) or f"{none} in maintenance")
    sys.exit(EXIT_FAILED if found.unreadable_orders else 0)


# --- Decommissions and identities -----------------------------------------------------------------


@bookie.command("decommission")
@click.argument("bookie", metavar="ID", type=BookieArgument())
@click.option("--ignore-unknown", is_flag=True, help="Exit with 0 if the bookie is unknown.")
@click.option(
    "--ignore-unreadable",
    is_flag=True,
    help="Ignore unreadable ledgers; they may lose data.",
)
@cluster_options
def decommission(
    bookie: BookieId,
    ignore_unknown: bool,
    ignore_unreadable: bool,
    config: Path | None,
    output: str,
) -> None:
    """Remove a stopped bookie for good.

    The command asks the auditor to treat all absent bookies as lost now, and waits until no ledger
    names this bookie. It reads all metadata to prove that, and then deletes the bookie's cookie. A
    running bookie is refused, unless it is read-only, drained and named by no ledger. After Ctrl-C
    the repairs continue; run the command again to finish.

    Exit codes: 0 decommissioned. 1 refused, or blocked: the remaining ledgers are listed, with
    reasons. 2 unknown bookie, or already decommissioned (see --ignore-unknown). 3 unknown:
    unreadable ledgers may name the bookie, so its cookie is kept.
    """

    stays = (
        f"Marked ledgers stay marked, and {NODES_GO_ON}. {bookie} keeps its cookie until you run "
        "this command again."
    )
    with explain_interrupt(stays):
        done = run_in_session(
            config,
            lambda cluster: decommission_visibly(
                cluster,
                bookie,
                ignores_unreadable=ignore_unreadable,
                ignores_unknown=ignore_unknown,
            ),
        )
    echo(output, done, result_text(done))


async def decommission_visibly(
    cluster: AdminSession,
    bookie: BookieId,
    *,
    ignores_unreadable: bool = False,
    ignores_unknown: bool = True,
) -> Decommissioned:
    """Decommission the bookie, and show notes and progress on standard error."""
    if bookie not in await known_bookies(cluster):
        # A ledger may still name it. Similar IDs are not suggested: a mistake here is final.
        echo_notes(
            [
                f"The cluster has no bookie {bookie} (any more). bookmender bookie list shows its "
                "bookies."
            ]
        )
    with ProgressLine() as line:
        return await decommission_bookie(
            cluster,
            bookie,
            ignores_unreadable=ignores_unreadable,
            ignores_unknown=ignores_unknown,
            notify=line.note,
            show=line.show,
            clock=SystemClock(),
        )


def result_text(done: Decommissioned) -> str:
    cookie = "its cookie is deleted" if done.cookie_deleted else "it has no cookie"
    ignored = counted(len(done.unreadable_ignored), "ledger")
    but = f" (ignored: {ignored} with unreadable metadata)" if done.unreadable_ignored else ""
    return f"{done.bookie_id} is decommissioned: no ledger names it{but}, and {cookie}"


@bookie.command("trust-identities", hidden=True)  # once in years, and dangerous: see the runbook
@click.argument("bookies", metavar="[ID]...", type=BookieArgument(), nargs=-1)
@cluster_options
@click.option("--all", "are_all", is_flag=True, help="Trust every bookie that has a cookie.")
@click.option("--withdraw", is_flag=True, help="Withdraw the order for all bookies.")
@click.option("--yes/--dry-run", help="Do it, or change nothing (default).")
def trust_identities(
    bookies: tuple[BookieId, ...],
    config: Path | None,
    output: str,
    are_all: bool,
    withdraw: bool,
    yes: bool,
) -> None:
    """Trust bookies whose cookies are too new.

    A bookie whose cookie is newer than its ledgers counts as reformatted, so its "no such entry"
    proves nothing. This is wrong after ZooKeeper's data was imported, or after bookie IDs changed.
    The order names the present cookies, so a later reformat is noticed.

    Use this only if no disk was erased. Trusting a bookie that lost its data can make a recovery
    cut off entries.

    Exit codes: 0 done, or shown. 1 not done because --yes is missing. 2 unknown bookie.
    """
    if withdraw and (bookies or are_all):
        raise click.UsageError("--withdraw withdraws the whole order. Do not name bookies.")
    if yes and not (bookies or are_all or withdraw):
        raise click.UsageError("Name bookies, or give --all.")

    async def act(cluster: AdminSession) -> Identities:
        await check_known(cluster, bookies)
        if withdraw and yes:
            await withdraw_trust(cluster)
        elif yes:
            await give_trust(cluster, None if are_all else bookies)
        return await read_identities(cluster, has_changed=yes)

    found = run_in_session(config, act)
    judged = {True: "trusted", False: "judged by the age of its cookie"}
    lines = [f"{each}: {judged[record.is_trusted]}" for each, record in found.bookies.items()]
    count = sum(record.is_trusted for record in found.bookies.values())
    echo(output, found, "\n".join([*lines, counted(count, "trusted bookie")]))
    if (bookies or are_all or withdraw) and not yes:
        click.echo("Nothing was changed. To do it, give --yes.", err=True)
        sys.exit(EXIT_FAILED)

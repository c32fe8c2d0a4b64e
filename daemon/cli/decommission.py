"""``bookmender bookie decommission``: removes a bookie from the cluster for good.

The command waits until no ledger names the bookie, then deletes its cookie. It stores nothing
between runs and skips steps that are done, so an interrupted command can be run again. The proof is
a complete read of all metadata (rule S8). No index, record or count of another node is used.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from auditor.election import current_leader
from auditor.scan import may_be_named, scan_ledgers
from daemon.admin_session import AdminSession, order_event, run_in_session
from daemon.cli.blocked import (
    BlockedLedgers,
    all_marked,
    count_waiting,
    first_reasons,
    read_all_marks,
    still_naming,
    waiting_text,
)
from daemon.cli.bookies import BookieArgument, known_bookies
from daemon.cli.check import ask_for_audit
from daemon.cli.drain import cancel_drains
from daemon.cli.hold import current_hold
from daemon.cli.main import config_option, output_option
from daemon.cli.progress import NODES_GO_ON, ProgressLine, Show, echo_notes, explain_interrupt
from daemon.words import counted
from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    ConflictError,
    NoNodeError,
    RejectedError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import Stat
from replication.orders import OrderStore

POLL_S = 1.0
POLLED_LEDGERS_PER_S = 500
"""Number of remaining ledgers that add one second to the time between two polls."""
AUDIT_AGAIN_S = 300.0
"""Time after which another audit is requested. The leader may have died during the first one."""
DOUBTFUL_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Decommissioned:
    """The result of a decommission.

    ``moved_count``: ledgers that named the bookie at the start. ``had_cookie``: the bookie had a
    cookie, which was deleted. ``was_known``: something in the cluster named the bookie at the
    start. If nothing did, the bookie is decommissioned already or never belonged to this cluster;
    the two cases cannot be told apart. ``ignored``: unreadable ledgers that may still name the
    bookie, and were not waited for.
    """

    moved_count: int
    had_cookie: bool
    was_known: bool
    ignored: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.was_known or not (self.moved_count or self.had_cookie), self


async def decommission_bookie(
    cluster: AdminSession,
    bookie: BookieId,
    *,
    ignores_unreadable: bool = False,
    notify: Callable[[str], None],
    show: Show,
    clock: Clock,
) -> Decommissioned:
    """Wait until no ledger names the bookie, then delete its cookie and its orders.

    ``ignores_unreadable``: treat unreadable ledgers as if they did not name the bookie, at the
    operator's risk. The command does not wait for the bookie's marks: a mark may remain for another
    reason after its ledger has left the bookie.

    Raises RejectedError if the operator must act first (``notify`` receives the reasons of ledgers
    that cannot move), UnavailableError if it is unknown whether the bookie is still needed, and
    ConflictError if its cookie was replaced meanwhile.
    """
    cookie = await _cookie(cluster, bookie)
    is_running = await _check_state(cluster, bookie, clock)
    found = await _naming(cluster, bookie, ignores_unreadable=ignores_unreadable)
    named = found.ledger_ids
    if is_running and named:
        raise RejectedError(
            f"{bookie} is running, and {named_by(len(named))} it. Stop it for good first, or move "
            f"its ledgers while it runs: bookmender bookie drain {bookie}"
        )
    moved_count, blocked = len(named), BlockedLedgers(cluster, clock)
    was_known = bool(cookie or is_running or named or await _marked_for(cluster, bookie))
    while named:
        await _get_marked(cluster, notify, clock)
        await _wait_moved(cluster, bookie, named, blocked, notify=notify, show=show, clock=clock)
        found = await _naming(cluster, bookie, ignores_unreadable=ignores_unreadable)
        named = found.ledger_ids
    # If the bookie was started while the command waited, the proof is no longer valid.
    if await _check_state(cluster, bookie, clock) and not is_running:
        raise RejectedError(
            f"{bookie} was started meanwhile. Stop it for good, then run this command again."
        )
    if cookie is not None:
        await _delete_cookie(cluster, bookie, cookie)
    had_order = bool(await cancel_drains(cluster, [bookie]))
    if cookie is not None:
        await cluster.note_order(order_event("bookie decommission", bookies=(bookie,)))
    return Decommissioned(
        moved_count=moved_count,
        had_cookie=cookie is not None,
        was_known=was_known or had_order,
        ignored=found.doubtful,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Naming:
    """IDs of ledgers whose metadata names the bookie, and of unreadable ledgers that may name
    it."""

    ledger_ids: tuple[int, ...]
    doubtful: tuple[int, ...]


async def _naming(cluster: AdminSession, bookie: BookieId, *, ignores_unreadable: bool) -> _Naming:
    """Return the ledgers that name the bookie, by reading all metadata.

    An unreadable ledger is doubtful unless two things hold: its bytes prove that it names only
    other bookies, and its marks are readable and do not name the bookie. Raises UnavailableError if
    there are doubtful ledgers that must not be ignored.
    """
    await cluster.store.sync(cluster.root)
    scan = await scan_ledgers(cluster.manager, lost=[bookie])
    named = await may_be_named(cluster.store, cluster.manager, scan.unreadable, [bookie])
    marked = await _may_be_marked_for(cluster, bookie, scan.unreadable) if scan.unreadable else ()
    doubtful = tuple(sorted({*named.get(bookie, ()), *marked}))
    ledger_ids = tuple(sorted(each.ledger_id for each in scan.underreplicated))
    if doubtful and not ignores_unreadable:
        others = (
            f", after {counted(len(ledger_ids), 'other ledger')} moved to other bookies"
            if ledger_ids
            else ""
        )
        raise UnavailableError(
            f"ledgers with unreadable metadata may name {bookie}, so its cookie is kept: "
            f"{await _doubts(cluster, doubtful)}. With --ignore-unreadable the cookie is deleted "
            f"anyway{others}."
        )
    return _Naming(ledger_ids=ledger_ids, doubtful=doubtful)


async def _doubts(cluster: AdminSession, doubtful: Sequence[int]) -> str:
    """Return which ledgers are doubtful, shortened if they are many, and what the operator can do.

    If ACLs deny access, they must be opened: restoring earlier metadata would not help.
    """
    shown = doubtful[:DOUBTFUL_SHOWN_MAX]
    refusals = await asyncio.gather(*(_refusal(cluster, ledger_id) for ledger_id in shown))
    shut = {i: refusal for i, refusal in zip(shown, refusals, strict=True) if refusal}
    text = ", ".join(map(str, shown))
    if (more := len(doubtful) - len(shown)) > 0:
        text += f" and {more:,} more"
    if shut:
        denied = ", ".join(map(str, shut))
        text += f". ACLs deny access to ledger {denied}: {next(iter(shut.values()))}"
    if others := [str(ledger_id) for ledger_id in shown if ledger_id not in shut]:
        which = f" of {', '.join(others)}" if shut else ""
        text += (
            f". bookmender ledger show ID shows the error{which}, and bookmender ledger restore ID "
            "may repair the metadata"
        )
    return text


async def _refusal(cluster: AdminSession, ledger_id: int) -> str:
    """Return ZooKeeper's message if ACLs deny access to the metadata; else empty."""
    try:
        await cluster.store.get(cluster.manager.path(ledger_id))
    except UnauthorizedError as error:
        return str(error)
    except NoNodeError:
        pass
    return ""


async def _check_state(cluster: AdminSession, bookie: BookieId, clock: Clock) -> bool:
    """Return True if the bookie runs, which is allowed only if it is read-only and draining.

    Raises RejectedError if the operator must do something first.
    """
    orders = (await OrderStore(cluster.store, cluster.paths).read()).at(clock.wall_ms())
    if bookie in orders.maintenance:
        raise RejectedError(
            f"{bookie} is in maintenance. End the window first: bookmender bookie maintenance "
            f"{bookie} --end"
        )
    view = await cluster.registration.read()
    if bookie in view.writable or (bookie in view.available and bookie not in orders.draining):
        raise RejectedError(
            f"{bookie} is still registered. Stop it for good; after a crash it stays registered "
            "for some seconds, until its session ends. Or make it read-only and move its ledgers "
            f"while it runs: bookmender bookie drain {bookie}"
        )
    return bookie in view.available


async def _get_marked(cluster: AdminSession, notify: Callable[[str], None], clock: Clock) -> None:
    if await cluster.store.exists(cluster.paths.disable) is not None:
        raise RejectedError(
            "auto-recovery is disabled, so no ledger would move. Enable it: bookmender enable"
        )
    if await current_leader(cluster.store, cluster.paths) is None:
        notify("No auditor is running, so its ledgers are not marked. Start one: bookmender daemon")
    if await current_hold(cluster, clock=clock) is not None:
        notify(
            "A safety hold is in force. Its ledgers are not marked before the hold ends: "
            "bookmender hold"
        )
    await ask_for_audit(cluster)


async def _wait_moved(
    cluster: AdminSession,
    bookie: BookieId,
    named: Sequence[int],
    blocked: BlockedLedgers,
    *,
    notify: Callable[[str], None],
    show: Show,
    clock: Clock,
) -> None:
    """Wait until no ledger of ``named`` names the bookie, or another audit must be requested.

    Raises RejectedError if none of the remaining ledgers can move.
    """
    until_s = clock.now_s() + AUDIT_AGAIN_S
    left = list(named)
    while left:
        if reasons := await blocked.look(left):
            for text in first_reasons(reasons):
                notify(text)
            raise RejectedError(
                f"the remaining {counted(len(left), 'ledger')} on {bookie} cannot move. Act on the "
                "reasons above, then run this command again."
            )
        if clock.now_s() >= until_s:
            return
        if told := await blocked.unexplained(left):
            notify(told)
        waits = await count_waiting(cluster, left)
        beside = waiting_text(waits, left=len(left), now_ms=clock.wall_ms())
        show(len(left), waiting=waits.count, beside=beside)
        await clock.sleep(POLL_S + len(left) / POLLED_LEDGERS_PER_S)
        left = await still_naming(cluster, left, [bookie])


async def _marked_for(cluster: AdminSession, bookie: BookieId) -> set[int]:
    """Return the ledgers whose mark, in either queue, names the bookie."""
    marks = await read_all_marks(cluster, await all_marked(cluster))
    return {m.ledger_id for m in marks if m.mark is not None and bookie in m.mark.replicas}


async def _may_be_marked_for(
    cluster: AdminSession, bookie: BookieId, ledger_ids: Collection[int]
) -> set[int]:
    """Return the ledgers whose mark in either queue names the bookie or cannot be read (rule
    S8)."""
    marks = await read_all_marks(cluster, (await all_marked(cluster)).intersection(ledger_ids))
    return {m.ledger_id for m in marks if m.mark is None or bookie in m.mark.replicas}


async def _cookie(cluster: AdminSession, bookie: BookieId) -> Stat | None:
    return await cluster.store.exists(_cookie_path(cluster, bookie))


async def _delete_cookie(cluster: AdminSession, bookie: BookieId, cookie: Stat) -> None:
    """Delete the cookie that existed before the proof. Raises ConflictError if it was replaced.

    A bookie that was reformatted meanwhile keeps its new cookie.
    """
    now = await _cookie(cluster, bookie)
    if now is None:
        return
    if now.mzxid != cookie.mzxid:
        raise ConflictError(
            f"{bookie} was reformatted meanwhile, and its new cookie is kept. Stop it for good, "
            "then run this command again."
        )
    with suppress(NoNodeError):
        await cluster.store.delete(_cookie_path(cluster, bookie), version=now.version)


def _cookie_path(cluster: AdminSession, bookie: BookieId) -> str:
    return f"{cluster.root}/cookies/{bookie}"


@click.command()
@click.argument("bookie", metavar="ID", type=BookieArgument())
@click.option("--ignore-unknown", is_flag=True, help="Exit with 0 if the bookie is unknown.")
@click.option(
    "--ignore-unreadable",
    is_flag=True,
    help="Ignore unreadable ledgers; they may lose data.",
)
@config_option
@output_option
def decommission(
    bookie: BookieId,
    ignore_unknown: bool,
    ignore_unreadable: bool,
    config: Path | None,
    output: str,
) -> None:
    """Remove a stopped bookie from the cluster for good.

    The command asks the auditor to treat all absent bookies as lost now, and waits until no ledger
    names this bookie. It reads all metadata to prove that, and then deletes the bookie's cookie. A
    running bookie is refused, unless it is read-only, drained and named by no ledger. After Ctrl-C
    the repairs continue; run the command again to finish.

    Exit codes: 0 decommissioned. 1 refused, or blocked: the remaining ledgers are listed, with
    reasons. 2 unknown bookie, or already decommissioned (see --ignore-unknown). 3 unknown:
    unreadable ledgers may name the bookie, so its cookie is kept.
    """

    async def act(cluster: AdminSession) -> Decommissioned:
        return await decommission_visibly(cluster, bookie, ignores_unreadable=ignore_unreadable)

    stays = (
        f"Marked ledgers stay marked, and {NODES_GO_ON}. {bookie} keeps its cookie until you run "
        "this command again."
    )
    with explain_interrupt(stays):
        done = run_in_session(config, act)
    if not (done.was_known or ignore_unknown):
        raise click.UsageError(
            f"Nothing names {bookie}: it is decommissioned already, or never belonged to this "
            "cluster."
        )
    if output == "json":
        record = {
            "bookie_id": bookie,
            "ledgers_moved": done.moved_count,
            "cookie_deleted": done.had_cookie,
            "unreadable_ignored": list(done.ignored),
        }
        click.echo(json.dumps(record, indent=2))
        return
    click.echo(result_text(bookie, done))


async def decommission_visibly(
    cluster: AdminSession, bookie: BookieId, *, ignores_unreadable: bool = False
) -> Decommissioned:
    """Decommission the bookie, and show notes and progress on standard error."""
    if bookie not in await known_bookies(cluster):  # a ledger may still name an unknown bookie
        echo_notes([unknown_text(bookie)])
    with ProgressLine() as line:
        return await decommission_bookie(
            cluster,
            bookie,
            ignores_unreadable=ignores_unreadable,
            notify=line.note,
            show=line.show,
            clock=SystemClock(),
        )


def result_text(bookie: BookieId, done: Decommissioned) -> str:
    cookie = "its cookie is deleted" if done.had_cookie else "it has no cookie"
    but = (
        f" (ignored: {counted(len(done.ignored), 'ledger')} with unreadable metadata)"
        if done.ignored
        else ""
    )
    return f"{bookie} is decommissioned: no ledger names it{but}, and {cookie}"


def named_by(count: int) -> str:
    """Return ``1 ledger names`` or ``3 ledgers name``."""
    return f"{counted(count, 'ledger')} {'names' if count == 1 else 'name'}"


def unknown_text(bookie: BookieId) -> str:
    """Return a note that the bookie is unknown.

    Similar IDs are not suggested: a mistake here is final.
    """
    return (
        f"The cluster has no bookie {bookie} (any more). bookmender bookie list shows its bookies."
    )

"""Decommissions: removes a bookie from the cluster for good.

The operation waits until no ledger names the bookie, then deletes its cookie. It stores nothing
between runs and skips steps that are done, so an interrupted command can be run again. The proof is
a complete read of all metadata (rule S8). No index, record or count of another node is used.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from auditor.scan import may_be_named, scan_ledgers
from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.operations.checks import ask_for_audit
from daemon.operations.drains import cancel_drains
from daemon.operations.errors import UnknownBookieError
from daemon.operations.holds import current_hold
from daemon.operations.orders import node_concerns
from daemon.operations.waiting import (
    Show,
    Waiter,
    all_marked,
    first_reasons,
    read_all_marks,
    still_naming,
)
from daemon.words import counted
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    NoNodeError,
    RejectedError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import Stat
from replication.nodes import LiveNode
from replication.orders import OrderStore

AUDIT_AGAIN_S = 300.0
"""Time after which another audit is requested. The leader may have died during the first one."""


DOUBTFUL_SHOWN_MAX = 20


class Decommissioned(Answer, frozen=True, kw_only=True):
    """A decommissioned bookie."""

    bookie_id: str
    ledgers_moved: int
    """Ledgers that named the bookie at the start."""
    cookie_deleted: bool
    unreadable_ignored: list[int]
    """Unreadable ledgers that may still name the bookie, and were not waited for."""


async def decommission_bookie(
    cluster: AdminSession,
    bookie: BookieId,
    *,
    ignores_unreadable: bool = False,
    ignores_unknown: bool = True,
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
    ConflictError if its cookie was replaced meanwhile. Raises UnknownBookieError if nothing named
    the bookie, unless ``ignores_unknown``: it is decommissioned already, or never belonged to this
    cluster; the two cases cannot be told apart.
    """
    cookie = await _cookie(cluster, bookie)
    is_running = await _check_state(cluster, bookie, clock)
    named, doubtful = await _naming(cluster, bookie, ignores_unreadable=ignores_unreadable)
    if is_running and named:
        raise RejectedError(
            f"{bookie} is running, and {counted(len(named), 'ledger')} "
            f"{'names' if len(named) == 1 else 'name'} it. Stop it for good first, or move its "
            f"ledgers while it runs: bookmender bookie drain {bookie}"
        )
    moved_count = len(named)
    was_known = bool(cookie or is_running or named or await _marked_for(cluster, bookie))
    waiter = Waiter(
        cluster,
        concerns=lambda known: _concerns(cluster, known, clock=clock),
        notify=notify,
        show=show,
        clock=clock,
    )
    while named:
        if await cluster.store.exists(cluster.paths.disable) is not None:
            raise RejectedError(
                "auto-recovery is disabled, so no ledger would move. Enable it: bookmender enable"
            )
        await ask_for_audit(cluster)
        left, until_s = list(named), clock.now_s() + AUDIT_AGAIN_S
        while left and clock.now_s() < until_s:
            if reasons := await waiter.poll(left):
                for text in first_reasons(reasons):
                    notify(text)
                raise RejectedError(
                    f"the remaining {counted(len(left), 'ledger')} on {bookie} cannot move. Act on "
                    "the reasons above, then run this command again."
                )
            left = await still_naming(cluster, left, [bookie])
        named, doubtful = await _naming(cluster, bookie, ignores_unreadable=ignores_unreadable)
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
    if not (was_known or had_order or ignores_unknown):
        raise UnknownBookieError(
            f"Nothing names {bookie}: it is decommissioned already, or never belonged to this "
            "cluster."
        )
    return Decommissioned(
        bookie_id=bookie,
        ledgers_moved=moved_count,
        cookie_deleted=cookie is not None,
        unreadable_ignored=list(doubtful),
    )


async def _concerns(
    cluster: AdminSession, known: dict[str, LiveNode | None], *, clock: Clock
) -> list[str]:
    found = await node_concerns(cluster, known=known)
    if await current_hold(cluster, clock=clock) is not None:
        found.append(
            "A safety hold is in force. Its ledgers are not marked before the hold ends: "
            "bookmender hold"
        )
    return found


async def _naming(
    cluster: AdminSession, bookie: BookieId, *, ignores_unreadable: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ledgers whose metadata names the bookie, by reading all metadata, and unreadable
    ones that may name it.

    An unreadable ledger is doubtful unless two things hold: its bytes prove that it names only
    other bookies, and its marks are readable and do not name the bookie. Raises UnavailableError if
    there are doubtful ledgers that must not be ignored.
    """
    await cluster.store.sync(cluster.root)
    scan = await scan_ledgers(cluster.manager, lost=[bookie])
    named = await may_be_named(cluster.store, cluster.manager, scan.unreadable, [bookie])
    marked: set[int] = set()  # by a mark that names the bookie or cannot be read (rule S8)
    if scan.unreadable:
        marks = await read_all_marks(
            cluster, (await all_marked(cluster)).intersection(scan.unreadable)
        )
        marked = {m.ledger_id for m in marks if m.mark is None or bookie in m.mark.replicas}
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
    return ledger_ids, doubtful


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


async def _marked_for(cluster: AdminSession, bookie: BookieId) -> set[int]:
    """Return the ledgers whose mark, in either queue, names the bookie."""
    marks = await read_all_marks(cluster, await all_marked(cluster))
    return {m.ledger_id for m in marks if m.mark is not None and bookie in m.mark.replicas}


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

"""Taking a bookie out of the cluster for good: until nothing names it, and then its cookie.

Each step is done only if it is still to be done, and nothing is remembered between runs, so that whoever
was interrupted starts again. The proof is a walk of our own over all metadata, complete or an error
(rule S8); no index, record or count of somebody else's is believed.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from auditor.election import current_leader
from auditor.scan import READS_AT_ONCE, scan_ledgers
from daemon.operating.drains import cancel_drains
from daemon.operating.progress import Show
from daemon.visit import Visit
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NoNodeError,
    NoSuchLedgerError,
    RejectedError,
    UnavailableError,
)
from ledgers.metadata import BookieId
from ledgers.store import Stat
from replication.cluster.order_book import OrderBook
from replication.cluster.own_state import own_path
from replication.queue import payloads
from replication.queue.listing import marked_ledger_ids, read_marks
from replication.waiting.notes import WaitingNotes

POLL_S = 1.0
POLLED_LEDGERS_PER_S = 500
"""Ledgers that are waited for are read again and again: many of them less often."""
AUDIT_AGAIN_S = 300.0
"""An audit that was asked for may have died with its leader: so long after, another is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decommissioned:
    """``moved_count``: ledgers that named the bookie when we began. ``had_cookie``: before we deleted it.

    ``was_known``: anything at all spoke of it then. Otherwise it is decommissioned already, or no bookie
    of this cluster: which of the two nobody can tell any more.
    """

    moved_count: int
    had_cookie: bool
    was_known: bool

    def __post_init__(self) -> None:
        assert self.was_known or not (self.moved_count or self.had_cookie), self


async def decommission_bookie(
    cluster: Visit, bookie: BookieId, *, tell: Callable[[str], None], show: Show, clock: Clock
) -> Decommissioned:
    """Wait until nothing names the bookie, then delete its cookie and its orders.

    Raises RejectedError where something must be done first, UnavailableError where it cannot be told
    whether the bookie is still needed, ConflictError where its cookie was renewed meanwhile.
    """
    cookie = await _cookie(cluster, bookie)
    is_running = await _check_state(cluster, bookie, clock)
    named = await naming_ledgers(cluster, bookie)
    if is_running and named:
        raise RejectedError(
            f"it is running, and {len(named)} ledgers name it: stop it for good first, or, to have "
            "them moved while it serves, bookmender bookie drain",
            bookie=bookie,
        )
    moved_count, is_named = len(named), False
    while True:
        marks = await _marks(cluster, bookie)
        if not named and not marks:
            break
        is_named = True
        if named:
            await _get_marked(cluster, tell)
        await _wait_moved(cluster, bookie, named, marks, show, clock)
        named = await naming_ledgers(cluster, bookie)
    # It may have been started while we waited: then all that was proven is worth nothing.
    if await _check_state(cluster, bookie, clock) and not is_running:
        raise RejectedError("it was started meanwhile; stop it for good", bookie=bookie)
    if cookie is not None:
        await _delete_cookie(cluster, bookie, cookie)
    had_order = bool(await cancel_drains(cluster, [bookie]))
    return Decommissioned(
        moved_count=moved_count,
        had_cookie=cookie is not None,
        was_known=is_named or is_running or had_order or cookie is not None,
    )


async def naming_ledgers(cluster: Visit, bookie: BookieId) -> list[int]:
    """Every ledger whose metadata names the bookie. Raises UnavailableError when that cannot be told.

    Of metadata that cannot be read, its bytes still say whether the bookie's id is in them: all
    formats hold ids in plain text.
    """
    await cluster.store.sync(cluster.settings.uri.root)
    scan = await scan_ledgers(cluster.manager, lost=[bookie], available=())
    doubtful = [i for i in scan.unreadable if await _may_name(cluster, i, bookie)]
    if doubtful:
        raise UnavailableError(
            "metadata that cannot be read may name it; bookmender ledger show ID says what is wrong",
            bookie=bookie,
            ledger_ids=doubtful[:20],
        )
    return sorted(found.ledger_id for found in scan.endangered)


async def ask_for_audit(cluster: Visit) -> None:
    """As Java's triggeraudit: the recovery delay, written once more, overrules itself for all who are away."""
    path = payloads.recovery_delay_path(cluster.ur)
    try:
        data, stat = await cluster.store.get(path)
        await cluster.store.set(path, data, version=stat.version)
    except NoNodeError as error:
        raise UnavailableError(
            "no auditor has ever run here: start one with bookmender daemon"
        ) from error
    except ConflictError:
        pass  # somebody has just written it, which asks as well


async def _check_state(cluster: Visit, bookie: BookieId, clock: Clock) -> bool:
    """Whether it is running, read-only and being drained. Raises RejectedError for what must be done first."""
    orders = (await OrderBook(cluster.store, cluster.ur).read()).at(clock.wall_ms())
    if bookie in orders.maintenance:
        raise RejectedError(
            "it is under maintenance: bookmender bookie maintenance --end", bookie=bookie
        )
    view = await cluster.registration.read()
    if bookie in view.writable or (bookie in view.available and bookie not in orders.draining):
        raise RejectedError(
            "it is running: stop it for good first. Or, to have its ledgers moved while it serves, make "
            "it read-only and have it drained: bookmender bookie drain",
            bookie=bookie,
        )
    return bookie in view.available


async def _get_marked(cluster: Visit, tell: Callable[[str], None]) -> None:
    if await cluster.store.exists(payloads.disable_path(cluster.ur)) is not None:
        raise RejectedError("auto-recovery is disabled, so nothing would move: bookmender enable")
    if await current_leader(cluster.store, cluster.ur) is None:
        tell("no auditor is running, so nobody marks its ledgers: bookmender daemon")
    await ask_for_audit(cluster)


async def _wait_moved(
    cluster: Visit,
    bookie: BookieId,
    named: Sequence[int],
    marks: Sequence[str],
    show: Show,
    clock: Clock,
) -> None:
    """Until none of the ledgers names it and these marks are gone; or so long that more must be done."""
    until_s = clock.now_s() + AUDIT_AGAIN_S
    left, marks_left = list(named), list(marks)
    while (left or marks_left) and clock.now_s() < until_s:
        show(len(left), beside=await _in_the_way(cluster, left))
        await clock.sleep(POLL_S + (len(left) + len(marks_left)) / POLLED_LEDGERS_PER_S)
        left = await _still_naming(cluster, left, bookie)
        if not left:
            stats = await asyncio.gather(*map(cluster.store.exists, marks_left))
            marks_left = [mark for mark, stat in zip(marks_left, stats, strict=True) if stat]


async def _in_the_way(cluster: Visit, ledger_ids: Collection[int]) -> str:
    noted = await WaitingNotes(cluster.store, cluster.ur).ledger_ids()
    count = len(noted.intersection(ledger_ids))
    return f"{count:,} of them wait, bookmender queue list says why" if count else ""


async def _still_naming(cluster: Visit, ledger_ids: Sequence[int], bookie: BookieId) -> list[int]:
    """Those of the ledgers that name it still. One that is gone does not."""

    async def names(ledger_id: int) -> bool:
        try:
            return bookie in (await cluster.manager.read(ledger_id)).metadata.bookies
        except NoSuchLedgerError:
            return False
        except CorruptionError:  # the walk that follows judges it
            return True

    left: list[int] = []
    for start in range(0, len(ledger_ids), READS_AT_ONCE):
        part = ledger_ids[start : start + READS_AT_ONCE]
        answers = await asyncio.gather(*map(names, part))
        left += [ledger_id for ledger_id, is_left in zip(part, answers, strict=True) if is_left]
    return left


async def _may_name(cluster: Visit, ledger_id: int, bookie: BookieId) -> bool:
    try:
        data, _ = await cluster.store.get(cluster.manager.path(ledger_id))
    except NoNodeError:
        return False
    return bookie.encode() in data


async def _marks(cluster: Visit, bookie: BookieId) -> list[str]:
    """The marks, in both queues, that name it."""
    paths: list[str] = []
    for ur in (cluster.ur, own_path(cluster.ur)):
        marks = await read_marks(cluster.store, ur, await marked_ledger_ids(cluster.store, ur))
        paths += [
            payloads.mark_path(ur, marked.ledger_id)
            for marked in marks
            if marked.mark is not None and bookie in marked.mark.replicas
        ]
    return paths


async def _cookie(cluster: Visit, bookie: BookieId) -> Stat | None:
    return await cluster.store.exists(_cookie_path(cluster, bookie))


async def _delete_cookie(cluster: Visit, bookie: BookieId, cookie: Stat) -> None:
    """The one that stood before the proof: a bookie that was set up anew meanwhile keeps its own."""
    now = await _cookie(cluster, bookie)
    if now is None:
        return
    if now.mzxid != cookie.mzxid:
        raise ConflictError("it was set up anew meanwhile, and keeps its cookie", bookie=bookie)
    with suppress(NoNodeError):
        await cluster.store.delete(_cookie_path(cluster, bookie), version=now.version)


def _cookie_path(cluster: Visit, bookie: BookieId) -> str:
    return f"{cluster.settings.uri.root}/cookies/{bookie}"

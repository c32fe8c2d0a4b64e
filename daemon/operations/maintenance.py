"""Maintenance windows: shows, begins and ends them.

Before a window begins, ledgers are looked for that would have unavailable entries while the bookie
is absent as well. That reads metadata for a few seconds at most. In a large cluster it reads only
the first ledgers, and says so. Once the bookie is absent, the leader counts all such ledgers, and
``status`` shows the number.
"""

from contextlib import suppress
from dataclasses import dataclass

from auditor.absence import read_delay
from auditor.backlog import has_unavailable_entry
from auditor.records import read_absences
from auditor.scan import read_mapped_ledgers
from daemon.admin_session import AdminSession, order_event, shared_clock
from daemon.answers import Answer
from daemon.operations.bookies import MaintenanceRecord, check_known, registered_bookies
from daemon.operations.holds import current_hold
from daemon.operations.orders import unreadable_of, withdraw_order
from daemon.status.leader import is_named_by_none
from daemon.words import counted, duration_text, shortened
from ledgers.clock import Clock
from ledgers.errors import ConflictError, RejectedError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from replication.marks import marked_ledger_ids, read_marks
from replication.orders import MaintenanceWindow, OrderStore, maintenance_znode

LOOK_S = 15.0
"""Time limit for reading metadata, enough for some hundred thousand ledgers. An operator is
waiting."""


READS_AT_ONCE = 500


BOOKIES_SHOWN_MAX = 20


class WindowsRecord(Answer, frozen=True, kw_only=True):
    """The maintenance windows, of one bookie or of all."""

    bookies: dict[str, MaintenanceRecord]
    unreadable_orders: list[str]


async def begin_window(
    cluster: AdminSession,
    bookie: BookieId,
    *,
    duration_s: int,
    reason: str,
    accepts_unavailable: bool,
    clock: Clock,
) -> list[str]:
    """Begin a window, and return why it is too late or not needed, as sentences.

    Raises UnknownBookieError, ConflictError, and RejectedError if ledgers may become unavailable
    and ``accepts_unavailable`` is False.
    """
    await check_known(cluster, [bookie])
    if not accepts_unavailable:
        left = await left_without(cluster, bookie, clock=clock)
        if left is not None and not left.is_harmless:
            raise RejectedError(left.to_text())
    shared = await shared_clock(cluster)
    await open_window(cluster, bookie, duration_s=duration_s, reason=reason, clock=shared)
    return await concerns(cluster, bookie, clock=shared)


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
    gone = frozenset((bookie, *others))
    count = looked_at = unreadable_count = 0
    deadline_s, is_whole = clock.now_s() + LOOK_S, True
    async for ledger_ids in cluster.manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            if not (is_whole := is_whole and clock.now_s() < deadline_s):
                break
            part = ledger_ids[start : start + READS_AT_ONCE]
            ledgers, unreadable = await read_mapped_ledgers(cluster.manager, part)
            looked_at += len(ledgers)
            unreadable_count += len(unreadable)
            count += sum(
                bookie in ledger.bookies and has_unavailable_entry(ledger, gone)
                for ledger in ledgers
            )
        if not is_whole:
            break
    return LeftWithout(
        bookie=bookie,
        others=others,
        count=count,
        looked_at=looked_at,
        unreadable_count=unreadable_count,
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
    event = order_event("bookie maintenance --end", bookies=(bookie,))
    return await withdraw_order(cluster, maintenance_znode(cluster.paths, bookie), event)


async def read_unreadable_windows(
    cluster: AdminSession, bookie: BookieId | None
) -> tuple[str, ...]:
    """Return the paths of unreadable windows; if a bookie is given, only of that bookie."""
    orders = await OrderStore(cluster.store, cluster.paths).read()
    return unreadable_of("maintenance", orders.unreadable, None if bookie is None else [bookie])


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
            f"{counted(doubtful, 'unreadable mark')} may name {bookie}: bookmender queue "
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
    delay_s = (await read_delay(store, paths, default_s=default_s)).delay_s
    when = (
        f"will be lost in {duration_text(delay_s)}, unless it is back by then"
        if delay_s
        else "is lost now"
    )
    count = (await read_absences(store, paths)).named_count(bookie, now_ms=clock.wall_ms())
    whose = "ledgers are" if count is None else f"{counted(count, 'ledger')} are"
    if count == 1:
        whose = "1 ledger is"
    but = ""
    if await current_hold(cluster, clock=clock) is not None:
        but = ", but not before the safety hold ends (bookmender hold)"
    elif await store.exists(paths.disable) is not None:
        but = ", but not before auto-recovery is enabled (bookmender enable)"
    return [
        f"{bookie} is absent, and {when}. Its {whose} then marked and copied to other bookies"
        f"{but}. To prevent that, begin another window: bookmender bookie maintenance {bookie} "
        "--for 1h"
    ]

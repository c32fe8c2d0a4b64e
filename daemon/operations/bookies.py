"""The known bookies at one moment. No ledger is read for this."""

import asyncio
import difflib
import enum
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from auditor.records import DrainProgress, read_absences, read_drains, read_identities
from auditor.underreplication import reformatted_bookies
from daemon.admin_session import AdminSession
from daemon.answers import Answer
from daemon.operations.errors import UnknownBookieError
from daemon.operations.orders import bookies_of
from daemon.status.leader import losses_due_ms
from daemon.words import counted, duration_text, loss_due_text, printable
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Bookies, DiskSpace
from ledgers.client import open_bookies
from ledgers.clock import Clock
from ledgers.codec.registration import parse_address
from ledgers.errors import BookmenderError, UnavailableError
from ledgers.model import BookieId
from ledgers.registration import BookieView
from ledgers.security import SecuritySettings
from ledgers.typed import convert
from replication.orders import DrainOrder, MaintenanceWindow, Orders, OrderStore
from replication.racks import remembered_racks

T = TypeVar("T")


async def known_bookies(cluster: AdminSession) -> frozenset[BookieId]:
    """Return the bookies that are registered, have a cookie, or are named by an order or a
    ledger."""
    orders = await OrderStore(cluster.store, cluster.paths).read()
    naming = (await read_absences(cluster.store, cluster.paths)).ledger_counts
    return frozenset(
        (
            *(bookie for bookie, count in naming.items() if count),
            *(await registered_bookies(cluster)).available,
            *await cluster.registration.cookies(),
            *orders.draining,
            *orders.maintenance,
            *bookies_of(orders.unreadable),
        )
    )


async def registered_bookies(cluster: AdminSession) -> BookieView:
    """Return the registered bookies; an empty view if the list cannot be trusted (rule S8)."""
    try:
        return await cluster.registration.read()
    except UnavailableError:
        return BookieView()


async def check_known(cluster: AdminSession, wanted: Sequence[BookieId]) -> None:
    """Raise UnknownBookieError for the first bookie that the cluster does not know."""
    require_known(wanted, await known_bookies(cluster))


def require_known(wanted: Sequence[BookieId], known: Collection[BookieId]) -> None:
    """Raise UnknownBookieError for the first bookie that is not among the known ones."""
    for bookie in wanted:
        if bookie not in known:
            raise UnknownBookieError(f"The cluster has no bookie {bookie}.{hint(bookie, known)}")


NEAR = 0.9
"""Similarity of IDs that may be meant: hosts and ports of a cluster are similar anyway."""


def hint(wrong: BookieId, known: Collection[BookieId]) -> str:
    """Return what is wrong with an unknown bookie ID, and a suggestion. Begins with a space."""
    port = re.fullmatch(".+:([0-9]+)", wrong)
    why = " Its port is not between 1 and 65535." if port and not parse_address(wrong) else ""
    close = difflib.get_close_matches(wrong, sorted(known), n=3, cutoff=NEAR)
    if close:
        return f"{why} Did you mean {' or '.join(close)}?"
    if not known:
        return f"{why} It has no bookies at all."
    return f"{why} bookmender bookie list shows its bookies."


BOOKIES_AT_ONCE = 64


ANSWER_TIMEOUT_S = 3.0


class BookieState(enum.Enum):
    WRITABLE = "writable"
    READ_ONLY = "read-only"
    ABSENT = "absent"
    """Not registered, although it has a cookie or is named by an order or a ledger."""
    LOST = "lost"
    """Absent longer than the recovery delay, and not in maintenance (see ``with_losses``)."""


REGISTERED = (BookieState.WRITABLE, BookieState.READ_ONLY)


# --- Answers --------------------------------------------------------------------------------------


class DrainRecord(Answer, frozen=True, kw_only=True):
    """An order to drain a bookie, and its progress by the leader's last scan."""

    since_ms: int
    may_fence: bool
    """The drain closes open ledgers."""
    is_drained: bool
    """No ledger names the bookie."""
    is_in_doubt: bool
    """Only unreadable ledgers may name it."""
    ledgers_left: int | None
    ledgers_most: int | None
    unreadable_count: int | None
    unreadable: list[int] | None
    """The first unreadable ledgers that may name it."""

    @classmethod
    def of(cls, order: DrainOrder, progress: DrainProgress | None) -> Self:
        return cls(
            since_ms=order.since_ms,
            may_fence=order.may_fence,
            is_drained=progress is not None and progress.is_drained,
            is_in_doubt=progress is not None and progress.is_in_doubt,
            ledgers_left=progress.ledgers_left if progress else None,
            ledgers_most=progress.ledgers_most if progress else None,
            unreadable_count=progress.unreadable_count if progress else None,
            unreadable=list(progress.unreadable) if progress else None,
        )


class MaintenanceRecord(Answer, frozen=True, kw_only=True):
    """A maintenance window."""

    since_ms: int
    until_ms: int
    reason: str


class DiskSpaceRecord(Answer, frozen=True, kw_only=True):
    free_bytes: int
    total_bytes: int


class BookieRecord(Answer, frozen=True, kw_only=True):
    """One known bookie."""

    bookie_id: str
    state: BookieState
    since_ms: int | None
    """Since when it is absent, or registered as it is. null: unknown."""
    lost_ms: int | None
    """When the absent bookie becomes lost."""
    rack: str | None
    """As the leader last knew it. null: unknown, or the leader has no source of racks."""
    ledgers_left: int | None
    """Ledgers that still name a bookie that is absent, lost or draining. null: not counted."""
    drain: DrainRecord | None
    maintenance: MaintenanceRecord | None
    disk_space: DiskSpaceRecord | None
    """null: not requested, or the bookie did not answer."""


class BookiesRecord(Answer, frozen=True, kw_only=True):
    bookies: list[BookieRecord]
    unreadable_orders: list[str]


# --- Rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieRow:
    """One known bookie.

    ``disk_space``: None if it was not requested, or if the bookie did not answer.
    """

    bookie: BookieId
    state: BookieState
    has_cookie: bool
    since_ms: int | None = None
    """Since when it is absent, or registered as it is. None: unknown."""
    rack: str | None = None
    """As the leader last knew it."""
    ledgers_left: int | None = None
    """Ledgers that still name an absent or draining bookie. None: not counted."""
    is_named: bool = False
    """True if it is absent and ledgers name it, by the leader's last record. If such a bookie has
    no cookie, its cookie was deleted, or its disks were erased."""
    is_wiped: bool = False
    """True if it was reformatted and no bookmender leader has processed its ledgers since."""
    drain: DrainOrder | None = None
    progress: DrainProgress | None = None
    """None also before the leader's first scan for this order."""
    maintenance: MaintenanceWindow | None = None
    disk_space: DiskSpace | None = None
    loss_due_ms: int | None = None
    """Wall-clock time at which an absent bookie becomes lost. None also if no auditor tracks it."""

    @property
    def used_share(self) -> float | None:
        """Return the used share of its disk space; None if that is unknown."""
        space = self.disk_space
        return None if space is None else 1 - space.free_bytes / space.total_bytes

    @property
    def is_absent_in_maintenance(self) -> bool:
        return self.state is BookieState.ABSENT and self.maintenance is not None

    def record(self) -> BookieRecord:
        return BookieRecord(
            bookie_id=self.bookie,
            state=self.state,
            since_ms=self.since_ms,
            lost_ms=self.loss_due_ms,
            rack=self.rack,
            ledgers_left=self.ledgers_left,
            drain=DrainRecord.of(self.drain, self.progress) if self.drain else None,
            maintenance=convert(self.maintenance, MaintenanceRecord | None, from_attributes=True),
            disk_space=convert(self.disk_space, DiskSpaceRecord | None, from_attributes=True),
        )

    def to_text(self, *, now_ms: int) -> str:
        facts = [self.state.value]
        if self.loss_due_ms is not None:
            facts.append(loss_due_text(self.loss_due_ms, now_ms=now_ms))
        if self.drain is not None:
            facts.append(drain_text(self.progress))
        if self.maintenance is not None:
            facts.append(maintenance_text(self.maintenance, now_ms=now_ms))
        return f"{self.bookie}: {', '.join(facts)}"


def drain_text(progress: DrainProgress | None) -> str:
    if progress is None:
        return "draining (its ledgers are not counted yet)"
    if progress.is_drained:
        return "drained"
    if progress.is_in_doubt:
        return f"drained, except perhaps {_unreadable_text(progress)}"
    left = f"{progress.ledgers_left:,} of {counted(progress.ledgers_most, 'ledger')} left"
    if not progress.unreadable_count:
        return f"draining ({left})"
    return f"draining ({left}, and perhaps {_unreadable_text(progress)})"


def _unreadable_text(progress: DrainProgress) -> str:
    ids = ", ".join(map(str, progress.unreadable))
    more = " and more" if progress.unreadable_count > len(progress.unreadable) else ""
    return (
        f"{counted(progress.unreadable_count, 'ledger')} with unreadable metadata: {ids}{more}; "
        "bookmender ledger show ID shows the error"
    )


def maintenance_text(window: MaintenanceWindow | MaintenanceRecord, *, now_ms: int) -> str:
    left = duration_text((window.until_ms - now_ms) / 1000)
    return f"in maintenance for another {left}" + (
        f" ({printable(window.reason)})" if window.reason else ""
    )


async def gather_bookies(
    cluster: AdminSession, *, clock: Clock, with_space: bool = False
) -> tuple[list[BookieRow], tuple[str, ...]]:
    """Return the rows of all known bookies, and the paths of unreadable orders.

    Raises UnavailableError.
    """
    orders = await OrderStore(cluster.store, cluster.paths).read()
    rows = await bookie_rows(cluster, orders, clock=clock, with_space=with_space)
    due_ms = await losses_due_ms(cluster, missed(rows), clock=clock)
    return with_losses(rows, due_ms), orders.unreadable


def bookies_record(rows: Sequence[BookieRow], unreadable: Sequence[str]) -> BookiesRecord:
    return BookiesRecord(bookies=[row.record() for row in rows], unreadable_orders=list(unreadable))


async def bookie_rows(
    cluster: AdminSession, orders: Orders, *, clock: Clock, with_space: bool = False
) -> list[BookieRow]:
    """Return a row for each known bookie, sorted by ID. ``orders``: as read from ZooKeeper."""
    view = await registered_bookies(cluster)
    cookies = await cluster.registration.cookies()
    orders = orders.at(clock.wall_ms())
    progress = await drain_progress(cluster, orders)
    disk_spaces: dict[BookieId, DiskSpace] = {}
    if with_space:
        answers = await ask_each(
            view, lambda client, bookie: client.room(bookie), cluster.settings.security
        )
        disk_spaces = {b: each for b, each in answers.items() if isinstance(each, DiskSpace)}
    reformatted = reformatted_bookies(
        cookies,
        await read_identities(cluster.store, cluster.paths),
        trusted=orders.trusted_cookies,
    )
    absences = await read_absences(cluster.store, cluster.paths)
    racks = await remembered_racks(cluster.store, cluster.paths)
    named = absences.named(now_ms=clock.wall_ms()) - view.available.keys()
    known = {*view.available, *cookies, *orders.draining, *orders.maintenance, *named}

    def since_ms(bookie: BookieId) -> int | None:
        registered = view.available.get(bookie)
        return absences.since_ms.get(bookie) if registered is None else registered.ctime_ms or None

    def ledgers_left(bookie: BookieId) -> int | None:
        if bookie not in view.available:
            return absences.named_count(bookie, now_ms=clock.wall_ms())
        return progress[bookie].ledgers_left if bookie in progress else None

    return [
        BookieRow(
            bookie=bookie,
            state=bookie_state(view, bookie),
            has_cookie=bookie in cookies,
            since_ms=since_ms(bookie),
            rack=racks.get(bookie),
            ledgers_left=ledgers_left(bookie),
            is_named=bookie in named,
            is_wiped=bookie in reformatted and reformatted[bookie].was_known,
            drain=orders.draining.get(bookie),
            progress=progress.get(bookie),
            maintenance=orders.maintenance.get(bookie),
            disk_space=disk_spaces.get(bookie),
        )
        for bookie in sorted(known)
    ]


WORST_FIRST = (BookieState.LOST, BookieState.ABSENT, BookieState.READ_ONLY, BookieState.WRITABLE)
SORTED_BY: Mapping[str, Callable[[BookieRow], Any]] = {
    "state": lambda row: (WORST_FIRST.index(row.state), -(row.ledgers_left or 0)),
    "id": lambda row: (),
    "rack": lambda row: row.rack or "",
    "space": lambda row: -(row.used_share or 0),
    "since": lambda row: -(row.since_ms or 0),
}
"""The keys of the orders of a list. Bookies with equal keys are in the order of their IDs.
``space``: the fullest first. ``since``: the latest change first."""


def chosen_rows(
    rows: Iterable[BookieRow],
    *,
    sort: str = "state",
    states: Collection[BookieState] = WORST_FIRST,
    rack: str | None = None,
) -> list[BookieRow]:
    """Return the rows with one of these states, in this rack or region, in the order ``sort``."""
    chosen = [
        row
        for row in rows
        if row.state in states and (rack is None or f"{row.rack}/".startswith(f"{rack}/"))
    ]
    return sorted(chosen, key=lambda row: (SORTED_BY[sort](row), row.bookie))


def bookie_state(view: BookieView, bookie: BookieId) -> BookieState:
    if bookie in view.writable:
        return BookieState.WRITABLE
    return BookieState.READ_ONLY if bookie in view.read_only else BookieState.ABSENT


def missed(rows: Sequence[BookieRow]) -> tuple[BookieId, ...]:
    """Return the absent bookies, not in maintenance, that have a cookie or are named by ledgers.

    They are lost or will become lost. Empty while no bookie is registered (rule S8).
    """
    if all(row.state is BookieState.ABSENT for row in rows):
        return ()
    return tuple(
        row.bookie
        for row in rows
        if row.state is BookieState.ABSENT
        and (row.has_cookie or row.is_named)
        and row.maintenance is None
    )


def with_losses(
    rows: Sequence[BookieRow], due_ms: Mapping[BookieId, int | None]
) -> list[BookieRow]:
    """Return the rows with the lost bookies marked as lost, and the time of loss of the others.

    ``due_ms``: the absent bookies that are not known to be lost. None: the time of loss is unknown.
    """
    lost = set(missed(rows)) - due_ms.keys()
    return [
        replace(row, state=BookieState.LOST)
        if row.bookie in lost
        else replace(row, loss_due_ms=due_ms.get(row.bookie))
        for row in rows
    ]


async def drain_progress(cluster: AdminSession, orders: Orders) -> dict[BookieId, DrainProgress]:
    """Return the leader's latest progress of each present drain order."""
    record = await read_drains(cluster.store, cluster.paths)
    if record is None:
        return {}
    return {
        bookie: progress
        for bookie, progress in record.bookies.items()
        if bookie in orders.draining and orders.draining[bookie].since_ms == progress.since_ms
    }


async def ask_each(
    view: BookieView, ask: Callable[[Bookies, BookieId], Awaitable[T]], security: SecuritySettings
) -> Mapping[BookieId, T | BookmenderError]:
    """Call ``ask``, which reads no entry, for each registered bookie. Return the results, and the
    errors of bookies that do not answer."""
    slots = asyncio.Semaphore(BOOKIES_AT_ONCE)
    answers: dict[BookieId, T | BookmenderError] = {}
    async with open_bookies(
        view.locate, reads_in_flight_max=1, connector=bookie_connector(security)
    ) as client:

        async def ask_one(bookie: BookieId) -> None:
            try:
                async with slots, asyncio.timeout(ANSWER_TIMEOUT_S):
                    answers[bookie] = await ask(client, bookie)
            except TimeoutError:
                answers[bookie] = UnavailableError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
            except BookmenderError as error:
                answers[bookie] = error

        await asyncio.gather(*map(ask_one, view.available))
    return answers

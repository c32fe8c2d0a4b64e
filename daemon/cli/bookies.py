"""The known bookies at one moment, and the argument type that names one.

No ledger is read for this. An unknown bookie ID is answered with similar known ones.
"""

import asyncio
import difflib
import enum
import os
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from auditor.records import DrainProgress, read_absences, read_drains, read_identities
from auditor.underreplication import reformatted_bookies
from daemon.admin_session import AdminSession, admin_session, log_errors_only
from daemon.cli.orders import bookies_of
from daemon.cli.progress import counted, duration_text, printable
from daemon.settings import load_settings
from ledgers.bookies import Bookies, DiskSpace
from ledgers.client import open_bookies
from ledgers.clock import Clock, SystemClock
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import BookmenderError, CorruptionError, UnavailableError
from ledgers.model import BookieId
from ledgers.registration import BookieView
from replication.orders import DrainOrder, MaintenanceWindow, Orders, OrderStore

COMPLETION_TIMEOUT_S = 2.0
"""Time limit for completions. A shell that blocks for longer is a nuisance."""


class BookieArgument(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A bookie ID. Shells complete it from the cluster that the settings name."""

    name = "bookie id"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> BookieId:
        try:
            return parse_bookie_id(value)
        except CorruptionError:
            self.fail(f"{value!r} cannot be a bookie's id, as in 10.0.0.1:3181", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            bookies = _completions(ctx.params.get("config"))
        except (BookmenderError, OSError, TimeoutError):
            return []
        return [CompletionItem(b) for b in sorted(bookies) if b.startswith(incomplete)]


def _completions(config: Path | None) -> Collection[BookieId]:
    settings = load_settings(config, os.environ)
    log_errors_only(settings)  # log lines must not appear among the completions

    async def look() -> Collection[BookieId]:
        async with asyncio.timeout(COMPLETION_TIMEOUT_S), admin_session(settings) as cluster:
            return await known_bookies(cluster)

    return asyncio.run(look())


async def known_bookies(cluster: AdminSession) -> frozenset[BookieId]:
    """Return the bookies that are registered, have a cookie, or are named by an order or a ledger."""
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


def require_known(wanted: Sequence[BookieId], known: Collection[BookieId]) -> None:
    """Raise UsageError for the first bookie that the cluster does not know."""
    for bookie in wanted:
        if bookie not in known:
            raise click.UsageError(f"the cluster knows no bookie {bookie}{hint(bookie, known)}")


def hint(wrong: BookieId, known: Collection[BookieId]) -> str:
    """Return a suggestion for an unknown bookie ID."""
    close = difflib.get_close_matches(wrong, sorted(known), n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    if not known:
        return "; it knows none at all"
    return "; bookmender bookie list shows those that it knows"


BOOKIES_AT_ONCE = 64
ANSWER_TIMEOUT_S = 3.0


class BookieState(enum.Enum):
    WRITABLE = "writable"
    READ_ONLY = "read-only"
    AWAY = "away"
    """Not registered, although it has a cookie or is named by an order or a ledger."""
    LOST = "lost"
    """Absent longer than the recovery delay, and not in maintenance (see ``with_losses``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieRow:
    """One known bookie. ``room``: None if it was not requested, or if the bookie did not answer."""

    bookie: BookieId
    state: BookieState
    has_cookie: bool
    is_named: bool = False
    """True if it is absent and ledgers name it, by the leader's last record. If such a bookie has
    no cookie, its cookie was deleted, or its disks were erased."""
    is_wiped: bool = False
    """True if it was reformatted and no bookmender leader has processed its ledgers since."""
    drain: DrainOrder | None = None
    progress: DrainProgress | None = None
    """None also before the leader's first scan for this order."""
    maintenance: MaintenanceWindow | None = None
    room: DiskSpace | None = None
    loss_due_ms: int | None = None
    """Wall-clock time at which an absent bookie becomes lost. None also if no auditor tracks it."""

    @property
    def is_away_on_purpose(self) -> bool:
        return self.state is BookieState.AWAY and self.maintenance is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "bookie_id": self.bookie,
            "state": self.state.value,
            "lost_ms": self.loss_due_ms,
            "drain": None if self.drain is None else drain_record(self.drain, self.progress),
            "maintenance": None
            if self.maintenance is None
            else maintenance_record(self.maintenance),
            "room": None
            if self.room is None
            else {"free_bytes": self.room.free_bytes, "total_bytes": self.room.total_bytes},
        }

    def to_text(self, *, now_ms: int) -> str:
        facts = [self.state.value]
        if self.loss_due_ms is not None:
            facts.append(loss_due_text(self.loss_due_ms, now_ms=now_ms))
        if self.drain is not None:
            facts.append(drain_text(self.progress))
        if self.maintenance is not None:
            facts.append(maintenance_text(self.maintenance, now_ms=now_ms))
        if self.room is not None and self.room.total_bytes:
            share = self.room.free_bytes / self.room.total_bytes
            facts.append(f"{share:.0%} of {self.room.total_bytes / 2**30:,.1f} GiB free")
        return f"{self.bookie}: {', '.join(facts)}"


def loss_due_text(due_ms: int, *, now_ms: int) -> str:
    left_s = (due_ms - now_ms) / 1000
    return "lost now" if left_s <= 0 else f"lost in {duration_text(left_s)}"


def drain_record(order: DrainOrder, progress: DrainProgress | None) -> dict[str, Any]:
    return {
        "since_ms": order.since_ms,
        "may_fence": order.may_fence,
        "is_drained": progress is not None and progress.is_drained,
        "is_in_doubt": progress is not None and progress.is_in_doubt,
        "ledgers_left": None if progress is None else progress.ledgers_left,
        "ledgers_most": None if progress is None else progress.ledgers_most,
        "unreadable_count": None if progress is None else progress.unreadable_count,
        "unreadable": None if progress is None else list(progress.unreadable),
    }


def drain_text(progress: DrainProgress | None) -> str:
    if progress is None:
        return "draining (not looked for yet)"
    if progress.is_drained:
        return "drained"
    if progress.is_in_doubt:
        return f"in doubt: {_unreadable_text(progress)}"
    text = (
        f"draining ({progress.ledgers_left:,} of {counted(progress.ledgers_most, 'ledger')} left)"
    )
    return f"{text}; {_unreadable_text(progress)}" if progress.unreadable_count else text


def _unreadable_text(progress: DrainProgress) -> str:
    ids = ", ".join(map(str, progress.unreadable))
    more = " and more" if progress.unreadable_count > len(progress.unreadable) else ""
    return (
        f"{counted(progress.unreadable_count, 'ledger')} that cannot be read may name it: {ids}{more}; "
        "bookmender ledger show ID says what is wrong"
    )


def maintenance_record(window: MaintenanceWindow) -> dict[str, Any]:
    return {"since_ms": window.since_ms, "until_ms": window.until_ms, "reason": window.reason}


def maintenance_text(window: MaintenanceWindow, *, now_ms: int) -> str:
    left = duration_text((window.until_ms - now_ms) / 1000)
    return f"under maintenance for another {left}" + (
        f" ({printable(window.reason)})" if window.reason else ""
    )


async def bookie_rows(
    cluster: AdminSession, orders: Orders, *, clock: Clock, with_room: bool = False
) -> list[BookieRow]:
    """Return a row for each known bookie, sorted by ID. ``orders``: as read from ZooKeeper."""
    view = await registered_bookies(cluster)
    cookies = await cluster.registration.cookies()
    orders = orders.at(clock.wall_ms())
    progress = await drain_progress(cluster, orders)
    disk_spaces = await _disk_spaces(view) if with_room else {}
    reformatted = reformatted_bookies(
        cookies,
        await read_identities(cluster.store, cluster.paths),
        trusted=orders.trusted_cookies,
    )
    absences = await read_absences(cluster.store, cluster.paths)
    named = absences.named(now_ms=clock.wall_ms()) - view.available.keys()
    known = {*view.available, *cookies, *orders.draining, *orders.maintenance, *named}
    return [
        BookieRow(
            bookie=bookie,
            state=bookie_state(view, bookie),
            has_cookie=bookie in cookies,
            is_named=bookie in named,
            is_wiped=bookie in reformatted and reformatted[bookie].was_known,
            drain=orders.draining.get(bookie),
            progress=progress.get(bookie),
            maintenance=orders.maintenance.get(bookie),
            room=disk_spaces.get(bookie),
        )
        for bookie in sorted(known)
    ]


def bookie_state(view: BookieView, bookie: BookieId) -> BookieState:
    if bookie in view.writable:
        return BookieState.WRITABLE
    return BookieState.READ_ONLY if bookie in view.read_only else BookieState.AWAY


def missed(rows: Sequence[BookieRow]) -> tuple[BookieId, ...]:
    """Return the absent bookies, not in maintenance, that have a cookie or are named by ledgers.

    They are lost or will become lost. Empty while no bookie is registered (rule S8).
    """
    if all(row.state is BookieState.AWAY for row in rows):
        return ()
    return tuple(
        row.bookie
        for row in rows
        if row.state is BookieState.AWAY
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


async def _disk_spaces(view: BookieView) -> Mapping[BookieId, DiskSpace]:
    """Return the disk space of each bookie that answers."""
    async with open_bookies(view.locate, clock=SystemClock(), rng=random.Random()) as client:
        return await _ask_all(client, view.available)


async def _ask_all(bookies: Bookies, asked: Iterable[BookieId]) -> dict[BookieId, DiskSpace]:
    slots, disk_spaces = asyncio.Semaphore(BOOKIES_AT_ONCE), {}

    async def ask(bookie: BookieId) -> None:
        try:
            async with slots, asyncio.timeout(ANSWER_TIMEOUT_S):
                disk_spaces[bookie] = await bookies.room(bookie)
        except (BookmenderError, TimeoutError):
            pass  # the row of a bookie that does not answer has no disk space

    await asyncio.gather(*map(ask, asked))
    return disk_spaces

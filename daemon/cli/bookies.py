"""The known bookies at one moment, and the argument type that names one.

No ledger is read for this. An unknown bookie ID is answered with similar known ones.
"""

import asyncio
import difflib
import enum
import os
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from auditor.records import DrainProgress, read_absences, read_drains, read_identities
from auditor.underreplication import reformatted_bookies
from daemon.admin_session import AdminSession, admin_session, log_errors_only
from daemon.cli.orders import bookies_of
from daemon.settings import Settings, load_settings
from daemon.words import counted, duration_text, printable
from ledgers.bookie_auth import bookie_connector
from ledgers.bookies import Bookies, DiskSpace
from ledgers.client import open_bookies
from ledgers.clock import Clock
from ledgers.codec.registration import parse_address, parse_bookie_id
from ledgers.errors import BookmenderError, CorruptionError, UnavailableError
from ledgers.model import BookieId
from ledgers.registration import BookieView
from ledgers.security import SecuritySettings
from replication.orders import DrainOrder, MaintenanceWindow, Orders, OrderStore

T = TypeVar("T")

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
            self.fail(f"{value!r} is not a bookie ID. Example: 10.0.0.1:3181", param, ctx)

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


def require_known(wanted: Sequence[BookieId], known: Collection[BookieId]) -> None:
    """Raise UsageError for the first bookie that the cluster does not know."""
    for bookie in wanted:
        if bookie not in known:
            raise click.UsageError(f"The cluster has no bookie {bookie}.{hint(bookie, known)}")


def hint(wrong: BookieId, known: Collection[BookieId]) -> str:
    """Return what is wrong with an unknown bookie ID, and a suggestion. Begins with a space."""
    port = re.fullmatch(".+:([0-9]+)", wrong)
    why = " Its port is not between 1 and 65535." if port and not parse_address(wrong) else ""
    close = difflib.get_close_matches(wrong, sorted(known), n=3)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieRow:
    """One known bookie.

    ``disk_space``: None if it was not requested, or if the bookie did not answer.
    """

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
    disk_space: DiskSpace | None = None
    loss_due_ms: int | None = None
    """Wall-clock time at which an absent bookie becomes lost. None also if no auditor tracks it."""

    @property
    def is_absent_in_maintenance(self) -> bool:
        return self.state is BookieState.ABSENT and self.maintenance is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "bookie_id": self.bookie,
            "state": self.state.value,
            "lost_ms": self.loss_due_ms,
            "drain": None if self.drain is None else drain_record(self.drain, self.progress),
            "maintenance": None
            if self.maintenance is None
            else maintenance_record(self.maintenance),
            "disk_space": None
            if self.disk_space is None
            else {
                "free_bytes": self.disk_space.free_bytes,
                "total_bytes": self.disk_space.total_bytes,
            },
        }

    def to_text(self, *, now_ms: int) -> str:
        facts = [self.state.value]
        if self.loss_due_ms is not None:
            facts.append(loss_due_text(self.loss_due_ms, now_ms=now_ms))
        if self.drain is not None:
            facts.append(drain_text(self.progress))
        if self.maintenance is not None:
            facts.append(maintenance_text(self.maintenance, now_ms=now_ms))
        if self.disk_space is not None and self.disk_space.total_bytes:
            share = self.disk_space.free_bytes / self.disk_space.total_bytes
            facts.append(f"{share:.0%} of {self.disk_space.total_bytes / 2**30:,.1f} GiB free")
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


def maintenance_record(window: MaintenanceWindow) -> dict[str, Any]:
    return {"since_ms": window.since_ms, "until_ms": window.until_ms, "reason": window.reason}


def maintenance_text(window: MaintenanceWindow, *, now_ms: int) -> str:
    left = duration_text((window.until_ms - now_ms) / 1000)
    return f"in maintenance for another {left}" + (
        f" ({printable(window.reason)})" if window.reason else ""
    )


async def bookie_rows(
    cluster: AdminSession, orders: Orders, *, clock: Clock, with_space: bool = False
) -> list[BookieRow]:
    """Return a row for each known bookie, sorted by ID. ``orders``: as read from ZooKeeper."""
    view = await registered_bookies(cluster)
    cookies = await cluster.registration.cookies()
    orders = orders.at(clock.wall_ms())
    progress = await drain_progress(cluster, orders)
    disk_spaces = await _disk_spaces(cluster.settings, view) if with_space else {}
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
            disk_space=disk_spaces.get(bookie),
        )
        for bookie in sorted(known)
    ]


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


async def _disk_spaces(settings: Settings, view: BookieView) -> Mapping[BookieId, DiskSpace]:
    """Return the disk space of each bookie that answers."""
    answers = await ask_each(view, lambda client, bookie: client.room(bookie), settings.security)
    return {b: answer for b, answer in answers.items() if isinstance(answer, DiskSpace)}


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

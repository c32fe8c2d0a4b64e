"""An executor of fsck: inspects ledgers independently of each other, with a verdict for each.

Changes no ledger, and fences none. An executor has one ZooKeeper session, one view of the bookies
and one connection of each kind to each bookie. Only the pace writes through the session; everything
else gets a read-only store.

Ledgers that seem wrong are rechecked later in the run, with metadata read again. Only then are they
reported.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from auditor.fsck.budget import Pace, ReadShare, fixed_pace
from auditor.fsck.ledger_inspector import LedgerInspector
from auditor.fsck.options import DEFAULT_TIMEOUTS, FsckOptions, Level, SessionTimeouts
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from ledgers.bookie_auth import bookie_connector
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient
from ledgers.clock import SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    SessionLostError,
    SettingsError,
    UnauthorizedError,
)
from ledgers.health import AnsweringBookies, BookieHealth
from ledgers.host_names import host_names
from ledgers.manager import LedgerManager, find_cluster
from ledgers.registration import Registration
from ledgers.security import SecuritySettings
from ledgers.store import MetadataStore
from ledgers.tasks import task_scope
from ledgers.zookeeper.store import ZooKeeperStore
from replication.cluster import ViewSource
from replication.copy_reader import CONFIRM_AFTER_S, INSPECTIONS_MAX
from replication.orders import OrderStore
from replication.znodes import ClusterPaths

METADATA_AT_ONCE = 512
"""Ledgers inspected at once if no bookie is asked: as many as ZooKeeper answers at a time."""

log = structlog.get_logger()
T = TypeVar("T")
Emit = Callable[[LedgerVerdict], Awaitable[None]]


async def inspect(
    options: FsckOptions, ledger_ids: Iterable[int], emit: Emit, *, pace: Pace = fixed_pace
) -> None:
    """Pass a verdict for each existing ledger to ``emit``, in the order of completion. A deleted
    ledger has none.

    Opens one session, and one connection of each kind to each bookie. Raises SessionLostError,
    UnavailableError (ZooKeeper does not answer), SettingsError (no such cluster); then nothing is
    known about the remaining ledgers.
    """
    async with open_executor(options, pace) as executor:
        await inspect_all(executor, ledger_ids, inspect_ledger, emit)


async def recheck(
    options: FsckOptions, verdicts: Iterable[LedgerVerdict], emit: Emit, *, pace: Pace = fixed_pace
) -> None:
    """Pass on the final verdicts on ledgers whose first verdict ``needs_recheck``. Otherwise as
    ``inspect``.

    Of open ledgers, only entries acknowledged at the first inspection are expected. They are idle
    if nothing has been written since.
    """
    async with open_executor(options, pace) as executor:
        await inspect_all(executor, verdicts, recheck_ledger, emit)


async def inspect_all(
    executor: LedgerInspector,
    items: Iterable[T],
    inspect_one: Callable[[LedgerInspector, T], Awaitable[LedgerVerdict | None]],
    emit: Emit,
) -> None:
    """Inspect several ledgers at a time, and pass each verdict to ``emit``."""
    options = executor.options
    left = iter(items)

    async def inspect_some() -> None:
        for item in left:
            if (verdict := await inspect_one(executor, item)) is not None:
                await emit(verdict)

    is_asking = options.level is not Level.METADATA
    at_once = options.ledgers_at_once if is_asking else METADATA_AT_ONCE
    async with task_scope() as scope:
        for running in [scope.start(inspect_some()) for _ in range(at_once)]:
            await running


# --- One ledger -----------------------------------------------------------------------------------


async def inspect_ledger(
    executor: LedgerInspector, ledger_id: int, previous: LedgerVerdict | None = None
) -> LedgerVerdict | None:
    """Return a verdict on a ledger; None if the ledger is deleted. ``previous``: the first verdict,
    if this is the recheck."""
    try:
        versioned = await executor.manager.find(ledger_id)
    except (CorruptionError, UnauthorizedError) as error:
        code = "corrupt" if isinstance(error, CorruptionError) else "unauthorized"
        why = Evidence(finding=Finding.UNREADABLE_METADATA, code=code, detail=str(error))
        return _unknown(executor, ledger_id, why)
    if versioned is None:
        return None
    try:
        return await executor.inspect(versioned, previous)
    except BookmenderError:
        raise
    except Exception as error:  # an unexpected error must not stop the inspection of other ledgers
        log.exception("fsck_inspection.crashed", ledger_id=ledger_id)
        detail = f"an unexpected error stopped the inspection: {error!r}"
        why = Evidence(finding=Finding.NOT_ANSWERED, code="inspection_failed", detail=detail)
        return replace(
            _unknown(executor, ledger_id, why),
            state=versioned.metadata.state.name.lower(),
            metadata_version=versioned.version,
            mtime_ms=versioned.stat.mtime_ms,
        )


def _unknown(executor: LedgerInspector, ledger_id: int, why: Evidence) -> LedgerVerdict:
    return LedgerVerdict(
        ledger_id=ledger_id,
        grade=Grade.UNKNOWN,
        findings=(why.finding,),
        rests_on_unknown=True,
        evidence=(why,),
        checked_ms=executor.clock.wall_ms(),
    )


async def recheck_ledger(
    executor: LedgerInspector, previous: LedgerVerdict
) -> LedgerVerdict | None:
    """Return the final verdict on a ledger; None if the ledger is deleted.

    A bad verdict counts only if the metadata did not change while the bookies were asked. Otherwise
    a repair or a writer may have replaced the bookies that were found bad. After
    ``INSPECTIONS_MAX`` such changes the grade is ``UNKNOWN``.
    """
    clock, manager, ledger_id = executor.clock, executor.manager, previous.ledger_id
    # Not below 0: the first inspection may have been on a host whose clock is ahead.
    passed_s = max(0.0, (clock.wall_ms() - previous.checked_ms) / 1_000)
    await clock.sleep(max(0.0, CONFIRM_AFTER_S - passed_s))
    await manager.sync(ledger_id)  # else a lagging follower may return the old metadata
    for _ in range(INSPECTIONS_MAX):
        verdict = await inspect_ledger(executor, ledger_id, previous)
        if verdict is None or not verdict.needs_recheck:
            return verdict
        await manager.sync(ledger_id)
        if await _version(executor, ledger_id) == verdict.metadata_version:
            return verdict
    assert verdict is not None, "deleted: returned above"
    return replace(verdict, grade=Grade.UNKNOWN, rests_on_unknown=True)


async def _version(executor: LedgerInspector, ledger_id: int) -> int | None:
    """Return the metadata's version as in a verdict: -1 if it cannot be read. None if the ledger is
    deleted."""
    try:
        versioned = await executor.manager.find(ledger_id)
    except (CorruptionError, UnauthorizedError):
        return -1
    return None if versioned is None else versioned.version


# --- The resources of an executor -----------------------------------------------------------------


@asynccontextmanager
async def open_executor(options: FsckOptions, pace: Pace) -> AsyncIterator[LedgerInspector]:
    """Yield an executor as soon as it has a share of the budget. Raises UnavailableError,
    SettingsError; while it is in use, also SessionLostError and any error of the pace."""
    uri = MetadataUri.parse(options.metadata_service_uri)
    async with AsyncExitStack() as stack:
        try:
            store = await open_session(uri, options.timeouts, options.security)
        except SettingsError as error:  # the driver's host, where an operator looks, has the file
            raise SettingsError(
                f"{error} (on {socket.gethostname()}, a host of executors, which needs the files "
                "of [security] at the same paths as the driver)"
            ) from error
        stack.push_async_callback(store.close)
        only_reads = store.as_read_only()
        clock = SystemClock()
        manager = await LedgerManager.open(only_reads, uri)
        # The ZooKeeper server of this session may lag behind what the driver was told of changes.
        await manager.sync(0)
        paths = ClusterPaths.below(manager.root)
        order_store = OrderStore(only_reads, paths)
        registration = Registration(only_reads, manager.root, resolve=host_names().addresses)
        views = ViewSource(registration, clock, order_store)
        await views.refresh()
        budgets = Budgets(reads_in_flight_max=options.reads_in_flight_per_bookie)
        connector = bookie_connector(options.security)
        bulk = BulkTransfers(
            budgets,
            resolve=views.resolve,
            limits_check_rate=True,
            connector=connector,
            health=BookieHealth(clock, views.life),
        )
        client = BookieClient(bulk)
        stack.push_async_callback(client.close)
        bookies = AnsweringBookies(client, bulk.health)
        limits = ProcessLimits(budgets, bulk)
        scope = await stack.enter_async_context(task_scope())
        scope.start(views.run())
        scope.start(pace(options, store, paths, limits.apply))
        scope.start(_end_with_session(store))
        await limits.is_set.wait()
        yield LedgerInspector(
            options=options, manager=manager, bookies=bookies, views=views, clock=clock
        )


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Applies the executor's share to the limits of this process. ``is_set``: set with the first
    share."""

    budgets: Budgets
    bulk: BulkTransfers
    is_set: asyncio.Event = field(default_factory=asyncio.Event)

    def apply(self, share: ReadShare | None) -> None:
        """Apply the share. None pauses all bulk reads."""
        if share is None:
            self.bulk.pause()
            return
        self.budgets.reads_in_flight_max = share.reads_in_flight_per_bookie
        self.bulk.rate_limit.set(bytes_per_s=share.bytes_per_s, entries_per_s=share.reads_per_s)
        self.bulk.resume()
        self.is_set.set()


async def _end_with_session(store: MetadataStore) -> None:
    await store.wait_lost()
    raise SessionLostError("the ZooKeeper session has ended")


# --- Sessions -------------------------------------------------------------------------------------


async def open_session(
    uri: MetadataUri, timeouts: SessionTimeouts, security: SecuritySettings
) -> ZooKeeperStore:
    """Return a new session, which the caller must close. Raises UnavailableError, SettingsError,
    UnauthorizedError."""
    return await ZooKeeperStore.open(
        uri.hosts,
        session_timeout_s=timeouts.session_s,
        connect_timeout_s=timeouts.connect_s,
        security=security,
    )


@asynccontextmanager
async def read_session(
    metadata_service_uri: str,
    security: SecuritySettings,
    timeouts: SessionTimeouts = DEFAULT_TIMEOUTS,
) -> AsyncIterator[tuple[MetadataStore, MetadataUri]]:
    """Yield a read-only store, and the URI with the root of the cluster. Raises UnavailableError,
    SettingsError."""
    uri = MetadataUri.parse(metadata_service_uri)
    store = (await open_session(uri, timeouts, security)).as_read_only()
    try:
        yield store, await find_cluster(store, uri)
    finally:
        await store.close()

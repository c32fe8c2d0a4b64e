"""The change feed for operators: why it is stalled, its state, its clients, and its switch.

The lag of a client is found in the log: how many checkpoints follow its low watermark, and how old
the first of them is. Nothing here fences a client.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from auditor.election import current_leader
from checkpoints.chain import NO_FEED, RETENTION_DEFAULT_S, FeedChain, order_change, read_chain
from checkpoints.client import (
    IN_ZOOKEEPER,
    ClusterConnection,
    connected_names,
    open_client_table,
)
from checkpoints.feed_ledgers import FeedLedgers
from checkpoints.model import Checkpoint, CheckpointId, ledger_id_of
from checkpoints.receipts import ClientTable
from checkpoints.receipts import Failure as StoredFailure
from checkpoints.stalls import FeedStateRecord, StallReason, read_feed_state
from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.words import counted, duration_text, printable
from ledgers.bookie_auth import bookie_connector
from ledgers.client import open_bookies
from ledgers.clock import Clock, SystemClock
from ledgers.errors import BookmenderError
from ledgers.store import MetadataStore
from replication.cluster import ViewSource
from replication.nodes import live_nodes
from replication.orders import OrderStore
from replication.znodes import ClusterPaths

T = TypeVar("T")

READS_IN_FLIGHT_MAX: Final = 8
LAG_CHECKPOINTS_MAX: Final = 10_000
"""Checkpoints that are read to find lags. A client further behind has at least this lag."""
DETAIL_CHARS: Final = 200
JAVA_LEADS: Final = "java-leads"


def connection_of(cluster: AdminSession) -> ClusterConnection:
    """Return the session of a command as clients of the feed need it."""
    return ClusterConnection(
        store=cluster.store,
        manager=cluster.manager,
        root=cluster.root,
        security=cluster.settings.security,
    )


# --- A stalled feed -------------------------------------------------------------------------------

_STALLS: Final = {
    StallReason.ACCESS_DENIED: (
        "an ACL denies the leader access{path}, so changes below it are unknown",
        "Grant the user of bookmender's nodes read access to the directory (setAcl).",
    ),
    StallReason.LEDGER_MAP: (
        "the leader still reads the metadata of all ledgers",
        "Nothing: wait until the leader has read all ledger metadata.",
    ),
    StallReason.WRITE_FAILED: (
        "its ledgers cannot be written or read{detail}",
        "Start absent bookies, and free disk space on read-only ones. If data of the feed is lost "
        "for good: bookmender feed disable, then bookmender feed enable",
    ),
    StallReason.RESTORED: (
        "ZooKeeper's transactions are older than the feed, as after a restore",
        "Begin again: bookmender feed disable, then bookmender feed enable. Its clients compare "
        "their state with all ledgers.",
    ),
    StallReason.SLOW: (
        "bookies or ZooKeeper are slow, or there are too many changes",
        "Check the load and the disks of bookies and ZooKeeper.",
    ),
}
"""Why the feed is stalled, and what to do."""


class FeedStall(Answer, frozen=True, kw_only=True):
    """Why nothing is published although the feed is enabled."""

    reason: str
    """``java-leads``: Java's auditor leads, which writes no feed. The others: ``StallReason``."""
    since_ms: int | None = None
    """Since when nothing is published."""
    pending_count: int = 0
    """Changes that wait."""
    detail: str = ""
    """The error; empty if there is none."""
    path: str | None = None
    """The znode that it concerns."""

    @classmethod
    def of(cls, state: FeedStateRecord) -> FeedStall:
        assert state.reason is not None
        return cls(
            reason=state.reason.value,
            since_ms=state.stalled_since_ms,
            pending_count=state.pending_count,
            detail=state.detail,
            path=state.path or None,
        )

    def fact(self, *, now_ms: int) -> str:
        if self.reason == JAVA_LEADS:
            return (
                "The change feed is enabled, but Java's auditor leads. It publishes nothing in it."
            )
        assert self.since_ms is not None
        lasted = duration_text(max(0, now_ms - self.since_ms) / 1000)
        pending = f" {counted(self.pending_count, 'change')} wait." if self.pending_count else ""
        why = _STALLS[StallReason(self.reason)][0].format(
            path=f" to {self.path}" if self.path else "",
            detail=f": {self.detail[:DETAIL_CHARS]}" if self.detail else "",
        )
        return f"The change feed has published nothing for {lasted}: {printable(why)}.{pending}"

    def action(self) -> str:
        if self.reason == JAVA_LEADS:
            return "Let a bookmender node lead, or run: bookmender feed disable"
        return _STALLS[StallReason(self.reason)][1]

    def to_json(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self))


async def read_stall(
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    leader_session_id: int | None,
    is_java_leader: bool,
) -> FeedStall | None:
    """Return why the feed is stalled; None if it is not, is disabled, or if nothing is known.

    ``leader_session_id``: of a bookmender leader.
    """
    stored = await read_chain(store, paths)
    if stored.value is None or not stored.value.is_enabled:
        return None
    if is_java_leader:
        return FeedStall(reason=JAVA_LEADS)
    state = await read_feed_state(store, paths)
    if state is None or not state.is_stalled or state.session_id != leader_session_id:
        return None
    return FeedStall.of(state)


# --- Clients --------------------------------------------------------------------------------------


class Lag(NamedTuple):
    """How far a client is behind. ``seconds``: age of the first checkpoint that lacks a receipt.
    ``is_more``: the lag is at least this. ``is_lost``: retention has deleted changes that the
    client was not given."""

    checkpoints: int
    seconds: float
    is_more: bool = False
    is_lost: bool = False


class FeedFollower(Answer, frozen=True, kw_only=True):
    """A client of the feed."""

    name: str
    is_connected: bool
    is_current: bool
    """Its receipts are of the present feed."""
    low_watermark: CheckpointId | None
    """Everything up to this checkpoint has a receipt; ``null``: no receipt yet."""
    lag_checkpoints: int | None
    """Checkpoints that lack a receipt; ``null``: unknown."""
    lag_s: float | None
    """Age of the first of them."""
    is_lag_more: bool
    """The lag is at least this."""
    has_lost_changes: bool
    """The feed has deleted changes that the client was not given."""
    receipt_count: int
    """Receipts after the low watermark."""
    failure_count: int

    def to_text(self) -> str:
        if self.low_watermark is None:
            lag = "no receipt yet"
        elif not self.is_current:
            lag = "its receipts are of an earlier feed"
        elif self.lag_checkpoints is None or self.lag_s is None:
            lag = "lag unknown"
        elif self.has_lost_changes:
            lag = "the log has lost changes that it was not given"
        elif not self.lag_checkpoints:
            lag = "up to date"
        else:
            more = "more than " if self.is_lag_more else ""
            behind = counted(self.lag_checkpoints, "checkpoint")
            lag = f"{more}{behind} behind ({duration_text(self.lag_s)})"
        parts = ["connected" if self.is_connected else "not connected", lag]
        if self.failure_count:
            parts.append(counted(self.failure_count, "failure"))
        return f"Client {printable(self.name)}: {', '.join(parts)}."


class FeedFollowers(Answer, frozen=True, kw_only=True):
    """The clients of a store."""

    clients: tuple[FeedFollower, ...]
    connected_elsewhere: tuple[str, ...]
    """Connected clients whose receipts are in another store."""


def lag_of(
    low_watermark: CheckpointId,
    checkpoints: Sequence[tuple[CheckpointId, int]],
    *,
    oldest_previous_id: CheckpointId,
    is_complete: bool,
    now_ms: int,
) -> Lag:
    """Return the lag of a client.

    ``checkpoints``: ids and times of the latest checkpoints, ascending. ``oldest_previous_id``: of
    the log. ``is_complete``: False if the log has earlier checkpoints.
    """
    first = bisect_right(checkpoints, low_watermark, key=lambda each: each[0])
    count = len(checkpoints) - first
    return Lag(
        checkpoints=count,
        seconds=max(0.0, (now_ms - checkpoints[first][1]) / 1000) if count else 0.0,
        is_more=first == 0 and not is_complete,
        is_lost=low_watermark < oldest_previous_id,
    )


async def read_clients(cluster: AdminSession, store: str) -> FeedFollowers:
    """Return all clients of a store, by name. Raises UnavailableError, CorruptionError,
    SettingsError."""
    summaries = await in_client_table(cluster, store, lambda table: table.list())
    connected = await connected_names(connection_of(cluster))
    stored = await read_chain(cluster.store, cluster.paths)
    if stored.error is not None:
        raise stored.error
    chain = stored.value or NO_FEED
    watermarks = {
        each.name: each.low_watermark
        for each in summaries
        if each.generation == chain.generation and each.low_watermark is not None
    }
    lags = await _read_lags(cluster, chain, watermarks) if watermarks and chain.logs else {}
    clients = []
    for each in summaries:
        lag = lags.get(each.name)
        client = FeedFollower(
            name=each.name,
            is_connected=each.name in connected,
            is_current=each.generation == chain.generation,
            low_watermark=each.low_watermark,
            lag_checkpoints=None if lag is None else lag.checkpoints,
            lag_s=None if lag is None else round(lag.seconds, 3),
            is_lag_more=lag is not None and lag.is_more,
            has_lost_changes=lag is not None and lag.is_lost,
            receipt_count=each.receipt_count,
            failure_count=len(each.failures),
        )
        clients.append(client)
    elsewhere = sorted(connected - {each.name for each in summaries})
    return FeedFollowers(clients=tuple(clients), connected_elsewhere=tuple(elsewhere))


async def _read_lags(
    cluster: AdminSession, chain: FeedChain, watermarks: dict[str, CheckpointId]
) -> dict[str, Lag]:
    """Return the lag of each client, by name."""
    found: list[tuple[CheckpointId, int]] = []
    is_complete = True
    lowest = min(watermarks.values())
    async with (
        opened_feed(cluster) as ledgers,
        aclosing(ledgers.log_backwards(chain.logs)) as checkpoints,
    ):
        async for checkpoint in checkpoints:
            if checkpoint.id <= lowest:
                break
            if len(found) == LAG_CHECKPOINTS_MAX:
                is_complete = False
                break
            found.append((checkpoint.id, checkpoint.time_ms))
    found.reverse()
    now_ms = SystemClock().wall_ms()
    return {
        name: lag_of(
            low_watermark,
            found,
            oldest_previous_id=chain.logs[0].previous_id,
            is_complete=is_complete,
            now_ms=now_ms,
        )
        for name, low_watermark in watermarks.items()
    }


@asynccontextmanager
async def opened_feed(cluster: AdminSession) -> AsyncIterator[FeedLedgers]:
    """Connect to the bookies, to read the ledgers of the feed."""
    clock = SystemClock()
    views = ViewSource(cluster.registration, clock, OrderStore(cluster.store, cluster.paths))
    await views.refresh()
    async with open_bookies(
        views.resolve,
        reads_in_flight_max=READS_IN_FLIGHT_MAX,
        connector=bookie_connector(cluster.settings.security),
    ) as bookies:
        yield FeedLedgers(cluster.manager, bookies, clock)


async def in_client_table(
    cluster: AdminSession, store: str, act: Callable[[ClientTable], Awaitable[T]]
) -> T:
    """Call a function with the clients of a store. Raises UnavailableError, SettingsError."""
    table = await open_client_table(store, connection_of(cluster))
    try:
        return await act(table)
    finally:
        await table.close()


class Failure(Answer, frozen=True, kw_only=True):
    """A ledger that a client could not handle."""

    ledger_id: int | None
    version: int
    """The version that the client could not handle."""
    is_deleted: bool
    """The ledger was deleted."""
    because: str
    """The reason, in the words of the client."""
    time_ms: int
    """When the client failed."""
    is_retry_ordered: bool
    """The client is going to try again."""

    @classmethod
    def of(cls, stored: StoredFailure) -> Failure:
        return cls(
            ledger_id=ledger_id_of(stored.key),
            version=stored.version,
            is_deleted=stored.is_deleted,
            because=stored.because,
            time_ms=stored.time_ms,
            is_retry_ordered=stored.is_retry_ordered,
        )


class Failures(Answer, frozen=True, kw_only=True):
    """The failures of a client."""

    failures: tuple[Failure, ...]
    retried_count: int
    """Failures that will be tried again, by this call."""


class Forgotten(Answer, frozen=True, kw_only=True):
    """A client that was to be deleted."""

    name: str
    is_deleted: bool
    """The receipts of the client were deleted."""


async def read_failures(
    cluster: AdminSession, store: str, name: str, *, orders_retry: bool
) -> Failures | None:
    """Return the failures of a client; None if the store does not know it. ``orders_retry``: let
    the client try all of them again."""

    async def read(table: ClientTable) -> Failures | None:
        count = await table.order_retries(name) if orders_retry else 0
        found = await table.find(name)
        if found is None:
            return None
        return Failures(failures=tuple(map(Failure.of, found.failures)), retried_count=count)

    return await in_client_table(cluster, store, read)


async def forget_client(cluster: AdminSession, store: str, name: str) -> bool:
    """Delete the receipts and failures of a client. Return False if it was deleted meanwhile."""
    is_deleted = await in_client_table(cluster, store, lambda table: table.delete(name))
    await cluster.note_order(order_event("feed forget"))
    return is_deleted


# --- The feed -------------------------------------------------------------------------------------


class FeedStatus(Answer, frozen=True, kw_only=True):
    """The feed as its chain and its log show it."""

    is_enabled: bool = False
    generation: int = 0
    """Grows each time that the feed is enabled; 0: never."""
    changed_ms: int | None = None
    """When it was enabled or disabled."""
    changed_by: str = ""
    """Who did that."""
    retention_s: int | None = None
    """How long changes are kept."""
    leader: str | None = None
    """The node that leads. May be Java's."""
    log_ledgers: tuple[int, ...] = ()
    """Ledgers of the log, oldest first."""
    base_ledger: int | None = None
    """Ledger of the newest base."""
    oldest_previous_id: CheckpointId | None = None
    """Clients that know less have missed changes that are deleted."""
    last_checkpoint_id: CheckpointId | None = None
    """``null``: there is none, or it cannot be read."""
    last_checkpoint_ms: int | None = None
    lost_ledger: int | None = None
    """The ledger whose loss made the leader begin the feed again; ``null`` after a restore of
    ZooKeeper."""
    begun_again_ms: int | None = None
    """When a node began the feed again, after a loss or a restore."""
    stall: FeedStall | None = None
    """Why nothing is published although the feed is enabled."""
    deleting_count: int = 0
    """Ledgers that the leader still deletes."""
    clients: tuple[FeedFollower, ...] = ()
    """Clients whose receipts are in ZooKeeper."""
    error: str = ""
    """Why the chain, the log or the clients cannot be read; empty if they can."""

    def to_text(self, *, now_ms: int) -> str:
        def age(time_ms: int | None) -> str:
            return duration_text((now_ms - (time_ms or 0)) / 1000)

        if self.retention_s is None:
            lines = ["It is not known whether the feed is enabled."]
        elif self.is_enabled:
            lines = [
                f"The feed has been enabled for {age(self.changed_ms)} by "
                f"{printable(self.changed_by)}. Its log keeps {duration_text(self.retention_s)}.",
                *self._log_lines(age),
            ]
        elif self.deleting_count:
            deleting = counted(self.deleting_count, "ledger")
            lines = [f"The feed is disabled. The leader still deletes {deleting}."]
        else:
            lines = ["The feed is disabled. Enable it: bookmender feed enable."]
        if self.is_enabled and self.begun_again_ms:
            because = f"its ledger {self.lost_ledger} was lost"
            if self.lost_ledger is None:
                because = "ZooKeeper was restored from a backup"
            lines.append(
                f"The feed began again {age(self.begun_again_ms)} ago, because {because}. Its "
                "clients must compare their state with all ledgers."
            )
        if self.is_enabled and self.stall is not None:
            lines += [self.stall.fact(now_ms=now_ms), f"    {self.stall.action()}"]
        lines += [each.to_text() for each in self.clients]
        if self.error:
            lines.append(f"The feed cannot be read: {printable(self.error)}")
        return "\n".join(lines)

    def _log_lines(self, age: Callable[[int | None], str]) -> list[str]:
        if not self.log_ledgers:
            if self.leader is None:
                return ["No log yet, because no node leads. Start a node: bookmender daemon."]
            return [f"The leader {printable(self.leader)} has not begun the log yet."]
        ledgers = f"Log: {counted(len(self.log_ledgers), 'ledger')}"
        ledgers += "." if self.base_ledger is None else f", base in ledger {self.base_ledger}."
        if self.last_checkpoint_id is None:
            return [f"{ledgers} It has no checkpoint yet."]
        lines = [
            f"{ledgers} The last change was published {age(self.last_checkpoint_ms)} ago "
            f"(checkpoint {self.last_checkpoint_id:#x})."
        ]
        if self.leader is None:
            lines.append(
                "No node leads, so no change is published. Start a node: bookmender daemon."
            )
        return lines


async def read_feed(cluster: AdminSession) -> FeedStatus:
    """Read chain and log. Raises UnavailableError if ZooKeeper does not answer."""
    stored = await read_chain(cluster.store, cluster.paths)
    leading = await current_leader(cluster.store, cluster.paths)
    leader = None if leading is None else leading.candidate
    if stored.error is not None:
        return FeedStatus(leader=leader, error=str(stored.error))
    chain = stored.value or NO_FEED
    nodes = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    stall = await read_stall(
        cluster.store,
        cluster.paths,
        leader_session_id=None if leading is None else leading.session_id,
        is_java_leader=leading is not None and leading.session_id not in nodes,
    )
    last: Checkpoint | None = None
    clients: tuple[FeedFollower, ...] = ()
    error = ""
    if chain.logs:
        try:
            async with (
                opened_feed(cluster) as ledgers,
                aclosing(ledgers.log_backwards(chain.logs)) as checkpoints,
            ):
                last = await anext(checkpoints, None)
            if chain.is_enabled:
                clients = (await read_clients(cluster, IN_ZOOKEEPER)).clients
        except BookmenderError as failed:
            error = str(failed)
    return FeedStatus(
        is_enabled=chain.is_enabled,
        generation=chain.generation,
        changed_ms=chain.changed_ms or None,
        changed_by=chain.by,
        retention_s=chain.retention_s,
        leader=leader,
        log_ledgers=tuple(each.ledger_id for each in chain.logs),
        base_ledger=None if chain.base is None else chain.base.ledger_id,
        oldest_previous_id=chain.logs[0].previous_id if chain.logs else None,
        last_checkpoint_id=None if last is None else last.id,
        last_checkpoint_ms=None if last is None else last.time_ms,
        lost_ledger=chain.lost_ledger_id,
        begun_again_ms=chain.renewed_ms or None,
        stall=stall,
        deleting_count=len(chain.deleting),
        clients=clients,
        error=error,
    )


class FeedSwitched(Answer, frozen=True, kw_only=True):
    """Whether the feed is enabled now, and whether it was different before."""

    is_enabled: bool
    has_changed: bool


async def enable_feed(
    cluster: AdminSession, *, retention_s: int | None, clock: Clock
) -> tuple[FeedSwitched, int]:
    """Enable the feed, and return its retention. If it is enabled already, only change this.

    ``retention_s``: None: an enabled feed keeps its retention; a new one has the default.
    """
    has_changed = False

    def change(chain: FeedChain) -> FeedChain:
        nonlocal has_changed
        has_changed = not chain.is_enabled
        if chain.is_enabled:
            kept_s = chain.retention_s if retention_s is None else retention_s
            return replace(chain, retention_s=kept_s)
        now_ms = clock.wall_ms()
        return chain.enabled(
            now_ms=now_ms,
            by=cluster.by,
            retention_s=RETENTION_DEFAULT_S if retention_s is None else retention_s,
            generation_min=now_ms // 1000,
        )

    chain = await order_change(cluster.store, cluster.paths, change)
    await cluster.note_order(order_event("feed enable"))
    return FeedSwitched(is_enabled=True, has_changed=has_changed), chain.retention_s


async def disable_feed(cluster: AdminSession, *, clock: Clock) -> FeedSwitched:
    """Disable the feed. The leader deletes its ledgers."""
    stored = await read_chain(cluster.store, cluster.paths)
    if stored.error is None and (stored.value is None or not stored.value.is_enabled):
        return FeedSwitched(is_enabled=False, has_changed=False)
    await order_change(
        cluster.store,
        cluster.paths,
        lambda chain: chain.disabled(now_ms=clock.wall_ms(), by=cluster.by),
    )
    await cluster.note_order(order_event("feed disable"))
    return FeedSwitched(is_enabled=False, has_changed=True)

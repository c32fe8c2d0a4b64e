"""The archive for operators: whether it is ordered, how far it is, and what stands against it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from archive.order import (
    RETENTION_DEFAULT_S,
    ArchiveOrder,
    ArchiveState,
    put,
    read_order,
    read_state,
)
from archive.places import open_place
from checkpoints.chain import read_chain
from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.words import printable
from ledgers.clock import Clock
from ledgers.errors import NoNodeError, RejectedError

BEHIND_S = 60.0
"""An archive is behind if it lacks changes that are older. For so long another node may need to
take over from one that ended."""
OBSTACLES = {
    "feed-off": (
        "The change feed is disabled, and the archive is made of it.",
        "Enable it: bookmender feed enable",
    ),
    "no-node": (
        "No node archives.",
        "Start a node that stands for election: bookmender daemon",
    ),
}
"""By ``ArchiveStatus.stall``: what is wrong, and what to do."""


class ArchiveStatus(Answer, frozen=True, kw_only=True):
    """The archive as the order and the archiving node say."""

    is_enabled: bool
    url: str = ""
    includes: tuple[str, ...] = ()
    retention_s: int = RETENTION_DEFAULT_S
    node: str | None = None
    """The node that archives; null: none does."""
    archived_ms: int | None = None
    """Everything up to this time is archived; null: nothing, because the first base is not
    complete."""
    base_ms: int | None = None
    """The time of the newest base."""
    base_record_count: int | None = None
    """Records of the base that is being written; null: there is none."""
    number: int = 0
    """The number of the last file."""
    denied_count: int = 0
    """Changes that are not archived, because an ACL hides the ledger."""
    error: str = ""
    """Why nothing is archived now."""
    stall: str = ""
    """``feed-off`` or ``no-node``: why nothing can be archived; empty if it can."""
    lag_s: float | None = None
    """Age of ``archived_ms``; before the first base is complete, of the order."""

    @property
    def obstacle(self) -> tuple[str, str] | None:
        """Return why nothing is archived, and what to do; None if the archive goes on."""
        if self.stall:
            return OBSTACLES[self.stall]
        if self.error:
            return f"Nothing is archived: {printable(self.error)}.", "It is tried again and again."
        return None


async def read_archive(cluster: AdminSession, *, now_ms: int) -> ArchiveStatus:
    """Raises UnavailableError, and CorruptionError if the order is unreadable."""
    stored = await read_order(cluster.store, cluster.paths)
    if stored.error is not None:
        raise stored.error
    order = stored.value
    if order is None:
        return ArchiveStatus(is_enabled=False)
    state = await read_state(cluster.store, cluster.paths, order)
    state = state or ArchiveState(node="", written_ms=0)
    try:
        data, _ = await cluster.store.get(cluster.paths.archiver)
        node = data.decode(errors="replace")
    except NoNodeError:
        node = None
    chain = (await read_chain(cluster.store, cluster.paths)).value
    is_feed_on = chain is not None and chain.is_enabled
    stall = "" if is_feed_on else "feed-off"
    seen_ms = max(order.since_ms, state.written_ms)
    if is_feed_on and node is None and now_ms - seen_ms > BEHIND_S * 1000:
        stall = "no-node"
    return ArchiveStatus(
        is_enabled=True,
        url=order.url,
        includes=order.includes,
        retention_s=order.retention_s,
        node=node,
        archived_ms=state.archived_ms or None,
        lag_s=max(0, now_ms - (state.archived_ms or order.since_ms)) / 1000,
        base_ms=state.base_ms or None,
        base_record_count=state.base_record_count,
        number=state.number,
        denied_count=state.denied_count,
        error=state.error,
        stall=stall,
    )


async def enable_archive(
    cluster: AdminSession, url: str, *, includes: tuple[str, ...], retention_s: int, clock: Clock
) -> ArchiveStatus:
    """Order the archive. Raises SettingsError if the place cannot be used, RejectedError if the
    feed is off or another place is in use."""
    place = await asyncio.to_thread(open_place, url)
    await asyncio.to_thread(place.names)
    chain = (await read_chain(cluster.store, cluster.paths)).value
    if chain is None or not chain.is_enabled:
        raise RejectedError(
            "the archive is made of the change feed, which is disabled. First: bookmender feed "
            "enable"
        )
    before = (await read_order(cluster.store, cluster.paths)).value
    if before is not None and before.url != url:
        raise RejectedError(
            f"the archive is in {before.url}. To use another place, first: bookmender archive "
            "disable"
        )
    order = ArchiveOrder(
        url=url,
        since_ms=before.since_ms if before else clock.wall_ms(),
        by=cluster.by,
        includes=includes,
        retention_s=retention_s,
        base_ordered_ms=before.base_ordered_ms if before else 0,
    )
    await put(cluster.store, cluster.paths.archive, order)
    await cluster.note_order(order_event("archive enable"))
    return await read_archive(cluster, now_ms=clock.wall_ms())


async def order_base(cluster: AdminSession, *, clock: Clock) -> None:
    """Order a new base. Raises RejectedError if nothing is archived."""
    before = (await read_order(cluster.store, cluster.paths)).value
    if before is None:
        raise RejectedError("nothing is archived. First: bookmender archive enable --to URL")
    order = replace(before, base_ordered_ms=clock.wall_ms())
    await put(cluster.store, cluster.paths.archive, order)


async def disable_archive(cluster: AdminSession) -> bool:
    """Withdraw the order. Its files stay. Return False if there was none."""
    try:
        await cluster.store.delete(cluster.paths.archive)
    except NoNodeError:
        return False
    await cluster.note_order(order_event("archive disable"))
    return True


class ArchiveDone(Answer, frozen=True, kw_only=True):
    """``result``: what was done, or would be."""

    result: str

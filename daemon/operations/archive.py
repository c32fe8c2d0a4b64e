"""The archive for operators: whether it is ordered, how far it is, and what stands against it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from msgspec import structs

from archive.order import (
    RETENTION_DEFAULT_S,
    ArchiveOrder,
    ArchiveState,
    put,
    read_order,
    read_state,
)
from archive.places import open_place
from archive.reading import Archive
from checkpoints.chain import read_chain
from daemon.admin_session import AdminSession, order_event
from daemon.answers import Answer
from daemon.words import printable
from ledgers.clock import Clock
from ledgers.errors import NoNodeError, RejectedError
from ledgers.registration import read_instance_id

BEHIND_S = 60.0
"""An archive is behind if it lacks changes that are older. For so long another node may need to
take over from one that ended."""


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
    denied_count: int = 0
    """Changes that are not archived, because an ACL hides the ledger."""
    lag_s: float | None = None
    """Age of ``archived_ms``; before the first base is complete, of the order."""
    obstacle: str = ""
    """Why nothing is archived now; empty if the archive goes on."""
    action: str = ""
    """The next step that removes the obstacle."""
    missing_includes: tuple[str, ...] = ()
    """Further trees that do not exist; only ``archive enable`` looks."""


async def read_archive(cluster: AdminSession, *, now_ms: int) -> ArchiveStatus:
    """Raises UnavailableError, and CorruptionError if the order is unreadable."""
    stored = await read_order(cluster.store, cluster.paths)
    if stored.error is not None:
        raise stored.error
    order = stored.value
    if order is None:
        return ArchiveStatus(is_enabled=False)
    state = await read_state(cluster.store, cluster.paths, order)
    state = state or ArchiveState(node="", written_ms=order.since_ms)
    try:
        data, _ = await cluster.store.get(cluster.paths.archiver)
        node = data.decode(errors="replace")
    except NoNodeError:
        node = None
    chain = (await read_chain(cluster.store, cluster.paths)).value
    obstacle = action = ""
    if chain is None or not chain.is_enabled:
        obstacle = "The change feed is disabled, and the archive is made of it."
        action = "Enable it: bookmender feed enable"
    elif node is None and now_ms - state.written_ms > BEHIND_S * 1000:
        obstacle = "No node archives."
        action = "Start a node that stands for election: bookmender daemon"
    elif state.error:
        obstacle = f"Nothing is archived: {printable(state.error)}."
        action = (
            "Correct that; it is tried again and again. Or use another place: bookmender archive "
            "disable, then enable --to URL"
        )
    archived_ms = state.archived_ms or None
    return ArchiveStatus(
        is_enabled=True,
        url=order.url,
        includes=order.includes,
        retention_s=order.retention_s,
        node=node,
        archived_ms=archived_ms,
        lag_s=max(0, now_ms - (archived_ms or order.since_ms)) / 1000,
        denied_count=state.denied_count,
        obstacle=obstacle,
        action=action,
    )


async def enable_archive(
    cluster: AdminSession,
    url: str,
    *,
    includes: tuple[str, ...] | None,
    retention_s: int | None,
    clock: Clock,
) -> ArchiveStatus:
    """Order the archive. ``includes``, ``retention_s``: None keeps the present value. Raises
    SettingsError if the place cannot be used, CorruptionError if what is there is damaged,
    RejectedError if the feed is off, or another place or cluster is in use."""
    place = await asyncio.to_thread(open_place, url)
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
    if before is None:
        instance_id = await read_instance_id(cluster.store, cluster.root)
        await asyncio.to_thread(Archive(place).check_cluster, instance_id or "")
    order = replace(before or ArchiveOrder(url=url, since_ms=clock.wall_ms(), by=""), by=cluster.by)
    if includes is not None:
        order = replace(order, includes=includes)
    if retention_s is not None:
        order = replace(order, retention_s=retention_s)
    await put(cluster.store, cluster.paths.archive, order)
    await cluster.note_order(order_event("archive enable"))
    missing = [path for path in order.includes if await cluster.store.exists(path) is None]
    status = await read_archive(cluster, now_ms=clock.wall_ms())
    return structs.replace(status, missing_includes=tuple(missing))


async def order_base(cluster: AdminSession, *, clock: Clock) -> None:
    """Order a new base. Raises RejectedError if nothing is archived."""
    order = (await read_order(cluster.store, cluster.paths)).value
    if order is None:
        raise RejectedError("nothing is archived. First: bookmender archive enable --to URL")
    order = replace(order, base_ordered_ms=clock.wall_ms())
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

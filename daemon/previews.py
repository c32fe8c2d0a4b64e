"""Plans repairs without executing them: selects the ledgers, and builds a worker's parts without
locks.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from auditor.mark_reasons import read_findings
from auditor.scan import may_be_named
from daemon.admin_session import AdminSession
from daemon.cli.bookies import known_bookies, require_known
from daemon.local_bookie import local_bookie
from daemon.placement import load_placement
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_status
from ledgers.bookie_auth import bookie_connector
from ledgers.client import BookieClient, open_bookies
from ledgers.clock import SystemClock
from ledgers.digest import EntryDigest
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.model import BookieId
from ledgers.tasks import gather_in_parts
from replication.by_hand import Preview, Previewer
from replication.cluster import ClusterView, ViewSource
from replication.inspection import Inspector
from replication.ledger_record import UnprovenEnd, read_unproven
from replication.marks import marked_ledger_ids, read_marks, read_urgent
from replication.orders import DrainOrder, OrderStore
from replication.targets import DiskSpaceSource, TargetSelector

READS_IN_FLIGHT = 8
"""Reads that a command may have in flight at one bookie. The nodes that repair have the rest (rule
S10)."""
LEDGERS_AT_ONCE = 16
MARKS_READ_MAX = 5_000
READS_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedLedgers:
    """Ledgers to plan for.

    ``more``: the number of further ledgers; None if they were not counted. ``unreadable``: ledgers
    that may belong to the selection, but cannot be read.
    """

    ledger_ids: Sequence[int]
    more: int | None = 0
    unreadable: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Previews:
    """The planned repairs. ``more``, ``unreadable``: as in ``SelectedLedgers``.

    ``none_marked``: the conditions of ``status``, if the marked ledgers were requested and there
    are none; else empty.
    """

    ledgers: Sequence[Preview]
    more: int | None
    unreadable: Sequence[int] = ()
    none_marked: str = ""
    unproven: Sequence[UnprovenEnd] = ()
    """The ends that could not be proven at the last attempt, of ``ledgers`` only."""
    unproven_others: Sequence[int] = ()
    """The other ledgers whose end could not be proven, if the marked ledgers were requested. They
    may no longer be marked."""


async def plan_for(
    cluster: AdminSession, ledger_ids: Sequence[int], bookie: BookieId | None, *, limit: int
) -> Previews:
    """Plan the repairs of the given ledgers, of the ledgers of a bookie, or of the most urgent
    ones.

    The ledgers of a bookie are planned as if the bookie were draining. Raises UsageError for a
    bookie that the cluster does not know.
    """
    none_marked, every_unproven = "", list[int]()
    if ledger_ids:
        chosen = SelectedLedgers(ledger_ids=list(dict.fromkeys(ledger_ids)))
    elif bookie is not None:
        require_known([bookie], await known_bookies(cluster))
        chosen = await ledgers_of(cluster, bookie, limit=limit)
    else:
        chosen = await most_urgent(cluster, limit=limit)
        none_marked = "" if chosen.ledger_ids else await _doubts(cluster)
        ends = await read_unproven(cluster.store, cluster.manager, cluster.paths)
        every_unproven = [end.ledger_id for end in ends]
    previews = await preview_all(cluster, chosen.ledger_ids, drained=bookie)
    return Previews(
        ledgers=previews,
        more=chosen.more,
        unreadable=chosen.unreadable,
        none_marked=none_marked,
        unproven=await read_unproven(
            cluster.store, cluster.manager, cluster.paths, chosen.ledger_ids
        ),
        unproven_others=sorted(set(every_unproven).difference(chosen.ledger_ids)),
    )


async def _doubts(cluster: AdminSession) -> str:
    """Return the conditions that ``status`` lists, as they may explain why no ledger is marked."""
    found = conditions(await gather_status(cluster))
    return " ".join(f"{each.code}: {each.fact}" for each in found)


async def preview_all(
    cluster: AdminSession, ledger_ids: Sequence[int], *, drained: BookieId | None = None
) -> list[Preview]:
    """Plan the repair of each ledger, in order. ``drained``: a bookie that is assumed to be
    draining, too."""
    if not ledger_ids:
        return []  # without ledgers no bookie is asked for its free space
    findings = await read_findings(cluster.store, cluster.paths, ledger_ids)
    async with open_previewer(cluster, drained=drained) as previewer:

        async def preview(ledger_id: int) -> Preview:
            finding = findings.get(ledger_id)
            return await previewer.preview(
                ledger_id, suspects=() if finding is None else finding.bookies
            )

        return await gather_in_parts(preview, ledger_ids, at_once=LEDGERS_AT_ONCE)


async def most_urgent(cluster: AdminSession, *, limit: int) -> SelectedLedgers:
    """Select the most urgent ledgers of both trees of marks.

    The order is: the leader's list of urgent ledgers, then the number of missing bookies, then the
    age of the loss. Of a very long queue only a part of the marks is read.
    """
    store, own = cluster.store, cluster.paths.private
    listed = {*await marked_ledger_ids(store, cluster.paths), *await marked_ledger_ids(store, own)}
    urgent = [i for i in await read_urgent(store, cluster.paths) if i in listed]
    rest = sorted(listed.difference(urgent))
    marks = [
        *await read_marks(store, cluster.paths, rest[:MARKS_READ_MAX]),
        *await read_marks(store, own, rest[:MARKS_READ_MAX]),
    ]
    ranks: dict[int, tuple[int, int]] = {}
    for each in marks:
        missing = len(each.mark.replicas) if each.mark else 0
        since_ms = (each.mark.ctime_ms or 0) if each.mark else 0
        rank = (-missing, since_ms)
        ranks[each.ledger_id] = min(rank, ranks.get(each.ledger_id, rank))
    ordered = [*urgent, *sorted(ranks, key=lambda ledger_id: (ranks[ledger_id], ledger_id))]
    unread = max(0, len(rest) - MARKS_READ_MAX)
    return SelectedLedgers(ledger_ids=ordered[:limit], more=max(0, len(ordered) - limit) + unread)


async def ledgers_of(cluster: AdminSession, bookie: BookieId, *, limit: int) -> SelectedLedgers:
    """Select the first ledgers whose metadata names the bookie. Ledgers with unreadable metadata
    that were met on the way are listed separately."""
    found: list[int] = []
    unreadable: list[int] = []
    async for part in _parts(cluster):
        named = await asyncio.gather(*(_names(cluster, i, bookie) for i in part))
        found += [i for i, is_named in zip(part, named, strict=True) if is_named]
        unreadable += [i for i, is_named in zip(part, named, strict=True) if is_named is None]
        if len(found) > limit:
            break
    doubtful = await may_be_named(cluster.store, cluster.manager, unreadable, [bookie])
    return SelectedLedgers(
        ledger_ids=found[:limit],
        more=None if len(found) > limit else 0,
        unreadable=doubtful.get(bookie, []),
    )


async def _parts(cluster: AdminSession) -> AsyncIterator[Sequence[int]]:
    """Yield all ledger ids, in parts of ``READS_AT_ONCE``."""
    async for ledger_ids in cluster.manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            yield ledger_ids[start : start + READS_AT_ONCE]


async def _names(cluster: AdminSession, ledger_id: int, bookie: BookieId) -> bool | None:
    """Return True if the metadata names the bookie; None if the metadata cannot be read."""
    try:
        versioned = await cluster.manager.read(ledger_id)
    except NoSuchLedgerError:
        return False
    except (CorruptionError, UnauthorizedError):
        return None
    return bookie in versioned.metadata.bookies


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The objects with which a command inspects ledgers. ``view``: the cluster when the command
    began."""

    inspector: Inspector
    bookies: BookieClient
    views: ViewSource
    view: ClusterView
    clock: SystemClock
    rng: random.Random
    fallback_digest: EntryDigest


@asynccontextmanager
async def open_inspection(cluster: AdminSession) -> AsyncIterator[Inspection]:
    """Build a worker's inspector with a command's small share of reads."""
    ours, clock, rng = cluster.settings.replication, SystemClock(), random.Random()
    views = ViewSource(cluster.registration, clock, OrderStore(cluster.store, cluster.paths))
    view = await views.refresh()
    async with open_bookies(
        views.resolve,
        reads_in_flight_max=min(READS_IN_FLIGHT, ours.reads_in_flight_per_bookie),
        connector=bookie_connector(cluster.settings.security),
    ) as bookies:
        inspector = Inspector(
            manager=cluster.manager,
            bookies=bookies,
            clock=clock,
            rng=rng,
            fallback_digest=ours.fallback_digest,
            checked_share=ours.checked_share,
        )
        yield Inspection(
            inspector=inspector,
            bookies=bookies,
            views=views,
            view=view,
            clock=clock,
            rng=rng,
            fallback_digest=ours.fallback_digest,
        )


@asynccontextmanager
async def open_previewer(
    cluster: AdminSession, *, drained: BookieId | None = None
) -> AsyncIterator[Previewer]:
    """Yield a previewer of the cluster as it is. ``drained``: a bookie that is assumed to be
    draining."""
    ours = cluster.settings
    async with open_inspection(cluster) as inspection:
        local = await local_bookie(ours.node.bookie_id, inspection.view)
        placement = await load_placement(
            ours.placement,
            store=cluster.store,
            paths=cluster.paths,
            views=inspection.views,
            local=local,
            clock=inspection.clock,
            rng=inspection.rng,
        )
        disk_spaces = DiskSpaceSource(
            inspection.bookies,
            inspection.views,
            floor_share=ours.replication.free_disk_share_min,
            clock=inspection.clock,
            rng=inspection.rng,
        )
        await disk_spaces.ask_due()
        target_selector = TargetSelector(
            placement.policy,
            clock=inspection.clock,
            local=local,
            is_local_only=ours.replication.target == "local",
            disk_spaces=disk_spaces,
            rack=placement.racks.rack,
            allowed=placement.groups.allowed,
        )
        yield Previewer(
            inspection.inspector,
            target_selector,
            _as_if_drained(inspection.view, drained),
            moves_misplaced=ours.checks.repairs_placement,
        )


def _as_if_drained(view: ClusterView, bookie: BookieId | None) -> ClusterView:
    if bookie is None:
        return view
    draining = {**view.orders.draining}
    draining.setdefault(bookie, DrainOrder(since_ms=0))
    return replace(view, orders=replace(view.orders, draining=draining))

"""Plans repairs without executing them: selects ledgers, and uses a worker's parts without locks.

Nothing is written and nothing is fenced.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec

from auditor.mark_reasons import read_findings
from auditor.scan import may_be_named
from daemon.admin_session import AdminSession
from daemon.answers import Answer
from daemon.local_bookie import local_bookie
from daemon.messages import message
from daemon.operations.bookies import known_bookies, require_known
from daemon.placement import load_placement
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_status
from daemon.status.records import UnprovenEndsRecord
from ledgers.bookie_auth import bookie_connector
from ledgers.client import BookieClient, open_bookies
from ledgers.clock import SystemClock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.model import BookieId
from ledgers.tasks import gather_in_parts
from replication.by_hand import Preview, Previewer
from replication.cluster import ViewSource
from replication.inspection import Inspector
from replication.ledger_record import read_unproven
from replication.marks import marked_ledger_ids, read_marks, read_urgent
from replication.orders import DrainOrder, OrderStore
from replication.reasons import Blocked, Facts, Reason
from replication.targets import DiskSpaceSource, TargetSelector

READS_IN_FLIGHT = 8
"""Reads that a command may have in flight at one bookie. The nodes that repair have the rest (rule
S10)."""
LEDGERS_AT_ONCE = 16
MARKS_READ_MAX = 5_000
READS_AT_ONCE = 200
UNPROVEN_SHOWN_MAX = 1_000


class PlannedCopy(Answer, frozen=True, kw_only=True):
    """Entries of one fragment that would be copied."""

    first_entry_id: int
    last_entry_id: int | None
    """The fragment; null: it has no end yet."""
    bookie_index: int
    replaced: BookieId = msgspec.field(name="from")
    """The bookie whose copy is replaced."""
    target: BookieId = msgspec.field(name="to")
    is_in_place: bool
    """The bookie keeps its place and gets the entries that it lacks."""
    entries: int
    bytes: int
    """An estimate."""


class BlockedPart(Answer, frozen=True, kw_only=True):
    """Why a part of a ledger is not repaired now. ``detail``: as a sentence."""

    reason: Reason
    facts: Facts
    besides: tuple[Blocked, ...]
    """Reasons for other parts."""
    detail: str
    until_ms: int | None
    """When the obstacle ends; null: unknown."""


class LedgerPlan(Answer, frozen=True, kw_only=True):
    """What a repair of one ledger would copy. ``is_gone``: there is no such ledger."""

    ledger_id: int
    is_gone: bool
    is_whole: bool
    """It exists, and there is nothing to do."""
    entries: int
    bytes: int
    copies: list[PlannedCopy]
    blocked: list[BlockedPart]


class RepairPlan(Answer, frozen=True, kw_only=True):
    """The planned repairs, in order."""

    ledgers: list[LedgerPlan]
    entries: int
    bytes: int
    more_ledgers: int | None
    """Further ledgers that are not planned; null: there are some, and nobody counted them."""
    unreadable_ledgers: list[int]
    """They may belong to the selection, but their metadata cannot be read."""
    none_marked: str | None
    """The conditions of ``status``, if the marked ledgers were requested and there are none."""
    unproven_ends: UnprovenEndsRecord
    """Among the planned ledgers, or, if the marked ledgers were requested, among all."""

    @classmethod
    def of(
        cls,
        ledgers: Sequence[LedgerPlan],
        *,
        more: int | None = 0,
        unreadable: Collection[int] = (),
        none_marked: str = "",
        unproven: Collection[int] = (),
    ) -> "RepairPlan":
        return cls(
            ledgers=list(ledgers),
            entries=sum(each.entries for each in ledgers),
            bytes=sum(each.bytes for each in ledgers),
            more_ledgers=more,
            unreadable_ledgers=list(unreadable),
            none_marked=none_marked or None,
            unproven_ends=UnprovenEndsRecord(
                count=len(unproven), ledgers=sorted(unproven)[:UNPROVEN_SHOWN_MAX]
            ),
        )


async def plan(
    cluster: AdminSession, ledger_ids: Sequence[int], bookie: BookieId | None, *, limit: int
) -> RepairPlan:
    """Plan the repairs of the given ledgers, of the ledgers of a bookie, or of the most urgent
    ones.

    The ledgers of a bookie are planned as if the bookie were draining. Raises UsageError for a
    bookie that the cluster does not know.
    """
    more: int | None = 0
    unreadable: Sequence[int] = ()
    none_marked = ""
    are_marked_wanted = not ledger_ids and bookie is None
    chosen = list(dict.fromkeys(ledger_ids))
    if not ledger_ids and bookie is not None:
        require_known([bookie], await known_bookies(cluster))
        chosen, more, unreadable = await ledgers_of(cluster, bookie, limit=limit)
    elif are_marked_wanted:
        chosen, more = await _most_urgent(cluster, limit=limit)
        if not chosen:  # what ``status`` lists may explain why
            doubts = conditions(await gather_status(cluster))
            none_marked = " ".join(f"{each.code}: {each.fact}" for each in doubts)
    among = None if are_marked_wanted else chosen
    ends = await read_unproven(cluster.store, cluster.manager, cluster.paths, among)
    return RepairPlan.of(
        await plan_each(cluster, chosen, drained=bookie),
        more=more,
        unreadable=unreadable,
        none_marked=none_marked,
        unproven=[end.ledger_id for end in ends],
    )


async def plan_each(
    cluster: AdminSession, ledger_ids: Sequence[int], *, drained: BookieId | None = None
) -> list[LedgerPlan]:
    """Plan the repair of each ledger, in order. ``drained``: a bookie that is assumed to be
    draining, too."""
    if not ledger_ids:
        return []  # without ledgers no bookie is asked for its free space
    findings = await read_findings(cluster.store, cluster.paths, ledger_ids)
    async with open_previewer(cluster, drained=drained) as previewer:

        async def preview(ledger_id: int) -> LedgerPlan:
            finding = findings.get(ledger_id)
            suspects = () if finding is None else finding.bookies
            return ledger_plan(await previewer.preview(ledger_id, suspects=suspects))

        return await gather_in_parts(preview, ledger_ids, at_once=LEDGERS_AT_ONCE)


def ledger_plan(found: Preview) -> LedgerPlan:
    return LedgerPlan(
        ledger_id=found.ledger_id,
        is_gone=found.is_gone,
        is_whole=found.plan.is_whole and not found.is_gone,
        entries=found.entry_count,
        bytes=found.byte_count,
        copies=[
            PlannedCopy(
                first_entry_id=repair.fragment.first_entry_id,
                last_entry_id=repair.fragment.last_entry_id,
                bookie_index=repair.index,
                replaced=repair.replaced,
                target=repair.target,
                is_in_place=repair.is_in_place,
                entries=len(repair.entry_ids),
                bytes=repair.byte_count,
            )
            for repair in found.repairs
        ],
        blocked=[
            BlockedPart(
                reason=each.reason,
                facts=each.facts,
                besides=each.besides,
                detail=message(found.ledger_id, each).text,
                until_ms=each.until_ms,
            )
            for each in found.plan.blocked
        ],
    )


# --- Which ledgers --------------------------------------------------------------------------------


async def _most_urgent(cluster: AdminSession, *, limit: int) -> tuple[list[int], int]:
    """Return the most urgent ledgers of both trees of marks, and the number of the others.

    The order is: the leader's list of urgent ledgers, then the number of missing bookies, then the
    age of the loss. Of a very long queue only a part of the marks is read.
    """
    store, trees = cluster.store, (cluster.paths, cluster.paths.private)
    listed = {i for tree in trees for i in await marked_ledger_ids(store, tree)}
    urgent = [i for i in await read_urgent(store, cluster.paths) if i in listed]
    rest = sorted(listed.difference(urgent))
    ranks: dict[int, tuple[int, int]] = {}
    for tree in trees:
        for each in await read_marks(store, tree, rest[:MARKS_READ_MAX]):
            rank = (0, 0)
            if each.mark is not None:
                rank = (-len(each.mark.replicas), each.mark.ctime_ms or 0)
            ranks[each.ledger_id] = min(rank, ranks.get(each.ledger_id, rank))
    ordered = [*urgent, *sorted(ranks, key=lambda ledger_id: (ranks[ledger_id], ledger_id))]
    unread = max(0, len(rest) - MARKS_READ_MAX)
    return ordered[:limit], max(0, len(ordered) - limit) + unread


async def ledgers_of(
    cluster: AdminSession, bookie: BookieId, *, limit: int
) -> tuple[list[int], int | None, list[int]]:
    """Return the first ledgers whose metadata names the bookie; None if there are more, else 0; and
    ledgers met on the way that may name it, but whose metadata cannot be read."""
    found: list[int] = []
    unreadable: list[int] = []

    async def look(ledger_id: int) -> None:
        try:
            if bookie in (await cluster.manager.read(ledger_id)).metadata.bookies:
                found.append(ledger_id)
        except NoSuchLedgerError:
            pass
        except (CorruptionError, UnauthorizedError):
            unreadable.append(ledger_id)

    async for ledger_ids in cluster.manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            await asyncio.gather(*map(look, ledger_ids[start : start + READS_AT_ONCE]))
            if len(found) > limit:
                break
        if len(found) > limit:
            break
    doubtful = await may_be_named(cluster.store, cluster.manager, sorted(unreadable), [bookie])
    more = None if len(found) > limit else 0
    return sorted(found)[:limit], more, list(doubtful.get(bookie, ()))


# --- A worker's parts -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The objects with which a command inspects ledgers. ``views``: read once, at the beginning."""

    inspector: Inspector
    bookies: BookieClient
    views: ViewSource

    async def target_selector(
        self,
        cluster: AdminSession,
        *,
        local: BookieId | None = None,
        is_local_only: bool = False,
        disk_spaces: DiskSpaceSource | None = None,
    ) -> TargetSelector:
        """Return what chooses targets, by the placement policy of the settings."""
        placement = await load_placement(
            cluster.settings.placement,
            store=cluster.store,
            paths=cluster.paths,
            views=self.views,
            local=local,
            clock=SystemClock(),
            rng=random.Random(),
        )
        return TargetSelector(
            placement.policy,
            clock=SystemClock(),
            local=local,
            is_local_only=is_local_only,
            disk_spaces=disk_spaces,
            rack=placement.racks.rack,
            allowed=placement.groups.allowed,
        )


@asynccontextmanager
async def open_inspection(cluster: AdminSession) -> AsyncIterator[Inspection]:
    """Build a worker's inspector with a command's small share of reads."""
    ours, clock = cluster.settings.replication, SystemClock()
    views = ViewSource(cluster.registration, clock, OrderStore(cluster.store, cluster.paths))
    await views.refresh()
    async with open_bookies(
        views.resolve,
        reads_in_flight_max=min(READS_IN_FLIGHT, ours.reads_in_flight_per_bookie),
        connector=bookie_connector(cluster.settings.security),
    ) as bookies:
        inspector = Inspector(
            manager=cluster.manager,
            bookies=bookies,
            clock=clock,
            rng=random.Random(),
            fallback_digest=ours.fallback_digest,
            checked_share=ours.checked_share,
        )
        yield Inspection(inspector=inspector, bookies=bookies, views=views)


@asynccontextmanager
async def open_previewer(
    cluster: AdminSession, *, drained: BookieId | None = None
) -> AsyncIterator[Previewer]:
    """Yield a previewer of the cluster as it is. ``drained``: a bookie that is assumed to be
    draining."""
    ours = cluster.settings
    async with open_inspection(cluster) as inspection:
        view = inspection.views.current
        disk_spaces = DiskSpaceSource(
            inspection.bookies,
            inspection.views,
            floor_share=ours.replication.free_disk_share_min,
            clock=SystemClock(),
            rng=random.Random(),
        )
        await disk_spaces.ask_due()
        local = await local_bookie(ours.node.bookie_id, view)
        targets = await inspection.target_selector(
            cluster,
            local=local,
            is_local_only=ours.replication.target == "local",
            disk_spaces=disk_spaces,
        )
        if drained is not None:
            draining = {drained: DrainOrder(since_ms=0), **view.orders.draining}
            view = replace(view, orders=replace(view.orders, draining=draining))
        yield Previewer(
            inspection.inspector, targets, view, moves_misplaced=ours.checks.repairs_placement
        )

"""Reads the state of a cluster's recovery from ZooKeeper."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from auditor.backlog import RepairProgress
from auditor.checks.records import PLACEMENT, read_check
from auditor.election import current_leader
from auditor.fsck.results.summary import read_closer, read_last
from auditor.mark_reasons import read_private_queue
from auditor.records import AuditRecord, read_audit, read_leader_record
from daemon.admin_session import AdminSession
from daemon.limits import limits_in_force
from daemon.operations.archive import ArchiveStatus, read_archive
from daemon.operations.bookies import (
    REGISTERED,
    BookieRow,
    BookieState,
    bookie_rows,
    missed,
    registered_bookies,
    with_losses,
)
from daemon.operations.feed import read_stall
from daemon.operations.holds import current_hold
from daemon.operations.waiting import current_notes
from daemon.status.leader import LeaderState, gather_leader
from daemon.status.pace import copying_pace
from daemon.status.state import (
    LOCKS_READ_MAX,
    UNREADABLE_VOTE,
    BookieStates,
    ClusterOrders,
    QueueState,
    Reports,
    Services,
    Status,
)
from daemon.status.unreadable import unreadable_records
from ledgers.clock import Clock, SystemClock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.store import MetadataStore
from notifications.discovery import read_servers
from replication.client_activity import read_activity
from replication.cluster import ClusterView
from replication.ledger_record import (
    ClusterFingerprint,
    WaitingNote,
    WaitingNotes,
    unproven_ends,
)
from replication.marks import (
    LockedLedger,
    MarkedLedger,
    locked_ledger_ids,
    marked_ledger_ids,
    read_locks,
    read_marks,
)
from replication.nodes import LiveNode, live_nodes
from replication.orders import (
    Orders,
    OrderStore,
    disable_end_znode,
    mutes_znode,
)
from replication.reasons import Reason
from replication.znodes import ClusterPaths


async def gather_status(
    cluster: AdminSession, *, clock: Clock | None = None, are_marks_read: bool = True
) -> Status:
    """Read the state. ``clock``: None for the real one. ``are_marks_read``: False if it matters how
    many ledgers are marked, but not why. Raises UnavailableError if a part could not be read."""
    clock = clock or SystemClock()
    store, paths = cluster.store, cluster.paths
    services, _ = await gather_services(store, paths)
    leader_session_id = services.leader_session_id
    marked_ids = set(await marked_ledger_ids(store, paths))
    marked = []
    if are_marks_read:
        marked = await read_marks(store, paths, sorted(marked_ids))
        marked_ids = {ledger.ledger_id for ledger in marked}  # others were deleted meanwhile
    private = await read_private_queue(store, paths, shared=marked_ids)
    queued_ids = marked_ids.union(private.ledger_ids)
    locked_ids = await locked_ledger_ids(store, paths)
    notes = WaitingNotes(store, paths)
    noted_ids = await notes.ledger_ids()
    readable = await notes.read_all(sorted(noted_ids))
    unproven = await unproven_ends(cluster.manager, readable)
    readable = [note for note in readable if note.ledger_id in queued_ids]
    waiting = await current_notes(cluster, readable)
    in_windows = {note.ledger_id for note in waiting if note.reason is Reason.MAINTENANCE}
    order_store = OrderStore(store, paths)
    orders = await order_store.read()
    rows = await bookie_rows(cluster, orders, clock=clock)
    leader_state = await gather_leader(
        cluster,
        leader_session_id=leader_session_id,
        absent=missed(rows),
        in_maintenance=[row.bookie for row in rows if row.is_absent_in_maintenance],
        marked=marked,
        clock=clock,
    )
    progress = await read_leader_record(store, paths, RepairProgress)
    if leader_session_id is None or (queued_ids and progress and not progress.samples):
        progress = None
    now_ms = clock.wall_ms()
    return Status(
        taken_ms=now_ms,
        services=services,
        bookies=_bookie_states(
            rows, leader_state, is_bookmender_leader=services.leader_node is not None
        ),
        queue=QueueState(
            marked_count=len(marked_ids),
            private_count=len(private),
            private_damaged_count=len(private.damaged),
            by_missing=tuple(
                sorted(
                    Counter(len(m.mark.replicas) for m in marked if m.mark is not None).items(),
                    reverse=True,
                )
            ),
            by_bookie=tuple(sorted(_bookie_counts(marked).items())),
            by_bookie_in_maintenance=tuple(
                sorted(
                    _bookie_counts(
                        ledger for ledger in marked if ledger.ledger_id in in_windows
                    ).items()
                )
            ),
            locked=frozenset(locked_ids & queued_ids),
            foreign_locks=await foreign_locks(cluster, sorted(locked_ids)),
            waiting=tuple(waiting),
            waiting_count=len(noted_ids & queued_ids) - len(readable) + len(waiting),
            overtaken=await _overtaken(cluster, waiting, orders, now_ms=now_ms),
        ),
        orders=await _cluster_orders(cluster, order_store, orders, clock=clock),
        leader_state=leader_state,
        reports=Reports(
            audit=await _current_audit(cluster),
            fsck=await read_last(store, paths),
            fsck_closer=await read_closer(store, paths),
            placement=(await read_check(store, paths, PLACEMENT.name)).last,
            unreadable_records=await unreadable_records(store, paths),
            unproven=tuple(end.ledger_id for end in unproven),
        ),
        copying=copying_pace(
            limits_in_force(orders.limits, cluster.settings),
            await read_activity(store, paths, now_ms=now_ms),
            [row.bookie for row in rows if row.state in REGISTERED],
        ),
        progress=progress,
        archive=await _archive(cluster, now_ms=now_ms),
        notify_servers=tuple(await read_servers(store, paths)),
        feed_stall=await read_stall(
            store,
            paths,
            leader_session_id=leader_session_id,
            is_java_leader=services.is_java_leader,
        ),
    )


async def _archive(cluster: AdminSession, *, now_ms: int) -> ArchiveStatus | None:
    with suppress(CorruptionError, UnauthorizedError):  # listed as an unreadable record
        found = await read_archive(cluster, now_ms=now_ms)
        return found if found.is_enabled else None
    return None


async def gather_services(
    store: MetadataStore, paths: ClusterPaths
) -> tuple[Services, list[LiveNode]]:
    """Read which nodes run and which auditor leads."""
    nodes = list(await live_nodes(store, paths))
    leader = await current_leader(store, paths)
    ours = [n for n in nodes if leader and n.session_id == leader.session_id]
    services = Services(
        leader=(leader.candidate or UNREADABLE_VOTE) if leader else None,
        leader_node=ours[0].info if ours else None,
        leader_session_id=leader.session_id if leader and ours else None,
        nodes=tuple(sorted((n.info for n in nodes), key=lambda n: (n.host, n.pid, n.role.value))),
    )
    return services, nodes


async def _cluster_orders(
    cluster: AdminSession, order_store: OrderStore, orders: Orders, *, clock: Clock
) -> ClusterOrders:
    ends, mutes = disable_end_znode(cluster.paths), mutes_znode(cluster.paths)
    end, muted = await order_store.stored(ends), await order_store.stored(mutes)
    unreadable = [
        znode.path
        for znode, stored in ((ends, end), (mutes, muted))
        if stored is not None and stored.is_unreadable
    ]
    disabled = await cluster.store.exists(cluster.paths.disable)
    order = end.value if end is not None else None
    is_ending = disabled is not None and order is not None and order.version == disabled.version
    return ClusterOrders(
        hold=await current_hold(cluster, clock=clock),
        is_disabled=disabled is not None,
        disabled_until_ms=order.until_ms if order is not None and is_ending else None,
        mutes=muted.value.by_code if muted is not None and muted.value is not None else {},
        unreadable=tuple(sorted([*orders.unreadable, *unreadable])),
    )


def _bookie_states(
    rows: Sequence[BookieRow], leader_state: LeaderState, *, is_bookmender_leader: bool
) -> BookieStates:
    """Return the bookies by state.

    ``is_bookmender_leader``: if False, no reformatted bookies are reported, because Java's leader
    does not record which of them it has processed.
    """
    loss_due_ms = leader_state.loss_due_ms
    absent = missed(rows)
    return BookieStates(
        writable=tuple(row.bookie for row in rows if row.state is BookieState.WRITABLE),
        read_only=tuple(row.bookie for row in rows if row.state is BookieState.READ_ONLY),
        lost=tuple(bookie for bookie in absent if bookie not in loss_due_ms),
        absent=tuple(bookie for bookie in absent if bookie in loss_due_ms),
        reformatted=tuple(row.bookie for row in rows if row.is_wiped and is_bookmender_leader),
        ordered=tuple(
            row
            for row in with_losses(rows, loss_due_ms)
            if row.drain is not None or row.maintenance is not None
        ),
    )


async def _overtaken(
    cluster: AdminSession, waiting: Sequence[WaitingNote], orders: Orders, *, now_ms: int
) -> frozenset[int]:
    """Return the ledgers of the notes that workers will try before the noted time. None while no
    bookie is registered (rule S8)."""
    if not waiting:
        return frozenset()
    view = ClusterView(bookies=await registered_bookies(cluster), orders=orders.at(now_ms))
    fingerprint = ClusterFingerprint.of(view)
    overtaken = (
        note for note in waiting if note.is_overtaken(now_ms=now_ms, fingerprint=fingerprint)
    )
    return frozenset(note.ledger_id for note in overtaken if view.available)


async def _current_audit(cluster: AdminSession) -> AuditRecord | None:
    """Return the last audit, without unreadable ledgers that are readable or deleted by now.

    Only the ids in the record, at most a hundred, are read again.
    """
    audit = await read_audit(cluster.store, cluster.paths)
    if audit is None or not audit.unreadable:
        return audit
    are_unreadable = await asyncio.gather(*(_is_unreadable(cluster, i) for i in audit.unreadable))
    still = tuple(i for i, is_so in zip(audit.unreadable, are_unreadable, strict=True) if is_so)
    resolved_count = len(audit.unreadable) - len(still)
    return replace(
        audit, unreadable=still, unreadable_count=audit.unreadable_count - resolved_count
    )


async def _is_unreadable(cluster: AdminSession, ledger_id: int) -> bool:
    try:
        with suppress(NoSuchLedgerError):
            await cluster.manager.read(ledger_id)
    except (CorruptionError, UnauthorizedError):
        return True
    return False


async def foreign_locks(
    cluster: AdminSession, locked_ids: Sequence[int]
) -> tuple[LockedLedger, ...]:
    """Return the locks that are not of bookmender nodes, oldest first. Only the first
    ``LOCKS_READ_MAX`` ledgers are read."""
    locks = await read_locks(cluster.store, cluster.paths, locked_ids[:LOCKS_READ_MAX])
    # Read after the locks. Otherwise a node that joins in between would look foreign.
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    foreign = [lock for lock in locks if lock.since_ms and lock.session_id not in ours]
    return tuple(sorted(foreign, key=lambda lock: lock.since_ms))


def _bookie_counts(marked: Iterable[MarkedLedger]) -> Counter[str]:
    return Counter(
        replica for ledger in marked if ledger.mark is not None for replica in ledger.mark.replicas
    )

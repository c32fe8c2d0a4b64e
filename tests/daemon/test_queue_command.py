"""``bookmender queue``: why each ledger is marked."""

from dataclasses import replace

import pytest

from auditor.mark_reasons import Finding, LossKind, LossRecord, LossRecords
from daemon.cli.queue import list_text, sums_text, why_text
from daemon.operations.queue import QueuedLedgerRecord, queue_rows, queue_sums, read_queue
from daemon.operations.topics import NONE, Topic, topic_of
from daemon.status.gathering import gather_status
from ledgers.placement.pulsar import CONFIG_KEY
from replication.marks import MarkedLedger, read_locks, read_marks
from replication.orders import DrainOrder, OrderStore, drain_znode
from replication.reasons import Reason
from replication.znodes import Mark
from tests.daemon.status_values import note
from tests.daemon.visits import rows_of, visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS
from tests.said import Said


@in_virtual_time
async def test_the_list_says_why_each_ledger_is_marked() -> None:
    cluster = await Cluster.start()
    now_ms = cluster.clock.wall_ms()
    causes = {
        B1: LossRecord(kind=LossKind.LOST, since_ms=now_ms - 60_000),
        B2: LossRecord(kind=LossKind.LOST, since_ms=now_ms - 90_000, ended_ms=now_ms),
        B3: LossRecord(kind=LossKind.REFORMATTED, since_ms=now_ms - 5_000),
    }
    await cluster.store.create(PATHS.losses, LossRecords(bookies=causes).to_json())
    finding = Finding(check="replicas", bookies=(B4,), detail="entry 3 is gone", found_ms=now_ms)
    await cluster.store.create(PATHS.finding(4), finding.to_json(), with_parents=True)
    for ledger_id, named in enumerate([(B1,), (B2, B3), (B5,), (), (B4,)]):
        await cluster.mark(*named, ledger_id=ledger_id)

    marked = await read_marks(cluster.store, PATHS, range(5))
    rows = await queue_rows(visiting(cluster), marked, only_private=())

    assert [why_text(row, now_ms=now_ms) for row in rows] == [
        f"misses {B1} [lost for 1 min]",
        f"misses {B2}, {B3} [{B2}: lost 1 min 30 s ago, registered again; "
        f"{B3}: reformatted 5 s ago]",
        f"misses {B5}",
        "misses nothing",
        f"misses {B4} [replicas check, 0 s ago: entry 3 is gone]",
    ]


@in_virtual_time
async def test_denied_marks_and_locks_do_not_fail_the_list() -> None:
    cluster = await Cluster.start()
    for ledger_id in range(3):
        await cluster.mark(B1, ledger_id=ledger_id)
    await cluster.store.create(PATHS.lock(1), is_ephemeral=True)
    admin_session = visiting(cluster)
    shut_out(admin_session.store, PATHS.mark(0), PATHS.lock(1))

    marked = await read_marks(admin_session.store, PATHS, range(3))
    rows = await queue_rows(admin_session, marked, only_private=())

    assert [row.missing for row in rows] == [None, [B1], [B1]]
    assert [row.is_locked for row in rows] == [False, True, False]
    denied = "its mark cannot be read, so no node leases it: the ACL shuts us out"
    denied += f" (path={PATHS.mark(0)})"
    assert [row.mark_unreadable for row in rows] == [
        denied,
        None,
        None,
    ]
    assert why_text(rows[0], now_ms=0) == denied
    assert [each.holder for each in await read_locks(admin_session.store, PATHS, range(3))] == [
        None
    ]


@in_virtual_time
async def test_a_damaged_mark_needs_no_operator() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=0)
    await cluster.store.set(PATHS.mark(0), b"\xff", version=-1)

    (row,) = await queue_rows(
        visiting(cluster), await read_marks(cluster.store, PATHS, [0]), only_private=()
    )

    assert why_text(row, now_ms=0) == ("its mark is unreadable, but the ledger is checked anyway")


@in_virtual_time
async def test_the_list_says_why_a_ledger_is_in_the_private_queue() -> None:
    cluster = await Cluster.start()
    now_ms = cluster.clock.wall_ms()
    order = DrainOrder(since_ms=now_ms - 30_000)
    await OrderStore(cluster.store, PATHS).give(drain_znode(PATHS, B1), order, over=None)
    finding = Finding(check="fsck", bookies=(B4,), detail="entry 3 is gone", found_ms=now_ms)
    await cluster.store.create(PATHS.finding(7), finding.to_json(), with_parents=True)
    marked = [
        MarkedLedger(ledger_id=ledger_id, mark=Mark(replicas=(bookie,)))
        for ledger_id, bookie in ((5, B1), (6, B2), (7, B4))
    ]

    rows = await queue_rows(visiting(cluster), marked, only_private=[5, 6, 7])

    drained, by_hand, found = (why_text(row, now_ms=now_ms) for row in rows)
    assert drained == f"drain of {B1} [draining for 30 s]"
    assert by_hand.startswith(f"check by hand on {B2} [by hand")
    assert found.startswith(f"bad copies on {B4} [fsck check")


def detail_of(row: QueuedLedgerRecord) -> str:
    assert row.waiting is not None
    return row.waiting.detail


def grace_end_of(row: QueuedLedgerRecord) -> int:
    assert row.waiting is not None
    return row.waiting.grace_until_ms


@in_virtual_time
async def test_the_list_says_why_a_ledger_waits_and_until_when() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=1)
    due_ms = cluster.clock.wall_ms() + 4_500

    async with cluster.node("host-b") as worker:
        waiting = replace(note(1, Reason.NO_TARGET, "no room"), tries=3, next_try_ms=due_ms)
        await worker.notes.put(waiting)
        (row,) = await rows_of(cluster, 1)

    line = f"misses {B1} — no-target: {detail_of(row)}"
    assert why_text(row, now_ms=due_ms - 4_500) == f"{line}; try 4 in 5 s"
    assert why_text(row, now_ms=due_ms) == line


@in_virtual_time
async def test_the_list_says_when_a_grace_ends() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=1)
    now_ms = cluster.clock.wall_ms()

    async with cluster.node("host-b") as worker:
        await worker.lease(1)
        waiting = note(1, Reason.OPEN_LEDGER_GRACE, "left to its writer")
        await worker.notes.put(replace(waiting, grace_until_ms=now_ms + 9_000))
        (row,) = await rows_of(cluster, 1)

    locked = f"misses {B1} (locked by host-b for 0 s)"
    line = f"{locked} — open-ledger-grace: {detail_of(row)}"
    assert grace_end_of(row) == now_ms + 9_000
    assert why_text(row, now_ms=now_ms) == f"{line}; grace ends in 9 s"


@in_virtual_time
async def test_a_grace_ends_when_the_lease_is_released() -> None:
    """The next worker begins a new grace, so the old end is not shown."""
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=1)
    now_ms = cluster.clock.wall_ms()
    waiting = note(1, Reason.OPEN_LEDGER_GRACE, "left to its writer")

    async with cluster.node("host-a") as first:
        lease = await first.lease(1)
        await first.notes.put(replace(waiting, grace_until_ms=now_ms + 9_000))
        await first.queue.release(lease)
        (nobodys,) = await rows_of(cluster, 1)
        status = await gather_status(visiting(cluster), clock=cluster.clock)
    async with cluster.node("host-b") as second:
        await second.lease(1)
        (anothers,) = await rows_of(cluster, 1)
        await second.notes.put(replace(waiting, grace_until_ms=now_ms + 30_000))
        (own,) = await rows_of(cluster, 1)

    assert not nobodys.is_locked
    assert grace_end_of(nobodys) == 0
    assert [each.grace_until_ms for each in status.queue.waiting] == [0]
    assert anothers.is_locked
    assert grace_end_of(anothers) == 0
    assert grace_end_of(own) == now_ms + 30_000


@in_virtual_time
async def test_the_note_of_a_deleted_mark_is_not_shown_for_a_new_mark() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=1)
    async with cluster.node("host-b") as worker:
        await worker.notes.put(note(1, Reason.NO_TARGET, "no room"))
        await cluster.store.delete(PATHS.mark(1), version=-1)  # by a Java worker
        await cluster.mark(B2, ledger_id=1)

        status = await gather_status(visiting(cluster), clock=cluster.clock)
        (row,) = await rows_of(cluster, 1)

    assert (status.queue.waiting, status.queue.waiting_count) == ((), 0)
    assert row.waiting is None


# --- Topics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("custom", "topic"),
    [
        pytest.param(
            {"application": "pulsar", "pulsar/managed-ledger": "acme/eu/persistent/a%2Fb+c%25"},
            Topic("acme/eu/a/b c%", "acme"),
            id="a topic of Pulsar, whose name is encoded",
        ),
        pytest.param(
            {"pulsar/managed-ledger": "acme/west/eu/persistent/orders", "pulsar/cursor": "sub"},
            Topic("acme/west/eu/orders", "acme"),
            id="a cursor, of a topic with a cluster in its name",
        ),
        pytest.param(
            {"pulsar/compactedTopic": "persistent://acme/eu/100%"},
            Topic("acme/eu/100%", "acme"),
            id="a compacted topic, whose name is not encoded",
        ),
        pytest.param({"pulsar/schemaId": "acme/eu/a+b"}, Topic("acme/eu/a b", "acme"), id="schema"),
        pytest.param({"pulsar/managed-ledger": "alone"}, Topic("alone"), id="no topic's name"),
        pytest.param(
            {"application": "Pravega", "BookKeeperLogId": "7"}, Topic("BookKeeperLogId=7"), id="log"
        ),
        pytest.param({"b": "2", "a": "1"}, Topic("a=1, b=2"), id="another application"),
        pytest.param({CONFIG_KEY: "{}"}, NONE, id="a rule of placement is no name"),
    ],
)
def test_the_topic_comes_from_custom_metadata(custom: dict[str, str], topic: Topic) -> None:
    assert topic_of([(key, value.encode()) for key, value in custom.items()]) == topic


@in_virtual_time
async def test_topics_and_tenants_are_chosen_and_summed(said: Said) -> None:
    cluster = await Cluster.start()
    names = ("acme/eu/persistent/a", "acme/eu/persistent/b", "acme2/eu/persistent/\x1b[2J", "")
    for ledger_id, name in enumerate(names):
        custom = (("pulsar/managed-ledger", name.encode()),) if name else ()
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, custom=custom)
        await cluster.mark(B1, ledger_id=ledger_id)
    here = visiting(cluster)

    async def ids(tenant: str = "", topic: str = "") -> list[int]:
        found = await read_queue(here, tenant=tenant, topic=topic)
        return [row.ledger_id for row in found.ledgers]

    every = await read_queue(here)
    assert [row.topic for row in every.ledgers] == [
        "acme/eu/a",
        "acme/eu/b",
        "acme2/eu/\x1b[2J",
        None,
    ]
    assert await ids(tenant="acme") == [0, 1]
    assert await ids(topic="persistent://acme/eu/a") == [0]
    assert await ids(topic="acme2", tenant="acme") == []
    assert (await read_queue(here, tenant="acme", limit=1)).marked == 2
    now_ms = (every.ledgers[0].ctime_ms or 0) + 200_000
    by_tenant = sums_text(queue_sums(every, by="tenant"), by="tenant")
    said("queue", {"all": list_text(every, now_ms=now_ms), "by tenant": by_tenant})

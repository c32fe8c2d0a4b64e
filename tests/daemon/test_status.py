"""``bookmender status``: what is gathered of a cluster, and how it is told."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from auditor.records import AuditRecord
from daemon.operating.drains import order_drains
from daemon.operating.maintenance_command import open_window
from daemon.queue_command import line_of, queue_rows
from daemon.settings import Settings
from daemon.status import UNREADABLE_VOTE, WAITING_SHOWN_MAX, Status, gather_status, help_text
from daemon.status_command import render
from daemon.visit import Visit
from ledgers.clock import SystemClock
from ledgers.metadata import BookieId
from ledgers.registration import Registration
from replication.cluster.membership import Half, NodeInfo
from replication.cluster.orders import HoldOrder
from replication.cluster.own_state import own_path
from replication.queue import payloads
from replication.queue.listing import LockedLedger, read_marks
from replication.reasons import Reason
from replication.waiting.notes import WaitingNote
from tests.auditor.auditing import leading
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import ROOT, UR

WHOLE = Status(
    leader=None,
    leader_node=None,
    nodes=(),
    writable=(B1, B2, B3),
    read_only=(),
    lost=(),
    is_disabled=False,
    marked_count=0,
    by_missing=(),
    by_bookie=(),
    under_repair=0,
    waiting=(),
    waiting_count=0,
)


def note(ledger_id: int, reason: Reason, detail: str = "because") -> WaitingNote:
    return WaitingNote(
        ledger_id=ledger_id, reason=reason, detail=detail, node="host-a", since_ms=1_000
    )


def node(host: str, pid: int, half: Half) -> NodeInfo:
    return NodeInfo(half=half, host=host, pid=pid, bookie_id=None, started_ms=0)


# --- The verdict ----------------------------------------------------------------------------------

ATTENDED = {"nodes": (node("host-a", 11, Half.WORKER),)}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        pytest.param({}, "whole", id="nothing marked, nobody lost"),
        pytest.param({"is_disabled": True}, "whole", id="whole, though it is disabled"),
        pytest.param({"lost": (B1,)}, "bookies-lost", id="a bookie is lost, nothing marked yet"),
        pytest.param({"marked_count": 2, **ATTENDED}, "repairing", id="marked"),
        pytest.param(
            {"marked_count": 2, "lost": (B1,), **ATTENDED}, "repairing", id="marked, for a reason"
        ),
        pytest.param({"marked_count": 2}, "unattended", id="marked, and there is no node"),
        pytest.param(
            {"marked_count": 1, "waiting": (note(1, Reason.NO_COPY),)},
            "unattended",
            id="there is no node that help would help",
        ),
        pytest.param({"marked_count": 2, "leader": "java-1"}, "repairing", id="Java's leads"),
        pytest.param({"marked_count": 2, "under_repair": 1}, "repairing", id="somebody's lock"),
        pytest.param({"marked_count": 2, "is_disabled": True}, "disabled", id="nobody repairs"),
        pytest.param(
            {"marked_count": 1, "waiting": (note(1, Reason.OPEN_LEDGER_GRACE),), **ATTENDED},
            "repairing",
            id="time will help",
        ),
        pytest.param(
            {
                "marked_count": 2,
                "waiting": (note(1, Reason.NO_ANSWER), note(2, Reason.NO_COPY)),
                **ATTENDED,
            },
            "repairing",
            id="one of them needs help, the other time",
        ),
        pytest.param(
            {"marked_count": 1, "waiting": (note(2, Reason.NO_COPY),), **ATTENDED},
            "stuck",
            id="all of them need help",
        ),
        pytest.param(
            {"audit": AuditRecord(finished_ms=0, ledger_count=9, mark_count=0, unreadable_count=1)},
            "unreadable",
            id="nothing is marked, but not everything could be read",
        ),
        pytest.param({"writable": ()}, "bookies-lost", id="no bookie is left at all"),
        pytest.param({"own_marked_count": 1}, "whole", id="ledgers are being moved"),
        pytest.param(
            {"own_marked_count": 1, "waiting": (note(1, Reason.NO_TARGET),)},
            "drain-stuck",
            id="nowhere to move them to",
        ),
        pytest.param(
            {"own_marked_count": 2, "waiting": (note(1, Reason.NO_TARGET),)},
            "whole",
            id="some can be moved",
        ),
        pytest.param(
            {"unreadable_orders": ("/x",)}, "orders-unreadable", id="an order nobody reads"
        ),
    ],
)
def test_the_verdict_is_one_word(changes: dict[str, object], verdict: str) -> None:
    status = replace(WHOLE, **changes)  # type: ignore[arg-type]

    assert status.verdict == verdict
    assert status.to_json()["verdict"] == verdict


@pytest.mark.parametrize(
    ("reason", "needs_help"),
    [
        (Reason.OPEN_LEDGER_GRACE, False),
        (Reason.OPEN_FRAGMENT, False),
        (Reason.WRITER_ALIVE, False),
        (Reason.NO_COPY, True),
        (Reason.NO_TARGET, True),
        (Reason.MISPLACED, True),
        (Reason.NO_ANSWER, False),
        (Reason.RECOVERY_FAILED, False),
        (Reason.CORRUPT_METADATA, True),
        (Reason.DIGEST_SUSPECT, True),
        (Reason.CONFLICTS, False),
        (Reason.JOURNAL, True),
    ],
)
def test_what_time_alone_will_not_help(reason: Reason, needs_help: bool) -> None:
    assert reason.needs_help is needs_help


# --- As text --------------------------------------------------------------------------------------


def test_a_whole_cluster_is_told_in_five_lines() -> None:
    assert render(WHOLE, now_ms=0).splitlines() == [
        "verdict   whole",
        "leader    none: no auditor is running",
        "nodes     none: start one with bookmender daemon",
        "bookies   3 writable, 0 read-only, 0 lost",
        "queue     0 ledgers marked, 0 locked for repair, 0 waiting",
    ]


def test_that_nobody_is_there_to_repair_is_said_with_what_to_do() -> None:
    first = render(replace(WHOLE, marked_count=2), now_ms=0).splitlines()[0]

    assert first.startswith("verdict   unattended (")
    assert "start a node with bookmender daemon" in first


def test_a_hold_is_told_before_anything_else() -> None:
    hold = HoldOrder(since_ms=0, until_ms=90_000, reason="3 of 5 bookies went within 120 s")
    status = replace(WHOLE, hold=hold, marked_count=2, is_disabled=True)

    first, second, *_ = render(status, now_ms=60_000).splitlines()

    assert first.startswith("HOLD      held for 1 min by the leader (3 of 5 bookies went")
    assert "for another 30 s" in first
    assert second.startswith("verdict   held")
    assert status.to_json()["hold"]["reason"] == hold.reason


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({}, True, id="a node works on them"),
        pytest.param({"is_disabled": True}, False, id="nobody does: it is switched off"),
        pytest.param({"nodes": ()}, False, id="nobody does: there is no node"),
    ],
)
def test_of_a_hold_it_is_told_what_is_repaired_meanwhile(
    changes: dict[str, object], is_told: bool
) -> None:
    workers = (node("host-a", 11, Half.WORKER),)
    held = replace(WHOLE, hold=HoldOrder(since_ms=0), marked_count=503, nodes=workers)

    first = render(replace(held, **changes), now_ms=60_000).splitlines()[0]  # type: ignore[arg-type]

    assert ("503 marked before are repaired meanwhile" in first) is is_told


def test_a_cluster_in_trouble_is_told_in_full() -> None:
    status = replace(
        WHOLE,
        leader="host-a",
        leader_node=node("host-a", 11, Half.AUDITOR),
        nodes=(
            node("host-a", 11, Half.AUDITOR),
            node("host-a", 11, Half.WORKER),
            node("host-b", 22, Half.WORKER),
        ),
        read_only=(B3,),
        writable=(B1,),
        lost=(B2,),
        is_disabled=True,
        marked_count=105,
        by_missing=((2, 1), (1, 104)),
        under_repair=4,
        waiting=(replace(note(7, Reason.NO_COPY, "no good copy of entry 4"), next_try_ms=70_100),),
        waiting_count=3,
        foreign_locks=(
            LockedLedger(ledger_id=8, holder="java-1", since_ms=2_500, session_id=5),
            LockedLedger(ledger_id=9, holder=None, since_ms=3_500, session_id=6),
        ),
        audit=AuditRecord(
            finished_ms=60_000, ledger_count=9, mark_count=2, unreadable_count=1, unreadable=(8,)
        ),
    )

    assert render(status, now_ms=62_500).splitlines() == [
        "verdict   disabled (auto-recovery is disabled)",
        "leader    host-a (pid 11)",
        "nodes     host-a (pid 11: auditor and worker), host-b (pid 22: worker)",
        "bookies   1 writable, 1 read-only, 1 lost",
        f"          lost: {B2}",
        "queue     105 ledgers marked, 4 locked for repair, 3 waiting",
        "          1 missing 2 bookies",
        "          104 missing 1 bookie",
        "locks     2 held by others than our nodes, the longest for 60 s: ledger 8, by java-1",
        "audit     2 s ago, 9 ledgers, the metadata of 1 unreadable: 8",
        "waiting   (the first 1 of 3; bookmender queue list tells of each)",
        "  1 no-copy, for up to 61 s, next try in 8 s: ledger 7",
        "      no good copy of entry 4",
    ]


def test_a_leader_that_is_no_node_of_ours_is_javas() -> None:
    text = render(replace(WHOLE, leader="java:3181"), now_ms=0)

    assert "leader    java:3181 (Java's AutoRecovery)" in text


def test_a_terminal_obeys_nothing_of_what_stands_in_znodes() -> None:
    spoiled = "x\x1b[2J\ny"
    status = replace(
        WHOLE,
        leader=spoiled,
        nodes=(node(spoiled, 11, Half.WORKER),),
        waiting=(note(7, Reason.NO_COPY, spoiled),),
        waiting_count=1,
        foreign_locks=(LockedLedger(ledger_id=8, holder=spoiled, since_ms=0, session_id=5),),
    )

    text = render(status, now_ms=0)

    assert all(line.isprintable() for line in text.splitlines())
    assert text.count(r"x\x1b[2J\ny") == 4
    assert help_text(status.waiting[0]).isprintable()


def test_a_clock_that_is_behind_the_nodes_makes_no_negative_age() -> None:
    status = replace(WHOLE, waiting=(note(7, Reason.NO_COPY),), waiting_count=1, marked_count=1)

    assert "for up to 0 s" in render(status, now_ms=0)


# --- As gathered ----------------------------------------------------------------------------------


async def gathered(cluster: Cluster) -> Status:
    return await gather_status(
        Visit(
            settings=Settings(metadata_service_uri=f"zk://127.0.0.1{ROOT}"),
            store=cluster.store,
            manager=cluster.manager,
            registration=Registration(cluster.store, ROOT),
        )
    )


@in_virtual_time
async def test_a_cluster_in_which_nothing_ever_happened_is_whole() -> None:
    status = await gathered(await Cluster.start())

    assert status == replace(WHOLE, writable=BOOKIES)


@in_virtual_time
async def test_leader_nodes_bookies_and_queue_are_gathered_as_they_are() -> None:
    cluster = await Cluster.start()
    await cluster.kill(B1)
    await cluster.unregister(B2)
    await cluster.register(B2, is_read_only=True)
    await cluster.mark(B1, ledger_id=1)
    await cluster.mark(B1, B3, ledger_id=2)
    await cluster.mark(B1, ledger_id=3)
    await cluster.store.create(payloads.mark_path(UR, 4), b"\xff", with_parents=True)
    await cluster.store.create(payloads.disable_path(UR))

    async with leading(cluster, "host-a") as leader, cluster.node("host-b") as worker:
        await worker.take(2)
        await worker.notes.write(note(1, Reason.NO_TARGET))
        await worker.notes.write(note(99, Reason.NO_TARGET))  # without a mark: means nothing

        status = await gathered(cluster)

        assert status.leader == "host-a"
        assert status.leader_node is not None
        assert status.leader_node.half is Half.AUDITOR
        assert leader.store.session_id
    assert [(n.host, n.half) for n in status.nodes] == [
        ("host-a", Half.AUDITOR),
        ("host-b", Half.WORKER),
    ]
    assert status.lost == (B1,)
    assert status.read_only == (B2,)
    assert set(status.writable) == {*BOOKIES} - {B1, B2}
    assert status.is_disabled
    assert status.marked_count == 4
    assert status.by_missing == ((2, 1), (1, 2))
    assert status.by_bookie == ((B1, 3), (B3, 1))
    assert status.under_repair == 1
    assert status.waiting == (note(1, Reason.NO_TARGET),)
    assert status.waiting_count == 1
    assert status.verdict == "disabled"


@in_virtual_time
async def test_a_java_auditor_leads_as_it_calls_itself() -> None:
    cluster = await Cluster.start()
    vote = payloads.vote_to_bytes("java:3181")
    await cluster.store.create(f"{payloads.election_path(UR)}/V_0000000003", vote)

    status = await gathered(cluster)

    assert (status.leader, status.leader_node) == ("java:3181", None)


@in_virtual_time
async def test_a_leader_whose_vote_cannot_be_read_is_unknown_and_no_obstacle() -> None:
    cluster = await Cluster.start()
    await cluster.store.create(f"{payloads.election_path(UR)}/V_0000000003", b"\xff")

    status = await gathered(cluster)

    assert status.leader == UNREADABLE_VOTE
    assert status.verdict == "whole"


@in_virtual_time
async def test_locks_of_others_are_told_apart_from_ours_and_the_oldest_comes_first() -> None:
    cluster = await Cluster.start()
    for ledger_id in (1, 2, 3):
        await cluster.mark(B1, ledger_id=ledger_id)

    async with cluster.node("host-b") as worker:
        await worker.take(2)
        java = payloads.lock_to_bytes("java-host")
        await cluster.store.create(payloads.lock_path(UR, 3), java, is_ephemeral=True)
        await asyncio.sleep(10)
        await cluster.store.create(payloads.lock_path(UR, 1), b"\xff")
        status = await gathered(cluster)
        rows = await rows_of(cluster, 1, 2, 3)

    assert status.under_repair == 3
    assert [(lock.ledger_id, lock.holder) for lock in status.foreign_locks] == [
        (3, "java-host"),
        (1, None),
    ]
    assert [line_of(row, now_ms=cluster.clock.wall_ms()) for row in rows] == [
        f"ledger 1: misses {B1} (locked by nobody known, no node of ours, for 0 s)",
        f"ledger 2: misses {B1} (locked by host-b for 10 s)",
        f"ledger 3: misses {B1} (locked by java-host, no node of ours, for 10 s)",
    ]


@in_virtual_time
async def test_the_queue_tells_why_a_ledger_waits_and_until_when() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=1)
    due_ms = cluster.clock.wall_ms() + 4_500

    async with cluster.node("host-b") as worker:
        waiting = replace(note(1, Reason.NO_TARGET, "no room"), tries=3, next_try_ms=due_ms)
        await worker.notes.write(waiting)
        (row,) = await rows_of(cluster, 1)

    line = f"ledger 1: misses {B1} — no-target: no room"
    assert line_of(row, now_ms=due_ms - 4_500) == f"{line}; try 4 in 5 s"
    assert line_of(row, now_ms=due_ms) == line


async def rows_of(cluster: Cluster, *ledger_ids: int) -> list[dict[str, Any]]:
    marked = await read_marks(cluster.store, UR, ledger_ids)
    return await queue_rows(visiting(cluster), marked, own=())


@in_virtual_time
async def test_of_very_many_that_wait_the_first_are_shown_and_all_are_counted() -> None:
    cluster = await Cluster.start()
    count = WAITING_SHOWN_MAX + 5
    async with cluster.node() as worker:
        for ledger_id in range(count):
            await cluster.mark(ledger_id=ledger_id)
            await worker.notes.write(note(ledger_id, Reason.NO_ANSWER))

        status = await gathered(cluster)

    assert [n.ledger_id for n in status.waiting] == list(range(WAITING_SHOWN_MAX))
    assert status.waiting_count == count
    assert f"the first {WAITING_SHOWN_MAX} of {count}" in render(status, now_ms=0)


@in_virtual_time
async def test_the_json_has_what_the_text_has() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=1)
    async with leading(cluster, "host-a"), cluster.node("host-b") as worker:
        await worker.notes.write(note(1, Reason.NO_COPY, "gone"))
        record = (await gathered(cluster)).to_json()

    assert record["leader"] == "host-a"
    assert record["leader_node"]["host"] == "host-a"
    assert [n["half"] for n in record["nodes"]] == ["auditor", "worker"]
    assert record["bookies"]["writable"] == sorted(BOOKIES)
    assert record["queue"] == {
        "marked": 1,
        "under_repair": 0,
        "by_missing_bookies": {"1": 1},
        "by_lost_bookie": {BookieId(B1): 1},
        "by_cause": {"unknown": 1},
        "own_marked": 0,
        "foreign_locks": [],
    }
    assert record["auditing"] == {
        "index": None,
        "recovery_delay_s": 0,
        "pending_losses": [],
        "running_checks": [],
    }
    assert record["waiting"]["ledgers"] == [
        {
            "ledger_id": 1,
            "reason": "no-copy",
            "detail": "gone",
            "node": "host-a",
            "since_ms": 1_000,
            "tries": 1,
            "next_try_ms": 0,
        }
    ]


# --- What is ordered -------------------------------------------------------------------------------


@in_virtual_time
async def test_a_bookie_under_maintenance_is_not_lost_and_orders_are_told() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    here = visiting(cluster)
    await open_window(here, B1, duration_s=3_600, reason="disk", clock=SystemClock())
    await order_drains(here, [B2], may_fence=False, clock=SystemClock())
    await cluster.kill(B1)
    await cluster.store.create(payloads.mark_path(own_path(UR), 5), with_parents=True)

    status = await gather_status(here)

    assert status.lost == ()
    assert status.verdict == "whole"
    assert [row["bookie_id"] for row in status.to_json()["ordered_bookies"]] == [B1, B2]
    assert status.to_json()["queue"]["own_marked"] == 1
    lines = render(status, now_ms=SystemClock().wall_ms()).splitlines()
    assert lines[-3] == "          1 more to be drained or repaired by hand"
    assert lines[-2].startswith(f"orders    {B1}: away, under maintenance for another ")
    assert lines[-1] == f"          {B2}: writable, draining (not looked for yet)"


@in_virtual_time
async def test_what_the_last_audit_could_not_read_is_looked_at_again() -> None:
    cluster = await Cluster.start()
    for ledger_id in (1, 2, 3):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id)
    good, _ = await cluster.store.get(cluster.manager.path(1))
    for ledger_id in (1, 2, 3):
        await cluster.store.set(cluster.manager.path(ledger_id), b"", version=-1)
    async with leading(cluster) as leader:
        await leader.records.write_audit(
            AuditRecord(
                finished_ms=1,
                ledger_count=3,
                mark_count=0,
                unreadable_count=3,
                unreadable=(1, 2, 3),
            )
        )
    assert (await gathered(cluster)).verdict == "unreadable"

    await cluster.store.set(cluster.manager.path(1), good, version=-1)
    await cluster.store.delete(cluster.manager.path(2))

    audit = (await gathered(cluster)).audit
    assert audit is not None
    assert (audit.unreadable, audit.unreadable_count) == ((3,), 1)

    await cluster.store.delete(cluster.manager.path(3))
    assert (await gathered(cluster)).verdict == "whole"

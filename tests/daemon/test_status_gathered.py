"""What ``bookmender status`` gathers of a cluster."""

import asyncio
from dataclasses import replace

from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import AuditRecord
from daemon.admin_session import AdminSession
from daemon.cli.drain import order_drains
from daemon.cli.maintenance import concerns as window_concerns
from daemon.cli.maintenance import open_window
from daemon.cli.queue import line_of
from daemon.settings import Settings
from daemon.status.command import render
from daemon.status.gathering import gather_status
from daemon.status.state import UNREADABLE_VOTE, WAITING_SHOWN_MAX, Status
from daemon.status.verdict import verdict_text
from ledgers.clock import Clock, SystemClock
from ledgers.model import BookieId
from ledgers.registration import Registration
from replication import znodes
from replication.nodes import Role
from replication.reasons import Reason
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import SOON_S, delayed, with_ledgers
from tests.daemon.status_values import WHOLE, note
from tests.daemon.visits import rows_of, visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import PATHS, ROOT


async def gathered(cluster: Cluster, clock: Clock | None = None) -> Status:
    return await gather_status(
        AdminSession(
            settings=Settings(metadata_service_uri=f"zk://127.0.0.1{ROOT}"),
            store=cluster.store,
            manager=cluster.manager,
            registration=Registration(cluster.store, ROOT),
        ),
        clock=clock,
    )


async def let_java_lead(cluster: Cluster) -> None:
    vote = znodes.vote_to_bytes("java:3181")
    await cluster.store.create(f"{PATHS.election}/V_0000000003", vote, with_parents=True)


@in_virtual_time
async def test_a_cluster_in_which_nothing_ever_happened_has_no_auditor() -> None:
    status = await gathered(await Cluster.start())

    assert status == replace(WHOLE, leader=None, writable=BOOKIES)
    assert (status.verdict, status.exit_code) == ("no-auditor", 3)


@in_virtual_time
async def test_a_bookie_is_away_first_and_lost_after_the_recovery_delay() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(100)):
        await cluster.kill(B1)
        await asyncio.sleep(60)
        before = await gathered(cluster, cluster.clock)
        await asyncio.sleep(60)
        after = await gathered(cluster, cluster.clock)

    assert (before.away, before.lost, before.verdict) == ((B1,), (), "bookies-away")
    assert (after.away, after.lost, after.marked_count) == ((), (B1,), 1)
    bookies = before.to_json()["bookies"]
    assert (bookies["away"], bookies["lost"]) == ([B1], [])


@in_virtual_time
async def test_a_bookie_that_was_wiped_and_did_not_come_back_is_lost_though_it_has_no_cookie() -> (
    None
):
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.disable, with_parents=True)
    async with auditing(cluster):
        await asyncio.sleep(60)
        await cluster.kill(B1)
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await asyncio.sleep(60)
        status = await gathered(cluster, cluster.clock)

    assert (status.lost, status.marked_count, status.verdict) == ((B1,), 0, "bookies-lost")


@in_virtual_time
async def test_a_bookie_that_came_back_empty_while_nothing_may_be_marked_is_told() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(60)
        await cluster.store.create(PATHS.disable, with_parents=True)
        await cluster.kill(B1)
        await cluster.wipe(B1)
        await cluster.revive(B1)
        await asyncio.sleep(60)
        disabled = await gathered(cluster, cluster.clock)
        await cluster.store.delete(PATHS.disable)
        await asyncio.sleep(60)
        enabled = await gathered(cluster, cluster.clock)

    assert (disabled.wiped, disabled.verdict, disabled.exit_code) == ((B1,), "bookies-wiped", 1)
    assert verdict_text(disabled, now_ms=0) == (
        f"bookies-wiped (set up anew, and may have lost what they had: {B1}; auto-recovery is disabled)"
    )
    assert (enabled.wiped, enabled.marked_count) == ((), 1)


@in_virtual_time
async def test_leader_nodes_bookies_and_queue_are_gathered_as_they_are() -> None:
    cluster = await Cluster.start()
    await cluster.kill(B1)
    await cluster.unregister(B2)
    await cluster.register(B2, is_read_only=True)
    await cluster.mark(B1, ledger_id=1)
    await cluster.mark(B1, B3, ledger_id=2)
    await cluster.mark(B1, ledger_id=3)
    await cluster.store.create(PATHS.mark(4), b"\xff", with_parents=True)
    await cluster.store.create(PATHS.disable)

    async with leading(cluster, "host-a") as leader, cluster.node("host-b") as worker:
        await worker.lease(2)
        await worker.notes.write(note(1, Reason.NO_TARGET))
        await worker.notes.write(note(99, Reason.NO_TARGET))  # without a mark: means nothing

        status = await gathered(cluster)

        assert status.leader == "host-a"
        assert status.leader_node is not None
        assert status.leader_node.role is Role.AUDITOR
        assert leader.store.session_id
    assert [(n.host, n.role) for n in status.nodes] == [
        ("host-a", Role.AUDITOR),
        ("host-b", Role.WORKER),
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
async def test_rule_s8_while_no_bookie_is_registered_none_is_called_lost() -> None:
    cluster = await Cluster.start(B1, B2)
    for bookie in (B1, B2):
        await cluster.unregister(bookie)

    status = await gathered(cluster)

    assert (status.verdict, status.lost, status.exit_code) == ("no-bookies", (), 3)


@in_virtual_time
async def test_a_java_auditor_leads_as_it_calls_itself() -> None:
    cluster = await Cluster.start()
    await let_java_lead(cluster)

    status = await gathered(cluster)

    assert (status.leader, status.leader_node) == ("java:3181", None)
    assert (status.verdict, status.exit_code) == ("whole", 0)


@in_virtual_time
async def test_a_leader_whose_vote_cannot_be_read_is_unknown_and_no_obstacle() -> None:
    cluster = await Cluster.start()
    await cluster.store.create(f"{PATHS.election}/V_0000000003", b"\xff")

    status = await gathered(cluster)

    assert status.leader == UNREADABLE_VOTE
    assert status.verdict == "whole"


@in_virtual_time
async def test_locks_of_others_are_told_apart_from_ours_and_the_oldest_comes_first() -> None:
    cluster = await Cluster.start()
    for ledger_id in (1, 2, 3):
        await cluster.mark(B1, ledger_id=ledger_id)

    async with cluster.node("host-b") as worker:
        await worker.lease(2)
        java = znodes.lock_to_bytes("java-host")
        await cluster.store.create(PATHS.lock(3), java, is_ephemeral=True)
        await asyncio.sleep(10)
        await cluster.store.create(PATHS.lock(1), b"\xff")
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
async def test_of_very_many_that_wait_all_count_and_programs_are_told_of_the_first() -> None:
    cluster = await Cluster.start()
    count = WAITING_SHOWN_MAX + 5
    async with cluster.node() as worker:
        for ledger_id in range(count):
            await cluster.mark(ledger_id=ledger_id)
            await worker.notes.write(note(ledger_id, Reason.NO_TARGET))

        status = await gathered(cluster)

    assert status.waiting_count == count
    assert status.verdict == "stuck"
    assert f"  {count} no-target" in render(status, now_ms=0)
    told = status.to_json()["waiting"]
    assert told["count"] == count
    assert [each["ledger_id"] for each in told["ledgers"]] == list(range(WAITING_SHOWN_MAX))


@in_virtual_time
async def test_the_json_has_what_the_text_has() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1, ledger_id=1)
    async with leading(cluster, "host-a"), cluster.node("host-b") as worker:
        await worker.notes.write(note(1, Reason.NO_COPY, "gone"))
        record = (await gathered(cluster)).to_json()

    assert record["leader"] == "host-a"
    assert record["leader_node"]["host"] == "host-a"
    assert [n["role"] for n in record["nodes"]] == ["auditor", "worker"]
    assert record["bookies"]["writable"] == sorted(BOOKIES)
    assert record["queue"] == {
        "total": 1,
        "marked": 1,
        "under_repair": 0,
        "by_missing_bookies": {"1": 1},
        "by_lost_bookie": {BookieId(B1): 1},
        "for_windows_by_lost_bookie": {},
        "by_cause": {"unknown": 1},
        "own_marked": 0,
        "own_damaged": 0,
        "foreign_locks": [],
    }
    assert record["auditing"] == {
        "index": None,
        "recovery_delay_s": 0,
        "recovery_delay_error": None,
        "pending_losses": [],
        "running_checks": [],
        "away_named_by": {"ledgers": {}, "is_complete": False, "counted_age_s": 0.0},
        "copyless_ledgers": None,
        "copyless_first": [],
        "copyless_enough_for": {},
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
            "grace_until_ms": 0,
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
    await cluster.store.create(PATHS.private.mark(5), with_parents=True)
    await let_java_lead(cluster)

    status = await gather_status(here)

    assert status.lost == ()
    assert status.verdict == "maintenance"
    assert [row["bookie_id"] for row in status.to_json()["ordered_bookies"]] == [B1, B2]
    assert status.to_json()["queue"]["own_marked"] == 1
    lines = render(status, now_ms=SystemClock().wall_ms()).splitlines()
    assert lines[-3] == (
        "          1 of them in our private queue, to be drained or repaired by hand"
    )
    assert lines[-2].startswith(f"orders    {B1}: away, under maintenance for another ")
    assert lines[-1] == f"          {B2}: writable, draining (not looked for yet)"


@in_virtual_time
async def test_of_a_bookie_that_no_ledger_names_maintenance_affects_nothing() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        session_id = leader.store.session_id
        await leader.records.write_index(
            LedgerMapRecord(session_id=session_id, written_ms=0, is_complete=True, ledger_count=1)
        )
        await open_window(visiting(cluster), B3, duration_s=60, reason="", clock=cluster.clock)
        await cluster.kill(B3)
        await asyncio.sleep(SOON_S)
        status = await gathered(cluster, cluster.clock)
        concerns = await window_concerns(visiting(cluster), B3, clock=cluster.clock)

    assert verdict_text(status, now_ms=0).endswith(": no ledger names it, and nothing is affected)")
    named = status.to_json()["auditing"]["away_named_by"]
    assert (named["ledgers"], named["is_complete"]) == ({B3: 0}, True)
    assert concerns == [
        f"no ledger names {B3}: nothing is affected while it is away, and if it is not to come back, "
        f"bookmender bookie decommission {B3} forgets it"
    ]


@in_virtual_time
async def test_two_windows_that_leave_no_copy_of_some_ledgers_are_no_mere_maintenance() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    found: list[tuple[str, int]] = []
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await leader.records.write_index(
            LedgerMapRecord(
                session_id=leader.store.session_id, written_ms=0, is_complete=True, ledger_count=3
            )
        )
        for bookie in (B1, B2):
            await open_window(
                visiting(cluster), bookie, duration_s=60, reason="", clock=cluster.clock
            )
            await cluster.kill(bookie)
            await asyncio.sleep(SOON_S)
            status = await gathered(cluster, cluster.clock)
            found.append((status.verdict, status.exit_code))

    assert found == [("maintenance", 0), ("copies-away", 1)]


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

    shut = shut_out(cluster.store, cluster.manager.path(3))
    assert (await gathered(cluster)).audit == audit

    shut.clear()
    await cluster.store.delete(cluster.manager.path(3))
    await let_java_lead(cluster)
    assert (await gathered(cluster)).verdict == "whole"

"""The facts that ``bookmender status`` gathers from a cluster."""

import asyncio

import pytest

from auditor.absence import Outages
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.mark_reasons import Finding
from auditor.records import AuditRecord
from daemon.admin_session import AdminSession
from daemon.cli.queue import why_text
from daemon.operations.drains import order_drains
from daemon.operations.maintenance import concerns as window_concerns
from daemon.operations.maintenance import end_window, open_window
from daemon.settings import Settings
from daemon.status.condition import exit_code
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_status
from daemon.status.report import to_text
from daemon.status.state import UNREADABLE_VOTE, Status
from ledgers.clock import Clock, SystemClock
from ledgers.model import LedgerState
from ledgers.registration import Registration
from replication import znodes
from replication.client_activity import ClientActivity
from replication.nodes import Role
from replication.reasons import Facts, Reason
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import SOON_S, delayed, with_ledgers
from tests.daemon.status_values import HEALTHY, as_json, changed, codes, fact, note
from tests.daemon.visits import rows_of, visiting
from tests.replication.cluster import Cluster, in_virtual_time, queue_empty, shut_out, until
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import PATHS, ROOT, working


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
async def test_a_new_cluster_has_no_auditor() -> None:
    status = await gathered(await Cluster.start())

    assert status == changed(HEALTHY, leader=None, writable=BOOKIES, taken_ms=status.taken_ms)
    assert codes(status) == ["NO_AUDITOR UNKNOWN"]


@in_virtual_time
async def test_a_bookie_is_lost_after_the_recovery_delay() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(100)):
        await cluster.kill(B1)
        await asyncio.sleep(60)
        before = await gathered(cluster, cluster.clock)
        await asyncio.sleep(60)
        after = await gathered(cluster, cluster.clock)

    assert (before.bookies.absent, before.bookies.lost) == ((B1,), ())
    assert "BOOKIES_ABSENT WARN" in codes(before)
    assert (after.bookies.absent, after.bookies.lost) == ((), (B1,))
    assert after.queue.marked_count == 1
    bookies = as_json(before)["bookies"]
    assert (bookies["absent"], bookies["lost"]) == ([B1], [])


@in_virtual_time
async def test_a_bookie_without_cookie_is_lost_if_ledgers_name_it() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.disable, with_parents=True)
    async with auditing(cluster):
        await asyncio.sleep(60)
        await cluster.kill(B1)
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await asyncio.sleep(60)
        status = await gathered(cluster, cluster.clock)

    assert (status.bookies.lost, status.queue.marked_count) == ((B1,), 0)
    assert fact(status, "BOOKIES_LOST").endswith(
        "Its ledgers are not marked: auto-recovery is disabled."
    )


@in_virtual_time
async def test_a_reformatted_bookie_is_shown_until_marks_are_made() -> None:
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

    assert disabled.bookies.reformatted == (B1,)
    assert fact(disabled, "BOOKIES_REFORMATTED") == (
        f"1 bookie is reformatted and may have lost data: {B1}. The affected ledgers are not "
        "marked yet: auto-recovery is disabled."
    )
    assert (enabled.bookies.reformatted, enabled.queue.marked_count) == ((), 1)


@in_virtual_time
async def test_the_leader_nodes_bookies_and_queue_are_gathered() -> None:
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
        await worker.notes.put(note(1, Reason.NO_TARGET))
        await worker.notes.put(note(99, Reason.NO_TARGET))  # without a mark, so it does not count

        status = await gathered(cluster)

        assert status.services.leader == "host-a"
        assert status.services.leader_node is not None
        assert status.services.leader_node.role is Role.AUDITOR
        assert leader.store.session_id
    assert [(n.host, n.role) for n in status.services.nodes] == [
        ("host-a", Role.AUDITOR),
        ("host-b", Role.WORKER),
    ]
    assert status.bookies.lost == (B1,)
    assert status.bookies.read_only == (B2,)
    assert set(status.bookies.writable) == {*BOOKIES} - {B1, B2}
    assert status.orders.is_disabled
    assert status.queue.marked_count == 4
    assert status.queue.by_missing == ((2, 1), (1, 2))
    assert status.queue.by_bookie == ((B1, 3), (B3, 1))
    assert status.queue.locked_count == 1
    assert status.queue.waiting == (note(1, Reason.NO_TARGET),)
    assert status.queue.waiting_count == 1
    assert "AUTORECOVERY_DISABLED WARN" in codes(status)


@in_virtual_time
async def test_rule_s8_with_no_bookie_registered_none_is_lost() -> None:
    cluster = await Cluster.start(B1, B2)
    for bookie in (B1, B2):
        await cluster.unregister(bookie)

    status = await gathered(cluster)

    assert (codes(status), status.bookies.lost) == (["NO_BOOKIES UNKNOWN"], ())


@pytest.mark.parametrize(
    ("vote", "leader"),
    [(znodes.vote_to_bytes("java:3181"), "java:3181"), (b"\xff", UNREADABLE_VOTE)],
)
@in_virtual_time
async def test_a_java_leader_is_named_by_its_own_id(vote: bytes, leader: str) -> None:
    cluster = await Cluster.start()
    await cluster.store.create(f"{PATHS.election}/V_0000000003", vote)

    status = await gathered(cluster)

    assert (status.services.leader, status.services.leader_node) == (leader, None)
    assert codes(status) == []


@in_virtual_time
async def test_foreign_locks_are_listed_with_the_oldest_first() -> None:
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

    assert status.queue.locked_count == 3
    assert [(lock.ledger_id, lock.holder) for lock in status.queue.foreign_locks] == [
        (3, "java-host"),
        (1, None),
    ]
    unknown, ours, foreign = (why_text(row, now_ms=cluster.clock.wall_ms()) for row in rows)
    assert "locked by an unknown holder, which is not a bookmender node, for 0 s" in unknown
    assert "(locked by host-b for 10 s)" in ours
    assert "locked by java-host, which is not a bookmender node, for 10 s" in foreign


@in_virtual_time
async def test_all_waiting_ledgers_are_counted() -> None:
    cluster = await Cluster.start()
    count = 105
    async with cluster.node() as worker:
        for ledger_id in range(count):
            await cluster.mark(ledger_id=ledger_id)
            await worker.notes.put(note(ledger_id, Reason.NO_TARGET))

        status = await gathered(cluster)

    assert status.queue.waiting_count == count
    assert "REPAIRS_BLOCKED ERROR" in codes(status)
    assert f"waiting   {count} no-target" in to_text(status)


@in_virtual_time
async def test_the_pace_is_gathered() -> None:
    cluster = await Cluster.start()
    said = ClientActivity(
        active=frozenset({B1}), quiet=frozenset(BOOKIES) - {B1, B2}, copying_node_count=4
    )
    await cluster.store.create(PATHS.activity, said.to_json(), with_parents=True)

    copying = (await gathered(cluster, cluster.clock)).copying

    assert copying is not None
    assert (copying.speed, copying.active_bookies) == ("yielding", [B1])
    assert (copying.unknown_bookies, copying.copying_nodes) == ([B2], 4)


# --- Orders ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_bookie_in_maintenance_is_not_lost() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    here = visiting(cluster)
    await open_window(here, B1, duration_s=3_600, reason="disk", clock=SystemClock())
    await order_drains(here, [B2], may_fence=False, clock=SystemClock())
    await cluster.kill(B1)
    await cluster.store.create(PATHS.private.mark(5), with_parents=True)
    await let_java_lead(cluster)

    status = await gather_status(here)

    assert status.bookies.lost == ()
    assert codes(status) == [
        "NO_WORKERS INFO",
        "BOOKIES_IN_MAINTENANCE INFO",
        "BOOKIES_DRAINING INFO",
    ]
    assert [row["bookie_id"] for row in as_json(status)["ordered_bookies"]] == [B1, B2]
    assert as_json(status)["queue"]["private"] == 1
    lines = to_text(status).splitlines()
    assert "          1 in bookmender's private queue, to drain or repair by hand" in lines
    [orders] = [index for index, line in enumerate(lines) if line.startswith("orders ")]
    assert lines[orders].startswith(f"orders    {B1}: absent, in maintenance for another ")
    assert (
        lines[orders + 1] == f"          {B2}: writable, draining (its ledgers are not counted yet)"
    )


@in_virtual_time
async def test_maintenance_of_a_bookie_without_ledgers_affects_nothing() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        session_id = leader.store.session_id
        await leader.records.write(
            LedgerMapRecord(session_id=session_id, written_ms=0, is_complete=True, ledger_count=1)
        )
        await open_window(visiting(cluster), B3, duration_s=60, reason="", clock=cluster.clock)
        await cluster.kill(B3)
        await asyncio.sleep(SOON_S)
        status = await gathered(cluster, cluster.clock)
        concerns = await window_concerns(visiting(cluster), B3, clock=cluster.clock)

    assert fact(status, "BOOKIES_IN_MAINTENANCE").endswith(" No ledger names it.")
    named = as_json(status)["leader_state"]["absent_named_by"]
    assert (named["ledgers"], named["is_complete"]) == ({B3: 0}, True)
    assert concerns == [
        f"No ledger names {B3}, so it needs no window. If it never returns, run: bookmender bookie "
        f"decommission {B3}"
    ]


@in_virtual_time
async def test_two_windows_can_make_ledgers_unavailable() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    found: list[tuple[list[str], int]] = []
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        await leader.records.write(
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
            found.append((codes(status), exit_code(conditions(status))))

    maintenance = "BOOKIES_IN_MAINTENANCE INFO"
    assert found == [([maintenance], 0), (["LEDGERS_UNAVAILABLE ERROR", maintenance], 1)]


@in_virtual_time
async def test_ledgers_the_last_audit_could_not_read_are_read_again() -> None:
    cluster = await Cluster.start()
    for ledger_id in (1, 2, 3):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id)
    good, _ = await cluster.store.get(cluster.manager.path(1))
    for ledger_id in (1, 2, 3):
        await cluster.store.set(cluster.manager.path(ledger_id), b"", version=-1)
    async with leading(cluster) as leader:
        await leader.records.write(
            AuditRecord(
                finished_ms=1,
                ledger_count=3,
                mark_count=0,
                unreadable_count=3,
                unreadable=(1, 2, 3),
            )
        )
    assert "LEDGER_METADATA_UNREADABLE ERROR" in codes(await gathered(cluster))

    await cluster.store.set(cluster.manager.path(1), good, version=-1)
    await cluster.store.delete(cluster.manager.path(2))

    audit = (await gathered(cluster)).reports.audit
    assert audit is not None
    assert (audit.unreadable, audit.unreadable_count) == ((3,), 1)

    shut = shut_out(cluster.store, cluster.manager.path(3))
    assert (await gathered(cluster)).reports.audit == audit

    shut.clear()
    await cluster.store.delete(cluster.manager.path(3))
    await let_java_lead(cluster)
    assert codes(await gathered(cluster)) == []


# --- The private queue ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_damaged", [True, False])
@in_virtual_time
async def test_damage_is_shown_apart_from_ledgers_to_move(is_damaged: bool) -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.mark(B2, ledger_id=4)
    await cluster.mark(B1, ledger_id=5)
    for ledger_id in (5, 6):
        await cluster.store.create(PATHS.private.mark(ledger_id), with_parents=True)
    if is_damaged:
        found = Finding(check="fsck", bookies=(B1,), detail="entry 3", found_ms=1)
        await cluster.store.create(PATHS.finding(6), found.to_json(), with_parents=True)

    status = await gathered(cluster)

    queue = as_json(status)["queue"]
    assert (queue["total"], queue["marked"], queue["private"]) == (3, 2, 1), "5 counts once"
    assert queue["private_damaged"] == int(is_damaged)
    assert ("LEDGERS_DAMAGED WARN" in codes(status)) is is_damaged
    what = "damaged" if is_damaged else "to drain or repair by hand"
    assert f"1 in bookmender's private queue, {what}" in to_text(status)


# --- Waiting ledgers ------------------------------------------------------------------------------


@in_virtual_time
async def test_a_bookie_that_returns_overtakes_earlier_notes() -> None:
    cluster = await Cluster.start()
    for ledger_id, ensemble in enumerate([(B1, B2), (B1, B2, B3)]):
        await cluster.write_ledger(ensemble, ledger_id=ledger_id)
        await cluster.mark(B1, B2, ledger_id=ledger_id)
    await cluster.kill(B1, B2)

    async def all_wait() -> bool:
        return (await gathered(cluster, cluster.clock)).queue.waiting_count == 2

    async with cluster.node() as node, working(node):
        await until(cluster, all_wait)
    before = await gathered(cluster, cluster.clock)
    await cluster.revive(B1)
    after = await gathered(cluster, cluster.clock)
    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert not before.queue.overtaken
    assert after.queue.overtaken == {0, 1}
    assert "REPAIRS_BLOCKED ERROR" in codes(before)
    assert not any(code.startswith("REPAIRS_BLOCKED") for code in codes(after))


@in_virtual_time
async def test_an_unproven_end_is_shown_until_the_ledger_is_closed() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), ledger_id=1, state=LedgerState.IN_RECOVERY)
    await cluster.write_ledger((B1, B2), ledger_id=2)
    async with cluster.node() as worker:
        for ledger_id in (1, 2):
            await worker.note_unproven(ledger_id, Facts())

    assert (await gathered(cluster)).reports.unproven == (1,)


@in_virtual_time
async def test_marks_that_wait_for_other_maintenance_are_explained() -> None:
    """The ledgers no longer name the lost bookie, but still miss copies (rule S6)."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), ledger_id=0, write_quorum=3)
    await cluster.write_ledger((B1, B3), ledger_id=1)
    here, clock = visiting(cluster), cluster.clock
    for bookie in (B1, B2):
        await open_window(here, bookie, duration_s=3600, reason="", clock=clock)
        await cluster.kill(bookie)

    async with auditing(cluster) as leader, cluster.node("node-2") as worker, working(worker):
        session_id = leader.store.session_id
        await leader.records.write(
            LedgerMapRecord(session_id=session_id, written_ms=0, is_complete=True, ledger_count=9)
        )
        await asyncio.sleep(SOON_S)
        await end_window(here, B1)
        await asyncio.sleep(60)
        status = await gather_status(here, clock=clock)

    assert await cluster.marked() == [0]
    assert B1 not in (await cluster.manager.read(0)).metadata.bookies
    text = "named by no ledger, 1 marked, 1 of them waiting for other bookies in maintenance"
    assert f"          {B1} lost: {text}" in to_text(status).splitlines()
    assert "wait for maintenance windows to end" in fact(status, "LEDGERS_UNDER_REPLICATED")


@in_virtual_time
async def test_a_bookie_absent_since_an_outage_is_lost_later() -> None:
    """The bookie has time to register again after the outage of ZooKeeper."""
    cluster = await with_ledgers((B1, B2))
    outages = Outages(cluster.clock, return_s=20.0)
    async with auditing(cluster, outages=outages) as leader:
        cluster.tree.suspend(leader.store)
        await cluster.kill(B1)
        await asyncio.sleep(2)
        cluster.tree.resume(leader.store)
        await asyncio.sleep(8)
        held = await gathered(cluster, cluster.clock)
        await asyncio.sleep(12 + SOON_S)
        after = await gathered(cluster, cluster.clock)

    assert (held.bookies.absent, held.bookies.lost) == ((B1,), ())
    assert f"{B1} lost in 12 s (delayed, because" in fact(held, "BOOKIES_ABSENT")
    [pending] = as_json(held)["leader_state"]["pending_losses"]
    assert pending["is_excused"]
    assert (after.bookies.lost, after.queue.marked_count) == ((B1,), 1)

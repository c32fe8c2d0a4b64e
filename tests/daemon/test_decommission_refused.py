"""Decommissions that are refused at once, or given up when no ledger can move."""

import asyncio

import pytest

from daemon.messages import blocked_text
from daemon.operations import decommission, waiting
from daemon.operations.decommission import decommission_bookie
from daemon.operations.maintenance import open_window
from ledgers.errors import JournalError, RejectedError, UnavailableError
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Facts, Reason
from replication.settings import ReplicationSettings
from tests.auditor.auditing import auditing, leading
from tests.auditor.scenes import with_ledgers
from tests.daemon.decommissioning import decommissioned, has_cookie
from tests.daemon.visits import Heard, order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import open_ledger


async def turn_read_only(cluster: Cluster, bookie: BookieId) -> None:
    await cluster.unregister(bookie)
    await cluster.register(bookie, is_read_only=True)


# --- Refused at once ------------------------------------------------------------------------------


@in_virtual_time
async def test_a_running_bookie_is_refused() -> None:
    cluster = await with_ledgers((B1, B2))

    with pytest.raises(RejectedError, match="Stop it for good") as refused:
        await decommissioned(cluster)

    assert "b1:3181 is still registered" in str(refused.value)
    assert "until its session ends" in str(refused.value)

    assert await has_cookie(cluster)


@in_virtual_time
async def test_a_read_only_bookie_without_a_drain_is_refused() -> None:
    cluster = await with_ledgers((B2, B3))
    await turn_read_only(cluster, B1)

    with pytest.raises(RejectedError, match="drain"):
        await decommissioned(cluster)


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "not empty"])
@in_virtual_time
async def test_a_drained_read_only_bookie_goes_when_it_is_empty(
    is_empty: bool,
) -> None:
    cluster = await with_ledgers((B3, B2) if is_empty else (B1, B2))
    await turn_read_only(cluster, B1)
    await order_drain(cluster, B1)

    if is_empty:
        assert (await decommissioned(cluster)).cookie_deleted
    else:
        with pytest.raises(RejectedError, match="1 ledger names it"):
            await decommissioned(cluster)
    assert await has_cookie(cluster) is not is_empty


@in_virtual_time
async def test_a_bookie_in_maintenance_is_refused() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    await open_window(visiting(cluster), B1, duration_s=60, reason="", clock=cluster.clock)
    with pytest.raises(RejectedError, match="maintenance"):
        await decommissioned(cluster)

    await asyncio.sleep(61)

    assert (await decommissioned(cluster)).cookie_deleted


@in_virtual_time
async def test_a_decommission_is_refused_while_recovery_is_disabled() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    await cluster.store.create(PATHS.disable)

    with pytest.raises(RejectedError, match="bookmender enable"):
        await decommissioned(cluster)


@in_virtual_time
async def test_a_ledger_denied_meanwhile_keeps_the_cookie() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    admin_session, heard = visiting(cluster), Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        shut = asyncio.get_running_loop().call_later(
            0.01, shut_out, admin_session.store, cluster.manager.path(0)
        )
        with pytest.raises(
            UnavailableError, match=r"unreadable metadata may name b1:3181.*: 0\..*shuts us out"
        ) as refused:
            await decommission_bookie(
                admin_session, B1, notify=heard.tell, show=heard.show, clock=cluster.clock
            )
        shut.cancel()

    assert await has_cookie(cluster)
    assert "ledger restore" not in str(refused.value), "earlier metadata is denied, too"


@in_virtual_time
async def test_damaged_and_denied_metadata_have_different_advice() -> None:
    cluster = await with_ledgers((B2, B3), (B2, B3), (B2, B3))
    await cluster.kill(B1)
    await cluster.store.set(cluster.manager.path(0), b"rubbish", version=-1)
    admin_session, heard = visiting(cluster), Heard()
    shut_out(admin_session.store, cluster.manager.path(1), cluster.manager.path(2))

    with pytest.raises(UnavailableError) as refused:
        await decommission_bookie(
            admin_session, B1, notify=heard.tell, show=heard.show, clock=cluster.clock
        )

    message = str(refused.value)
    assert "its cookie is kept: 0, 1, 2. " in message
    denied = f"the ACL shuts us out (path={cluster.manager.path(1)})"
    assert f"ACLs deny access to ledger 1, 2: {denied}. " in message
    assert (
        "shows the error of 0, and bookmender ledger restore ID may repair the metadata. "
        in message
    )
    assert "With --ignore-unreadable the cookie is deleted anyway." in message


@in_virtual_time
async def test_what_keeps_nodes_from_the_work_is_told_once() -> None:
    cluster, heard = await with_ledgers((B1, B2)), Heard()
    await cluster.store.create(PATHS.recovery_delay, b"0", with_parents=True)
    await cluster.kill(B1)

    async with leading(cluster):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    (told,) = heard.told
    assert told.startswith("No bookmender worker is running")


# --- Ledgers that cannot move ---------------------------------------------------------------------


@in_virtual_time
async def test_it_ends_with_the_reasons_when_no_ledger_can_move() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B1, B4))
    heard = Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1, B2)
        with pytest.raises(RejectedError, match="the remaining 1 ledger on b1:3181 cannot move"):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

        (told,) = heard.told
        assert told.startswith("ledger 0 is blocked: no-copy: ")
        assert await cluster.marked() == [0], "the nodes continue to try"
        await cluster.assert_whole(1, 2)
    assert await has_cookie(cluster)


@pytest.mark.parametrize(
    ("reason", "is_marked", "ends"),
    [
        pytest.param(Reason.NO_TARGET, True, RejectedError, id="needs an operator"),
        pytest.param(Reason.NO_TARGET, False, TimeoutError, id="an outdated note"),
        pytest.param(Reason.OPEN_LEDGER_GRACE, True, TimeoutError, id="time resolves it"),
    ],
)
@in_virtual_time
async def test_it_gives_up_only_on_blocked_marked_ledgers(
    reason: Reason, is_marked: bool, ends: type[Exception]
) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(PATHS.recovery_delay, b"0")
    await cluster.kill(B1)
    if is_marked:
        await cluster.mark(B1, ledger_id=0)
    note = WaitingNote(ledger_id=0, blocked=Blocked(reason=reason), node="node-1", since_ms=1)
    await cluster.store.create(PATHS.waiting_note(0), note.to_json(), with_parents=True)

    with pytest.raises(ends):
        await asyncio.wait_for(decommissioned(cluster), 2 * decommission.AUDIT_AGAIN_S)


@pytest.mark.parametrize(
    ("is_locked", "ends"),
    [
        pytest.param(False, RejectedError, id="no node can lease it"),
        pytest.param(True, TimeoutError, id="a node with permission has it"),
    ],
)
@in_virtual_time
async def test_it_gives_up_on_a_ledger_whose_mark_is_denied(
    is_locked: bool, ends: type[Exception]
) -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B1, B4))
    await cluster.store.create(PATHS.recovery_delay, b"0")
    await cluster.kill(B1)
    for ledger_id in (0, 1, 2):
        await cluster.mark(B1, ledger_id=ledger_id)
    stuck_for_good = Blocked(reason=Reason.NO_TARGET, facts=Facts(replaced=B1))
    for ledger_id, why in ((1, stuck_for_good), (2, Blocked(reason=Reason.NO_ANSWER))):
        note = WaitingNote(ledger_id=ledger_id, blocked=why, node="n", since_ms=1)
        await cluster.store.create(PATHS.waiting_note(ledger_id), note.to_json(), with_parents=True)
    if is_locked:
        await cluster.store.create(PATHS.lock(0), is_ephemeral=True)
    admin_session, heard = visiting(cluster), Heard()
    shut_out(admin_session.store, PATHS.mark(0), PATHS.mark(2))

    with pytest.raises(ends):
        await asyncio.wait_for(
            decommission_bookie(
                admin_session, B1, notify=heard.tell, show=heard.show, clock=cluster.clock
            ),
            2 * decommission.AUDIT_AGAIN_S,
        )

    denied = "its mark cannot be read, so no node leases it: the ACL shuts us out"
    assert [text for text in heard.told if text.startswith("ledger ")] == (
        []
        if is_locked
        else [
            f"ledger 0 is blocked: {denied} (path={PATHS.mark(0)})",
            f"ledger 1 is blocked: {blocked_text(1, stuck_for_good)}. When this is resolved, try "
            "now: bookmender repair 1",
            f"ledger 2 is blocked: {denied} (path={PATHS.mark(2)})",
        ]
    )


@in_virtual_time
async def test_a_ledger_blocked_by_a_full_disk_moves_when_it_has_room() -> None:
    """The worker's own disk was full, so it could not keep the earlier metadata."""
    cluster, is_full = await with_ledgers((B1, B2)), True

    async def journal(ledger_id: int, before: bytes, after: bytes) -> None:
        if is_full:
            raise JournalError("/var/lib/x cannot be written to: free disk space there")

    settings = ReplicationSettings(retry_min_s=300, retry_max_s=300)
    node = cluster.node(journal=journal, settings=settings)
    async with auditing(cluster), node as opened, working(opened):
        await cluster.kill(B1)
        await asyncio.sleep(60)
        assert await cluster.marked() == [0]
        is_full = False

        await asyncio.wait_for(decommissioned(cluster), 600)

    assert not await has_cookie(cluster)


@in_virtual_time
async def test_it_gives_up_on_a_full_disk_after_a_second_try() -> None:
    async def journal(ledger_id: int, before: bytes, after: bytes) -> None:
        raise JournalError("/var/lib/x cannot be written to: free disk space there")

    cluster, heard = await with_ledgers((B1, B2)), Heard()
    async with auditing(cluster), cluster.node(journal=journal) as node, working(node):
        await cluster.kill(B1)
        await asyncio.sleep(60)

        with pytest.raises(RejectedError, match="cannot move"):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    (told,) = heard.told
    assert told.startswith("ledger 0 is blocked: journal-unwritable: /var/lib/x")


@in_virtual_time
async def test_a_late_retry_is_reported_with_the_command_to_try_now() -> None:
    cluster, heard = await with_ledgers((B1, B2)), Heard()
    await cluster.store.create(PATHS.recovery_delay, b"0")
    await cluster.kill(B1)
    await cluster.mark(B1, ledger_id=0)
    note = WaitingNote(
        ledger_id=0,
        blocked=Blocked(reason=Reason.ACCESS_DENIED, facts=Facts(errors=("the ACL shuts us out",))),
        node="node-1",
        since_ms=1,
        next_try_ms=cluster.clock.wall_ms() + 3_600_000,
    )
    await cluster.store.create(PATHS.waiting_note(0), note.to_json(), with_parents=True)

    with pytest.raises(RejectedError, match="cannot move"):
        await asyncio.wait_for(decommissioned(cluster, heard=heard), decommission.AUDIT_AGAIN_S)

    assert heard.told[-1] == (
        f"ledger 0 is blocked: {blocked_text(0, note.blocked)}. When this is resolved, try now: "
        "bookmender repair 0"
    )


@pytest.mark.parametrize(
    ("is_reformatted", "reason", "advice"),
    [
        (True, "end-unproven", f"bookmender ledger close {LEDGER} --accept-loss"),
        (False, "no-coverage", f"Start enough of: {B1}, {B2}"),
    ],
)
@in_virtual_time
async def test_it_gives_up_on_an_open_ledger_whose_end_cannot_be_found(
    is_reformatted: bool, reason: str, advice: str
) -> None:
    cluster, heard = await open_ledger(), Heard()
    await cluster.kill(B2)
    if is_reformatted:
        await cluster.wipe(B2)
        await cluster.revive(B2)
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        with pytest.raises(RejectedError, match="the remaining 1 ledger on b1:3181 cannot move"):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    assert heard.told[-1].startswith(f"ledger {LEDGER} is blocked: {reason}: ")
    assert advice in heard.told[-1]


@in_virtual_time
async def test_of_many_blocked_ledgers_only_some_are_named() -> None:
    cluster, heard = await with_ledgers(*[(B1, B2)] * (waiting.SHOWN_MAX + 3)), Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1, B2)
        with pytest.raises(RejectedError):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    assert len(heard.told) == waiting.SHOWN_MAX + 1
    assert heard.told[-1].startswith("and 3 more.")


@in_virtual_time
async def test_a_bookie_that_returns_in_time_unblocks_its_ledgers() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1, B2)
        await asyncio.sleep(30)
        assert await cluster.marked() == [0]
        waiting_for_it = asyncio.create_task(decommissioned(cluster))
        await asyncio.sleep(waiting.BLOCKED_S / 2)
        await cluster.revive(B2)

        await asyncio.wait_for(waiting_for_it, 600)

    assert not await has_cookie(cluster)

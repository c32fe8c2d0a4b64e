"""When a bookie may not go: refused at once, or given up on once nothing moves any more."""

import asyncio

import pytest

from daemon.cli import blocked, decommission
from daemon.cli.decommission import decommission_bookie, unknown_text
from daemon.cli.maintenance import open_window
from daemon.messages import blocked_text
from ledgers.errors import JournalError, RejectedError, UnavailableError
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Facts, Reason
from replication.settings import ReplicationSettings
from tests.auditor.auditing import auditing
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


# --- What must be done first ----------------------------------------------------------------------


@in_virtual_time
async def test_a_running_bookie_is_refused() -> None:
    cluster = await with_ledgers((B1, B2))

    with pytest.raises(RejectedError, match="stop it for good") as refused:
        await decommissioned(cluster)

    assert "it is still registered" in str(refused.value)
    assert "after a crash that ends with its session" in str(refused.value)

    assert await has_cookie(cluster)


def test_no_other_bookie_is_offered_to_be_decommissioned_in_place_of_an_unknown_one() -> None:
    text = unknown_text(BookieId("10.0.0.1:31811"))

    assert "knows no bookie 10.0.0.1:31811" in text
    assert "did you mean" not in text
    assert "bookmender bookie list" in text


@in_virtual_time
async def test_a_read_only_bookie_that_nobody_drains_is_refused_too() -> None:
    cluster = await with_ledgers((B2, B3))
    await turn_read_only(cluster, B1)

    with pytest.raises(RejectedError, match="drain"):
        await decommissioned(cluster)


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "not empty"])
@in_virtual_time
async def test_a_running_bookie_that_is_read_only_and_drained_goes_when_it_is_empty(
    is_empty: bool,
) -> None:
    cluster = await with_ledgers((B3, B2) if is_empty else (B1, B2))
    await turn_read_only(cluster, B1)
    await order_drain(cluster, B1)

    if is_empty:
        assert (await decommissioned(cluster)).had_cookie
    else:
        with pytest.raises(RejectedError, match="named by 1 ledger:"):
            await decommissioned(cluster)
    assert await has_cookie(cluster) is not is_empty


@in_virtual_time
async def test_a_bookie_under_maintenance_is_refused_as_long_as_the_window_stands() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.kill(B1)
    await open_window(visiting(cluster), B1, duration_s=60, reason="", clock=cluster.clock)
    with pytest.raises(RejectedError, match="maintenance"):
        await decommissioned(cluster)

    await asyncio.sleep(61)

    assert (await decommissioned(cluster)).had_cookie


@in_virtual_time
async def test_while_auto_recovery_is_disabled_nothing_would_move() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    await cluster.store.create(PATHS.disable)

    with pytest.raises(RejectedError, match="bookmender enable"):
        await decommissioned(cluster)


@in_virtual_time
async def test_a_ledger_that_acls_shut_away_meanwhile_keeps_its_cookie_and_is_told() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    admin_session, heard = visiting(cluster), Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        shut = asyncio.get_running_loop().call_later(
            0.01, shut_out, admin_session.store, cluster.manager.path(0)
        )
        with pytest.raises(
            UnavailableError, match=r"cannot be read may name it.*: 0\..*shuts us out"
        ) as refused:
            await decommission_bookie(
                admin_session, B1, notify=heard.tell, show=heard.show, clock=cluster.clock
            )
        shut.cancel()

    assert await has_cookie(cluster)
    assert "ledger restore" not in str(refused.value), "what stood there before is as shut away"


@in_virtual_time
async def test_damaged_metadata_and_such_that_acls_shut_away_are_told_apart() -> None:
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
    assert "its cookie stays: 0, 1, 2. " in message
    assert "ACLs shut away 1, 2: the ACL shuts us out. " in message
    assert "what is wrong with 0, bookmender ledger restore ID may mend it; " in message
    assert "--ignore-unreadable goes on without them" in message


# --- What cannot move -----------------------------------------------------------------------------


@in_virtual_time
async def test_when_nothing_that_is_left_can_move_it_says_why_and_ends() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B1, B4))
    heard = Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1, B2)
        with pytest.raises(RejectedError, match="named by 1 ledger still, and none can move"):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

        (told,) = heard.told
        assert told.startswith("ledger 0 waits for help: no-copy: ")
        assert await cluster.marked() == [0], "the nodes go on trying"
        await cluster.assert_whole(1, 2)
    assert await has_cookie(cluster)


@pytest.mark.parametrize(
    ("reason", "is_marked", "ends"),
    [
        pytest.param(Reason.NO_TARGET, True, RejectedError, id="only help will help"),
        pytest.param(Reason.NO_TARGET, False, TimeoutError, id="a note that was left behind"),
        pytest.param(Reason.OPEN_LEDGER_GRACE, True, TimeoutError, id="time will help"),
    ],
)
@in_virtual_time
async def test_it_gives_up_on_marked_ledgers_that_wait_for_help_and_on_no_others(
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
        pytest.param(False, RejectedError, id="nobody can take it"),
        pytest.param(True, TimeoutError, id="a node that may has it"),
    ],
)
@in_virtual_time
async def test_it_gives_up_on_a_ledger_whose_mark_acls_shut_away(
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

    assert [text for text in heard.told if text.startswith("ledger ")] == (
        []
        if is_locked
        else [
            "ledger 0 waits for help: its mark cannot be read, so that no node takes it: "
            "the ACL shuts us out",
            f"ledger 1 waits for help: {blocked_text(1, stuck_for_good)}; if that is over, bookmender repair 1 tries it now",
            "ledger 2 waits for help: its mark cannot be read, so that no node takes it: "
            "the ACL shuts us out",
        ]
    )


@in_virtual_time
async def test_a_ledger_that_waits_for_room_on_a_nodes_disk_moves_when_there_is_some() -> None:
    cluster, is_full = await with_ledgers((B1, B2)), True

    async def journal(ledger_id: int, before: bytes, after: bytes) -> None:
        if is_full:
            raise JournalError("/var/lib/x cannot be written to: make room there")

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
async def test_while_there_is_none_it_gives_up_once_that_was_tried_again() -> None:
    async def journal(ledger_id: int, before: bytes, after: bytes) -> None:
        raise JournalError("/var/lib/x cannot be written to: make room there")

    cluster, heard = await with_ledgers((B1, B2)), Heard()
    async with auditing(cluster), cluster.node(journal=journal) as node, working(node):
        await cluster.kill(B1)
        await asyncio.sleep(60)

        with pytest.raises(RejectedError, match="none can move"):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    (told,) = heard.told
    assert told.startswith("ledger 0 waits for help: journal-unwritable: /var/lib/x")


@in_virtual_time
async def test_of_what_is_tried_again_in_an_hour_it_is_said_how_to_try_it_now() -> None:
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

    with pytest.raises(RejectedError, match="none can move"):
        await asyncio.wait_for(decommissioned(cluster, heard=heard), decommission.AUDIT_AGAIN_S)

    assert heard.told[-1] == (
        f"ledger 0 waits for help: {blocked_text(0, note.blocked)}; if that is over, bookmender repair 0 tries it now"
    )


@in_virtual_time
async def test_it_gives_up_on_a_ledger_whose_end_cannot_be_proven() -> None:
    cluster, heard = await open_ledger(), Heard()
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        with pytest.raises(RejectedError, match="named by 1 ledger still, and none can move"):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    assert heard.told[-1].startswith(f"ledger {LEDGER} waits for help: end-unproven: ")
    assert f"bookmender ledger close {LEDGER} --accept-loss" in heard.told[-1]


@in_virtual_time
async def test_it_gives_up_on_an_open_ledger_that_has_lost_too_many_bookies() -> None:
    cluster, heard = await open_ledger(), Heard()
    await cluster.kill(B2)
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        with pytest.raises(RejectedError, match="named by 1 ledger still, and none can move"):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    assert heard.told[-1].startswith(f"ledger {LEDGER} waits for help: no-coverage: ")
    assert heard.told[-1].endswith(f"Start enough of: {B1}, {B2}")


@in_virtual_time
async def test_where_only_java_repairs_it_is_said_that_nobody_says_why_nothing_moves() -> None:
    cluster, heard = await with_ledgers((B1, B2), (B1, B3)), Heard()
    await cluster.store.create(PATHS.recovery_delay, b"0", with_parents=True)
    await cluster.kill(B1)
    for ledger_id in (0, 1):
        await cluster.mark(B1, ledger_id=ledger_id)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(decommissioned(cluster, heard=heard), 2 * decommission.AUDIT_AGAIN_S)

    [said] = [text for text in heard.told if "bookmender plan" in text]
    assert said.startswith("none of the 2 ledgers left has moved for 2 min, and no worker of")


@in_virtual_time
async def test_a_worker_of_ours_will_say_why() -> None:
    cluster, heard = await with_ledgers((B1, B2)), Heard()
    await cluster.store.create(PATHS.recovery_delay, b"0", with_parents=True)
    await cluster.kill(B1)

    async with cluster.node():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    assert not [text for text in heard.told if "bookmender plan" in text]


@in_virtual_time
async def test_of_very_many_that_cannot_move_some_are_told_and_the_rest_counted() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * (blocked.SHOWN_MAX + 3))
    heard = Heard()
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1, B2)
        with pytest.raises(RejectedError):
            await asyncio.wait_for(decommissioned(cluster, heard=heard), 600)

    assert len(heard.told) == blocked.SHOWN_MAX + 1
    assert heard.told[-1] == "and 3 more; bookmender queue list shows them all"


@in_virtual_time
async def test_what_waits_for_a_bookie_moves_when_one_comes_in_time() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1, B2)
        await asyncio.sleep(30)
        assert await cluster.marked() == [0]
        waiting = asyncio.create_task(decommissioned(cluster))
        await asyncio.sleep(blocked.BLOCKED_S / 2)
        await cluster.revive(B2)

        await asyncio.wait_for(waiting, 600)

    assert not await has_cookie(cluster)

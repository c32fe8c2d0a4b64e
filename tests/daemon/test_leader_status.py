"""What ``bookmender status`` tells of a leader of ours: its index, who is away, its checks, why
marks stand."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from auditor.absence import NAMING_MAX_MS, StoredAbsences
from auditor.checks.records import KINDS, CheckRecord, CheckRun
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.settings import AuditorSettings
from daemon.cli.check import CheckRow
from daemon.status.command import render
from daemon.status.leader import (
    LeaderState,
    PendingLoss,
    gather_leader,
    index_text,
    losses_due_ms,
)
from daemon.status.state import Status
from ledgers.model import BookieId
from replication import znodes
from replication.marks import read_marks
from replication.nodes import Role
from replication.orders import HoldOrder
from tests.auditor.auditing import auditing
from tests.auditor.scenes import DELAY, SOON_S, delayed, with_ledgers
from tests.daemon.status_values import WHOLE, node
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

CHECK = KINDS[0].name
BUILT = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=1_200)
BUILDING = replace(BUILT, is_complete=False, read_count=300, expected_count=1_000)
RUN = CheckRun(started_ms=1, ledger_count=10, ledgers_left=30, active_ms=5_000)


async def gathered(cluster: Cluster, session_id: int | None, *away: BookieId) -> LeaderState:
    marked = await read_marks(cluster.store, PATHS, await cluster.marked())
    return await gather_leader(
        visiting(cluster),
        leader_session_id=session_id,
        away=away,
        marked=marked,
        clock=cluster.clock,
    )


@in_virtual_time
async def test_a_bookie_that_is_away_has_time_left_and_a_lost_one_has_a_cause() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster, settings=delayed(100)) as leader:
        await cluster.kill(B1)
        await asyncio.sleep(60)
        before = await gathered(cluster, leader.store.session_id, B1)
        await asyncio.sleep(60)
        after = await gathered(cluster, leader.store.session_id, B1)

    [loss] = before.pending
    assert loss.bookie == B1
    assert loss.due_ms - loss.since_ms == 100_000
    assert (before.recovery_delay_s, before.by_cause) == (100, ())
    assert (after.pending, after.by_cause) == ((), (("lost", 1),))
    assert before.uncounted == after.uncounted == frozenset()


@in_virtual_time
async def test_without_a_leader_of_ours_nobody_counts_a_delay_that_there_is() -> None:
    cluster = await with_ledgers((B1, B2))
    assert (await gathered(cluster, None, B1)).uncounted == frozenset(), "there is none"

    delay = znodes.recovery_delay_to_bytes(100)
    await cluster.store.create(DELAY, delay, with_parents=True)

    assert (await gathered(cluster, None, B1)).uncounted == {B1}
    assert (await gathered(cluster, None, B1)).loss_due_ms == {B1: None}


@in_virtual_time
async def test_a_recovery_delay_that_is_none_is_told_in_one_place_and_not_logged() -> None:
    """Java's shell writes whatever it is given."""
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(DELAY, b"-5", with_parents=True)

    with capture_logs() as logs:
        state = await gathered(cluster, None)
        behind_java = await losses_due_ms(visiting(cluster), [B1], clock=cluster.clock)

    assert logs == []
    assert behind_java == {}
    why = "lostBookieRecoveryDelay is no number of seconds (data=b'-5')"
    assert state.to_json()["recovery_delay_error"] == why
    [line] = [
        line
        for line in render(replace(WHOLE, auditing=state), now_ms=0).splitlines()
        if "lostBookieRecoveryDelay" in line
    ]
    assert line == (
        f"delay     {why}: until one is written there, a leader of ours counts 0 s, by its settings"
    )


@in_virtual_time
async def test_marks_of_another_auditor_have_no_cause_that_we_know() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.mark(B1, ledger_id=0)

    assert (await gathered(cluster, None)).by_cause == (("unknown", 1),)


@in_virtual_time
async def test_what_a_leader_before_left_is_not_told_as_this_ones() -> None:
    cluster = await with_ledgers((B1, B2))
    absences = StoredAbsences(since_ms={B1: cluster.clock.wall_ms()}, seen_ms=0)
    async with auditing(cluster, settings=AuditorSettings()) as leader:
        await leader.records.write_absences(absences)
        await leader.records.write_index(BUILT)
        await asyncio.sleep(SOON_S)
        assert (await gathered(cluster, BUILT.session_id)).index == BUILT

        assert (await gathered(cluster, BUILT.session_id + 1)).index is None
    assert await gathered(cluster, None, B1) == LeaderState(), "Java leads"


@in_virtual_time
async def test_who_went_before_the_leader_told_of_it_may_be_back_after_an_outage() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        state = await gathered(cluster, BUILT.session_id, B1, B2)

    assert state.loss_due_ms == {B2: None}


@in_virtual_time
async def test_a_check_that_is_under_way_is_told_and_one_that_is_over_is_not() -> None:
    cluster = await Cluster.start()
    path = PATHS.check(CHECK)
    await cluster.store.create(path, CheckRecord(running=RUN).to_json(), with_parents=True)
    [row] = (await gathered(cluster, 5)).checks
    assert (row.name, row.running) == (CHECK, RUN)

    await cluster.store.set(path, CheckRecord(last=RUN, last_ms=2).to_json(), version=-1)

    assert (await gathered(cluster, 5)).checks == ()


@in_virtual_time
async def test_what_a_later_release_wrote_is_as_good_as_nothing() -> None:
    cluster = await Cluster.start()
    for path in (PATHS.ledger_map, PATHS.check(CHECK), PATHS.absences):
        await cluster.store.create(path, b'{"version": 9}', with_parents=True)

    assert await gathered(cluster, 5, B1) == LeaderState()


def test_people_read_of_losses_to_come_of_causes_and_of_a_check() -> None:
    state = LeaderState(
        index=BUILDING,
        pending=(PendingLoss(bookie=B2, since_ms=0, due_ms=90_000),),
        by_cause=(("all-ledgers", 1), ("lost", 2)),
        checks=(CheckRow(name=CHECK, about="", interval_s=1.0, running=RUN),),
    )
    status = replace(
        WHOLE,
        leader=None,
        lost=(B1,),
        away=(B2,),
        marked_count=3,
        by_missing=((1, 3),),
        auditing=state,
        writable=(B3,),
        under_repair=1,
    )

    assert render(status, now_ms=30_000).splitlines() == [
        "verdict   repairing (no auditor is running, ours or Java's: what is lost is not noticed; "
        "start a node with bookmender daemon)",
        "leader    none: no auditor is running",
        "index     being built, 300 of about 1,000 ledgers read: losses are marked as far as it knows",
        "nodes     none: start one with bookmender daemon",
        "bookies   1 writable, 0 read-only, 1 lost, 1 away",
        f"          lost: {B1}, no ledger is marked for it: no auditor is running",
        f"          away: {B2} lost in 1 min",
        "queue     3 ledgers marked, 1 locked for repair, 0 waiting",
        "          3 missing 1 bookie",
        "          because: 1 all-ledgers, 2 lost",
        f"checking  {CHECK}: 10 ledgers looked at, about 30 left, 15 s to go at 2 a second",
    ]


@in_virtual_time
async def test_of_who_is_lost_it_is_told_how_many_ledgers_name_it() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(100)) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        session_id = leader.store.session_id
        building = await gathered(cluster, session_id, B1, B2)
        await leader.records.write_index(replace(BUILT, session_id=session_id))
        built = await gathered(cluster, session_id, B1)

    assert (building.naming, building.are_all_named) == ({B1: 2}, False)
    assert (built.naming, built.are_all_named) == ({B1: 2}, True)
    assert (await gathered(cluster, None, B1)).naming == {}, "Java leads"

    await asyncio.sleep(2 * NAMING_MAX_MS / 1000)
    assert (await gathered(cluster, session_id, B1)).naming == {}, "an earlier leader's"


NONE, ONE = "none of them marked for it", "1 of them marked for it"


@pytest.mark.parametrize(
    ("naming", "are_all_named", "marked_count", "text"),
    [
        pytest.param({}, True, 0, "b", id="nobody told"),
        pytest.param({"b": 258}, True, 0, f"b, named by 258 ledgers, {NONE}", id="due"),
        pytest.param({"b": 2}, True, 1, f"b, named by 2 ledgers, {ONE}", id="at work"),
        pytest.param(
            {"b": 46},
            True,
            1_136,
            "b, named by 46 ledgers, 1,136 marked for it (counted some seconds apart)",
            id="counted at two moments",
        ),
        pytest.param({"b": 1}, False, 0, f"b, named by at least 1 ledger, {NONE}", id="so far"),
        pytest.param(
            {"b": 0},
            True,
            0,
            "b, named by no ledger any more: start it, or bookmender bookie decommission it",
            id="all is copied",
        ),
        pytest.param(
            {"b": 0},
            False,
            0,
            "b, whether any ledger names it is not known yet: the leader counts",
            id="a new leader has not counted since its index is complete",
        ),
    ],
)
def test_what_is_left_to_do_for_a_lost_bookie(
    naming: dict[BookieId, int], are_all_named: bool, marked_count: int, text: str
) -> None:
    state = LeaderState(index=BUILT, naming=naming, are_all_named=are_all_named)
    status = replace(led(state), by_bookie=(("b", marked_count),))

    assert f"          lost: {text}" in render(status, now_ms=0).splitlines()


def test_a_count_that_may_be_older_than_the_repairs_is_shown_with_its_age() -> None:
    state = LeaderState(
        index=BUILT, naming={BookieId("b"): 50}, are_all_named=True, counted_age_s=4
    )
    status = replace(led(state), by_bookie=(("b", 0),))

    lines = render(status, now_ms=0).splitlines()

    assert "          lost: b, named by 50 ledgers 4 s ago, none marked for it now" in lines


@in_virtual_time
async def test_the_age_of_the_leaders_count_is_gathered() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(1_000)) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        session_id = leader.store.session_id
        first = (await gathered(cluster, session_id, B1)).counted_age_s
        await asyncio.sleep(3)

        later = (await gathered(cluster, session_id, B1)).counted_age_s

    assert 2.9 < later - first < 3.1


def test_while_the_index_is_built_none_that_was_read_may_name_a_lost_bookie() -> None:
    found = led(LeaderState(index=BUILDING, naming={BookieId("b"): 0}))

    why = "the leader has not read every ledger's metadata yet"
    text = f"          lost: b, named by no ledger that was read so far: {why}"
    assert text in render(found, now_ms=0).splitlines()


def led(state: LeaderState) -> Status:
    """By a node of ours, while a bookie is lost."""
    leader = node("host-a", 11, Role.AUDITOR)
    lost = (BookieId("b"),)
    return replace(WHOLE, leader="host-a", leader_node=leader, lost=lost, auditing=state)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({"hold": HoldOrder(since_ms=0)}, f"{NONE}: a safety hold stands", id="hold"),
        pytest.param({"is_disabled": True}, f"{NONE}: auto-recovery is disabled", id="disabled"),
        pytest.param(
            {"auditing": LeaderState(index=BUILDING, naming={BookieId("b"): 2})},
            f"{NONE}: the leader has not read every ledger's metadata yet",
            id="indexing",
        ),
        pytest.param({"is_disabled": True, "by_bookie": (("b", 1),)}, ONE, id="marked before"),
        pytest.param(
            {"leader": None, "leader_node": None, "auditing": LeaderState()},
            "no ledger is marked for it: no auditor is running",
            id="nobody leads",
        ),
        pytest.param(
            {"leader": "java", "leader_node": None, "auditing": LeaderState()}, "", id="Java's"
        ),
    ],
)
def test_why_nothing_is_marked_for_a_lost_bookie_is_said(
    changes: dict[str, object], text: str
) -> None:
    state = LeaderState(index=BUILT, naming={BookieId("b"): 2}, are_all_named=True)
    status = replace(led(state), **changes)  # type: ignore[arg-type]

    [line] = [line for line in render(status, now_ms=0).splitlines() if "lost: b" in line]

    assert line.endswith(f", {text}" if text else "lost: b")


def test_what_cannot_be_read_may_name_a_lost_bookie() -> None:
    state = LeaderState(
        naming={B1: 0}, are_all_named=True, index=replace(BUILT, unreadable_count=1)
    )

    text = render(replace(WHOLE, lost=(B1,), auditing=state), now_ms=0)

    assert f"lost: {B1}, named by no ledger that can be read\n" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({}, "the leader has not told", id="Java's counts by itself"),
        pytest.param({"leader": None}, "no auditor is running", id="nobody counts"),
    ],
)
def test_of_who_is_away_for_an_unknown_time_nobody_says_that_it_is_lost(
    changes: dict[str, object], text: str
) -> None:
    state = LeaderState(uncounted=frozenset({B1}), recovery_delay_s=600)
    status = replace(WHOLE, away=(B1,), by_bookie=((B1, 2),), auditing=state, **changes)  # type: ignore[arg-type]

    lines = render(status, now_ms=0).splitlines()

    assert lines[0].startswith("verdict   bookies-away (1 bookie away: lost or not, nobody tells")
    assert lines[3].endswith(" 0 lost, 1 away")
    assert lines[4] == (
        f"          away: {B1}, for how long is not known: {text}; the recovery delay is 10 min; "
        "2 ledgers marked for it"
    )


def test_while_a_bookie_has_time_left_the_verdict_says_how_much() -> None:
    pending = tuple(PendingLoss(bookie=b, since_ms=0, due_ms=60_000) for b in (B1, B2))
    status = replace(WHOLE, away=(B1, B2), auditing=LeaderState(pending=pending))

    first = render(status, now_ms=0).splitlines()[0]

    assert first == "verdict   bookies-away (2 bookies away, the next one lost in 1 min)"


def test_hundreds_of_lost_bookies_leave_room_on_the_screen() -> None:
    many = tuple(BookieId(f"b{number}:3181") for number in range(300))

    lines = render(replace(WHOLE, lost=many), now_ms=0).splitlines()

    assert len(lines) < 30
    assert "          and 280 more" in lines


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (BUILT, "complete, 1,200 ledgers when it was built"),
        (
            replace(BUILDING, expected_count=0),
            "being built, 300 ledgers read: losses are marked as far as it knows",
        ),
    ],
    ids=["complete", "nobody knows how many there are"],
)
def test_the_index_is_complete_or_so_far(note: LedgerMapRecord, text: str) -> None:
    assert index_text(note) == text


@in_virtual_time
async def test_what_was_counted_for_others_than_those_that_are_away_now_says_nothing() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    async with auditing(cluster, settings=delayed(100)) as leader:
        session_id = leader.store.session_id
        await leader.records.write_index(replace(BUILT, session_id=session_id))
        await cluster.kill(B1, B2)
        await asyncio.sleep(SOON_S)

        assert (await gathered(cluster, session_id, B1, B2)).unavailable_count == 1
        assert (await gathered(cluster, session_id, B1)).unavailable is None
        assert (await gathered(cluster, session_id, B1, B2, B3)).unavailable is None
        assert (await gathered(cluster, None, B1, B2)).unavailable is None, "Java leads"

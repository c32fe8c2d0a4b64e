"""``bookmender status`` as text and as JSON. Pure."""

from dataclasses import replace
from typing import Any

import pytest

from auditor.checks.records import CheckRun
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import AuditRecord
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.checks import CheckRow
from daemon.status.leader import LeaderState, PendingLoss
from daemon.status.records import help_text
from daemon.status.report import LEDGERS_LISTED_MAX, to_json, to_text
from ledgers.model import BookieId
from replication.marks import LockedLedger
from replication.nodes import Role
from replication.orders import MaintenanceWindow
from replication.reasons import Reason
from tests.daemon.status_values import HEALTHY, changed, node, note
from tests.replication.ledger_values import B1, B2, B3

B = BookieId("b")
MAP = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=1_200)
LOADING = replace(MAP, is_complete=False, read_count=300, expected_count=1_000)
RUN = CheckRun(started_ms=1, ledger_count=10, ledgers_left=30, active_ms=5_000)
WINDOW = BookieRow(
    bookie=B1,
    state=BookieState.ABSENT,
    has_cookie=True,
    maintenance=MaintenanceWindow(since_ms=0, until_ms=3_660_000, reason="disk"),
)


def lines_of(**changes: Any) -> list[str]:
    return to_text(changed(HEALTHY, **changes)).splitlines()


def test_a_healthy_cluster_needs_few_lines() -> None:
    assert lines_of() == [
        "OK",
        "",
        "leader    java:3181 (Java's AutoRecovery)",
        "nodes     none",
        "bookies   3 writable, 0 read-only, 0 lost",
        "queue     0 ledgers queued, 0 locked for repair, 0 waiting",
    ]


def test_rule_s8_without_bookies_nothing_is_concluded() -> None:
    assert lines_of(writable=(), is_disabled=True, leader=None) == [
        "UNKNOWN  NO_BOOKIES",
        "NO_BOOKIES             UNKNOWN  No bookie is registered in ZooKeeper, nor an auditor or "
        "worker. Nothing can be concluded from that.",
        "    Check ZooKeeper, the network and the configured address, then the bookies.",
        "AUTORECOVERY_DISABLED  INFO     Auto-recovery is disabled, Java's too. No ledger is "
        "marked or repaired.",
        "    Switch it on again: bookmender enable",
        "",
        "leader    none",
        "nodes     none",
        "bookies   0 writable, 0 read-only",
        "queue     0 ledgers queued, 0 locked for repair, 0 waiting",
    ]


def test_a_cluster_in_trouble_is_described_in_full() -> None:
    told = lines_of(
        taken_ms=62_500,
        leader="host-a",
        leader_node=node("host-a", 11, Role.AUDITOR),
        nodes=(
            node("host-a", 11, Role.AUDITOR),
            node("host-a", 11, Role.WORKER),
            node("host-b", 22, Role.WORKER),
        ),
        leader_state=LeaderState(
            ledger_map=MAP,
            pending_losses=(PendingLoss(bookie=B3, since_ms=0, due_ms=122_500),),
            by_cause=(("all-ledgers", 1), ("lost", 104)),
            checks=(CheckRow(name="replicas", about="", interval_s=1.0, running=RUN),),
        ),
        writable=(B1,),
        lost=(B2,),
        absent=(B3,),
        marked_count=105,
        by_missing=((2, 1), (1, 104)),
        by_bookie=((B2, 105),),
        locked_count=4,
        waiting=(replace(note(7, Reason.NO_COPY, "no good copy of entry 4"), next_try_ms=70_100),),
        waiting_count=3,
        foreign_locks=(
            LockedLedger(ledger_id=8, holder="java-1", since_ms=2_500, session_id=5),
            LockedLedger(ledger_id=9, holder=None, since_ms=3_500, session_id=6),
        ),
        audit=AuditRecord(finished_ms=60_000, ledger_count=9, mark_count=2),
    )

    assert told == [
        "WARN  BOOKIES_LOST, BOOKIES_ABSENT, REPAIRS_BLOCKED, LEDGERS_UNDER_REPLICATED, "
        "AVAILABILITY_UNKNOWN",
        f"BOOKIES_LOST              WARN     1 bookie is lost: {B2}.",
        "    Start bookies whose data is intact. Ledgers of the others are copied to other "
        "bookies.",
        f"BOOKIES_ABSENT            WARN     1 bookie is absent: {B3}. Next: {B3} lost in 1 min.",
        "    Start the bookie. Announce planned work with: bookmender bookie maintenance ID --for "
        "2h",
        "REPAIRS_BLOCKED           WARN     Blocked: 1 of 105 queued ledgers (1 no-copy).",
        "    Ledger 7: no bookie that answers has a good copy of some entries, and no absent "
        "bookie should have one. Others: bookmender queue list",
        "LEDGERS_UNDER_REPLICATED  WARN     105 ledgers are under-replicated.",
        "    Act on REPAIRS_BLOCKED. Workers repair the other ledgers meanwhile.",
        "AVAILABILITY_UNKNOWN      UNKNOWN  2 bookies that are not registered may have the only "
        "copies of some entries: the leader has not counted yet.",
        "    Wait some seconds.",
        "",
        "leader    host-a (pid 11)",
        "map       complete, 1,200 ledgers when it was built",
        "nodes     host-a (pid 11: auditor and worker), host-b (pid 22: worker)",
        "bookies   1 writable, 0 read-only, 1 lost, 1 absent",
        f"          {B2} lost: 105 marked",
        f"          {B3} absent: lost in 1 min",
        "queue     105 ledgers queued, 4 locked for repair, 3 waiting",
        "          1 missing 2 bookies",
        "          104 missing 1 bookie",
        "          causes: 1 all-ledgers, 104 lost",
        "          pace: yielding at all bookies: the leader has not published client activity",
        "          2 locks not held by bookmender, the longest for 60 s: ledger 8, by java-1",
        "waiting   1 no-copy, for up to 1 min 1 s, next try in 8 s: ledger 7",
        "              no bookie that answers has a good copy of some entries, and no absent "
        "bookie should have one",
        "audit     2 s ago, 9 ledgers",
        "checks    replicas: 10 ledgers checked, about 30 left, 15 s to go at 2 per second",
    ]


def test_text_from_znodes_cannot_control_the_terminal() -> None:
    spoiled = "x\x1b[2J\ny"
    status = changed(
        HEALTHY,
        leader=spoiled,
        nodes=(node(spoiled, 11, Role.WORKER),),
        marked_count=1,
        waiting=(note(7, Reason.NO_COPY, spoiled),),
        waiting_count=1,
        foreign_locks=(LockedLedger(ledger_id=8, holder=spoiled, since_ms=0, session_id=5),),
    )

    text = to_text(status)

    assert all(line.isprintable() for line in text.splitlines())
    assert text.count(r"x\x1b[2J\ny") == 3
    assert help_text(status.queue.waiting[0]).isprintable()


def test_a_clock_behind_the_nodes_gives_no_negative_age() -> None:
    assert any("for up to 0 s" in line for line in lines_of(waiting=(note(7, Reason.NO_COPY),)))


def test_a_service_with_an_old_unexpired_session_is_shown_once() -> None:
    auditor, worker = (node("host-a", 11, role) for role in (Role.AUDITOR, Role.WORKER))

    told = lines_of(nodes=(auditor, auditor, worker, worker))

    assert "nodes     host-a (pid 11: auditor and worker)" in told


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (MAP, "map       complete, 1,200 ledgers when it was built"),
        (LOADING, "map       loading, 300 of about 1,000 ledgers read"),
        (replace(LOADING, expected_count=0), "map       loading, 300 ledgers read"),
    ],
    ids=["complete", "loading", "unknown total"],
)
def test_the_ledger_map_is_complete_or_loading(note: LedgerMapRecord, text: str) -> None:
    assert text in lines_of(leader_state=LeaderState(ledger_map=note))


# --- Bookies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("naming", "changes", "marked", "in_maintenance", "text"),
    [
        pytest.param({}, {}, 0, 0, "0 marked", id="not counted"),
        pytest.param({B: 258}, {}, 0, 0, "named by 258 ledgers, 0 marked", id="due"),
        pytest.param({B: 2}, {}, 1, 0, "named by 2 ledgers, 1 marked", id="being repaired"),
        pytest.param(
            {B: 50},
            {"counted_age_s": 4},
            0,
            0,
            "named by 50 ledgers 4 s ago, 0 marked",
            id="counted before the repairs",
        ),
        pytest.param(
            {B: 1},
            {"is_count_complete": False},
            0,
            0,
            "named by at least 1 ledger, 0 marked",
            id="so far",
        ),
        pytest.param({B: 0}, {}, 0, 0, "named by no ledger", id="all copied"),
        pytest.param(
            {B: 0},
            {"ledger_map": replace(MAP, unreadable_count=1)},
            0,
            0,
            "named by 0 ledgers and perhaps 1 unreadable one, 0 marked",
            id="unreadable ledgers may name it",
        ),
        pytest.param(
            {B: 4},
            {},
            5,
            3,
            "named by 4 ledgers, 5 marked, 3 of them waiting for other bookies in maintenance",
            id="others are in maintenance",
        ),
    ],
)
def test_a_lost_bookie_is_shown_with_the_work_left(
    naming: dict[BookieId, int],
    changes: dict[str, Any],
    marked: int,
    in_maintenance: int,
    text: str,
) -> None:
    state = replace(LeaderState(ledger_map=MAP, named_by=naming, is_count_complete=True), **changes)

    told = lines_of(
        lost=(B,),
        leader_state=state,
        by_bookie=((B, marked),),
        by_bookie_in_maintenance=((B, in_maintenance),) if in_maintenance else (),
    )

    assert f"          {B} lost: {text}" in told


def test_an_untracked_absent_bookie_has_the_recovery_delay() -> None:
    state = LeaderState(untracked=frozenset({B1}), recovery_delay_s=600)

    told = lines_of(absent=(B1,), by_bookie=((B1, 2),), leader_state=state)

    text = f"          {B1} absent for an unknown time (recovery delay 10 min), 2 marked"
    assert text in told


def test_a_reformatted_bookie_is_listed() -> None:
    told = lines_of(reformatted=(B1,))

    assert "bookies   3 writable, 0 read-only, 0 lost, 1 reformatted" in told
    assert f"          {B1} reformatted" in told


def test_hundreds_of_lost_bookies_leave_room_on_the_screen() -> None:
    told = lines_of(lost=tuple(BookieId(f"b{number}:3181") for number in range(300)))

    assert len(told) < 35
    assert "          and 280 more" in told


def test_a_maintenance_window_is_shown_with_its_end() -> None:
    status = changed(
        HEALTHY, writable=(B2, B3), ordered=(WINDOW,), taken_ms=60_000, leader="java:3181"
    )

    lines = to_text(status).splitlines()

    assert lines[0] == "OK"
    assert "bookies   2 writable, 0 read-only, 0 lost, 1 absent for maintenance" in lines
    assert f"orders    {B1}: absent, in maintenance for another 1 h (disk)" in lines
    told = to_json(status)["bookies"]["in_maintenance"]
    assert told == {"absent": [B1], "until_ms": 3_660_000}
    assert to_json(HEALTHY)["bookies"]["in_maintenance"] == {"absent": [], "until_ms": None}


# --- Waiting ledgers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("next_try_ms", "text"),
    [
        pytest.param(180_000, "next try in 3 min", id="later"),
        pytest.param(500, "next try in 1 s", id="rounded up"),
        pytest.param(0, "next try due", id="due"),
    ],
)
def test_a_reason_is_shown_with_the_next_try(next_try_ms: int, text: str) -> None:
    waiting = replace(note(7, Reason.NO_COPY), next_try_ms=next_try_ms)

    told = lines_of(marked_count=1, waiting=(waiting,), waiting_count=1)

    assert f"waiting   1 no-copy, for up to 0 s, {text}: ledger 7" in told


@pytest.mark.parametrize(
    ("reason", "until_ms", "text"),
    [
        pytest.param(
            Reason.OPEN_LEDGER_GRACE, (20_000, 40_000), "grace over in 20 s", id="the first"
        ),
        pytest.param(Reason.OPEN_LEDGER_GRACE, (20_000, 0), "next try due", id="one has no grace"),
        pytest.param(Reason.OPEN_LEDGER_GRACE, (-1, -1), "grace over", id="over"),
        pytest.param(
            Reason.NO_COVERAGE,
            (20_000, 20_000),
            "next try in 20 s, when its grace is over",
            id="a failed recovery waits for the grace too",
        ),
        pytest.param(Reason.NO_COVERAGE, (-1, -1), "next try due", id="and is due"),
    ],
)
def test_the_end_of_a_grace_is_shown(reason: Reason, until_ms: tuple[int, int], text: str) -> None:
    waiting = tuple(
        replace(note(ledger_id, reason), grace_until_ms=each)
        for ledger_id, each in enumerate(until_ms)
    )

    told = lines_of(marked_count=2, waiting=waiting, waiting_count=2)

    assert f"waiting   2 {reason.value}, for up to 0 s, {text}: ledger 0, 1" in told


def test_the_gravest_reason_comes_first() -> None:
    reasons = (Reason.OPEN_LEDGER_GRACE, Reason.NO_TARGET, Reason.NO_COPY)
    waiting = tuple(note(place, reason) for place, reason in enumerate(reasons))

    told = lines_of(marked_count=3, waiting=waiting, waiting_count=3)

    assert [line[10:].split(",")[0] for line in told if "for up" in line] == [
        "1 no-copy",
        "1 no-target",
        "1 open-ledger-grace",
    ]


def test_an_overtaken_note_only_says_that_its_ledger_is_due() -> None:
    waiting = tuple(note(ledger_id, Reason.NO_COPY) for ledger_id in (5, 6, 7))
    status = changed(
        HEALTHY, marked_count=3, waiting=waiting, waiting_count=3, overtaken=frozenset({5, 7})
    )

    assert to_text(status).splitlines()[-3:] == [
        "waiting   2 due, because a bookie registered or an order changed since the last try: "
        "ledger 5, 7",
        "          1 no-copy, for up to 0 s, next try due: ledger 6",
        "              no bookie that answers has a good copy of some entries, and no absent "
        "bookie should have one",
    ]
    assert to_json(status)["waiting"]["overtaken"] == [5, 7]


# --- JSON -----------------------------------------------------------------------------------------


def test_json_has_health_and_conditions_first() -> None:
    told = to_json(changed(HEALTHY, lost=(B1,)))

    assert list(told)[:4] == ["health", "exit_code", "conditions", "taken_ms"]
    assert (told["health"], told["exit_code"]) == ("WARN", 1)
    assert [each["code"] for each in told["conditions"]] == ["BOOKIES_LOST"]


def test_json_lists_the_first_of_very_many_ledgers() -> None:
    count = LEDGERS_LISTED_MAX + 5
    waiting = tuple(note(ledger_id, Reason.NO_TARGET) for ledger_id in range(count))
    told = to_json(
        changed(HEALTHY, waiting=waiting, waiting_count=count, unproven=tuple(range(count)))
    )

    assert told["waiting"]["count"] == told["unproven_ends"]["count"] == count
    assert len(told["waiting"]["ledgers"]) == LEDGERS_LISTED_MAX
    assert len(told["unproven_ends"]["ledgers"]) == LEDGERS_LISTED_MAX

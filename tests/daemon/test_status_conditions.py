"""The conditions of ``bookmender status``, the health and the exit code. Pure."""

from dataclasses import replace
from typing import Any

import pytest

from auditor.backlog import UnavailableLedgers
from auditor.fsck.options import Level
from auditor.fsck.results.summary import Counts, Summary
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import AuditRecord, DrainProgress
from checkpoints.stalls import FeedStateRecord, StallReason
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.feed import JAVA_LEADS, FeedStall
from daemon.status.conditions import Code, Severity, conditions, exit_code, health
from daemon.status.leader import LeaderState, PendingLoss
from daemon.status.unreadable import UnreadableRecord
from ledgers.model import BookieId
from replication.nodes import Role
from replication.orders import DrainOrder, HoldOrder, MaintenanceWindow
from replication.reasons import Reason
from tests.daemon.status_values import HEALTHY, action, changed, codes, fact, node, note
from tests.replication.ledger_values import B1, B2, B3

ALONE: dict[str, Any] = {"leader": None}
"""No node and no auditor is running."""
WORKER = (node("host-a", 11, Role.WORKER),)
AUDITOR = (node("host-a", 11, Role.AUDITOR),)
MAP = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=9)
LOADED = LeaderState(ledger_map=MAP)
LOADING = LeaderState(
    ledger_map=replace(MAP, is_complete=False, read_count=300, expected_count=1_000)
)
LEADER: dict[str, Any] = {
    "leader": "host-a",
    "leader_node": AUDITOR[0],
    "nodes": (*AUDITOR, *WORKER),
}
UNREADABLE = AuditRecord(finished_ms=0, ledger_count=9, mark_count=0, unreadable_count=1)


def in_maintenance(bookie: BookieId) -> BookieRow:
    window = MaintenanceWindow(since_ms=0, until_ms=60_000)
    return BookieRow(bookie=bookie, state=BookieState.ABSENT, has_cookie=True, maintenance=window)


MARKED = "LEDGERS_UNDER_REPLICATED WARN"
NO_AUDITOR = "NO_AUDITOR UNKNOWN"


@pytest.mark.parametrize(
    ("changes", "exit_code_", "expected"),
    [
        pytest.param({}, 0, [], id="nothing is wrong"),
        pytest.param(
            {"is_disabled": True}, 0, ["AUTORECOVERY_DISABLED INFO"], id="disabled, not needed"
        ),
        pytest.param({"lost": (B1,)}, 1, ["BOOKIES_LOST WARN"], id="a bookie is lost"),
        pytest.param({"absent": (B1,)}, 1, ["BOOKIES_ABSENT WARN"], id="a bookie is absent"),
        pytest.param(
            {"absent": (B1,), "lost": (B2,)},
            1,
            ["BOOKIES_LOST WARN", "BOOKIES_ABSENT WARN", "AVAILABILITY_UNKNOWN UNKNOWN"],
            id="both are listed",
        ),
        pytest.param(
            {"absent": (B1,), **ALONE}, 1, ["BOOKIES_ABSENT WARN", NO_AUDITOR], id="not tracked"
        ),
        pytest.param(
            {"reformatted": (B1,), "is_disabled": True, **LEADER, "leader_state": LOADED},
            1,
            ["BOOKIES_REFORMATTED WARN", "AUTORECOVERY_DISABLED WARN"],
            id="a reformatted bookie is not marked",
        ),
        pytest.param(ALONE, 3, [NO_AUDITOR], id="losses are not noticed"),
        pytest.param(
            {**ALONE, "nodes": WORKER}, 3, [NO_AUDITOR], id="a worker does not notice losses either"
        ),
        pytest.param(
            {**ALONE, "ordered": (in_maintenance(B1),)},
            3,
            [NO_AUDITOR, "BOOKIES_IN_MAINTENANCE INFO"],
            id="no auditor beside maintenance",
        ),
        pytest.param({"marked_count": 2}, 1, [MARKED], id="Java may repair"),
        pytest.param({"marked_count": 2, "nodes": WORKER}, 1, [MARKED], id="a worker repairs"),
        pytest.param(
            {"marked_count": 2, **ALONE},
            1,
            ["NO_WORKERS ERROR", MARKED, NO_AUDITOR],
            id="marked, and no node",
        ),
        pytest.param(
            {"marked_count": 2, "locked_count": 1, **ALONE},
            1,
            [MARKED, NO_AUDITOR],
            id="a ledger is locked",
        ),
        pytest.param(
            {"marked_count": 2, **LEADER, "nodes": AUDITOR, "leader_state": LOADED},
            1,
            ["NO_WORKERS WARN", MARKED],
            id="an auditor without workers",
        ),
        pytest.param(
            {"marked_count": 2, "is_disabled": True},
            1,
            ["AUTORECOVERY_DISABLED WARN", MARKED],
            id="disabled, but needed",
        ),
        pytest.param(
            {"marked_count": 1, "waiting": (note(1, Reason.OPEN_LEDGER_GRACE),), "nodes": WORKER},
            1,
            [MARKED],
            id="time resolves it",
        ),
        pytest.param(
            {
                "marked_count": 2,
                "waiting": (note(1, Reason.NO_ANSWER), note(2, Reason.NO_COPY)),
                "nodes": WORKER,
            },
            1,
            ["REPAIRS_BLOCKED WARN", MARKED],
            id="time resolves only one of two",
        ),
        pytest.param(
            {"marked_count": 1, "waiting": (note(2, Reason.NO_COPY),), "nodes": WORKER},
            1,
            ["REPAIRS_BLOCKED ERROR", MARKED],
            id="all are blocked",
        ),
        pytest.param(
            {
                "marked_count": 1,
                "waiting": (note(2, Reason.NO_COPY),),
                "overtaken": frozenset({2}),
            },
            1,
            [MARKED],
            id="the obstacle may be gone",
        ),
        pytest.param({"audit": UNREADABLE}, 1, ["LEDGER_METADATA_UNREADABLE ERROR"], id="corrupt"),
        pytest.param(
            {"writable": (), "read_only": (B1,)}, 1, ["NO_WRITABLE_BOOKIES ERROR"], id="read-only"
        ),
        pytest.param({"writable": ()}, 3, ["NO_BOOKIES UNKNOWN"], id="rule S8: no list, no loss"),
        pytest.param(
            {"writable": (), "marked_count": 2, "hold": HoldOrder(since_ms=0), "leader": None},
            3,
            ["NO_BOOKIES UNKNOWN", "SAFETY_HOLD INFO", "LEDGERS_UNDER_REPLICATED INFO"],
            id="rule S8: with any other facts",
        ),
        pytest.param(
            LEADER, 3, ["LEDGER_MAP_LOADING UNKNOWN"], id="the leader has not recorded its map"
        ),
        pytest.param(
            {**LEADER, "leader_state": LOADING}, 3, ["LEDGER_MAP_LOADING UNKNOWN"], id="loading"
        ),
        pytest.param({**LEADER, "leader_state": LOADED}, 0, [], id="the ledger map is complete"),
        pytest.param(
            {**LEADER, "lost": (B1,)},
            1,
            ["BOOKIES_LOST WARN", "LEDGER_MAP_LOADING UNKNOWN"],
            id="WARN wins over UNKNOWN",
        ),
        pytest.param(
            {"hold": HoldOrder(since_ms=0)}, 1, ["SAFETY_HOLD ERROR"], id="the leader's hold"
        ),
        pytest.param(
            {"hold": HoldOrder(since_ms=0, is_by_operator=True)},
            1,
            ["SAFETY_HOLD WARN"],
            id="an operator's hold",
        ),
        pytest.param(
            {"ordered": (in_maintenance(B1),)},
            0,
            ["BOOKIES_IN_MAINTENANCE INFO"],
            id="maintenance is ordered",
        ),
        pytest.param(
            {"ordered": (replace(in_maintenance(B1), state=BookieState.WRITABLE),)},
            0,
            [],
            id="a window, and the bookie is registered",
        ),
        pytest.param(
            {"ordered": (in_maintenance(B1),), "unreadable": ("/x/orders/limits",)},
            1,
            ["ORDERS_UNREADABLE WARN", "BOOKIES_IN_MAINTENANCE INFO"],
            id="an order is unreadable",
        ),
        pytest.param(
            {
                "unreadable_records": (
                    UnreadableRecord(path="/x/absences", unknown="unavailable ledgers"),
                )
            },
            1,
            ["RECORD_UNREADABLE WARN"],
            id="a record is unreadable",
        ),
        pytest.param({"private_count": 1}, 0, ["NO_WORKERS INFO"], id="to be moved, and no worker"),
        pytest.param({"private_count": 1, "nodes": WORKER}, 0, [], id="a ledger is being moved"),
        pytest.param(
            {"private_count": 1, "waiting": (note(1, Reason.NO_TARGET),), "nodes": WORKER},
            1,
            ["DRAIN_BLOCKED WARN"],
            id="no target for any",
        ),
        pytest.param(
            {"private_count": 2, "waiting": (note(1, Reason.NO_TARGET),), "nodes": WORKER},
            0,
            ["DRAIN_BLOCKED INFO"],
            id="no target for one of two",
        ),
        pytest.param(
            {"private_count": 1, "private_damaged_count": 1, "nodes": WORKER},
            1,
            ["LEDGERS_DAMAGED WARN"],
            id="damage that Java does not see",
        ),
        pytest.param(
            {"private_count": 1, "private_damaged_count": 1},
            1,
            ["NO_WORKERS ERROR", "LEDGERS_DAMAGED WARN"],
            id="damage that Java does not repair either",
        ),
        pytest.param({"unproven": (7,)}, 1, ["LEDGER_END_UNPROVEN ERROR"], id="end unproven"),
        pytest.param(
            {"leader_state": LeaderState(recovery_delay_error="no number")},
            1,
            ["RECOVERY_DELAY_UNREADABLE WARN"],
            id="an unreadable recovery delay",
        ),
    ],
)
def test_conditions_are_listed_with_the_most_severe_first(
    changes: dict[str, Any], exit_code_: int, expected: list[str]
) -> None:
    status = changed(HEALTHY, **changes)

    assert codes(status) == expected
    assert exit_code(conditions(status)) == exit_code_


@pytest.mark.parametrize(
    ("severities", "expected"),
    [
        ((), ("OK", 0)),
        ((Severity.INFO,), ("OK", 0)),
        ((Severity.INFO, Severity.UNKNOWN), ("UNKNOWN", 3)),
        ((Severity.UNKNOWN, Severity.WARN), ("WARN", 1)),
        ((Severity.ERROR, Severity.UNKNOWN, Severity.WARN), ("ERROR", 1)),
    ],
)
def test_the_health_is_the_worst_severity(
    severities: tuple[Severity, ...], expected: tuple[str, int]
) -> None:
    [one] = conditions(changed(HEALTHY, lost=(B1,)))
    found = [replace(one, severity=severity) for severity in severities]

    assert (health(found), exit_code(found)) == expected


# --- Bookies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hold": HoldOrder(since_ms=0)}, "a safety hold is in force"),
        ({"is_disabled": True}, "auto-recovery is disabled"),
        ({"leader": None, "leader_node": None}, "no auditor is running"),
        ({"leader_state": LOADING}, "the leader has not read all ledger metadata yet"),
    ],
)
def test_an_unmarked_loss_says_what_prevents_marks(changes: dict[str, Any], why: str) -> None:
    status = changed(HEALTHY, **{**LEADER, "leader_state": LOADED, "lost": (B1,), **changes})

    assert fact(status, "BOOKIES_LOST") == (
        f"1 bookie is lost: {B1}. Its ledgers are not marked: {why}."
    )
    marked = changed(status, by_bookie=((B1, 1),))
    assert fact(marked, "BOOKIES_LOST") == f"1 bookie is lost: {B1}."


def test_a_lost_bookie_without_ledgers_can_be_decommissioned() -> None:
    state = replace(LOADED, named_by={B1: 0, B2: 1}, is_count_complete=True)
    one = changed(HEALTHY, **LEADER, leader_state=state, lost=(B1,), is_disabled=True)

    assert codes(one) == ["BOOKIES_LOST INFO", "AUTORECOVERY_DISABLED INFO"]
    assert fact(one, "BOOKIES_LOST").endswith("No ledger names it, so no copy is missing.")

    assert f"bookmender bookie decommission {B1}" in action(one, "BOOKIES_LOST")
    assert "decommission" not in action(changed(one, lost=(B1, B2)), "BOOKIES_LOST")


def test_of_hundreds_of_bookies_only_some_are_named() -> None:
    many = tuple(BookieId(f"b{number}:3181") for number in range(300))

    told = fact(changed(HEALTHY, lost=many), "BOOKIES_LOST")

    assert told.startswith("300 bookies are lost: b0:3181, ")
    assert told.endswith("b4:3181 and 295 more.")


@pytest.mark.parametrize(
    ("state", "changes", "text"),
    [
        pytest.param(
            LeaderState(pending_losses=(PendingLoss(bookie=B1, since_ms=0, due_ms=60_000),)),
            {},
            f"Next: {B1} lost in 1 min.",
            id="with time left",
        ),
        pytest.param(
            LeaderState(
                pending_losses=(PendingLoss(bookie=B1, since_ms=0, due_ms=60_000, is_excused=True),)
            ),
            {},
            f"Next: {B1} lost in 1 min (delayed, because it may register again after an outage of "
            "ZooKeeper).",
            id="after an outage",
        ),
        pytest.param(
            LeaderState(), {}, "The leader has not recorded when they disappeared.", id="Java leads"
        ),
        pytest.param(
            LeaderState(), ALONE, "No auditor is tracking the recovery delay.", id="no leader"
        ),
    ],
)
def test_an_absent_bookie_says_when_it_is_lost(
    state: LeaderState, changes: dict[str, Any], text: str
) -> None:
    status = changed(HEALTHY, absent=(B1, B2), leader_state=state, **changes)

    assert fact(status, "BOOKIES_ABSENT") == f"2 bookies are absent: {B1}, {B2}. {text}"


SHORT = "Its ledgers are short of copies."


@pytest.mark.parametrize(
    ("bookies", "naming", "changes", "text"),
    [
        pytest.param([B1], {}, {}, SHORT, id="not counted"),
        pytest.param([B1], {B1: 2}, {}, SHORT, id="named"),
        pytest.param([B1], {B1: 0}, {}, "No ledger names it.", id="named by none"),
        pytest.param([B1], {B1: 0}, {"is_count_complete": False}, SHORT, id="so far"),
        pytest.param(
            [B1],
            {B1: 0},
            {"ledger_map": replace(MAP, unreadable_count=1)},
            SHORT,
            id="unreadable ledgers may name it",
        ),
        pytest.param([B1, B2], {B1: 0, B2: 0}, {}, "No ledger names them.", id="neither of two"),
        pytest.param(
            [B1, B2],
            {B1: 2, B2: 1},
            {"unavailable": UnavailableLedgers(count=0)},
            "Their ledgers are short of copies, but each entry has an available copy.",
            id="counted",
        ),
    ],
)
def test_maintenance_says_what_it_affects(
    bookies: list[BookieId], naming: dict[BookieId, int], changes: dict[str, Any], text: str
) -> None:
    state = replace(LOADED, **{"named_by": naming, "is_count_complete": True, **changes})
    status = changed(
        HEALTHY, ordered=tuple(map(in_maintenance, bookies)), leader_state=state, **LEADER
    )

    told = fact(status, "BOOKIES_IN_MAINTENANCE")

    assert told.endswith(f"for at most 1 min: {', '.join(bookies)}. {text}")
    assert exit_code(conditions(status)) == 0


TWO_NAMED = replace(LOADED, named_by={B1: 2, B2: 1}, is_count_complete=True)


@pytest.mark.parametrize(
    ("state", "is_ours", "expected", "exit_code_"),
    [
        pytest.param(
            replace(TWO_NAMED, unavailable=UnavailableLedgers(count=0)),
            True,
            None,
            0,
            id="none unavailable",
        ),
        pytest.param(
            replace(TWO_NAMED, unavailable=UnavailableLedgers(count=1)),
            True,
            "LEDGERS_UNAVAILABLE ERROR",
            1,
            id="one unavailable",
        ),
        pytest.param(TWO_NAMED, True, "AVAILABILITY_UNKNOWN UNKNOWN", 3, id="not counted yet"),
        pytest.param(LeaderState(), False, "AVAILABILITY_UNKNOWN UNKNOWN", 3, id="Java leads"),
    ],
)
def test_maintenance_of_two_bookies_may_make_ledgers_unavailable(
    state: LeaderState, is_ours: bool, expected: str | None, exit_code_: int
) -> None:
    status = changed(
        HEALTHY,
        ordered=tuple(map(in_maintenance, [B1, B2])),
        leader_state=state,
        **(LEADER if is_ours else {}),
    )

    assert codes(status) == [*([expected] if expected else []), "BOOKIES_IN_MAINTENANCE INFO"]
    assert exit_code(conditions(status)) == exit_code_


@pytest.mark.parametrize(
    ("unavailable", "ledgers", "start"),
    [
        pytest.param(
            UnavailableLedgers(count=1, first=(7,), restored_by={B1: 1, B2: 1}),
            "1 ledger is unavailable: no registered bookie has a copy of some entries (ledger 7).",
            f"Start one of {B1}, {B2}.",
            id="each of two is enough",
        ),
        pytest.param(
            UnavailableLedgers(count=12, first=tuple(range(1, 10)), restored_by={B1: 4, B2: 12}),
            "12 ledgers are unavailable: no registered bookie has a copy of some entries (ledger "
            "1, 2, 3, 4, 5 and 7 more).",
            f"Start {B2}.",
            id="one is enough for all",
        ),
        pytest.param(
            UnavailableLedgers(count=3, first=(), restored_by={B1: 1, B2: 2, B3: 0}),
            "3 ledgers are unavailable: no registered bookie has a copy of some entries.",
            f"Start {B2} (enough for 2 ledgers), {B1} (enough for 1 ledger).",
            id="each is enough for some",
        ),
        pytest.param(
            UnavailableLedgers(count=1, first=(1,), restored_by={B1: 0, B2: 0}),
            "1 ledger is unavailable: no registered bookie has a copy of some entries (ledger 1).",
            f"Start {B1}, {B2}.",
            id="both are needed",
        ),
    ],
)
def test_unavailable_ledgers_name_the_bookies_to_start(
    unavailable: UnavailableLedgers, ledgers: str, start: str
) -> None:
    status = changed(HEALTHY, leader_state=replace(TWO_NAMED, unavailable=unavailable))

    assert fact(status, "LEDGERS_UNAVAILABLE") == ledgers
    assert action(status, "LEDGERS_UNAVAILABLE") == start


def test_a_loading_ledger_map_gives_a_minimum_of_unavailable() -> None:
    status = changed(
        HEALTHY, leader_state=replace(LOADING, unavailable=UnavailableLedgers(count=3))
    )

    assert fact(status, "LEDGERS_UNAVAILABLE").startswith("At least 3 ledgers are unavailable")


UNDER_WAY = DrainProgress(since_ms=0, ledgers_left=3, ledgers_most=9, is_drained=False)
DRAINED = replace(UNDER_WAY, ledgers_left=0, is_drained=True)
IN_DOUBT = replace(DRAINED, is_drained=False, is_in_doubt=True, unreadable_count=1)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        pytest.param([UNDER_WAY], f"1 bookie is draining: {B1}; 3 of 9 ledgers left.", id="one"),
        pytest.param(
            [UNDER_WAY, UNDER_WAY],
            f"2 bookies are draining: {B1}, {B2}; 6 of 18 ledgers left.",
            id="two",
        ),
        pytest.param(
            [UNDER_WAY, DRAINED],
            f"1 bookie is draining: {B1}; 3 of 9 ledgers left.",
            id="one is drained",
        ),
        pytest.param([DRAINED, DRAINED], None, id="both are drained"),
        pytest.param(
            [UNDER_WAY, None],
            f"2 bookies are draining: {B1}, {B2}; the leader has not counted their ledgers yet.",
            id="not counted",
        ),
        pytest.param(
            [IN_DOUBT], f"1 bookie is draining: {B1}; only unreadable ledgers left.", id="doubt"
        ),
    ],
)
def test_drains_say_how_many_ledgers_are_left(
    progress: list[DrainProgress | None], text: str | None
) -> None:
    rows = tuple(
        BookieRow(
            bookie=bookie,
            state=BookieState.READ_ONLY,
            has_cookie=True,
            drain=DrainOrder(since_ms=0),
            progress=told,
        )
        for bookie, told in zip((B1, B2), progress, strict=False)
    )
    found = conditions(changed(HEALTHY, ordered=rows))

    assert [each.fact for each in found] == ([] if text is None else [text])
    assert exit_code(found) == 0, "no copy is missing"


# --- Services and orders --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        pytest.param((), "Start a node with bookmender daemon.", id="no node"),
        pytest.param(WORKER, "Start a node with auditor.enabled = true.", id="a worker only"),
        pytest.param(AUDITOR, "Wait some seconds for the election.", id="not elected yet"),
    ],
)
def test_without_an_auditor_the_action_says_what_to_start(
    nodes: tuple[Any, ...], text: str
) -> None:
    assert action(changed(HEALTHY, leader=None, nodes=nodes), "NO_AUDITOR") == text


HOLD = HoldOrder(since_ms=0, until_ms=90_000, bookies=(B1, B2), reason="3 of 5 bookies went")


@pytest.mark.parametrize(
    ("changes", "ends_soon"),
    [
        pytest.param(LEADER, True, id="the leader ends it"),
        pytest.param({**LEADER, "lost": (B1,)}, False, id="one is still lost"),
        pytest.param({**LEADER, "absent": (B1,)}, False, id="one is still absent"),
        pytest.param({**LEADER, "writable": ()}, False, id="rule S8: unknown"),
        pytest.param(ALONE, False, id="no leader"),
    ],
)
def test_a_hold_ends_soon_after_its_bookies_are_back(
    changes: dict[str, Any], ends_soon: bool
) -> None:
    told = fact(changed(HEALTHY, hold=HOLD, **changes), "SAFETY_HOLD")

    assert "3 of 5 bookies went" in told
    assert ("It ends soon" in told) is ends_soon


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({}, True, id="a worker repairs"),
        pytest.param({"is_disabled": True}, False, id="disabled"),
        pytest.param({"nodes": ()}, False, id="no node"),
        pytest.param({"nodes": AUDITOR}, False, id="no worker"),
    ],
)
def test_a_hold_says_what_is_repaired_meanwhile(changes: dict[str, Any], is_told: bool) -> None:
    status = changed(HEALTHY, **{"hold": HOLD, "marked_count": 503, "nodes": WORKER, **changes})

    assert ("503 ledgers marked before" in fact(status, "SAFETY_HOLD")) is is_told


def test_a_java_leader_ignores_the_hold() -> None:
    held = changed(HEALTHY, leader="java-1:3181", hold=HOLD)
    ignores = "Java's leader (java-1:3181) ignores the hold"

    assert ignores in fact(held, "SAFETY_HOLD")
    assert "bookmender disable" in action(held, "SAFETY_HOLD")
    assert ignores not in fact(changed(held, is_disabled=True), "SAFETY_HOLD")
    assert ignores not in fact(changed(held, leader=None), "SAFETY_HOLD")


# --- Ledgers --------------------------------------------------------------------------------------


def test_blocked_repairs_are_counted_with_the_gravest_first() -> None:
    reasons = (Reason.OPEN_LEDGER_GRACE, Reason.NO_TARGET, Reason.NO_COPY, Reason.NO_TARGET)
    waiting = tuple(note(number, reason, f"why {number}") for number, reason in enumerate(reasons))
    status = changed(HEALTHY, marked_count=9, waiting=waiting)

    assert fact(status, "REPAIRS_BLOCKED") == (
        "Blocked: 3 of 9 queued ledgers (1 no-copy, 2 no-target)."
    )
    assert action(status, "REPAIRS_BLOCKED").startswith(
        "Ledger 2: no bookie that answers has a good copy"
    )
    assert action(status, "REPAIRS_BLOCKED").endswith(". Others: bookmender queue list")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param({}, "Nothing to do while workers repair.", id="workers repair"),
        pytest.param(
            {"waiting": (note(1, Reason.NO_COPY),)},
            "Act on REPAIRS_BLOCKED. Workers repair the other ledgers meanwhile.",
            id="some are blocked",
        ),
        pytest.param(
            {"waiting": (note(1, Reason.NO_COPY), note(2, Reason.NO_TARGET))},
            "All are blocked: act on REPAIRS_BLOCKED.",
            id="all are blocked",
        ),
        pytest.param(
            {"is_disabled": True},
            "Nothing is repaired while auto-recovery is disabled: bookmender enable",
            id="disabled",
        ),
        pytest.param(
            {"nodes": (), "leader": None},
            "Nothing is repaired without a worker: act on NO_WORKERS.",
            id="no worker",
        ),
    ],
)
def test_the_action_for_under_replicated_ledgers_fits_the_other_conditions(
    changes: dict[str, Any], told: str
) -> None:
    nodes = (node("host-a", 1, Role.WORKER),)
    status = changed(changed(HEALTHY, marked_count=2, nodes=nodes), **changes)

    assert action(status, "LEDGERS_UNDER_REPLICATED").startswith(told)
    for code in ("REPAIRS_BLOCKED", "NO_WORKERS"):
        assert code not in told or any(each.startswith(code) for each in codes(status))


def test_windows_are_named_only_if_every_ledger_waits_for_one() -> None:
    waiting = (replace(note(1, Reason.MAINTENANCE), next_try_ms=60_000),)
    one = changed(HEALTHY, marked_count=1, waiting=waiting)

    assert fact(one, "LEDGERS_UNDER_REPLICATED") == (
        "1 ledger is under-replicated. All wait for maintenance windows to end, next try in 1 min."
    )
    for other in (changed(one, marked_count=2), changed(one, overtaken=frozenset({1}))):
        assert "windows" not in fact(other, "LEDGERS_UNDER_REPLICATED")


NEEDS_HELP = {
    Reason.OPEN_LEDGER_GRACE: False,
    Reason.OPEN_FRAGMENT: False,
    Reason.WRITER_ALIVE: False,
    Reason.NO_COPY: True,
    Reason.NO_TARGET: True,
    Reason.MISPLACED: True,
    Reason.NO_ANSWER: False,
    Reason.RECOVERY_FAILED: False,
    Reason.END_DAMAGED: True,
    Reason.NO_COVERAGE: True,
    Reason.END_UNPROVEN: True,
    Reason.RECOVERY_UNENDED: True,
    Reason.CORRUPT_METADATA: True,
    Reason.ACCESS_DENIED: True,
    Reason.DIGEST_SUSPECT: True,
    Reason.WRITE_REFUSED: True,
    Reason.CONFLICTS: False,
    Reason.MAINTENANCE: False,
    Reason.HOLD: False,
    Reason.LEFT_TO_OTHERS: False,
    Reason.JOURNAL: True,
}


def test_the_table_of_needed_help_has_every_reason() -> None:
    assert NEEDS_HELP.keys() == set(Reason)


@pytest.mark.parametrize(("reason", "needs_help"), NEEDS_HELP.items())
def test_reasons_that_time_alone_does_not_remove_block_a_repair(
    reason: Reason, needs_help: bool
) -> None:
    status = changed(HEALTHY, marked_count=1, waiting=(note(1, reason),))

    assert ("REPAIRS_BLOCKED ERROR" in codes(status)) is needs_help


def test_a_hidden_directory_is_named_and_is_no_loading() -> None:
    hidden = replace(MAP, is_complete=False, hidden=("/ledgers/00/0099",))
    status = changed(HEALTHY, leader_state=LeaderState(ledger_map=hidden))

    assert codes(status) == ["LEDGER_METADATA_UNREADABLE ERROR"]
    assert fact(status, "LEDGER_METADATA_UNREADABLE") == (
        "ACLs hide directories of ledgers: /ledgers/00/0099."
    )


def test_unproven_ends_and_unreadable_metadata_name_ledgers() -> None:
    audit = replace(UNREADABLE, unreadable_count=300, unreadable=tuple(range(100)))
    status = changed(HEALTHY, unproven=tuple(range(1, 11)), audit=audit)

    assert fact(status, "LEDGER_END_UNPROVEN") == (
        "The last entry of 10 ledgers cannot be proven: ledger 1, 2, 3, 4, 5 and 5 more."
    )
    assert fact(status, "LEDGER_METADATA_UNREADABLE") == (
        "The metadata of 300 ledgers cannot be read: ledger 0, 1, 2, 3, 4 and 295 more."
    )


# --- fsck -----------------------------------------------------------------------------------------


def fsck(*, run: str = "r", wrong: int = 0, unknown: int = 0, marked: int | None = None) -> Summary:
    counts = Counts(ledgers=9, wrong=wrong, verdicts={"unknown": unknown, "lost": wrong})
    return Summary(
        run=run, level=Level.FULL, started_ms=0, finished_ms=0, counts=counts, marked=marked
    )


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        pytest.param({"fsck": fsck()}, [], id="nothing found"),
        pytest.param(
            {"fsck": fsck(unknown=3)}, ["fsck run r could not judge 3 ledgers."], id="unknown"
        ),
        pytest.param(
            {"fsck": fsck(wrong=4)},
            ["fsck run r (level full) found 4 ledgers wrong; 0 marked for repair since."],
            id="wrong",
        ),
        pytest.param(
            {
                "fsck": fsck(wrong=4, marked=4),
                "fsck_closer": fsck(run="c", wrong=2, unknown=3, marked=1),
            },
            [
                "fsck run r (level full) found 4 ledgers wrong; 4 marked for repair since. "
                "fsck run c (level full) found 2 ledgers wrong; 1 marked for repair since.",
                "fsck run c could not judge 3 ledgers.",
            ],
            id="an earlier run at a closer level",
        ),
    ],
)
def test_fsck_results_are_shown(changes: dict[str, Any], facts: list[str]) -> None:
    found = conditions(changed(HEALTHY, **changes))

    assert [each.fact for each in found] == facts


@pytest.mark.parametrize(
    ("changes", "severity", "action_start"),
    [
        pytest.param({"fsck": fsck(wrong=4)}, "WARN", "Mark those", id="none is marked"),
        pytest.param({"fsck": fsck(wrong=4, marked=3)}, "WARN", "Mark those", id="one is not"),
        pytest.param(
            {"fsck": fsck(wrong=4, marked=4), "private_count": 1, "private_damaged_count": 1},
            "WARN",
            "Wait until workers",
            id="all were marked and one is not repaired",
        ),
        pytest.param(
            {"fsck": fsck(wrong=4, marked=4), "private_count": 1},
            "INFO",
            "Run fsck again",
            id="no queued ledger needs repair",
        ),
        pytest.param(
            {"fsck": fsck(wrong=4, marked=4), "fsck_closer": fsck(run="c", wrong=2, marked=1)},
            "WARN",
            "Mark those",
            id="one of an earlier run is not marked",
        ),
    ],
)
def test_damage_is_a_warning_until_all_of_it_was_marked_and_nothing_needs_repair(
    changes: dict[str, Any], severity: str, action_start: str
) -> None:
    status = changed(HEALTHY, **changes)

    assert f"FSCK_FOUND_DAMAGE {severity}" in codes(status)
    assert action(status, "FSCK_FOUND_DAMAGE").startswith(action_start)


# --- Form -----------------------------------------------------------------------------------------


def test_the_json_of_a_condition_has_its_data() -> None:
    [lost] = conditions(changed(HEALTHY, lost=(B1,)))

    assert lost.to_json() == {
        "code": "BOOKIES_LOST",
        "severity": "WARN",
        "fact": f"1 bookie is lost: {B1}.",
        "action": "Start bookies whose data is intact. Ledgers of the others are copied to other "
        "bookies.",
        "data": {"bookies": [B1], "named_by_ledgers": [B1]},
    }
    assert lost.code is Code.BOOKIES_LOST


STALLED = FeedStateRecord(
    session_id=5,
    written_ms=0,
    pending_count=12,
    stalled_since_ms=0,
    reason=StallReason.ACCESS_DENIED,
    detail="denied (path=/ledgers/00)",
    path="/ledgers/00",
)


def test_a_stalled_feed_is_a_condition_that_says_how_long_and_why() -> None:
    status = changed(HEALTHY, feed_stall=FeedStall.of(STALLED), taken_ms=300_000)

    assert codes(status) == ["FEED_STALLED WARN"]
    assert fact(status, "FEED_STALLED") == (
        "The change feed has published nothing for 5 min: an ACL denies the leader access to "
        "/ledgers/00, so changes below it are unknown. 12 changes wait."
    )
    assert "read access" in action(status, "FEED_STALLED")


@pytest.mark.parametrize("reason", StallReason)
def test_each_reason_of_a_stalled_feed_has_a_text(reason: StallReason) -> None:
    stall = FeedStall.of(replace(STALLED, reason=reason))

    assert stall.fact(now_ms=0).count(": ") >= 1
    assert stall.action()
    assert stall.to_json()["reason"] == reason.value


def test_java_as_leader_stalls_the_feed() -> None:
    status = changed(HEALTHY, feed_stall=FeedStall(reason=JAVA_LEADS))

    assert "Java's auditor leads" in fact(status, "FEED_STALLED")
    assert FeedStall(reason=JAVA_LEADS).to_json()["reason"] == "java-leads"

"""The conditions of ``bookmender status``, the health and the exit code. Pure."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_struct

from auditor.backlog import UnavailableLedgers
from auditor.checks.records import CheckRun
from auditor.fsck.options import Level
from auditor.fsck.results.summary import Counts, Summary
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import AuditRecord, DrainProgress
from checkpoints.stalls import FeedStateRecord, StallReason
from daemon.operations.archive import ArchiveStatus
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.feed import JAVA_LEADS, FeedStall
from daemon.status.answers import ConditionRecord, Severity
from daemon.status.condition import exit_code, health
from daemon.status.conditions import CONDITIONS, conditions
from daemon.status.leader import LeaderState
from daemon.status.records import PendingLossRecord
from daemon.status.unreadable import UnreadableRecord
from ledgers.model import BookieId
from notifications.discovery import ServerRecord
from replication.nodes import Role
from replication.orders import DrainOrder, HoldOrder, MaintenanceWindow, Mute
from replication.reasons import Reason
from tests.daemon.status_values import HEALTHY, changed, codes, fact, node, note
from tests.replication.ledger_values import B1, B2
from tests.said import Said

ARCHIVED = ArchiveStatus(is_enabled=True, url="file:///archive", archived_ms=1, lag_s=1.0)
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
TWO_NAMED = replace(LOADED, named_by={B1: 2, B2: 1}, is_count_complete=True)
UNREADABLE = AuditRecord(finished_ms=0, ledger_count=9, mark_count=0, unreadable_count=1)


def in_maintenance(bookie: BookieId) -> BookieRow:
    window = MaintenanceWindow(since_ms=0, until_ms=60_000)
    return BookieRow(bookie=bookie, state=BookieState.ABSENT, has_cookie=True, maintenance=window)


def the(code: str, **changes: Any) -> ConditionRecord:
    """Return one condition of a status that is healthy but for these changes."""
    [told] = [each for each in conditions(changed(HEALTHY, **changes)) if each.code == code]
    return told


MARKED = "LEDGERS_UNDER_REPLICATED WARN"
NO_AUDITOR = "NO_AUDITOR UNKNOWN"


LISTED: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "nothing is wrong": ({}, 0, []),
    "disabled until an operator enables it": (
        {"is_disabled": True},
        1,
        ["AUTORECOVERY_DISABLED WARN"],
    ),
    "disabled for a time": (
        {"is_disabled": True, "disabled_until_ms": 60_000},
        0,
        ["AUTORECOVERY_DISABLED INFO"],
    ),
    "a bookie is lost": ({"lost": (B1,)}, 1, ["BOOKIES_LOST WARN"]),
    "a bookie is absent": ({"absent": (B1,)}, 1, ["BOOKIES_ABSENT WARN"]),
    "both are listed": (
        {"absent": (B1,), "lost": (B2,)},
        1,
        ["BOOKIES_LOST WARN", "BOOKIES_ABSENT WARN", "AVAILABILITY_UNKNOWN UNKNOWN"],
    ),
    "not tracked": ({"absent": (B1,), **ALONE}, 1, ["BOOKIES_ABSENT WARN", NO_AUDITOR]),
    "a reformatted bookie is not marked": (
        {"reformatted": (B1,), "is_disabled": True, **LEADER, "leader_state": LOADED},
        1,
        ["BOOKIES_REFORMATTED WARN", "AUTORECOVERY_DISABLED WARN"],
    ),
    "losses are not noticed": (ALONE, 3, [NO_AUDITOR]),
    "a worker does not notice losses either": ({**ALONE, "nodes": WORKER}, 3, [NO_AUDITOR]),
    "no auditor beside maintenance": (
        {**ALONE, "ordered": (in_maintenance(B1),)},
        3,
        [NO_AUDITOR, "BOOKIES_IN_MAINTENANCE INFO"],
    ),
    "Java may repair": ({"marked_count": 2}, 1, [MARKED]),
    "a worker repairs": ({"marked_count": 2, "nodes": WORKER}, 1, [MARKED]),
    "marked, and no node": (
        {"marked_count": 2, **ALONE},
        1,
        ["NO_WORKERS ERROR", MARKED, NO_AUDITOR],
    ),
    "a ledger is locked": (
        {"marked_count": 2, "locked": frozenset({9}), **ALONE},
        1,
        [MARKED, NO_AUDITOR],
    ),
    "an auditor without workers": (
        {"marked_count": 2, **LEADER, "nodes": AUDITOR, "leader_state": LOADED},
        1,
        ["NO_WORKERS WARN", MARKED],
    ),
    "disabled for a time that is over": (
        {"marked_count": 2, "is_disabled": True, "disabled_until_ms": 0},
        1,
        ["AUTORECOVERY_DISABLED WARN", MARKED],
    ),
    "time resolves it": (
        {"marked_count": 1, "waiting": (note(1, Reason.OPEN_LEDGER_GRACE),), "nodes": WORKER},
        1,
        [MARKED],
    ),
    "time resolves only one of two": (
        {
            "marked_count": 2,
            "waiting": (note(1, Reason.NO_ANSWER), note(2, Reason.NO_COPY)),
            "nodes": WORKER,
        },
        1,
        ["REPAIRS_BLOCKED WARN", MARKED],
    ),
    "all are blocked": (
        {"marked_count": 1, "waiting": (note(2, Reason.NO_COPY),), "nodes": WORKER},
        1,
        ["REPAIRS_BLOCKED ERROR", MARKED],
    ),
    "the obstacle may be gone": (
        {"marked_count": 1, "waiting": (note(2, Reason.NO_COPY),), "overtaken": frozenset({2})},
        1,
        [MARKED],
    ),
    "corrupt": ({"audit": UNREADABLE}, 1, ["LEDGER_METADATA_UNREADABLE ERROR"]),
    "read-only": ({"writable": (), "read_only": (B1,)}, 1, ["NO_WRITABLE_BOOKIES ERROR"]),
    "rule S8: no list, no loss": ({"writable": ()}, 3, ["NO_BOOKIES UNKNOWN"]),
    "rule S8: with any other facts": (
        {"writable": (), "marked_count": 2, "hold": HoldOrder(since_ms=0), "leader": None},
        3,
        ["NO_BOOKIES UNKNOWN", "SAFETY_HOLD INFO", "LEDGERS_UNDER_REPLICATED INFO"],
    ),
    "the leader has not recorded its map": (LEADER, 3, ["LEDGER_MAP_LOADING UNKNOWN"]),
    "loading": ({**LEADER, "leader_state": LOADING}, 3, ["LEDGER_MAP_LOADING UNKNOWN"]),
    "the ledger map is complete": ({**LEADER, "leader_state": LOADED}, 0, []),
    "WARN wins over UNKNOWN": (
        {**LEADER, "lost": (B1,)},
        1,
        ["BOOKIES_LOST WARN", "LEDGER_MAP_LOADING UNKNOWN"],
    ),
    "the leader's hold": ({"hold": HoldOrder(since_ms=0)}, 1, ["SAFETY_HOLD ERROR"]),
    "an operator's hold": (
        {"hold": HoldOrder(since_ms=0, is_by_operator=True)},
        1,
        ["SAFETY_HOLD WARN"],
    ),
    "maintenance is ordered": (
        {"ordered": (in_maintenance(B1),)},
        0,
        ["BOOKIES_IN_MAINTENANCE INFO"],
    ),
    "a window, and the bookie is registered": (
        {"ordered": (replace(in_maintenance(B1), state=BookieState.WRITABLE),)},
        0,
        [],
    ),
    "an order is unreadable": (
        {"ordered": (in_maintenance(B1),), "unreadable": ("/x/orders/limits",)},
        1,
        ["ORDERS_UNREADABLE WARN", "BOOKIES_IN_MAINTENANCE INFO"],
    ),
    "a record is unreadable": (
        {
            "unreadable_records": (
                UnreadableRecord(path="/x/absences", unknown="unavailable ledgers"),
            )
        },
        1,
        ["RECORD_UNREADABLE WARN"],
    ),
    "to be moved, and no worker": ({"private_count": 1}, 0, ["NO_WORKERS INFO"]),
    "a ledger is being moved": ({"private_count": 1, "nodes": WORKER}, 0, []),
    "no target for any": (
        {"private_count": 1, "waiting": (note(1, Reason.NO_TARGET),), "nodes": WORKER},
        1,
        ["DRAIN_BLOCKED WARN"],
    ),
    "no target for one of two": (
        {"private_count": 2, "waiting": (note(1, Reason.NO_TARGET),), "nodes": WORKER},
        0,
        ["DRAIN_BLOCKED INFO"],
    ),
    "damage that Java does not see": (
        {"private_count": 1, "private_damaged_count": 1, "nodes": WORKER},
        1,
        ["LEDGERS_DAMAGED WARN"],
    ),
    "damage that Java does not repair either": (
        {"private_count": 1, "private_damaged_count": 1},
        1,
        ["NO_WORKERS ERROR", "LEDGERS_DAMAGED WARN"],
    ),
    "end unproven": ({"unproven": (7,)}, 1, ["LEDGER_END_UNPROVEN ERROR"]),
    "an unreadable recovery delay": (
        {"leader_state": LeaderState(recovery_delay_error="no number")},
        1,
        ["RECOVERY_DELAY_UNREADABLE WARN"],
    ),
}


@pytest.mark.parametrize(("changes", "exit_code_", "expected"), LISTED.values(), ids=LISTED)
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
        (("INFO",), ("OK", 0)),
        (("INFO", "UNKNOWN"), ("UNKNOWN", 3)),
        (("UNKNOWN", "WARN"), ("WARN", 1)),
        (("ERROR", "UNKNOWN", "WARN"), ("ERROR", 1)),
    ],
)
def test_the_health_is_the_worst_severity(
    severities: tuple[Severity, ...], expected: tuple[str, int]
) -> None:
    one = the("BOOKIES_LOST", lost=(B1,))
    found = [msgspec.structs.replace(one, severity=severity) for severity in severities]

    assert (health(found), exit_code(found)) == expected


# --- What is said ---------------------------------------------------------------------------------

HOLD = HoldOrder(since_ms=0, until_ms=90_000, bookies=(B1, B2), reason="3 of 5 bookies went")
TWO_WINDOWS = (in_maintenance(B1), in_maintenance(B2))
UNDER_WAY = DrainProgress(since_ms=0, ledgers_left=3, ledgers_most=9, is_drained=False)
DRAINED = replace(UNDER_WAY, ledgers_left=0, is_drained=True)
IN_DOUBT = replace(DRAINED, is_drained=False, is_in_doubt=True, unreadable_count=1)
STALLED = FeedStateRecord(
    session_id=5,
    written_ms=0,
    pending_count=12,
    stalled_since_ms=0,
    reason=StallReason.ACCESS_DENIED,
    detail="denied (path=/ledgers/00)",
    path="/ledgers/00",
)


def draining(*progress: DrainProgress | None) -> tuple[BookieRow, ...]:
    return tuple(
        BookieRow(
            bookie=bookie,
            state=BookieState.READ_ONLY,
            has_cookie=True,
            drain=DrainOrder(since_ms=0),
            progress=told,
        )
        for bookie, told in zip((B1, B2), progress, strict=False)
    )


def loss(*, is_excused: bool) -> PendingLossRecord:
    return PendingLossRecord(bookie=B1, since_ms=0, lost_ms=60_000, is_excused=is_excused)


def fsck(*, run: str = "r", wrong: int = 0, unknown: int = 0, marked: int | None = None) -> Summary:
    counts = Counts(ledgers=9, wrong=wrong, verdicts={"unknown": unknown, "lost": wrong})
    return Summary(
        run=run, level=Level.FULL, started_ms=0, finished_ms=0, counts=counts, marked=marked
    )


def unavailable(count: int, *first: int, **restored_by: int) -> LeaderState:
    by = dict(zip((B1, B2), restored_by.values(), strict=False))
    found = UnavailableLedgers(count=count, first=first, restored_by=by)
    return replace(TWO_NAMED, unavailable=found)


def placed(**counts: int) -> CheckRun:
    return CheckRun(started_ms=0, finished_ms=0, counts=counts)


BLOCKED = tuple(
    note(number, reason)
    for number, reason in enumerate((Reason.HOLD, Reason.NO_TARGET, Reason.NO_COPY))
)
REPAIRING = {**LEADER, "leader_state": LOADED, "marked_count": 2}
SCENES: dict[str, dict[str, Any]] = {
    "nothing is registered": {"writable": (), "leader": None},
    "read-only bookies": {"writable": (), "read_only": (B1,)},
    "of hundreds of bookies only some are named": {
        "lost": tuple(BookieId(f"b{number}:3181") for number in range(300))
    },
    "a lost bookie, and a hold": {**LEADER, "lost": (B1,), "leader_state": LOADED, "hold": HOLD},
    "lost bookies without ledgers": {
        **LEADER,
        "leader_state": replace(LOADED, named_by={B1: 0, B2: 0}, is_count_complete=True),
        "lost": (B1, B2),
    },
    "an absent bookie": {
        "absent": (B1,),
        "leader_state": LeaderState(pending_losses=(loss(is_excused=False),)),
    },
    "absent after an outage": {
        "absent": (B1,),
        "leader_state": LeaderState(pending_losses=(loss(is_excused=True),)),
    },
    "absent, and nobody tracks it": {"absent": (B1, B2), **ALONE},
    "a reformatted bookie": {"reformatted": (B1,), "is_disabled": True},
    "a worker, but no auditor": {**ALONE, "nodes": WORKER},
    "no election yet": {**ALONE, "nodes": AUDITOR},
    "one bookie is enough for all": {"leader_state": unavailable(12, 1, 2, 3, 4, 5, 6, a=1, b=12)},
    "each is enough for some": {"leader_state": unavailable(3, a=1, b=2)},
    "both are needed, of those read so far": {
        "leader_state": replace(unavailable(1, 7, a=0, b=0), is_count_complete=False)
    },
    "workers repair": REPAIRING,
    "some are blocked": {**REPAIRING, "marked_count": 9, "waiting": BLOCKED},
    "all are blocked": {**REPAIRING, "waiting": BLOCKED[1:]},
    "disabled": {**REPAIRING, "is_disabled": True},
    "disabled for a time": {"is_disabled": True, "disabled_until_ms": 7_200_000},
    "lost while disabled": {"is_disabled": True, "lost": (B1,)},
    "no worker": {"marked_count": 2, **ALONE},
    "all wait for maintenance": {
        "marked_count": 1,
        "waiting": (replace(note(1, Reason.MAINTENANCE), next_try_ms=60_000),),
    },
    "misplaced": {"placement": placed(fail=981, strict=19_019)},
    "misplaced, and being moved": {"placement": placed(fail=981, marked=900)},
    "well placed": {"placement": placed(strict=19_019, soft=3, open_fail=1)},
    "maintenance": {"ordered": TWO_WINDOWS[:1]},
    "maintenance, all readable": {**LEADER, "ordered": TWO_WINDOWS, "leader_state": unavailable(0)},
    "a drain": {"ordered": draining(UNDER_WAY, DRAINED)},
    "a drain in doubt": {"ordered": draining(IN_DOUBT)},
    "a drain that is not counted": {"ordered": draining(UNDER_WAY, None)},
    "a blocked drain": {
        "private_count": 1,
        "waiting": (note(1, Reason.NO_TARGET),),
        "nodes": WORKER,
    },
    "damage": {"private_count": 1, "private_damaged_count": 1, "nodes": WORKER},
    "a Java leader ignores the hold": {"hold": HOLD, "leader": "java-1:3181", "lost": (B1,)},
    "an operator's hold": {"hold": HoldOrder(since_ms=0, is_by_operator=True)},
    "unreadable ledgers": {
        "audit": replace(UNREADABLE, unreadable_count=300, unreadable=tuple(range(100))),
        "leader_state": LeaderState(ledger_map=replace(MAP, hidden=("/ledgers/00/0099",))),
        "unproven": tuple(range(1, 11)),
    },
    "unreadable orders and records": {
        "unreadable": ("/x/orders/limits",),
        "unreadable_records": (UnreadableRecord(path="/x/absences", unknown="who is absent"),),
        "leader_state": LeaderState(recovery_delay_error="no number", recovery_delay_s=600),
    },
    "the map is loading": {**LEADER, "leader_state": LOADING},
    "fsck": {
        "fsck": fsck(wrong=4, marked=4),
        "fsck_closer": fsck(run="c", wrong=2, unknown=3, marked=1),
    },
    "fsck, all repaired": {"fsck": fsck(wrong=4, marked=4)},
    "a stalled feed": {"feed_stall": FeedStall.of(STALLED), "taken_ms": 300_000},
    "a stalled archive": {
        "archive": replace_struct(ARCHIVED, obstacle="The place is full.", action="Wait.")
    },
    "an archive without a base": {
        "archive": replace_struct(ARCHIVED, archived_ms=None, lag_s=300.0)
    },
    "a stale server of notifications": {
        "notify_servers": (
            ServerRecord(
                server="1", url="http://stor1:7319", started_ms=0, written_ms=60_000, age_s=40.0
            ),
            ServerRecord(server="2", url="http://stor2:7319", started_ms=0, written_ms=0),
            ServerRecord(
                server="3", url="http://stor3:7319", started_ms=0, written_ms=9, age_s=30.0
            ),
        )
    },
    "an archive behind": {"archive": replace_struct(ARCHIVED, lag_s=300.0)},
    "Java stalls the feed": {"feed_stall": FeedStall(reason=JAVA_LEADS)},
}


def test_each_condition_says_what_is_wrong_and_what_to_do(said: Said) -> None:
    found = {name: conditions(changed(HEALTHY, **changes)) for name, changes in SCENES.items()}

    assert {each.code for told in found.values() for each in told} == set(CONDITIONS)
    said(
        "conditions",
        {
            name: "\n".join(f"{c.code} {c.severity}: {c.fact}\n    {c.action}" for c in told)
            for name, told in found.items()
        },
    )


# --- Mutes ----------------------------------------------------------------------------------------

MUTE = Mute(since_ms=0, until_ms=60_000, severity="WARN", subjects=(B1,))


@pytest.mark.parametrize(
    ("mutes", "changes", "expected"),
    [
        pytest.param({"BOOKIES_LOST": MUTE}, {"lost": (B1,)}, 60_000, id="muted"),
        pytest.param({"BOOKIES_LOST": MUTE}, {"lost": (B1, B2)}, None, id="another bookie"),
        pytest.param({"BOOKIES_LOST": MUTE}, {"lost": (B1,), "taken_ms": 60_000}, None, id="over"),
        pytest.param(
            {"SAFETY_HOLD": replace(MUTE, subjects=())},
            {"hold": HoldOrder(since_ms=0)},
            None,
            id="it has become an error",
        ),
        pytest.param(
            {"NO_WRITABLE_BOOKIES": replace(MUTE, severity="ERROR", subjects=())},
            {"writable": (), "read_only": (B1,)},
            None,
            id="about data, so it is never muted",
        ),
    ],
)
def test_a_mute_applies_to_what_the_operator_knew(
    mutes: dict[str, Mute], changes: dict[str, Any], expected: int | None
) -> None:
    found = conditions(changed(HEALTHY, mutes=mutes, **changes))

    assert {each.code: each.muted_until_ms for each in found}[next(iter(mutes))] == expected
    assert exit_code(found) == (1 if expected is None else 0)


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

    assert why in fact(status, "BOOKIES_LOST")
    assert why not in fact(changed(status, by_bookie=((B1, 1),)), "BOOKIES_LOST")
    reformatted = changed(status, reformatted=(B2,))
    assert why in fact(reformatted, "BOOKIES_REFORMATTED")


def test_only_a_lost_bookie_that_no_ledger_names_can_be_decommissioned() -> None:
    state = replace(LOADED, named_by={B1: 0, B2: 1}, is_count_complete=True)
    status = changed(HEALTHY, **LEADER, leader_state=state, is_disabled=True)

    none, one = (
        the("BOOKIES_LOST", **LEADER, leader_state=state, lost=lost) for lost in ((B1,), (B1, B2))
    )

    assert codes(changed(status, lost=(B1,))) == ["AUTORECOVERY_DISABLED WARN", "BOOKIES_LOST INFO"]
    assert (none.data["named_by_ledgers"], one.data["named_by_ledgers"]) == ([], [B2])
    assert f"bookmender bookie decommission {B1}" in none.action
    assert "decommission" not in one.action


@pytest.mark.parametrize(
    ("naming", "changes", "named"),
    [
        pytest.param({}, {}, [B1], id="not counted"),
        pytest.param({B1: 2}, {}, [B1], id="named"),
        pytest.param({B1: 0}, {}, [], id="named by none"),
        pytest.param({B1: 0}, {"is_count_complete": False}, [B1], id="so far"),
        pytest.param(
            {B1: 0},
            {"ledger_map": replace(MAP, unreadable_count=1)},
            [B1],
            id="unreadable ledgers may name it",
        ),
    ],
)
def test_maintenance_says_what_it_affects(
    naming: dict[BookieId, int], changes: dict[str, Any], named: list[BookieId]
) -> None:
    state = replace(LOADED, **{"named_by": naming, "is_count_complete": True, **changes})
    told = the(
        "BOOKIES_IN_MAINTENANCE", ordered=(in_maintenance(B1),), leader_state=state, **LEADER
    )

    assert told.data == {"bookies": [B1], "until_ms": 60_000, "named_by_ledgers": named}
    assert ("No ledger names it" in told.fact) is (named == [])


@pytest.mark.parametrize(
    ("state", "expected", "exit_code_"),
    [
        pytest.param(unavailable(0), [], 0, id="none unavailable"),
        pytest.param(unavailable(1), ["LEDGERS_UNAVAILABLE ERROR"], 1, id="one unavailable"),
        pytest.param(TWO_NAMED, ["AVAILABILITY_UNKNOWN UNKNOWN"], 3, id="not counted yet"),
        pytest.param(None, ["AVAILABILITY_UNKNOWN UNKNOWN"], 3, id="Java leads"),
    ],
)
def test_maintenance_of_two_bookies_may_make_ledgers_unavailable(
    state: LeaderState | None, expected: list[str], exit_code_: int
) -> None:
    leader = {} if state is None else {**LEADER, "leader_state": state}
    status = changed(HEALTHY, ordered=TWO_WINDOWS, **leader)

    assert codes(status) == [*expected, "BOOKIES_IN_MAINTENANCE INFO"]
    assert exit_code(conditions(status)) == exit_code_


def test_unavailable_ledgers_name_the_bookies_to_start() -> None:
    for state, start in (
        (unavailable(12, a=1, b=12), f"Start {B2}."),
        (unavailable(12, a=12, b=12), f"Start one of {B1}, {B2}."),
        (unavailable(1, a=0, b=0), f"Start {B1}, {B2}."),
    ):
        assert the("LEDGERS_UNAVAILABLE", leader_state=state).action == start


@pytest.mark.parametrize(
    ("progress", "data"),
    [
        pytest.param([UNDER_WAY], {"bookies": [B1], "ledgers_left": 3}, id="one"),
        pytest.param([UNDER_WAY] * 2, {"bookies": [B1, B2], "ledgers_left": 6}, id="two"),
        pytest.param([UNDER_WAY, DRAINED], {"bookies": [B1], "ledgers_left": 3}, id="one is done"),
        pytest.param([DRAINED, DRAINED], None, id="both are drained"),
        pytest.param([UNDER_WAY, None], {"bookies": [B1, B2], "ledgers_left": None}, id="unknown"),
        pytest.param([IN_DOUBT], {"bookies": [B1], "ledgers_left": 0}, id="doubt"),
    ],
)
def test_drains_say_how_many_ledgers_are_left(
    progress: list[DrainProgress | None], data: dict[str, Any] | None
) -> None:
    found = conditions(changed(HEALTHY, ordered=draining(*progress)))

    assert [each.data for each in found] == ([] if data is None else [data])
    assert exit_code(found) == 0, "no copy is missing"


# --- Orders ---------------------------------------------------------------------------------------


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
    told = the("SAFETY_HOLD", hold=HOLD, **changes)

    assert "3 of 5 bookies went" in told.fact
    assert ("It ends soon" in told.fact) is ends_soon


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({}, True, id="a worker repairs"),
        pytest.param({"is_disabled": True}, False, id="disabled"),
        pytest.param({"nodes": AUDITOR}, False, id="no worker"),
    ],
)
def test_a_hold_says_what_is_repaired_meanwhile(changes: dict[str, Any], is_told: bool) -> None:
    given = {"hold": HOLD, "marked_count": 503, "nodes": WORKER, **changes}

    assert ("503 ledgers marked before" in the("SAFETY_HOLD", **given).fact) is is_told


def test_only_a_java_leader_that_is_enabled_ignores_the_hold() -> None:
    for changes, is_ignored in (({}, True), ({"is_disabled": True}, False), (ALONE, False)):
        told = the("SAFETY_HOLD", **{"leader": "java-1:3181", "hold": HOLD, **changes})

        assert told.data["is_ignored_by_leader"] is is_ignored
        assert ("bookmender disable" in told.action) is is_ignored


# --- Ledgers --------------------------------------------------------------------------------------


def test_blocked_repairs_are_counted_with_the_gravest_first() -> None:
    reasons = (Reason.OPEN_LEDGER_GRACE, Reason.NO_TARGET, Reason.NO_COPY, Reason.NO_TARGET)
    waiting = tuple(note(number, reason) for number, reason in enumerate(reasons))
    told = the("REPAIRS_BLOCKED", marked_count=9, waiting=waiting)

    assert list(told.data["by_reason"].items()) == [("no-copy", 1), ("no-target", 2)]
    assert (told.data["ledger_count"], told.data["first_ledgers"]) == (3, [1, 2, 3])
    assert told.action.startswith("Ledger 2: ")


def test_windows_are_named_only_if_every_ledger_waits_for_one() -> None:
    waiting = (replace(note(1, Reason.MAINTENANCE), next_try_ms=60_000),)
    one = {"marked_count": 1, "waiting": waiting}
    for changes, are_all in (
        ({}, True),
        ({"marked_count": 2}, False),
        ({"overtaken": frozenset({1})}, False),
    ):
        told = the("LEDGERS_UNDER_REPLICATED", **{**one, **changes})

        assert told.data["are_all_waiting_for_maintenance"] is are_all


TIME_RESOLVES = {
    Reason.OPEN_LEDGER_GRACE,
    Reason.OPEN_FRAGMENT,
    Reason.WRITER_ALIVE,
    Reason.NO_ANSWER,
    Reason.RECOVERY_FAILED,
    Reason.CONFLICTS,
    Reason.MAINTENANCE,
    Reason.HOLD,
    Reason.LEFT_TO_OTHERS,
}


@pytest.mark.parametrize("reason", Reason)
def test_reasons_that_time_alone_does_not_remove_block_a_repair(reason: Reason) -> None:
    status = changed(HEALTHY, marked_count=1, waiting=(note(1, reason),))

    assert ("REPAIRS_BLOCKED ERROR" in codes(status)) is (reason not in TIME_RESOLVES)


def test_a_hidden_directory_is_named_and_is_no_loading() -> None:
    hidden = replace(MAP, is_complete=False, hidden=("/ledgers/00/0099",))
    [told] = conditions(changed(HEALTHY, leader_state=LeaderState(ledger_map=hidden)))

    assert told.code == "LEDGER_METADATA_UNREADABLE"
    assert told.data["hidden_directories"] == ["/ledgers/00/0099"]


# --- fsck and the feed ----------------------------------------------------------------------------


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
    told = the("FSCK_FOUND_DAMAGE", **changes)

    assert told.severity == severity
    assert told.action.startswith(action_start)


def test_each_reason_of_a_stalled_feed_is_told() -> None:
    stalls = [FeedStall.of(replace(STALLED, reason=reason)) for reason in StallReason]

    told = [the("FEED_STALLED", feed_stall=stall) for stall in stalls]

    assert [each.data["reason"] for each in told] == [reason.value for reason in StallReason]
    assert all(each.action for each in told)
    java = the("FEED_STALLED", feed_stall=FeedStall(reason=JAVA_LEADS))
    assert java.data["reason"] == "java-leads"
